"""Planes of weights against exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_ring import FLOAT_MAX, SEEDS, matrices, seeded

import shared.ring.fixed_point
from shared.ring.fixed_point import EVEN, LARGEST, best_norm, bounds, quantize_weight, squared_norms


def reference(row: list[float]) -> tuple[float, list[int], list[int]]:
    """Scale and both planes of one output channel. Each float() is one rounding to binary64."""
    scale = float(Fraction(max(abs(w) for w in row)) / 127)
    if np.float32(scale) == 0:
        return 0.0, [0] * len(row), [0] * len(row)
    ratios = [Fraction(float(Fraction(w) / Fraction(scale))) for w in row]
    first = [round(ratio) for ratio in ratios]  # of Fractions, ties go to even
    second = [min(127, max(-128, round((ratio - w1) * 256))) for ratio, w1 in zip(ratios, first, strict=True)]
    return float(np.float32(scale)), first, second


def reference_of_norm(rows: list[list[float]], norm: float) -> tuple[list[float], list[list[int]]]:
    """Scales and rows of one plane. Each float() and each operation on floats is one rounding to binary64."""
    scales, plane = [], []
    for row in rows:
        unit = float(Fraction(max(abs(w) for w in row)) / LARGEST)
        squares = sum(round(Fraction(float(Fraction(w) / Fraction(unit)))) ** 2 for w in row) if unit else 0
        scale = unit * math.sqrt(squares) / norm
        zero = np.float32(scale) == 0
        ratios = [Fraction(0) if zero else Fraction(float(Fraction(w) / Fraction(scale))) for w in row]
        scales.append(float(np.float32(scale)))
        plane.append([max(-LARGEST, min(LARGEST, round(ratio))) for ratio in ratios])
    return scales, plane


def reference_plane(rows: list[list[float]]) -> tuple[list[float], list[list[int]]]:
    """Of the norm that suits the layer."""
    first = reference_of_norm(rows, LARGEST)
    largest = max(sum(row[i] ** 2 for row in first[1]) for i in range(len(rows[0])))
    norm = best_norm(largest, len(rows), len(rows[0]))
    return first if norm == LARGEST else reference_of_norm(rows, norm)


def check_planes(weight: torch.Tensor) -> None:
    """Planes and scales are the reference's, row for row, in both numerics."""
    planes, scales = quantize_weight(weight, 1)
    assert (planes.dtype, planes.shape) == (torch.int16, (1, *weight.shape))
    assert (scales.tolist(), planes[0].tolist()) == reference_plane(weight.double().tolist())
    planes, scales = quantize_weight(weight, 2)
    assert (planes.dtype, planes.shape) == (torch.int8, (2, *weight.shape))
    assert (scales.dtype, scales.shape) == (torch.float32, weight.shape[:1])
    for i, row in enumerate(weight.double().tolist()):
        scale, first, second = reference(row)
        assert scales[i].item() == scale
        assert planes[0, i].tolist() == first
        assert planes[1, i].tolist() == second


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_planes_are_those_of_exact_arithmetic(dtype: torch.dtype) -> None:
    @given(matrices())
    def check(values: torch.Tensor) -> None:
        weight = values.to(dtype)
        if weight.isfinite().all():
            check_planes(weight)
            check_planes(weight.T)  # as a checkpoint of Conv1D is read
        else:  # the largest float32 is infinite in 16 bits
            for planes in (1, 2):
                with pytest.raises(ValueError, match="infinity"):
                    quantize_weight(weight, planes)

    check()


@given(SEEDS)
def test_planes_of_gaussian_weights(seed: int) -> None:
    """More digits than the specials have; every element is reconstructed to half a step of plane 2."""
    weight = 0.02 * torch.randn((5, 33), generator=seeded(seed))
    check_planes(weight)
    planes, scales = quantize_weight(weight, 2)
    again = scales.double().unsqueeze(1) * (planes[0].double() + planes[1].double() / 256)
    # Half a step; a whole one where +128 is clipped to 127; and the scale's own rounding.
    step = scales.double().unsqueeze(1) / 256
    assert ((again - weight.double()).abs() <= step * (1 / 2 + (planes[1] == 127) / 2 + 127 * 2**-16)).all()


@given(SEEDS)
def test_rows_of_one_plane_have_one_norm(seed: int) -> None:
    """So Cauchy-Schwarz wastes nothing; rounding moves a norm by half a step in each element."""
    weight = torch.randn((9, 40), generator=seeded(seed)) * 2.0 ** torch.arange(-20, 25, 5).unsqueeze(1)
    planes, scales = quantize_weight(weight, 1)
    norms = planes[0].double().norm(dim=1)
    assert (norms.max() - norms.min()) <= 40**0.5
    again = scales.double().unsqueeze(1) * planes[0].double()
    step = scales.double().unsqueeze(1)
    assert ((again - weight.double()).abs() <= step * (1 / 2 + LARGEST * 2.0**-24)).all()


