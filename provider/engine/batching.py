"""Does what the scheduler decides: gathers rows of many requests, multiplies, hands answers back.

Connections call ``run`` from their own threads and block until their answer is there. A request that
finds nobody at work is multiplied by its own thread, without any hand-over between threads; whatever
arrives meanwhile is left to one thread that works until nothing waits.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

from provider.engine.fairness import Weights
from provider.engine.latency import LatencyModel, Shape
from provider.engine.scheduler import (
    Batch,
    Kind,
    Objective,
    Policy,
    Work,
    bounded_class,
    make_policy,
    rows_of,
)
from provider.executor.base import BaseExecutor
from shared.wire.header import Direction, Header, RequestClass

log = logging.getLogger(__name__)

READ_AHEAD_ROWS = 16
PROFILE_ROWS = 128
MULTIPLIERS = 4  # connections' threads that may multiply, besides the engine's


class Done(NamedTuple):
    """An answer and where its time went.

    Attributes:
        blocks: the answer's payload, in pieces that lie one behind the other.
        request_class: the class that it was given.
        queue_seconds: until its first row was multiplied.
        reply_seconds: until its last was.
    """

    blocks: list[torch.Tensor]
    request_class: RequestClass
    queue_seconds: float
    reply_seconds: float


class _Part(NamedTuple):
    """Rows [start, stop) of a product."""

    product: list[torch.Tensor]
    start: int
    stop: int

    def blocks(self) -> list[torch.Tensor]:
        """Copies, if others have rows of the product: or who does not read would hold the memory of all."""
        if self.stop - self.start == len(self.product[0]):
            return self.product
        return [block[self.start : self.stop].clone() for block in self.product]


class _Request:
    """A request's tensors, and the thread that waits for it."""

    __slots__ = ("answers", "blocks", "done", "error", "first", "following", "last", "waiting", "work")

    def __init__(self, work: Work, blocks: list[torch.Tensor]) -> None:
        self.work, self.blocks = work, blocks
        self.answers: list[_Part] = []  # of each piece, in order of rows
        self.first = self.last = 0.0
        self.done = 0  # rows
        self.error: BaseException | None = None
        self.following: _Request | None = None  # whose thread is woken by this one's
        self.waiting = threading.Lock()  # held until the answer is there
        self.waiting.acquire()

    def finished(self) -> bool:
        return self.error is not None or self.done == self.work.rows


