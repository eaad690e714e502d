"""A worker: holds its share of the weights and multiplies rows from the link, until the link ends.

``provider.workers.local`` starts one on the executor's machine, ``provider.workers.rank`` on any.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

# Before torch loads its runtimes; see provider.cli.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")

import msgspec
import torch
from safetensors.torch import save

from provider.engine.profiling import profile
from provider.executor.loading import Numerics, device_of
from provider.executor.memory_check import memory_errors
from provider.executor.products import GroupExecutor, check_finite
from provider.executor.stripes import ALONE, OutputStripe
from provider.workers.batch import BatchLayout, WorkerBatch
from provider.workers.link import (
    ASSIGNMENT,
    BATCH,
    DONE,
    LOADED,
    LOADING,
    REFUSED,
    SCALES,
    Assignment,
    Done,
    FailureMessage,
    Loaded,
    Rows,
    WorkerLink,
)
from shared.checkpoint import Checkpoint
from shared.devices import pin
from shared.errors import SymbiosisError, WireError
from shared.latency import LinearLatency
from shared.transport.colocated import SharedMemory
from shared.wire.header import Direction
from shared.wire.protocol import GroupShape


def load(
    assignment: Assignment, alive: Callable[[], None] = lambda: None
) -> tuple[GroupExecutor, Loaded, dict[str, torch.Tensor]]:
    """Read a share out of its checkpoint, and measure its products; with the scales of its groups.

    ``alive`` is called after each group.

    Raises:
        SymbiosisError: see ``BaseExecutor``.
    """
    if assignment.threads:
        torch.set_num_threads(assignment.threads)
    checkpoint, kind, device = (
        Checkpoint(assignment.folder),
        Numerics.named(assignment.numerics),
        device_of(assignment.device),
    )
    load_group, shards = kind.load, None
    if assignment.gathering is not None:
        from provider.executor.gathered import Shards  # imports that others need not wait for

        shards = Shards(assignment.gathering, assignment.numerics, device)
        load_group = shards.load
    loaded = {}
    with checkpoint.kept_open():
        for number, info in assignment.groups.items():  # one is cut before the next is read
            loaded[number] = load_group(checkpoint, info, device).cut(assignment.stripe)
            alive()
    if shards is not None:
        shards.all_loaded()
    executor = GroupExecutor(loaded, assignment.numerics, device, assignment.stripe)
    infos = {number: group.info for number, group in loaded.items()}
    sharing = (assignment.gathering or ALONE).count  # what was measured is one's part of the rows
    lines = [
        (group, int(direction), LinearLatency(line.fixed, line.per_row / sharing))
        for (group, direction), line in profile(executor, infos).items()
    ]
    if shards is not None:
        shards.trim()
    scales = {str(number): group.scales for number, group in loaded.items() if group.scales is not None}
    # After they were loaded: of a file that was replaced in between, it names what is new.
    weights = checkpoint.digest_of_groups(assignment.groups.values()) if assignment.digest else ""
    return executor, Loaded(infos, lines, weights), scales


class Worker:
    """Answers batches over a link.

    Args:
        link: to the executor.
        adapted: a share that it sends, as it is for this machine.
    """

    def __init__(
        self, link: WorkerLink, adapted: Callable[[Assignment], Assignment] = lambda assignment: assignment
    ) -> None:
        self._link, self._adapted = link, adapted
        self._executor: GroupExecutor | None = None
        self._begun: deque[tuple[Done, Rows, Callable[[], None]]] = deque()
        self._pinned: set[int] = set()  # memory, by number; none has that of another
        self._device = torch.device("cpu")
        self._shapes: dict[int, GroupShape] = {}
        self._stripe, self._gathering = OutputStripe(0, 1), ALONE

    def run(self) -> None:
        """Until the other end closes.

        Raises:
            EOFError: it did.
            OSError: so to speak.
        """
        while True:
            if self._begun and not self._link.ready():
                self._finish(*self._begun.popleft())
                continue
            kind, content = self._link.receive()
            if kind == ASSIGNMENT:
                self._assign(self._adapted(msgspec.msgpack.decode(content, type=Assignment)))
            elif kind == BATCH:
                self._begin(msgspec.msgpack.decode(content, type=WorkerBatch))
            if len(self._begun) > 1:
                self._finish(*self._begun.popleft())

    def _assign(self, assignment: Assignment) -> None:
        try:
            with memory_errors(Path(assignment.folder).name):
                self._executor, loaded, scales = load(assignment, lambda: self._link.send(LOADING))
        except (SymbiosisError, OSError, RuntimeError) as error:
            self._link.send(REFUSED, msgspec.msgpack.encode(FailureMessage(str(error), type(error).__name__)))
            return
        self._shapes = {
            number: GroupShape.of(info, assignment.numerics) for number, info in assignment.groups.items()
        }
        self._device = torch.device(assignment.device)
        self._stripe, self._gathering = assignment.stripe or self._stripe, assignment.gathering or ALONE
        self._link.send(SCALES, save(scales))
        self._link.send(LOADED, msgspec.msgpack.encode(loaded))

    def _begin(self, batch: WorkerBatch) -> None:
        """Multiply, or have a GPU do it; what is begun is finished when there is nothing else to begin."""
        began, memory = time.thread_time(), self._link.memory.get(batch.memory)
        if memory is None:
            if self._gathering is not ALONE:
                raise EOFError("no memory for a batch that the others gather for")
            failure = FailureMessage("no memory for a batch of this size")
            done = Done(batch.memory, 0.0, dict.fromkeys(range(len(batch.requests)), failure))
            self._link.send(DONE, msgspec.msgpack.encode(done))
            return
        if batch.memory not in self._pinned:
            self._pinned.add(batch.memory)
            pin(memory.whole, self._device)
        rows, wait = Rows(batch.memory, memory, 0, 0), None
        try:
            layout = self._layout(batch)
            failures, wait = self._multiply(batch, layout, memory)
            rows = Rows(batch.memory, memory, layout.first, layout.size)
        except Exception as error:
            if self._gathering is not ALONE:
                raise  # to end: what the others gather next, this one would not
            failures = dict.fromkeys(range(len(batch.requests)), FailureMessage.of(error))
        done = Done(batch.memory, time.thread_time() - began, failures)
        if wait is None:
            self._link.send(DONE, msgspec.msgpack.encode(done), rows)
        else:
            self._begun.append((done, rows, wait))

    def _finish(self, done: Done, rows: Rows, wait: Callable[[], None]) -> None:
        wait()
        self._link.send(DONE, msgspec.msgpack.encode(done), rows)

    def _layout(self, batch: WorkerBatch) -> BatchLayout:
        widths = self._shapes[batch.group].widths(batch.direction, batch.members)
        terms = self._stripe.count if batch.direction == Direction.BACKWARD else 1
        return BatchLayout(batch.requests, batch.dtype, widths, terms)

    def _multiply(
        self, batch: WorkerBatch, layout: BatchLayout, memory: SharedMemory
    ) -> tuple[dict[int, FailureMessage], Callable[[], None] | None]:
        if self._executor is None:
            raise RuntimeError("a batch before there were weights")
        key = batch.group, batch.direction, batch.members
        tensors = layout.requests(memory)
        answers = layout.answers(memory, self._stripe.index if layout.terms > 1 else 0)
        for place, rows in layout.seeded(memory):
            tensors[0][place] = rows
        failures = {}
        for number, place in enumerate(layout.ranges()):
            try:
                check_finite([tensor[place] for tensor in tensors])
            except WireError as error:
                failures[number] = FailureMessage.of(error)
        mine = self._gathering.rows(len(tensors[0]))
        try:
            own_tensors = [tensor[mine] for tensor in tensors]
            return failures, self._executor.begin(*key, own_tensors, [tensor[mine] for tensor in answers])
        except Exception:  # who of them asked for too much fails alone
            if self._gathering is not ALONE:
                raise
            for number, place in enumerate(layout.ranges()):
                try:
                    own_tensors = [tensor[place] for tensor in tensors]
                    wait = self._executor.begin(*key, own_tensors, [tensor[place] for tensor in answers])
                    if wait is not None:
                        wait()
                except Exception as error:
                    failures.setdefault(number, FailureMessage.of(error))
        return failures, None
