"""Workers on other machines, or started by others: links over ``torch.distributed``, and their members.

Each worker and the executor are a process group of two, which has its own prefix in the store for every time
that the worker joins: one that is lost takes nothing with it, and one that comes again meets nothing of the
last. Only bytes are sent, as tensors of a length that was said before; nothing is unpickled. What the bytes
mean depends on the version: both ends leave theirs in the store, and there is no group of two that differ.

Both ends say every second that they live. Whoever hears nothing for ``SILENCE_SECONDS`` gives the other up.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from provider.engine.loop import Loop
from provider.workers.link import ALIVE, END, FORGET, MEMORY, Rows, WorkerLink
from provider.workers.memory import Segment
from provider.workers.world import CONNECT_SECONDS
from shared.command_line import version
from shared.errors import ConfigurationError, SymbiosisError, peer_text
from shared.transport.colocated import SharedMemory

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0
JOIN_SECONDS = 600.0  # for a worker that has not come yet
_POLL_SECONDS = 0.1
_PIECE_BYTES = 8 << 20  # on the way at once: each has its own SILENCE_SECONDS
_MAX_CONTENT, _MAX_MEMORY = 1 << 30, 1 << 34  # scales of a large model; rows and answers of a batch
_TAG = 0
_OVER, _VERSION = "over", "version"


def join(store: Store, rank: int) -> DistributedLink:
    """As a worker: say that it is there, and wait for the executor.

    Raises:
        ConfigurationError: it is of another version.
        EOFError: it has ended.
        OSError: it does not come.
    """
    try:
        if store.check([_OVER]):
            raise EOFError("the executor has ended")
        time_ = store.add(_times(rank), 1)
        store.set(_key(rank, time_, "host"), socket.gethostname())
        store.set(_key(rank, time_, _VERSION), version())
        store.set(_last(rank), str(time_))  # what it says is there when the executor looks
        executor = _text(store.get(_VERSION))
    except RuntimeError as error:
        raise ConnectionError(f"the executor does not say its version: {_first_line(error)}") from error
    _check_versions(rank, version(), executor)
    return DistributedLink(_pair(store, rank, time_, 1, "the executor"), 0, "the executor")


def announce_end(store: Store) -> None:
    """As the executor: tell also those who are about to join that there is nothing more to do."""
    with suppress(RuntimeError):  # the store has ended first
        store.set(_OVER, "1")


class JoinedWorker:
    """A worker that has joined; see ``provider.workers.process.StartedWorker``."""

    pid = 0

    def __init__(self, link: WorkerLink) -> None:
        self.link = link

    def end(self) -> str:
        """See StartedWorker: whoever started it does that."""
        return "on another machine, or started by others"


class WaitForRank:
    """Waits for the worker of a rank, again and again.

    Args:
        store: where it leaves word.
        rank: its number.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._version = version()  # of what runs: another may be installed meanwhile
        store.set(_VERSION, self._version)
        self._joined = 0  # the number of the time that it joined last, as far as is known

    def __call__(self, stop: threading.Event) -> JoinedWorker:
        """The next time that it joins.

        Raises:
            ConfigurationError: it is of another version.
            SymbiosisError: it does not.
        """
        deadline = time.monotonic() + JOIN_SECONDS
        try:
            while (time_ := self._last_join()) <= self._joined:
                if stop.wait(_POLL_SECONDS) or time.monotonic() > deadline:
                    raise SymbiosisError(
                        f"nobody has joined as rank {self._rank} for {JOIN_SECONDS:.0f} s; is it started, "
                        "with the same MASTER_ADDR and MASTER_PORT?"
                    )
            self._joined = time_
            worker, host = (
                _text(self._store.get(_key(self._rank, time_, what))) for what in (_VERSION, "host")
            )
        except RuntimeError as error:
            raise SymbiosisError(f"the store where workers join is gone: {_first_line(error)}") from error
        _check_versions(self._rank, worker, self._version)
        name = f"rank {self._rank} on {host}"
        try:
            return JoinedWorker(DistributedLink(_pair(self._store, self._rank, time_, 0, name), 1, name))
        except OSError as error:  # it has ended meanwhile, and will come again
            log.info("rank %d reported that it is there, and is not: %s", self._rank, error)
            return self(stop)

    def _last_join(self) -> int:
        """The number of the time that it joined last; 0: it never did."""
        word = _last(self._rank)
        return int(self._store.get(word)) if self._store.check([word]) else 0


def _times(rank: int) -> str:
    return f"worker/{rank}/times"


def _last(rank: int) -> str:
    return f"worker/{rank}/last"


def _key(rank: int, time_: int, what: str) -> str:
    """Under which a worker leaves word of itself, anew each time that it joins."""
    return f"worker/{rank}/{time_}/{what}"


def _text(said: bytes) -> str:
    return peer_text(said.decode(errors="replace"), 80)


def _check_versions(rank: int, worker: str, executor: str) -> None:
    if worker != executor:
        raise ConfigurationError(
            f"rank {rank} is of version {worker}, and the executor of version {executor}: install the same "
            "version of this program on all machines"
        )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _lost(name: str, error: Exception) -> ConnectionError:
    """In words of our own: gloo's are about its source files."""
    if any(word in str(error).lower() for word in ("timed out", "timeout")):
        return ConnectionError(f"{name} is silent")
    if "onnect" in str(error):  # closed, reset, refused
        return ConnectionError(f"{name} has ended the connection, or cannot be reached")
    return ConnectionError(f"the connection to {name} is lost: {_first_line(error)}")


def _pair(store: Store, rank: int, time_: int, own_rank: int, name: str) -> ProcessGroupGloo:
    prefix = PrefixStore(_key(rank, time_, "pair"), store)
    try:
        return ProcessGroupGloo(prefix, own_rank, 2, timedelta(seconds=CONNECT_SECONDS))
    except RuntimeError as error:
        raise _lost(name, error) from error


