"""What counts as chance: products broken on purpose whose attacks score below it, or in frequencies alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audits import MODEL, Short
from torch.nn.functional import silu

from provider.executor.base import BaseExecutor
from security.recordings.capture import ONE_TIME
from security.trials.passive import PassiveAttacks
from security.verdicts.claims import CLAIMS
from security.verdicts.findings import Finding
from security.verdicts.judges import IMPRINTS, LEARNING_ATTACKS, STATISTICAL, against_one_time
from security.verdicts.plan import PROVIDER, AuditResult
from security.verdicts.statistics import Estimate, missing, rate
from security.views.adversaries import provider_view
from security.views.public_model import PublicModel
from shared.wire.header import Direction
from tenant_sdk.connection.remote import LazyResult
from tenant_sdk.products import masks, one_time_masks, ring_products

RNG = np.random.default_rng(0)
GAME_BATCH = 2048  # rows of a request of the game


def without_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        one_time_masks.OneTimeMasks,
        "take",
        lambda self, kind, rows, **_: masks.NoMasks(self._shapes).take(kind, rows),
    )


def found(audit: Short, attack: str) -> Finding:
    return next(f for f in audit.result.findings if (f.attack, f.sees) == (attack, PROVIDER))


def attacked(audit: Short, folder: Path) -> PassiveAttacks:
    passive = audit.passive(folder)
    evidence = passive.evidence
    captured = evidence.captured[ONE_TIME]
    passive.prepare()
    passive._on(ONE_TIME, PROVIDER, provider_view(evidence.ring_public, captured.provider), captured.truth)
    return passive


def test_a_game_that_is_always_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product without masks that from the second half on sends the other one of the two inputs."""
    submit, batches = ring_products.RingProducts.submit, []

    def flipping(
        self: Any, group: int, direction: Any, members: int, tensors: list[torch.Tensor], *more: Any
    ) -> Any:
        if len(tensors[0]) == GAME_BATCH:
            batches.append(tensors)
            if len(batches) > 1:
                tensors = [3.0 - tensor for tensor in tensors]
        return submit(self, group, direction, members, tensors, *more)

    without_masks(monkeypatch)
    monkeypatch.setattr(ring_products.RingProducts, "submit", flipping)
    audit = Short()
    audit.plan = replace(audit.plan, game_rows=2 * GAME_BATCH)
    passive = audit.passive(tmp_path)
    passive._distinguish(ONE_TIME, passive.evidence.games[ONE_TIME])
    finding = found(audit, "distinguishing game")
    assert finding.success.value == -1
    assert not finding.beats_chance
    assert "one-time-indistinguishable" in audit.refuted()


def test_an_adapter_copied_with_its_sign_flipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product without masks that sends what the adapter's negative would have made of the layer."""
    public = PublicModel(MODEL, BaseExecutor(MODEL, numerics="ring").manifest)
    into, out = (public.group_of(f"layers.0.mlp.{name}") for name in ("up_proj", "down_proj"))
    gate, up = public.weight(into).chunk(2)
    product, tuned, inputs = ring_products.RingProducts.submit, 1024, {}

    def mirrored(
        self: Any, group: int, direction: Any, members: int, tensors: list[torch.Tensor], *more: Any
    ) -> Any:
        if direction == Direction.FORWARD and len(tensors[0]) == tuned:
            inputs[group] = tensors[0]
            if group == out:
                x = inputs[into]
                tensors = [2 * silu(x @ gate.T) * (x @ up.T) - tensors[0]]
        return product(self, group, direction, members, tensors, *more)

    without_masks(monkeypatch)
    monkeypatch.setattr(ring_products.RingProducts, "submit", mirrored)
    audit = Short()
    audit.plan = replace(audit.plan, size=replace(audit.plan.size, tokens=tuned))
    attacked(audit, tmp_path)
    finding = found(audit, "adapter extraction")
    assert finding.success.value < -0.99
    assert not finding.beats_chance
    assert "one-time-adapter" in audit.refuted()


def test_rows_without_masks_in_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They show which tokens a tenant uses, not where: guesses are right by frequency alone."""
    submit = ring_products.RingProducts.submit

    def shuffled(
        self: Any, group: int, direction: Any, members: int, tensors: list[torch.Tensor], *more: Any
    ) -> Any:
        if group or direction == Direction.BACKWARD:
            return submit(self, group, direction, members, tensors, *more)
        order = torch.from_numpy(RNG.permutation(len(tensors[0])))
        pending = submit(self, group, direction, members, [tensor[order] for tensor in tensors], *more)
        return LazyResult(lambda: [answer[order.argsort()] for answer in pending.result()])

    without_masks(monkeypatch)
    monkeypatch.setattr(ring_products.RingProducts, "submit", shuffled)
    audit = Short()
    audit.plan = replace(audit.plan, size=replace(audit.plan.size, repeats=6))
    attacked(audit, tmp_path)
    matching = found(audit, "vocabulary matching")
    assert matching.success.value < 0.03
    assert matching.beats_chance
    assert "one-time-tokens" in audit.refuted()


def test_what_subtracts_masks_is_no_attack_where_none_is_known(tmp_path: Path) -> None:
    audit = Short()
    attacked(audit, tmp_path)
    attacks = {f.attack for f in audit.result.findings}
    assert "vocabulary matching" in attacks
    assert "known-mask subtraction" not in attacks
    tried = {f.attack for f in against_one_time(audit.result)} | {"distinguishing game"}
    assert len(tried) + len(IMPRINTS) + 2 == STATISTICAL  # and the p-values of bytes and of seeds


@pytest.mark.parametrize(
    ("identity", "attack", "value"),
    [
        ("one-time-adapter", "adapter extraction", 0.9),
        ("one-time-indistinguishable", "distinguishing game", 0.9),
    ],
)
def test_both_sides_of_chance_refute(identity: str, attack: str, value: float) -> None:
    claim = next(claim for claim in CLAIMS if claim.identity == identity)
    for success, holds in ((0.0, True), (value, False), (-value, False)):
        estimate = Estimate(success, success - 0.01, success + 0.01, 99)
        verdict = claim.verdict(AuditResult([Finding(attack, ONE_TIME, PROVIDER, "", estimate, 0.0)]))
        assert verdict.holds == holds


@pytest.mark.parametrize(("chance", "trials"), [(0.0147, 3652), (0.5, 140_000)])
def test_what_is_missing(chance: float, trials: int) -> None:
    """One success fewer is below chance with its interval, one more is not."""
    below = missing(chance, trials, 0.999)
    assert below is not None
    successes = round((chance - below) * trials)
    assert rate(successes, trials, 0.999).high < chance
    assert rate(successes + 1, trials, 0.999).high >= chance


@pytest.mark.parametrize(("hits", "holds"), [(25, True), (1, False), (80, False)])
def test_too_few_right_guesses_refute_too(hits: int, holds: bool) -> None:
    claim = next(claim for claim in CLAIMS if claim.identity == "one-time-training")
    every = [
        Finding(attack, ONE_TIME, PROVIDER, "", rate(hits, 5000, 0.999), 0.005) for attack in LEARNING_ATTACKS
    ]
    assert claim.verdict(AuditResult(every)).holds == holds


def test_where_too_few_are_expected_nothing_is_missing() -> None:
    assert missing(0.0012, 1260, 0.999) is None
    assert rate(0, 1260, 0.999).high > 0.0012
