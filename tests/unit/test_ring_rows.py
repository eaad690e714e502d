"""Both ends of a product on the ring: native code and torch against each other and exact integers."""

from __future__ import annotations

import importlib.machinery
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.ring import native as ring_native
from shared.ring import rows as ring_rows
from shared.ring.fixed_point import LIMIT, MAX_NORM, dequantize, steps
from shared.ring.rows import quantize_and_mask, unmask_and_dequantize

NATIVE = pytest.mark.skipif(ring_native.LIBRARY is None, reason="there is no native code here")
FLOAT_MAX = float(torch.finfo(torch.float32).max)
NORM = 1e6
SEEDS = st.integers(0, 2**32 - 1)


def without_native_code(patch: pytest.MonkeyPatch) -> None:
    """From here on torch computes, in small pieces."""
    patch.setattr(ring_native, "LIBRARY", None)
    patch.setattr(ring_rows, "CHUNK_ELEMENTS", 50)


@pytest.fixture(params=[pytest.param("native", marks=NATIVE), "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs both ways."""
    if request.param == "torch":
        without_native_code(monkeypatch)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Uniform int32."""
    return torch.randint(-LIMIT - 1, LIMIT + 1, shape, generator=generator, dtype=torch.int32)


def longs(generator: torch.Generator, size: int) -> torch.Tensor:
    """int64 of all sizes."""
    return integers(generator, size).long() << 32 | integers(generator, size).long() & 0xFFFFFFFF


def float_rows(generator: torch.Generator, count: int, columns: int) -> torch.Tensor:
    """Gaussian rows of all lengths that float32 has, a row of zeros, one of the largest number."""
    rows = torch.randn((count, columns), generator=generator)
    powers = torch.randint(-140, 120, (count, 1), generator=generator)
    rows *= torch.where(torch.arange(count).unsqueeze(1) % 2 == 0, 1.0, 2.0 ** powers.double()).float()
    rows[count // 3] = 0
    rows[count // 2, columns // 2] = FLOAT_MAX
    return rows


def tensors_of(rows: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:
    return [tensor.contiguous() for tensor in rows.split(widths, 1)]


def wrapped(value: int) -> int:
    """As int64 holds it."""
    return (value + 2**63) % 2**64 - 2**63


# -- rows to integers ------------------------------------------------------------------------------


@given(
    seed=SEEDS,
    count=st.integers(1, 9),
    widths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    max_norm=st.sampled_from([1.0, 3.7, NORM, MAX_NORM]),
    scaled=st.booleans(),
    checked=st.booleans(),
)
def test_integers_are_added_to_masks(
    seed: int, count: int, widths: list[int], max_norm: float, scaled: bool, checked: bool
) -> None:
    generator, columns = seeded(seed), sum(widths)
    rows, mask = float_rows(generator, count, columns), integers(generator, count, columns)
    scales = torch.rand(columns, generator=generator) if scaled else None
    factor = longs(generator, columns) if checked else None
    requests, tensors = mask.clone(), tensors_of(rows, widths)
    result = quantize_and_mask(tensors, scales, max_norm, requests, factor)
    assert result is not None
    exponents, expected = result
    assert (exponents.dtype, exponents.shape) == (torch.int32, (count,))
    assert (expected is None) == (factor is None)
    assert torch.equal(torch.cat(tensors, 1), rows)
    wide = rows if scales is None else rows * scales
    for i, row in enumerate(wide.double().tolist()):
        step = steps(exponents)[i].item()
        norm = sum(Fraction(x) ** 2 for x in row)
        if norm:
            assert (Fraction(max_norm) * 7 / 9) ** 2 < norm / Fraction(step) ** 2 <= Fraction(max_norm) ** 2
        exact = [round(x * (1 / step)) for x in row]
        assert torch.equal(requests[i], mask[i] + torch.tensor(exact, dtype=torch.int32))
        if factor is not None and expected is not None:
            total = sum(a * b for a, b in zip(exact, factor.tolist(), strict=True))
            assert expected[i].item() == wrapped(total)


@pytest.mark.parametrize("scaled", [True, False])
def test_integers_are_the_same_bits_both_ways(scaled: bool) -> None:
    """One thread, three, and torch."""
    generator, threads = seeded(1), torch.get_num_threads()
    rows, mask, factor = float_rows(generator, 400, 333), integers(generator, 400, 333), longs(generator, 333)
    scales = torch.rand(333, generator=generator) if scaled else None
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for number in (1, 3, 1):
            torch.set_num_threads(number)
            try:
                masked = mask.clone()
                result = quantize_and_mask(tensors_of(rows, [100, 233]), scales, NORM, masked, factor)
            finally:
                torch.set_num_threads(threads)
            assert result is not None
            assert result[1] is not None
            found.append((masked, result[0], result[1]))
            if number == 3:
                without_native_code(patch)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 199])
def test_rows_that_are_not_finite(bad: float, at: int) -> None:
    rows = torch.ones((200, 300))
    assert quantize_and_mask([rows], None, NORM, torch.zeros((200, 300), dtype=torch.int32), None) is not None
    rows[at, 7] = bad
    assert quantize_and_mask([rows], None, NORM, torch.zeros((200, 300), dtype=torch.int32), None) is None


def test_rows_that_scales_make_infinite() -> None:
    rows, scales = torch.full((2, 3), 1e38), torch.tensor([1.0, 2.0, 4.0])
    assert quantize_and_mask([rows], None, NORM, torch.zeros((2, 3), dtype=torch.int32), None) is not None
    assert quantize_and_mask([rows], scales, NORM, torch.zeros((2, 3), dtype=torch.int32), None) is None


@given(seed=SEEDS, count=st.integers(2, 9))
def test_a_row_does_not_depend_on_the_rows_beside_it(seed: int, count: int) -> None:
    generator = seeded(seed)
    rows, factor = float_rows(generator, count, 21), longs(generator, 21)
    together = torch.zeros((count, 21), dtype=torch.int32)
    result = quantize_and_mask(tensors_of(rows, [21]), None, NORM, together, factor)
    assert result is not None
    for i in range(count):
        alone = torch.zeros((1, 21), dtype=torch.int32)
        one = quantize_and_mask(tensors_of(rows[i : i + 1], [21]), None, NORM, alone, factor)
        assert one is not None
        assert torch.equal(alone[0], together[i])
        assert one[0][0] == result[0][i]
        assert one[1] is not None
        assert result[1] is not None
        assert one[1][0] == result[1][i]


def test_no_rows() -> None:
    none = torch.empty((0, 4), dtype=torch.int32)
    result = quantize_and_mask([torch.empty((0, 4))], None, NORM, none, None)
    assert result is not None
    assert result[0].shape == (0,)
    answers = torch.empty((0, 6), dtype=torch.int32)
    assert (
        unmask_and_dequantize(answers, [answers.clone()], result[0], None, [torch.empty((0, 3))], None, None)
        == 0
    )


# -- answers to rows -------------------------------------------------------------------------------


@given(
    seed=SEEDS,
    count=st.integers(1, 9),
    widths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    sources=st.integers(0, 3),
    scaled=st.booleans(),
    far=st.booleans(),
    planes=st.integers(1, 2),
)
def test_effects_come_off_and_answers_become_floats(
    seed: int, count: int, widths: list[int], sources: int, scaled: bool, far: bool, planes: int
) -> None:
    generator, width = seeded(seed), sum(widths)
    plain, scales = integers(generator, count, planes * width), None
    if scaled:
        scales = torch.rand(width, generator=generator)
    effects = [integers(generator, count, planes * width) for _ in range(sources)]
    powers = torch.randint(-63 * 8, 64 * 8, (count,), generator=generator, dtype=torch.int32)
    if far:
        powers[0], powers[-1] = -1203, 512
    expected = torch.empty((count, width))
    dequantize(list(plain.split(width, 1)), powers, scales, expected)
    answers = plain + sum(effects, torch.zeros_like(plain))
    before = [effect.clone() for effect in effects]
    # Tensors that are not next to each other in memory.
    tensors = [torch.full((count, width), float("nan")) for width in widths]
    assert unmask_and_dequantize(answers, effects, powers, scales, tensors, None, None) == 0
    assert torch.equal(answers, plain)
    assert torch.equal(torch.cat(tensors, 1).view(torch.int32), expected.view(torch.int32))
    assert all(torch.equal(a, b) for a, b in zip(effects, before, strict=True))


@given(seed=SEEDS, count=st.integers(1, 9), half=st.integers(1, 20), wrong=st.integers(0, 2**9 - 1))
def test_wrong_rows_are_counted(seed: int, count: int, half: int, wrong: int) -> None:
    generator = seeded(seed)
    plain, effect = integers(generator, count, 2 * half), integers(generator, count, 2 * half)
    challenge = integers(generator, 2 * half)
    sums = [
        wrapped(sum(u * z for u, z in zip(row, challenge.tolist(), strict=True))) for row in plain.tolist()
    ]
    expected = torch.tensor(sums)
    answers, powers = plain + effect, torch.zeros(count, dtype=torch.int32)
    changed = 0
    for i in range(count):
        if wrong >> i & 1:
            # One bit of one number; a challenge of 0 there would not notice, so there is none.
            at = int(torch.randint(0, 2 * half, (1,), generator=generator))
            changed += bool(challenge[at])
            answers[i, at] ^= 1 << int(torch.randint(0, 31, (1,), generator=generator))
    tensor = torch.empty((count, half))
    assert unmask_and_dequantize(answers, [effect], powers, None, [tensor], challenge, expected) == changed


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("planes", [1, 2])
def test_floats_are_the_same_bits_both_ways(scaled: bool, planes: int) -> None:
    generator, threads, columns = seeded(2), torch.get_num_threads(), planes * 111
    answers, effect = integers(generator, 300, columns), integers(generator, 300, columns)
    scales = torch.rand(111, generator=generator) if scaled else None
    powers = torch.randint(-1360, 800, (300,), generator=generator, dtype=torch.int32)
    challenge, expected = integers(generator, columns), longs(generator, 300)
    expected[::2] = ((answers - effect).long() * challenge).sum(1)[::2]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for number in (1, 3, 1):
            torch.set_num_threads(number)
            tensors, changed = [torch.empty((300, 11)), torch.empty((300, 100))], answers.clone()
            try:
                assert (
                    unmask_and_dequantize(changed, [effect], powers, scales, tensors, challenge, expected)
                    == 150
                )
            finally:
                torch.set_num_threads(threads)
            found.append((changed, *(tensor.view(torch.int32) for tensor in tensors)))
            if number == 3:
                without_native_code(patch)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# -- there and back --------------------------------------------------------------------------------


@given(seed=SEEDS, sources=st.integers(1, 3), forward=st.booleans())
def test_masks_leave_no_trace(seed: int, sources: int, forward: bool) -> None:
    """Through an int64 product: the floats are those without any mask, bit for bit, and the check passes."""
    generator = seeded(seed)
    planes = torch.randint(-128, 128, (2, 7, 12), generator=generator).flatten(0, 1)
    rows = float_rows(generator, 5, 12)
    challenge = integers(generator, 14)
    factor = (planes * challenge.long().unsqueeze(1)).sum(0)
    scales = torch.rand(7, generator=generator) if forward else None
    results = []
    for masks in ([], [integers(generator, 5, 12) for _ in range(sources)]):
        requests = sum(masks, torch.zeros((5, 12), dtype=torch.int32))
        result = quantize_and_mask(tensors_of(rows, [5, 7]), None, NORM, requests, factor)
        assert result is not None
        answers = (requests.long() @ planes.T).to(torch.int32)
        effects = [(mask.long() @ planes.T).to(torch.int32) for mask in masks]
        tensors = [torch.empty((5, 3)), torch.empty((5, 4))]
        assert unmask_and_dequantize(answers, effects, result[0], scales, tensors, challenge, result[1]) == 0
        results.append(torch.cat(tensors, 1))
    assert torch.equal(results[0].view(torch.int32), results[1].view(torch.int32))


def test_sizes_that_do_not_fit_are_refused() -> None:
    """Some come from peers, and native code would go where they lead."""
    x, wide = torch.ones(2, 6), torch.ones(2, 9)
    request, factor = torch.zeros((2, 6), dtype=torch.int32), torch.ones(6, dtype=torch.int64)
    hidden = (None, NORM, request, factor)
    assert quantize_and_mask([x], *hidden) is not None
    for tensors in ([wide], [x, x], [x[:1]], [x.double()], [torch.ones(6, 2).T], []):
        with pytest.raises(ValueError, match=r"wanted|as wide as"):
            quantize_and_mask(tensors, *hidden)
    for changes in ((torch.ones(5), NORM, request, factor), (None, NORM, request, factor[:5])):
        with pytest.raises(ValueError, match="wanted"):
            quantize_and_mask([x], *changes)
    good = {
        "answers": torch.zeros((2, 12), dtype=torch.int32),
        "effects": [torch.zeros((2, 12), dtype=torch.int32)],
        "exponents": torch.zeros(2, dtype=torch.int32),
        "scales": torch.ones(6),
        "tensors": [torch.empty(2, 2), torch.empty(2, 4)],
        "challenge": torch.zeros(12, dtype=torch.int32),
        "expected": torch.zeros(2, dtype=torch.int64),
    }
    assert unmask_and_dequantize(**good) == 0  # type: ignore[arg-type]
    for name, value in (
        ("answers", torch.zeros((2, 10), dtype=torch.int32)),
        ("effects", [torch.zeros((2, 12), dtype=torch.bfloat16)]),
        ("effects", [torch.zeros((1, 12), dtype=torch.int32)]),
        ("exponents", torch.zeros(1, dtype=torch.int32)),
        ("scales", torch.ones(5)),
        ("tensors", [torch.empty(2, 2), torch.empty(2, 5)]),
        ("challenge", torch.zeros(6, dtype=torch.int32)),
        ("expected", torch.zeros(1, dtype=torch.int64)),
    ):
        with pytest.raises(ValueError, match=r"wanted|as wide as"):
            unmask_and_dequantize(**(good | {name: value}))  # type: ignore[arg-type]


def test_native_code_that_cannot_be_used_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = tmp_path / "_ring_native.so"
    damaged.write_bytes(b"\x7fELF, or nearly")
    spec = importlib.machinery.ModuleSpec("shared.ring._native", None, origin=str(damaged))
    monkeypatch.setattr(ring_native, "find_spec", lambda _: spec)
    assert ring_native._load() is None
    assert "cannot be used" in caplog.text
    monkeypatch.undo()
    if ring_native.LIBRARY is not None:
        monkeypatch.setattr(ring_native, "VERSION", 0)
        assert ring_native._load() is None
        assert "another version" in caplog.text


@pytest.mark.parametrize("given", ["challenge", "expected"])
def test_a_challenge_and_what_is_expected_go_together(given: str) -> None:
    """Native code would read one of them at address 0."""
    answers, exponents = torch.zeros((2, 3), dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    challenge = torch.ones(3, dtype=torch.int32) if given == "challenge" else None
    expected = torch.zeros(2, dtype=torch.int64) if given == "expected" else None
    with pytest.raises(ValueError, match="go together"):
        unmask_and_dequantize(answers, [], exponents, None, [torch.empty(2, 3)], challenge, expected)
