"""Privacy mode ``one-time``: a fresh mask for every row, and threads that fetch effects ahead."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from threading import Condition, Thread
from typing import Any

import torch

from shared.errors import ConfigurationError, ConnectionLost, RequestTimeout
from shared.forks import ForkGuard, register_for_fork
from shared.ring.mask_stream import MaskStream
from shared.wire.header import EXACT, SEED_BYTES, RequestClass
from shared.wire.protocol import GroupShape
from tenant_sdk.connection.channel import Entropy
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.forecast import PrefetchRequest
from tenant_sdk.products.mask_sources import SeedSource
from tenant_sdk.products.mask_store import CHUNK_ROWS, IDLE_SECONDS, MaskStore
from tenant_sdk.products.masks import Mask, MaskGenerator
from tenant_sdk.products.modes import Privacy

log = logging.getLogger(__name__)

PREFETCHES_IN_FLIGHT = 2  # ahead: so that a source computes one while the other's answer travels
EFFECT_REQUESTS_AT_ONCE = 16  # of what is needed now, such as that of many experts


class _SeedChunk:
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
        self._position_unknown = False  # whether a draw was interrupted

    @property
    def remaining(self) -> int:
        return self.rows - self.used

    @property
    def failed(self) -> bool:
        return self._position_unknown or any(
            e.done() and (e.cancelled() or e.exception() is not None) for e in self.effects
        )

    def draw(self, rows: int, columns: int) -> torch.Tensor:
        """Draws the sum of the sources' masks of the next rows. The streams cannot be turned back."""
        self._position_unknown = True
        total = self.streams[0].draw(rows, columns)
        for stream in self.streams[1:]:
            total.add_(stream.draw(rows, columns))
        self.used += rows
        self._position_unknown = False
        return total


def _results(effects: list[Future[torch.Tensor]]) -> list[torch.Tensor]:
    """Waits for effects.

    Raises:
        SymbiosisError: what a mask source failed with; ConnectionLost: the session was closed.
    """
    try:
        return [effect.result() for effect in effects]
    except CancelledError:
        raise ConnectionLost("the session was closed while an effect was in flight") from None


class OneTimeMask:
    """A mask and its effect that serve one set of rows and no other.

    The mask is handed over once, and the rows are added to it in place: the sum is all that remains. The key
    streams that made it have gone on. For answers of which only the upper bits travel, the chunk keeps its
    seeds, so that sources can be asked again. Masks are not made from them a second time.

    A request may be sent more than once: after a lost connection or a refusal
    (``tenant_sdk.connection.remote``), or to check half answers (``RingProducts``). It is always the same
    bytes.
    """

    def __init__(self, mask: torch.Tensor, parts: list[tuple[int, int, _SeedChunk]]) -> None:
        self._fork_guard = ForkGuard()
        self._mask: torch.Tensor | None = mask
        self._parts = parts  # rows, where they begin in the effects, and whose these are

    def __reduce__(self) -> Any:
        raise TypeError("a copy of a one-time mask would hand it over again")

    def take_values(self) -> torch.Tensor:
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
        for rows, start, chunk in self._parts:
            self._fork_guard.check()  # nothing arrives in a child
            yield slice(at, at + rows), [effect[start : start + rows] for effect in _results(chunk.effects)]
            at += rows

    def exact_effects(self) -> list[torch.Tensor]:
        """See Mask."""
        self._fork_guard.check()
        parts = []
        for rows, start, chunk in self._parts:
            effects = chunk.exact() if chunk.exact else _results(chunk.effects)
            parts.append([effect[start : start + rows] for effect in effects])
        return [torch.cat(effects) for effects in zip(*parts, strict=True)]


