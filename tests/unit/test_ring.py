"""Fixed point against exact arithmetic: planes of weights, integers of rows, floats of answers."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from conftest import relative_error
from hypothesis import given
from hypothesis import strategies as st

from shared.ring.fixed_point import (
    LARGEST,
    LIMIT,
    MAX_NORM,
    Bounds,
    bounds,
    dequantize,
    exponents,
    max_row_norm,
    quantize_rows,
    quantize_weight,
    squared_norms,
    steps,
)

FLOAT_MAX = float(torch.finfo(torch.float32).max)
SPECIAL = [0.0, -0.0, 1.0, -1.0, 127.0, 0.5, 1.5, FLOAT_MAX, -FLOAT_MAX, 2.0**-149, -(2.0**-126), 1e-40]
FLOATS = st.sampled_from(SPECIAL) | st.floats(width=32, allow_nan=False, allow_infinity=False)
INT32 = st.sampled_from([0, 1, -1, LIMIT, -LIMIT - 1]) | st.integers(-LIMIT - 1, LIMIT)
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def matrices(draw: st.DrawFn, elements: st.SearchStrategy[float] = FLOATS, most: int = 6) -> torch.Tensor:
    """float64 [1 to 6, 1 to 6]."""
    width = draw(st.integers(1, most))
    row = st.lists(elements, min_size=width, max_size=width)
    return torch.tensor(draw(st.lists(row, min_size=1, max_size=most)), dtype=torch.float64)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def step_of(exponent: int) -> Fraction:
    """The step of an exponent."""
    return Fraction(8 + exponent % 8, 16) * Fraction(2) ** (exponent // 8)


def norms_of(rows: torch.Tensor) -> torch.Tensor:
    """As every caller computes them."""
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)


# -- bounds ----------------------------------------------------------------------------------------


@given(seed=SEEDS, outputs=st.integers(1, 7), inputs=st.integers(1, 7), split=st.integers(0, 7))
def test_bounds_are_the_largest_squared_norms(seed: int, outputs: int, inputs: int, split: int) -> None:
    planes = torch.randint(-128, 128, (2, outputs, inputs), generator=seeded(seed), dtype=torch.int8)
    lists = planes.tolist()
    rows = [sum(w * w for w in row) for plane in lists for row in plane]
    columns = [sum(row[i] ** 2 for row in plane) for plane in lists for i in range(inputs)]
    found = bounds(planes)
    assert found == Bounds(max(rows), max(columns))
    assert all(type(bound) is int for bound in found)
    squares = squared_norms(planes)[1]
    assert squares.dtype == torch.int64
    assert squares.flatten().tolist() == columns
    split = min(split, outputs - 1)
    if split:  # members' squares add up to the group's
        parts = [squared_norms(planes[:, :split])[1], squared_norms(planes[:, split:])[1]]
        assert torch.equal(parts[0] + parts[1], squares)


def test_bounds_of_many_extreme_elements() -> None:
    planes = torch.full((2, 3, 140_000), -128, dtype=torch.int8)  # over 2^31
    assert bounds(planes) == (140_000 << 14, 3 << 14)


@given(bound=st.integers(0, 1 << 45), width=st.integers(1, 1 << 31))
def test_capacity_leaves_room_for_rounding(bound: int, width: int) -> None:
    try:
        max_norm = max_row_norm(bound, width)
    except ValueError:
        assert bound**0.5 * (width**0.5 / 2 + 1) > LIMIT * (1 - 1e-9)
        return
    assert 1 <= max_norm <= MAX_NORM
    if bound:
        assert (Fraction(max_norm) + Fraction(width**0.5) / 2) * Fraction(bound**0.5) < LIMIT + Fraction(1, 2)


def test_what_is_too_wide() -> None:
    assert 2**17 - 65 < max_row_norm((1 << 14) * 16_384, 16_384) < 2**17 - 64
    with pytest.raises(ValueError, match="too wide"):
        max_row_norm(1 << 45, 1 << 31)


# -- rows ------------------------------------------------------------------------------------------


@given(matrices(), st.floats(1, MAX_NORM))
def test_steps_are_the_smallest_or_one_more(values: torch.Tensor, max_norm: float) -> None:
    rows = values.float()
    norms = norms_of(rows)
    found = exponents(norms, max_norm)
    assert (found.dtype, found.shape) == (torch.int32, norms.shape)
    assert [Fraction(step) for step in steps(found).tolist()] == [step_of(e) for e in found.tolist()]
    for norm, e in zip(norms.tolist(), found.tolist(), strict=True):
        if norm:
            # An eighth of an octave, and the margin.
            assert (
                Fraction(max_norm) * Fraction(7, 8) * Fraction(8, 9) < Fraction(norm) / step_of(e) <= max_norm
            )


@given(matrices(most=4), st.floats(1, MAX_NORM))
def test_rows_are_rounded_to_the_nearest_ties_to_even(values: torch.Tensor, max_norm: float) -> None:
    rows = values.float()
    e = exponents(norms_of(rows), max_norm)
    got = quantize_rows(rows, e)
    assert got.dtype == torch.int32
    for row, power, integers in zip(rows.tolist(), e.tolist(), got.tolist(), strict=True):
        inverse = Fraction(float(1 / step_of(power)))  # what rows are multiplied by
        assert integers == [round(Fraction(float(Fraction(x) * inverse))) for x in row]
    # A row's integers are its own, and parts of it are rounded as the whole is.
    for i in range(len(rows)):
        assert torch.equal(quantize_rows(rows[i : i + 1], e[i : i + 1]), got[i : i + 1])
    assert torch.equal(quantize_rows(rows[:, :1], e), got[:, :1])


def test_ties_of_rows() -> None:
    rows = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5], [1.0, 3.0, 5.0, -1.0, -3.0]])
    e = torch.tensor([8, 16], dtype=torch.int32)
    assert quantize_rows(rows, e).tolist() == [[0, 2, 2, 0, -2], [0, 2, 2, 0, -2]]


def test_no_rows() -> None:
    none = torch.empty((0, 3))
    e = exponents(norms_of(none), 100.0)
    assert quantize_rows(none, e).shape == (0, 3)
    out, empty = torch.empty((0, 3)), torch.empty((0, 3), dtype=torch.int32)
    dequantize([empty, empty], e, torch.ones(3), out)


# -- no product overflows --------------------------------------------------------------------------


def largest_product(rows: torch.Tensor, planes: torch.Tensor, limit: Bounds) -> int:
    """The largest absolute product of the integers of float rows with any row of both planes."""
    integers = quantize_rows(rows, exponents(norms_of(rows), max_row_norm(limit.forward, rows.shape[1])))
    return int((integers.long() @ planes.flatten(0, 1).long().T).abs().max())


@given(
    seed=SEEDS,
    inputs=st.integers(1, 300),
    kind=st.sampled_from(["random", "all", "one", "small", "zero"]),
    scale=st.floats(0.5, 1, exclude_max=True, width=32) | st.sampled_from([0.5, 1 - 2.0**-24, 0.75]),
    one=st.booleans(),
)
def test_rows_parallel_to_a_row_of_the_weight_do_not_overflow(
    seed: int, inputs: int, kind: str, scale: float, one: bool
) -> None:
    """Where Cauchy-Schwarz is an equation. Many lengths, so that some are just below the limit."""
    generator = seeded(seed)
    if one:
        planes = torch.randint(-LARGEST, LARGEST, (1, 3, inputs), generator=generator, dtype=torch.int16)
    else:
        planes = torch.randint(-128, 128, (2, 3, inputs), generator=generator, dtype=torch.int8)
    if kind == "all":
        planes = torch.full_like(planes, -LARGEST if one else -128)
    elif kind == "one":
        planes.zero_()[-1, 2, inputs // 2] = LARGEST if one else 127
    elif kind == "small":
        planes.sign_()
    elif kind == "zero":
        planes.zero_()
    limit = bounds(planes)
    lengths = scale * (1 + torch.rand((50, 1), generator=generator))
    each = planes.flatten(0, 1).float()
    rows = torch.cat([sign * lengths * row for row in each for sign in (1, -1)])
    rows = torch.cat([rows, rows + 0.5 * rows.sign(), torch.zeros((1, inputs))])
    largest = largest_product(rows, planes, limit)
    assert largest <= LIMIT
    if (
        max_row_norm(limit.forward, inputs) < MAX_NORM
    ):  # at most an eighth of an octave is given away, and rounding
        assert largest > LIMIT / 2


@pytest.mark.parametrize("inputs", [1, 2, 4096, 16_384])
def test_the_longest_rows_that_fit_just_fit(inputs: int) -> None:
    """Lengths that step through the last floats below the largest norm of an exponent."""
    planes = torch.full((2, 1, inputs), -127, dtype=torch.int8)
    limit = bounds(planes)
    max_norm = max_row_norm(limit.forward, inputs)
    element = torch.tensor(max_norm / inputs**0.5).float()
    steps = [element]
    for _ in range(20):
        steps.append(torch.nextafter(steps[-1], torch.tensor(0.0)))
    for _ in range(20):
        steps.insert(0, torch.nextafter(steps[0], torch.tensor(torch.inf)))
    rows = torch.stack(steps).unsqueeze(1).expand(-1, inputs)
    assert LIMIT / 1.2 < largest_product(rows, planes, limit) <= LIMIT


@given(SEEDS, st.integers(1, 2))
def test_extreme_floats_do_not_overflow(seed: int, count: int) -> None:
    generator = seeded(seed)
    weight = torch.randn((4, 20), generator=generator)
    planes = quantize_weight(weight, count).planes
    rows = weight.repeat(6, 1)
    rows[4:8] *= 2.0**-140
    rows[8:12] *= FLOAT_MAX / rows[8:12].abs().max()
    rows[12:16] = 0
    rows[12:16, 3] = FLOAT_MAX
    rows[16:20, 7] = 1e30  # an outlier beside ordinary numbers
    rows[20:] = FLOAT_MAX
    rows[21] = 2.0**-149
    assert largest_product(rows, planes, bounds(planes)) <= LIMIT


# -- answers ---------------------------------------------------------------------------------------


Answers = tuple[list[torch.Tensor], torch.Tensor, "torch.Tensor | None"]


@st.composite
def answers(draw: st.DrawFn) -> Answers:
    """Products with one or two planes [T, N], exponents [T] of all sizes, scales [N] or none."""
    count, width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    block = st.lists(INT32, min_size=count * width, max_size=count * width)
    e = st.integers(-240, 240) | st.sampled_from([-511, 511, -512, 512]) | st.integers(-1360, 800)
    powers = torch.tensor(draw(st.lists(e, min_size=count, max_size=count)), dtype=torch.int32)
    some = st.lists(st.floats(2.0**-20, 8, width=32) | st.just(0.0), min_size=width, max_size=width)
    scales = draw(st.none() | some.map(torch.tensor))
    planes = [
        torch.tensor(draw(block), dtype=torch.int32).view(count, width)
        for _ in range(draw(st.integers(1, 2)))
    ]
    return planes, powers, scales


@given(answers())
def test_answers_become_floats(given_: Answers) -> None:
    """Near the exact value: a few roundings, of u1, of u2, of their sum and of each factor's product."""
    planes, powers, scales = given_
    out = torch.full(planes[0].shape, float("nan"))
    dequantize(planes, powers, scales, out)
    for i, power in enumerate(powers.tolist()):
        for j in range(out.shape[1]):
            factor = step_of(power) * (1 if scales is None else Fraction(scales[j].item()))
            parts = [Fraction(plane[i, j].item()) / 256**k for k, plane in enumerate(planes)]
            exact = factor * sum(parts)
            if abs(exact) > FLOAT_MAX:
                assert abs(out[i, j].item()) >= FLOAT_MAX * (1 - 1e-6)
                continue
            error = abs(Fraction(out[i, j].item()) - exact)
            assert error <= 4 * factor * sum(map(abs, parts)) / 2**24 + Fraction(2) ** -149


