"""A worker: holds its share of the weights and multiplies what comes over the link, until that ends.

``python -m provider.workers.worker DESCRIPTOR``: the descriptor is the link's socket, inherited from
``provider.workers.lane``.
"""

from __future__ import annotations

import os
import socket
import sys

# Before torch loads its runtimes; see provider.cli.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")

import msgspec
import torch
from safetensors.torch import save

from provider.engine.lanes import Answer, BatchResult, ProcessLane, Request, RowRange
from provider.engine.profiling import profile
from provider.executor.loading import Numerics, device_of
from provider.executor.products import GroupExecutor
from provider.workers.link import (
    BATCH,
    DONE,
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
    Piece,
    Share,
    answer_blocks,
    decode_batch,
)
from shared.checkpoint import Checkpoint
from shared.errors import SymbiosisError
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
        self._memory: dict[int, SharedMemory] = {}  # by slot
        self._executor: GroupExecutor | None = None
        self._lane: ProcessLane | None = None
        self._shapes: dict[int, GroupShape] = {}
        self._part = 0  # of an answer that is a sum, which of its terms this worker's is

    def run(self) -> None:
        """Until the other end closes.

        Raises:
            EOFError: it did.
            OSError: so to speak.
        """
        while True:
            kind, content, descriptor = self._link.receive()
            if kind == SHARE:
                self._share(msgspec.json.decode(content, type=Share))
            elif kind == MEMORY and descriptor is not None:
                self._memory[content[0]] = SharedMemory(descriptor, os.fstat(descriptor).st_size)
                os.close(descriptor)
            elif kind == BATCH:
                self._batch(*decode_batch(content))

    def _share(self, share: Share) -> None:
        try:
            executor, loaded, scales = load(share)
        except (SymbiosisError, MemoryError, RuntimeError) as error:
            self._link.send(REFUSED, msgspec.json.encode(Failure(str(error), type(error).__name__)))
            return
        self._executor, self._lane = executor, ProcessLane(executor)
        self._shapes = {number: GroupShape.of(info, share.numerics) for number, info in share.groups.items()}
        self._part = share.stripe.index if share.stripe else 0
        self._link.send(SCALES, save(scales))
        self._link.send(LOADED, msgspec.json.encode(loaded))

    def _batch(self, slot: int, pieces: list[Piece]) -> None:
        memory = self._memory[slot]
        rows = []
        for piece in pieces:
            header = piece.header
            payload = memory.tensor(piece.payload_at, header.payload_dtype, header.payload_shape)
            rows.append(RowRange(Request(header, payload), piece.start, piece.stop))
        result = self._multiply(rows)
        failures = {}
        for number, (piece, answer) in enumerate(zip(pieces, result.answers, strict=True)):
            if isinstance(answer, Exception):
                failures[number] = Failure.of(answer)
            elif self._executor is not None:
                header = piece.header
                plan = self._shapes[header.group].plan(header.direction, header.members)
                part = self._part if header.direction == Direction.BACKWARD else 0
                self._executor.put(header, answer, answer_blocks(memory, piece, plan, part))
        done = Done(slot, result.processor_seconds, failures)
        self._link.send(DONE, msgspec.json.encode(done))

    def _multiply(self, rows: list[RowRange]) -> BatchResult:
        if self._lane is None:
            answers: list[Answer] = [RuntimeError("a batch before there were weights")] * len(rows)
            return BatchResult(answers)
        return self._lane.multiply(rows)


def main() -> None:
    """Entry point."""
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    try:
        Worker(link).run()
    except (EOFError, ConnectionError):
        pass  # the executor has ended, or wants this worker to


if __name__ == "__main__":
    main()