def test_a_row_of_one_element_has_the_largest_integer() -> None:
    planes, scales = quantize_weight(torch.tensor([[0.0, -3.0, 0.0], [5.0, 0.0, 0.0]]), 1)
    assert planes.tolist() == [[[0, -LARGEST, 0], [LARGEST, 0, 0]]]
    assert torch.equal(scales, torch.tensor([3.0, 5.0]) / LARGEST)


def error_of_norm(norm: float, outputs: int, inputs: int, columns: float) -> float:
    """Squared, forward and backward together, of a group of two; times 12 (docs/explanation/numerics.md)."""
    weight = inputs / norm**2
    forward = inputs * norm**2 / 2**62
    backward = 2 * outputs * 2 * columns * norm**2 / 2**62
    return 2 * weight + forward + backward


@given(
    outputs=st.integers(1, 60_000),
    inputs=st.integers(1, 20_000),
    share=st.floats(0, 1),
    other=st.floats(0.3, 3),
)
def test_no_other_norm_rounds_less(outputs: int, inputs: int, share: float, other: float) -> None:
    """Whatever part of the rows is in the largest column: from an even share of it to all of it."""
    columns = max(1, round(LARGEST**2 * outputs * (share + (1 - share) / inputs)))
    norm = best_norm(columns, outputs, inputs)
    assert norm <= LARGEST
    ratio = min(columns / LARGEST**2, EVEN * outputs / inputs)
    if norm * other <= LARGEST:
        least = error_of_norm(norm, outputs, inputs, ratio)
        assert error_of_norm(norm * other, outputs, inputs, ratio) >= least * (1 - 1e-9)


def test_ties_go_to_even_and_the_second_plane_is_clipped() -> None:
    row = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 1 / 512, 3 / 512, -5 / 512, 7 / 512]
    planes, scales = quantize_weight(torch.tensor([row]), 2)
    assert scales.tolist() == [1.0]
    assert planes[0, 0].tolist() == [127, 0, 2, 2, 0, -2, 0, 0, 0, 0]
    assert planes[1, 0].tolist() == [0, 127, -128, 127, -128, 127, 0, 2, -2, 4]


def test_empty_rows_and_outliers() -> None:
    weight = torch.zeros((4, 3))
    weight[1, 0], weight[1, 1] = FLOAT_MAX, 1.0
    weight[2] = torch.tensor([2.0**-149, -(2.0**-149), 0.0])
    weight[3] = torch.tensor([-3.0, 0.0, 3.0])
    planes, scales = quantize_weight(weight, 2)
    assert planes[0].tolist() == [[0, 0, 0], [127, 0, 0], [0, 0, 0], [-127, 0, 127]]
    assert not planes[1].any()
    assert (scales == 0).tolist() == [True, False, True, False]
    assert bounds(planes) == (2 * 127**2, 2 * 127**2)
    assert bounds(torch.zeros((2, 3, 4), dtype=torch.int8)) == (0, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_weight_that_is_not_finite(bad: float, dtype: torch.dtype) -> None:
    weight = torch.ones((3, 4), dtype=dtype)
    weight[2, 1] = bad
    for planes in (1, 2):
        with pytest.raises(ValueError, match="NaN, infinity"):
            quantize_weight(weight, planes)


def test_a_scale_that_float32_does_not_hold() -> None:
    large = torch.tensor([[1e44, 1.0]], dtype=torch.float64)
    small = torch.tensor([[8e-44, 5e-324], [5e-322, 1e-322]], dtype=torch.float64)
    for count in (1, 2):
        with pytest.raises(ValueError, match="too large for float32"):
            quantize_weight(large, count)
        planes, scales = quantize_weight(small, count)
        assert not planes.any()
        assert scales.tolist() == [0.0, 0.0]


@given(values=matrices(), elements=st.integers(1, 20), count=st.integers(1, 2))
def test_large_weights_are_done_in_pieces(values: torch.Tensor, elements: int, count: int) -> None:
    weight = values.float()
    whole = quantize_weight(weight, count)
    squares = squared_norms(whole.planes)[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared.ring.fixed_point, "_STEP_ELEMENTS", elements)
        pieces = quantize_weight(weight, count)
        assert torch.equal(pieces.planes, whole.planes)
        assert torch.equal(pieces.scales, whole.scales)
        assert torch.equal(squared_norms(whole.planes)[1], squares)
        found = bounds(whole.planes)
    assert found == bounds(whole.planes)
