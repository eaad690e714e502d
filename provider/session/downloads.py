"""Tenants' downloads are read here, by turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

_Read = tuple[Callable[[], torch.Tensor], "Future[torch.Tensor]"]


class Downloads:
    """Reads one thing after the other in a thread of its own; tenants take turns.

    A row of a quantised expert costs what the whole expert does: whoever asks for many waits for them alone.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="downloads")
        self._waiting: dict[str, deque[_Read]] = {}  # by tenant; the first one is next
        self._lock = threading.Lock()

    def submit(self, tenant: str, read: Callable[[], torch.Tensor]) -> Future[torch.Tensor]:
        """Have something read when it is the tenant's turn."""
        future: Future[torch.Tensor] = Future()
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((read, future))
        self._thread.submit(self._next)
        return future

    def _next(self) -> None:
        with self._lock:
            tenant = next(iter(self._waiting))
            own = self._waiting.pop(tenant)
            read, future = own.popleft()
            if own:
                self._waiting[tenant] = own  # behind the others
        try:
            result = read()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def close(self) -> None:
        """What is not read yet never will be."""
        self._thread.shutdown(wait=False, cancel_futures=True)
