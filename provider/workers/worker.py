"""A worker: holds its share of the weights and multiplies what comes over the link, until that ends.

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
from provider.executor.stripes import ALONE, Stripe
from provider.workers.batch import Batch, Layout
from provider.workers.link import (
    BATCH,
    DONE,
    LOADED,
    LOADING,
    REFUSED,
    SCALES,
    SHARE,
    Done,
    Failure,
    Link,
    Loaded,
    Rows,
    Share,
)
from shared.checkpoint import Checkpoint
from shared.devices import pin
from shared.errors import SymbiosisError, WireError
from shared.latency import Line
from shared.transport.colocated import SharedMemory
from shared.wire.header import Direction
from shared.wire.protocol import GroupShape


def load(
    share: Share, alive: Callable[[], None] = lambda: None
) -> tuple[GroupExecutor, Loaded, dict[str, torch.Tensor]]:
    """Read a share out of its checkpoint, and measure its products; with the scales of its groups.

    ``alive`` is called after each group.

    Raises:
        SymbiosisError: see ``BaseExecutor``.
    """
    if share.threads:
        torch.set_num_threads(share.threads)
    checkpoint, kind, device = (
        Checkpoint(share.folder),
        Numerics.named(share.numerics),
        device_of(share.device),
    )
    load_group, shards = kind.load, None
    if share.gathering is not None:
        from provider.executor.gathered import Shards  # imports that others need not wait for

        shards = Shards(share.gathering, share.numerics, device)
        load_group = shards.load
    loaded = {}
    with checkpoint.kept_open():
        for number, info in share.groups.items():  # one is cut before the next is read
            loaded[number] = load_group(checkpoint, info, device).cut(share.stripe)
            alive()
    if shards is not None:
        shards.all_loaded()
    executor = GroupExecutor(loaded, share.numerics, device, share.stripe)
    infos = {number: group.info for number, group in loaded.items()}
    sharing = (share.gathering or ALONE).count  # what was measured is one's part of the rows
    lines = [
        (group, int(direction), Line(line.fixed, line.per_row / sharing))
        for (group, direction), line in profile(executor, infos).items()
    ]
    if shards is not None:
        shards.give_back()
    scales = {str(number): group.scales for number, group in loaded.items() if group.scales is not None}
    # After they were loaded: of a file that was replaced in between, it names what is new.
    weights = checkpoint.digest_of_groups(share.groups.values()) if share.digest else ""
    return executor, Loaded(infos, lines, weights), scales


class Worker:
    """Answers batches over a link.

    Args:
        link: to the executor.
        adapted: a share that it sends, as it is for this machine.
    """

    def __init__(self, link: Link, adapted: Callable[[Share], Share] = lambda share: share) -> None:
        self._link, self._adapted = link, adapted
        self._executor: GroupExecutor | None = None
        self._begun: deque[tuple[Done, Rows, Callable[[], None]]] = deque()
        self._pinned: set[int] = set()  # memory, by number; none has that of another
        self._device = torch.device("cpu")
        self._shapes: dict[int, GroupShape] = {}
        self._stripe, self._gathering = Stripe(0, 1), ALONE

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
            if kind == SHARE:
                self._share(self._adapted(msgspec.msgpack.decode(content, type=Share)))
            elif kind == BATCH:
                self._begin(msgspec.msgpack.decode(content, type=Batch))
            if len(self._begun) > 1:
                self._finish(*self._begun.popleft())

    def _share(self, share: Share) -> None:
        try:
            with memory_errors(Path(share.folder).name):
                self._executor, loaded, scales = load(share, lambda: self._link.send(LOADING))
        except (SymbiosisError, OSError, RuntimeError) as error:
            self._link.send(REFUSED, msgspec.msgpack.encode(Failure(str(error), type(error).__name__)))
            return
        self._shapes = {number: GroupShape.of(info, share.numerics) for number, info in share.groups.items()}
        self._device = torch.device(share.device)
        self._stripe, self._gathering = share.stripe or self._stripe, share.gathering or ALONE
        self._link.send(SCALES, save(scales))
        self._link.send(LOADED, msgspec.msgpack.encode(loaded))

    def _begin(self, batch: Batch) -> None:
        """Multiply, or have a GPU do it; what is begun is finished when there is nothing else to begin."""
        began, memory = time.thread_time(), self._link.memory.get(batch.memory)
        if memory is None:
            if self._gathering is not ALONE:
                raise EOFError("no memory for a batch that the others gather for")
            failure = Failure("no memory for a batch of this size")
            done = Done(batch.memory, 0.0, dict.fromkeys(range(len(batch.parts)), failure))
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
            failures = dict.fromkeys(range(len(batch.parts)), Failure.of(error))
        done = Done(batch.memory, time.thread_time() - began, failures)
        if wait is None:
            self._link.send(DONE, msgspec.msgpack.encode(done), rows)
        else:
            self._begun.append((done, rows, wait))

    def _finish(self, done: Done, rows: Rows, wait: Callable[[], None]) -> None:
        wait()
        self._link.send(DONE, msgspec.msgpack.encode(done), rows)

    def _layout(self, batch: Batch) -> Layout:
        plan = self._shapes[batch.group].plan(batch.direction, batch.members)
        terms = self._stripe.count if batch.direction == Direction.BACKWARD else 1
        return Layout(batch.parts, batch.dtype, plan, terms)

    def _multiply(
        self, batch: Batch, layout: Layout, memory: SharedMemory
    ) -> tuple[dict[int, Failure], Callable[[], None] | None]:
        if self._executor is None:
            raise RuntimeError("a batch before there were weights")
        key = batch.group, batch.direction, batch.members
        blocks = layout.requests(memory)
        answers = layout.answers(memory, self._stripe.index if layout.terms > 1 else 0)
        for place, rows in layout.seeded(memory):
            blocks[0][place] = rows
        failures = {}
        for number, place in enumerate(layout.ranges()):
            try:
                check_finite([block[place] for block in blocks])
            except WireError as error:
                failures[number] = Failure.of(error)
        mine = self._gathering.rows(len(blocks[0]))
        try:
            own = [block[mine] for block in blocks]
            return failures, self._executor.begin(*key, own, [block[mine] for block in answers])
        except Exception:  # who of them asked for too much fails alone
            if self._gathering is not ALONE:
                raise
            for number, place in enumerate(layout.ranges()):
                try:
                    own = [block[place] for block in blocks]
                    wait = self._executor.begin(*key, own, [block[place] for block in answers])
                    if wait is not None:
                        wait()
                except Exception as error:
                    failures.setdefault(number, Failure.of(error))
        return failures, None
