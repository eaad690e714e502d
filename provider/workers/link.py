"""The messages between an executor and its workers.

On one machine control goes through a pair of sockets that the worker inherits, rows through memory that both
have mapped: no copy of a row ever goes through a socket. ``provider.workers.distributed`` is for other
machines. Nothing is unpickled; both ends are the same program of the same version, which ends on different
machines compare before they are linked.

An end that closes ends the other one.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from provider.engine.loop import Loop
from provider.executor.stripes import Gathering, OutputStripe
from provider.workers.memory import Segment
from shared.errors import WireError
from shared.latency import LinearLatency
from shared.transport.colocated import SharedMemory
from shared.wire.messages import GroupInfo

_FRAME = struct.Struct("<IB")
_PIECE = 1 << 20  # bytes that are read at once
# Kinds: what to hold; that it is held, and its scales, or why not; memory, and that it is needed no more;
# a batch, and that it is done; that an end lives, or still loads, and that there is nothing more to do.
ASSIGNMENT, LOADED, SCALES, REFUSED, MEMORY, FORGET, BATCH, DONE, ALIVE, LOADING, END = range(11)


class Assignment(msgspec.Struct, frozen=True):
    """What a worker shall hold, and how.

    Attributes:
        folder: the checkpoint.
        numerics, device: as for ``BaseExecutor``.
        threads: of one product; 0: one a core.
        groups: by their numbers in the manifest.
        stripe: of these groups' outputs; None: all of them.
        digest: whether to say what was read: another machine's folder may hold something else, and the same
            one later. Of floats nothing else shows it.
        gathering: a shard of each of these groups, which is gathered for each product; None: the whole.
    """

    folder: str
    numerics: str
    device: str
    threads: int
    groups: dict[int, GroupInfo]
    stripe: OutputStripe | None = None
    digest: bool = False
    gathering: Gathering | None = None


class Loaded(msgspec.Struct, frozen=True):
    """A worker has its share.

    Attributes:
        groups: as the manifest names them, on the ring with bounds.
        lines: how long its products take, by group and direction.
        weights: digest of what it read, if it was asked for.
    """

    groups: dict[int, GroupInfo]
    lines: list[tuple[int, int, LinearLatency]]
    weights: str = ""


class FailureMessage(msgspec.Struct, frozen=True):
    """What an exception becomes on its way: ``code`` is empty for one that is no tenant's business."""

    message: str
    code: str = ""
    retry_after: float | None = None

    @classmethod
    def of(cls, error: Exception) -> FailureMessage:
        """Of an answer that is none."""
        if isinstance(error, WireError):
            return cls(error.message, error.code, error.retry_after)
        return cls(f"{type(error).__name__}: {error}")

    def error(self) -> Exception:
        """The exception on the other side."""
        if self.code:
            return WireError(self.code, self.message, retry_after=self.retry_after)
        return RuntimeError(f"in a worker: {self.message}")


class Done(msgspec.Struct, frozen=True):
    """A batch is multiplied; its answers lie where they should, but for those that failed."""

    memory: int  # the batch's
    processor_seconds: float
    failures: dict[int, FailureMessage]  # by their place in the batch


class Rows(NamedTuple):
    """Bytes of a segment that a message is about: the other end shall have them when it has the message."""

    number: int
    memory: SharedMemory
    start: int
    stop: int


