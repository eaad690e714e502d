"""Clients take turns with work that is done one at a time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from shared.fair_threads import FairThreads

TOKENIZING_THREADS = 2
# The client whose request is answered in this context.
current_client: ContextVar[str] = ContextVar("current_client", default="")


class FairLock:
    """One at a time; of each client one waits here, so that the others come in between."""

    def __init__(self) -> None:
        self._client_locks: dict[str, asyncio.Lock] = {}
        self._all = asyncio.Lock()

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for the client's turn, and hold it in this block."""
        async with self._client_locks.setdefault(client, asyncio.Lock()), self._all:
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


class FairThreadPool(FairThreads, Executor):
    """Threads by turns of the clients (``current_client``)."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """See concurrent.futures, and ``FairThreads``."""
        return self.submit_for(current_client.get(), partial(work, *arguments, **options))
