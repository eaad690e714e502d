"""Banks of masks that are replaced: one for each kind of request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from shared.errors import ConnectionLost
from tenant_sdk.products.bank_options import NoiseBankOptions

Key = TypeVar("Key", bound=Hashable)
Bank = TypeVar("Bank")


@dataclass
class _Serving(Generic[Bank]):
    """The bank of one key. Futures give a bank, and the time when it was made."""

    current: Future[tuple[Bank, float]]
    rows: int = 0
    next: Future[tuple[Bank, float]] | None = None


class RotatingBanks(Generic[Key, Bank]):
    """Has a bank for each key. A worn bank serves until a thread has fetched the next one.

    Args:
        make: fetches a bank; called in the thread of a key's first request, then in a thread of this object.
        options: how long a bank serves.
        clock: seconds, monotonic.
    """

    def __init__(
        self, make: Callable[[Key], Bank], options: NoiseBankOptions, clock: Callable[[], float]
    ) -> None:
        self._make_bank, self._options, self._clock = make, options, clock
        self._serving = dict[Key, _Serving[Bank]]()
        self._lock, self._closed = threading.Lock(), False
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-banks")

    def take(self, key: Key, rows: int) -> Bank:
        """Returns the bank that masks so many rows of a key.

        The first request of a key waits for its bank, and others of this key wait with it.

        Raises:
            SymbiosisError: what ``make`` raised, also in the background; the next request tries again.
            ConnectionLost: the session was closed.
        """
        with self._lock:
            if self._closed:
                raise ConnectionLost("the session is closed")
            serving = self._serving.get(key)
            first = serving is None
            if serving is None:
                serving = self._serving[key] = _Serving(Future())
            elif serving.next is not None and serving.next.done():
                fetched, serving.next = serving.next, None
                fetched.result()
                serving.current, serving.rows = fetched, 0
            current = serving.current
        if first:
            try:
                current.set_result(self._make(key))
            except BaseException as error:
                with self._lock:
                    self._serving.pop(key, None)
                current.set_exception(error)
        bank, made = current.result()
        with self._lock:
            serving.rows += rows
            old = self._clock() - made > self._options.rotate_seconds
            worn = old or serving.rows > self._options.rotate_rows
            if worn and serving.current is current and serving.next is None and not self._closed:
                serving.next = self._fetcher.submit(self._make, key)
        return bank

    def _make(self, key: Key) -> tuple[Bank, float]:
        return self._make_bank(key), self._clock()

    def forget(self) -> None:
        """Forget all banks: this is a forked child, which must not use its parent's masks."""
        self._serving = {}

    def close(self) -> None:
        """Stop fetching, and forget all banks."""
        with self._lock:
            self._closed = True
            self._serving.clear()
        self._fetcher.shutdown(wait=False, cancel_futures=True)
