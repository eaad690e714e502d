"""Lanes that wait to be told, or fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from raw_peers import SECONDS

from provider.engine.engine import Engine
from provider.engine.lanes import BatchResult, ProcessLane, RowRange
from provider.executor.base import BaseExecutor
from provider.observe.metrics import Metrics
from provider.session.tenant import Service


class HeldLane(ProcessLane):
    """Its products wait until the test lets them go; ``started`` counts them, ``busy`` is the first."""

    here = False

    def __init__(self, executor: BaseExecutor) -> None:
        super().__init__(executor)
        self.started, self.busy, self.go = threading.Semaphore(0), threading.Event(), threading.Event()

    def start(self, batch: Sequence[RowRange]) -> Future[BatchResult]:
        """See Lane."""
        self.started.release()
        self.busy.set()
        return super().start(batch)

    def multiply(self, batch: Sequence[RowRange]) -> BatchResult:
        """See Lane."""
        assert self.go.wait(SECONDS)
        return super().multiply(batch)


class BrokenLane(ProcessLane):
    """Fails for whoever asks for so many rows."""

    rows = 13

    def multiply(self, batch: Sequence[RowRange]) -> BatchResult:
        """See Lane."""
        if any(rows.request.header.rows == self.rows for rows in batch):
            raise RuntimeError("/secret/path")
        return super().multiply(batch)


def service_on(
    executor: BaseExecutor, lane: Callable[[BaseExecutor], ProcessLane], **options: Any
) -> tuple[Service, Any]:
    """A service whose engine has this lane, and the lane."""
    made: list[ProcessLane] = []

    def make(executor: BaseExecutor) -> ProcessLane:
        made.append(lane(executor))
        return made[-1]

    metrics = Metrics()
    engine = Engine.of(executor, lane=make, on_batch=metrics.batch)
    return Service(executor, engine, metrics, **options), made[0]
