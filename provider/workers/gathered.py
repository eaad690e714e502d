"""Workers that hold a shard of each layer and gather it whole for each product: the paper's placement."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from msgspec.structs import replace

from provider.engine.lanes import RowRange
from provider.engine.latency import LatencyModel
from provider.executor.stripes import Gathering
from provider.workers.lane import WorkerLane
from provider.workers.link import Assignment
from provider.workers.process import Ready, WorkerProcess


class GatheredLatency(LatencyModel):
    """Of products that each gather their weight first, however few rows they have."""

    def rows(self, group: int, direction: int, member_bits: int, seconds: float) -> int:
        """See LatencyModel; but as many as take as long as the gather, or little else would be done."""
        line = self.line(group, direction)
        return max(super().rows(group, direction, member_bits, seconds), int(line.fixed / line.per_row))


class GatheredLane(WorkerLane):
    """Gives each batch to all workers, each of which multiplies its rows of it.

    A group of processes that gather cannot be mended. When one is lost, the others are ended too, and all
    meet again through another store.

    Args:
        name: in the log.
        assignment: what each worker holds a shard of. On ``cuda`` each has a device of its own.
        count: of workers.
        expected: see WorkerLane.
    """

    def __init__(
        self, name: str, assignment: Assignment, count: int, expected: Callable[[Sequence[RowRange]], float]
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="symbiosis-workers-")
        self._generation, self._lock = 0, threading.Lock()
        assignments = [
            replace(
                assignment,
                device=f"cuda:{index}" if assignment.device == "cuda" else assignment.device,
                gathering=Gathering(index, count, self._store()),
            )
            for index in range(count)
        ]
        super().__init__(name, assignments, expected)
        self._informed = set(self.workers)  # of the present store

    def _store(self) -> str:
        return f"{self._folder.name}/{self._generation}"

    def ready(self) -> list[Ready]:
        """See WorkerLane. If one cannot, at once, although the others wait for it."""
        with ThreadPoolExecutor(len(self.workers)) as waiting:
            futures = [waiting.submit(worker.ready) for worker in self.workers]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            try:
                for each in done:
                    each.result()
            except Exception:
                for worker in self.workers:
                    worker.kill()
                raise
        return [each.result() for each in futures]

    def restart_assignment(self, worker: WorkerProcess) -> Assignment:
        """See ``provider.workers.process.WorkerOwner``: the first one that comes back ends all others."""
        with self._lock:
            if worker in self._informed:
                self._informed.clear()
                self._generation += 1
                for other in self.workers:
                    if other is not worker:
                        other.kill()
            self._informed.add(worker)
            gathering = worker.assignment.gathering
            return replace(worker.assignment, gathering=gathering and replace(gathering, store=self._store()))

    def close(self) -> None:
        """See Lane."""
        super().close()
        self._folder.cleanup()

    def _terms(self, direction: int) -> int:
        """One: each worker writes whole rows of an answer."""
        return 1
