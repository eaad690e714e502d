"""Attacks by a provider that does more than watch: on products broken on purpose, and on streams made up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audits import PLAN, Short, lines

import security
from security.attacks.streams import (
    KnownTexts,
    SpeculationWatch,
    Stream,
    TopicFromTraffic,
    guess_from_labelled,
)
from security.trials.context import Trials
from security.trials.hostile import HostileProvider
from security.verdicts.claims import CLAIMS
from security.verdicts.findings import Finding, HostileFinding
from security.verdicts.judges import STATISTICAL
from security.verdicts.plan import FULL_PLAN, GATEWAY, PROVIDER, AuditResult
from security.verdicts.statistics import rate
from tenant_sdk.model import loading as model_loading
from tenant_sdk.products import masks, one_time_masks, verification

RNG = np.random.default_rng(0)
SMALL = replace(PLAN, oracle_lies=8, imprinted_steps=4, speculated_prompts=8, topic_prompts=2, known_texts=12)


@contextmanager
def provider(folder: Path) -> Iterator[HostileProvider]:
    audit = Short()
    with audit.executors(folder) as parties:
        yield HostileProvider(Trials(parties, folder, SMALL, lines(), RNG, audit.confidence))


def judged(hostile: list[HostileFinding]) -> dict[str, bool]:
    """Claims about hostile providers, and controls, that say something of these attacks."""
    findings = [each for h in hostile for each in (h.defended, h.control)]
    result = AuditResult(findings, hostile)
    result.about["confidence_of_one_interval"] = Short().confidence
    names = {h.attack for h in hostile}
    verdicts = {c.identity: c.verdict(result) for c in CLAIMS if names & set(c.attack.split(", "))}
    return {name: verdict.holds for name, verdict in verdicts.items()}


def test_who_stops_says_nothing(tmp_path: Path) -> None:
    with provider(tmp_path) as hostile:
        assert judged(hostile.abort_oracle()) == {"abort-oracle": True, "control-abort-oracle": True}


def test_a_fingerprint_that_nobody_tries_is_an_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fits the row that has a zero where it is wrong, and not the other."""
    monkeypatch.setattr(verification.LiveFingerprints, "_try", lambda *_: None)
    with provider(tmp_path) as hostile:
        (found,) = hostile.abort_oracle()
    assert not found.same
    assert judged([found]) == {"abort-oracle": False, "control-abort-oracle": True}


def test_crafted_parameters_say_nothing_under_masks(tmp_path: Path) -> None:
    with provider(tmp_path) as hostile:
        assert judged(hostile.imprints()) == {"imprinted-parameters": True, "control-imprinted": True}


def test_crafted_parameters_without_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        one_time_masks.OneTimeMasks,
        "take",
        lambda self, kind, rows, **_: masks.NoMasks(self._shapes).take(kind, rows),
    )
    with provider(tmp_path) as hostile:
        found = hostile.imprints()
    assert [each.defended.success.value > 0.9 for each in found] == [True, True]
    assert judged(found) == {"imprinted-parameters": False, "control-imprinted": True}


def test_one_row_a_step_says_nothing(tmp_path: Path) -> None:
    with provider(tmp_path) as hostile:
        assert judged(hostile.speculation()) == {"no-speculation": True, "control-speculation": True}


def test_a_pace_hides_which_text_is_written(tmp_path: Path) -> None:
    with provider(tmp_path) as hostile:
        (found,) = hostile.known_texts()
        assert judged([found]) == {"paced-draft": True, "control-draft": True}, found


def test_speculation_that_nobody_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load: Callable[..., Any] = model_loading.load_model

    def eager(*given: Any, **options: Any) -> Any:
        model = load(*given, **options)
        model.generation_config.prompt_lookup_num_tokens = 8
        return model

    monkeypatch.setattr(model_loading, "load_model", eager)
    with provider(tmp_path) as hostile:
        (found,) = hostile.speculation()
    assert not found.same
    assert not judged([found])["no-speculation"]


