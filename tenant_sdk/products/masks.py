"""Masks that hide rows on the ring, and the effects that undo them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any, Protocol

import torch

from shared.errors import ConfigurationError, ConnectionLost, RequestTimeout
from shared.forks import ForkGuard, register_for_fork
from shared.ring.mask_stream import MaskStream
from shared.wire.header import EXACT, SEED_BYTES, RequestClass
from shared.wire.protocol import GroupShape
from tenant_sdk.connection.channel import Entropy
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.forecast import Forecast, PrefetchRequest
from tenant_sdk.products.mask_sources import SeedSource
from tenant_sdk.products.modes import Privacy

log = logging.getLogger(__name__)

BATCH_ROWS = 64  # ordered at once for decoding
IDLE_SECONDS = 0.5  # without a request, after which more is fetched than is needed next
ORDERS_UNDER_WAY = 2  # ahead: so that a source computes one while the other's answer travels
ORDERS_AT_ONCE = 16  # of what is needed now, such as that of many experts


class Mask(Protocol):
    """The mask of one request and the effect that undoes it, for the process that took them.

    All methods raise ConnectionLost in a forked child.
    """

    def numbers(self) -> torch.Tensor:
        """The numbers, int32 [T, C], for rows to be added to in place; once."""
        ...

    def effects(self) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        """What to subtract from the answer's rows, part by part: of each source rows, packed as answers are.

        Waits for what is not there yet.

        Raises:
            SymbiosisError: what a mask source failed with.
        """
        ...

    def exact_effects(self) -> list[torch.Tensor]:
        """The same effects with all bits, of all rows, computed again: int32 [T, P N] of each source.

        Raises:
            SymbiosisError: see ``effects``.
        """
        ...


class MaskGenerator(Protocol):
    """Where masks come from: one implementation for each privacy mode.

    In a forked child there are none: ``take`` raises ConnectionLost, and ``close`` does nothing.
    """

    privacy: Privacy

    def take(
        self,
        key: ProductKey,
        rows: int,
        *,
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> Mask:
        """The mask of a request, or of a piece of one.

        Args:
            request_class: of the request; an effect that has to be asked for now is as urgent.
        """
        ...

    def note_request(self, key: ProductKey, rows: int) -> None:
        """A request of so many rows had its masks, and others like it will come."""
        return  # by default there is nothing to do

    @property
    def rows_ahead(self) -> int:
        """Rows of masks, of all kinds, whose effects are in store or ordered; 0 if none are fetched ahead."""
        return 0

    @property
    def sources(self) -> int:
        """How many effects are subtracted from an answer."""
        ...

    def close(self) -> None:
        """Stop background work and forget all masks."""
        return  # by default there is nothing to do


class NoMasks(MaskGenerator):
    """Privacy mode ``plain``: the mask is zero."""

    privacy, sources = Privacy.PLAIN, 0

    def __init__(self, shapes: list[GroupShape]) -> None:
        self._shapes, self._fork_guard = shapes, ForkGuard()

    def take(
        self,
        key: ProductKey,
        rows: int,
        *,
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> Mask:
        """See MaskGenerator."""
        self._fork_guard.check()
        widths = self._shapes[key.group].widths(key.direction, key.member_bits)
        return _NoMask(torch.zeros((rows, widths.request_columns), dtype=torch.int32))


@dataclass(frozen=True)
class _NoMask:
    zeros: torch.Tensor
    fork_guard: ForkGuard = field(default_factory=ForkGuard)

    def numbers(self) -> torch.Tensor:
        self.fork_guard.check()
        return self.zeros

    def effects(self) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        self.fork_guard.check()
        yield slice(0, len(self.zeros)), []

    def exact_effects(self) -> list[torch.Tensor]:
        self.fork_guard.check()
        return []


class _Batch:
    """Rows that each mask source multiplies for one fresh seed of its own; handed out once, in order."""

    def __init__(
        self,
        rows: int,
        streams: list[MaskStream],
        effects: list[Future[torch.Tensor]],
        exact: Callable[[], list[torch.Tensor]] | None,
    ) -> None:
        self.rows = rows
        self.streams = streams
        self.effects = effects
        self.exact = exact  # asks for the same effects again, with all bits; None: they have them
        self.used = 0
        self.drawing = False  # how far the streams have gone is not known if that was interrupted

    @property
    def remaining(self) -> int:
        return self.rows - self.used

    @property
    def failed(self) -> bool:
        return self.drawing or any(
            e.done() and (e.cancelled() or e.exception() is not None) for e in self.effects
        )

    def draw(self, rows: int, columns: int) -> torch.Tensor:
        """The sum of the sources' masks of the next rows. The streams cannot be turned back."""
        total = self.streams[0].draw(rows, columns)
        for stream in self.streams[1:]:
            total.add_(stream.draw(rows, columns))
        return total


