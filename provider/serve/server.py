"""Listens, lets tenants in, and drains at the end."""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from provider.serve.admission import Identity, Refused, refusal
from provider.serve.certificates import own_certificate
from provider.serve.connection import DEFAULT_LIMITS, REMIND_SECONDS, ConnectionLimits, Connections
from provider.serve.descriptors import ReserveDescriptor, explained, none_left
from provider.serve.handshake import HANDSHAKE_ERRORS, handshake, refusal_of
from provider.serve.listening import bound, listen
from provider.serve.tokens import TokenFile
from provider.serve.websocket_connection import OpenSession, WebsocketConnection
from provider.session.tenant import Service
from shared.atomic import write_atomically
from shared.errors import ConfigurationError
from shared.hosts import in_url
from shared.log_rate_limit import LogRateLimiter

log = logging.getLogger(__name__)


def key_exchange_groups(openssl: tuple[int, ...]) -> str:
    """Returns the groups of Mozilla's "modern" profile: post-quantum first, where OpenSSL may have it."""
    return ("?X25519MLKEM768:" if openssl >= (3, 5) else "") + "X25519:P-256:P-384"


def server_context(tls_dir: str | Path, client_ca: str | Path | None = None) -> ssl.SSLContext:
    """Returns a context for TLS 1.3 alone, with ``server.pem`` and ``server.key`` of the folder.

    Args:
        client_ca: if given, tenants must also show a certificate that this authority signed.

    Raises:
        ConfigurationError: a file is missing or does not fit.
    """
    context = own_certificate(tls_dir, client_ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if hasattr(context, "set_groups"):  # Python 3.15; before that, there is no way to name more than one
        context.set_groups(key_exchange_groups(ssl.OPENSSL_VERSION_INFO))
    return context


class Acceptor:
    """Lets tenants in at a listening socket: TLS and the websocket handshake, in a thread for each.

    Args:
        listener: this accepts from it.
        connections: counts and ends them.
        open_session, max_message_bytes, max_in_flight: see ``WebsocketConnection``.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        context: ssl.SSLContext,
        tokens: TokenFile,
        connections: Connections,
        open_session: OpenSession,
        max_message_bytes: int,
        max_in_flight: int,
    ) -> None:
        self._listener, self._context = listener, context
        self._tokens, self._connections = tokens, connections
        self._open_session = open_session
        self._max_message_bytes, self._max_in_flight = max_message_bytes, max_in_flight
        self._reserve = ReserveDescriptor()
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def _accept(self) -> None:
        reminder = LogRateLimiter(REMIND_SECONDS)
        while True:
            try:
                raw, address = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EBADF):  # nobody listens any more
                    break
                if reminder.due(time.monotonic()):
                    log.error("cannot accept connections: %s", explained(error))
                if not (none_left(error) and self._reserve.release()):
                    threading.Event().wait(0.1)  # give some time to close
                    self._reserve.acquire()
                continue
            try:
                self._connections.reserve()
            except Refused as error:
                raw.close()
                self._connections.refused(error, address[0])
            else:
                try:
                    threading.Thread(
                        target=self._let_in, args=(raw, address[0]), name="handshake", daemon=True
                    ).start()
                except RuntimeError:  # this connection is one too many
                    raw.close()
                    self._connections.refused(Refused("full", why="no more threads to be had"), address[0])
                    self._connections.release()
            self._reserve.acquire()
        self._reserve.release()

    def _let_in(self, raw: socket.socket, peer: str) -> None:
        connections = self._connections
        try:
            with ExitStack() as reservation, raw:
                reservation.callback(connections.release)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
                sock, identity = handshake(raw, self._context, partial(self._admit, reservation))
                connection = WebsocketConnection(
                    sock, identity, peer, self._open_session, self._max_message_bytes, self._max_in_flight
                )
                connections.loop.call_soon_threadsafe(partial(connections.start, connection))
                reservation.pop_all()
        except HANDSHAKE_ERRORS as error:
            connections.refused(refusal_of(error), peer)
        except Exception as error:
            connections.refused(refusal(error), peer)

    def _admit(self, reservation: ExitStack, token: str | None) -> Identity:
        identity = self._connections.admit(token, self._tokens, reservation)
        if not self._reserve.acquire():  # a session with the last one would leave none to refuse others with
            raise refusal(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        return identity


class Server:
    """A base executor behind a TLS port.

    Args:
        listener: already ``bound`` to host and port; default: this binds one.
        limits: the limits of its connections.
    """

    def __init__(
        self,
        service: Service,
        *,
        context: ssl.SSLContext,
        tokens: TokenFile,
        host: str = "127.0.0.1",
        port: int = 8765,
        listener: socket.socket | None = None,
        limits: ConnectionLimits = DEFAULT_LIMITS,
    ) -> None:
        self.service, self.tokens = service, tokens
        self.connections = Connections(service.metrics, service.engine.loop, limits)
        self.listener = listen(listener or bound(host, port))
        self.host, self.port = host, self.listener.getsockname()[1]
        of_messages = service.executor.manifest.limits
        Acceptor(
            self.listener,
            context=context,
            tokens=tokens,
            connections=self.connections,
            open_session=service.open,
            max_message_bytes=of_messages.max_message_bytes,
            max_in_flight=of_messages.max_in_flight,
        )

    @property
    def url(self) -> str:
        """Where tenants connect."""
        return f"wss://{in_url(self.host)}:{self.port}"

    def write_ready_file(self, path: str | Path, **more: str) -> None:
        """Tell a supervisor, in one rename, that the port is open; ``more`` goes into the file too."""
        path = Path(path)
        try:
            ready = msgspec.json.encode({"url": self.url, "pid": os.getpid(), **more})
            write_atomically(path, ready, 0o644)
        except OSError as error:
            raise ConfigurationError(f"cannot write the ready file {path}: {error.strerror}") from error

    def stop_listening(self) -> None:
        """Accept nobody any more; who is in the handshake still gets a session."""
        try:
            # Closing alone would not wake those who wait in accept().
            self.listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.listener.close()

    def drain(self, seconds: float = 10.0) -> bool:
        """Stop accepting, and drain every session. Returns whether all ended in time."""
        self.stop_listening()
        return self.connections.drain(seconds)

    @property
    def draining(self) -> bool:
        """Whether the server has begun to drain."""
        return self.connections.draining