def test_topics_of_different_lengths() -> None:
    """Are told apart; topics that differ in nothing are not, but for luck."""

    def streams(gap: float) -> list[Stream]:
        lengths = RNG.integers(10, 20, 400) + np.tile([0, gap], 200).astype(int)
        return [Stream((int(n), 1, 1), (0.0, *np.cumsum(RNG.uniform(1, 2, 2)))) for n in lengths]

    topics = [0, 1] * 200
    for gap, least, most in ((15, 0.9, 1.0), (0, 0.35, 0.65)):
        guesses = TopicFromTraffic().attack((streams(gap), topics[:200]), RNG)
        right = float(np.mean(guesses.numpy() == np.array(topics[200:])))
        assert least <= right <= most


def test_texts_that_differ_in_one_number() -> None:
    """One more pass, a later one, or more rows give a text away; noise alone does not."""

    def stream(text: int, what: str) -> Stream:
        passes = 5 + text if what == "passes" else 40
        late = np.where(np.arange(passes) == text, 0.3 if what == "times" else 0.0, 0.0)
        rows = (1 + (what == "rows" and at == text) for at in range(passes))
        return Stream(tuple(rows), tuple(np.arange(passes) + late + RNG.normal(0, 0.01, passes)))

    for what, least, most in (("passes", 0.9, 1), ("times", 0.9, 1), ("rows", 0.9, 1), ("nothing", 0, 0.25)):
        texts = [[stream(text, what) for _ in range(3)] for text in range(32)]
        guesses = KnownTexts().attack(([text[:2] for text in texts], [text[2] for text in texts]), RNG)
        assert least <= float(np.mean(guesses.numpy() == np.arange(32))) <= most, what


def test_streams_that_are_all_the_same_give_one_guess() -> None:
    same = [Stream((24, 1, 1), (0.0, 1.0, 2.0))] * 8
    assert not SpeculationWatch().attack((same, [0, 1] * 2), RNG).any()
    assert guess_from_labelled([1.0, 5.0, 2.0, 4.0], ["a"] * 4, [0, 1]).tolist() == [False, True]


@pytest.mark.parametrize(
    ("right", "trials", "holds", "weak"), [(4, 4, True, True), (12, 12, True, False), (13, 16, False, False)]
)
def test_a_control_that_could_pass_by_luck_is_weak(right: int, trials: int, holds: bool, weak: bool) -> None:
    confidence = 1 - FULL_PLAN.family_error / STATISTICAL
    finding = Finding("speculation", "", "", "", rate(right, trials, confidence), 0.5)
    result = AuditResult(hostile=[HostileFinding("speculation", "", "", finding, finding)])
    result.about["confidence_of_one_interval"] = confidence
    claim = next(claim for claim in CLAIMS if claim.identity == "control-speculation")
    verdict = claim.verdict(result)
    assert (verdict.holds, verdict.weak) == (holds, weak)


@pytest.mark.parametrize(("trials", "weak"), [(8, True), (30, False)])
def test_controls_that_are_no_attacks_by_a_hostile_party_can_be_weak_too(trials: int, weak: bool) -> None:
    confidence = 1 - FULL_PLAN.family_error / STATISTICAL
    finding = Finding("cached prefix", GATEWAY, PROVIDER, "", rate(trials, trials, confidence), 0.5)
    result = AuditResult(findings=[finding])
    result.about["confidence_of_one_interval"] = confidence
    claim = next(claim for claim in CLAIMS if claim.identity == "control-gateway-cache")
    assert (claim.verdict(result).holds, claim.verdict(result).weak) == (True, weak)


def test_a_full_audit_has_trials_enough_for_its_controls() -> None:
    confidence = 1 - FULL_PLAN.family_error / STATISTICAL
    for trials in (FULL_PLAN.oracle_lies // 2, FULL_PLAN.speculated_prompts, FULL_PLAN.served_prompts):
        assert rate(trials, trials, confidence).low > 0.5


def test_weak_controls_are_called_so_in_the_document() -> None:
    """Where the interval that was measured last holds chance."""
    text = (Path(security.__file__).parent / "CLAIMS.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `control")]
    measured = [
        (row, re.search(r"interval ([0-9.]+) % to [0-9.]+ %; chance ([0-9.]+) %", row)) for row in rows
    ]
    assert sum(found is not None for _, found in measured) > 5
    for row, found in measured:
        weak = found is not None and float(found[1]) <= float(found[2])
        assert row.endswith("weak |") == weak, row
