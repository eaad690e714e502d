"""The loopback port: the status page, ``/metrics``, ``/healthz``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec
from prometheus_client import make_wsgi_app

from provider.observe.metrics import Metrics
from provider.observe.status import PAGE, Status
from shared.errors import ConfigurationError

HEADERS = [
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
]


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


class AdminServer:
    """Serves a status page, ``/metrics`` and ``/healthz`` on a loopback port, in a thread of its own.

    Args:
        metrics: what to show.
        port: 0 picks one; see ``port`` for which.
        healthy: asked at every ``/healthz``; 200 if true, 503 if not (draining).
        status: of the page; None: there is none.
    """

    def __init__(
        self, metrics: Metrics, port: int, healthy: Callable[[], bool], status: Status | None = None
    ) -> None:
        show_metrics = make_wsgi_app(metrics.registry)

        def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            path = environ["PATH_INFO"]
            # Another site's page in a browser on this machine may reach the port under a name of its own.
            if environ.get("HTTP_HOST", "127.0.0.1").partition(":")[0] not in ("127.0.0.1", "localhost"):
                start_response("403 Forbidden", [("Content-Type", "text/plain")])
                return [b"ask for 127.0.0.1\n"]
            if status is not None and path in ("/", "/status.json"):
                kind = "text/html; charset=utf-8" if path == "/" else "application/json"
                start_response("200 OK", [("Content-Type", kind), *HEADERS])
                return [PAGE if path == "/" else msgspec.json.encode(status.report())]
            if path == "/metrics":
                shown: Iterable[bytes] = show_metrics(environ, start_response)
                return shown
            if path == "/healthz":
                ok = healthy()
                start_response(
                    "200 OK" if ok else "503 Service Unavailable", [("Content-Type", "text/plain")]
                )
                return [b"ok\n" if ok else b"draining\n"]
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"try /, /metrics or /healthz\n"]

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
