"""Sockets between parties, which delay, cut, lose and damage bytes.

A socket has as much of ``ssl.SSLSocket`` as both ends use, after the handshake. Chunks arrive in the order in
which they were sent. As with TLS, what has been decrypted and not been read does not wake a poll.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from simulation.kernel import Kernel

CAPACITY = 1 << 16  # bytes on their way in one direction
ALL = 1 << 40


@dataclass
class NetworkConditions:
    """How bad the network is.

    Attributes:
        delay: least and most seconds of a chunk's way.
        cut: chance that a new connection is cut after some bytes; one of four is lost without a word.
        cut_bytes: on average, in the direction that is cut.
        damage: chance that a chunk from an executor is changed.
        refuse: chance that a connection is refused.
        silent: chance that a handshake is not answered.
        pieces: chance that a chunk arrives in several pieces.
    """

    delay: tuple[float, float] = (0.001, 0.01)
    cut: float = 0.0
    cut_bytes: float = 2000.0
    damage: float = 0.0
    refuse: float = 0.0
    silent: float = 0.0
    pieces: float = 0.3


class Connection:
    """What both ends have in common.

    Attributes:
        received: all bytes that the executor has received.
        damaged: whether a byte from the executor was changed.
    """

    def __init__(self, network: Network, name: str, tenant: str, executor: str) -> None:
        self.name, self.tenant, self.executor = name, tenant, executor
        self.received, self.damaged, self.lost = bytearray(), False, False
        self.ends = (Socket(network, self, "tenant"), Socket(network, self, "executor"))
        self.ends[0].peer, self.ends[1].peer = self.ends[1], self.ends[0]
        conditions, draw = network.conditions, network.kernel.random
        if draw.random() < conditions.cut:
            end = self.ends[draw.random() < 0.5]
            end.cut_after = int(draw.expovariate(1 / conditions.cut_bytes))
            end.quietly = draw.random() < 0.25


class Socket:
    """One end of a connection.

    Attributes:
        changed: called when it may have become ready.
        cut_after: bytes that still leave here; the connection breaks with the next one.
        quietly: neither end is told that it broke.
    """

    peer: Socket

    def __init__(self, network: Network, connection: Connection, side: str) -> None:
        self._network, self.connection, self.side = network, connection, side
        self.descriptor = next(network.descriptors)
        self.changed: Callable[[], None] = lambda: None
        self.cut_after, self.quietly = ALL, False
        self._raw: deque[bytes] = deque()
        self._decrypted = bytearray()
        self._on_the_way, self._arrives = 0, 0.0
        self._error: OSError | None = None
        self._ended = self._closed = self._said_end = False

    # -- what the ends call ----------------------------------------------------------------------

    def send(self, data: bytes | memoryview) -> int:
        self._check()
        if self._error is not None:
            raise self._error
        free = min(CAPACITY - self._on_the_way, 1 << 14)
        if free <= 0:
            raise ssl.SSLWantWriteError
        chunk = bytes(data[:free])
        self._transmit(chunk)
        return len(chunk)

    unsent = unread = 0  # nothing is encrypted or read ahead

    def flush(self) -> int:
        return 0

    def sendall(self, data: bytes) -> None:
        self._check()
        if self._error is not None:
            raise self._error
        self._transmit(bytes(data))

    def recv_into(self, buffer: memoryview) -> int:
        self._check()
        if not self._decrypted:
            if self._raw:
                chunk = self._raw.popleft()
                self._decrypted += chunk
                self.peer._on_the_way -= len(chunk)
                self._network.notify(self.peer)
            elif self._error is not None:
                raise self._error
            elif self._ended:
                return 0
            else:
                raise ssl.SSLWantReadError
        count = min(len(buffer), len(self._decrypted))
        buffer[:count] = self._decrypted[:count]
        del self._decrypted[:count]
        return count

    def recv(self, count: int) -> bytes:
        buffer = bytearray(count)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def discard(self) -> int:
        try:
            return len(self.recv(1 << 16))
        except ssl.SSLWantReadError:
            raise BlockingIOError from None

    def pending(self) -> int:
        return len(self._decrypted)

    def unwrap(self) -> None:
        self._say_end()
        raise ssl.SSLWantReadError

    def shutdown(self, how: int) -> None:
        self._check()
        self._say_end()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._raw or self._decrypted:  # as TCP: what was sent may not arrive
            self._network.kernel.after(self._network.delay(), partial(self.peer.fail, errno.ECONNRESET))
        else:
            self._say_end()

    def fileno(self) -> int:
        return self.descriptor

    def settimeout(self, seconds: float) -> None:
        """Nothing here waits."""

    def setblocking(self, flag: bool) -> None:
        """Nothing here waits."""

    def getpeername(self) -> tuple[str, int]:
        return "192.0.2.1", 443

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what polls ask --------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """What it is ready for, as ``select.poll`` says it."""
        what = select.POLLIN if self._raw or self._ended or self._error else 0
        if self._on_the_way < CAPACITY or self._error:
            what |= select.POLLOUT
        return what

    @property
    def closed(self) -> bool:
        """Whether this end was closed."""
        return self._closed

    # -- on the way ------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def _transmit(self, chunk: bytes) -> None:
        self._on_the_way += len(chunk)
        if self.connection.lost:
            return
        cut = len(chunk) > self.cut_after
        chunk = chunk[: self.cut_after]
        self.cut_after -= len(chunk)
        network, draw = self._network, self._network.kernel.random
        if self.side == "executor" and chunk and draw.random() < network.conditions.damage:
            chunk = self._damaged(chunk)
        at = 0
        while at < len(chunk):
            size = len(chunk)
            if draw.random() < network.conditions.pieces:
                size = draw.randrange(1, 1 + len(chunk))
            piece = chunk[at : at + size]
            at += size
            network.kernel.at(self._arrival(), partial(self._deliver, piece))
        if cut:
            network.kernel.at(self._arrival(), partial(network.cut, self.connection, quietly=self.quietly))

    def _damaged(self, chunk: bytes) -> bytes:
        draw = self._network.kernel.random
        at = draw.randrange(len(chunk) if draw.random() < 0.5 else min(48, len(chunk)))  # or in the header
        self.connection.damaged = True
        self._network.damaged.add(self.connection.tenant)
        self._network.kernel.note(f"{self.connection.name}: byte {at} of {len(chunk)} is damaged")
        return chunk[:at] + bytes([chunk[at] ^ 1 << draw.randrange(8)]) + chunk[at + 1 :]

    def _arrival(self) -> float:
        self._arrives = max(self._arrives, self._network.kernel.now + self._network.delay())
        return self._arrives

    def _deliver(self, piece: bytes) -> None:
        peer = self.peer
        if self.connection.lost or peer._closed or peer._error is not None:
            return
        self._network.kernel.note(f"{self.connection.name}: {len(piece)} bytes from the {self.side}", piece)
        if self.side == "tenant":
            self.connection.received += piece
        peer._raw.append(piece)
        self._network.notify(peer)

    def _say_end(self) -> None:
        if not self._said_end and not self.connection.lost:
            self._said_end = True
            self._network.kernel.at(self._arrival(), self.peer._end)

    def _end(self) -> None:
        if not self.connection.lost:
            self._ended = True
            self._network.notify(self)

    def fail(self, number: int) -> None:
        """The network or the other side's system says that the connection is broken."""
        if self._error is None and not self._closed:
            kind = TimeoutError if number == errno.ETIMEDOUT else ConnectionResetError
            self._error = kind(number, os.strerror(number))
            self._network.notify(self)


