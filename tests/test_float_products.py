"""Float products of few rows: native code against float64, and a weight's blocks against torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from provider.discovery import discover
from provider.weights import FEW_ROWS, FloatWeight
from shared import ring_native
from shared.checkpoint import Checkpoint
from shared.header import Direction, member_indices

MODEL = Path(__file__).resolve().parent.parent / "examples" / "base_model"
native = pytest.mark.skipif(ring_native.LIBRARY is None, reason="no native code was compiled")


@native
@pytest.mark.parametrize("inner", [1, 7, 8, 9, 64, 771])
@pytest.mark.parametrize("columns", [1, 2, 31, 33, 1000])
def test_every_sum_is_there(inner: int, columns: int) -> None:
    """Also for sizes that no vector divides, with one thread and with two."""
    generator = torch.Generator().manual_seed(inner * columns)
    weight = torch.randn(columns, inner, generator=generator)
    for rows in [*range(1, 10), FEW_ROWS]:
        x = torch.randn(rows, inner, generator=generator)
        out = torch.full((rows, columns), torch.nan)
        ring_native.multiply_floats(x, weight, out)
        exact = x.double() @ weight.T.double()
        # What rounding each product and sum in any order can make: n * eps * |x| |w|.
        bound = (inner + 1) * torch.finfo(torch.float32).eps * (x.double().abs() @ weight.T.double().abs())
        assert (out.double() - exact).abs().le(bound).all()


@native
def test_elements_that_do_not_lie_side_by_side_are_refused() -> None:
    with pytest.raises(ValueError, match="side by side"):
        ring_native.multiply_floats(torch.ones(8, 2).T, torch.ones(3, 8), torch.empty(2, 3))


@pytest.mark.parametrize("members", [0b111, 0b001, 0b101])
@pytest.mark.parametrize("rows", [0, 1, 2, FEW_ROWS, FEW_ROWS + 1])
def test_blocks_are_torchs(members: int, rows: int) -> None:
    """Within 1e-5 of sums that are about 1: the order of additions differs."""
    checkpoint = Checkpoint(MODEL)
    info = discover(checkpoint, serve_head=False).groups[0]
    weight = FloatWeight(checkpoint, info, torch.device("cpu"), torch.float32)
    x = torch.randn(rows, info.inputs, generator=torch.Generator().manual_seed(0))
    blocks = weight.product(Direction.FORWARD, members, [x])
    for i, block in zip(member_indices(members), blocks, strict=True):
        assert block.is_contiguous()
        torch.testing.assert_close(
            block, x @ checkpoint.member_weight(info.members[i]).float().T, rtol=0, atol=1e-5
        )