class OneTimeMasks(MaskGenerator):
    """Privacy mode ``one-time``: a fresh uniform mask for every row, from sources that do not collude.

    Each source gets a seed of its own and returns the effect of what it expands to; the mask is the sum
    of all expansions, so it is uniform for the provider unless it colludes with every one of them, and a
    source sees nothing but a random seed. Effects do not depend on data: they are fetched ahead,
    as far as the budget allows, and what is not there when it is needed is asked for while the
    provider works.

    Args:
        shapes: the provider's groups.
        sources: at least one.
        budget_bytes: what effects in store or in flight may take.
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
        self._pools = [
            ThreadPoolExecutor(EFFECT_REQUESTS_AT_ONCE, thread_name_prefix=f"symbiosis-mask-source-{i}")
            for i in range(len(sources))
        ]
        self._fill_when_idle, self._clock = fill_when_idle, clock
        self._changed = Condition()  # guards all below
        self._store = MaskStore[_SeedChunk](self._row_bytes, budget_bytes, fill_when_idle=fill_when_idle)
        self._in_flight = 0
        self._paused = True  # until the first request; after a source failed, until the next one
        self._closed = False
        self._warned = not budget_bytes  # users who give none know
        self._idle = False  # nothing in flight, and nothing to fetch
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
        parts: list[tuple[int, int, _SeedChunk]] = []
        with self._changed:
            if self._closed:
                raise ConnectionLost("the session is closed")
            missing = rows
            while missing:
                chunk = self._store.first(key)
                if chunk is None:
                    self._request_effects(key, min(missing, self._max_rows(key)), request_class)
                    continue
                count, start = min(missing, chunk.remaining), chunk.used
                masks.append(chunk.draw(count, columns))
                parts.append((count, start, chunk))
                self._store.taken(key, self._clock())
                missing -= count
            self._paused = False
        return OneTimeMask(masks[0] if len(masks) == 1 else torch.cat(masks), parts)

    def record_request(self, key: ProductKey, rows: int) -> None:
        """See MaskGenerator."""
        with self._changed:
            if self._store.record_request(key, rows):
                self._idle = False  # until it is known whether there is something to fetch
                self._changed.notify_all()

    @property
    def sources(self) -> int:
        """See MaskGenerator."""
        return len(self._sources)

    @property
    def rows_ahead(self) -> int:
        """See MaskGenerator."""
        with self._changed:
            return sum(self._store.stock.values())

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight and nothing has to be fetched ahead."""
        return self._idle

    def _max_rows(self, key: ProductKey) -> int:
        # As many as may be asked for again with all bits.
        return min(source.max_rows(key.exact) for source in self._sources)

    def _row_bytes(self, key: ProductKey) -> int:
        widths = self._shapes[key.group].widths(key.direction, key.member_bits)
        return widths.answer_columns * key.answer_bits // 8 * len(self._sources)

    def _request_effects(self, key: ProductKey, rows: int, request_class: RequestClass) -> None:
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
        chunk = _SeedChunk(rows, [MaskStream(seed) for seed in seeds], effects, again)
        self._store.add(key, chunk)
        self._in_flight += len(effects)
        self._idle = False
        for effect in effects:
            effect.add_done_callback(self._arrived)

    def _arrived(self, effect: Future[torch.Tensor]) -> None:
        with self._changed:
            self._in_flight -= 1
            if effect.cancelled() or effect.exception() is not None:
                self._paused = True  # users of the effect get the error; do not ask on and on
            self._changed.notify_all()

    def _fetch_ahead(self) -> None:
        with self._changed:
            while not self._closed:
                if not self._paused and self._in_flight < PREFETCHES_IN_FLIGHT * len(self._sources):
                    prefetch = self._store.next_prefetch(self._clock())
                    self._warn_too_large(self._store.too_large)
                    if prefetch is not None:
                        try:
                            rows = min(prefetch.rows, self._max_rows(prefetch.key))
                            self._request_effects(prefetch.key, rows, RequestClass.FINETUNING)
                        except RuntimeError:
                            return  # the interpreter ends, and its pools take no more work
                        continue
                    self._idle = self._in_flight == 0
                    if self._idle:
                        self._changed.notify_all()
                self._changed.wait(IDLE_SECONDS if self._fill_when_idle else None)

    def _warn_too_large(self, prefetch: PrefetchRequest | None) -> None:
        """Warn once that the budget holds no prefetch of this size."""
        if prefetch is None or self._warned:
            return
        self._warned = True
        log.warning(
            "the budget for masks, %.1f MiB, is too small to fetch effects ahead for requests of %d "
            "rows, which take %.1f MiB each; they are asked for when needed, which is slower",
            self._store.budget_bytes / 2**20,
            prefetch.rows,
            prefetch.rows * self._row_bytes(prefetch.key) / 2**20,
        )

    def fill(self, budget_bytes: int, timeout: float, chunk_rows: int = 0) -> None:
        """See MaskGenerator.

        Raises:
            RequestTimeout: it took longer than ``timeout`` seconds.
            ConnectionLost: this is a forked child.
        """
        self._fork_guard.check()
        with self._changed:
            self._store.budget_bytes = budget_bytes
            self._store.chunk_rows = chunk_rows or CHUNK_ROWS
            self._idle, self._warned = False, True
            self._store.prefetch_whole_chunks()
            self._changed.notify_all()
            full = self._changed.wait_for(lambda: self._idle, timeout)
            self._store.budget_bytes = 0
        if not full:
            raise RequestTimeout(f"the mask sources did not fill the store within {timeout:.0f} s")

    def forked(self) -> None:
        """See ``shared.forks``."""
        self._store.clear()

    def close(self) -> None:
        """See MaskGenerator."""
        if self._fork_guard.in_child:
            return
        with self._changed:
            self._closed = True
            self._store.clear()
            self._changed.notify_all()
        for source in self._sources:
            source.close()  # which ends what is in flight
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)  # one may be opening a connection
