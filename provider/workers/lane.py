"""Workers as a lane: one that holds whole groups, or several that hold a stripe of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import torch

from provider.engine.lanes import Answer, BatchResult, RowRange, answer_of
from provider.engine.loop import Loop
from provider.workers.batch import BatchLayout, RequestRows, WorkerBatch, is_seed
from provider.workers.link import BATCH, Assignment, Done, FailureMessage, Rows
from provider.workers.memory import SegmentPool
from provider.workers.process import Process, Ready, StartWorker, WorkerProcess
from provider.workers.state import WorkerState, resident_bytes, weight_bytes
from shared.errors import WireError
from shared.transport.colocated import SharedMemory
from shared.wire.header import Direction
from shared.wire.protocol import GroupShape

BATCHES = 2  # in flight: the next is there when one is done
# A worker that takes longer than this for a batch has stopped: seconds, and times what was expected.
MIN_TIMEOUT, TIMEOUT_FACTOR = 2.0, 20.0
MAX_READ = 8  # pieces of memory whose answers are not copied: who does not read them holds more than theirs
CHECK_SECONDS = 0.5  # between two checks whether something is late
MIN_RATE = 1.6e6  # bytes a second to and from a worker on another machine
RESTART_RETRY_SECONDS = 1.0  # after which a tenant asks again for what a worker did not answer


@dataclass
class _BatchInFlight:
    """A batch that the workers have. ``future`` None: it is lost, though some still write its answers."""

    layout: BatchLayout
    order: list[int]  # of each request, the place of its answer
    answer_bits: list[int]  # of each request
    whole: bool  # it is one request, all of it, and its answer may be read from the memory
    memory: SharedMemory
    future: Future[BatchResult] | None
    began: float
    deadline: float
    pending: set[WorkerProcess]
    failures: dict[int, FailureMessage] = field(default_factory=dict)  # by request
    processor_seconds: float = 0.0


class WorkerLane:
    """Multiplies in other processes, which are started again when they end or stop.

    What lost workers had is answered with ``unavailable``: a tenant asks again, with the same bytes. What
    they had not been given waits until they are back. See ``provider.engine.lanes.Lane`` for the rest. All
    but the constructor and ``close`` is for the loop's thread.

    Args:
        name: in the log.
        assignments: what each worker holds: the same groups, each another stripe of them.
        expected: seconds that a batch should take.
        start: see ``WorkerProcess``.

    Attributes:
        workers: one for each share.
    """

    inline = False

    def __init__(
        self,
        name: str,
        assignments: Sequence[Assignment],
        expected: Callable[[Sequence[RowRange]], float],
        start: StartWorker = Process,
    ) -> None:
        self._name, self._expected = name, expected
        first = assignments[0]
        self._shapes = {number: GroupShape.of(info, first.numerics) for number, info in first.groups.items()}
        self._in_flight: dict[int, _BatchInFlight] = {}  # by the number of its memory
        self._segments = SegmentPool()
        self._changed: Callable[[], None] = lambda: None
        self._loop: Loop | None = None
        self._check_scheduled = False
        names = [name if len(assignments) == 1 else f"{name}.{stripe}" for stripe in range(len(assignments))]
        self.workers: list[WorkerProcess] = []
        for name, assignment in zip(names, assignments, strict=True):
            self.workers.append(WorkerProcess(name, assignment, self, start))

    @property
    def depth(self) -> int:
        """See Lane."""
        return 0 if self.unavailable_workers() else BATCHES

    def unavailable_workers(self) -> list[WorkerProcess]:
        """Workers that are being started again."""
        return [worker for worker in self.workers if worker.link is None]

    def states(self, waiting: int) -> list[WorkerState]:
        """Of its workers, from any thread; ``waiting``: requests of its groups without an answer."""
        return [self._state(worker, waiting) for worker in self.workers]

    def _state(self, worker: WorkerProcess, waiting: int) -> WorkerState:
        assignment, done, stripe = worker.assignment, worker.multiplied, worker.assignment.stripe
        return WorkerState(
            name=worker.name,
            pid=worker.pid,
            up=worker.link is not None,
            since=worker.since,
            why=worker.why,
            device=assignment.device,
            groups=len(assignment.groups),
            stripe=f"{stripe.index + 1} of {stripe.count}" if stripe else "",
            restarts=worker.restarts,
            products=done.products,
            rows=done.rows,
            seconds=done.seconds,
            batches=sum(worker in batch.pending for batch in list(self._in_flight.values())),
            waiting=waiting,
            resident_bytes=resident_bytes(worker.pid),
            weight_bytes=weight_bytes(assignment),
        )

    def ready(self) -> list[Ready]:
        """Wait until all workers have their shares; batches may be started from then on.

        Raises:
            SymbiosisError: one cannot load its share.
        """
        return [worker.ready() for worker in self.workers]

    def attach(self, loop: Loop, changed: Callable[[], None]) -> None:
        """See Lane."""
        self._loop, self._changed = loop, changed
        for worker in self.workers:
            worker.attach(loop)

    def start(self, batch: Sequence[RowRange]) -> Future[BatchResult]:
        """See Lane."""
        future: Future[BatchResult] = Future()
        if self.unavailable_workers():
            future.set_result(self._unavailable(len(batch)))
            return future
        header = batch[0].request.header
        order = sorted(range(len(batch)), key=lambda number: is_seed(batch[number]))
        batch = [batch[number] for number in order]
        requests = [RequestRows.of_range(rows) for rows in batch]
        widths = self._shapes[header.group].widths(header.direction, header.members)
        layout = BatchLayout(requests, header.dtype, widths, self._terms(header.direction))
        try:
            segment, memory = self._segments.allocate(layout.size)
        except (OSError, MemoryError) as error:
            future.set_result(BatchResult([error] * len(batch)))
            return future
        layout.write(memory, batch)
        began = time.monotonic()
        before = max((each.deadline for each in self._in_flight.values()), default=began)
        travels = 0.0 if all(worker.pid for worker in self.workers) else layout.size / MIN_RATE
        deadline = max(began, before) + travels + max(MIN_TIMEOUT, TIMEOUT_FACTOR * self._expected(batch))
        first = batch[0]
        whole = len(batch) == 1 and first.stop - first.start == first.request.header.rows
        few = self._segments.in_use <= MAX_READ and segment.size <= 4 * (layout.size - layout.first)
        bits = [rows.request.header.answer_bits for rows in batch]
        in_flight = _BatchInFlight(
            layout, order, bits, whole and few, memory, future, began, deadline, set(self.workers)
        )
        self._in_flight[segment.number] = in_flight
        work = WorkerBatch(
            segment.number, header.group, header.direction, header.members, header.dtype, requests
        )
        message = msgspec.msgpack.encode(work)
        for worker in self.workers:
            try:
                if (link := worker.link) is not None:
                    for number in self._segments.dropped:
                        link.take_back(number)
                    link.lend(segment)
                    link.send(BATCH, message, Rows(segment.number, memory, 0, layout.sent))
            except OSError as error:
                worker.fail(error)
        self._segments.dropped.clear()
        self._schedule_check()
        return future

    def multiply(self, batch: Sequence[RowRange]) -> BatchResult:
        """See Lane: not inline."""
        raise NotImplementedError("workers multiply in their own processes")

    def close(self) -> None:
        """See Lane."""
        for worker in self.workers:
            worker.close()

    def _terms(self, direction: int) -> int:
        """How many answers are written: backward they add up."""
        return len(self.workers) if direction == Direction.BACKWARD else 1

    def _schedule_check(self) -> None:
        if self._loop is not None and not self._check_scheduled:
            self._check_scheduled = True
            self._loop.call_later(CHECK_SECONDS, self._check_deadlines)

    def _check_deadlines(self) -> None:
        """For batches that are late, as long as there are any."""
        self._check_scheduled, now = False, time.monotonic()
        for worker in self.workers:
            if any(batch.deadline < now and worker in batch.pending for batch in self._in_flight.values()):
                worker.fail(TimeoutError("it does not answer"))
        if self._in_flight:
            self._schedule_check()

    # -- called in the loop's thread ---------------------------------------------------------------

    def done(self, worker: WorkerProcess, what: Done) -> None:
        """See ``provider.workers.process.WorkerOwner``."""
        batch = self._in_flight[what.memory]
        batch.pending.discard(worker)
        batch.failures |= what.failures
        batch.processor_seconds += what.processor_seconds
        worker.multiplied.add(batch.layout.ranges()[-1].stop, batch.began, time.monotonic())
        if not batch.pending:
            del self._in_flight[what.memory]
            if batch.future is not None:
                batch.future.set_result(_result(batch))
        if worker.link is not None and not all(failure.code for failure in what.failures.values()):
            try:
                worker.link.take_back(what.memory)  # which it may not have been able to map: it is lent anew
            except OSError as error:
                worker.fail(error)

    def lost(self, worker: WorkerProcess) -> None:
        """See ``provider.workers.process.WorkerOwner``."""
        for number, batch in list(self._in_flight.items()):
            batch.pending.discard(worker)
            if not batch.pending:
                del self._in_flight[number]
            future, batch.future = batch.future, None
            if future is not None:
                future.set_result(self._unavailable(len(batch.order)))
        self._changed()

    def restart_assignment(self, worker: WorkerProcess) -> Assignment:
        """See ``provider.workers.process.WorkerOwner``."""
        return worker.assignment

    def back(self, worker: WorkerProcess) -> None:
        """See ``provider.workers.process.WorkerOwner``."""
        self._changed()

    def _unavailable(self, count: int) -> BatchResult:
        error = WireError(
            "unavailable",
            f"worker {self._name} is being started again; ask again",
            retry_after=RESTART_RETRY_SECONDS,
        )
        return BatchResult([error] * count)


def _result(batch: _BatchInFlight) -> BatchResult:
    terms = [batch.layout.answers(batch.memory, term) for term in range(batch.layout.terms)]
    answers: list[Answer] = [[]] * len(batch.order)
    for index, (number, rows) in enumerate(zip(batch.order, batch.layout.ranges(), strict=True)):
        bits = batch.answer_bits[index]
        if index in batch.failures:
            answers[number] = batch.failures[index].error()
        elif len(terms) > 1:
            sums = [_sum([tensor[rows] for tensor in tensors]) for tensors in zip(*terms, strict=True)]
            answers[number] = answer_of(sums, bits, unshared=True)
        else:
            answers[number] = answer_of([tensor[rows] for tensor in terms[0]], bits, unshared=batch.whole)
    return BatchResult(answers, batch.processor_seconds)


def _sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Integers wrap around, as torch's do on every processor (``tests/unit/test_stripes.py``)."""
    total = torch.add(terms[0], terms[1])
    for term in terms[2:]:
        total.add_(term)
    return total
