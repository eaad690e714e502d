"""What is fetched ahead: a policy without I/O."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shared.wire.header import Direction
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.forecast import Forecast, PrefetchRequest

A, B, C, D = (ProductKey(group, Direction.FORWARD, 1) for group in range(4))
PLENTY = 1 << 40


def forecast(*asked: tuple[ProductKey, int]) -> Forecast:
    made = Forecast()
    for key, rows in asked:
        made.record_request(key, rows)
    return made


def next_prefetch(
    made: Forecast,
    stock: dict[ProductKey, int],
    *,
    budget: int = PLENTY,
    row_bytes: dict[ProductKey, int] | None = None,
    chunk_rows: int = 1,
) -> PrefetchRequest | None:
    return made.next_prefetch(
        stock,
        budget_bytes=budget,
        row_bytes=lambda key: (row_bytes or {}).get(key, 100),
        chunk_rows=chunk_rows,
    )


def test_nothing_is_known_at_first() -> None:
    assert next_prefetch(forecast(), {}) is None
    assert next_prefetch(forecast((A, 3)), {}) is None
    assert next_prefetch(forecast((A, 3), (B, 3)), {}) is None  # what follows B has not been seen


def test_a_cycle_comes_again_nearest_first() -> None:
    made = forecast((A, 2), (B, 3), (C, 4), (A, 2))
    assert list(made.cycle().items()) == [(B, 3), (C, 4), (A, 2)]
    stock: dict[ProductKey, int] = {}
    fetched = []
    while (prefetch := next_prefetch(made, stock)) is not None:
        fetched.append(prefetch)
        stock[prefetch.key] = stock.get(prefetch.key, 0) + prefetch.rows
    assert fetched == [PrefetchRequest(B, 3), PrefetchRequest(C, 4), PrefetchRequest(A, 2)]


def test_what_is_in_stock_is_not_fetched() -> None:
    made = forecast((A, 2), (B, 3), (A, 2))
    assert next_prefetch(made, {B: 3}) == PrefetchRequest(A, 2)
    assert next_prefetch(made, {B: 2}) == PrefetchRequest(B, 3)
    assert next_prefetch(made, {B: 6, A: 2}) is None


def test_a_kind_that_follows_itself() -> None:
    made = forecast((A, 1), (A, 1))
    assert made.cycle() == {A: 1}
    assert next_prefetch(made, {A: 1}) is None
    assert next_prefetch(made, {}) == PrefetchRequest(A, 1)


def test_when_idle_as_many_cycles_as_the_budget_takes() -> None:
    made = forecast((A, 2), (B, 3), (A, 2))
    stock: dict[ProductKey, int] = {}
    limits: dict[str, Any] = {"budget_bytes": 1000, "row_bytes": lambda _: 10, "chunk_rows": 8}
    while (prefetch := made.idle_prefetch(stock, **limits)) is not None:
        stock[prefetch.key] = stock.get(prefetch.key, 0) + prefetch.rows
        assert abs(stock.get(A, 0) - stock.get(B, 0)) <= 32  # all kinds alike
    assert stock == {A: 50, B: 50}
    assert forecast((A, 2)).idle_prefetch({}, **limits) is None


def test_a_new_habit_replaces_the_old() -> None:
    made = forecast((A, 64), (B, 64), (A, 64), (B, 64), (A, 64))
    for _ in range(2):  # from training to decoding
        for key in (C, D):
            made.record_request(key, 1)
    assert made.cycle() == {C: 1, D: 1}


def test_what_the_new_habit_does_not_need_is_surplus() -> None:
    made = forecast((A, 1), (B, 1), (A, 1), (C, 1), (D, 8), (C, 1))
    assert made.cycle() == {D: 8, C: 1}
    stock = {A: 1, B: 0, C: 8, D: 17}
    assert made.evictable(stock, chunk_rows=4) == [A, D]
    assert made.evictable({**stock, C: 9}, chunk_rows=4) == [A, C, D]
    assert made.evictable({}, chunk_rows=4) == []
    assert forecast().evictable({A: 1}, chunk_rows=4) == [A]


def test_small_requests_are_fetched_for_as_many_rows_as_there_were() -> None:
    made = forecast((A, 1), (B, 1), (A, 1))
    assert next_prefetch(made, {}, chunk_rows=64) == PrefetchRequest(B, 4)
    assert next_prefetch(made, {B: 64}, chunk_rows=64) == PrefetchRequest(A, 4)
    for cycles in (5, 20, 63):
        made = forecast(*[(A, 1), (B, 1)] * cycles, (A, 1))
        assert next_prefetch(made, {}, chunk_rows=64) == PrefetchRequest(B, cycles)
        assert next_prefetch(made, {B: 64}, chunk_rows=64) == PrefetchRequest(A, cycles + 1)
    many = forecast(*[(A, 1), (B, 1)] * 100, (A, 1))
    assert next_prefetch(many, {}, chunk_rows=64) == PrefetchRequest(B, 64)


def test_large_requests_are_fetched_as_they_are() -> None:
    assert next_prefetch(forecast((A, 512), (A, 512)), {}, chunk_rows=64) == PrefetchRequest(A, 512)


def test_a_cycle_of_chunks_takes_half_of_the_budget() -> None:
    made = forecast(*[(A, 1), (B, 1), (C, 1)] * 64, (A, 1))
    row_bytes = {A: 10, B: 20, C: 30}
    for budget, rows in ((PLENTY, 64), (2 * 60 * 64, 64), (2 * 60 * 10, 10), (2 * 60, 1), (10, 1), (0, 1)):
        prefetch = next_prefetch(made, {}, budget=budget, row_bytes=row_bytes, chunk_rows=64)
        assert prefetch == PrefetchRequest(B, rows)


KEYS = st.sampled_from([A, B, C, D])


@given(
    asked=st.lists(st.tuples(KEYS, st.integers(1, 100)), max_size=12),
    stock=st.dictionaries(KEYS, st.integers(0, 300)),
    budget=st.integers(0, 100_000),
    chunk_rows=st.integers(1, 64),
)
def test_whatever_was_asked(
    asked: list[tuple[ProductKey, int]], stock: dict[ProductKey, int], budget: int, chunk_rows: int
) -> None:
    """Nothing is fetched that was never asked for, enough for the request and not too much; what is fetched
    is not surplus; and it ends."""
    made = forecast(*asked)
    largest = dict.fromkeys((key for key, _ in asked), 0)
    for key, rows in asked:
        largest[key] = max(largest[key], rows)
    fetched: dict[ProductKey, int] = {}
    while (
        prefetch := next_prefetch(made, {**stock, **fetched}, budget=budget, chunk_rows=chunk_rows)
    ) is not None:
        assert 1 <= prefetch.rows <= max(largest[prefetch.key], chunk_rows)
        before = fetched.get(prefetch.key, stock.get(prefetch.key, 0))
        assert before < max(largest[prefetch.key], chunk_rows)
        fetched[prefetch.key] = before + prefetch.rows
    assert fetched.keys() <= largest.keys()
    assert not set(made.evictable(fetched, chunk_rows)) & set(fetched)
