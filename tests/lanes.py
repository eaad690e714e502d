"""Lanes that wait to be told, fail, or finish in another order than they began."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from raw_peers import SECONDS

from provider.engine.engine import Completion, Engine
from provider.engine.lanes import BatchResult, ProcessLane, RowRange
from provider.executor.base import BaseExecutor
from provider.observe.metrics import Metrics
from provider.session.tenant import Service
from shared.wire.header import Header


def submitted(
    engine: Engine, tenant: str, session: Hashable, header: Header, payload: torch.Tensor
) -> Future[Completion]:
    """Have an engine compute a request's product; from any thread but the loop's."""
    future: Future[Completion] = Future()

    def completed(answer: Completion | Exception) -> None:
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    engine.loop.call_soon_threadsafe(lambda: engine.submit(tenant, session, header, payload, completed))
    return future


class HeldLane(ProcessLane):
    """Its products wait until the test lets them go; ``started`` counts them, ``busy`` is the first."""

    inline = False

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


class ShufflingLane(ProcessLane):
    """Has several batches in flight, and multiplies any of them next.

    Attributes:
        most: batches that were in flight at once.
        parts: of requests that were multiplied in several.
    """

    depth, inline = 8, False

    def __init__(self, executor: BaseExecutor, seed: int = 0) -> None:
        super().__init__(executor)
        self._draw, self._lock = random.Random(seed), threading.Lock()
        self._in_flight: list[tuple[Sequence[RowRange], Future[BatchResult]]] = []
        self.most = self.parts = 0

    def start(self, batch: Sequence[RowRange]) -> Future[BatchResult]:
        """See Lane."""
        future: Future[BatchResult] = Future()
        with self._lock:
            self._in_flight.append((batch, future))
            self.most = max(self.most, len(self._in_flight))
            self.parts += sum(rows.stop - rows.start < rows.request.header.rows for rows in batch)
        self._thread.submit(self._any)
        return future

    def _any(self) -> None:
        with self._lock:
            batch, future = self._in_flight.pop(self._draw.randrange(len(self._in_flight)))
        try:
            future.set_result(self.multiply(batch))
        except Exception as error:
            future.set_exception(error)


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
