"""Locks and threads that clients share fairly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from shared.fair_threads import FairThreads

TOKENIZING_THREADS = 2
# Seconds between two requests of a client that are prepared, if others have requests in flight. What the
# server does for a request before the lock takes up to a millisecond.
MIN_PAUSE, MAX_PAUSE = 0.005, 0.5
# The client whose request is answered in this context.
current_client: ContextVar[str] = ContextVar("current_client", default="")
# Says that the engine has the request of this context; the event loop prepares no more of it.
given_to_engine: ContextVar[Callable[[], None]] = ContextVar("given_to_engine", default=lambda: None)
# Done as soon as the connection is closed on which the request of this context came.
connection_closed: ContextVar[asyncio.Future[None] | None] = ContextVar("connection_closed", default=None)


class ClientGone(Exception):
    """There is nobody to answer."""


@contextmanager
def _while_connected() -> Iterator[None]:
    """Wait in this block for the sake of a client.

    A connection that is closed gives its slot to another one at once. If its request went on waiting, then
    one client could have any number of requests wait.

    Raises:
        ClientGone: the connection is closed.
    """
    closed, task, waiting = connection_closed.get(), asyncio.current_task(), True
    assert task is not None  # noqa: S101 - the callers are coroutines

    def interrupt(_: object) -> None:
        if waiting:
            task.cancel()

    if closed is not None:
        closed.add_done_callback(interrupt)
    try:
        yield
    except asyncio.CancelledError:
        if closed is None or not closed.done() or task.uncancel():
            raise  # something else ends the task
        raise ClientGone from None
    finally:
        waiting = False
        if closed is not None:
            closed.remove_done_callback(interrupt)


class PacedLock:
    """A lock for each client, for work in the event loop. It becomes free some time after its release.

    In the event loop, the gateway reads and checks a request, and vLLM checks and renders it until the engine
    has it. Each takes up to 40 ms even for a short chat, if the chat has many messages or tools. A client's
    next request waits as long as its last one took, so other clients have half of the time.

    Args:
        clock: in seconds.
        others: whether another client than this has requests in flight.
        min_pause: seconds; default: ``MIN_PAUSE``.
    """

    def __init__(
        self, clock: Callable[[], float], others: Callable[[str], bool], min_pause: float | None = None
    ) -> None:
        self._clock, self._others, self._client_locks = clock, others, dict[str, asyncio.Lock]()
        self._min_pause = MIN_PAUSE if min_pause is None else min_pause

    @asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        """Hold the client's lock until the engine has the request, or to the block's end.

        Raises:
            ClientGone: the client has hung up before.
        """
        lock = self._client_locks.setdefault(client, asyncio.Lock())
        with _while_connected():
            await lock.acquire()
        began, held = self._clock(), True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                took = self._clock() - began
                pause = min(max(took, self._min_pause), MAX_PAUSE) if self._others(client) else 0.0
                asyncio.get_running_loop().call_later(pause, lock.release)

        token = given_to_engine.set(release)
        try:
            yield
        finally:
            given_to_engine.reset(token)
            release()

    async def wait(self, client: str) -> None:
        """Wait for the client's lock, and do not hold it: the client's next request waits."""
        async with self.hold(client):
            pass


class FairLock:
    """A lock for all clients. Of each client, one request waits for it, so clients take turns."""

    def __init__(self) -> None:
        self._client_locks: dict[str, asyncio.Lock] = {}
        self._all = asyncio.Lock()

    @asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        """Hold the lock in this block.

        Raises:
            ClientGone: the client has hung up before.
        """
        async with AsyncExitStack() as held:
            with _while_connected():
                await held.enter_async_context(self._client_locks.setdefault(client, asyncio.Lock()))
                await held.enter_async_context(self._all)
            yield


class FairThreadPool(FairThreads, Executor):
    """Threads that clients (``current_client``) share fairly."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """See concurrent.futures, and ``FairThreads``."""
        return self.submit_for(current_client.get(), partial(work, *arguments, **options))
