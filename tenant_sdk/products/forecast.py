"""A forecast of the next products, from the products that followed the last time. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tenant_sdk.connection.keys import ProductKey

SPARE_CHUNKS = 4  # in one request that fills what is left of the budget
MIN_ROWS = 4


class PrefetchRequest(NamedTuple):
    """Rows of masks to have multiplied."""

    key: ProductKey
    rows: int


class Forecast:
    """Predicts that each kind is followed by the one that followed it last time.

    Training and decoding repeat themselves.

    Attributes:
        min_rows: the smallest number of rows to request of a kind at once.
    """

    def __init__(self) -> None:
        self._next: dict[ProductKey, PrefetchRequest] = {}
        self._last: ProductKey | None = None
        self._asked: dict[ProductKey, int] = {}
        self.min_rows = MIN_ROWS

    def next_chunk_rows(self, key: ProductKey, max_rows: int) -> int:
        """Returns how many rows to request at once of a kind with small requests.

        They are as many as all requests of this kind had so far, and ``max_rows`` at most.

        A session that writes eight tokens fetches effects for about twelve more, and not for over a hundred.
        """
        return min(max_rows, max(self.min_rows, self._asked.get(key, 0)))

    def record_request(self, key: ProductKey, rows: int) -> None:
        """Record that a product of so many rows has been asked for."""
        self._asked[key] = self._asked.get(key, 0) + rows
        if self._last is not None:
            self._next[self._last] = PrefetchRequest(key, rows)
        self._last = key

    def next_prefetch(
        self,
        stock: Mapping[ProductKey, int],
        *,
        budget_bytes: int,
        row_bytes: Callable[[ProductKey], int],
        chunk_rows: int,
    ) -> PrefetchRequest | None:
        """Returns what to fetch next, or None if there is enough for the next request of every kind.

        Products of one row cost nearly as much as products of many, so effects of small requests are
        fetched for many rows to come, as far as all kinds of a cycle fit into half of the budget.

        Args:
            stock: rows in store or in flight, by kind.
            budget_bytes: what effects in store may take in all.
            row_bytes: the size of one row's effect.
            chunk_rows: the largest number of rows to request for smaller requests, see ``next_chunk_rows``.
        """
        coming = self.cycle()
        if not coming:
            return None
        cycle_bytes = sum(row_bytes(key) for key in coming)
        chunk = max(1, min(chunk_rows, budget_bytes // (2 * cycle_bytes)))
        for key, rows in coming.items():
            wanted = max(rows, self.next_chunk_rows(key, chunk))
            if stock.get(key, 0) < wanted:
                return PrefetchRequest(key, wanted)
        return None

    def idle_prefetch(
        self,
        stock: Mapping[ProductKey, int],
        *,
        budget_bytes: int,
        row_bytes: Callable[[ProductKey], int],
        chunk_rows: int,
    ) -> PrefetchRequest | None:
        """Returns what to fetch when there is enough, until as many cycles are there as the budget takes.

        Arguments are those of ``next_prefetch``.
        """
        coming = self.cycle()
        if not coming:
            return None
        least = min(coming, key=lambda key: stock.get(key, 0))
        rows = budget_bytes // sum(map(row_bytes, coming)) - stock.get(least, 0)
        return PrefetchRequest(least, min(rows, SPARE_CHUNKS * chunk_rows)) if rows >= chunk_rows else None

    def cycle(self) -> dict[ProductKey, int]:
        """Returns the kinds to come before the first comes again, nearest first, with their rows."""
        keys: dict[ProductKey, int] = {}
        last = self._last
        while last is not None and (prefetch := self._next.get(last)) and prefetch.key not in keys:
            keys[prefetch.key] = prefetch.rows
            last = prefetch.key
        return keys

    def evictable(self, stock: Mapping[ProductKey, int], chunk_rows: int) -> list[ProductKey]:
        """Returns the kinds of which there is more than ``next_prefetch`` leads to.

        The tenant does something else now than when their effects were fetched.
        """
        coming = self.cycle()
        return [
            key
            for key, rows in stock.items()
            if rows > (2 * max(coming[key], chunk_rows) if key in coming else 0)
        ]
