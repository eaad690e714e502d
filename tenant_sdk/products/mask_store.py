"""Which masks' effects are in store, which are ordered next, and which make room for others. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.forecast import Forecast, PrefetchRequest

BATCH_ROWS = 64  # ordered at once for decoding
IDLE_SECONDS = 0.5  # without a request, after which more is fetched than is needed next


class Stocked(Protocol):
    """Rows of masks that were ordered together; their effects are there or under way."""

    @property
    def remaining(self) -> int:
        """Rows that no request has taken."""
        ...

    @property
    def failed(self) -> bool:
        """Whether they cannot be used."""
        ...


BatchT = TypeVar("BatchT", bound=Stocked)


class MaskStore(Generic[BatchT]):
    """Batches of rows by kind of request, each used in the order in which it was ordered.

    Args:
        row_bytes: of one row's effects, of all sources together.
        budget_bytes: what effects in store or ordered ahead may take.
        fill_when_idle: order as much as the budget takes while nothing is asked for.

    Attributes:
        batch_rows: ordered at once at most for requests that are smaller.
        too_large: an order that the whole budget does not hold, or None.
    """

    def __init__(
        self, row_bytes: Callable[[ProductKey], int], budget_bytes: int, *, fill_when_idle: bool = False
    ) -> None:
        self.budget_bytes, self.batch_rows = budget_bytes, BATCH_ROWS
        self.too_large: PrefetchRequest | None = None
        self._row_bytes, self._fill_when_idle = row_bytes, fill_when_idle
        self._batches: dict[ProductKey, deque[BatchT]] = {}
        self._forecast = Forecast()
        self._taken_at = 0.0

    def add(self, key: ProductKey, batch: BatchT) -> None:
        """Rows that have just been ordered."""
        self._batches.setdefault(key, deque()).append(batch)

    def first(self, key: ProductKey) -> BatchT | None:
        """The batch whose rows are next, or None if there are none. Batches that failed are forgotten."""
        batches = self._batches.setdefault(key, deque())
        while batches and (batches[0].failed or not batches[0].remaining):
            batches.popleft()
        return batches[0] if batches else None

    def taken(self, key: ProductKey, now: float) -> None:
        """Rows of the first batch were taken; if they were its last, its effects are forgotten."""
        if not self._batches[key][0].remaining:
            self._batches[key].popleft()
        self._taken_at = now

    def note_request(self, key: ProductKey, rows: int) -> bool:
        """A request of so many rows had its masks; whether something may have to be ordered now."""
        self._forecast.note_request(key, rows)
        missing = max(rows, self._forecast.batch_of(key, self.batch_rows))
        for batch in self._batches.get(key, ()):  # there may be very many
            missing -= batch.remaining
            if missing <= 0:
                return False
        return True

    @property
    def stock(self) -> dict[ProductKey, int]:
        """Rows in store or ordered, by kind."""
        return {key: sum(batch.remaining for batch in batches) for key, batches in self._batches.items()}

    @property
    def remaining_bytes(self) -> int:
        """Of the budget."""
        return self.budget_bytes - sum(rows * self._row_bytes(key) for key, rows in self.stock.items())

    def next_order(self, now: float) -> PrefetchRequest | None:
        """What is to be ordered now; None if there is enough, or no room. Makes room if that helps."""
        stock = self.stock
        limits: dict[str, Any] = {
            "budget_bytes": self.budget_bytes,
            "row_bytes": self._row_bytes,
            "batch_rows": self.batch_rows,
        }
        order = self._forecast.next_order(stock, **limits)
        if order is not None:
            return order if self._make_room(order) else None
        if not self._fill_when_idle or now < self._taken_at + IDLE_SECONDS:
            return None
        order = self._forecast.idle_prefetch(stock, **limits)
        # Nothing is thrown away for what is not needed next.
        return order if order is not None and self._size(order) <= self.remaining_bytes else None

    def order_whole_batches(self) -> None:
        """Order ``batch_rows`` at once from now on, also for kinds of which few rows were asked for."""
        self._forecast.least_rows = self.batch_rows

    def clear(self) -> None:
        """Forget all batches."""
        self._batches.clear()

    def _size(self, order: PrefetchRequest) -> int:
        return order.rows * self._row_bytes(order.key)

    def _make_room(self, order: PrefetchRequest) -> bool:
        """Whether an order fits into the budget, perhaps after throwing away what will not be used."""
        size = self._size(order)
        if size > self.budget_bytes:
            self.too_large = order
            return False
        if size > self.remaining_bytes:
            for key in self._forecast.evictable(self.stock, self.batch_rows):
                self._batches[key].popleft()
                if size <= self.remaining_bytes:
                    break
        return size <= self.remaining_bytes
