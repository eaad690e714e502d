"""Which effects are fetched ahead, and which make room: policy, with a clock that the test owns."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.wire.header import Direction
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.forecast import MIN_ROWS, SPARE_CHUNKS
from tenant_sdk.products.mask_store import CHUNK_ROWS, IDLE_SECONDS, MaskStore

KEYS = [ProductKey(group, Direction.FORWARD, 1) for group in range(3)]
ROW_BYTES = 10


@dataclass
class Rows:
    """A chunk of which a test takes rows."""

    remaining: int
    failed: bool = False


def mask_store(budget: int = 1 << 20, *, fill: bool = False) -> MaskStore[Rows]:
    return MaskStore(lambda _: ROW_BYTES, budget, fill_when_idle=fill)


def use(store: MaskStore[Rows], key: ProductKey, rows: int, now: float) -> None:
    """One request: from what is in store, and what is missing is requested at once."""
    missing = rows
    while missing:
        chunk = store.first(key)
        if chunk is None:
            store.add(key, Rows(missing))
            continue
        count = min(missing, chunk.remaining)
        chunk.remaining -= count
        missing -= count
        store.taken(key, now)
    store.record_request(key, rows)


def prefetch_all(store: MaskStore[Rows], now: float) -> int:
    """Prefetch until there is nothing more to fetch; returns how many prefetches."""
    count = 0
    while (prefetch := store.next_prefetch(now)) is not None:
        store.add(prefetch.key, Rows(prefetch.rows))
        count += 1
    return count


def test_rows_are_used_in_the_order_of_their_requests() -> None:
    store, (first, second) = mask_store(), (Rows(2), Rows(3))
    store.add(KEYS[0], first)
    store.add(KEYS[0], second)
    use(store, KEYS[0], 4, 0.0)
    assert (first.remaining, second.remaining) == (0, 1)
    assert store.stock == {KEYS[0]: 1}
    assert store.first(KEYS[0]) is second
    use(store, KEYS[0], 1, 0.0)
    assert store.first(KEYS[0]) is None


def test_chunks_that_failed_are_passed_over() -> None:
    store, good = mask_store(), Rows(5)
    store.add(KEYS[0], Rows(5, failed=True))
    store.add(KEYS[0], good)
    assert store.first(KEYS[0]) is good
    assert store.stock == {KEYS[0]: 5}


@pytest.mark.parametrize("fill", [False, True])
def test_when_idle_the_budget_is_filled_if_asked_for(fill: bool) -> None:
    """And only then: while requests come, a source is asked for what comes next."""
    cycles = 4 * CHUNK_ROWS
    store, now = mask_store(cycles * ROW_BYTES * len(KEYS), fill=fill), 10.0
    for _ in range(2):
        for key in KEYS:
            use(store, key, 1, now)
    prefetch_all(store, now + IDLE_SECONDS / 2)
    assert store.stock == dict.fromkeys(KEYS, MIN_ROWS)
    prefetch_all(store, now + IDLE_SECONDS)
    assert min(store.stock.values()) > cycles - CHUNK_ROWS if fill else max(store.stock.values()) == MIN_ROWS
    assert store.remaining_bytes >= 0


def test_what_is_fetched_when_idle_replaces_nothing() -> None:
    """Requests of one kind alone, as when a gateway looks whether its provider is back."""
    store, now = mask_store(4 * CHUNK_ROWS * ROW_BYTES * len(KEYS), fill=True), 10.0
    for _ in range(2):
        for key in KEYS:
            use(store, key, 1, now)
    prefetch_all(store, now + 1.0)
    before = {key: store.stock[key] for key in KEYS[1:]}
    for _ in range(3):
        use(store, KEYS[0], 1, now + 2.0)
    prefetch_all(store, now + 3.0)
    assert {key: store.stock[key] for key in KEYS[1:]} == before


def test_what_is_no_longer_asked_for_makes_room() -> None:
    store = mask_store(40 * ROW_BYTES)
    store.add(KEYS[0], Rows(30))
    for _ in range(2):
        use(store, KEYS[1], 20, 0.0)
    prefetch = store.next_prefetch(0.0)
    assert prefetch == (KEYS[1], 20)
    assert not store.stock[KEYS[0]]


def test_a_prefetch_that_the_whole_budget_does_not_hold_is_named() -> None:
    store = mask_store(10 * ROW_BYTES)
    for _ in range(2):
        use(store, KEYS[0], 11, 0.0)
    assert store.next_prefetch(0.0) is None
    assert store.too_large == (KEYS[0], 11)


@given(
    requests=st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 100)), max_size=20),
    budget=st.integers(0, 5000),
    fill=st.booleans(),
)
def test_the_budget_is_kept_and_ordering_ends(
    requests: list[tuple[ProductKey, int]], budget: int, fill: bool
) -> None:
    store, now = mask_store(budget, fill=fill), 0.0
    for key, rows in requests:
        use(store, key, rows, now)
        now += 1.0
        assert prefetch_all(store, now) <= budget // ROW_BYTES + 1 + SPARE_CHUNKS
        assert store.remaining_bytes >= 0 or not budget