class Batcher:
    """Runs products as a policy decides, one at a time: each may use all processors.

    Args:
        executor: multiplies.
        policy: decides; None: every request by itself, in order.
        on_batch: told rows, seconds and the deciding thread's processor seconds of every product.
    """

    def __init__(
        self,
        executor: BaseExecutor,
        policy: Policy | None = None,
        *,
        weights: Weights | None = None,
        on_batch: Callable[[int, float, float], None] = lambda rows, seconds, processor: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._executor, self._clock, self._on_batch = executor, clock, on_batch
        self._policy = policy or make_policy("none", LatencyModel([]), Objective())
        self._weights = weights or Weights()
        self._latency = LatencyModel(shapes_of(executor))
        self._all = sum(shape.size for shape in self._latency.shapes)
        self._changed = threading.Condition()  # guards all below
        # Products that were not told of yet; none of note are lost if nobody gets an answer.
        self._measured: deque[tuple[int, float, float]] = deque(maxlen=4096)
        self._requests: dict[Work, _Request] = {}
        self._busy = False  # a thread takes decisions; nobody else may
        self._engine: threading.Thread | None = None
        self._turn = threading.Semaphore(0)
        self._multipliers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def run(self, tenant: str, header: Header, blocks: list[torch.Tensor]) -> Done:
        """Block until a request's product is done.

        Args:
            tenant: for fairness.
            header: of the accepted request.
            blocks: from ``BaseExecutor.blocks``.

        Raises:
            what the product raised.
        """
        work = self._work(tenant, header)
        request = _Request(work, blocks)
        with self._changed:
            self._requests[work] = request
            self._policy.add(work, work.arrived)
            idle, self._busy = not self._busy, True
            ours = idle and self._may_multiply()
            if not idle:
                self._changed.notify()  # whoever decides may be waiting for company
        if ours:
            try:
                self._work_until(request.finished)
            finally:
                self._hand_over()
        elif idle:
            self._hand_over()
        request.waiting.acquire()
        if request.following is not None:
            request.following.waiting.release()
        if request.error is not None:
            raise request.error
        return Done(
            _answer(request.answers),
            work.request_class,
            request.first - work.arrived,
            request.last - work.arrived,
        )

    @property
    def waiting(self) -> int:
        """Requests without an answer."""
        return len(self._requests)

    def answered(self, header: Header, stop: Callable[[], bool]) -> None:
        """Read the next group's weight ahead while the tenant computes its attention.

        A product of few rows takes as long as its weight takes to arrive from memory, and groups
        are called in the order of their ids. Only while nobody else's product runs.
        """
        while self._measured:  # now that nobody waits for it
            try:
                self._on_batch(*self._measured.popleft())
            except IndexError:
                break  # another thread was faster
        if header.rows <= READ_AHEAD_ROWS and not self._busy:
            self._executor.read_ahead(header.group + 1, lambda: self._busy or stop())

    def _may_multiply(self) -> bool:
        """Whether this thread is one of the few that multiply: OpenMP keeps a team of threads for each."""
        thread = threading.current_thread()
        if thread not in self._multipliers and len(self._multipliers) < MULTIPLIERS:
            self._multipliers.add(thread)
        return thread in self._multipliers

    def _work(self, tenant: str, header: Header) -> Work:
        kind = Kind(header.group, header.direction, header.members, header.dtype)
        shape = self._latency.shapes[header.group]
        share = shape.size * self._latency.share(header.group, header.members) / self._all
        cost = share * self._weights.of(header.operation, header.direction)
        request_class = bounded_class(header.request_class, header.direction, header.rows)
        session = threading.get_ident()  # each has a thread of its own
        return Work(tenant, kind, header.rows, request_class, cost, self._clock(), session)

    # -- whoever is at work ----------------------------------------------------------------------

    def _work_until(self, enough: Callable[[], bool]) -> None:
        """Take decisions and multiply; ``_busy`` is ours."""
        try:
            while not enough():
                with self._changed:
                    decision = self._policy.next(self._clock())
                    if decision is None:
                        return
                    if isinstance(decision, float):
                        self._changed.wait(max(0.0, decision - self._clock()))
                        continue
                    pieces = [(self._requests[work], start, stop) for work, start, stop in decision]
                self._multiply(decision, pieces)
        except BaseException as error:  # a fault of ours, or an interrupt: nobody waits for ever
            with self._changed:
                left, self._requests = list(self._requests.values()), {}
                for request in left:
                    self._policy.drop(request.work)
            for request in left:
                request.error = RuntimeError(f"the scheduler failed: {error!r}")
                request.waiting.release()
            if not isinstance(error, Exception):
                raise
            log.exception("the scheduler failed")

    def _hand_over(self) -> None:
        """End one's turn; what still waits is for the engine's thread."""
        with self._changed:
            if not self._requests:
                self._busy = False
                return
            engine = self._engine or self._start_engine()
        if engine is not None:
            self._turn.release()
            return
        self._work_until_nothing_waits()  # there is no further thread to be had

    def _start_engine(self) -> threading.Thread | None:
        engine = threading.Thread(target=self._serve, name="products", daemon=True)
        try:
            engine.start()
        except RuntimeError:
            return None
        self._engine = engine
        return engine

    def _serve(self) -> None:
        """The engine's thread."""
        while True:
            self._turn.acquire()
            self._work_until_nothing_waits()

    def _work_until_nothing_waits(self) -> None:
        more = True
        while more:
            self._work_until(lambda: False)
            with self._changed:
                more = self._busy = bool(self._requests)

    def _multiply(self, batch: Batch, pieces: list[tuple[_Request, int, int]]) -> None:
        started, processor = self._clock(), time.thread_time()
        try:
            answers = self._product(batch[0].work.kind, pieces)
        except Exception as error:
            if len(pieces) > 1:  # who of them asked for too much fails alone
                for piece, each in zip(batch, pieces, strict=True):
                    self._multiply([piece], [each])
                return
            answers = [error]
        ended, processor = self._clock(), time.thread_time() - processor
        rows = rows_of(batch)
        finished = []
        try:
            with self._changed:
                for (request, start, stop), answer in zip(pieces, answers, strict=True):
                    if start == 0:
                        request.first = started
                    request.last = ended
                    if isinstance(answer, Exception):
                        request.error = answer
                        self._policy.drop(request.work)
                    else:
                        request.answers.append(answer)
                        request.done += stop - start
                    if request.finished():
                        self._requests.pop(request.work, None)
                        finished.append(request)
                if not isinstance(answers[0], Exception):  # a failure says nothing of how long products take
                    self._policy.finished(batch, ended - started, ended)
        finally:
            # One wakes the next: all at once, they would queue for Python's lock and keep it from the engine.
            for request, following in pairwise(finished):
                request.following = following
            if finished:
                finished[0].waiting.release()
        self._measured.append((rows, ended - started, processor))

    def _product(self, kind: Kind, pieces: list[tuple[_Request, int, int]]) -> list[_Part | Exception]:
        """The answers of each piece.

        As few calls into torch as can be: each lets go of Python's lock, for which all connections queue.
        """
        inputs = [
            request.blocks if stop - start == request.work.rows else [b[start:stop] for b in request.blocks]
            for request, start, stop in pieces
        ]
        blocks = (
            inputs[0] if len(pieces) == 1 else [torch.cat(column) for column in zip(*inputs, strict=True)]
        )
        out = self._executor.product(kind.group, kind.direction, kind.members, blocks)
        parts: list[_Part | Exception] = []
        at = 0
        for _, start, stop in pieces:
            parts.append(_Part(out, at, at + stop - start))
            at += stop - start
        return parts


def _answer(parts: list[_Part]) -> list[torch.Tensor]:
    """A request's payload out of its products: each block's rows, from every product, in order."""
    return [piece for block in zip(*(part.blocks() for part in parts), strict=True) for piece in block]


def shapes_of(executor: BaseExecutor) -> list[Shape]:
    """The shapes of an executor's groups."""
    return [Shape(g.inputs, tuple(m.outputs for m in g.members)) for g in executor.manifest.groups]


def profile(executor: BaseExecutor, rounds: int = 3) -> LatencyModel:
    """Measure products of one and of many rows, for each shape and direction; takes seconds at most."""
    model = LatencyModel(shapes_of(executor))
    groups: dict[Shape, list[int]] = {}
    for group, shape in enumerate(model.shapes):
        groups.setdefault(shape, []).append(group)
    for shape, alike in groups.items():
        everyone = (1 << len(shape.outputs)) - 1
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            times: dict[int, list[float]] = {1: [], PROFILE_ROWS: []}
            for turn in range(rounds + 1):
                for rows, seconds in times.items():
                    group = alike[turn % len(alike)]  # another one each time, as in a pass through a model
                    blocks = executor.zeros(group, direction, everyone, rows)
                    started = time.perf_counter()
                    executor.product(group, direction, everyone, blocks)
                    if turn:  # the first warms up
                        seconds.append(time.perf_counter() - started)
            few, many = (sorted(seconds)[rounds // 2] for seconds in times.values())
            line = model.line(alike[0], direction)
            line.per_row = max(many - few, 0.01 * many) / (PROFILE_ROWS - 1)
            line.fixed = max(few - line.per_row, 0.1 * few)
    return model
