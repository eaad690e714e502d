"""When products run. Connections call ``run`` from their own threads and block until it is their turn."""

from __future__ import annotations

import threading

import torch

from provider.executor import BaseExecutor
from shared.header import Header


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
