"""Clients take turns with work that is done one at a time."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

TOKENIZING_THREADS = 2
# The client whose request is answered in this context.
current_client: ContextVar[str] = ContextVar("current_client", default="")


class FairLock:
    """One at a time; of each client one waits here, so that the others come in between."""

    def __init__(self) -> None:
        self._own: dict[str, asyncio.Lock] = {}
        self._all = asyncio.Lock()

    @asynccontextmanager
    async def taken(self, client: str) -> AsyncIterator[None]:
        """Wait for the client's turn, and hold it in this block."""
        async with self._own.setdefault(client, asyncio.Lock()), self._all:
            yield


class CachedAnswer:
    """What is made once in a while, in a thread, for all who ask meanwhile.

    Args:
        make: makes it.
        seconds: for which it is good.
        clock: in seconds.
    """

    def __init__(
        self, make: Callable[[], bytes], seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make, self._seconds, self._clock = make, seconds, clock
        self._made, self._until, self._lock = b"", -math.inf, asyncio.Lock()

    async def __call__(self) -> bytes:
        """It, at most so many seconds old."""
        async with self._lock:
            if self._clock() >= self._until:
                self._made = await asyncio.to_thread(self._make)
                self._until = self._clock() + self._seconds
            return self._made


class FairThreadPool(Executor):
    """Threads: each client (``current_client``) has one at a time, and the one that waited longest is next.

    Args:
        count: threads; with two, one client's long work leaves one to the others.
    """

    def __init__(self, count: int) -> None:
        self._threads, self._free = ThreadPoolExecutor(count), count
        self._lock = threading.Lock()
        # In the order of the turns.
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], None]]]] = {}
        self._busy = set[str]()

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """See concurrent.futures; work that is cancelled before its turn is left out."""
        future, client = Future[Any](), current_client.get()

        def run() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(work(*arguments, **options))
                    except BaseException as error:  # the caller gets it
                        future.set_exception(error)
            finally:
                with self._lock:
                    self._free += 1
                    self._busy.discard(client)
                    self._start()

        with self._lock:
            self._waiting.setdefault(client, deque()).append((future, run))
            self._start()
        return future

    def _start(self) -> None:
        """Begin what may begin; with the lock."""
        for client in [each for each in self._waiting if each not in self._busy]:
            if not self._free:
                return
            work = self._waiting.pop(client)
            self._threads.submit(work.popleft()[1])
            self._free -= 1
            self._busy.add(client)
            if work:
                self._waiting[client] = work  # behind the others

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See concurrent.futures; what waits for its turn is cancelled."""
        with self._lock:
            for future, _ in chain.from_iterable(self._waiting.values()):
                future.cancel()
            self._waiting.clear()
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