class Poll:
    """A tenant's poll, as ``tenant_sdk.connection.quick_poll.QuickPoll``."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._registered: dict[Any, int] = {}
        self._woken = False
        self._changed: Callable[[], None] = lambda: None

    def register(self, socket: Any, events: int) -> None:
        self._registered[socket] = events

    def poll(self, seconds: float, *, awake: bool = True) -> list[tuple[int, int]]:
        kernel, until = self._kernel, self._kernel.now + seconds
        task = kernel.current
        self._changed = partial(kernel.wake, task)
        for socket in self._registered:
            socket.changed = self._changed
        while not (ready := self._ready()) and kernel.now < until:
            kernel.wait(until)
        self._woken = False
        return ready

    def wake(self) -> None:
        self._woken = True
        self._changed()

    def close(self) -> None:
        """Nothing here has a descriptor."""

    def _ready(self) -> list[tuple[int, int]]:
        found = [(s.fileno(), s.ready & events) for s, events in self._registered.items()]
        ready = [(descriptor, what) for descriptor, what in found if what]
        return [*ready, (-1, select.POLLIN)] if self._woken else ready


class Network:
    """All connections of a run."""

    def __init__(self, kernel: Kernel, conditions: NetworkConditions) -> None:
        self.kernel, self.conditions = kernel, conditions
        self.descriptors = itertools.count(100)
        self.connections: list[Connection] = []
        self.damaged = set[str]()  # tenants that got a damaged byte

    def connect(self, tenant: str, executor: str) -> Connection:
        """A connection after its handshake."""
        name = f"{tenant} - {executor} ({len(self.connections)})"
        self.connections.append(Connection(self, name, tenant, executor))
        return self.connections[-1]

    def delay(self) -> float:
        """Of one chunk: mostly short, sometimes ten times as long."""
        least, most = self.conditions.delay
        seconds = self.kernel.random.uniform(least, most)
        return seconds * 10 if self.kernel.random.random() < 0.02 else seconds

    def notify(self, socket: Any) -> None:
        """It may have become ready."""
        socket.changed()

    def cut(self, connection: Connection, *, quietly: bool = False) -> None:
        """Break a connection; quietly: both ends learn it from their systems, after a minute or two."""
        self.kernel.note(f"{connection.name}: {'lost' if quietly else 'cut'}")
        connection.lost = True
        for end in connection.ends:
            if quietly:
                self.kernel.after(self.kernel.random.uniform(60, 120), partial(end.fail, errno.ETIMEDOUT))
            else:
                self.kernel.after(self.delay(), partial(end.fail, errno.ECONNRESET))

    def cut_all(self, party: str) -> None:
        """A process has ended: its system tells the others."""
        for connection in self.connections:
            if party in (connection.tenant, connection.executor) and not connection.lost:
                self.cut(connection)

    def poll(self, seconds: float) -> Poll:
        """Makes what a channel polls with."""
        return Poll(self.kernel)
