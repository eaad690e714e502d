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
    """Has work besides what is registered."""

    def turn(self) -> float | None:
        """Do some; seconds after which there is more, 0 for at once, None: not before something happens."""
        ...

    def idle(self, stop: Callable[[], bool]) -> None:
        """There is nothing to do, until ``stop()``."""
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
        self._spent = defaultdict[str, float](float)  # seconds of this round, by who took them
        self._turns: dict[str, dict[Callable[[float], None], None]] = {}  # by owner: who waits, in order
        self._late = set[str]()  # owners that go on in the next round
        self._in_turn = False
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
        """Have the loop's thread do this soon; from any thread.

        Raises:
            RuntimeError: there is no thread to be had.
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
        """End the thread, after it has done one thing more; what is registered is forgotten."""
        if self._thread is None:
            self._end()
            self._let_go()
            return
        self.call_soon_threadsafe(last)
        self.call_soon_threadsafe(self._end)
        if self._thread is not threading.current_thread():
            self._thread.join(10.0)

    @property
    def closed(self) -> bool:
        """Whether it has ended: what it was called for and has not done it never does."""
        return self._closed

    def register(self, descriptor: int, handler: Callable[[int], None], events: int = READ) -> None:
        """Call this when a descriptor is ready, with what for, again and again until it is forgotten."""
        self._epoll.register(descriptor, events)
        self._handlers[descriptor] = handler

    def modify(self, descriptor: int, events: int) -> None:
        """Wait for something else; for nothing but an error with 0."""
        self._epoll.modify(descriptor, events)

    def unregister(self, descriptor: int) -> None:
        """Wait for it no more; before it is closed."""
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    @property
    def now(self) -> float:
        """Seconds, on the clock of timers."""
        return self._clock()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call this once, after some time."""
        heapq.heappush(self._timers, (self._clock() + seconds, next(self._number), callback))

    def call_later_weak(self, seconds: float, method: Callable[[], None]) -> None:
        """``call_later`` for a method, unless its object is gone by then: no timer keeps anything."""
        kept = weakref.WeakMethod(method)

        def call() -> None:
            if (still := kept()) is not None:
                still()

        self.call_later(seconds, call)

    def take_turn(self, owner: str, seconds: float, read: Callable[[float], None]) -> None:
        """Call ``read(until)`` as soon as an owner has time: at once, or in one of the next rounds.

        Those of one owner, such as a tenant's connections, share its seconds of a round, in the order in
        which they ask. So what one owner sends takes no more of a round because it has more connections.

        Args:
            read: of one that asks; once however often it asks before its turn. It may ask again in its turn.
        """
        self._turns.setdefault(owner, {})[read] = None
        if not self._in_turn:
            self._run_turns(owner, seconds)

    def _run_turns(self, owner: str, seconds: float) -> None:
        waiting = self._turns.get(owner, {})
        # If one asks again in its turn, it waits for the next call, so that rounds stay short.
        for read in list(waiting):
            if (left := seconds - self._spent[owner]) <= 0:
                break
            del waiting[read]
            began, self._in_turn = self._clock(), True
            try:
                read(began + left)
            finally:
                self._in_turn = False
                self._spent[owner] += self._clock() - began
        if not waiting:
            self._turns.pop(owner, None)
        elif owner not in self._late:
            self._late.add(owner)
            self.call_soon_threadsafe(partial(self._run_late, owner, seconds))

    def _run_late(self, owner: str, seconds: float) -> None:
        self._late.discard(owner)
        self._run_turns(owner, seconds)

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
        self._let_go()

    def _round(self) -> None:
        """Let the task do some work, wait, and do what is due."""
        self._spent.clear()
        wait = self._guarded(self._task.turn)
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

    def _let_go(self) -> None:
        for each in (self._epoll, self._wake, self._woken):
            each.close()

    def _poll(self, wait: float | None) -> list[tuple[int, int]]:
        """Wait for whatever is watched; if there is nothing to do at once, the task may rest meanwhile."""
        ready = self._epoll.poll(0)
        if ready or wait == 0.0:
            return ready
        self._guarded(lambda: self._task.idle(self._something_to_do))
        self._asleep = True
        try:
            # Whoever appended before it was true has sent nothing.
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
        """Nobody's fault may end the loop."""
        try:
            return callback()
        except Exception:
            log.exception("the executor's loop goes on after a fault")
            return None
