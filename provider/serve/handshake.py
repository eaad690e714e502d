"""The beginning of a connection: TLS and the websocket handshake, in a thread of its own."""

from __future__ import annotations

import io
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable

from websockets.exceptions import InvalidHandshake, InvalidMessage
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from provider.serve.admission import Identity, Refused, check_version
from provider.serve.tls_socket import BoundedTlsSocket
from shared.wire.header import SUBPROTOCOL
from shared.wire.messages import encode

_quiet = logging.getLogger("symbiosis.websockets")
_quiet.setLevel(logging.ERROR)

HANDSHAKE_SECONDS = 10.0
HANDSHAKE_BYTES = 16 * 1024  # of HTTP
LINGER_SECONDS = 1.0  # for a refused peer to read why
Admit = Callable[[str | None], Identity]
"""Returns whom a token lets in; None: there is no token. Raises ``Refused``."""


def handshake(raw: socket.socket, context: ssl.SSLContext, admit: Admit) -> tuple[BoundedTlsSocket, Identity]:
    """Do the TLS handshake, then the websocket's with its bearer token.

    Returns:
        The encrypted socket, and who is there.

    Raises:
        HANDSHAKE_ERRORS: no session. The peer was notified, with the reason as far as it may know.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    sock = BoundedTlsSocket(raw, context)
    try:
        sock.do_handshake(deadline)
        return sock, _upgrade(sock, admit, deadline)
    except BaseException:
        sock.close()
        raise


def _upgrade(sock: BoundedTlsSocket, admit: Admit, deadline: float) -> Identity:
    protocol = ServerProtocol(subprotocols=[SUBPROTOCOL], max_size=1, logger=_quiet)  # type: ignore[list-item]
    request: Request | None = None
    remaining = HANDSHAKE_BYTES
    while request is None:
        _until(deadline, sock)
        received = sock.recv(4096)
        remaining -= len(received)
        if not received:
            raise Refused("closed")
        if remaining < 0:  # the library would hold a megabyte for anyone
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
    response, result = _answer(protocol, request, admit, early)
    protocol.send_response(response)
    for piece in protocol.data_to_send():
        if piece:
            sock.sendall(piece)
    if isinstance(result, Refused):
        linger(sock, deadline)
        raise result
    return result


def _until(deadline: float, sock: BoundedTlsSocket) -> None:
    """Let the socket wait until the deadline: bytes that come one by one must not stretch it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def _readable(sock: BoundedTlsSocket) -> bool:
    """Takes a byte, if one has arrived. Returns whether one has."""
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


def _answer(
    protocol: ServerProtocol, request: Request, admit: Admit, early: bool
) -> tuple[Response, Identity | Refused]:
    offered = request.headers.get_all("Sec-WebSocket-Protocol")
    credentials = request.headers.get_all("Authorization")
    scheme, _, token = (credentials[0] if len(credentials) == 1 else "").partition(" ")
    try:
        check_version(name.strip() for value in offered for name in value.split(","))
        identity = admit(token.strip() if scheme.lower() == "bearer" else None)
        if early:
            raise Refused("unexpected", "bytes behind the request; wait for its answer before you send more")
    except Refused as error:
        status = _STATUS.get(error.info.code, 400)
        return protocol.reject(status, encode(error.info).decode()), error
    response = protocol.accept(request)
    return response, identity if response.status_code == 101 else Refused("http")


def refusal_of(error: Exception) -> Refused:
    """Returns the refusal for one of ``HANDSHAKE_ERRORS``."""
    if isinstance(error, Refused):
        return error
    name = error.reason if isinstance(error, ssl.SSLError) else ""  # OpenSSL's own
    return Refused("slow" if isinstance(error, TimeoutError) else "tls", why=name or type(error).__name__)


_STATUS = {"unauthorized": 401, "overloaded": 503, "internal": 503}
HANDSHAKE_ERRORS = (Refused, OSError, InvalidHandshake, InvalidMessage, EOFError)
