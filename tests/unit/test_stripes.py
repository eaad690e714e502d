"""Which outputs and rows are whose, and sums of integers that wrap around."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from provider.executor.stripes import ALONE, Gathering, OutputStripe
from provider.workers.lane import _sum


@given(widths=st.lists(st.integers(8, 300), min_size=1, max_size=4), count=st.integers(1, 8))
def test_every_output_is_with_one_stripe(widths: list[int], count: int) -> None:
    owners = torch.zeros(2 * sum(widths), dtype=torch.int64)
    for index in range(count):
        for columns in OutputStripe(index, count).columns(widths, 2):
            assert columns.stop > columns.start
            owners[columns] += 1
    assert owners.eq(1).all()


@given(outputs=st.integers(1, 300), count=st.integers(1, 8))
def test_every_output_is_in_one_shard(outputs: int, count: int) -> None:
    """As ``fully_shard`` cuts: like ``torch.chunk``, with nothing for those whom it leaves out."""
    shards = [Gathering(index, count, "").shard(outputs) for index in range(count)]
    chunks = list(torch.arange(outputs).chunk(count))
    chunks += [torch.empty(0, dtype=torch.int64)] * (count - len(chunks))
    for shard, chunk in zip(shards, chunks, strict=True):
        assert torch.equal(torch.arange(outputs)[shard], chunk)


@given(rows=st.integers(1, 300), count=st.integers(1, 8))
def test_every_row_of_a_batch_is_with_one_process(rows: int, count: int) -> None:
    owners, sizes = torch.zeros(rows, dtype=torch.int64), []
    for index in range(count):
        own = Gathering(index, count, "").rows(rows)
        owners[own] += 1
        sizes.append(own.stop - own.start)
    assert owners.eq(1).all()
    assert max(sizes) - min(sizes) <= 1


def test_who_is_alone_has_all_rows() -> None:
    assert ALONE.rows(5) == slice(0, 5)


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3), min_size=2, max_size=5))
def test_sums_wrap_around(terms: list[list[int]]) -> None:
    expected = [(sum(column) + 2**31) % 2**32 - 2**31 for column in zip(*terms, strict=True)]
    assert _sum([torch.tensor(term, dtype=torch.int32) for term in terms]).tolist() == expected
