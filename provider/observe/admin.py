"""The loopback port: the status page, ``/metrics``, ``/usage.csv``, ``/healthz`` and ``/readyz``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from socketserver import ThreadingMixIn
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec
from prometheus_client import make_wsgi_app

from provider.observe.metrics import Metrics
from provider.observe.status import PAGE, Status
from provider.observe.usage import usage_csv
from shared.errors import ConfigurationError

HEADERS = [
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
]
OK, UNAVAILABLE = "200 OK", "503 Service Unavailable"
CONNECTIONS = 16


class _AdminWSGIServer(ThreadingMixIn, WSGIServer):
    """A thread for each scrape, so that a client that says nothing holds up neither others nor the end.

    More than ``CONNECTIONS`` are closed at once.
    """

    daemon_threads = True
    block_on_close = False

    def server_activate(self) -> None:
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        super().server_activate()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class _QuietHandler(WSGIRequestHandler):
    timeout = 5  # seconds for a request to arrive

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a log line each."""


class Health(Protocol):
    """What probes ask."""

    def alive(self) -> bool:
        """Whether the process works, ready or not; if not, it should be started again."""
        ...

    def not_ready(self) -> str:
        """Why no tenant should be sent here now, in a word or two; empty: it is ready."""
        ...


class AdminServer:
    """Serves a status page, ``/metrics``, usage and probes on a loopback port, in a thread of its own.

    Args:
        metrics: what to show.
        port: 0 picks one; see ``port`` for which.
        health: asked at every ``/healthz`` and ``/readyz``; 200, or 503 with the reason.
        status: of the page; None: there is none.

    Raises:
        ConfigurationError: the port is taken.
    """

    def __init__(self, metrics: Metrics, port: int, health: Health, status: Status | None = None) -> None:
        show_metrics = make_wsgi_app(metrics.registry)
        since = datetime.now(UTC)

        def usage() -> tuple[str, str, bytes]:
            return OK, "text/csv", usage_csv(since, datetime.now(UTC), metrics.usage()).encode()

        def ready() -> tuple[str, str, bytes]:
            why = health.not_ready()
            return (UNAVAILABLE if why else OK), "text/plain", (why or "ready").encode() + b"\n"

        def alive() -> tuple[str, str, bytes]:
            return (OK, "text/plain", b"ok\n") if health.alive() else (UNAVAILABLE, "text/plain", b"stuck\n")

        pages = {"/usage.csv": usage, "/healthz": alive, "/readyz": ready}
        if status is not None:
            pages["/"] = lambda: (OK, "text/html; charset=utf-8", PAGE)
            pages["/status.json"] = lambda: (OK, "application/json", msgspec.json.encode(status.report()))

        def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            path = environ["PATH_INFO"]
            # Another site's page in a browser on this machine may reach the port under a name of its own.
            if environ.get("HTTP_HOST", "127.0.0.1").partition(":")[0] not in ("127.0.0.1", "localhost"):
                start_response("403 Forbidden", [("Content-Type", "text/plain")])
                return [b"ask for 127.0.0.1\n"]
            if path == "/metrics":
                shown: Iterable[bytes] = show_metrics(environ, start_response)
                return shown
            if path not in pages:
                start_response("404 Not Found", [("Content-Type", "text/plain")])
                return [f"try /metrics, {', '.join(pages)}\n".encode()]
            code, kind, body = pages[path]()
            start_response(code, [("Content-Type", kind), *HEADERS])
            return [body]

        try:
            self._server: WSGIServer = make_server(
                "127.0.0.1", port, app, server_class=_AdminWSGIServer, handler_class=_QuietHandler
            )
        except OSError as error:
            raise ConfigurationError(f"cannot listen on admin port {port}: {error.strerror}") from error
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="admin", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