class DistributedLink(WorkerLink):
    """See ``provider.workers.link.WorkerLink``: between two ranks of a process group.

    A thread sends, so that who has something to say need not wait, and one receives.

    Args:
        group: of two.
        peer: the other rank.
        name: of the other end, for errors.

    Attributes:
        ended: set when nothing can come any more.
    """

    def __init__(self, group: ProcessGroupGloo, peer: int, name: str) -> None:
        super().__init__()
        self._group, self._peer, self._name = group, peer, name
        self._answers: dict[int, SharedMemory] = {}  # where rows of an answer go
        self._outbox: queue.SimpleQueue[tuple[int, bytes, Rows | None]] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[tuple[int, bytes] | Exception] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None
        self.ended = threading.Event()
        self._closed = False
        self._sender = threading.Thread(target=self._send_all, name="link-sends", daemon=True)
        self._sender.start()
        threading.Thread(target=self._receive_all, name="link-receives", daemon=True).start()

    def send(self, kind: int, content: bytes = b"", rows: Rows | None = None) -> None:
        """See WorkerLink; the receiver gets the error that breaks it."""
        if self._closed:
            raise ConnectionError("the link is closed")
        if rows is not None and rows.number not in self.memory:
            self._answers[rows.number] = rows.memory
        self._outbox.put((kind, content, rows))

    def receive(self, seconds: float | None = None) -> tuple[int, bytes]:
        """See WorkerLink."""
        try:
            message = self._inbox.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"nothing for {seconds:.0f} s") from None
        if isinstance(message, Exception):
            raise message
        return message

    def ready(self) -> bool:
        """See WorkerLink."""
        return not self._inbox.empty()

    def listen(
        self, loop: Loop, received: Callable[[int, bytes], None], ended: Callable[[Exception], None]
    ) -> None:
        """See WorkerLink."""

        def deliver() -> None:
            while not self._closed and not self._inbox.empty():
                message = self._inbox.get()
                if isinstance(message, Exception):
                    ended(message)
                    return
                received(*message)

        self._wake = lambda: loop.call_soon_threadsafe(deliver)
        loop.call_soon_threadsafe(deliver)  # what came before

    def _send_memory(self, segment: Segment) -> None:
        """The other end has memory of its own."""
        self.send(MEMORY, segment.number.to_bytes(8, "little") + segment.size.to_bytes(8, "little"))

    def close(self, *, finished: bool = False) -> None:
        """See WorkerLink."""
        if finished and not self._closed:
            self.send(END)
            self._closed = True
            self._sender.join(HEARTBEAT_SECONDS)
        elif not self._closed:
            self._closed = True
            self._group.abort()

    # -- two threads ---------------------------------------------------------------------------------

    def _send_all(self) -> None:
        try:
            while not self._closed or not self._outbox.empty():
                try:
                    kind, content, rows = self._outbox.get(timeout=HEARTBEAT_SECONDS)
                except queue.Empty:
                    kind, content, rows = ALIVE, b"", None
                number, start, stop = (rows.number, rows.start, rows.stop) if rows else (0, 0, 0)
                self._put(torch.tensor([kind, len(content), number, start, stop]))
                if content:
                    self._put(torch.frombuffer(bytearray(content), dtype=torch.uint8))
                if stop > start and rows:
                    self._put(torch.from_numpy(rows.memory.whole[start:stop]))
        except Exception as error:
            self._end(_lost(self._name, error))

    def _end(self, error: Exception) -> None:
        self._inbox.put(error)
        self._wake()
        self.ended.set()

    def _receive_all(self) -> None:
        try:
            while not self._closed:
                kind, length, number, start, stop = self._get(torch.empty(5, dtype=torch.int64)).tolist()
                if not 0 <= length <= _MAX_CONTENT:
                    raise RuntimeError(f"a message of {length} bytes")
                content = self._get(torch.empty(length, dtype=torch.uint8)).numpy().tobytes()
                memory = self.memory.get(number) or self._answers.pop(number, None)
                if memory is not None and not 0 <= start <= stop <= memory.size:
                    raise RuntimeError(f"bytes {start} to {stop} of {memory.size}")
                if memory is not None and stop > start:
                    self._get(torch.from_numpy(memory.whole[start:stop]))
                if kind == MEMORY:
                    number, size = (int.from_bytes(content[at : at + 8], "little") for at in (0, 8))
                    if not 0 < size <= _MAX_MEMORY:
                        raise RuntimeError(f"memory of {size} bytes")
                    self.memory[number] = SharedMemory.private(size)
                elif kind == FORGET:
                    self.memory.pop(int.from_bytes(content, "little"), None)
                elif kind == END:
                    raise EOFError("there is nothing more to do")
                elif kind != ALIVE:
                    self._inbox.put((kind, content))
                    self._wake()
        except EOFError as error:
            self._end(error)
        except Exception as error:  # RuntimeError of gloo, and whatever a peer's bytes lead to
            self._end(_lost(self._name, error))

    def _put(self, tensor: torch.Tensor) -> None:
        timeout = timedelta(seconds=SILENCE_SECONDS)
        for piece in tensor.split(_PIECE_BYTES):
            self._group.send([piece], self._peer, _TAG).wait(timeout)  # type: ignore[attr-defined]

    def _get(self, tensor: torch.Tensor) -> torch.Tensor:
        timeout = timedelta(seconds=SILENCE_SECONDS)
        for piece in tensor.split(_PIECE_BYTES) if tensor.numel() else ():
            self._group.recv([piece], self._peer, _TAG).wait(timeout)  # type: ignore[attr-defined]
        return tensor
