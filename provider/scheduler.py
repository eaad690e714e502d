"""When products run. Connections call ``run`` from their own threads and block until it is their turn."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from provider.executor import BaseExecutor
from shared.header import Header

READ_AHEAD_ROWS = 16


class OneByOne:
    """Every request alone, one at a time: each product may use all processors.

    Two products at once would only fight over the same cores and caches.
    """

    def __init__(self, executor: BaseExecutor) -> None:
        self._executor = executor
        self._turn = threading.Lock()

    def run(self, header: Header, rows: torch.Tensor, answer: Header) -> torch.Tensor:
        """See ``provider.executor.Scheduler``."""
        with self._turn:
            return self._executor.product(header, rows, answer)

    def answered(self, header: Header, stop: Callable[[], bool]) -> None:
        """Read the next group's weight ahead while the tenant computes its attention.

        A product of few rows takes as long as its weight takes to arrive from memory, and groups
        are called in the order of their ids. Only while nobody else's product runs.
        """
        if header.rows <= READ_AHEAD_ROWS:
            self._executor.read_ahead(header.group + 1, lambda: self._turn.locked() or stop())
