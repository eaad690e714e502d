"""Attacks that answer or ask: what they do when the product is broken on purpose, or their own tools are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audits import MODEL, PLAN, Short, lied_to

from provider.engine.engine import Engine
from provider.executor.base import BaseExecutor
from security import audit
from security.attacks import active
from security.attacks.active import POISONED_ROWS, CanaryRows, LyingProvider, Poison
from security.recordings.executors import AuditError
from security.views.public_model import PublicModel
from shared.wire.header import Direction
from tenant_sdk.products import mask_sources, verifier

RNG = np.random.default_rng(0)


def test_answers_that_are_checked(tmp_path: Path) -> None:
    result, refuted = lied_to(tmp_path)
    assert refuted == set()
    assert [finding.success.value for finding in result.findings] == [1.0, 0.0, 1.0]


def test_half_answers_that_are_checked(tmp_path: Path) -> None:
    """Also if they are right when they are asked for again, or wrong by as much as rounding."""
    result, refuted = lied_to(tmp_path, "half")
    assert refuted == set()
    assert [finding.success.value for finding in result.findings] == [1.0, 1.0, 0.0, 1.0, 1.0]


def test_answers_that_nobody_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier.Verifier, "fingerprint", lambda *_: None)
    assert lied_to(tmp_path)[1] == {"verified", "verified-effects"}


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
def test_one_direction_that_nobody_checks(
    direction: Direction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = verifier.Verifier.fingerprint

    def lenient(self: Any, kind: Any, product: Any) -> Any:
        made = fingerprint(self, kind, product)
        return None if kind.direction == direction else made

    monkeypatch.setattr(verifier.Verifier, "fingerprint", lenient)
    result, refuted = lied_to(tmp_path)
    assert refuted == {"verified", "verified-effects"}
    assert {finding.success.value for finding in result.findings} == {0.0, 0.5}


def test_effects_that_are_not_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that has its effects from elsewhere is not lied to, and the audit must not pass that over."""
    there = mask_sources.LocalRing(MODEL, BaseExecutor(MODEL, numerics="ring").manifest)
    monkeypatch.setattr(
        mask_sources.ExecutorSource, "seed_effect", lambda _, *asked: there.seed_effect(*asked)
    )
    with pytest.raises(AuditError, match="told once, not 0 times"):
        lied_to(tmp_path)


def test_a_liar_that_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LyingProvider, "submit", Engine.submit)
    with pytest.raises(AuditError):
        lied_to(tmp_path)


@pytest.mark.parametrize("bit", range(32))
def test_every_bit_can_be_altered(bit: int) -> None:
    answer = torch.from_numpy(RNG.integers(-(2**31), 2**31, (POISONED_ROWS, 6)).astype(np.int32))
    changed = (active._altered("one bit", bit, answer, answer, RNG) ^ answer).view(-1)
    assert changed[changed != 0].tolist() == [(1 << bit) - (1 << 32) * (bit == 31)]


@pytest.mark.parametrize("kind", Poison.LIES)
def test_a_lie_is_another_answer(kind: str) -> None:
    answer, old = (torch.from_numpy(RNG.integers(-99, 99, (POISONED_ROWS, 6)).astype(np.int32)) for _ in "ab")
    lie = active._altered(kind, 3, answer, old, RNG)
    assert lie.shape == answer.shape
    assert not torch.equal(lie, answer)


@pytest.mark.parametrize("kind", [*Poison.LIES, *Poison.SMALL_LIES])
def test_a_lie_about_a_half_is_another_half(kind: str) -> None:
    """And one that is not called small is beyond what rounding does to a row of some hundred numbers."""
    shape = (POISONED_ROWS, 300)
    answer, old = (torch.from_numpy(RNG.integers(-9999, 9999, shape).astype(np.int16)) for _ in "ab")
    lie = active._altered(kind, 31, answer, old, RNG)
    assert lie.dtype == torch.int16
    errors = (lie.double() - answer.double()).norm(dim=1)
    assert errors.max() > (7 * 0.5 * 300**0.5 if kind in Poison.LIES else 0.0)


@pytest.fixture(scope="module", params=["float32", "ring"])
def canaries(request: pytest.FixtureRequest) -> Any:
    executor = BaseExecutor(MODEL, numerics=request.param)
    public = PublicModel(MODEL, executor.manifest)
    weight = public.weight(1) if request.param == "float32" else public.planes(1).planes[0].int()
    return lambda: CanaryRows(320, weight).attack(executor, RNG)


def test_canaries_come_home(canaries: Any) -> None:
    found = canaries()
    assert (found.wrong, found.replies) == (0, 320)


def test_canaries_that_always_get_another_tenants_answer(
    canaries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first time, and always the same."""
    submit = Engine.submit

    def another(self: Engine, tenant: str, session: Any, header: Any, rows: torch.Tensor, done: Any) -> None:
        submit(self, tenant, session, header, rows.roll(1, 1), done)

    monkeypatch.setattr(Engine, "submit", another)
    assert canaries().wrong == 320


@pytest.mark.parametrize("enough", [0, 1000])
def test_canaries_here_and_elsewhere(enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, or in others if there are enough: here a thread, as models are loaded one by one."""
    asked = list[int]()

    def pool(processes: int, mp_context: object) -> ThreadPoolExecutor:
        asked.append(processes)
        return ThreadPoolExecutor(1)

    monkeypatch.setattr(audit, "PROCESS_REPLIES", enough)
    monkeypatch.setattr(audit, "ProcessPoolExecutor", pool)
    found = Short(replace(PLAN, replies=640))._canaries()
    assert [(each.wrong, each.replies) for each in found] == [(0, 320)] * 2
    assert asked == ([] if enough else [2])
