"""Threads that clients share fairly (round robin)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any


class FairThreads:
    """Threads: each client has one at a time, and the one that waited longest is next.

    Args:
        count: threads; with two, one client's long work leaves one to the others.
        name: of the threads.
    """

    def __init__(self, count: int, name: str = "") -> None:
        self._threads, self._free = ThreadPoolExecutor(count, thread_name_prefix=name), count
        self._lock = threading.Lock()
        # The next client first.
        self._waiting: dict[str, dict[Future[Any], Callable[[], None]]] = {}
        self._busy, self._closed = set[str](), False

    def submit_for(self, client: str, work: Callable[[], Any]) -> Future[Any]:
        """Do a client's work once a thread is free for it; work that is cancelled before is forgotten.

        Raises:
            RuntimeError: after ``shutdown``.
        """
        future = Future[Any]()

        def run() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(work())
                    except BaseException as error:  # the caller gets it
                        future.set_exception(error)
            finally:
                with self._lock:
                    self._free += 1
                    self._busy.discard(client)
                    self._start()

        with self._lock:
            if self._closed:
                raise RuntimeError("these threads are shut down")
            self._waiting.setdefault(client, {})[future] = run
            self._start()
        future.add_done_callback(partial(self._forget, client))
        return future

    def _forget(self, client: str, done: Future[Any]) -> None:
        """What was cancelled waits no more, and keeps nothing that its caller gave it."""
        if done.cancelled():
            with self._lock:
                works = self._waiting.get(client, {})
                works.pop(done, None)
                if not works:
                    self._waiting.pop(client, None)

    def _start(self) -> None:
        """Begin what may begin; with the lock."""
        for client in [each for each in self._waiting if each not in self._busy]:
            if not self._free:
                return
            works = self._waiting.pop(client)
            self._threads.submit(works.pop(next(iter(works))))
            self._free -= 1
            self._busy.add(client)
            if works:
                self._waiting[client] = works  # behind the others

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See concurrent.futures; what waits is cancelled."""
        with self._lock:
            self._closed = True
            waiting = [*chain.from_iterable(self._waiting.values())]
            self._waiting.clear()
        for future in waiting:
            future.cancel()
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