@given(answers())
def test_a_row_of_floats_does_not_depend_on_the_rows_beside_it(given_: Answers) -> None:
    """Also if one of them is so small or large that it is computed in float64."""
    planes, powers, scales = given_
    together = torch.empty(planes[0].shape)
    dequantize(planes, powers, scales, together)
    for i in range(len(together)):
        row = slice(i, i + 1)
        alone = torch.empty((1, together.shape[1]))
        dequantize([plane[row] for plane in planes], powers[row], scales, alone)
        assert torch.equal(alone.view(torch.int32), together[row].view(torch.int32))


def test_answers_are_written_into_parts_of_a_tensor() -> None:
    u = torch.arange(24, dtype=torch.int32).view(4, 6)
    powers, scales = torch.tensor([8, 27, -560, 560], dtype=torch.int32), torch.tensor([1.0, 0.5, 2.0])
    expected = torch.empty((4, 3))
    dequantize([u[:, :3].contiguous(), u[:, 3:].contiguous()], powers, scales, expected)
    out = torch.zeros((6, 5))
    dequantize([u[:, :3], u[:, 3:]], powers, scales, out[1:5, 1:4])
    assert torch.equal(out[1:5, 1:4], expected)
    assert int((out != 0).sum()) == int((expected != 0).sum())
    assert expected[0].tolist() == [3 / 256, 1 / 2 * (1 + 4 / 256), 2 * (2 + 5 / 256)]


