"""A forecast of the next products, from the products that followed the last time. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tenant_sdk.connection.keys import ProductKey

SPARE_BATCHES = 4  # in one request that fills what is left of the budget
MIN_ROWS = 4


class PrefetchRequest(NamedTuple):
    """Rows of masks to have multiplied."""

    key: ProductKey
    rows: int


class Forecast:
    """Training and decoding repeat themselves: after each kind comes what came after it last time.

    Attributes:
        least_rows: that are ordered of a kind at once.
    """

    def __init__(self) -> None:
        self._next: dict[ProductKey, PrefetchRequest] = {}
        self._last: ProductKey | None = None
        self._asked: dict[ProductKey, int] = {}
        self.least_rows = MIN_ROWS

    def batch_of(self, key: ProductKey, max_rows: int) -> int:
        """Rows to order at once of a kind with small requests: as many as there were, ``max_rows`` at most.

        A session that writes eight tokens fetches effects for about twelve more, and not for over a hundred.
        """
        return min(max_rows, max(self.least_rows, self._asked.get(key, 0)))

    def note_request(self, key: ProductKey, rows: int) -> None:
        """A product of so many rows has been asked for."""
        self._asked[key] = self._asked.get(key, 0) + rows
        if self._last is not None:
            self._next[self._last] = PrefetchRequest(key, rows)
        self._last = key

    def next_order(
        self,
        stock: Mapping[ProductKey, int],
        *,
        budget_bytes: int,
        row_bytes: Callable[[ProductKey], int],
        batch_rows: int,
    ) -> PrefetchRequest | None:
        """What to have multiplied next, or None if there is enough for the next request of every kind.

        Products of one row cost nearly as much as products of many, so small requests are ordered
        for many rows to come, as far as all kinds of a round fit into half of the budget.

        Args:
            stock: rows in store or ordered, by kind.
            budget_bytes: what effects in store may take in all.
            row_bytes: of one row's effect.
            batch_rows: how many rows to order at most for requests that are smaller, see ``batch_of``.
        """
        coming = self.round()
        if not coming:
            return None
        round_bytes = sum(row_bytes(key) for key in coming)
        batch = max(1, min(batch_rows, budget_bytes // (2 * round_bytes)))
        for key, rows in coming.items():
            wanted = max(rows, self.batch_of(key, batch))
            if stock.get(key, 0) < wanted:
                return PrefetchRequest(key, wanted)
        return None

    def idle_prefetch(
        self,
        stock: Mapping[ProductKey, int],
        *,
        budget_bytes: int,
        row_bytes: Callable[[ProductKey], int],
        batch_rows: int,
    ) -> PrefetchRequest | None:
        """What to have multiplied when there is enough, until as many rounds are there as the budget takes.

        Arguments are those of ``next_order``.
        """
        coming = self.round()
        if not coming:
            return None
        least = min(coming, key=lambda key: stock.get(key, 0))
        rows = budget_bytes // sum(map(row_bytes, coming)) - stock.get(least, 0)
        return PrefetchRequest(least, min(rows, SPARE_BATCHES * batch_rows)) if rows >= batch_rows else None

    def round(self) -> dict[ProductKey, int]:
        """The kinds to come before the first comes again, nearest first, with their rows."""
        keys: dict[ProductKey, int] = {}
        last = self._last
        while last is not None and (order := self._next.get(last)) and order.key not in keys:
            keys[order.key] = order.rows
            last = order.key
        return keys

    def evictable(self, stock: Mapping[ProductKey, int], batch_rows: int) -> list[ProductKey]:
        """Kinds of which there is more than ``next_order`` leads to: the tenant does something else now."""
        coming = self.round()
        return [
            key
            for key, rows in stock.items()
            if rows > (2 * max(coming[key], batch_rows) if key in coming else 0)
        ]
