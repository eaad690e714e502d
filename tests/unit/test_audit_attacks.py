"""Attacks on synthetic rows, where they must succeed and where they must fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from audits import MODEL
from torch.nn.functional import silu

from provider.executor.base import BaseExecutor
from security.attacks import tokens
from security.attacks.extraction import AdapterExtraction
from security.attacks.gradients import SpanCheck
from security.attacks.masking import Uniformity
from security.attacks.tokens import (
    Averaging,
    DeepMatching,
    KnownMaskSubtraction,
    SubspaceProjection,
    VocabularyMatching,
)
from security.views.adversaries import FALSE_HEADS, HEAD, ObservedRequest, View, _Masks
from security.views.public_model import PublicModel
from shared.ring.fixed_point import exponents, max_row_norm, quantize_rows
from shared.wire.header import Direction, Operation

RNG = np.random.default_rng(0)
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
VOCABULARY, WIDTH, OUTPUTS = 256, 64, 96
TABLE = torch.from_numpy(RNG.standard_normal((VOCABULARY, WIDTH))).float()
PUBLIC: Any = SimpleNamespace(first_inputs=TABLE, scales=lambda group: torch.ones(OUTPUTS))
TOKENS = torch.from_numpy(RNG.integers(0, VOCABULARY, 512))


def seen(raw: torch.Tensor, group: int = 0, direction: int = FORWARD) -> ObservedRequest:
    return ObservedRequest(group, direction, 1, 1, 0.0, raw)


def normal(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.standard_normal(shape)).float()


def uniform(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.integers(-(2**31), 2**31, shape).astype(np.int32))


def on_ring(rows: torch.Tensor, max_norm: float = 2.0**21) -> torch.Tensor:
    return quantize_rows(rows, exponents(rows.double().norm(dim=1), max_norm))


def right(attack: Any, view: View, tokens: torch.Tensor = TOKENS) -> float:
    guess = attack.attack(view, RNG)
    return float((guess.tokens == tokens[guess.rows]).float().mean())


def test_rows_that_look_like_masks_of_all_requests() -> None:
    """A tenant may send any number of them to its mask source, and any number of requests to the provider."""
    read = list[int]()

    def request(rows: torch.Tensor) -> Any:
        def some_rows(first: int, count: int) -> torch.Tensor:
            read.append(count)
            return rows[first : first + count]

        return SimpleNamespace(
            header=SimpleNamespace(operation=Operation.EFFECT, rows=len(rows)), some_rows=some_rows
        )

    false = torch.full((500, WIDTH), 2**30, dtype=torch.int32)
    false[:, :HEAD] = 0
    masks, rows = uniform(4, WIDTH), on_ring(TABLE[:4])
    assert _Masks(PUBLIC, [request(false)]).under(torch.zeros_like(rows)) is None
    assert read == [500] + [1] * FALSE_HEADS
    found = _Masks(PUBLIC, [request(false[: FALSE_HEADS - 1]), request(masks)]).under(rows + masks)
    assert found is not None
    assert torch.equal(found, masks)


def test_averaging() -> None:
    noisy = [seen(TABLE[TOKENS[:64]] + 4 * normal(64, WIDTH)) for _ in range(200)]
    assert right(Averaging(), View(PUBLIC, noisy), TOKENS[:64]) > 0.95
    assert right(VocabularyMatching(), View(PUBLIC, noisy[:1]), TOKENS[:64]) < 0.5
    masked = [seen(on_ring(TABLE[TOKENS[:64]]) + uniform(64, WIDTH)) for _ in range(200)]
    assert right(Averaging(), View(PUBLIC, masked), TOKENS[:64]) < 0.1


def test_subspace_projection() -> None:
    masked = TABLE[TOKENS] + 50 * normal(512, 4) @ normal(4, WIDTH)
    view = View(PUBLIC, [seen(masked)])
    assert right(SubspaceProjection(), view) > 0.95
    assert right(VocabularyMatching(), view) < 0.5
    assert (
        right(SubspaceProjection(), View(PUBLIC, [seen(on_ring(TABLE[TOKENS]) + uniform(512, WIDTH))])) < 0.1
    )


def test_known_masks() -> None:
    masks = uniform(700, WIDTH)
    view = View(PUBLIC, [seen(on_ring(TABLE[TOKENS]) + masks[:512])])
    assert right(KnownMaskSubtraction(), view) < 0.1
    view.masks[0, FORWARD, 1] = masks[torch.randperm(700)]
    assert right(KnownMaskSubtraction(), view) == 1.0


def test_known_masks_of_a_bank() -> None:
    """Each row with a power of two of one."""
    masks = 20 * normal(16, WIDTH)
    scales = torch.exp2(torch.from_numpy(RNG.integers(-2, 3, 512))).float()[:, None]
    view = View(PUBLIC, [seen(TABLE[TOKENS] + scales * masks[torch.arange(512) % 16])])
    view.masks[0, FORWARD, 1] = masks
    assert right(KnownMaskSubtraction(), view) > 0.95


def test_more_known_masks_than_all_rows_can_be_tried_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "TRIED", 700 * 64)
    masks = uniform(700, WIDTH)
    view = View(PUBLIC, [seen(on_ring(TABLE[TOKENS]) + masks[:512])], {(0, FORWARD, 1): masks})
    guess = KnownMaskSubtraction().attack(view, RNG)
    assert len(guess.rows) == 64
    assert guess.rows.diff().unique().tolist() == [8]  # evenly, from the first to the last
    assert torch.equal(guess.tokens, TOKENS[guess.rows])


@pytest.mark.parametrize("mask", [0, 1])
def test_span_check(mask: int) -> None:
    """On a ring, in the clear and under masks; making fingerprints comes between the two directions."""
    rows, gradients = on_ring(TABLE[TOKENS[:64]]), on_ring(normal(64, OUTPUTS))
    view = View(
        PUBLIC,
        [
            seen(rows + mask * uniform(64, WIDTH)),
            seen(uniform(40, WIDTH)),
            seen(gradients + mask * uniform(64, OUTPUTS), direction=BACKWARD),
        ],
    )
    (ranked,) = SpanCheck().attack(view, RNG)
    hits = [
        len(set(guess[: len(part.unique())].tolist()) & set(part.tolist())) / len(part.unique())
        for guess, part in zip(ranked, TOKENS[:64].split(32), strict=True)
    ]
    assert len(hits) == 2
    assert (min(hits) > 0.95) if not mask else (max(hits) < 0.5)


@pytest.mark.parametrize(
    ("what", "worst"),
    [
        (lambda words: words & ~(1 << 9), "bit 9"),
        (lambda words: words | ((uniform(*words.shape) & 15 == 0).int() << 31), "bit 31"),
        (lambda words: torch.cumsum(words // 2**20, 0).int() << 8, "correlation"),
        (lambda words: words & ~255 | (words & 127) * 2 % 251, "byte 0"),
    ],
)
def test_uniformity(what: Any, worst: str) -> None:
    words = uniform(400, WIDTH)
    assert Uniformity().attack(View(PUBLIC, [seen(words)]), RNG).p_value > 1e-4
    found = Uniformity().attack(View(PUBLIC, [seen(what(words))]), RNG)
    assert found.p_value < 1e-9
    assert worst in found.worst or found.worst.startswith("byte")


def test_uniformity_of_two_kinds_of_numbers() -> None:
    """Each is tested by itself: what one lacks does not vanish among the other's bytes."""
    words, halves = uniform(400, WIDTH), uniform(2, WIDTH // 2).view(torch.bfloat16)
    found = Uniformity().attack(View(PUBLIC, [seen(words), seen(halves), seen(words & ~(1 << 9))]), RNG)
    assert found.bytes_tested == 2 * words.nbytes + halves.nbytes == found.histogram.sum()
    assert found.p_value < 1e-9
    assert "of int32" in found.worst
    alone = Uniformity().attack(View(PUBLIC, [seen(words)]), RNG)
    assert found.tests == alone.tests * 3 // 2
    assert alone.repeated_blocks == 0


def test_a_strong_adapter_on_a_ring() -> None:
    """As large as the layer itself, so that sizes alone do not show which power of two a row came with."""
    public = PublicModel(MODEL, BaseExecutor(MODEL, numerics="ring").manifest)
    into, out = (public.group_of(f"layers.0.mlp.{name}") for name in ("up_proj", "down_proj"))
    with public.watching([into]) as inputs, torch.inference_mode():
        public.model(input_ids=torch.from_numpy(RNG.integers(0, public.vocabulary, (5, 128))))
    x = inputs[into].flatten(0, 1)
    gate, up = public.weight(into).chunk(2)
    delta = normal(len(up), 8) @ normal(8, up.shape[1])
    delta *= 3 * (x @ up.T).norm() / (x @ delta.T).norm()
    z = silu(x @ gate.T) * (x @ (up + delta).T)
    max_norms = [
        max_row_norm(public.manifest.groups[g].bounds[0], r.shape[1]) for g, r in ((into, x), (out, z))
    ]
    view = View(public, [seen(on_ring(x, max_norms[0]), into), seen(on_ring(z, max_norms[1]), out)])
    stolen = AdapterExtraction(0).attack(view, RNG)
    assert stolen.rank == 8
    assert float((stolen.delta - delta).norm() / delta.norm()) < 1e-3


def test_a_search_in_hidden_states_of_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tries as many tokens as fit into memory, and the right one is among them."""
    monkeypatch.setattr(DeepMatching, "CANDIDATES", 16)
    public: Any = SimpleNamespace(
        vocabulary=VOCABULARY, next_inputs=lambda group, prefix, candidates: TABLE[candidates]
    )
    prompt = TOKENS[:9]
    attack = DeepMatching(0, {0: prompt}, places=8)
    view = View(public, [seen(TABLE[prompt])])
    guesses, wanted = attack.attack(view, np.random.default_rng(0))
    assert torch.equal(guesses, wanted)
    assert torch.equal(wanted, prompt[1:])
    assert {len(candidates) for candidates, _ in attack._tables.values()} == {16}
