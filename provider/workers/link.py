"""What an executor and its workers say to each other, on one machine.

Control goes through a pair of sockets that the worker inherits, rows through memory that both have mapped: no
copy of a row ever goes through a socket. Nothing is unpickled; both are the same program of the same version,
which the worker is started with.

A message is its length, a kind and its content. An end that closes ends the other one.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable

import msgspec

from provider.engine.loop import Loop
from provider.executor.stripes import Stripe
from provider.workers.memory import Segment
from shared.errors import WireError
from shared.wire.messages import GroupInfo

_FRAME = struct.Struct("<IB")
# Kinds: what to hold; that it is held, and its scales, or why not; memory, and that it is needed no more;
# a batch, and that it is done.
SHARE, LOADED, SCALES, REFUSED, MEMORY, FORGET, BATCH, DONE = range(8)
_LARGEST = 1 << 30  # of a message; scales of a large model are megabytes


class Share(msgspec.Struct, frozen=True):
    """What a worker shall hold, and how.

    Attributes:
        folder: the checkpoint.
        numerics, device: as for ``BaseExecutor``.
        threads: of one product; 0: one a core.
        groups: by their numbers in the manifest.
        stripe: of these groups' outputs; None: all of them.
    """

    folder: str
    numerics: str
    device: str
    threads: int
    groups: dict[int, GroupInfo]
    stripe: Stripe | None = None


class Line(msgspec.Struct, frozen=True):
    """What ``provider.engine.profiling`` measured: see ``provider.engine.latency.Line``."""

    group: int
    direction: int
    fixed: float
    per_row: float


class Loaded(msgspec.Struct, frozen=True):
    """A worker has its share: its groups, on the ring with bounds, and how long its products take."""

    groups: dict[int, GroupInfo]
    lines: list[Line]


class Failure(msgspec.Struct, frozen=True):
    """What an exception becomes on its way: ``code`` is empty for one that is no tenant's business."""

    message: str
    code: str = ""
    retry_after: float | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
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
    failures: dict[int, Failure]  # by their place in the batch


class Link:
    """One end. One thread at a time may send, and one may receive.

    Args:
        patience: seconds for the rest of a message that has begun; None: for ever.
    """

    def __init__(self, connected: socket.socket, patience: float | None = None) -> None:
        self._socket = connected
        self._socket.settimeout(patience)
        self._loop: Loop | None = None
        self._lent: set[int] = set()

    def listen(
        self, loop: Loop, received: Callable[[int, bytes], None], ended: Callable[[Exception], None]
    ) -> None:
        """From now on call one of these for each message and at the end; in the loop's thread, as this is."""

        def readable(_: int) -> None:
            try:
                kind, content, _descriptor = self.receive()
            except (OSError, EOFError) as error:
                ended(error)
                return
            received(kind, content)

        self._loop = loop
        loop.watch(self._socket.fileno(), readable)

    def lend(self, segment: Segment) -> None:
        """Have the other end map this memory, if it has not yet.

        Raises:
            OSError: the other end is gone.
        """
        if segment.number not in self._lent:
            self._lent.add(segment.number)
            self.send(MEMORY, segment.number.to_bytes(8, "little"), segment.descriptor)

    def take_back(self, number: int) -> None:
        """Have the other end give memory back to the machine.

        Raises:
            OSError: the other end is gone.
        """
        if number in self._lent:
            self._lent.remove(number)
            self.send(FORGET, number.to_bytes(8, "little"))

    def send(self, kind: int, content: bytes, descriptor: int | None = None) -> None:
        """Send a message, with a descriptor if it is about one.

        Raises:
            OSError: the other end is gone.
        """
        data = _FRAME.pack(len(content), kind) + content
        if descriptor is None:
            self._socket.sendall(data)
        else:
            socket.send_fds(self._socket, [data], [descriptor])

    def receive(self) -> tuple[int, bytes, int | None]:
        """A message's kind and content, and its descriptor, which is the caller's.

        Raises:
            EOFError: the other end is gone.
            OSError: the connection broke.
        """
        head, descriptors, _flags, _address = socket.recv_fds(self._socket, _FRAME.size, 1)
        head += self._exactly(_FRAME.size - len(head)) if head else b""
        if not head:
            raise EOFError("the other end of the link is gone")
        length, kind = _FRAME.unpack(head)
        if length > _LARGEST:
            raise EOFError(f"a message of {length} bytes on the link")
        return kind, self._exactly(length), descriptors[0] if descriptors else None

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self._socket.recv_into(view)
            if not got:
                raise EOFError("the other end of the link is gone")
            view = view[got:]
        return bytes(data)

    def readable(self, seconds: float) -> bool:
        """Whether there is something to ``receive`` within some seconds, or the other end is gone."""
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def close(self) -> None:
        """End it, also for who waits; in the loop's thread, if it listens."""
        if self._loop is not None and not self._loop.closed:
            self._loop.forget(self._socket.fileno())
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()
