"""HTTP connections of the gateway's server: headers have a time and a size, and connections a number."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tenant_sdk.gateway.admission import Authenticator, Refusal, UnauthenticatedConnections, shutting_down
from tenant_sdk.gateway.http_frontend import (
    BODY_BYTES,
    CLOSED,
    FLUSHED,
    OWNER,
    SMALL_BODY_BYTES,
    error_event,
)
from tenant_sdk.gateway.reservations import Reservations

HEADER_SECONDS = 10.0
HEADER_BYTES = 32 << 10
HEADERS = 64
URL_BYTES = 2048  # which are decoded before anything is known of the client, and slowly
UNREAD_SECONDS = 60.0  # until a client that does not read the rest of its answer is given up
UNREAD_BYTES = 64 << 20  # of answers that clients have not read yet, of all clients
MAX_UNAUTHENTICATED = 128  # connections that have shown no key
CONNECTIONS = 1024  # that have shown one, of all clients
ACCEPTED = 16  # connections at most in one round of the server's loop


@dataclass(frozen=True)
class ConnectionLimits:
    """What all connections of a server share.

    Args:
        authenticator: says whose a connection is.
        known: slots of connections that have shown a key.
        unauthenticated: the others.
        unread: bytes of answers that known clients have not read yet.
    """

    authenticator: Authenticator
    known: Reservations
    unauthenticated: UnauthenticatedConnections
    unread: Reservations

    @classmethod
    def at(cls, authenticator: Authenticator) -> ConnectionLimits:
        """Those that an authenticator admits."""
        known, unread = (
            Reservations.per_client_minimum(most, authenticator.clients)
            for most in (CONNECTIONS, UNREAD_BYTES)
        )
        return cls(authenticator, known, UnauthenticatedConnections(MAX_UNAUTHENTICATED), unread)

    def protocol(self) -> type[HttpToolsProtocol]:
        """What uvicorn makes for each connection."""
        return type("LimitedConnection", (_LimitedConnection,), {"shared": self})


def accept_several_at_once() -> None:
    """Before a server is run on a socket.

    libuv accepts one connection of a socket in each round of its loop. If a client opened more of them than
    there are rounds, everybody else's would wait in the system's queue, which knows no clients. Each copy of
    the socket's descriptor is a socket of its own for libuv.
    """
    startup = uvicorn.Server.startup

    async def started(server: Any, sockets: Any = None) -> None:
        copies = [each.dup() for each in sockets or () for _ in range(ACCEPTED - 1)]
        await startup(server, sockets and [*sockets, *copies])

    uvicorn.Server.startup = started


class _LimitedConnection(HttpToolsProtocol):  # type: ignore[misc]
    """One connection."""

    shared: ConnectionLimits
    _closed: asyncio.Future[None]
    _client: str | None = None
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _rest: asyncio.TimerHandle | None = None
    _bytes = 0  # of headers that are not complete
    _header_bytes = 0  # of names and values
    _held = 0  # bytes that are not read yet

    def connection_made(self, transport: Any) -> None:
        """See asyncio."""
        super().connection_made(transport)
        self._closed = self.loop.create_future()
        transport.set_write_buffer_limits(high=0)  # writing is paused until all has left
        self._expect()
        if (first := self.shared.unauthenticated.arrive(self)) is not None:
            assert isinstance(first, _LimitedConnection)  # noqa: S101 - only they arrive
            first.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._closed.set_result(None)
        self._cancel("_late")
        self._cancel("_rest")
        self.shared.unauthenticated.leave(self)
        self._read()
        if self._client is not None:
            self.shared.known.release(self._client, 1)
            self._client = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self._late is None and (self.cycle is None or not self.cycle.more_body):
            self._expect()  # the next request begins
        if self._late is not None:
            self._bytes += len(data)
        super().data_received(data)
        if self._late is not None and self._bytes > HEADER_BYTES:
            self.transport.abort()

    def on_url(self, url: bytes) -> None:
        """See httptools; it may come in parts.

        Raises:
            ValueError: it is too long, and nothing behind it is parsed.
        """
        super().on_url(url)
        if len(self.url) > URL_BYTES:
            why = f"a path, with its query, has at most {URL_BYTES} bytes"
            self._refuse(Refusal(414, "invalid_request_error", why))

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools.

        Raises:
            ValueError: there are too many, and nothing behind them is parsed.
        """
        if len(self.headers) >= HEADERS:
            self._refuse(Refusal(431, "invalid_request_error", f"a request has at most {HEADERS} headers"))
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > HEADER_BYTES:  # all came in one read
            self.transport.abort()
            raise ValueError("headers are too long")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See httptools; a request that comes before the last answer was written closes the connection.

        Thousands of them come in one read, and each would take memory. If the client hung up, uvicorn would
        notify the newest one, while the sequences of the others went on.

        Raises:
            ValueError: there is such a request, and nothing behind it is parsed.
        """
        self._cancel("_late")
        answered = self.cycle is None or self.cycle.response_complete
        if not answered or self.transport.get_write_buffer_size():
            self._refuse()
        headers = dict(self.headers)
        if b"transfer-encoding" in headers:  # pieces and trailers have no end, and each takes time
            why = "a request has Content-Length, and is not sent in pieces"
            self._refuse(Refusal(411, "invalid_request_error", why))
        if b"upgrade" in headers:  # its body would be read as the next request
            self._refuse(Refusal(400, "invalid_request_error", "a request here has no Upgrade"))
        if self._client is None:
            client = self.shared.authenticator.admit(self.headers)
            if not isinstance(client, Refusal):
                self.shared.unauthenticated.leave(self)
                if not self.shared.known.reserve(client, 1):
                    self.transport.abort()
                    return
                self._client = client
        max_bytes = SMALL_BODY_BYTES if self._client is None else BODY_BYTES
        length = headers.get(b"content-length", b"0")
        if len(length) > len(str(max_bytes)) or int(length) > max_bytes:
            self._refuse(
                Refusal(413, "invalid_request_error", f"a request here has {max_bytes} bytes at most")
            )
        self.scope["extensions"] = {FLUSHED: self.flow.drain, CLOSED: self._closed, OWNER: self._client}
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """See uvicorn."""
        self._cancel("_rest")
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        super().on_response_complete()
        if self.cycle.more_body:  # that nobody waits for
            self._rest = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        """See asyncio; what a client has not read yet lies in memory, and not for ever."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)
        if self._client is not None:
            size = self.transport.get_write_buffer_size()
            if not self.shared.unread.reserve(self._client, size):
                self.transport.abort()
                return
            self._held = size

    def resume_writing(self) -> None:
        """See asyncio; all has left."""
        super().resume_writing()
        self._read()

    def _read(self) -> None:
        self._cancel("_unread")
        if self._held and self._client is not None:
            self.shared.unread.release(self._client, self._held)
        self._held = 0

    def shutdown(self) -> None:
        """See uvicorn; it would wait for answers, and the engine that writes them has ended."""
        if self.cycle is not None and not self.cycle.response_complete:
            refusal = shutting_down()
            if not self.cycle.response_started:
                self._send_refusal(refusal)
            elif self.cycle.chunked_encoding:
                event = error_event(self.scope["path"], refusal)
                self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """See uvicorn; nothing is said on a connection that was closed just now."""
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def _expect(self) -> None:
        """Headers come from now on."""
        self._bytes = self._header_bytes = 0
        self._late = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _cancel(self, name: str) -> None:
        """A timer, if it runs."""
        timer: asyncio.TimerHandle | None = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)

    def _refuse(self, refusal: Refusal | None = None) -> None:
        """Close the connection, and have nothing more parsed of what has come.

        Raises:
            ValueError: always.
        """
        if refusal is None:
            self.transport.abort()
            raise ValueError("requests are not pipelined here")
        self._send_refusal(refusal)
        self.transport.close()
        raise ValueError(refusal.message)

    def _send_refusal(self, refusal: Refusal) -> None:
        body = refusal.encoded()
        head = [
            f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        if refusal.retry_after:
            head.append(f"Retry-After: {refusal.retry_after}")
        self.transport.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
