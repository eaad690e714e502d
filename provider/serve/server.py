"""Listens, hands each connection to a thread, and drains at the end.

Front doors use all of it but ``Server``, and have no executor; so nothing of one is imported here.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from provider.serve.connection import (
    HANDSHAKE_ERRORS,
    Bearer,
    Connection,
    OpenSession,
    Refused,
    TurnedAway,
    handshake,
)
from provider.serve.descriptors import Spare, explained, none_left
from provider.serve.tokens import TokenFile
from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from provider.session.answering import Send, Session
    from provider.session.tenant import Service

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


class Drains(Protocol):
    """An open session of any transport."""

    tenant: str

    def drain(self) -> None:
        """From another thread: answer what has arrived, then close."""
        ...


class Counts(Protocol):
    """Counts how connections fare; see ``provider.observe.metrics.Metrics``."""

    def handshake_failed(self, reason: str) -> None:
        """A connection ended before a session began."""
        ...

    def connected(self, change: int) -> None:
        """A session began (1) or ended (-1)."""
        ...


class Sessions:
    """The threads that serve tenants, over all transports together: how many, and how they end.

    Args:
        counts: counts them.
        limit: how many; each costs a thread.
        tenant_limit: of one tenant.
    """

    def __init__(self, counts: Counts, limit: int, tenant_limit: int) -> None:
        self.counts, self._limit, self._tenant_limit = counts, limit, tenant_limit
        self._threads: set[threading.Thread] = set()
        self._open: set[Drains] = set()
        self._lock = threading.Lock()
        self.draining = False

    def start(self, serve: Callable[[], None]) -> bool:
        """Run this in a thread of its own; False if there is no room for another."""
        thread = threading.Thread(target=self._run, args=(serve,), daemon=True)
        with self._lock:  # the thread takes itself off the list under the same lock
            if len(self._threads) < self._limit:
                try:
                    thread.start()
                    self._threads.add(thread)
                    return True
                except RuntimeError:
                    pass  # no more threads to be had: this connection is one too many
        self.counts.handshake_failed("full")
        return False

    def crowded(self, tenant: str) -> bool:
        """Whether a tenant has as many sessions as it may; it is counted and logged if so."""
        with self._lock:
            crowded = sum(session.tenant == tenant for session in self._open) >= self._tenant_limit
        if crowded:
            self.counts.handshake_failed("tenant_full")
            log.warning("tenant %s has %d sessions already", tenant, self._tenant_limit)
        return crowded

    @contextmanager
    def open(self, session: Drains) -> Iterator[None]:
        """While a session is served."""
        with self._lock:
            self._open.add(session)
        self.counts.connected(1)
        try:
            if self.draining:
                session.drain()
            yield
        finally:
            self.counts.connected(-1)
            with self._lock:
                self._open.discard(session)

    def drain(self, seconds: float) -> bool:
        """Let every session answer what has arrived; whether all ended in time."""
        self.draining = True
        with self._lock:
            sessions, threads = list(self._open), list(self._threads)
        for session in sessions:
            session.drain()
        deadline = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _run(self, serve: Callable[[], None]) -> None:
        try:
            serve()
        except Exception:
            log.exception("connection thread failed")
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())


class Entrance:
    """Lets tenants in at a listening socket: TLS, the websocket handshake, a session, a thread for each.

    Args:
        listener: others, and other processes, may accept from it too.
        sessions: counts and ends them.
        open_session, max_message_bytes: see ``Connection``.
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
    ) -> None:
        self._listener, self._context, self._tokens, self._sessions = listener, context, tokens, sessions
        self._open_session, self._max_message_bytes = open_session, max_message_bytes
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
            if not self._sessions.start(partial(self._serve, raw)):
                raw.close()
            self._spare.take()
        self._spare.give_up()

    def _serve(self, raw: socket.socket) -> None:
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
                self._sessions.counts.handshake_failed(reason)
                log.info("no session: %s (%s)", reason, type(error).__name__)
                return
            try:
                session = Connection(sock, bearer, self._open, self._max_message_bytes)
            except TurnedAway as error:
                log.info("tenant %s was turned away: %s", bearer.tenant, error)
                return
            except OSError as error:
                log.error("tenant %s was turned away: %s", bearer.tenant, explained(error))
                self._sessions.counts.handshake_failed("full")
                return
            with self._sessions.open(session):
                session.serve()

    def _open(self, bearer: Bearer, send: Send, waiting: Callable[[], bool]) -> Session:
        session = self._open_session(bearer, send, waiting)
        if not self._spare.take():  # a session with the last one would leave none to refuse others with
            session.close()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return session


class Server:
    """A base executor behind a TLS port.

    Args:
        accepting: let tenants in here; else front doors do so, at ``listener``.
        max_connections: further ones are closed at once; each costs a thread.
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
        accepting: bool = True,
    ) -> None:
        self.service, self.tokens = service, tokens
        self.sessions = Sessions(service.metrics, max_connections, tenant_connections)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self.listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        self.host, self.port = host, self.listener.getsockname()[1]
        if accepting:
            Entrance(
                self.listener,
                context=context,
                tokens=tokens,
                sessions=self.sessions,
                open_session=self._open_session,
                max_message_bytes=service.executor.manifest.limits.max_message_bytes,
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
        """Accept nobody any more, here and at front doors."""
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

    def _open_session(self, bearer: Bearer, send: Send, waiting: Callable[[], bool]) -> Session:
        if self.sessions.crowded(bearer.tenant):
            raise TurnedAway("too many connections of this tenant")
        return self.service.open(bearer.tenant, send, waiting)
