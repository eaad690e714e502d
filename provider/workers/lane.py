"""A worker as a lane: its process, what it is given, and what happens when it dies."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import torch
from safetensors.torch import load

from provider.engine.lanes import Answer, BatchResult, RowRange
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
    Link,
    Loaded,
    Piece,
    Share,
    crossing,
    encode_batch,
    layout,
)
from shared.errors import SymbiosisError, WireError
from shared.transport.colocated import SharedMemory
from shared.wire.header import DTYPES
from shared.wire.protocol import GroupShape

log = logging.getLogger(__name__)

SLOTS = 2  # batches under way: the next is there when one is done
LOAD_SECONDS = 600.0
# A worker that takes longer than this for a batch has stopped: seconds, and times what was expected.
LEAST_PATIENCE, PATIENCE = 2.0, 20.0
RETRY_SECONDS = 1.0  # after which a tenant asks again for what a worker did not answer
BACK_OFF = (0.0, 0.5, 2.0, 10.0)  # before a worker is started again; the last again and again


@dataclass
class _UnderWay:
    """A batch that the worker has."""

    pieces: list[Piece]
    future: Future[BatchResult]
    widths: tuple[int, ...]  # of an answer's blocks
    deadline: float


class WorkerLane:
    """Multiplies in a process of its own, which is started again when it ends or stops.

    What a lost worker had is answered with ``unavailable``: a tenant asks again, with the same bytes. What it
    had not been given waits until it is back. See ``provider.engine.lanes.Lane`` for the rest.

    Args:
        name: in the log.
        share: what the worker holds.
        expected: seconds that a batch should take.

    Raises:
        SymbiosisError: the worker cannot load its share.
    """

    here = False

    def __init__(
        self,
        name: str,
        share: Share,
        expected: Callable[[Sequence[RowRange]], float],
    ) -> None:
        self.name, self._share, self._expected = name, share, expected
        self._changed: Callable[[], None] = lambda: None
        self._shapes = {number: GroupShape.of(info, share.numerics) for number, info in share.groups.items()}
        self._lock = threading.Lock()  # over these, and over sending
        self._under_way: dict[int, _UnderWay] = {}  # by slot
        self._memory: dict[int, SharedMemory] = {}
        self._link: Link | None = None
        self._closing = False
        self.depth = 0
        self.restarts = -1
        self._process = self._start()
        self._attendant = threading.Thread(target=self._attend, name=f"worker-{name}", daemon=True)

    def loaded(self) -> tuple[Loaded, Mapping[str, torch.Tensor]]:
        """Wait until the worker has its share: what it says of it, and the scales of its groups.

        Raises:
            SymbiosisError: it cannot load it.
        """
        answer = self._wait_for_share()
        self._attendant.start()
        return answer

    @property
    def pid(self) -> int:
        """Of the process; another one after each restart."""
        return self._process.pid

    @property
    def available(self) -> bool:
        """Whether the worker takes batches."""
        return self.depth > 0

    def start(self, batch: Sequence[RowRange]) -> Future[BatchResult]:
        """See Lane."""
        header = batch[0].request.header
        plan = self._shapes[header.group].plan(header.direction, header.members)
        pieces, size = layout(batch, plan, DTYPES[header.dtype].itemsize)
        future: Future[BatchResult] = Future()
        deadline = time.monotonic() + max(LEAST_PATIENCE, PATIENCE * self._expected(batch))
        with self._lock:
            link = self._link
            slot = next((slot for slot in range(SLOTS) if slot not in self._under_way), None)
            if link is None or slot is None:
                future.set_result(_unavailable(len(batch), self.name))
                return future
            self._under_way[slot] = _UnderWay(pieces, future, plan.answer_widths, deadline)
            try:
                memory = self._room(slot, size, link)
                for piece, rows in zip(pieces, batch, strict=True):
                    memory.write(piece.payload_at, [crossing(rows, plan).contiguous()])
                link.send(BATCH, encode_batch(slot, pieces))
            except OSError:
                link.close()  # whoever attends it sees that, and answers
        return future

    def multiply(self, batch: Sequence[RowRange]) -> BatchResult:
        """See Lane."""
        return self.start(batch).result()

    def attach(self, changed: Callable[[], None]) -> None:
        """See Lane."""
        self._changed = changed

    def close(self) -> None:
        """See Lane."""
        with self._lock:
            self._closing = True
            for link in (self._link, self._fresh):
                if link is not None:
                    link.close()
        if self._attendant.is_alive():
            self._attendant.join(5)
        self._process.kill()
        self._process.wait()

    def _room(self, slot: int, size: int, link: Link) -> SharedMemory:
        """Memory of a slot for this many bytes, which the worker is told of."""
        memory = self._memory.get(slot)
        if memory is None or memory.size < size:
            size = max(1 << 20, 1 << (size - 1).bit_length())
            descriptor = os.memfd_create(f"symbiosis-worker-{self.name}", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, size)
                memory = self._memory[slot] = SharedMemory(descriptor, size)
                link.send(MEMORY, bytes([slot]), descriptor)
            finally:
                os.close(descriptor)
        return memory

    def _start(self) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - this program
                [sys.executable, "-m", "provider.workers.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the executor, which ends its workers
            )
        self._fresh = Link(ours)
        self.restarts += 1
        return process

    def _wait_for_share(self) -> tuple[Loaded, Mapping[str, torch.Tensor]]:
        link, scales = self._fresh, dict[str, torch.Tensor]()
        deadline = time.monotonic() + LOAD_SECONDS
        try:
            link.send(SHARE, msgspec.json.encode(self._share))
            while True:
                if not link.readable(deadline - time.monotonic()):
                    raise TimeoutError(f"nothing for {LOAD_SECONDS:.0f} s")
                kind, content, _ = link.receive()
                if kind == SCALES:
                    scales = load(content)
                elif kind == REFUSED:
                    failure = msgspec.json.decode(content, type=Failure)
                    raise SymbiosisError(f"worker {self.name} cannot load its share: {failure.message}")
                elif kind == LOADED:
                    break
        except (OSError, EOFError) as error:
            raise SymbiosisError(
                f"worker {self.name} ended while it loaded its share ({error}); it may have been for memory"
            ) from error
        with self._lock:
            self._link, self.depth = link, SLOTS
            self._memory.clear()
        return msgspec.json.decode(content, type=Loaded), scales

    # -- the thread that attends the worker --------------------------------------------------------

    def _attend(self) -> None:
        while not self._closing:
            try:
                self._receive()
            except (OSError, EOFError) as error:
                if not self._closing:
                    self._lost(error)
                    self._bring_back()
        self._give_up()

    def _receive(self) -> None:
        """Answers, until the worker ends, or has had a batch for too long.

        Raises:
            OSError, EOFError: so to speak.
        """
        link = self._link
        if link is None:
            raise EOFError("there is no worker")
        while True:
            if link.readable(LEAST_PATIENCE / 4):
                kind, content, _ = link.receive()
                if kind == DONE:
                    self._done(msgspec.json.decode(content, type=Done))
                continue
            now = time.monotonic()
            with self._lock:
                if any(each.deadline < now for each in self._under_way.values()):
                    raise TimeoutError("it does not answer")

    def _done(self, done: Done) -> None:
        with self._lock:
            batch, memory = self._under_way[done.slot], self._memory[done.slot]
        answers: list[Answer] = []
        for number, piece in enumerate(batch.pieces):
            failure = done.failures.get(number)
            answers.append(failure.error() if failure else _answer(memory, piece, batch.widths))
        with self._lock:
            del self._under_way[done.slot]
        batch.future.set_result(BatchResult(answers, done.processor_seconds))

    def _lost(self, error: Exception) -> None:
        with self._lock:
            self.depth, link, self._link = 0, self._link, None
        if link is not None:
            link.close()
        self._process.kill()
        status = self._process.wait()
        log.error("worker %s is lost (%s, exit status %d); it is started again", self.name, error, status)
        self._give_up()
        self._changed()

    def _give_up(self) -> None:
        with self._lock:
            lost, self._under_way = list(self._under_way.values()), {}
        for batch in lost:
            batch.future.set_result(_unavailable(len(batch.pieces), self.name))

    def _bring_back(self) -> None:
        began, tries = time.monotonic(), 0
        while not self._closing:
            time.sleep(BACK_OFF[min(tries, len(BACK_OFF) - 1)])
            tries += 1
            self._process = self._start()
            try:
                self._wait_for_share()
            except SymbiosisError as error:
                log.error("%s", error)
                self._fresh.close()
                self._process.kill()
                self._process.wait()
                continue
            log.warning("worker %s is back after %.1f s", self.name, time.monotonic() - began)
            self._changed()
            return


def _answer(memory: SharedMemory, piece: Piece, widths: tuple[int, ...]) -> list[torch.Tensor]:
    """Copies of an answer's blocks, which lie one behind the other."""
    rows, dtype = piece.stop - piece.start, DTYPES[piece.header.dtype]
    flat = memory.tensor(piece.answer_at, dtype, (1, rows * sum(widths))).clone().view(-1)
    return [block.view(rows, -1) for block in flat.split([rows * width for width in widths])]


def _unavailable(count: int, name: str) -> BatchResult:
    error = WireError(
        "unavailable", f"worker {name} is being started again; ask again", retry_after=RETRY_SECONDS
    )
    return BatchResult([error] * count)
