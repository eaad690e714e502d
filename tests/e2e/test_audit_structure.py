"""Who is sent what, and whether masks and seeds serve once: broken on purpose, and what is noticed."""

from __future__ import annotations

import hashlib
import itertools
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audits import MODEL, Short, structure

from provider.executor.base import BaseExecutor
from provider.observe.transcript import TranscriptWriter
from security.attacks.masking import Uniformity
from security.attacks.seeds import SeedPrediction
from security.attacks.tokens import KnownMaskSubtraction
from security.recordings import capture
from security.recordings.capture import ONE_TIME, RING_BANK
from security.recordings.executors import AuditError, ExecutorProcess
from security.recordings.transcript import TranscriptError
from security.recordings.workload import GroundTruth, SentRequest
from security.verdicts.claims import CLAIMS
from security.verdicts.findings import Finding
from security.verdicts.judges import LEARNING_ATTACKS, STATISTICAL, TOKEN_ATTACKS
from security.verdicts.plan import BOTH, PROVIDER, SOURCE, AuditResult
from security.verdicts.statistics import Estimate, rate
from security.views.adversaries import MaskSourceView, ObservedRequest, View, check_aligned, provider_view
from shared.ring.mask_stream import MaskStream
from shared.wire.header import Direction
from tenant_sdk.products import masks, one_time_masks, ring_products

RNG = np.random.default_rng(0)
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def drawing(monkeypatch: pytest.MonkeyPatch, entropy: Callable[[int], bytes]) -> None:
    """Seeds come from there."""
    start = one_time_masks.OneTimeMasks.__init__

    def other(self: Any, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options | {"entropy": entropy})

    monkeypatch.setattr(one_time_masks.OneTimeMasks, "__init__", other)


def test_an_honest_product(tmp_path: Path) -> None:
    evidence, result, refuted = structure(tmp_path, crash=True)
    assert refuted == set()
    assert set(evidence.operations) == {PROVIDER, SOURCE}
    assert result.seeds is not None
    assert result.seeds.count == evidence.operations[SOURCE]["SEED_EFFECT"]


def test_a_mask_used_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawing(monkeypatch, bytes)
    assert {"one-time-uniform", "one-time-mask-source"} <= structure(tmp_path)[2]


def test_a_mask_with_one_bit_that_is_not_uniform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = MaskStream.draw
    monkeypatch.setattr(MaskStream, "draw", lambda self, *shape: draw(self, *shape) & ~(1 << 9))
    assert structure(tmp_path)[2] == {"one-time-uniform"}


def test_seeds_that_count_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a secret start, so that neither seeds nor masks repeat."""
    numbers = itertools.count(int.from_bytes(secrets.token_bytes(31)))
    drawing(monkeypatch, lambda size: next(numbers).to_bytes(size, "big"))
    assert structure(tmp_path)[2] == {"one-time-mask-source"}


def test_seeds_that_the_provider_gets_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, request_effects = ring_products.RingProducts.__init__, one_time_masks.OneTimeMasks._request_effects

    def knowing(self: Any, remote: Any, masks: Any, *more: Any, **options: Any) -> None:
        masks._provider = remote
        start(self, remote, masks, *more, **options)

    def telling(self: Any, kind: Any, rows: int, *more: Any) -> None:
        draw, drawn = self._entropy, []
        self._entropy = lambda size: drawn.append(draw(size)) or drawn[-1]
        request_effects(self, kind, rows, *more)
        self._entropy = draw
        self._provider.seed_effect(kind, rows, drawn[0])

    monkeypatch.setattr(ring_products.RingProducts, "__init__", knowing)
    monkeypatch.setattr(one_time_masks.OneTimeMasks, "_request_effects", telling)
    audit = Short()
    passive = audit.passive(tmp_path)
    passive.structure()
    assert audit.refuted() == {"one-time-separation"}
    captured = passive.evidence.captured[ONE_TIME]
    passive.prepare()
    view = provider_view(passive.evidence.ring_public, captured.provider)
    passive._on(ONE_TIME, PROVIDER, view, captured.truth)
    found = next(f for f in audit.result.findings if f.attack == KnownMaskSubtraction.name)
    assert found.success.value > 0.95 > 0.05 > (found.chance or 1)
    assert "one-time-tokens" in audit.refuted()


def test_one_stream_of_masks_for_two_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind's n-th seed is every other kind's n-th: no block repeats where rows differ."""
    request_effects, requests, secret = (
        one_time_masks.OneTimeMasks._request_effects,
        Counter[Any](),
        secrets.token_bytes(32),
    )

    def again(self: Any, kind: Any, rows: int, *more: Any) -> None:
        requests[id(self), kind] += 1
        number = requests[id(self), kind]
        self._entropy = lambda size: hashlib.sha256(secret + number.to_bytes(4)).digest()
        request_effects(self, kind, rows, *more)

    monkeypatch.setattr(one_time_masks.OneTimeMasks, "_request_effects", again)
    assert structure(tmp_path)[2] == {"one-time-uniform", "one-time-mask-source"}