class WorkerLink(ABC):
    """One end. One thread at a time may send, and one may receive.

    Attributes:
        memory: at a worker's end, what it was lent, by number.
    """

    def __init__(self) -> None:
        self.memory: dict[int, SharedMemory] = {}
        self._lent: set[int] = set()  # numbers of the memory that the other end has

    @abstractmethod
    def send(self, kind: int, content: bytes = b"", rows: Rows | None = None) -> None:
        """Send a message.

        Raises:
            OSError: the other end is gone.
        """

    @abstractmethod
    def receive(self, seconds: float | None = None) -> tuple[int, bytes]:
        """A message's kind and content.

        Args:
            seconds: to wait; None: for ever.

        Raises:
            EOFError: the other end is gone.
            OSError: the connection broke, or nothing came.
        """

    @abstractmethod
    def ready(self) -> bool:
        """Whether ``receive`` would not wait."""

    @abstractmethod
    def listen(
        self, loop: Loop, received: Callable[[int, bytes], None], ended: Callable[[Exception], None]
    ) -> None:
        """From now on call one of these for each message and at the end; in the loop's thread, as this is."""

    def lend(self, segment: Segment) -> None:
        """Have the other end map this memory, if it has not yet; or have as much of its own.

        Raises:
            OSError: the other end is gone.
        """
        if segment.number not in self._lent:
            self._lent.add(segment.number)
            self._send_memory(segment)

    @abstractmethod
    def _send_memory(self, segment: Segment) -> None:
        """Send what ``lend`` says."""

    def take_back(self, number: int) -> None:
        """Have the other end give memory back to the machine.

        Raises:
            OSError: the other end is gone.
        """
        if number in self._lent:
            self._lent.remove(number)
            self.send(FORGET, number.to_bytes(8, "little"))

    @abstractmethod
    def close(self, *, finished: bool = False) -> None:
        """End it, also for who waits; in the loop's thread, if it listens.

        Args:
            finished: the other end has nothing more to do; else it may come again.
        """


class LocalLink(WorkerLink):
    """See WorkerLink: on one machine.

    Args:
        timeout: seconds for the rest of a message that has begun; None: for ever.
    """

    def __init__(self, connected: socket.socket, timeout: float | None = None) -> None:
        super().__init__()
        self._socket = connected
        self._socket.settimeout(timeout)
        self._loop: Loop | None = None

    def send(self, kind: int, content: bytes = b"", rows: Rows | None = None) -> None:
        """See WorkerLink."""
        self._socket.sendall(_FRAME.pack(len(content), kind) + content)

    def receive(self, seconds: float | None = None) -> tuple[int, bytes]:
        """See WorkerLink."""
        while True:
            if not self._readable(seconds):
                raise TimeoutError(f"nothing for {seconds:.0f} s")
            head, descriptors, _flags, _address = socket.recv_fds(self._socket, _FRAME.size, 1)
            head += self._exactly(_FRAME.size - len(head)) if head else b""
            if not head:
                raise EOFError("the other end of the link is gone")
            length, kind = _FRAME.unpack(head)
            content = self._exactly(length)
            number = int.from_bytes(content[:8], "little")
            if len(descriptors) != (kind == MEMORY):
                for descriptor in descriptors:
                    os.close(descriptor)
                raise OSError("the other end of the link sends memory that is none")
            if kind == MEMORY:
                (descriptor,) = descriptors
                try:
                    self.memory[number] = SharedMemory(descriptor, os.fstat(descriptor).st_size)
                except (OSError, MemoryError):
                    pass  # a batch that is there fails
                finally:
                    os.close(descriptor)
            elif kind == FORGET:
                self.memory.pop(number, None)
            else:
                return kind, content

    def ready(self) -> bool:
        """See WorkerLink."""
        return self._readable(0.0)

    def listen(
        self, loop: Loop, received: Callable[[int, bytes], None], ended: Callable[[Exception], None]
    ) -> None:
        """See WorkerLink."""

        def readable(_: int) -> None:
            try:
                kind, content = self.receive()
            except (OSError, EOFError) as error:
                ended(error)
                return
            received(kind, content)

        self._loop = loop
        loop.register(self._socket.fileno(), readable)

    def _send_memory(self, segment: Segment) -> None:
        content = segment.number.to_bytes(8, "little")
        message = _FRAME.pack(len(content), MEMORY) + content
        socket.send_fds(self._socket, [message], [segment.descriptor])

    def _exactly(self, count: int) -> bytes:
        data = bytearray()  # which grows with what arrives, not with what a length says
        while len(data) < count:
            got = self._socket.recv(min(count - len(data), _PIECE))
            if not got:
                raise EOFError("the other end of the link is gone")
            data += got
        return bytes(data)

    def _readable(self, seconds: float | None) -> bool:
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def close(self, *, finished: bool = False) -> None:
        """See WorkerLink."""
        if self._loop is not None and not self._loop.closed:
            self._loop.unregister(self._socket.fileno())
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()
