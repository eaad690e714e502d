"""Which outputs are whose, and sums of integers that wrap around."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from provider.executor.stripes import Stripe
from provider.workers.lane import _sum


@given(widths=st.lists(st.integers(8, 300), min_size=1, max_size=4), count=st.integers(1, 8))
def test_every_output_is_with_one_stripe(widths: list[int], count: int) -> None:
    owners = torch.zeros(2 * sum(widths), dtype=torch.int64)
    for index in range(count):
        for columns in Stripe(index, count).columns(widths, 2):
            assert columns.stop > columns.start
            owners[columns] += 1
    assert owners.eq(1).all()


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3), min_size=2, max_size=5))
def test_sums_wrap_around(terms: list[list[int]]) -> None:
    expected = [(sum(column) + 2**31) % 2**32 - 2**31 for column in zip(*terms, strict=True)]
    assert _sum([torch.tensor(term, dtype=torch.int32) for term in terms]).tolist() == expected
