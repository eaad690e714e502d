"""The executor's one thread that waits: for sockets, for work from other threads, for times.

What is ready is handled together, and then whatever gives the loop work decides once for all of it. So no
thread is woken for a request, and none waits for Python's lock while another holds it.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import select
import socket
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

log = logging.getLogger(__name__)

READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class LoopTask(Protocol):
    """A task that has work besides the loop's callbacks."""

    def run_once(self) -> float | None:
        """Do some work. Returns the seconds until there is more; 0: at once; None: when something happens."""
        ...

    def idle(self, stop: Callable[[], bool]) -> None:
        """Use the time in which there is nothing to do, until ``stop()``."""
        ...


class Loop:
    """Runs callbacks in a thread of its own, which starts with the first of them and never ends by itself.

    Everything but ``call_soon_threadsafe`` is for that thread alone.

    Args:
        task: asked after each round of callbacks.
        clock: seconds, which do not go back.
    """

    def __init__(self, task: LoopTask, clock: Callable[[], float] = time.monotonic) -> None:
        self._task, self._clock = task, clock
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._spent = defaultdict[str, float](float)  # seconds of this round, by tenant
        self._waiting: dict[str, dict[Callable[[float], None], None]] = {}  # that wait, by tenant
        self._postponed = set[str]()  # tenants that go on in the next round
        self._in_slice = False
        self._number = itertools.count()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._epoll.register(self._woken, READ)
        self._asleep = True
        self._closed = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        """Have the loop's thread call this soon; from any thread.

        Raises:
            RuntimeError: no thread can be started.
        """
        if self._thread is None:
            self._start()
        self._calls.append(callback)
        if self._asleep:
            try:
                self._wake.send(b"x")
            except (BlockingIOError, OSError):
                pass  # it has been woken already, or has ended

    def close(self, last: Callable[[], None]) -> None:
        """End the thread after a last call; forget what is registered."""
        if self._thread is None:
            self._end()
            self._close_descriptors()
            return
        self.call_soon_threadsafe(last)
        self.call_soon_threadsafe(self._end)
        if self._thread is not threading.current_thread():
            self._thread.join(10.0)

    @property
    def closed(self) -> bool:
        """Whether the loop has ended: it makes no calls that are left."""
        return self._closed

    def register(self, descriptor: int, handler: Callable[[int], None], events: int = READ) -> None:
        """Call ``handler`` with the events whenever a descriptor is ready, until ``unregister``."""
        self._epoll.register(descriptor, events)
        self._handlers[descriptor] = handler

    def modify(self, descriptor: int, events: int) -> None:
        """Wait for other events of a descriptor; 0: for nothing but errors."""
        self._epoll.modify(descriptor, events)

    def unregister(self, descriptor: int) -> None:
        """Wait for a descriptor no more; call this before it is closed."""
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    @property
    def now(self) -> float:
        """Seconds, on the clock of timers."""
        return self._clock()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, after some time."""
        heapq.heappush(self._timers, (self._clock() + seconds, next(self._number), callback))

    def call_later_weak(self, seconds: float, method: Callable[[], None]) -> None:
        """Call a method later, unless its object is gone by then: the timer does not keep it alive."""
        kept = weakref.WeakMethod(method)

        def call() -> None:
            if (still := kept()) is not None:
                still()

        self.call_later(seconds, call)

    def run_in_time_slice(self, tenant: str, seconds: float, callback: Callable[[float], None]) -> None:
        """Call ``callback(until)`` as soon as a tenant has time: at once, or in one of the next rounds.

        A tenant's time slice is its seconds of a round. Its connections share the slice in the order in
        which they ask. So a tenant gets no more of a round because it has more connections.

        Args:
            seconds: the tenant's time slice.
            callback: called once, however often it is passed before. It may pass itself again.
        """
        self._waiting.setdefault(tenant, {})[callback] = None
        if not self._in_slice:
            self._run_slice(tenant, seconds)

    def _run_slice(self, tenant: str, seconds: float) -> None:
        waiting = self._waiting.get(tenant, {})
        # If a callback asks again, it waits for the next call, so that rounds stay short.
        for callback in list(waiting):
            if (left := seconds - self._spent[tenant]) <= 0:
                break
            del waiting[callback]
            began, self._in_slice = self._clock(), True
            try:
                callback(began + left)
            finally:
                self._in_slice = False
                self._spent[tenant] += self._clock() - began
        if not waiting:
            self._waiting.pop(tenant, None)
        elif tenant not in self._postponed:
            self._postponed.add(tenant)
            self.call_soon_threadsafe(partial(self._run_postponed, tenant, seconds))

    def _run_postponed(self, tenant: str, seconds: float) -> None:
        self._postponed.discard(tenant)
        self._run_slice(tenant, seconds)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="executor", daemon=True)
                thread.start()
                self._thread = thread

    def _end(self) -> None:
        self._closed = True

    def _run(self) -> None:
        while not self._closed:
            self._round()
        self._close_descriptors()

    def _round(self) -> None:
        """Let the task do some work, wait, and do what is due."""
        self._spent.clear()
        wait = self._guarded(self._task.run_once)
        if self._calls:
            wait = 0.0
        elif self._timers:
            due = max(0.0, self._timers[0][0] - self._clock())
            wait = due if wait is None else min(wait, due)
        self._handle(self._poll(wait))
        for _ in range(len(self._calls)):
            self._guarded(self._calls.popleft())
        while self._timers and self._timers[0][0] <= self._clock():
            self._guarded(heapq.heappop(self._timers)[2])

    def _close_descriptors(self) -> None:
        for each in (self._epoll, self._wake, self._woken):
            each.close()

    def _poll(self, wait: float | None) -> list[tuple[int, int]]:
        """Wait for the descriptors; if there is nothing to do at once, the task may use the time."""
        ready = self._epoll.poll(0)
        if ready or wait == 0.0:
            return ready
        self._guarded(lambda: self._task.idle(self._something_to_do))
        self._asleep = True
        try:
            # A thread that appended a call before this was true has sent nothing.
            return self._epoll.poll(0.0 if self._calls else wait)
        finally:
            self._asleep = False

    def _something_to_do(self) -> bool:
        return bool(self._calls or self._epoll.poll(0, 1))

    def _handle(self, ready: list[tuple[int, int]]) -> None:
        for descriptor, events in ready:
            if descriptor == self._woken.fileno():
                try:
                    self._woken.recv(4096)
                except BlockingIOError:
                    pass
                continue
            handler = self._handlers.get(descriptor)  # an earlier one may have forgotten it
            try:
                if handler is not None:
                    handler(events)
            except Exception:
                log.exception("the executor's loop goes on after a fault")

    @staticmethod
    def _guarded(callback: Callable[[], float | None]) -> float | None:
        """Call this; no fault of it ends the loop."""
        try:
            return callback()
        except Exception:
            log.exception("the executor's loop goes on after a fault")
            return None
