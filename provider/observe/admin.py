"""The admin port: the status page, ``/metrics``, ``/usage.csv``, ``/healthz`` and ``/readyz``."""

from __future__ import annotations

import io
import logging
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from ipaddress import ip_address
from socketserver import ThreadingMixIn
from typing import Any, Protocol
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from provider.observe.metrics import Metrics
from provider.observe.status import PAGE, StatusHistory
from provider.observe.usage import usage_csv
from shared.errors import ConfigurationError
from shared.hosts import in_url

log = logging.getLogger(__name__)

HEADERS = [
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
]
OK, UNAVAILABLE = "200 OK", "503 Service Unavailable"
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - and where those are found here
CONNECTIONS, MAX_CONNECTIONS = 16, 64
REQUEST_SECONDS = 5.0  # for a request to arrive and be answered
# Of a request. The time of its parser grows with their square, so the gateway, which has another, takes more.
HEADER_BYTES = 16 << 10
REQUEST_LINE_BYTES = 1 << 10  # of its first line, each byte of which takes longest
# Times as long as an answer took to make, and seconds; no other one is made then.
COOLDOWN, MAX_COOLDOWN = 9, 0.5
MAX_WAITING = 4  # for an answer; probes need the other connections


class _AdminWSGIServer(ThreadingMixIn, WSGIServer):
    """A thread for each request, so that a client that says nothing holds up neither others nor the end.

    Each has ``REQUEST_SECONDS``. If there are more than ``CONNECTIONS``, the oldest one is cut off: a probe
    takes milliseconds, so it is never the oldest among clients that are slow on purpose.
    """

    daemon_threads = True
    block_on_close = False

    def server_activate(self) -> None:
        self._open: dict[socket.socket, float] = {}  # since when, in this order
        super().server_activate()

    def process_request(self, request: Any, client_address: Any) -> None:
        oldest = list(self._open)[: max(0, len(self._open) + 1 - CONNECTIONS)]
        for each in oldest:
            _cut(each)
        if len(self._open) >= MAX_CONNECTIONS:  # they are cut, and have not ended
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread was to be had, which would take it out
            self._open.pop(request, None)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.pop(request, None)

    def service_actions(self) -> None:
        """Called now and then: cut what is late. Bytes one by one would stretch a timeout of the socket."""
        late = time.monotonic() - REQUEST_SECONDS
        for each in [each for each, since in list(self._open.items()) if since <= late]:
            _cut(each)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up, or say nothing, are not worth a line each."""
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("the admin port goes on after a fault")


class _AdminWSGIServer6(_AdminWSGIServer):
    address_family = socket.AF_INET6


def _cut(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended


class _HeaderReader(io.BufferedReader):
    """What a client sends, up to ``HEADER_BYTES``; the standard parser reads megabytes."""

    _left = HEADER_BYTES
    _longest = REQUEST_LINE_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        """See ``io``.

        Raises:
            ConnectionAbortedError: the header is too long, or a line has another end in it. For the parser it
                would be many lines.
        """
        line = super().readline(min(self._longest, self._left) + 1)
        too_long = len(line) > self._longest
        self._left, self._longest = self._left - len(line), HEADER_BYTES
        if too_long or self._left < 0 or b"\r" in line.removesuffix(b"\r\n"):
            raise ConnectionAbortedError
        return line


class _Handler(WSGIRequestHandler):
    rbufsize = 0  # the buffer is that of ``_HeaderReader``

    def setup(self) -> None:
        """See ``socketserver``."""
        super().setup()
        self.rfile: Any = _HeaderReader(self.rfile)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a log line each."""


