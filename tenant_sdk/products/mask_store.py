"""Which masks' effects are in store, which are fetched next, and which are evicted. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.forecast import Forecast, PrefetchRequest

CHUNK_ROWS = 64  # requested at once for decoding
IDLE_SECONDS = 0.5  # without a request, after which more is fetched than is needed next


class Chunk(Protocol):
    """Rows of masks whose effects were requested together. The effects are there or in flight."""

    @property
    def remaining(self) -> int:
        """Rows that no request has taken."""
        ...

    @property
    def failed(self) -> bool:
        """Whether they cannot be used."""
        ...


ChunkT = TypeVar("ChunkT", bound=Chunk)


class MaskStore(Generic[ChunkT]):
    """Chunks of rows by kind of request. Those of a kind are used in the order of their requests.

    Args:
        row_bytes: the size of one row's effects, of all sources together.
        budget_bytes: what effects in store or in flight may take.
        fill_when_idle: prefetch as much as the budget takes while nothing is asked for.

    Attributes:
        chunk_rows: the largest number of rows requested at once for requests that are smaller.
        too_large: a prefetch that the whole budget does not hold, or None.
    """

    def __init__(
        self, row_bytes: Callable[[ProductKey], int], budget_bytes: int, *, fill_when_idle: bool = False
    ) -> None:
        self.budget_bytes, self.chunk_rows = budget_bytes, CHUNK_ROWS
        self.too_large: PrefetchRequest | None = None
        self._row_bytes, self._fill_when_idle = row_bytes, fill_when_idle
        self._chunks: dict[ProductKey, deque[ChunkT]] = {}
        self._forecast = Forecast()
        self._taken_at = 0.0

    def add(self, key: ProductKey, chunk: ChunkT) -> None:
        """Add rows whose effects have just been requested."""
        self._chunks.setdefault(key, deque()).append(chunk)

    def first(self, key: ProductKey) -> ChunkT | None:
        """Returns the chunk whose rows are next, or None if there is none. Forgets chunks that failed."""
        chunks = self._chunks.setdefault(key, deque())
        while chunks and (chunks[0].failed or not chunks[0].remaining):
            chunks.popleft()
        return chunks[0] if chunks else None

    def taken(self, key: ProductKey, now: float) -> None:
        """Record that rows of the first chunk were taken; if they were its last, forget its effects."""
        if not self._chunks[key][0].remaining:
            self._chunks[key].popleft()
        self._taken_at = now

    def record_request(self, key: ProductKey, rows: int) -> bool:
        """Record that a request of so many rows had its masks; True if a prefetch may be necessary now."""
        self._forecast.record_request(key, rows)
        missing = max(rows, self._forecast.next_chunk_rows(key, self.chunk_rows))
        for chunk in self._chunks.get(key, ()):  # there may be very many
            missing -= chunk.remaining
            if missing <= 0:
                return False
        return True

    @property
    def stock(self) -> dict[ProductKey, int]:
        """Rows in store or in flight, by kind."""
        return {key: sum(chunk.remaining for chunk in chunks) for key, chunks in self._chunks.items()}

    @property
    def remaining_bytes(self) -> int:
        """What is left of the budget."""
        return self.budget_bytes - sum(rows * self._row_bytes(key) for key, rows in self.stock.items())

    def next_prefetch(self, now: float) -> PrefetchRequest | None:
        """Returns what to fetch now, perhaps instead of other effects; None: there is enough, or no space."""
        stock = self.stock
        limits: dict[str, Any] = {
            "budget_bytes": self.budget_bytes,
            "row_bytes": self._row_bytes,
            "chunk_rows": self.chunk_rows,
        }
        prefetch = self._forecast.next_prefetch(stock, **limits)
        if prefetch is not None:
            return prefetch if self._evict_for(prefetch) else None
        if not self._fill_when_idle or now < self._taken_at + IDLE_SECONDS:
            return None
        prefetch = self._forecast.idle_prefetch(stock, **limits)
        # Nothing is thrown away for what is not needed next.
        return prefetch if prefetch is not None and self._size(prefetch) <= self.remaining_bytes else None

    def prefetch_whole_chunks(self) -> None:
        """Request ``chunk_rows`` at once from now on, also for kinds of which few rows were asked for."""
        self._forecast.min_rows = self.chunk_rows

    def clear(self) -> None:
        """Forget all chunks."""
        self._chunks.clear()

    def _size(self, prefetch: PrefetchRequest) -> int:
        return prefetch.rows * self._row_bytes(prefetch.key)

    def _evict_for(self, prefetch: PrefetchRequest) -> bool:
        """Returns whether a prefetch fits into the budget, perhaps after it evicts what will not be used."""
        size = self._size(prefetch)
        if size > self.budget_bytes:
            self.too_large = prefetch
            return False
        if size > self.remaining_bytes:
            for key in self._forecast.evictable(self.stock, self.chunk_rows):
                self._chunks[key].popleft()
                if size <= self.remaining_bytes:
                    break
        return size <= self.remaining_bytes
