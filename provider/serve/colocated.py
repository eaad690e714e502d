"""Tenants on the same machine: control messages over ZeroMQ, tensors in shared memory.

One thread opens sessions; each session has a socket, pipes and a piece of memory, from which rows are
multiplied as they lie there; answers go to the offsets that the tenant named. The
executor keeps no account of offsets: they are the tenant's own, and all that is checked is that they lie
within its memory (Symbiosis §3.5; ``shared/PROTOCOL.md``, "Co-located transport").
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import zmq

from provider.engine.loop import READ, Loop
from provider.serve.admission import Identity, Refused, check_version, refusal
from provider.serve.connection import CLOSING, DRAINING, ENDED, LINGERING, OPEN, Connection, Connections
from provider.serve.tokens import TokenFile
from provider.session.tenant import Service, TenantSession
from shared.errors import ConfigurationError, WireError
from shared.transport import SCHEME
from shared.transport.colocated import (
    ANSWERS,
    END,
    LISTENER,
    MAX_IN_FLIGHT,
    MEMORY,
    MEMORY_BYTE,
    OFFSETS,
    OPENED,
    PREAMBLE_BYTES,
    REFUSED,
    REQUESTS,
    Opened,
    SharedMemory,
    directory_of,
    why_not_private,
)
from shared.wire.header import HEADER_BYTES, Header, Operation
from shared.wire.incoming import Incoming, check_header
from shared.wire.messages import encode
from shared.wire.protocol import MAX_REQUEST_CONTROL_BYTES

log = logging.getLogger(__name__)

FIRST_BYTES = 1 << 20  # of a session's memory; it grows with what is asked of it
FIRST_MESSAGE_MILLISECONDS = 10_000
LINGER_MILLISECONDS = 1000
PEER = "local"  # for the log, where others have an address
# Requests whose rows lie in memory. What is parsed is not among them: it comes in the message, where the
# tenant cannot change it any more.
_ROWS = frozenset({Operation.PRODUCT, Operation.EFFECT})


class MemoryBudget:
    """Limits the shared memory of all sessions together, and of one tenant's."""

    def __init__(self, limit: int, tenant_limit: int) -> None:
        self._limit, self._tenant_limit = limit, tenant_limit
        self._reserved: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reserve(self, tenant: str, size: int) -> bool:
        """Reserve so many bytes. Returns whether there were as many."""
        with self._lock:
            if (
                self._reserved.total() + size > self._limit
                or self._reserved[tenant] + size > self._tenant_limit
            ):
                return False
            self._reserved[tenant] += size
            return True

    def release(self, tenant: str, size: int) -> None:
        """Give reserved bytes back."""
        with self._lock:
            self._reserved[tenant] -= size
            if not self._reserved[tenant]:
                del self._reserved[tenant]


class SessionMemory:
    """The memory of one session, which this process owns.

    Sealed against shrinking before anybody else can open it: a tenant that could cut it off would kill
    the executor with a bus error.

    Args:
        max_bytes: bytes that it may grow to.

    Raises:
        Refused: there is none left.
    """

    def __init__(self, budget: MemoryBudget, tenant: str, max_bytes: int) -> None:
        self._budget, self._tenant, self.max_bytes, self.size = budget, tenant, max_bytes, 0
        self.name = f"symbiosis-{secrets.token_hex(8)}"
        self.descriptor = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.descriptor, 0o600)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self.grow(min(FIRST_BYTES, max_bytes))
            if not self.size:
                raise Refused("overloaded", "no shared memory for another session", tenant=tenant)
        except BaseException:
            self.close()
            raise

    def grow(self, size: int) -> None:
        """Grow to at least so many bytes, if that is allowed and there are as many; else stay as it is."""
        if not self.size < size <= self.max_bytes or not self._budget.reserve(self._tenant, size - self.size):
            return
        try:
            # Really allocated: a page that is missing later would be a bus error, too.
            os.posix_fallocate(self.descriptor, 0, size)
            self.mapped = SharedMemory(self.descriptor, size)
        except OSError as error:
            self._budget.release(self._tenant, size - self.size)
            log.warning("no %d bytes of shared memory: %s", size, error.strerror)
            return
        self.size = size

    def close(self) -> None:
        """Give the memory back."""
        if self.size:
            self.mapped.close()
        os.close(self.descriptor)
        self._budget.release(self._tenant, self.size)


