"""The passive attacks on a transcript from a real deployment, where nobody knows the truth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.table import Table

from security.attacks.base import TokenGuess, nearest, unit
from security.attacks.gradients import LabelRecovery
from security.attacks.masking import Uniformity
from security.attacks.seeds import SeedPrediction
from security.attacks.tokens import (
    Averaging,
    KnownMaskSubtraction,
    MaskReuse,
    NoiseAware,
    SubspaceProjection,
    VocabularyMatching,
)
from security.attacks.traffic import TrafficAnalysis
from security.public_model import PublicModel
from security.transcript import TranscriptError, read_transcript
from security.views import MaskSourceView, View, mask_source_view, products_of, provider_view, requests_of
from shared.checkpoint import Checkpoint
from shared.errors import ConfigurationError

VIEWS = ("provider", "mask-source")


def attack_transcript(
    transcript: Path,
    model: Path,
    view: str,
    *,
    cut: bool,
    show: int,
    seed: int,
    stage: Callable[[str], Any],
) -> list[Table]:
    """What each attack reads out of a transcript, for each tenant: tables to print.

    A guess is worth something where it is confident: ``match`` is the mean cosine between a row and what the
    guessed token would have sent. Rows under one-time masks match no better than random ones, whose
    figure stands beside it.

    Raises:
        TranscriptError: it is cut, of another model or version, or holds nothing of the kind.
        ConfigurationError: ``view`` is none of VIEWS.
    """
    if view not in VIEWS:
        raise ConfigurationError(f"--view is {' or '.join(VIEWS)}, not {view!r}")
    recorded = read_transcript(transcript, cut=cut)
    if not Checkpoint(model).holds(recorded.manifest):
        raise TranscriptError(
            f"the transcript is of another model than {model}: {recorded.manifest.model}, digest "
            f"{recorded.manifest.digest[:16]}"
        )
    public = PublicModel(model, recorded.manifest)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        tokenizer = None  # the checkpoint has none: ids are shown
    tables = []
    for tenant in dict.fromkeys(recorded.tenants.values()):
        requests = requests_of([recorded], tenant)
        rng = np.random.default_rng(seed)
        if view == "mask-source":
            seeds = mask_source_view(requests)
            if seeds.seeds:
                tables.append(_seed_table(tenant, seeds, rng))
            continue
        if not products_of(requests):
            continue
        with stage(f"attacks on what tenant {tenant} sent"):
            tables.append(_table(tenant, provider_view(public, requests), tokenizer, show, rng))
        traffic = TrafficAnalysis().attack(requests, np.random.default_rng(seed))
        lengths = ", ".join(map(str, traffic.prompts[:20]))
        tables[-1].caption = (
            f"{len(products_of(requests)):,} products; passes of more rows than a decode step: {lengths}; "
            + (f"trains; gradients end at group {traffic.lowest}" if traffic.training else "does not train")
        )
    if not tables:
        wanted, other = ("seeds", "provider") if view == "mask-source" else ("rows", "mask-source")
        raise TranscriptError(
            f"{transcript} holds no {wanted}, so there is nothing to attack as {view}; if tenants used this "
            f"executor as something else: --view {other}"
        )
    return tables


def _seed_table(tenant: str, seen: MaskSourceView, rng: np.random.Generator) -> Table:
    """A mask source knows no row, so there is nothing to read out of its masks but the next seed."""
    found = SeedPrediction().attack(seen, rng)
    table = Table(title=f"tenant {tenant}, as {seen.sees} sees it")
    for column in ("attack", "found"):
        table.add_column(column, overflow="fold")
    table.add_row(
        SeedPrediction.name,
        f"p = {found.p_value:.3g} ({found.worst}); {found.repeated} repeated of {found.count:,} seeds; "
        f"{found.others} other requests",
    )
    return table


def _table(tenant: str, view: View, tokenizer: Any, show: int, rng: np.random.Generator) -> Table:
    table = Table(title=f"tenant {tenant}, as {view.sees} sees it")
    for column in ("attack", "match", "random rows", "first guesses"):
        table.add_column(column, overflow="fold")
    inputs = view.public.first_inputs
    noise = torch.from_numpy(rng.standard_normal((256, inputs.shape[1])).astype(np.float32))
    chance = _match(noise, nearest(noise, inputs), inputs)
    for attack in (
        VocabularyMatching(),
        KnownMaskSubtraction(),
        MaskReuse(),
        SubspaceProjection(),
        NoiseAware(),
        Averaging(),
    ):
        if isinstance(attack, KnownMaskSubtraction) and not view.masks:
            continue  # this party knows none to subtract
        guess: TokenGuess = attack.attack(view, rng)
        ids = guess.tokens[:show].tolist()
        words = tokenizer.decode(ids) if tokenizer is not None else " ".join(map(str, ids))
        match = f"{_match(guess.estimates, guess.tokens, inputs):.3f}" if len(ids) else "-"
        table.add_row(attack.name, match, f"{chance:.3f}", repr(words) if ids else "nothing of the kind")
    labels = LabelRecovery().attack(view, rng)
    if labels:
        ids = labels[0][:show].tolist()
        table.add_row(
            LabelRecovery.name, "", "", repr(tokenizer.decode(ids)) if tokenizer is not None else str(ids)
        )
    found = Uniformity().attack(view, rng)
    table.add_row(
        Uniformity.name,
        "",
        "",
        f"p = {found.p_value:.3g} ({found.worst}); {found.repeated_blocks} repeated blocks, "
        f"{found.repeated_tops} repeated runs of top bytes",
    )
    return table


def _match(rows: torch.Tensor, tokens: torch.Tensor, inputs: torch.Tensor) -> float:
    return float((unit(rows) * unit(inputs)[tokens]).sum(1).mean()) if len(rows) else 0.0
