"""Listens, hands each connection to a thread, and drains at the end."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from provider.connection import HANDSHAKE_ERRORS, Connection, Refused, handshake
from provider.metrics import Metrics
from provider.session import Service
from provider.tokens import TokenFile
from shared.errors import ConfigurationError

log = logging.getLogger(__name__)


def server_context(tls_dir: str | Path, client_ca: str | Path | None = None) -> ssl.SSLContext:
    """TLS 1.3 only, with ``server.pem`` and ``server.key`` of the folder.

    Args:
        client_ca: if given, tenants must also show a certificate that this authority signed.

    Raises:
        ConfigurationError: a file is missing or does not fit.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
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


class Sessions:
    """The threads that serve tenants, over all transports together: how many, and how they end.

    Args:
        metrics: counts them.
        limit: how many; each costs a thread.
        tenant_limit: of one tenant.
    """

    def __init__(self, metrics: Metrics, limit: int, tenant_limit: int) -> None:
        self._metrics, self._limit, self._tenant_limit = metrics, limit, tenant_limit
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
        self._metrics.handshakes_failed.labels("full").inc()
        return False

    def crowded(self, tenant: str) -> bool:
        """Whether a tenant has as many sessions as it may; it is counted and logged if so."""
        with self._lock:
            crowded = sum(session.tenant == tenant for session in self._open) >= self._tenant_limit
        if crowded:
            self._metrics.handshakes_failed.labels("tenant_full").inc()
            log.warning("tenant %s has %d sessions already", tenant, self._tenant_limit)
        return crowded

    @contextmanager
    def open(self, session: Drains) -> Iterator[None]:
        """While a session is served."""
        with self._lock:
            self._open.add(session)
        self._metrics.connections.inc()
        try:
            if self.draining:
                session.drain()
            yield
        finally:
            self._metrics.connections.dec()
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


class Server:
    """A base executor behind a TLS port.

    Args:
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
    ) -> None:
        self.service, self._metrics = service, service.metrics
        self._context, self._tokens = context, tokens
        self.sessions = Sessions(service.metrics, max_connections, tenant_connections)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        self.host, self.port = host, self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="accept", daemon=True)
        self._acceptor.start()

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

    def drain(self, seconds: float = 10.0) -> bool:
        """Stop accepting, let every session answer what has arrived; whether all ended in time."""
        self.sessions.draining = True
        try:
            # Closing alone would not wake the thread that waits in accept().
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        return self.sessions.drain(seconds)

    @property
    def draining(self) -> bool:
        """Whether it has begun to end."""
        return self.sessions.draining

    def _accept(self) -> None:
        while not self.draining:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                if not self.draining:
                    log.exception("cannot accept connections")
                    threading.Event().wait(0.1)  # out of file descriptors: give some time to close
                continue
            if not self.sessions.start(partial(self._serve, raw)):
                raw.close()

    def _serve(self, raw: socket.socket) -> None:
        with raw:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            try:
                sock, tenant = handshake(raw, self._context, self._tokens)
            except HANDSHAKE_ERRORS as error:
                reason = "slow" if isinstance(error, TimeoutError) else "tls"
                if isinstance(error, Refused):
                    reason = error.reason
                self._metrics.handshakes_failed.labels(reason).inc()
                log.info("no session: %s (%s)", reason, type(error).__name__)
                return
            session = Connection(sock, tenant, self.service)
            if self.sessions.crowded(tenant):
                session.turn_away()
                return
            with self.sessions.open(session):
                session.serve()
