"""Time, events and tasks of a simulation, of which one runs at a time.

A task is a thread, because the code that it runs waits in the middle of calls. A task runs until it waits.
Then the same thread handles events, until some task can go on. So exactly one thread runs at any time, and
the seed alone decides which. Another thread runs only when another task goes on.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import threading
import traceback
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

START = 1000.0  # seconds of the clock at the beginning


class Ended(BaseException):
    """Unwinds a task whose process, or whose run, has ended. No handler of errors catches it."""


class _Thread:
    """A thread that runs one task after the other, also of several runs: starting threads takes long."""

    idle: ClassVar[list[_Thread]] = []

    def __init__(self, *, own: bool = True) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
        self.job: Callable[[], None] = lambda: None
        if own:
            self.thread = threading.Thread(target=self._serve, name="simulated", daemon=True)
            self.thread.start()

    def _serve(self) -> None:
        while True:
            self.baton.acquire()
            job, self.job = self.job, lambda: None
            job()
            del job


class Task:
    """Something that waits in the middle of calls.

    Attributes:
        owner: of several tasks, the simulated process that they belong to.
    """

    __slots__ = ("asleep", "ended", "name", "owner", "thread", "ticket")

    def __init__(self, name: str, owner: str, thread: _Thread) -> None:
        self.name, self.owner, self.thread = name, owner, thread
        self.asleep = self.ended = False
        self.ticket = 0  # of the latest wait


class Kernel:
    """One run.

    Args:
        seed: decides everything.
        trace: told what happens, line by line.

    Attributes:
        now: seconds.
        random: what the run draws from.
        failures: exceptions that nobody may raise.
        digest: of all that was noted; equal for equal runs.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.now, self.random = START, random.Random(seed)
        self.failures: list[str] = []
        self.digest = self.steps = 0
        self.tasks: dict[Task, None] = {}  # in order: a set of objects has another order in every run
        self._trace, self._ending, self._handling = trace, False, False
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()
        self._ready: deque[Task] = deque()
        self._main = self.current = Task("main", "", _Thread(own=False))

    # -- events ----------------------------------------------------------------------------------

    def at(self, when: float, what: Callable[[], object]) -> None:
        """Do this at a time; it must not wait."""
        heapq.heappush(self._events, (when, next(self._number), what))

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        """Do this after some time."""
        self.at(self.now + seconds, what)

    def note(self, text: str, data: bytes = b"") -> None:
        """Something has happened."""
        self.digest = zlib.crc32(data, zlib.crc32(f"{self.now:.6f} {text}".encode(), self.digest))
        if self._trace is not None:
            self._trace(f"{self.now - START:11.6f}  {text}")

    @property
    def traces(self) -> bool:
        """Whether somebody reads what happens."""
        return self._trace is not None

    # -- tasks -----------------------------------------------------------------------------------

    def spawn(self, what: Callable[[], object], name: str, owner: str | None = None) -> Task:
        """Start a task; by default it belongs to the same process as the one that starts it."""
        thread = _Thread.idle.pop() if _Thread.idle else _Thread()
        task = Task(name, self.current.owner if owner is None else owner, thread)

        def run() -> None:
            try:
                if not task.ended:
                    what()
            except Ended:
                pass
            except BaseException as error:
                self.failures.append(f"the task {task.name!r} raised {error!r}")
            self.tasks.pop(task, None)
            _Thread.idle.append(thread)
            self._pass_on()

        thread.job = run
        self.tasks[task] = None
        self._ready.append(task)
        return task

    def wake(self, task: Task) -> None:
        """Let a task go on, if it waits."""
        if task.asleep:
            task.asleep = False
            self._ready.append(task)

    def wait(self, until: float | None = None) -> None:
        """Let others go on, until this task is woken or a time has come; callers look which."""
        task = self.current
        if self._handling:
            raise RuntimeError("what runs in an event must not wait")
        if task.ended:
            raise Ended
        task.asleep, task.ticket = True, task.ticket + 1
        if until is not None:
            ticket = task.ticket
            self.at(until, lambda: self.wake(task) if task.ticket == ticket else None)
        self._pass_on(task)
        if task.ended:
            raise Ended

    def sleep(self, seconds: float) -> None:
        """Let a time pass."""
        until = self.now + seconds
        while self.now < until:
            self.wait(until)

    def give_way(self) -> None:
        """Let other tasks that can go on do so first."""
        if self._ready and not self._handling and not self.current.ended:
            task = self.current
            self._ready.append(task)
            self._pass_on(task)
            if task.ended:
                raise Ended

    def end(self, owner: str) -> None:
        """End the tasks of a simulated process, as if it was killed; not a task that calls this itself."""
        for task in list(self.tasks):
            if task.owner == owner and (self._handling or task is not self.current):
                task.ended = True
                self.wake(task)

    def where(self, owner: str) -> list[str]:
        """Where the tasks of a simulated process wait: function and line of the product's code."""
        frames, found = sys._current_frames(), list[str]()
        for task in self.tasks:
            if task.owner == owner:
                stack = traceback.extract_stack(frames[task.thread.thread.ident or 0])
                ours = [
                    each
                    for each in stack
                    if "simulation" not in each.filename and "threading" not in each.filename
                ]
                calls = " > ".join(f"{each.name}:{each.lineno}" for each in ours[-5:])
                found.append(f"{task.name} in {calls}")
        return found

    def run(self, main: Callable[[], Any]) -> Any:
        """Run a task in this thread, and end all others when it returns."""
        try:
            return main()
        finally:
            self._ending = True
            while self.tasks:
                for task in self.tasks:
                    task.ended = True
                    self.wake(task)
                self._main.asleep = True
                self._pass_on(self._main)

    def _pass_on(self, task: Task | None = None) -> None:
        """Handle events until a task can go on, and let it; ``task`` goes on when it is its turn."""
        following = self._next()
        if following is task:
            return
        self.current = following
        following.thread.baton.release()
        if task is not None:
            task.thread.baton.acquire()

    def _next(self) -> Task:
        while not self._ready:
            if self._ending or not self._events:
                self._main.asleep = False
                return self._main
            when, _, what = heapq.heappop(self._events)
            self.now, self.steps = max(self.now, when), self.steps + 1
            self._handling = True
            try:
                what()
            except Exception as error:
                self.failures.append(f"an event raised {error!r}")
            finally:
                self._handling = False
        return self._ready.popleft()
