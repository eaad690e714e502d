"""Listens, lets tenants in, and drains at the end."""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import msgspec

from provider.observe.metrics import Reason
from provider.serve.certificates import own_certificate
from provider.serve.connection import DEFAULT_LIMITS, REMIND_SECONDS, ConnectionLimits, Connections
from provider.serve.descriptors import ReserveDescriptor, explained, none_left
from provider.serve.handshake import (
    HANDSHAKE_ERRORS,
    HandshakeRefused,
    TooManyConnections,
    handshake,
)
from provider.serve.listening import bound, listen
from provider.serve.tokens import TokenFile
from provider.serve.websocket_connection import OpenSession, WebsocketConnection
from provider.session.tenant import Send, Service, TenantSession
from shared.atomic import write_atomically
from shared.errors import ConfigurationError
from shared.log_rate_limit import LogRateLimiter

log = logging.getLogger(__name__)

FAILURES = 60  # of one kind of handshake that are logged in a minute


def key_exchange_groups(openssl: tuple[int, ...]) -> str:
    """Those of Mozilla's "modern" profile: post-quantum first, where a version of OpenSSL may have it."""
    return ("?X25519MLKEM768:" if openssl >= (3, 5) else "") + "X25519:P-256:P-384"


def server_context(tls_dir: str | Path, client_ca: str | Path | None = None) -> ssl.SSLContext:
    """TLS 1.3 only, with ``server.pem`` and ``server.key`` of the folder.

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
        self._listener, self._context, self._tokens, self._connections = (
            listener,
            context,
            tokens,
            connections,
        )
        self._open_session, self._max_message_bytes, self._max_in_flight = (
            open_session,
            max_message_bytes,
            max_in_flight,
        )
        self._reserve = ReserveDescriptor()
        self._failures = defaultdict[str, LogRateLimiter](lambda: LogRateLimiter(REMIND_SECONDS, FAILURES))
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
            if not self._connections.reserve(address[0]):
                raw.close()
            else:
                try:
                    threading.Thread(
                        target=self._let_in, args=(raw, address[0]), name="handshake", daemon=True
                    ).start()
                except RuntimeError:  # no more threads to be had: this connection is one too many
                    raw.close()
                    self._connections.turn_away(address[0], "no more threads to be had")
                    self._connections.release()
            self._reserve.acquire()
        self._reserve.release()

    def _let_in(self, raw: socket.socket, peer: str) -> None:
        try:
            connection = self._shake_hands(raw, peer)
            if connection is None:
                self._connections.release()
            else:
                self._connections.loop.call_soon_threadsafe(partial(self._connections.start, connection))
        except BaseException:
            self._connections.metrics.handshake_failed("internal")
            log.exception("a handshake failed")
            self._connections.release()

    def _shake_hands(self, raw: socket.socket, peer: str) -> WebsocketConnection | None:
        with raw:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            try:
                sock, admitted = handshake(raw, self._context, self._tokens)
            except HANDSHAKE_ERRORS as error:
                self._failed(error, peer)
                return None
            who = {"peer": peer, "tenant": admitted.tenant}
            try:
                return WebsocketConnection(
                    sock, admitted, peer, self._open, self._max_message_bytes, self._max_in_flight
                )
            except TooManyConnections as error:
                limiter = self._failures[f"too many connections of {admitted.tenant}"]
                if limiter.due(time.monotonic()):
                    more = limiter.more()
                    log.info("tenant %s was turned away: %s%s", admitted.tenant, error, more, extra=who)
            except OSError as error:
                log.error("tenant %s was turned away: %s", admitted.tenant, explained(error), extra=who)
                self._connections.metrics.handshake_failed("full")
            return None

    def _failed(self, error: Exception, peer: str) -> None:
        """Count a handshake that failed, and log why."""
        reason: Reason = "slow" if isinstance(error, TimeoutError) else "tls"
        who, more = {"peer": peer}, type(error).__name__
        if isinstance(error, HandshakeRefused):
            reason, more = error.reason, error.tenant
            who |= {"tenant": error.tenant} if error.tenant else {}
        elif isinstance(error, ssl.SSLError) and error.reason:  # OpenSSL's own name for it
            more = error.reason
        self._connections.metrics.handshake_failed(reason)
        shown = f"{reason} ({more})" if more else reason
        limiter = self._failures[reason]  # strangers decide how many there are
        if limiter.due(time.monotonic()):
            log.info("no session for %s: %s%s", peer, shown, limiter.more(), extra=who | {"reason": reason})

    def _open(self, tenant: str, send: Send, peer: str) -> TenantSession:
        if not self._reserve.acquire():  # a session with the last one would leave none to refuse others with
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._open_session(tenant, send, peer)


class Server:
    """A base executor behind a TLS port.

    Args:
        listener: already ``bound`` to host and port; default: this binds one.
        limits: of its connections.
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
            open_session=self._open_session,
            max_message_bytes=of_messages.max_message_bytes,
            max_in_flight=of_messages.max_in_flight,
        )

    @property
    def url(self) -> str:
        """Where tenants connect."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"wss://{host}:{self.port}"

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
        """Stop accepting, let every session answer what has arrived; whether all ended in time."""
        self.stop_listening()
        return self.connections.drain(seconds)

    @property
    def draining(self) -> bool:
        """Whether it has begun to end."""
        return self.connections.draining

    def _open_session(self, tenant: str, send: Send, peer: str) -> TenantSession:
        if not self.connections.reserve_for(tenant):
            raise TooManyConnections("too many connections of this tenant")
        try:
            return self.service.open(tenant, send, peer)
        except BaseException:
            self.connections.release_for(tenant)
            raise