class FreshAnswer:
    """Makes an answer for all who have asked by then; after a cooldown, the next one.

    While an answer is made, no other Python code runs. With the cooldown, a flood of requests takes a tenth
    of the time from the loop that answers tenants. Each answer is made after its request has come, unless
    ``MAX_WAITING`` requests wait already: then it is the newest one.

    The gateway's ``CachedAnswer`` has neither threads nor a cooldown, since it keeps an answer for a time.

    Args:
        make: makes it.
        clock: in seconds.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        make: Callable[[], bytes],
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._make, self._clock, self._sleep = make, clock, sleep
        self._lock, self._cooldown_until = threading.Lock(), -math.inf
        self._begun = self._made = 0  # the number of the newest one
        self._answer, self._slots = b"", threading.Semaphore(MAX_WAITING)

    def __call__(self) -> bytes:
        """The answer."""
        begun = self._begun
        if not self._slots.acquire(blocking=not self._made):
            return self._answer
        try:
            return self._fresh(begun)
        finally:
            self._slots.release()

    def _fresh(self, begun: int) -> bytes:
        """One that was begun later than this."""
        with self._lock:
            if self._made > begun:  # another thread has begun and made one since
                return self._answer
            if (remaining := self._cooldown_until - self._clock()) > 0:
                self._sleep(remaining)
            self._begun += 1
            began = self._clock()
            self._answer, self._made = self._make(), self._begun
            ended = self._clock()
            self._cooldown_until = ended + min(MAX_COOLDOWN, COOLDOWN * (ended - began))
            return self._answer


class Health(Protocol):
    """What probes ask."""

    def alive(self) -> bool:
        """Whether the process works, ready or not; if not, it should be started again."""
        ...

    def not_ready(self) -> str:
        """Why no tenant should be sent here now, in a word or two; empty: it is ready."""
        ...


class AdminServer:
    """Serves a status page, ``/metrics``, usage and probes, in a thread of its own.

    Whoever reaches the port may read them.

    Args:
        metrics: what to show.
        port: 0 picks one; see ``port`` for which.
        health: asked at every ``/healthz`` and ``/readyz``; 200, or 503 with the reason.
        status: of the page; None: there is none.
        host: address to listen on.

    Raises:
        ConfigurationError: the port is taken, or there is no such address here.
    """

    def __init__(
        self,
        metrics: Metrics,
        port: int,
        health: Health,
        status: StatusHistory | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        since = datetime.now(UTC)
        exposition = FreshAnswer(lambda: generate_latest(metrics.registry))
        usage = FreshAnswer(lambda: usage_csv(since, datetime.now(UTC), metrics.usage()).encode())

        def ready() -> tuple[str, str, bytes]:
            why = health.not_ready()
            return (UNAVAILABLE if why else OK), "text/plain", (why or "ready").encode() + b"\n"

        def alive() -> tuple[str, str, bytes]:
            return (OK, "text/plain", b"ok\n") if health.alive() else (UNAVAILABLE, "text/plain", b"stuck\n")

        pages: dict[str, Callable[[], tuple[str, str, bytes]]] = {
            "/metrics": lambda: (OK, CONTENT_TYPE_LATEST, exposition()),
            "/usage.csv": lambda: (OK, "text/csv", usage()),
            "/healthz": alive,
            "/readyz": ready,
        }
        if status is not None:
            report = FreshAnswer(lambda: msgspec.json.encode(status.report()))
            pages["/"] = lambda: (OK, "text/html; charset=utf-8", PAGE)
            pages["/status.json"] = lambda: (OK, "application/json", report())

        def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            path, plain = environ["PATH_INFO"], [("Content-Type", "text/plain")]
            # Another site's page in a browser that reaches the port may have a name of its own for it.
            if not _by_address(environ.get("HTTP_HOST", in_url(host)), host.lower()):
                start_response("403 Forbidden", plain)
                return [b"ask for an address, such as 127.0.0.1, or for localhost\n"]
            if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
                start_response("405 Method Not Allowed", [("Allow", "GET, HEAD"), *plain])
                return [b"nothing can be changed here\n"]
            if path not in pages:
                start_response("404 Not Found", plain)
                return [f"try {', '.join(pages)}\n".encode()]
            code, kind, body = pages[path]()
            start_response(code, [("Content-Type", kind), *HEADERS])
            return [body if environ["REQUEST_METHOD"] == "GET" else b""]

        server = _AdminWSGIServer6 if ":" in host else _AdminWSGIServer
        try:
            self._server: WSGIServer = make_server(
                host, port, app, server_class=server, handler_class=_Handler
            )
        except OSError as error:
            where = "" if host == "127.0.0.1" else f" of admin_host={host}"
            raise ConfigurationError(
                f"cannot listen on admin port {port}{where}: {error.strerror}"
            ) from error
        self.port = self._server.server_port
        here = ANYWHERE.get(host, host)
        self.url = f"http://{in_url(here)}:{self.port}"
        if not _loopback(host):
            log.warning("whoever reaches port %d of %s may read the admin pages", self.port, host)
        threading.Thread(target=self._server.serve_forever, name="admin", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _by_address(host: str, own_address: str) -> bool:
    """Whether a Host header has an address, which no site can claim, or a name that is this machine's."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in ("localhost", own_address) or bool(ip_address(name))
    except ValueError:
        return False


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
