"""Listens, lets tenants in, and drains at the end."""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from provider.engine.loop import Loop
from provider.observe.metrics import Metrics
from provider.serve.connection import Connection, OpenSession
from provider.serve.descriptors import Spare, explained, none_left
from provider.serve.handshake import HANDSHAKE_ERRORS, Accepted, Bearer, Refused, TurnedAway, handshake
from provider.serve.tokens import TokenFile
from provider.session.tenant import Send, Service, TenantSession
from shared.errors import ConfigurationError

log = logging.getLogger(__name__)

REMIND_SECONDS = 60.0  # between lines of the log that say the same


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
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = Accepted
    if hasattr(context, "set_groups"):  # Python 3.15; before that, there is no way to name more than one
        context.set_groups(key_exchange_groups(ssl.OPENSSL_VERSION_INFO))
    folder = Path(tls_dir)
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"cannot use --client-ca {client_ca}: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(folder / "server.pem", folder / "server.key")
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"no usable certificate in {folder} (server.pem, server.key): {error}. "
            f"For development: `symbiosis-provider certs {folder}`"
        ) from error
    return context


class Session(Protocol):
    """A session of any transport."""

    tenant: str

    def start(self, loop: Loop, ended: Callable[[], None]) -> None:
        """In the loop's thread: serve it, and say when it has ended."""
        ...

    def drain(self) -> None:
        """In the loop's thread: answer what has arrived, then close."""
        ...


class Sessions:
    """The sessions of an executor, over all transports together: how many, and how they end.

    Args:
        metrics: counts them.
        loop: in which they are served.
        limit: how many, with those whose handshake is under way.
        tenant_limit: of one tenant.
    """

    def __init__(self, metrics: Metrics, loop: Loop, limit: int, tenant_limit: int) -> None:
        self.metrics, self.loop, self._limit, self._tenant_limit = metrics, loop, limit, tenant_limit
        self._beginning = 0
        self._coming: Counter[str] = Counter()  # tenants that were let in and have no session yet
        self._open: set[Session] = set()
        self._changed = threading.Condition()
        self.draining = False

    def begin(self) -> bool:
        """Whether there is room for another, which is taken; to be ended by ``start`` or ``gave_up``."""
        with self._changed:
            if self._beginning + len(self._open) < self._limit:
                self._beginning += 1
                return True
        self.metrics.handshake_failed("full")
        return False

    def gave_up(self) -> None:
        """None came of it."""
        with self._changed:
            self._beginning -= 1
            self._changed.notify_all()

    def start(self, session: Session) -> None:
        """Serve it from now on; in the loop's thread."""
        with self._changed:
            self._beginning -= 1
            self._open.add(session)
        self.stayed_away(session.tenant)  # it is here
        self.metrics.connected(1)
        session.start(self.loop, partial(self._ended, session))
        if self.draining:
            session.drain()

    def _ended(self, session: Session) -> None:
        self.metrics.connected(-1)
        with self._changed:
            self._open.discard(session)
            self._changed.notify_all()

    def crowded(self, tenant: str) -> bool:
        """Whether a tenant has as many sessions as it may; counted and logged if so, else a place is kept."""
        with self._changed:
            there = sum(session.tenant == tenant for session in self._open) + self._coming[tenant]
            if there < self._tenant_limit:
                self._coming[tenant] += 1
                return False
        self.metrics.handshake_failed("tenant_full")
        log.warning("tenant %s has %d sessions already", tenant, self._tenant_limit)
        return True

    def stayed_away(self, tenant: str) -> None:
        """The place that was kept for a tenant is free."""
        with self._changed:
            self._coming[tenant] -= 1
            self._coming += Counter()  # forgets who is not coming

    def drain(self, seconds: float) -> bool:
        """Let every session answer what has arrived; whether all ended in time."""
        self.draining = True
        self.loop.call(self._drain_open)
        with self._changed:
            return self._changed.wait_for(lambda: not (self._open or self._beginning), seconds)

    def _drain_open(self) -> None:
        with self._changed:
            sessions = list(self._open)
        for session in sessions:
            session.drain()


