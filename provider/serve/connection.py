"""One tenant's connection: TLS and websocket handshake, then requests until it ends.

A thread each, with blocking sockets. Python releases its lock inside TLS, socket and product
calls, and a thread that waits for its own socket needs no hand-over to answer: a round trip takes
half of what it takes through an event loop (``docs/performance.md``).
"""

from __future__ import annotations

import io
import logging
import math
import select
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import torch
from websockets.exceptions import InvalidHandshake, InvalidMessage
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from provider.serve.descriptors import explained, none_left
from provider.serve.tokens import TokenFile
from provider.session.answering import Send, Session
from shared.errors import ConfigurationError, WireError
from shared.wire.header import SUBPROTOCOL, Header
from shared.wire.messages import ErrorInfo, encode
from shared.wire.websocket import Incoming, MessageReader, Opcode, encode_control, encode_message

log = logging.getLogger(__name__)
_quiet = logging.getLogger("symbiosis.websockets")
_quiet.setLevel(logging.ERROR)

HANDSHAKE_SECONDS = 10.0
HANDSHAKE_BYTES = 16 * 1024  # of HTTP
LINGER_SECONDS = 1.0  # for a refused peer to read why
RETRY_SECONDS = 5.0  # after which there may be room
NO_ROOM = "the executor has no room for another session; try again later"
STALL_SECONDS = 60.0  # without a byte in the middle of a message, or unable to write one


class Refused(Exception):
    """The handshake ended with an HTTP error; ``reason`` is a metric label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TurnedAway(Exception):
    """No session for whom the handshake let in: there are too many. The message is for the peer."""


class Bearer(NamedTuple):
    """Whom the handshake let in."""

    tenant: str
    token: str  # which it showed


OpenSession = Callable[["Bearer", "Send", Callable[[], bool]], "Session"]


def handshake(raw: socket.socket, context: ssl.SSLContext, tokens: TokenFile) -> tuple[ssl.SSLSocket, Bearer]:
    """TLS, then the websocket opening handshake with its bearer token.

    Returns:
        The encrypted socket and whose it is.

    Raises:
        Refused, OSError: no session. The peer was told why as far as it may know.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    raw.settimeout(HANDSHAKE_SECONDS)
    raw.getpeername()  # fails if the peer has gone; ssl would take that for a socket yet to be connected
    sock = context.wrap_socket(raw, server_side=True)
    try:
        return sock, _upgrade(sock, tokens, deadline)
    except BaseException:
        sock.close()  # wrap_socket took it from the caller's
        raise


def _upgrade(sock: ssl.SSLSocket, tokens: TokenFile, deadline: float) -> Bearer:
    protocol = ServerProtocol(subprotocols=[SUBPROTOCOL], max_size=1, logger=_quiet)  # type: ignore[list-item]
    request: Request | None = None
    room = HANDSHAKE_BYTES
    while request is None:
        _until(deadline, sock)
        received = sock.recv(4096)
        room -= len(received)
        if not received:
            raise Refused("closed")
        if room < 0:  # the library would hold a megabyte for anyone
            raise Refused("http")
        data = io.BytesIO(received)
        for line in data:  # the library would take what follows the request's last line for frames
            protocol.receive_data(line)
            events = protocol.events_received()
            request = next((e for e in events if isinstance(e, Request)), None)
            if protocol.handshake_exc is not None:
                raise Refused("http")
            if request is not None:
                break
    early = bool(data.read()) or _readable(sock)
    _until(deadline, sock)
    bearer, response, reason = _admit(protocol, request, tokens, early)
    protocol.send_response(response)
    for piece in protocol.data_to_send():
        if piece:
            sock.sendall(piece)
    if bearer is None:
        _linger(sock, deadline)
        raise Refused(reason)
    return bearer


