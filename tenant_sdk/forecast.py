"""Which products will be asked for next, judged by what followed what the last time. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from shared.header import Direction

MAX_STEPS = 1 << 14  # of one forecast; a token of the deepest models is about a thousand


class Kind(NamedTuple):
    """Requests whose masks and effects are interchangeable, row by row."""

    group: int
    direction: Direction
    members: int


class Order(NamedTuple):
    """Rows of masks to have multiplied."""

    kind: Kind
    rows: int


class Forecast:
    """Training and decoding repeat themselves: after each kind comes what came after it last time."""

    def __init__(self) -> None:
        self._next: dict[Kind, Order] = {}
        self._last: Kind | None = None

    def asked(self, kind: Kind, rows: int) -> None:
        """A product of so many rows has been asked for."""
        if self._last is not None:
            self._next[self._last] = Order(kind, rows)
        self._last = kind

    def upcoming(self) -> Iterator[Order]:
        """The requests to come, nearest first; repeats what it knows until MAX_STEPS."""
        kind = self._last
        for _ in range(MAX_STEPS):
            order = self._next.get(kind) if kind is not None else None
            if order is None:
                return
            yield order
            kind = order.kind

    def next_order(
        self,
        stock: Mapping[Kind, int],
        *,
        budget_bytes: int,
        row_bytes: Callable[[Kind], int],
        batch_rows: int,
    ) -> Order | None:
        """What to have multiplied next, or None if nothing is missing.

        Products of one row cost nearly as much as products of many, so small requests are ordered
        for many rows to come, as far as all kinds of a round fit into half of the budget.

        Args:
            stock: rows in store or ordered, by kind.
            budget_bytes: what effects in store may take in all.
            row_bytes: of one row's effect.
            batch_rows: how many rows to order for requests that are smaller.
        """
        needed: Counter[Kind] = Counter()
        batch = 0
        for kind, rows in self.upcoming():
            needed[kind] += rows
            if needed[kind] <= stock.get(kind, 0):
                continue
            if not batch:
                round_bytes = sum(row_bytes(each) for each in self._round())
                batch = max(1, min(batch_rows, budget_bytes // (2 * round_bytes)))
            return Order(kind, max(rows, batch))
        return None

    def _round(self) -> set[Kind]:
        """The kinds to come before the first comes again."""
        kinds: set[Kind] = set()
        for kind, _ in self.upcoming():
            if kind in kinds:
                break
            kinds.add(kind)
        return kinds