class Entrance:
    """Lets tenants in at a listening socket: TLS and the websocket handshake, in a thread for each.

    Args:
        listener: this accepts from it.
        sessions: counts and ends them.
        open_session, max_message_bytes, window: see ``Connection``.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        context: ssl.SSLContext,
        tokens: TokenFile,
        sessions: Sessions,
        open_session: OpenSession,
        max_message_bytes: int,
        window: int,
    ) -> None:
        self._listener, self._context, self._tokens, self._sessions = listener, context, tokens, sessions
        self._open_session, self._max_message_bytes, self._window = open_session, max_message_bytes, window
        self._spare = Spare()
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def _accept(self) -> None:
        told = -math.inf
        while not self._sessions.draining:
            try:
                raw, _ = self._listener.accept()
            except OSError as error:
                if self._sessions.draining or error.errno == errno.EINVAL:  # nobody listens any more
                    break
                if time.monotonic() - told > REMIND_SECONDS:
                    log.error("cannot accept connections: %s", explained(error))
                    told = time.monotonic()
                if not (none_left(error) and self._spare.give_up()):
                    threading.Event().wait(0.1)  # give some time to close
                    self._spare.take()
                continue
            if not self._sessions.begin():
                raw.close()
            else:
                try:
                    threading.Thread(target=self._let_in, args=(raw,), name="handshake", daemon=True).start()
                except RuntimeError:  # no more threads to be had: this connection is one too many
                    raw.close()
                    self._sessions.metrics.handshake_failed("full")
                    self._sessions.gave_up()
            self._spare.take()
        self._spare.give_up()

    def _let_in(self, raw: socket.socket) -> None:
        try:
            connection = self._shake_hands(raw)
            if connection is None:
                self._sessions.gave_up()
            else:
                self._sessions.loop.call(partial(self._sessions.start, connection))
        except BaseException:
            log.exception("a handshake failed")
            self._sessions.gave_up()

    def _shake_hands(self, raw: socket.socket) -> Connection | None:
        with raw:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            try:
                sock, bearer = handshake(raw, self._context, self._tokens)
            except HANDSHAKE_ERRORS as error:
                reason = "slow" if isinstance(error, TimeoutError) else "tls"
                if isinstance(error, Refused):
                    reason = error.reason
                self._sessions.metrics.handshake_failed(reason)
                log.info("no session: %s (%s)", reason, type(error).__name__)
                return None
            try:
                return Connection(sock, bearer, self._open, self._max_message_bytes, self._window)
            except TurnedAway as error:
                log.info("tenant %s was turned away: %s", bearer.tenant, error)
            except OSError as error:
                log.error("tenant %s was turned away: %s", bearer.tenant, explained(error))
                self._sessions.metrics.handshake_failed("full")
            return None

    def _open(self, bearer: Bearer, send: Send) -> TenantSession:
        session = self._open_session(bearer, send)
        if not self._spare.take():  # a session with the last one would leave none to refuse others with
            session.close()
            self._sessions.stayed_away(bearer.tenant)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return session


class Server:
    """A base executor behind a TLS port.

    Args:
        max_connections: further ones are closed at once.
        tenant_connections: of one tenant; further ones are turned away.
    """

    def __init__(
        self,
        service: Service,
        *,
        context: ssl.SSLContext,
        tokens: TokenFile,
        host: str = "127.0.0.1",
        port: int = 8765,
        max_connections: int = 256,
        tenant_connections: int = 64,
    ) -> None:
        self.service, self.tokens = service, tokens
        self.sessions = Sessions(service.metrics, service.engine.loop, max_connections, tenant_connections)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self.listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        self.host, self.port = host, self.listener.getsockname()[1]
        limits = service.executor.manifest.limits
        Entrance(
            self.listener,
            context=context,
            tokens=tokens,
            sessions=self.sessions,
            open_session=self._open_session,
            max_message_bytes=limits.max_message_bytes,
            window=limits.max_in_flight,
        )

    @property
    def url(self) -> str:
        """Where tenants connect."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"wss://{host}:{self.port}"

    def write_ready_file(self, path: str | Path, **more: str) -> None:
        """Tell a supervisor, in one rename, that the port is open; ``more`` goes into the file too."""
        path = Path(path)
        temporary = path.with_name(path.name + ".new")
        try:
            temporary.write_bytes(msgspec.json.encode({"url": self.url, "pid": os.getpid(), **more}))
            temporary.replace(path)
        except OSError as error:
            raise ConfigurationError(f"cannot write the ready file {path}: {error.strerror}") from error

    def stop_listening(self) -> None:
        """Accept nobody any more."""
        self.sessions.draining = True
        try:
            # Closing alone would not wake those who wait in accept().
            self.listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.listener.close()

    def drain(self, seconds: float = 10.0) -> bool:
        """Stop accepting, let every session answer what has arrived; whether all ended in time."""
        self.stop_listening()
        return self.sessions.drain(seconds)

    @property
    def draining(self) -> bool:
        """Whether it has begun to end."""
        return self.sessions.draining

    def _open_session(self, bearer: Bearer, send: Send) -> TenantSession:
        if self.sessions.crowded(bearer.tenant):
            raise TurnedAway("too many connections of this tenant")
        return self.service.open(bearer.tenant, send)