class ColocatedConnection(Connection):
    """See Connection. It exists from the moment that its tenant's token was good."""

    def __init__(
        self,
        directory: Path,
        identity: Identity,
        service: Service,
        budget: MemoryBudget,
    ) -> None:
        super().__init__(*identity, PEER)
        tenant = identity.tenant
        self._copies = service.transcript is not None
        limits = service.executor.manifest.limits
        self._max_in_flight = limits.max_in_flight
        self._answer_offsets: dict[int, int] = {}  # of answers, by request id
        self._hello_received = self._reading = False
        self._name = f"session-{secrets.token_hex(8)}"
        self._path = directory / self._name
        with ExitStack() as resources:
            # The largest request with its answer, and as much again, to be filled while that is computed.
            self._memory = SessionMemory(budget, tenant, 4 * limits.max_message_bytes)
            resources.callback(self._memory.close)
            resources.callback(self._remove_files)
            self._requests, self._answers = self._make_pipes(resources)
            self._socket: zmq.Socket[bytes] = resources.enter_context(zmq.Context.instance().socket(zmq.PAIR))
            self._socket.set(zmq.LINGER, LINGER_MILLISECONDS)
            self._socket.set(zmq.MAXMSGSIZE, PREAMBLE_BYTES + MAX_REQUEST_CONTROL_BYTES)
            for queue in (zmq.SNDHWM, zmq.RCVHWM):
                self._socket.set(queue, 2 * MAX_IN_FLIGHT)
            self._socket.bind(f"{SCHEME}{self._path}")
            # Not ZeroMQ's own polling: that looks at the socket each time, which products do not need.
            self._socket_fd = int(self._socket.get(zmq.FD))
            self._session = TenantSession(service, tenant, self._send, PEER)
            resources.callback(self._session.close)
            self._resources = resources.pop_all()

    def opened(self) -> Opened:
        """Returns what the tenant needs to reach the session."""
        memory = self._memory
        return Opened(self._name, os.getpid(), memory.descriptor, memory.name, memory.size, memory.max_bytes)

    def start(self, loop: Loop, ended: Callable[[], None]) -> None:
        """See Connection."""
        super().start(loop, ended)
        loop.register(self._socket_fd, self._guard(self._read_socket))
        loop.call_later(FIRST_MESSAGE_MILLISECONDS / 1000, self._guard(self._check_hello))
        self._guard(self._read_socket)(0)  # there may be a message that the descriptor does not tell of

    def drain(self) -> None:
        """See Connection."""
        if self._stage == OPEN:
            self._advance(DRAINING)
        if self._hello_received and self._reading:
            self._guarded(self._read_requests)
        self._finish()

    def _guard(self, handle: Callable[[], None]) -> Callable[..., None]:
        """Returns a guarded handler for the loop."""
        return lambda *_: self._guarded(handle)

    def _check_hello(self) -> None:
        if not self._hello_received:
            raise TimeoutError

    def _read_socket(self) -> None:
        """Handle messages of ZeroMQ, whose descriptor does not tell of every message."""
        for _ in range(self._max_in_flight):
            if self._stage >= CLOSING or self._session.in_flight >= self._max_in_flight:
                return  # whatever is answered has this looked at again
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not self._hello_received:
                self._hello_received = True
                self._remove_files()  # nobody else comes in, and nothing is left behind
                self._loop.register(self._requests, self._guard(self._read_requests))
                self._reading = True
            if data == END:
                self._end()
            elif data[0] != MEMORY_BYTE:
                self._session.answer(self._incoming(data))
            elif len(data) != MEMORY.size:
                raise WireError("header", "neither a request nor a wish for memory", fatal=True)
            else:
                self._memory.grow(MEMORY.unpack(data)[1])
                self._write(MEMORY.pack(MEMORY_BYTE, self._memory.size))
        self._loop.call_soon_threadsafe(self._guard(self._read_socket))  # others first

    def _read_requests(self) -> None:
        """Handle what comes through the pipe: the preambles of requests whose rows are in memory."""
        for _ in range(self._max_in_flight):
            try:
                data = os.read(self._requests, PREAMBLE_BYTES)
            except BlockingIOError:
                return
            if not data:
                if self._stage == LINGERING:
                    self._end()
                    return
                self._loop.unregister(self._requests)  # END comes by another way, and may be behind
                self._loop.call_later(LINGER_MILLISECONDS / 1000, partial(self._broke, EOFError()))
                return
            if self._stage == LINGERING:
                continue
            self._session.answer(self._incoming(data))
            if self._stage == ENDED:
                return
            if self._session.in_flight >= self._max_in_flight:
                self._reading = False
                self._loop.modify(self._requests, 0)
                return

    def _finish(self) -> None:
        if not self._session.in_flight:
            self._say_end()

    def _say_end(self) -> None:
        """Send END, and wait until the tenant has heard it, which closes its pipe."""
        if self._stage >= CLOSING:
            return
        self._advance(LINGERING)
        try:
            self._write(END)
        except OSError:
            pass  # the peer may be gone
        self._loop.call_later(LINGER_MILLISECONDS / 1000, self._end)

    def _refused(self, error: WireError) -> None:
        self._say_end()

    def _release(self) -> None:
        for descriptor in (self._socket_fd, self._requests):
            self._loop.unregister(descriptor)
        self._resources.close()

    def _incoming(self, data: bytes) -> Incoming:
        if len(data) < PREAMBLE_BYTES:
            raise WireError("header", f"message of {len(data)} bytes is shorter than its header", fatal=True)
        message = check_header(data, self._session.accept, len(data) - PREAMBLE_BYTES, elsewhere=_ROWS)
        if message.error is not None:
            return message
        header = message.header
        at, self._answer_offsets[header.request_id] = OFFSETS.unpack_from(data, HEADER_BYTES)
        if header.operation not in _ROWS:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)[PREAMBLE_BYTES:]
            message.payload = payload.view(header.payload_shape)
            return message
        try:
            message.payload = self._memory.mapped.tensor(at, header.payload_dtype, header.payload_shape)
        except WireError as error:
            message.error = error.with_traceback(None)  # which would keep the message
            return message
        if self._copies:  # the tenant uses its memory again before they are written down
            message.payload = message.payload.clone()
        return message

    def _make_pipes(self, resources: ExitStack) -> list[int]:
        ends = []
        for kind, flags in ((REQUESTS, os.O_RDONLY), (ANSWERS, os.O_RDWR)):
            path = f"{self._path}{kind}"
            os.mkfifo(path, 0o600)
            ends.append(os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC))
            resources.callback(os.close, ends[-1])
        # A pipe has an end only once somebody has written: now a tenant that never opens it has ended, too.
        os.close(os.open(f"{self._path}{REQUESTS}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        return ends

    def _remove_files(self) -> None:
        for kind in ("", REQUESTS, ANSWERS):
            Path(f"{self._path}{kind}").unlink(missing_ok=True)

    def _send(self, header: Header, tensors: list[torch.Tensor] | bytes, on_sent: Callable[[], None]) -> None:
        on_sent()
        at = self._answer_offsets.pop(header.request_id, 0)
        if self._stage >= CLOSING:
            return
        try:
            if isinstance(tensors, bytes):
                self._write(header.pack() + tensors)
            else:
                self._memory.mapped.write(at, tensors)
                os.write(self._answers, header.pack())  # whole or, if the tenant does not read, not at all
        except OSError as error:
            self._broke(error)
            return
        if self._stage == DRAINING:
            self._finish()
        elif self._session.in_flight == self._max_in_flight - 1:
            self._loop.call_soon_threadsafe(self._guard(self._read_socket))
            if not self._reading and self._hello_received:
                self._reading = True
                self._loop.modify(self._requests, READ)

    def _write(self, data: bytes) -> None:
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it has gone, or has twice as much in flight as it may, unread
            raise BrokenPipeError(str(error)) from error
        # Sending takes what the socket's descriptor would report.
        self._loop.call_soon_threadsafe(self._guard(self._read_socket))


class ColocatedServer:
    """Lets tenants of this machine in, beside or without a TLS port.

    Args:
        service: the executor's.
        tokens: as for every tenant.
        directory: absolute; made if it is not there, with mode 700.
        connections: the server's own, so that all transports share one limit.
        memory_bytes: of shared memory, for all sessions together.
        tenant_memory_bytes: of shared memory, for the sessions of one tenant.

    Raises:
        ConfigurationError: the directory is open to others, or another executor is in it.
    """

    def __init__(
        self,
        service: Service,
        *,
        tokens: TokenFile,
        directory: str | Path,
        connections: Connections,
        memory_bytes: int = 2 << 30,
        tenant_memory_bytes: int = 512 << 20,
    ) -> None:
        self.url = f"{SCHEME}{directory}"
        self._service, self._tokens, self._connections = service, tokens, connections
        self._directory = directory_of(self.url)
        self._budget = MemoryBudget(memory_bytes, tenant_memory_bytes)
        self._locked = _claim(self._directory)
        self._listener: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._listener.set(zmq.LINGER, LINGER_MILLISECONDS)
        self._listener.set(zmq.MAXMSGSIZE, 4096)
        try:
            self._listener.bind(f"{SCHEME}{self._directory / LISTENER}")
        except zmq.ZMQError as error:
            self._listener.close()
            os.close(self._locked)
            raise ConfigurationError(f"cannot listen in {directory}: {error.strerror}") from error
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._open_sessions, name="colocated", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more; open sessions go on, until ``Connections.drain``."""
        self._wake.close()
        self._thread.join(LINGER_MILLISECONDS / 1000 * 10)

    def _open_sessions(self) -> None:
        poll = zmq.Poller()
        poll.register(self._listener, zmq.POLLIN)
        poll.register(self._woken.fileno(), zmq.POLLIN)
        while self._woken.fileno() not in dict(poll.poll()):
            try:
                who, *parts = self._listener.recv_multipart(zmq.NOBLOCK)
                self._listener.send_multipart([who, *self._answer(parts)], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                log.info("a tenant of this machine left early: %s", error)
        self._woken.close()
        self._listener.close()
        (self._directory / LISTENER).unlink(missing_ok=True)
        os.close(self._locked)

    def _answer(self, parts: list[bytes]) -> list[bytes]:
        connections = self._connections
        try:
            check_version(part.decode(errors="replace") for part in parts[:1])
            token = parts[1].decode(errors="surrogateescape") if len(parts) == 2 else None
            with ExitStack() as reservation:
                connections.reserve()
                reservation.callback(connections.release)
                identity = connections.admit(token, self._tokens, reservation)
                connection = ColocatedConnection(self._directory, identity, self._service, self._budget)
                opened = connection.opened()  # before it may end
                connections.loop.call_soon_threadsafe(partial(connections.start, connection))
                reservation.pop_all()
            return [OPENED, encode(opened)]
        except Exception as error:
            refused = refusal(error)
            connections.refused(refused, PEER)
            return [REFUSED, encode(refused.info)]


def _claim(directory: Path) -> int:
    """Make the directory if need be. Returns an open descriptor that keeps other executors out of it."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        doubt = why_not_private(directory)
        if doubt:
            raise ConfigurationError(
                f"{doubt}; tenants hand in their tokens there, so name one that is yours alone (mode 700) or "
                "one that is still to be made"
            )
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigurationError(f"cannot use {directory}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in directory.glob("session-*"):  # by an executor that was killed
            if left.is_socket() or left.is_fifo():
                left.unlink(missing_ok=True)
    except OSError as error:
        os.close(descriptor)
        raise ConfigurationError(f"another executor is at work in {directory}: {error.strerror}") from error
    return descriptor