def _until(deadline: float, sock: ssl.SSLSocket) -> None:
    """Let the socket wait that long: bytes that come one by one must not stretch it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def _readable(sock: ssl.SSLSocket) -> bool:
    """Whether a byte has arrived, which it takes."""
    sock.setblocking(False)
    try:
        return bool(sock.recv(1))
    except ssl.SSLWantReadError:
        return False


def _linger(sock: ssl.SSLSocket, deadline: float = math.inf) -> None:
    """Wait a little for the peer to end: closing a socket with unread bytes would destroy the answer."""
    deadline = min(deadline, time.monotonic() + LINGER_SECONDS)
    try:
        sock.shutdown(socket.SHUT_WR)
        while True:
            _until(deadline, sock)
            if not sock.recv(1 << 16):
                return
    except OSError:
        pass  # it stays, or has gone


def _admit(
    protocol: ServerProtocol, request: Request, tokens: TokenFile, early: bool
) -> tuple[Bearer | None, Response, str]:
    def refuse(
        status: int, code: str, message: str, retry_after: float | None = None
    ) -> tuple[None, Response, str]:
        return None, protocol.reject(status, encode(ErrorInfo(code, message, retry_after)).decode()), code

    offered = request.headers.get_all("Sec-WebSocket-Protocol")
    if SUBPROTOCOL not in [name.strip() for value in offered for name in value.split(",")]:
        return refuse(
            400, "protocol_version", f"this executor speaks {SUBPROTOCOL}; install a matching version"
        )
    credentials = request.headers.get_all("Authorization")
    scheme, _, token = (credentials[0] if len(credentials) == 1 else "").partition(" ")
    token = token.strip()
    try:
        tenant = tokens.tenant_of(token) if scheme.lower() == "bearer" else None
    except ConfigurationError as error:
        log.error("cannot check tokens: %s", explained(error))
        if none_left(error):
            return refuse(503, "overloaded", NO_ROOM, RETRY_SECONDS)
        return refuse(503, "internal", "the executor cannot check tokens; report it to the provider")
    if tenant is None:
        return refuse(
            401, "unauthorized", "missing or unknown bearer token; ask the provider for a token of yours"
        )
    if early:
        return refuse(400, "unexpected", "bytes behind the request; wait for its answer before you send more")
    response = protocol.accept(request)
    if response.status_code != 101:
        return None, response, "http"
    return Bearer(tenant, token), response, ""


class Connection:
    """Serves one session after its handshake.

    Args:
        sock: encrypted and authenticated; this closes it.
        bearer: who it is.
        open_session: makes its session of ``bearer``, what sends an answer, and what tells whether the
            next request has arrived.
        max_message_bytes: of a payload.

    Raises:
        TurnedAway, OSError: ``open_session`` did, or something is short; the tenant has been told.
    """

    def __init__(
        self, sock: ssl.SSLSocket, bearer: Bearer, open_session: OpenSession, max_message_bytes: int
    ) -> None:
        self._sock = sock
        self.tenant = bearer.tenant
        try:
            with ExitStack() as made:
                # To wake the thread when it waits for its tenant. Shutting the socket would wake it too, but
                # TLS takes an end without notice for an attack, and nothing more could be sent.
                self._wake, self._woken = map(made.enter_context, socket.socketpair())
                self._session = open_session(bearer, self._send, self._something_to_do)
                made.pop_all()
        except (TurnedAway, OSError) as error:
            with sock:
                sock.settimeout(1.0)
                self._close(1013, str(error) if isinstance(error, TurnedAway) else NO_ROOM)  # try again later
                _linger(sock)
            raise
        except BaseException:
            sock.close()
            raise
        self._reader = MessageReader(
            self._session.accept,
            masked=True,
            max_message_bytes=max_message_bytes,
            allocate=self._session.allocate,
        )
        self._closing = False
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)

    def drain(self) -> None:
        """From another thread: answer what has arrived, then close."""
        self._closing = True
        try:
            self._wake.send(b"x")
        except OSError:
            pass  # it has ended already

    def serve(self) -> None:
        """Answer requests until the tenant leaves, breaks the protocol or stalls."""
        self._sock.settimeout(STALL_SECONDS)
        try:
            while self._serve_once():
                pass
            self._close(1001 if self._closing else 1000, "")
        except WireError as error:
            log.warning("tenant %s broke the protocol: %s", self.tenant, error)
            self._last_word(error)
            self._close(1009 if error.code == "too_large" else 1002, error.code)
        except (OSError, EOFError) as error:
            log.info("tenant %s: connection ended: %s", self.tenant, type(error).__name__)
        finally:
            self._session.close()
            for each in (self._sock, self._wake, self._woken):
                each.close()

    def _serve_once(self) -> bool:
        """Receive once and handle what is complete; False when the connection ends well."""
        idle = not self._reader.mid_message and not self._sock.pending()
        # An idle tenant may stay; TCP keep-alive finds dead ones.
        if idle and [fd for fd, _ in self._poll.poll()] == [self._woken.fileno()]:
            return False
        try:
            count = self._sock.recv_into(self._reader.get_buffer())
        except TimeoutError:
            if self._reader.mid_message:
                raise
            return True  # part of a TLS record, or none of it for the application
        if count == 0:
            return False
        for event in self._reader.received(count):
            if isinstance(event, Incoming):
                self._session.answer(event)
            elif event.opcode == Opcode.PING:
                self._sock.sendall(encode_control(Opcode.PONG, event.data))
            elif event.opcode == Opcode.CLOSE:
                return False
        return True

    def _something_to_do(self) -> bool:
        return bool(self._sock.pending() or self._poll.poll(0))

    def _last_word(self, error: WireError) -> None:
        try:
            self._session.refuse(0, error)
        except OSError:
            pass  # the peer may be gone

    def _send(self, header: Header, blocks: list[torch.Tensor] | bytes) -> None:
        for piece in encode_message(header, blocks):
            self._sock.sendall(piece)

    def _close(self, code: int, reason: str) -> None:
        try:
            self._sock.sendall(encode_control(Opcode.CLOSE, code.to_bytes(2, "big") + reason.encode()))
            self._sock.settimeout(1.0)
            self._sock.unwrap()  # TLS close_notify, so that the tenant sees an end, not a cut
        except (OSError, ValueError):
            pass  # the peer may be gone


HANDSHAKE_ERRORS = (Refused, OSError, InvalidHandshake, InvalidMessage, EOFError)
