"""A worker: holds its share of the weights and multiplies what comes over the link, until that ends.

``python -m provider.workers.worker DESCRIPTOR``: the descriptor is the link's socket, inherited from
``provider.workers.lane``.
"""

from __future__ import annotations

import os
import socket
import sys
import time

# Before torch loads its runtimes; see provider.cli.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")

import msgspec
import torch
from safetensors.torch import save

from provider.engine.profiling import profile
from provider.executor.loading import Numerics, device_of
from provider.executor.products import GroupExecutor, check_finite
from provider.executor.stripes import Stripe
from provider.workers.batch import Batch, Layout
from provider.workers.link import (
    BATCH,
    DONE,
    FORGET,
    LOADED,
    MEMORY,
    REFUSED,
    SCALES,
    SHARE,
    Done,
    Failure,
    Line,
    Link,
    Loaded,
    Share,
)
from shared.checkpoint import Checkpoint
from shared.errors import SymbiosisError, WireError
from shared.transport.colocated import SharedMemory
from shared.wire.header import Direction
from shared.wire.protocol import GroupShape


def load(share: Share) -> tuple[GroupExecutor, Loaded, dict[str, torch.Tensor]]:
    """Read a share out of its checkpoint, and measure its products; with the scales of its groups.

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
    loaded = {number: kind.load(checkpoint, info, device) for number, info in share.groups.items()}
    executor = GroupExecutor(loaded, share.numerics, device, share.stripe)
    infos = {number: group.info for number, group in loaded.items()}
    lines = [
        Line(group, int(direction), line.fixed, line.per_row)
        for (group, direction), line in profile(executor, infos).items()
    ]
    scales = {str(number): group.scales for number, group in loaded.items() if group.scales is not None}
    return executor, Loaded(infos, lines), scales


class Worker:
    """Answers batches over a link.

    Args:
        link: to the executor.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._memory: dict[int, SharedMemory] = {}  # by number
        self._executor: GroupExecutor | None = None
        self._shapes: dict[int, GroupShape] = {}
        self._stripe = Stripe(0, 1)

    def run(self) -> None:
        """Until the other end closes.

        Raises:
            EOFError: it did.
            OSError: so to speak.
        """
        while True:
            kind, content, descriptor = self._link.receive()
            if kind == SHARE:
                self._share(msgspec.msgpack.decode(content, type=Share))
            elif kind == MEMORY and descriptor is not None:
                size = os.fstat(descriptor).st_size
                self._memory[int.from_bytes(content, "little")] = SharedMemory(descriptor, size)
                os.close(descriptor)
            elif kind == FORGET:
                self._memory.pop(int.from_bytes(content, "little"), None)
            elif kind == BATCH:
                done = self._done(msgspec.msgpack.decode(content, type=Batch))
                self._link.send(DONE, msgspec.msgpack.encode(done))

    def _share(self, share: Share) -> None:
        try:
            self._executor, loaded, scales = load(share)
        except (SymbiosisError, MemoryError, RuntimeError) as error:
            self._link.send(REFUSED, msgspec.msgpack.encode(Failure(str(error), type(error).__name__)))
            return
        self._shapes = {number: GroupShape.of(info, share.numerics) for number, info in share.groups.items()}
        self._stripe = share.stripe or self._stripe
        self._link.send(SCALES, save(scales))
        self._link.send(LOADED, msgspec.msgpack.encode(loaded))

    def _done(self, batch: Batch) -> Done:
        began = time.thread_time()
        try:
            failures = self._multiply(batch)
        except Exception as error:
            failures = dict.fromkeys(range(len(batch.parts)), Failure.of(error))
        return Done(batch.memory, time.thread_time() - began, failures)

    def _multiply(self, batch: Batch) -> dict[int, Failure]:
        if self._executor is None:
            raise RuntimeError("a batch before there were weights")
        memory, key = self._memory[batch.memory], (batch.group, batch.direction, batch.members)
        terms = self._stripe.count if batch.direction == Direction.BACKWARD else 1
        plan = self._shapes[batch.group].plan(batch.direction, batch.members)
        layout = Layout(batch.parts, batch.dtype, plan, terms)
        blocks = layout.requests(memory)
        answers = layout.answers(memory, self._stripe.index if terms > 1 else 0)
        for place, rows in layout.seeded(memory):
            blocks[0][place] = rows
        failures = {}
        for number, place in enumerate(layout.ranges()):
            try:
                check_finite([block[place] for block in blocks])
            except WireError as error:
                failures[number] = Failure.of(error)
        try:
            self._executor.write(*key, blocks, answers)
        except Exception:  # who of them asked for too much fails alone
            for number, place in enumerate(layout.ranges()):
                try:
                    own = [block[place] for block in blocks]
                    self._executor.write(*key, own, [block[place] for block in answers])
                except Exception as error:
                    failures.setdefault(number, Failure.of(error))
        return failures


def main() -> None:
    """Entry point."""
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    try:
        Worker(link).run()
    except (EOFError, ConnectionError):
        pass  # the executor has ended, or wants this worker to


if __name__ == "__main__":
    main()
