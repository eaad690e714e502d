"""The beginning of a connection: TLS and the websocket handshake, in a thread of its own."""

from __future__ import annotations

import io
import logging
import math
import socket
import ssl
import time
from typing import NamedTuple

from websockets.exceptions import InvalidHandshake, InvalidMessage
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from provider.observe.metrics import Reason
from provider.serve.descriptors import explained, none_left
from provider.serve.tls_socket import BoundedTlsSocket
from provider.serve.tokens import ExpiredToken, TokenFile, sha256_of
from shared.errors import ConfigurationError
from shared.wire.header import SUBPROTOCOL
from shared.wire.messages import ErrorInfo, encode

log = logging.getLogger(__name__)
_quiet = logging.getLogger("symbiosis.websockets")
_quiet.setLevel(logging.ERROR)

HANDSHAKE_SECONDS = 10.0
HANDSHAKE_BYTES = 16 * 1024  # of HTTP
LINGER_SECONDS = 1.0  # for a refused peer to read why
RETRY_SECONDS = 5.0  # after which there may be room
NO_ROOM = "the executor has no room for another session; try again later"


class HandshakeRefused(Exception):
    """The handshake ended with an HTTP error, or before it; ``tenant``: whose it was, if that is known."""

    def __init__(self, reason: Reason, tenant: str = "") -> None:
        super().__init__(reason)
        self.reason, self.tenant = reason, tenant


class Admitted(NamedTuple):
    """Whom a token let in; ``token`` is its SHA-256."""

    tenant: str
    token: str


class TooManyConnections(Exception):
    """No session for a tenant whose handshake succeeded. The message is for the peer."""


def handshake(
    raw: socket.socket, context: ssl.SSLContext, tokens: TokenFile
) -> tuple[BoundedTlsSocket, Admitted]:
    """TLS, then the websocket opening handshake with its bearer token.

    Returns:
        The encrypted socket, and who is there.

    Raises:
        HandshakeRefused, OSError: no session. The peer was told why as far as it may know.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    sock = BoundedTlsSocket(raw, context)
    try:
        sock.do_handshake(deadline)
        return sock, _upgrade(sock, tokens, deadline)
    except BaseException:
        sock.close()
        raise


def _upgrade(sock: BoundedTlsSocket, tokens: TokenFile, deadline: float) -> Admitted:
    protocol = ServerProtocol(subprotocols=[SUBPROTOCOL], max_size=1, logger=_quiet)  # type: ignore[list-item]
    request: Request | None = None
    remaining = HANDSHAKE_BYTES
    while request is None:
        _until(deadline, sock)
        received = sock.recv(4096)
        remaining -= len(received)
        if not received:
            raise HandshakeRefused("closed")
        if remaining < 0:  # the library would hold a megabyte for anyone
            raise HandshakeRefused("http")
        data = io.BytesIO(received)
        for line in data:  # the library would take what follows the request's last line for frames
            protocol.receive_data(line)
            events = protocol.events_received()
            request = next((e for e in events if isinstance(e, Request)), None)
            if protocol.handshake_exc is not None:
                raise HandshakeRefused("http")
            if request is not None:
                break
    early = bool(data.read()) or _readable(sock)
    _until(deadline, sock)
    admitted, response, refused = _admit(protocol, request, tokens, early)
    protocol.send_response(response)
    for piece in protocol.data_to_send():
        if piece:
            sock.sendall(piece)
    if admitted is None:
        linger(sock, deadline)
        raise refused
    return admitted


def _until(deadline: float, sock: BoundedTlsSocket) -> None:
    """Let the socket wait that long: bytes that come one by one must not stretch it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def _readable(sock: BoundedTlsSocket) -> bool:
    """Whether a byte has arrived, which it takes."""
    sock.setblocking(False)
    try:
        return bool(sock.recv(1))
    except ssl.SSLWantReadError:
        return False


def linger(sock: BoundedTlsSocket, deadline: float = math.inf) -> None:
    """Wait a little for a refused peer to end: closing with unread bytes would destroy the answer."""
    deadline = min(deadline, time.monotonic() + LINGER_SECONDS)
    try:
        sock.shutdown(socket.SHUT_WR)
        while True:
            _until(deadline, sock)
            if not sock.discard():
                return
    except OSError:
        pass  # it stays, or has gone


def _admit(
    protocol: ServerProtocol, request: Request, tokens: TokenFile, early: bool
) -> tuple[Admitted | None, Response, HandshakeRefused]:
    def refuse(
        status: int, code: Reason, message: str, retry_after: float | None = None
    ) -> tuple[None, Response, HandshakeRefused]:
        said = encode(ErrorInfo(code, message, retry_after)).decode()
        return None, protocol.reject(status, said), HandshakeRefused(code)

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
    except ExpiredToken as error:
        _, response, _ = refuse(401, "unauthorized", error.message)
        return None, response, HandshakeRefused("expired", error.tenant)
    if tenant is None:
        return refuse(
            401, "unauthorized", "missing or unknown bearer token; ask the provider for a token of yours"
        )
    if early:
        return refuse(400, "unexpected", "bytes behind the request; wait for its answer before you send more")
    response = protocol.accept(request)
    good = response.status_code == 101
    return Admitted(tenant, sha256_of(token)) if good else None, response, HandshakeRefused("http")


HANDSHAKE_ERRORS = (HandshakeRefused, OSError, InvalidHandshake, InvalidMessage, EOFError)
