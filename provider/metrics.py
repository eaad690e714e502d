"""What the executor counts, and the loopback port that shows it (``/metrics``, ``/healthz``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app

from provider.batching import Done
from shared.errors import ConfigurationError
from shared.header import Direction, Header, Operation, RequestClass

_DIRECTIONS = {Direction.FORWARD: "forward", Direction.BACKWARD: "backward"}
_OPERATIONS = {
    Operation.PRODUCT: "product",
    Operation.EFFECT: "effect",
    Operation.SEED_EFFECT: "seed_effect",
}


class Metrics:
    """Counters of one executor. Labels have few values; the provider chose the tenants' names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("operation", "direction")
        rows = Counter(
            "symbiosis_rows", "Rows of answered products and effects.", labels, registry=self.registry
        )
        seconds = Histogram(
            "symbiosis_product_seconds",
            "Products and effects answered: time from a complete request to its computed answer.",
            labels,
            registry=self.registry,
            buckets=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1, 3, 10),
        )
        self._products = {
            (o, d): (
                rows.labels(operation, direction),
                seconds.labels(operation, direction),
            )
            for o, operation in _OPERATIONS.items()
            for d, direction in _DIRECTIONS.items()
        }
        buckets = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1, 3, 10)
        self._queue = Histogram(
            "symbiosis_queue_seconds",
            "From a complete request to the beginning of its first product.",
            ("request_class",),
            registry=self.registry,
            buckets=buckets,
        )
        self._reply = Histogram(
            "symbiosis_reply_seconds",
            "From a complete request to its computed answer.",
            ("request_class",),
            registry=self.registry,
            buckets=buckets,
        )
        self._batch_rows = Histogram(
            "symbiosis_batch_rows",
            "Rows of products.",
            registry=self.registry,
            buckets=tuple(4**i for i in range(9)),
        )
        self._batch_seconds = Histogram(
            "symbiosis_batch_seconds", "Time of products.", registry=self.registry, buckets=buckets
        )
        self._tenant_rows = Counter(
            "symbiosis_tenant_rows", "Rows by tenant.", ("tenant",), registry=self.registry
        )
        self._tenant_bytes = Counter(
            "symbiosis_tenant_bytes",
            "Payload bytes of products by tenant, both ways.",
            ("tenant",),
            registry=self.registry,
        )
        self._by_class = {
            c: (self._queue.labels(c.name.lower()), self._reply.labels(c.name.lower()))
            for c in RequestClass
            if c
        }
        self.received = Counter("symbiosis_received_bytes", "Payload bytes received.", registry=self.registry)
        self.sent = Counter("symbiosis_sent_bytes", "Payload bytes sent.", registry=self.registry)
        self.refused = Counter(
            "symbiosis_refused", "Requests answered with an error.", ("code",), registry=self.registry
        )
        self.handshakes_failed = Counter(
            "symbiosis_handshakes_failed",
            "Connections that ended before a session began.",
            ("reason",),
            registry=self.registry,
        )
        self.connections = Gauge("symbiosis_connections", "Open tenant sessions.", registry=self.registry)

    def product(self, tenant: str, header: Header, answer: Header, done: Done) -> None:
        """Count one answered product or effect."""
        rows, histogram = self._products[Operation(header.operation), Direction(header.direction)]
        rows.inc(header.rows)
        histogram.observe(done.reply_seconds)
        queue, reply = self._by_class[done.request_class]
        queue.observe(done.queue_seconds)
        reply.observe(done.reply_seconds)
        self.received.inc(header.payload_bytes)
        self.sent.inc(answer.payload_bytes)
        self._tenant_rows.labels(tenant).inc(header.rows)
        self._tenant_bytes.labels(tenant).inc(header.payload_bytes + answer.payload_bytes)

    def batch(self, rows: int, seconds: float) -> None:
        """Count one product, of one request or many."""
        self._batch_rows.observe(rows)
        self._batch_seconds.observe(seconds)


class _AdminWSGIServer(ThreadingMixIn, WSGIServer):
    """A thread for each scrape, so that a client that says nothing holds up neither others nor the end."""

    daemon_threads = True
    block_on_close = False


class _QuietHandler(WSGIRequestHandler):
    timeout = 5  # seconds for a request to arrive

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a log line each."""


class AdminServer:
    """Serves ``/metrics`` and ``/healthz`` on a loopback port, in a thread of its own.

    Args:
        metrics: what to show.
        port: 0 picks one; see ``port`` for which.
        healthy: asked at every ``/healthz``; 200 if true, 503 if not (draining).
    """

    def __init__(self, metrics: Metrics, port: int, healthy: Callable[[], bool]) -> None:
        show_metrics = make_wsgi_app(metrics.registry)

        def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            path = environ["PATH_INFO"]
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
            return [b"try /metrics or /healthz\n"]

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