def _results(effects: list[Future[torch.Tensor]]) -> list[torch.Tensor]:
    """Of orders, when they are there.

    Raises:
        SymbiosisError: what a mask source failed with; ConnectionLost: the session was closed.
    """
    try:
        return [effect.result() for effect in effects]
    except CancelledError:
        raise ConnectionLost("the session was closed while an effect was under way") from None


class OneTimeMask:
    """A mask and its effect that serve one set of rows and no other.

    The mask is handed over once, and the rows are added to it in place: the sum is all that remains. The key
    streams that made it have gone on. For answers of which only the upper bits travel, the batch keeps its
    seeds, so that sources can be asked again. Masks are not made from them a second time.

    A request may be sent more than once: after a lost connection or a refusal
    (``tenant_sdk.connection.remote``), or to check half answers (``RingProducts``). It is always the same
    bytes.
    """

    def __init__(self, mask: torch.Tensor, parts: list[tuple[int, int, _Batch]]) -> None:
        self._fork_guard = ForkGuard()
        self._mask: torch.Tensor | None = mask
        self._parts = parts  # rows, where they begin in the effects, and whose these are

    def __reduce__(self) -> Any:
        raise TypeError("a copy of a one-time mask would hand it over again")

    def numbers(self) -> torch.Tensor:
        """See Mask.

        Raises:
            RuntimeError: it was handed over before.
            ConnectionLost: this is a forked child.
        """
        self._fork_guard.check()
        mask, self._mask = self._mask, None
        if mask is None:
            raise RuntimeError("a one-time mask was asked for twice")
        return mask

    def effects(self) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        """See Mask."""
        at = 0
        for rows, start, batch in self._parts:
            self._fork_guard.check()  # nothing arrives in a child
            yield slice(at, at + rows), [effect[start : start + rows] for effect in _results(batch.effects)]
            at += rows

    def exact_effects(self) -> list[torch.Tensor]:
        """See Mask."""
        self._fork_guard.check()
        parts = []
        for rows, start, batch in self._parts:
            effects = batch.exact() if batch.exact else _results(batch.effects)
            parts.append([effect[start : start + rows] for effect in effects])
        return [torch.cat(effects) for effects in zip(*parts, strict=True)]