# -- a whole layer ---------------------------------------------------------------------------------


def layer(rows: torch.Tensor, weight: torch.Tensor, count: int, *, forward: bool) -> torch.Tensor:
    """What a tenant gets: x W^T or g W by integers in so many planes, with the product in int64."""
    planes, scales = quantize_weight(weight, count)
    if not forward:
        rows, planes = rows * scales, planes.transpose(1, 2)
    limit = bounds(planes).forward
    e = exponents(norms_of(rows), max_row_norm(limit, rows.shape[1]))
    u = quantize_rows(rows, e).long() @ planes.long().transpose(1, 2)
    assert int(u.abs().max()) <= LIMIT
    out = torch.empty(u.shape[1:])
    dequantize([part.int() for part in u], e, scales if forward else None, out)
    return out


SIZES = [(64, 16), (65, 3), (768, 16), (2048, 16), (8192, 16), (16, 64), (16, 768), (16, 8192)]


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("planes", [1, 2])
def test_a_layer_is_accurate(inputs: int, outputs: int, planes: int, forward: bool) -> None:
    """Relative L2 distance from float64: a row's bits are shared by its width.

    Of two planes 2e-4 at most, 8 + 8 bits of weight. Of one 1.4e-3, less than half of bfloat16's 2.9e-3; less
    where rows are short. Rows as models have them: of different lengths, some with an outlier.
    """
    generator = seeded(inputs + outputs)
    weight = 0.02 * torch.randn((outputs, inputs), generator=generator)
    rows = torch.randn((6, inputs if forward else outputs), generator=generator)
    rows *= torch.tensor([1.0, 1e-6, 1e3, 1.0, 1e-30, 1.0]).unsqueeze(1)
    rows[3, 1] = 100.0
    got = layer(rows, weight, planes, forward=forward)
    expected = rows.double() @ (weight.double().T if forward else weight.double())
    most = 2e-4 if planes == 2 else 1.4e-3 if max(inputs, outputs) > 2048 else 1e-3
    for i in range(len(rows)):
        assert relative_error(got[i].double(), expected[i]) <= most, i


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("planes", [1, 2])
def test_a_layer_of_extremes(planes: int, forward: bool) -> None:
    """Zeros stay zeros; the smallest and largest rows keep their digits as far as float32 has them."""
    generator = seeded(5)
    weight = torch.randn((32, 32), generator=generator) / 32
    weight[3] = 0
    rows = torch.randn((5, 32), generator=generator)
    rows[1] = 0
    rows[2] *= 2.0**-120
    rows[3] *= 2.0**120
    rows[4] = 0
    rows[4, 7] = FLOAT_MAX
    got = layer(rows, weight, planes, forward=forward)
    expected = rows.double() @ (weight.double().T if forward else weight.double())
    assert not got[1].any()
    if forward:
        assert not got[:, 3].any()
    for i in (0, 2, 3, 4):
        assert relative_error(got[i].double(), expected[i]) <= 3e-4, i
