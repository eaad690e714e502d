"""The product of segments: each one's rows by its own matrices, whatever the segments are.

Compared with the product of each segment alone in float64, computed otherwise: what is left is float32's own
rounding of sums of at most 24 products, 1e-5; bfloat16 has 8 bits, 3e-2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared import compat
from tenant_sdk.tuning.segmented_lora import Segments, segmented_lora

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-12}
SEGMENT = st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(1, 11)), st.floats(-4, 4))


class Case:
    """Rows of segments (rows, rank or None, scale), and the gradient that comes back."""

    def __init__(
        self,
        segments: list[tuple[int, int | None, float]],
        width: int = 24,
        outputs: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        random = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=random) / 4).to(dtype).requires_grad_()

        self.counts = [count for count, _, _ in segments]
        self.scales = [scale for _, _, scale in segments]
        self.x, self.gradient = draw(sum(self.counts), width), draw(sum(self.counts), outputs).detach()
        self.downs = [None if rank is None else draw(rank, width) for _, rank, _ in segments]
        self.ups = [None if rank is None else draw(outputs, rank) for _, rank, _ in segments]

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [self.x, *(w for w in (*self.downs, *self.ups) if w is not None)]

    def got(self) -> list[torch.Tensor]:
        """The product, and gradients of rows and weights."""
        out = segmented_lora(self.x, self.counts, self.downs, self.ups, self.scales)
        return [out, *torch.autograd.grad(out, self.leaves, self.gradient)]

    def expected(self) -> list[torch.Tensor]:
        """The same, one segment after the other, its gradients written out."""
        out, begin = torch.zeros(self.gradient.shape).double(), 0
        gx = torch.zeros(self.x.shape).double()
        downs, ups = [], []
        for count, down, up, scale in zip(self.counts, self.downs, self.ups, self.scales, strict=True):
            rows = slice(begin, begin + count)
            begin += count
            if down is None or up is None:
                continue
            x, g, a, b = (t.detach().double() for t in (self.x[rows], self.gradient[rows], down, up))
            out[rows], gx[rows] = scale * x @ a.T @ b.T, scale * g @ b @ a
            downs.append(scale * (g @ b).T @ x)
            ups.append(scale * g.T @ (x @ a.T))
        return [out, gx, *downs, *ups]


def check(case: Case) -> None:
    tolerance = TOLERANCE[case.x.dtype]
    for got, expected in zip(case.got(), case.expected(), strict=True):
        assert got.dtype == case.x.dtype
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance * scale)


@given(
    st.lists(SEGMENT, min_size=1, max_size=6).filter(lambda s: any(rank for _, rank, _ in s)),
    st.sampled_from([(24, 16), (8, 8), (7, 16), (24, 5), (1, 1)]),
    st.integers(0, 2**31),
)
def test_each_segment_is_as_alone(
    segments: list[tuple[int, int | None, float]], shape: tuple[int, int], seed: int
) -> None:
    """Ranks that are no multiples, segments without rows or adapter, widths that torch refuses."""
    check(Case(segments, *shape, seed=seed))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_dtypes(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    compat.torch_grouped_product.cache_clear()
    check(Case([(5, 1, 2.0), (0, 3, 1.0), (4, None, 1.0), (1, 17, 0.5)], 32, 8, dtype))
    assert bool(caplog.records) == (dtype == torch.float64)  # what torch's does not take
    compat.torch_grouped_product.cache_clear()


def test_without_torch_s_grouped_product(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(7, 8, requires_grad=True)

    def refuses(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("only on a GPU")

    expected = Case([(5, 3, 2.0), (2, 4, 1.0)]).got()
    for instead, reason in ((wrong, ""), (refuses, "only on a GPU"), (None, "grouped_mm")):
        compat.torch_grouped_product.cache_clear()
        caplog.clear()
        with monkeypatch.context() as patch:
            if instead is None:
                patch.delattr(torch.nn.functional, "grouped_mm", raising=False)
            else:
                patch.setattr(torch.nn.functional, "grouped_mm", instead, raising=False)
            for got, each in zip(Case([(5, 3, 2.0), (2, 4, 1.0)]).got(), expected, strict=True):
                torch.testing.assert_close(got, each)
        (record,) = caplog.records
        assert "torch.nn.functional.grouped_mm cannot be used" in record.getMessage()
        assert reason in record.getMessage()
    compat.torch_grouped_product.cache_clear()


def test_it_is_tried_where_gradients_and_dtypes_are_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    compat.torch_grouped_product.cache_clear()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert compat.torch_grouped_product(CPU, torch.float32) is not compat.plain_grouped_product
    assert not caplog.records


def test_nothing_of_one_segment_reaches_another() -> None:
    """Not even a NaN, nor an infinity in the weights."""
    segments: list[tuple[int, int | None, float]] = [(4, 3, 1.0), (4, 8, 2.0), (3, None, 1.0)]
    case, other = Case(segments), Case(segments)
    with torch.no_grad():
        other.x[4:8] = torch.nan
        other.gradient[4:8] = torch.inf
        assert other.downs[1] is not None
        other.downs[1].fill_(torch.inf)
    for mine, theirs in zip(case.got(), other.got(), strict=True):
        if len(mine) == len(case.x):
            assert torch.equal(mine[:4], theirs[:4])
            assert torch.equal(mine[8:], theirs[8:])
    _, _, down, _, up, _ = case.got()
    _, _, other_down, _, other_up, _ = other.got()
    assert torch.equal(down, other_down)
    assert torch.equal(up, other_up)


@given(
    st.lists(st.integers(-1, 4), min_size=1, max_size=12),
    st.sampled_from([(24, 16, 8), (20, 6, 3)]),
    st.integers(0, 99),
)
def test_rows_in_any_order(adapters: list[int], shape: tuple[int, int, int], seed: int) -> None:
    """All of one adapter, as many of each, or anything else; rows without one, whose result is 0."""
    width, outputs, rank = shape
    random = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=random) / 4

    x, pairs = (
        draw(len(adapters), width),
        [(draw(5, 1, rank, width), draw(5, 1, n, rank)) for n in (outputs, 4)],
    )
    segments = Segments(torch.tensor(adapters), 5)
    assert segments.any == (max(adapters) >= 0)
    products = []
    for product, (_, b) in zip(segments.products(x, pairs) if segments.any else (), pairs, strict=False):
        products.append(torch.zeros(len(x), b.shape[2]))
        products[-1][slice(None) if segments.rows is None else segments.rows] = product
    for product, (a, b) in zip(products, pairs, strict=segments.any):
        for row, each, at in zip(product, x, adapters, strict=True):
            expected = torch.zeros(len(row)) if at < 0 else b[at, 0] @ (a[at, 0] @ each)
            torch.testing.assert_close(row, expected, atol=1e-5, rtol=0)