class OneTimeMasks:
    """Privacy mode ``one-time``: a fresh uniform mask for every row, from sources that do not collude.

    Each source gets a seed of its own and returns the effect of what it expands to; the mask is the sum
    of all expansions, so it is uniform for the provider unless it colludes with every one of them, and a
    source sees nothing but a random seed. Effects do not depend on data: they are fetched ahead,
    as far as the budget allows, and what is not there when it is needed is asked for while the
    provider works.

    Args:
        shapes: the provider's groups.
        sources: at least one.
        budget_bytes: what effects in store or ordered ahead may take.
        entropy: secret random bytes; the operating system's.
        fill_when_idle: fetch as much as the budget takes while nothing is asked for.
    """

    privacy = Privacy.ONE_TIME

    def __init__(
        self,
        shapes: list[GroupShape],
        sources: list[SeedSource],
        *,
        budget_bytes: int,
        entropy: Entropy,
        fill_when_idle: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not sources:
            raise ConfigurationError("one-time masks need at least one mask source")
        self._shapes, self._sources, self._entropy = shapes, sources, entropy
        self.budget_bytes, self.batch_rows = budget_bytes, BATCH_ROWS
        self._pools = [
            ThreadPoolExecutor(ORDERS_AT_ONCE, thread_name_prefix=f"symbiosis-mask-source-{i}")
            for i in range(len(sources))
        ]
        self._changed = Condition()  # guards all below
        self._store: dict[ProductKey, deque[_Batch]] = {}
        self._under_way = 0
        self._forecast = Forecast()
        self._fill_when_idle, self._clock, self._taken_at = fill_when_idle, clock, 0.0
        self._suspended = True  # until the first request, and after a source failed
        self._closed = False
        self._warned = not budget_bytes  # whoever gives none knows
        self._satisfied = False  # nothing under way, and nothing to order
        self._fork_guard = ForkGuard()
        register_for_fork(self)
        Thread(target=self._fetch_ahead, name="symbiosis-masks", daemon=True).start()

    def take(
        self,
        key: ProductKey,
        rows: int,
        *,
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> Mask:
        """See MaskGenerator. Never waits.

        Raises:
            ConnectionLost: the session is closed, or this process is not the one that opened it.
        """
        self._fork_guard.check()
        columns = self._shapes[key.group].widths(key.direction, key.member_bits).request_columns
        masks: list[torch.Tensor] = []
        parts: list[tuple[int, int, _Batch]] = []
        with self._changed:
            if self._closed:
                raise ConnectionLost("the session is closed")
            batches = self._store.setdefault(key, deque())
            missing = rows
            while missing:
                if batches and batches[0].failed:
                    batches.popleft()
                    continue
                if not batches:
                    self._order(key, min(missing, self._max_rows(key)), request_class)
                batch = batches[0]
                count = min(missing, batch.remaining)
                batch.drawing = True
                masks.append(batch.draw(count, columns))
                parts.append((count, batch.used, batch))
                batch.used += count
                batch.drawing = False
                if batch.remaining == 0:
                    batches.popleft()  # or its effects would stay in memory until the kind is asked for again
                missing -= count
            self._suspended, self._taken_at = False, self._clock()
        return OneTimeMask(masks[0] if len(masks) == 1 else torch.cat(masks), parts)

    def note_request(self, key: ProductKey, rows: int) -> None:
        """See MaskGenerator."""
        with self._changed:
            self._forecast.note_request(key, rows)
            missing = max(rows, self._forecast.batch_of(key, self.batch_rows))
            for batch in self._store.get(key, ()):  # there may be very many
                missing -= batch.remaining
                if missing <= 0:
                    return
            self._satisfied = False  # until it is known whether there is something to order
            self._changed.notify_all()

    @property
    def sources(self) -> int:
        """See MaskGenerator."""
        return len(self._sources)

    @property
    def _stock(self) -> dict[ProductKey, int]:
        """Rows in store or ordered."""
        return {key: sum(batch.remaining for batch in batches) for key, batches in self._store.items()}

    @property
    def rows_ahead(self) -> int:
        """See MaskGenerator."""
        with self._changed:
            return sum(self._stock.values())

    @property
    def _remaining_bytes(self) -> int:
        """Of the budget."""
        return self.budget_bytes - sum(rows * self._row_bytes(key) for key, rows in self._stock.items())

    def _size(self, order: PrefetchRequest) -> int:
        return order.rows * self._row_bytes(order.key)

    def _max_rows(self, key: ProductKey) -> int:
        # As many as may be asked for again with all bits.
        return min(source.max_rows(key.exact) for source in self._sources)

    def _row_bytes(self, key: ProductKey) -> int:
        widths = self._shapes[key.group].widths(key.direction, key.member_bits)
        return widths.answer_columns * key.answer_bits // 8 * len(self._sources)

    def _order(self, key: ProductKey, rows: int, request_class: RequestClass) -> None:
        """Have every source multiply the mask of a fresh seed."""
        seeds = [self._entropy(SEED_BYTES) for _ in self._sources]
        effects = [
            pool.submit(source.seed_effect, key, rows, seed, request_class)
            for pool, source, seed in zip(self._pools, self._sources, seeds, strict=True)
        ]

        def exact() -> list[torch.Tensor]:
            with self._changed:
                if self._closed:
                    raise ConnectionLost("the session is closed")
                requests = [
                    pool.submit(source.seed_effect, key.exact, rows, seed, request_class)
                    for pool, source, seed in zip(self._pools, self._sources, seeds, strict=True)
                ]
            return _results(requests)

        # Seeds of what need not be asked for again are kept nowhere.
        again = exact if key.answer_bits < EXACT else None
        batch = _Batch(rows, [MaskStream(seed) for seed in seeds], effects, again)
        self._store.setdefault(key, deque()).append(batch)
        self._under_way += len(effects)
        self._satisfied = False
        for effect in effects:
            effect.add_done_callback(self._arrived)

    def _arrived(self, effect: Future[torch.Tensor]) -> None:
        with self._changed:
            self._under_way -= 1
            if effect.cancelled() or effect.exception() is not None:
                self._suspended = True  # whoever needs the effect gets the error; do not ask on and on
            self._changed.notify_all()

    def _fetch_ahead(self) -> None:
        with self._changed:
            while not self._closed:
                if not self._suspended and self._under_way < ORDERS_UNDER_WAY * len(self._sources):
                    order = self._next_order()
                    if order is not None:
                        try:
                            rows = min(order.rows, self._max_rows(order.key))
                            self._order(order.key, rows, RequestClass.FINETUNING)
                        except RuntimeError:
                            return  # the interpreter ends, and its pools take no more work
                        continue
                    self._satisfied = self._under_way == 0
                    if self._satisfied:
                        self._changed.notify_all()
                self._changed.wait(IDLE_SECONDS if self._fill_when_idle else None)

    def _next_order(self) -> PrefetchRequest | None:
        """What is to be ordered now, for which there is room."""
        stock, forecast = self._stock, self._forecast
        limits: dict[str, Any] = {
            "budget_bytes": self.budget_bytes,
            "row_bytes": self._row_bytes,
            "batch_rows": self.batch_rows,
        }
        order = forecast.next_order(stock, **limits)
        if order is not None:
            return order if self._make_room(order) else None
        if not self._fill_when_idle or self._clock() < self._taken_at + IDLE_SECONDS:
            return None
        order = forecast.idle_prefetch(stock, **limits)
        # Nothing is thrown away for what is not needed next.
        return order if order is not None and self._size(order) <= self._remaining_bytes else None

    def fill(self, budget_bytes: int, timeout: float) -> None:
        """Fetch ahead what a budget allows, wait until it is there, and fetch no more: for measurements.

        Raises:
            RequestTimeout: it took longer than ``timeout`` seconds.
            ConnectionLost: this is a forked child.
        """
        self._fork_guard.check()
        with self._changed:
            self.budget_bytes, self._satisfied, self._warned = budget_bytes, False, True
            self._forecast.least_rows = self.batch_rows
            self._changed.notify_all()
            full = self._changed.wait_for(lambda: self._satisfied, timeout)
            self.budget_bytes = 0
        if not full:
            raise RequestTimeout(f"the mask sources did not fill the store within {timeout:.0f} s")

    def _make_room(self, order: PrefetchRequest) -> bool:
        """Whether an order fits into the budget, perhaps after throwing away what will not be used."""
        size = self._size(order)
        if size > self.budget_bytes:
            if not self._warned:
                self._warned = True
                log.warning(
                    "the budget for masks, %.1f MiB, is too small to fetch effects ahead for requests of %d "
                    "rows, which take %.1f MiB each; they are asked for when needed, which is slower",
                    self.budget_bytes / 2**20,
                    order.rows,
                    size / 2**20,
                )
            return False
        if size > self._remaining_bytes:
            for key in self._forecast.evictable(self._stock, self.batch_rows):
                self._store[key].popleft()
                if size <= self._remaining_bytes:
                    break
        return size <= self._remaining_bytes

    def forked(self) -> None:
        """See ``shared.forks``."""
        self._store = {}

    def close(self) -> None:
        """See MaskGenerator."""
        if self._fork_guard.in_child:
            return
        with self._changed:
            self._closed = True
            self._store.clear()
            self._changed.notify_all()
        for source in self._sources:
            source.close()  # which ends what is under way
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)  # one may be opening a connection
