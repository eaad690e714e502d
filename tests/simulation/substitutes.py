"""Puts a kernel's clock, threads, locks and random numbers into the modules that use real ones.

The product's policies are given the time and random numbers. Some modules around them take threads, locks,
clocks and sockets from Python. During a run, these names lead to the kernel.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from simulation.kernel import Kernel, Task
from tenant_sdk.connection.clock import Clock

SWITCH = 0.05  # chance that another task goes on where one takes a lock


class SimulatedClock(Clock):
    """The kernel's time for connections."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def now(self) -> float:
        """See Clock."""
        return self._kernel.now

    def wait(self, until: float, ended: threading.Event) -> bool:
        """See Clock."""
        return ended.wait(max(0.0, until - self._kernel.now))


class Lock:
    """As ``threading.Lock``."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._held = kernel, False
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True) -> bool:
        if blocking and self._kernel.random.random() < SWITCH:
            self._kernel.give_way()
        while self._held:
            if not blocking:
                return False
            task = self._kernel.current
            self._waiting.append(task)
            try:
                self._kernel.wait()
            finally:
                self._waiting.remove(task)
                if task.ended:
                    self._wake_next()
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        self._wake_next()

    def _wake_next(self) -> None:
        if self._waiting and not self._held:
            self._kernel.wake(self._waiting[0])

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """As ``threading.Condition`` with its own lock, which one task may take several times."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._lock = kernel, Lock(kernel)
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    def __enter__(self) -> bool:
        if self._owner is not self._kernel.current:
            self._lock.acquire()
            self._owner = self._kernel.current
        self._depth += 1
        return True

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        kernel, task, depth = self._kernel, self._kernel.current, self._depth
        until = None if timeout is None else kernel.now + timeout
        self._waiting.append(task)
        self._owner, self._depth = None, 0
        self._lock.release()
        try:
            while task in self._waiting and (until is None or kernel.now < until):
                kernel.wait(until)
        finally:
            notified = task not in self._waiting
            if not notified:
                self._waiting.remove(task)
            if not task.ended:
                self._lock.acquire()
            self._owner, self._depth = task, depth
        return notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else self._kernel.now + timeout
        while not (result := predicate()):
            if until is not None and self._kernel.now >= until:
                break
            self.wait(None if until is None else until - self._kernel.now)
        return result

    def notify_all(self) -> None:
        waiting, self._waiting[:] = self._waiting[:], []
        for task in waiting:
            self._kernel.wake(task)


class Event:
    """As ``threading.Event``."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._set = kernel, False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._kernel.wake(task)

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else self._kernel.now + timeout
        while not self._set and (until is None or self._kernel.now < until):
            self._waiting.append(self._kernel.current)
            self._kernel.wait(until)
        return self._set


class Future(concurrent.futures.Future[Any]):
    """A future whose result tasks wait for."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            task = self._kernel.current
            self.add_done_callback(lambda _: self._kernel.wake(task))
            while not self.done():
                self._kernel.wait()
        return super().result(0)


class Pool:
    """As ``ThreadPoolExecutor``; what it runs belongs to the process that made it."""

    def __init__(self, kernel: Kernel, most: int = 4, thread_name_prefix: str = "") -> None:
        self._kernel, self._most, self._name = kernel, most, thread_name_prefix
        self._owner = kernel.current.owner
        self._queue: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._running, self._shut = 0, False

    def submit(self, what: Callable[..., Any], /, *args: Any, **options: Any) -> Future:
        if self._shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future(self._kernel)
        self._queue.append((future, partial(what, *args, **options)))
        if self._running < self._most:
            self._running += 1
            self._kernel.spawn(self._work, self._name, self._owner)
        return future

    def _work(self) -> None:
        while self._queue:
            future, what = self._queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = what()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, what
        self._running -= 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._shut = True
        while cancel_futures and self._queue:
            future, _ = self._queue.popleft()
            future.cancel()
            future.set_running_or_notify_cancel()


class Thread:
    """As ``threading.Thread``."""

    def __init__(
        self,
        *,
        target: Callable[..., object],
        name: str = "",
        daemon: bool = True,
        args: tuple[Any, ...] = (),
    ) -> None:
        self._what, self._name = partial(target, *args), name

    kernel: Kernel

    def start(self) -> None:
        self.kernel.spawn(self._what, self._name)


class Random:
    """As ``random.SystemRandom``."""

    def __init__(self, source: random.Random) -> None:
        self.random, self.uniform = source.random, source.uniform


@contextlib.contextmanager
def substituted(kernel: Kernel, network: Any, allocate: Callable[..., Any]) -> Iterator[None]:
    """While this is open, the product's modules use the kernel's things.

    Args:
        network: has the poll of the tenants' channels.
        allocate: where an executor gets memory for a payload.
    """
    thread = type("KernelThread", (Thread,), {"kernel": kernel})
    pool = partial(Pool, kernel)

    def now() -> float:
        return kernel.now

    clock = SimpleNamespace(monotonic=now, perf_counter=now, time=now, thread_time=now)
    threads = SimpleNamespace(
        Lock=partial(Lock, kernel), Event=partial(Event, kernel), Condition=partial(Condition, kernel),
        Thread=thread,
    )  # fmt: skip
    names = {
        "tenant_sdk.connection.channel.threading": threads,
        "tenant_sdk.connection.websocket_channel.threading": threads,
        "tenant_sdk.connection.websocket_channel.QuickPoll": network.poll,
        "tenant_sdk.connection.replicas.reconnecting.threading": threads,
        "tenant_sdk.connection.replicas.reconnecting.random": SimpleNamespace(
            SystemRandom=lambda: Random(kernel.random)
        ),
        "tenant_sdk.connection.remote.time": clock,
        "tenant_sdk.products.ring_products.time": clock,
        "tenant_sdk.products.ring_requests.time": clock,
        "tenant_sdk.products.one_time_masks.ThreadPoolExecutor": pool,
        "tenant_sdk.products.one_time_masks.Condition": partial(Condition, kernel),
        "tenant_sdk.products.one_time_masks.Thread": thread,
        "shared.fair_threads.ThreadPoolExecutor": pool,
        "provider.session.tenant.time": clock,
        "provider.session.tenant.new_payload": allocate,
        "provider.serve.websocket_connection.time": clock,
        "provider.serve.write_queue.time": clock,
        "provider.serve.connection.time": clock,
        "provider.serve.connection.random": SimpleNamespace(SystemRandom=lambda: Random(kernel.random)),
        "provider.serve.handshake.time": clock,
        "provider.engine.lanes.time": clock,
    }
    places = [(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names]
    originals = [getattr(module, name) for module, name in places]
    try:
        for (module, name), value in zip(places, names.values(), strict=True):
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in zip(places, originals, strict=True):
            setattr(module, name, value)
