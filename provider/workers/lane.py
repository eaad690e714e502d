"""Workers as a lane: one that holds whole groups, or several that hold a stripe of each."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from provider.engine.lanes import Answer, BatchResult, RowRange
from provider.workers.link import (
    BATCH,
    MEMORY,
    Done,
    Failure,
    Piece,
    Share,
    answer_blocks,
    crossing,
    encode_batch,
    layout,
)
from provider.workers.process import WorkerProcess
from shared.errors import WireError
from shared.transport.colocated import SharedMemory
from shared.wire.header import DTYPES, Direction
from shared.wire.protocol import GroupShape, Plan

SLOTS = 2  # batches under way: the next is there when one is done
# A worker that takes longer than this for a batch has stopped: seconds, and times what was expected.
LEAST_PATIENCE, PATIENCE = 2.0, 20.0
RETRY_SECONDS = 1.0  # after which a tenant asks again for what a worker did not answer
_LEAST_MEMORY = 1 << 20


@dataclass
class _UnderWay:
    """A batch that the workers have. ``future`` None: it is lost, though some still write its answers."""

    pieces: list[Piece]
    plan: Plan
    future: Future[BatchResult] | None
    deadline: float
    owing: set[WorkerProcess]
    failures: dict[int, Failure] = field(default_factory=dict)
    processor_seconds: float = 0.0


class WorkerLane:
    """Multiplies in other processes, which are started again when they end or stop.

    What lost workers had is answered with ``unavailable``: a tenant asks again, with the same bytes. What
    they had not been given waits until they are back. See ``provider.engine.lanes.Lane`` for the rest.

    Args:
        name: in the log.
        shares: what each worker holds: the same groups, each another stripe of them.
        expected: seconds that a batch should take.

    Attributes:
        workers: one for each share.
    """

    here = False

    def __init__(
        self, name: str, shares: Sequence[Share], expected: Callable[[Sequence[RowRange]], float]
    ) -> None:
        self._name, self._expected = name, expected
        first = shares[0]
        self._shapes = {number: GroupShape.of(info, first.numerics) for number, info in first.groups.items()}
        self._lock = threading.Lock()  # over these two, and over what workers are sent
        self._under_way: dict[int, _UnderWay] = {}  # by slot
        self._memory: dict[int, SharedMemory] = {}
        self._changed: Callable[[], None] = lambda: None
        names = [name if len(shares) == 1 else f"{name}.{stripe}" for stripe in range(len(shares))]
        self.workers = [WorkerProcess(name, share, self) for name, share in zip(names, shares, strict=True)]

    @property
    def depth(self) -> int:
        """See Lane."""
        return 0 if self.away() else SLOTS

    def away(self) -> list[str]:
        """Names of workers that are being started again."""
        return [worker.name for worker in self.workers if worker.link is None]

    def attach(self, changed: Callable[[], None]) -> None:
        """See Lane."""
        self._changed = changed

    def start(self, batch: Sequence[RowRange]) -> Future[BatchResult]:
        """See Lane."""
        header = batch[0].request.header
        plan = self._shapes[header.group].plan(header.direction, header.members)
        parts = self._parts(header.direction)
        pieces, size = layout(batch, plan, DTYPES[header.dtype].itemsize, parts)
        future: Future[BatchResult] = Future()
        deadline = time.monotonic() + max(LEAST_PATIENCE, PATIENCE * self._expected(batch))
        with self._lock:
            slot = next((slot for slot in range(SLOTS) if slot not in self._under_way), None)
            if slot is None or self.away():
                future.set_result(self._unavailable(len(batch)))
                return future
            memory = self._room(slot, size)
            for piece, rows in zip(pieces, batch, strict=True):
                memory.write(piece.payload_at, [crossing(rows, plan).contiguous()])
            self._under_way[slot] = _UnderWay(pieces, plan, future, deadline, set(self.workers))
            self._send(BATCH, encode_batch(slot, pieces))
        return future

    def multiply(self, batch: Sequence[RowRange]) -> BatchResult:
        """See Lane."""
        return self.start(batch).result()

    def close(self) -> None:
        """See Lane."""
        for worker in self.workers:
            worker.close()

    def _parts(self, direction: int) -> int:
        """How many answers there are for each piece: backward they add up."""
        return len(self.workers) if direction == Direction.BACKWARD else 1

    def _room(self, slot: int, size: int) -> SharedMemory:
        """Memory of a slot for this many bytes, which the workers are told of."""
        memory = self._memory.get(slot)
        if memory is None or memory.size < size:
            size = max(_LEAST_MEMORY, 1 << (size - 1).bit_length())
            descriptor = os.memfd_create(f"symbiosis-worker-{self._name}", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, size)
                memory = self._memory[slot] = SharedMemory(descriptor, size)
                self._send(MEMORY, bytes([slot]), descriptor)
            finally:
                os.close(descriptor)
        return memory

    def _send(self, kind: int, content: bytes, descriptor: int | None = None) -> None:
        """To all workers; the loss of one is noticed by whoever attends it."""
        for worker in self.workers:
            if (link := worker.link) is None:
                continue
            try:
                link.send(kind, content, descriptor)
            except OSError:
                link.close()

    # -- called by the threads that attend the workers ---------------------------------------------

    def done(self, worker: WorkerProcess, what: Done) -> None:
        """See ``provider.workers.process.Owner``."""
        with self._lock:
            batch, memory = self._under_way[what.slot], self._memory.get(what.slot)
            batch.owing.discard(worker)
            batch.failures |= what.failures
            batch.processor_seconds += what.processor_seconds
            if batch.owing:
                return
        future = batch.future
        result = self._result(batch, memory) if future is not None and memory is not None else None
        with self._lock:
            del self._under_way[what.slot]
        if future is not None:
            future.set_result(result or self._unavailable(len(batch.pieces)))

    def late(self, worker: WorkerProcess, now: float) -> bool:
        """See ``provider.workers.process.Owner``."""
        with self._lock:
            return any(batch.deadline < now and worker in batch.owing for batch in self._under_way.values())

    def lost(self, worker: WorkerProcess) -> None:
        """See ``provider.workers.process.Owner``."""
        futures: list[tuple[Future[BatchResult], int]] = []
        with self._lock:
            for slot, batch in list(self._under_way.items()):
                if batch.future is not None:
                    futures.append((batch.future, len(batch.pieces)))
                    batch.future = None
                batch.owing.discard(worker)
                if not batch.owing:
                    del self._under_way[slot]
            self._memory.clear()  # which the worker that comes will not have
        for future, count in futures:
            future.set_result(self._unavailable(count))
        self._changed()

    def back(self, worker: WorkerProcess) -> None:
        """See ``provider.workers.process.Owner``."""
        self._changed()

    def _result(self, batch: _UnderWay, memory: SharedMemory) -> BatchResult:
        answers: list[Answer] = []
        for number, piece in enumerate(batch.pieces):
            if number in batch.failures:
                answers.append(batch.failures[number].error())
                continue
            answer, *more = (
                answer_blocks(memory, piece, batch.plan, part)
                for part in range(self._parts(piece.header.direction))
            )
            if more:
                answers.append([_sum(blocks) for blocks in zip(answer, *more, strict=True)])
            else:
                answers.append([block.clone() for block in answer])
        return BatchResult(answers, batch.processor_seconds)

    def _unavailable(self, count: int) -> BatchResult:
        error = WireError(
            "unavailable", f"worker {self._name} is being started again; ask again", retry_after=RETRY_SECONDS
        )
        return BatchResult([error] * count)


def _sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Integers wrap around, as torch's do on every processor (``tests/unit/test_stripes.py``)."""
    total = torch.add(terms[0], terms[1])
    for term in terms[2:]:
        total.add_(term)
    return total
