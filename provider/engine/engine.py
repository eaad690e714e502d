"""Carries out the scheduler's decisions: hands rows of many requests to lanes, and answers to their tenants.

Requests are submitted and complete. All of it happens in the loop's thread, which never waits for a product
that takes long: short ones it multiplies itself, since handing them to a thread would take as long.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from provider.engine.lanes import BatchResult, Lane, ProcessLane, Request, RowRange
from provider.engine.latency import LatencyModel
from provider.engine.loop import Loop
from provider.engine.profiling import shapes_of
from provider.engine.scheduler import (
    Batch,
    BatchKey,
    Opportunistic,
    Policy,
    QueuedRequest,
    effective_request_class,
    rows_of,
)
from provider.executor.base import BaseExecutor
from shared.errors import WireError
from shared.wire.header import Header, RequestClass

log = logging.getLogger(__name__)

READ_AHEAD_ROWS = 16
INLINE_SECONDS = 1e-3  # of a product that the loop's thread multiplies itself
LANE_WAIT_SECONDS = 1.0  # for which requests wait for a lane that takes none; then they are asked for again


class Completion(NamedTuple):
    """An answer and where its time went.

    Attributes:
        tensors: the answer's payload, in pieces that lie one behind the other.
        request_class: the class that it was given.
        queue_seconds: from its arrival until its first row was multiplied.
        reply_seconds: from its arrival until its last row was.
        product_seconds: of its products; of one that it shared with others, a share by its rows.
    """

    tensors: list[torch.Tensor]
    request_class: RequestClass
    queue_seconds: float
    reply_seconds: float
    product_seconds: float = 0.0


OnCompletion = Callable[["Completion | Exception"], None]


class _Submission:
    """A request on its way, and the callback for its answer."""

    __slots__ = (
        "abandoned",
        "answers",
        "completed",
        "done",
        "first",
        "in_flight",
        "queued",
        "request",
        "seconds",
    )

    def __init__(self, queued: QueuedRequest, request: Request, completed: OnCompletion) -> None:
        self.queued, self.request, self.completed = queued, request, completed
        self.answers: dict[int, list[torch.Tensor]] = {}  # by their first row
        self.first = 0.0
        self.done = 0  # rows
        self.seconds = 0.0  # of products
        self.in_flight = 0  # ranges of its rows that a lane has
        self.abandoned = False  # nobody wants the answer any more


class Engine:
    """Runs products as a policy decides, on lanes.

    Args:
        lanes: where products run; each group on the one that ``lane_of`` names.
        policy: decides.
        latency: how long products take, as far as is known.
        read_ahead: bring a group's weight nearer until told to stop; while there is nothing to do.
        on_batch: called with rows, seconds and the multiplying thread's processor seconds of every product.

    Attributes:
        loop: the loop whose thread uses this; sessions watch their descriptors there.
        policy: see there.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        policy: Policy,
        latency: LatencyModel,
        *,
        lane_of: Callable[[int], int] = lambda group: 0,
        read_ahead: Callable[[int, Callable[[], bool]], None] = lambda group, stop: None,
        on_batch: Callable[[int, float, float], None] = lambda rows, seconds, processor: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loop = self._make_loop()
        self._lanes, self.policy, self._latency = list(lanes), policy, latency
        self._lane_of, self._clock = lane_of, clock
        self._read_ahead, self._on_batch = read_ahead, on_batch
        self._all = sum(shape.size for shape in latency.shapes)
        self._submissions: dict[QueuedRequest, _Submission] = {}
        self._in_flight = [0] * len(self._lanes)
        self._ended = [0.0] * len(self._lanes)  # when the last batch of each did
        self._deferred: deque[Callable[[], None]] = deque()
        self._next_group: int | None = None  # to read ahead
        for lane in self._lanes:
            lane.attach(self.loop, lambda: self.loop.call_soon_threadsafe(_nothing))  # which decides anew

    def _make_loop(self) -> Loop:
        """Makes the loop; a simulation replaces this."""
        return Loop(self)

    @classmethod
    def of(
        cls,
        executor: BaseExecutor,
        policy: Callable[[LatencyModel], Policy] = Opportunistic,
        latency: LatencyModel | None = None,
        lane: Callable[[BaseExecutor], Lane] = ProcessLane,
        **options: Any,
    ) -> Self:
        """Returns an engine with an executor of this process as its lane.

        Args:
            policy: makes the policy from the latency model.
            latency: default: one that knows nothing yet.
            lane: makes the lane from the executor.
            options: others of the class.
        """
        latency = latency or LatencyModel(shapes_of(executor.manifest.groups))
        return cls([lane(executor)], policy(latency), latency, read_ahead=executor.read_ahead, **options)

    @property
    def waiting(self) -> int:
        """Requests without an answer."""
        return len(self._submissions)

    def waiting_on(self, lane: int) -> int:
        """Returns how many requests of one lane, by its number, have no answer; from any thread."""
        return sum(queued.lane == lane for queued in list(self._submissions))

    def submit(
        self, tenant: str, session: Hashable, header: Header, payload: torch.Tensor, completed: OnCompletion
    ) -> None:
        """Compute a request's product; in the loop's thread, which calls ``completed`` once.

        Args:
            tenant: for fairness.
            session: of the tenant: its tokens are told from each other's.
            header: of the accepted request.
            payload: its rows, or a seed; not changed.
        """
        queued = self._queued_request(tenant, session, header)
        self._submissions[queued] = _Submission(queued, Request(header, payload), completed)
        try:
            self.policy.add(queued, queued.arrived)
        except Exception as error:
            self._fail(error)

    def session_ended(self, tenant: str, session: Hashable) -> None:
        """Forget a session that has ended; in the loop's thread.

        Rows that no lane has are not multiplied. All requests complete; those with a lane do when it is done.
        """
        for submission in [
            a for a in self._submissions.values() if (a.queued.tenant, a.queued.session) == (tenant, session)
        ]:
            submission.abandoned = True
            self.policy.drop(submission.queued)
            if not submission.in_flight:
                del self._submissions[submission.queued]
                self._complete(submission, ConnectionResetError("the session has ended"))
        self.policy.session_ended(tenant, session)

    def defer(self, what: Callable[[], None]) -> None:
        """Call this later, when no request waits."""
        self._deferred.append(what)

    def close(self) -> None:
        """End the loop, after the deferred work, and the lanes."""
        self.loop.close(self._catch_up)
        for lane in self._lanes:
            lane.close()

    def _catch_up(self) -> None:
        while self._deferred:
            self._deferred.popleft()()

    def _queued_request(self, tenant: str, session: Hashable, header: Header) -> QueuedRequest:
        key = BatchKey(header.group, header.direction, header.members, header.dtype)
        shape = self._latency.shapes[header.group]
        # Virtual tokens of a row: through all groups it costs one (``provider.engine.fairness``).
        cost = shape.size * self._latency.share(header.group, header.members) / self._all
        request_class = effective_request_class(header.request_class, header.direction, header.rows)
        lane = self._lane_of(header.group)
        return QueuedRequest(tenant, key, header.rows, request_class, cost, self._clock(), session, lane)

    # -- the loop's thread -----------------------------------------------------------------------

    def run_once(self) -> float | None:
        """See ``provider.engine.loop.LoopTask``: decide for every lane that is free, once."""
        wait: float | None = None
        try:
            for number, lane in enumerate(self._lanes):
                if not self._submissions:
                    continue
                now, depth = self._clock(), lane.depth
                later = None if depth else self._refuse_overdue(number, now)
                if later is not None:
                    wait = later if wait is None else min(wait, later)
                if self._in_flight[number] >= depth:
                    continue
                decision = self.policy.next(now, number)
                if isinstance(decision, float):
                    wait = max(0.0, decision - now) if wait is None else min(wait, max(0.0, decision - now))
                elif decision is not None:
                    self._start(number, lane, decision)
                    wait = 0.0  # what has arrived meanwhile is handled before the next
        except Exception as error:
            self._fail(error)
        if wait is None and not self._submissions and self._deferred:
            self._deferred.popleft()()
            return 0.0
        while len(self._deferred) > 256:  # there never is nothing to do
            self._deferred.popleft()()
        return wait

    def _refuse_overdue(self, lane: int, now: float) -> float | None:
        """Refuse requests that have waited too long for a lane that takes nothing.

        So a tenant learns what it waits for, and decides for how long.

        Returns:
            Seconds until the next request has waited too long; None: there is none.
        """
        waiting = [a for a in self._submissions.values() if a.queued.lane == lane and not a.in_flight]
        due = [a for a in waiting if a.queued.arrived + LANE_WAIT_SECONDS <= now]
        for submission in due:
            self.policy.drop(submission.queued)
            del self._submissions[submission.queued]
        for submission in due:  # a connection that breaks under an answer ends all requests of its session
            what = f"what has group {submission.queued.key.group} is being started again; ask again"
            self._complete(submission, WireError("restarting", what, retry_after=LANE_WAIT_SECONDS))
        later = [
            a.queued.arrived + LANE_WAIT_SECONDS - now
            for a in waiting
            if a.queued.arrived + LANE_WAIT_SECONDS > now
        ]
        return min(later, default=None)

    def idle(self, stop: Callable[[], bool]) -> None:
        """See ``provider.engine.loop.LoopTask``: read the next group's weight ahead.

        A product of few rows takes as long as its weight takes to arrive from memory, and groups are called
        in the order of their ids. Meanwhile the tenant computes its attention.
        """
        group, self._next_group = self._next_group, None
        if group is not None and not any(self._in_flight):
            self._read_ahead(group, stop)

    def _start(self, number: int, lane: Lane, batch: Batch) -> None:
        rows = [RowRange(self._submissions[queued].request, start, stop) for queued, start, stop in batch]
        for queued, _, _ in batch:
            self._submissions[queued].in_flight += 1
        started = self._clock()
        key, count = batch[0].request.key, rows_of(batch)
        expected = self._latency.seconds(key.group, key.direction, key.member_bits, count)
        # Rows are made of a payload as a whole, which what is expected of a part of them leaves out.
        whole = all(r.request.tensors is not None or r.stop - r.start == r.request.header.rows for r in rows)
        if lane.inline and whole and expected <= INLINE_SECONDS:
            try:
                multiplied = lane.multiply(rows)
            except Exception as error:
                multiplied = _at_fault(error, batch)
            self._finished(batch, multiplied, started)
            return
        try:
            future = lane.start(rows)
        except Exception as error:
            self._finished(batch, _at_fault(error, batch), started)
            return
        self._in_flight[number] += 1
        future.add_done_callback(
            lambda future: self.loop.call_soon_threadsafe(
                partial(self._arrived, number, batch, started, future)
            )
        )

    def _arrived(self, number: int, batch: Batch, started: float, future: Future[BatchResult]) -> None:
        self._in_flight[number] -= 1
        # It waited for the one before it: a lane multiplies one after the other.
        started, self._ended[number] = max(started, self._ended[number]), self._clock()
        error = future.exception()
        self._finished(batch, _at_fault(error, batch) if error else future.result(), started)

    def _finished(self, batch: Batch, multiplied: BatchResult, started: float) -> None:
        ended = self._clock()
        answers, processor = multiplied
        complete: list[tuple[_Submission, Completion | Exception]] = []
        row_seconds = (ended - started) / rows_of(batch)
        for (queued, start, stop), answer in zip(batch, answers, strict=True):
            submission = self._submissions.get(queued)
            if submission is None:
                continue  # earlier rows of it failed
            submission.in_flight -= 1
            if not submission.answers:
                submission.first = started
            if submission.abandoned:
                if not submission.in_flight:
                    complete.append((submission, ConnectionResetError("the session has ended")))
                continue
            if isinstance(answer, Exception):
                complete.append((submission, answer))
                continue
            submission.answers[start] = answer
            submission.done += stop - start
            submission.seconds += (stop - start) * row_seconds
            if submission.done == queued.rows:
                tensors = _joined(submission.answers)
                times = submission.first - queued.arrived, ended - queued.arrived, submission.seconds
                complete.append((submission, Completion(tensors, queued.request_class, *times)))
        fault: Exception | None = None
        for submission, _ in complete:
            del self._submissions[submission.queued]
        try:
            for submission, done in complete:
                if isinstance(done, Exception):
                    self.policy.drop(submission.queued)
            if not any(isinstance(answer, Exception) for answer in answers):
                self.policy.finished(batch, ended - started, ended)
            for submission, _ in complete:
                if submission.abandoned:  # the policy has just heard of its session again
                    self.policy.session_ended(submission.queued.tenant, submission.queued.session)
        except Exception as error:
            fault = error
        for submission, done in complete:
            self._complete(submission, done)
        if fault is not None:
            self._fail(fault)
        last = batch[-1].request
        self._next_group = last.key.group + 1 if last.rows <= READ_AHEAD_ROWS else None
        self.defer(lambda: self._on_batch(rows_of(batch), ended - started, processor))

    @staticmethod
    def _complete(submission: _Submission, done: Completion | Exception) -> None:
        try:
            submission.completed(done)
        except Exception:
            log.exception("after a product of tenant %s", submission.queued.tenant)

    def _fail(self, error: Exception) -> None:
        """Fail all requests after a fault of the policy, so that no tenant waits for ever."""
        log.error("the scheduler failed", exc_info=error)
        submissions, self._submissions = list(self._submissions.values()), {}
        for submission in submissions:
            with suppress(Exception):
                self.policy.drop(submission.queued)
            self._complete(submission, RuntimeError(f"the scheduler failed: {error!r}"))


def _nothing() -> None:
    """Do nothing: the call wakes the loop."""


def _at_fault(error: BaseException, batch: Batch) -> BatchResult:
    """Returns the answers of a lane that failed: errors."""
    log.error("a lane failed", exc_info=error)
    return BatchResult([RuntimeError(f"a lane failed: {error!r}")] * len(batch))


def _joined(answers: dict[int, list[torch.Tensor]]) -> list[torch.Tensor]:
    """Joins the products of a request's rows to its payload: each tensor's rows, in order."""
    if len(answers) == 1:
        return next(iter(answers.values()))
    parts = [answers[start] for start in sorted(answers)]
    return [piece for tensor in zip(*parts, strict=True) for piece in tensor]