def test_a_seed_that_serves_again_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which repeats the first seed of the pass, so the first rows of the pass that is tried again."""
    request_effects = one_time_masks.OneTimeMasks._request_effects

    def thrifty(self: Any, kind: Any, rows: int, *more: Any) -> None:
        draw, kept = self._entropy, self.__dict__.setdefault("kept", {})
        failed = self._paused

        def entropy(size: int) -> bytes:
            if not failed or kind not in kept:
                kept[kind] = draw(size)
            return bytes(kept[kind])

        self._entropy = entropy
        request_effects(self, kind, rows, *more)
        self._entropy = draw

    monkeypatch.setattr(one_time_masks.OneTimeMasks, "_request_effects", thrifty)
    evidence, result, refuted = structure(tmp_path, crash=True)
    assert refuted == {"one-time-uniform", "one-time-mask-source"}
    assert result.seeds is not None
    assert result.seeds.repeated < 10  # what went on without a failure had seeds of its own
    assert len(evidence.crash) > 100


def test_a_tensor_in_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = ring_products.RingProducts.submit

    def chatty(
        self: Any, group: int, direction: Any, members: int, tensors: list[torch.Tensor], *more: Any
    ) -> Any:
        logging.getLogger("tenant_sdk.products.ring_products").debug("sending %s", tensors)
        return submit(self, group, direction, members, tensors, *more)

    monkeypatch.setattr(ring_products.RingProducts, "submit", chatty)
    _, result, refuted = structure(tmp_path)
    assert refuted == {"silent"}
    assert all(found.endswith("in the tenant's log") for found in result.figures["secrets in logs"])


def test_an_object_that_prints_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = MaskStream.__init__

    def keeping(self: Any, seed: bytes) -> None:
        start(self, seed)
        self.seed = bytes(seed)

    monkeypatch.setattr(MaskStream, "__init__", keeping)
    monkeypatch.setattr(MaskStream, "__repr__", lambda self: f"MaskStream({self.seed!r})")
    _, result, refuted = structure(tmp_path)
    assert refuted == {"silent"}
    assert set(result.figures["secrets in logs"]) == {"a seed in the tenant's objects, printed"}


def test_a_search_that_finds_nothing_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture.LogCapture, "emit", lambda *_: None)
    assert structure(tmp_path)[2] == {"control-planted"}


def test_gradients_without_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = one_time_masks.OneTimeMasks.take

    def bare(self: Any, kind: Any, rows: int, **options: Any) -> Any:
        if kind.direction == BACKWARD:
            return masks.NoMasks(self._shapes).take(kind, rows)
        return take(self, kind, rows, **options)

    monkeypatch.setattr(one_time_masks.OneTimeMasks, "take", bare)
    audit = Short()
    audit.passive(tmp_path).attack()
    assert {"one-time-training", "one-time-uniform"} <= audit.refuted()


def test_an_attack_that_crashes_is_a_failed_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(KnownMaskSubtraction, "attack", crash)
    with pytest.raises(ZeroDivisionError):
        Short().passive(tmp_path).attack()


def seen(raw: torch.Tensor, group: int = 0, direction: int = FORWARD) -> ObservedRequest:
    return ObservedRequest(group, direction, 1, 1, 0.0, raw)


def integers(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.integers(-(2**31), 2**31, shape).astype(np.int32))


def test_one_mask_under_two_rows_of_different_widths() -> None:
    mask = integers(64 * 64)
    rows = [(mask.view(64, 64), 0), (mask.view(32, 128), 1), (integers(300, 64), 2)]
    sent = [seen(masks + torch.randint(-(2**18), 2**18, masks.shape), group) for masks, group in rows]
    view = View(None, [seen(each.raw.int(), each.group) for each in sent])  # type: ignore[arg-type]
    tested = Uniformity().attack(view, RNG)
    assert tested.repeated_blocks == 0
    assert tested.repeated_tops > 100
    view.requests.pop(1)
    assert Uniformity().attack(view, RNG).repeated_tops == 0


def test_nothing_to_test_is_an_error() -> None:
    with pytest.raises(AuditError, match="no rows"):
        Uniformity().attack(View(None, []), RNG)  # type: ignore[arg-type]


SEEDS = [RNG.bytes(32) for _ in range(400)]


@pytest.mark.parametrize(
    ("seeds", "good"),
    [
        (SEEDS, True),
        ([*SEEDS, SEEDS[7]], False),
        ([seed[:16] + bytes(16) for seed in SEEDS], False),
        ([bytes([seed[0] | 64]) + seed[1:] for seed in SEEDS], False),
        ([bytes(byte & 127 for byte in seed) for seed in SEEDS], False),
        ([(2**255 + 7 * n).to_bytes(32, "little") for n in range(400)], False),
        ([(2**255 + n * n).to_bytes(32, "big") for n in range(400)], False),
        ([*SEEDS, b"short"], False),
        (SEEDS[:20], False),
        ([], False),
    ],
)
def test_seeds(seeds: list[bytes], good: bool) -> None:
    result = AuditResult(about={"confidence_of_one_interval": 1 - 1e-4 / STATISTICAL})
    result.seeds = SeedPrediction().attack(MaskSourceView(seeds), RNG)
    claim = next(claim for claim in CLAIMS if claim.identity == "one-time-mask-source")
    assert claim.verdict(result).holds == good
    result.seeds = SeedPrediction().attack(MaskSourceView(seeds, others=1), RNG)
    assert not claim.verdict(result).holds


@pytest.mark.parametrize(
    ("provider", "source", "good"),
    [
        ({"PRODUCT": 3}, {"SEED_EFFECT": 5}, True),
        ({"PRODUCT": 3, "SEED_EFFECT": 1}, {"SEED_EFFECT": 5}, False),
        ({"PRODUCT": 3}, {"SEED_EFFECT": 5, "EFFECT": 1}, False),
        ({"PRODUCT": 3}, {"SEED_EFFECT": 5, "PRODUCT": 1}, False),
        ({"PRODUCT": 3}, {}, False),
        ({}, {"SEED_EFFECT": 5}, False),
    ],
)
def test_separation(provider: dict[str, int], source: dict[str, int], good: bool) -> None:
    result = AuditResult(figures={"operations": {PROVIDER: provider, SOURCE: source}})
    claim = next(claim for claim in CLAIMS if claim.identity == "one-time-separation")
    assert claim.verdict(result).holds == good


@pytest.mark.parametrize("identity", ["one-time-tokens", "one-time-training"])
def test_an_attack_that_was_not_scored_refutes(identity: str) -> None:
    claim = next(claim for claim in CLAIMS if claim.identity == identity)
    every = [
        Finding(attack, ONE_TIME, PROVIDER, "", rate(1, 1000), 0.001)
        for attack in (*TOKEN_ATTACKS, *LEARNING_ATTACKS)
    ]
    assert claim.verdict(AuditResult(findings=every)).holds
    for i, finding in enumerate(every):
        if finding.attack not in claim.attack:
            continue
        without = every[:i] + every[i + 1 :]
        assert claim.verdict(AuditResult(findings=without)).figure == f"not measured: {finding.attack}"
        empty = Finding(finding.attack, ONE_TIME, PROVIDER, "", Estimate(0.0, 0.0, 0.0, 0), 0.0)
        assert not claim.verdict(AuditResult(findings=[*without, empty])).holds


def test_rows_and_truth_must_agree_request_by_request() -> None:
    def view(*rows: int) -> View:
        requests = [seen(torch.zeros(count, 4)) for count in rows] + [seen(torch.zeros(7, 4), 3, BACKWARD)]
        return View(None, requests)  # type: ignore[arg-type]

    truth = GroundTruth([SentRequest(0, FORWARD, 2), SentRequest(3, BACKWARD, 7), SentRequest(0, FORWARD, 3)])
    check_aligned(view(2, 3), truth, "a test")
    for wrong in (view(3, 2), view(5), view(2, 3, 1), view()):
        with pytest.raises(AuditError, match=r"a test .* group 0"):
            check_aligned(wrong, truth, "a test")
    truth.sent.append(SentRequest(5, FORWARD, 1))
    with pytest.raises(AuditError, match="group 5"):
        check_aligned(view(2, 3), truth, "a test")


BROKEN = "broken after messages"
ON_RING = ("search in hidden states", "label recovery", "gradient span check", "adapter extraction")


def found(sees: str, attack: str, value: float, width: float = 0.0) -> Finding:
    return Finding(attack, ONE_TIME, sees, "", Estimate(value, value, value, 99), 0.0, resolution=width)


@pytest.mark.parametrize(
    ("identity", "good", "bad"),
    [
        (
            "control-reuse",
            {"figures": {BROKEN: {RING_BANK: 8, "4 masks": 4}}},
            [
                {"figures": {BROKEN: broken}}
                for broken in (
                    {RING_BANK: None, "4 masks": 4},
                    {RING_BANK: 8, "4 masks": None},
                    {RING_BANK: 8},
                    {},
                )
            ],
        ),
        (
            "control-planted",
            {"figures": {"planted secret found": {"a log": True, "objects": True}}},
            [{"figures": {"planted secret found": {"a log": True, "objects": False}}}, {"figures": {}}],
        ),
        (
            "control-ring",
            {"findings": [found(BOTH, attack, 0.999) for attack in ON_RING]},
            [
                {"findings": [found(BOTH, attack, 0.999 * (attack != missed)) for attack in ON_RING]}
                for missed in ON_RING
            ]
            + [{"findings": [found(BOTH, attack, 0.999) for attack in ON_RING[1:]]}, {}],
        ),
        (
            "control-resolution",
            {"findings": [found(PROVIDER, "averaging", 0.0, 0.009)], "about": {"resolution": 0.01}},
            [
                {
                    "findings": [
                        found(PROVIDER, "averaging", 0.0, 0.009),
                        found(PROVIDER, "adapter extraction", 0.0, 0.011),
                    ],
                    "about": {"resolution": 0.01},
                },
                {},
            ],
        ),
    ],
)
def test_controls(identity: str, good: dict[str, Any], bad: list[dict[str, Any]]) -> None:
    claim = next(claim for claim in CLAIMS if claim.identity == identity)
    assert claim.verdict(AuditResult(**good)).holds
    for each in bad:
        assert not claim.verdict(AuditResult(**each)).holds


def test_only_a_crash_may_cut_a_transcript(tmp_path: Path) -> None:
    executor = ExecutorProcess(tmp_path / "executor", MODEL, "ring")
    recording = TranscriptWriter(
        executor.folder / "transcripts", BaseExecutor(MODEL, numerics="ring").manifest
    )
    with pytest.raises(TranscriptError, match="cut"):
        executor.transcripts()
    executor._crashed.add(recording.path.name)
    assert len(executor.transcripts()) == 1
    recording.close()
