"""Opens a session of the co-located transport (``shared/PROTOCOL.md``)."""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq

from shared.errors import ConnectError, ConnectionRefused, WireError
from shared.transport import SCHEME
from shared.transport.colocated import (
    ANSWERS,
    LISTENER,
    OPENED,
    REQUESTS,
    Opened,
    SharedMemory,
    directory_of,
    why_not_private,
)
from shared.transport.refusal import session_refused
from shared.wire.header import HEADER_BYTES, SUBPROTOCOL
from shared.wire.messages import ErrorInfo, decode
from shared.wire.protocol import MAX_ANSWER_CONTROL_BYTES

LINGER_MILLISECONDS = 1000
COLOCATED_RETRY_SECONDS = 1.0


@dataclass
class SharedMemoryLink:
    """An open session as its tenant has it: socket, pipes and memory."""

    opened: Opened  # what the executor said
    sock: zmq.Socket[bytes]  # connected
    requests: int  # descriptor of the pipe for headers of tensors; does not block
    answers: int  # of that for headers of answers
    descriptor: int  # of the memory
    memory: SharedMemory
    _open: bool = True

    def grow(self, size: int) -> bool:
        """Map the memory anew, which has so many bytes, as the executor says; False: no more than before.

        Raises:
            WireError: ``unexpected``, fatal: it has not.
        """
        if not self.memory.size < size <= self.opened.max_size:
            return False
        if os.fstat(self.descriptor).st_size < size:
            raise WireError("unexpected", "the executor claims memory that is not there", fatal=True)
        self.memory = SharedMemory(self.descriptor, size)
        return True

    def abandon(self) -> None:
        """In a forked child: let go of all but ZeroMQ's socket, which the parent's threads would close."""
        if self._open:
            self._open = False
            self.sock._shadow = True  # or ZeroMQ's binding closes it at the end, if the process ids are equal
            self.memory.close()
            for each in (self.requests, self.answers, self.descriptor):
                os.close(each)

    def close(self) -> None:
        """Let go of everything, once: the descriptors' numbers will be others'."""
        if self._open:
            self._open = False
            self.sock.close()
            self.memory.close()
            for each in (self.requests, self.answers, self.descriptor):
                os.close(each)


def open_link(url: str, token: str, timeout: float) -> SharedMemoryLink:
    """Open a session with an executor on this machine.

    Args:
        url: ``ipc://`` and the absolute path of its directory.
        token: as the provider printed it.
        timeout: seconds that this may take.

    Raises:
        ConfigurationError: the URL is none.
        ConnectError, AuthenticationError, ProtocolVersionError: no session, with the reason.
    """
    directory = directory_of(url)
    try:
        doubt = why_not_private(directory)
    except OSError as error:
        raise ConnectionRefused(
            f"cannot connect to {url}: {error.strerror}; is the executor running with `--local-dir`?"
        ) from error
    if doubt:
        raise ConnectError(f"{url} is not trusted: {doubt}; the executor must run as the same user")
    try:
        opened = _request_session(directory, url, token, timeout)
        opened.check()
        descriptor = _open_memory(opened)
    except (WireError, OSError) as error:
        raise ConnectError(f"{url} does not answer as an executor does: {error}") from error
    sock, pipes = _socket(zmq.PAIR), []
    try:
        for kind, flag in ((REQUESTS, os.O_WRONLY), (ANSWERS, os.O_RDONLY)):
            pipes.append(os.open(f"{directory / opened.session}{kind}", flag | os.O_NONBLOCK | os.O_CLOEXEC))
        sock.set(zmq.MAXMSGSIZE, HEADER_BYTES + MAX_ANSWER_CONTROL_BYTES)
        # A session that broke has ended; but -1, which says so, throws away what has arrived.
        sock.set(zmq.RECONNECT_IVL, 3_600_000)
        sock.connect(f"{SCHEME}{directory / opened.session}")
        return SharedMemoryLink(
            opened, sock, pipes[0], pipes[1], descriptor, SharedMemory(descriptor, opened.size)
        )
    except BaseException as error:
        sock.close()
        for each in (*pipes, descriptor):
            os.close(each)
        if isinstance(error, OSError):
            raise ConnectError(
                f"{url} is unavailable: {error.strerror}", retry_after=COLOCATED_RETRY_SECONDS
            ) from error
        raise


def _socket(kind: int) -> zmq.Socket[bytes]:
    sock: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    sock.set(zmq.LINGER, LINGER_MILLISECONDS)
    return sock


def _request_session(directory: Path, url: str, token: str, timeout: float) -> Opened:
    """Show the token to the executor's listening socket."""
    sock = _socket(zmq.DEALER)
    events = sock.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED)
    try:
        sock.set(zmq.LINGER, 0)  # nobody else shall get it
        sock.connect(f"{SCHEME}{directory / LISTENER}")
        sock.send_multipart([SUBPROTOCOL.encode(), token.encode()])
        poll = zmq.Poller()
        poll.register(sock, zmq.POLLIN)
        poll.register(events, zmq.POLLIN)
        ready = dict(poll.poll(round(timeout * 1000)))
        if not ready:
            raise ConnectError(f"{url} did not answer within {timeout:.0f} s")
        if sock not in ready:
            raise ConnectionRefused(f"cannot connect to {url}: nobody listens; is the executor running?")
        kind, body = [*sock.recv_multipart(), b""][:2]
    finally:
        sock.disable_monitor()
        events.close()
        sock.close()
    if kind == OPENED:
        return decode(body, Opened)
    raise session_refused(url, decode(body, ErrorInfo))


def _open_memory(opened: Opened) -> int:
    """A descriptor of the session's memory, by way of the executor's own.

    Raises:
        OSError: it cannot be opened, or is not what it should be.
    """
    path = f"/proc/{opened.pid}/fd/{opened.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise OSError(
            f"its memory cannot be opened ({path}: {error.strerror}); executor and tenant must see each "
            "other's processes, so run both in one container or none"
        ) from error
    try:
        status = os.fstat(descriptor)
        # Looked at once it is open: what a path leads to may change.
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if not (
            name == f"/memfd:{opened.memory} (deleted)"
            and stat.S_ISREG(status.st_mode)
            and stat.S_IMODE(status.st_mode) == 0o600
            and status.st_uid == os.geteuid()
            and status.st_size >= opened.size
            and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        ):
            raise OSError("what it calls its memory is something else")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
