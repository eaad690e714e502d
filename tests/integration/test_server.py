"""The executor as a server: how many, how it counts, how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import RING, TENANT, Executor
from lanes import BrokenLane, HeldLane, service_on
from raw_peers import REPLY, SECONDS, Peer, eventually, header, metric, open_raw, product

import provider.serve.server
from provider.engine.lanes import ProcessLane
from provider.executor.base import BaseExecutor
from provider.observe.admin import AdminServer
from provider.observe.metrics import Metrics
from provider.serve.connection import HALF_CLOSED, Connection, ConnectionLimits
from provider.serve.server import Server, server_context
from provider.session.tenant import Service
from shared.errors import ConfigurationError, ConnectError, ConnectionLost, RequestRefused
from shared.wire.header import RINGS, Direction, Operation
from tenant_sdk import Session
from tenant_sdk.connection.keys import ProductKey

ROW = bytes(256)


@pytest.fixture
def another(llama: Executor, tls_dir: Path) -> Iterator[Callable[..., Executor]]:
    """The same weights behind another port: ``another(service, limits=...)``."""
    servers: list[Server] = []

    def start(service: Service | None = None, **options: Any) -> Executor:
        assert llama.server is not None
        servers.append(
            Server(
                service or Service.of(llama.server.service.executor),
                context=server_context(tls_dir),
                tokens=llama.server.tokens,
                port=0,
                **options,
            )
        )
        return Executor(servers[-1].url, llama.token, llama.ca, server=servers[-1])

    yield start
    for server in servers:
        server.drain(SECONDS)


def service_of(llama: Executor, lane: Callable[[BaseExecutor], ProcessLane]) -> tuple[Service, Any]:
    assert llama.server is not None
    return service_on(llama.server.service.executor, lane)


def ask(session: Session, rows: int = 1) -> torch.Tensor:
    """A product of rows of ones."""
    x = torch.ones((rows, 64))
    return session.executor.submit(Operation.PRODUCT, ProductKey(0, Direction.FORWARD, 1), [x]).result()[0]


def get(url: str, path: str) -> tuple[int, str]:
    """Status and body of a page of the admin port."""
    with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=800)) as client:
        client.request("GET", path)
        response = client.getresponse()
        return response.status, response.read().decode()


# -- serving ---------------------------------------------------------------------------------------


def test_many_requests_in_one_write(llama: Executor) -> None:
    with open_raw(llama) as peer:
        peer.hello()
        peer.send(b"".join(peer.frame(product(1, 64, request_id=i) + ROW) for i in range(1, 201)))
        answered = [peer.receive()[0] for _ in range(200)]
        assert {fields.operation for fields in answered} == {REPLY}
        assert sorted(fields.request_id for fields in answered) == list(range(1, 201))


def test_a_request_that_tls_has_decrypted_already(llama: Executor) -> None:
    """The end of one request and all of the next in one TLS record: no byte is left in the socket."""
    with open_raw(llama) as peer:
        peer.hello()
        large = peer.frame(product(80, 64, request_id=1) + ROW * 80)
        peer.send(large + peer.frame(product(1, 64, request_id=2) + ROW))
        assert sorted(peer.receive()[0].request_id for _ in range(2)) == [1, 2]


def test_a_tenant_that_pings_and_does_not_listen(another: Callable[..., Executor]) -> None:
    """Its answers wait in the network, not in the executor; it goes on when the tenant reads."""
    executor, pings = another(), 40_000
    with open_raw(executor) as peer, executor.connect() as other:
        peer.hello()
        connections: Any = executor.server.connections  # type: ignore[union-attr]
        for session in connections._open:  # a network that holds little
            session._sock._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        piece = peer.frame(b"", 9) * 1000
        with ThreadPoolExecutor(1) as threads:
            sent = threads.submit(lambda: [peer.send(piece) for _ in range(pings // 1000)])
            eventually(lambda: not all(session._reading for session in connections._open))
            ask(other)  # nobody else waits for it
            for _ in range(pings):
                assert peer.receive_frame() == (10, b"")
            sent.result(SECONDS)
        peer.message(product(1, 64), ROW)
        assert peer.receive()[0].operation == REPLY


def test_further_connections_are_closed_at_once(another: Callable[..., Executor]) -> None:
    executor = another(limits=ConnectionLimits(2))
    with executor.connect() as first:
        with executor.connect():
            with pytest.raises(ConnectError):
                executor.connect()
            assert metric(executor, "symbiosis_handshakes_failed_total", reason="full") == 1
            ask(first)
        eventually(lambda: metric(executor, "symbiosis_connections") == 1)
        eventually(lambda: len(executor.server.connections._open) == 1)  # type: ignore[union-attr]
        with executor.connect() as third:
            ask(third)
            ask(first)


def test_a_tenant_with_too_many_connections_is_turned_away(
    another: Callable[..., Executor],
) -> None:
    executor = another(limits=ConnectionLimits(per_tenant=2))
    tokens = executor.server.tokens  # type: ignore[union-attr]
    with executor.connect() as first, executor.connect():
        with pytest.raises(ConnectError, match="too many sessions") as caught:
            executor.connect()
        assert caught.value.retry_after
        other = tokens.add("somebody-else")
        try:
            with executor.connect(token=other) as another_tenant:
                ask(another_tenant)
        finally:
            tokens.remove("somebody-else")
        ask(first)
    eventually(lambda: metric(executor, "symbiosis_connections") == 0)
    executor.connect().close()
    assert metric(executor, "symbiosis_handshakes_failed_total", reason="tenant_full") == 1


def test_a_failure_inside_fails_one_request_and_tells_nothing(
    another: Callable[..., Executor], llama: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    executor = another(service_of(llama, BrokenLane)[0])
    with executor.connect() as session, caplog.at_level(logging.ERROR, "provider"):
        with pytest.raises(RequestRefused) as caught:
            ask(session, 13)
        assert caught.value.code == "internal"
        assert "secret" not in caught.value.message
        assert "/secret/path" in caplog.text
        ask(session, 12)
    assert metric(executor, "symbiosis_refused_total", code="internal") == 1


def test_a_failure_after_the_answer_is_no_second_answer(
    another: Callable[..., Executor],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_late(*_: Any) -> None:
        raise RuntimeError("too late")

    executor = another()
    monkeypatch.setattr(executor.server.service.metrics, "answered", too_late)  # type: ignore[union-attr]
    with executor.connect() as session:
        for _ in range(3):
            ask(session)
    eventually(lambda: "too late" in caplog.text)  # counted when nobody waits


def test_the_log_names_tenants_but_no_token_and_no_number(
    llama: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), llama.connect() as session:
        ask(session)
    assert TENANT in caplog.text
    assert llama.token not in caplog.text
    assert "tensor" not in caplog.text


# -- counting --------------------------------------------------------------------------------------


def test_metrics_count_what_was_served(another: Callable[..., Executor]) -> None:
    executor = another()
    with executor.connect() as session:
        assert metric(executor, "symbiosis_connections") == 1
        before = metric(executor, "symbiosis_sent_bytes_total")
        ask(session, 3)
        ask(session, 4)
        labels = {"operation": "product", "direction": "forward"}
        eventually(lambda: metric(executor, "symbiosis_sent_bytes_total") - before == 7 * 64 * 4)
        assert metric(executor, "symbiosis_rows_total", **labels) == 7
        assert metric(executor, "symbiosis_product_seconds_count", **labels) == 2
        assert metric(executor, "symbiosis_received_bytes_total") == 7 * 64 * 4
        assert metric(executor, "symbiosis_rows_total", operation="effect", direction="forward") == 0
    eventually(lambda: metric(executor, "symbiosis_connections") == 0)


def test_a_seed_counts_as_the_rows_that_it_stands_for(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    executor = serve(checkpoint("llama"), numerics=RING)
    with open_raw(executor) as peer:
        peer.hello()
        received = metric(executor, "symbiosis_received_bytes_total")
        sent = metric(executor, "symbiosis_sent_bytes_total")
        planes = RINGS[RING]
        for direction, columns, answered in ((1, 64, planes * 32), (2, 32, planes * 64)):
            labels = {"operation": "seed_effect", "direction": ("forward", "backward")[direction - 1]}
            fields = {"operation": 8, "direction": direction, "dtype": 6, "members": 2, "request_id": 1}
            peer.message(header(**fields, rows=5, columns=columns), bytes(32))
            assert len(peer.receive()[1]) == 5 * answered * 4
            eventually(lambda labels=labels: metric(executor, "symbiosis_rows_total", **labels) == 5)
            eventually(
                lambda labels=labels: metric(executor, "symbiosis_product_seconds_count", **labels) == 1
            )
        eventually(lambda: metric(executor, "symbiosis_received_bytes_total") - received == 2 * 32)
        answers = planes * 5 * (32 + 64) * 4
        eventually(lambda: metric(executor, "symbiosis_sent_bytes_total") - sent == answers)
        assert metric(executor, "symbiosis_rows_total", operation="effect", direction="forward") == 0


NAMES = {
    "symbiosis_rows_total",
    "symbiosis_product_seconds_bucket",
    "symbiosis_product_seconds_count",
    "symbiosis_received_bytes_total",
    "symbiosis_sent_bytes_total",
    "symbiosis_refused_total",
    "symbiosis_handshakes_failed_total",
    "symbiosis_connections",
}


def names_in(page: str) -> set[str]:
    """Names of the samples on a metrics page."""
    return set(re.findall(r"(?m)^(symbiosis_\w+)", page))


def test_the_admin_port_listens_on_loopback_and_says_how_it_is() -> None:
    alive, why = True, "loading"
    metrics = Metrics()
    metrics.refused.labels("group").inc()
    metrics.handshakes_failed.labels("tls").inc()
    admin = AdminServer(metrics, 0, SimpleNamespace(alive=lambda: alive, not_ready=lambda: why))
    try:
        assert admin._server.server_address[0] == "127.0.0.1"
        url = f"http://127.0.0.1:{admin.port}"
        status, page = get(url, "/metrics")
        assert status == 200
        assert names_in(page) >= NAMES
        for why, code in (("loading", 503), ("", 200), ("draining", 503)):
            assert get(url, "/healthz") == (200, "ok\n")  # who is busy or ends needs no other start
            assert get(url, "/readyz") == (code, f"{why or 'ready'}\n")
        alive = False
        assert get(url, "/healthz") == (503, "stuck\n")
        assert get(url, "/")[0] == 404
    finally:
        admin.close()


# -- ending ----------------------------------------------------------------------------------------


@pytest.fixture
def held(another: Callable[..., Executor], llama: Executor) -> tuple[Executor, Server, Any]:
    """An executor whose products wait until the test lets them go, and its lane."""
    service, lane = service_of(llama, HeldLane)
    executor = another(service)
    assert executor.server is not None
    return executor, executor.server, lane


def test_who_is_in_the_handshake_when_nobody_listens_any_more_is_served(
    another: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To stop listening is not to drain, which begins later and tells each session."""
    began, go, shake_hands = threading.Event(), threading.Event(), provider.serve.server.handshake

    def slow(*args: Any) -> Any:
        began.set()
        assert go.wait(SECONDS)
        return shake_hands(*args)

    executor = another()
    server = executor.server
    assert server is not None
    monkeypatch.setattr(provider.serve.server, "handshake", slow)
    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(executor.connect)
        assert began.wait(SECONDS)
        server.stop_listening()
        go.set()
        with connecting.result(timeout=SECONDS) as session:
            ask(session)
            assert not server.draining
    with pytest.raises(ConnectError):
        executor.connect()


def test_draining_answers_what_is_in_flight(held: tuple[Executor, Server, Any]) -> None:
    executor, server, lane = held
    with ThreadPoolExecutor(4) as threads, executor.connect() as busy, executor.connect() as idle:
        request = threads.submit(ask, busy)
        assert lane.started.acquire(timeout=SECONDS)
        drained = threads.submit(server.drain, SECONDS)
        eventually(lambda: server.draining)
        eventually(lambda: metric(executor, "symbiosis_connections") == 1)
        with pytest.raises(ConnectionLost, match="shutting down") as caught:
            ask(idle)
        assert caught.value.retry_after is not None
        assert not request.done()
        lane.go.set()
        assert request.result(timeout=SECONDS).shape == (1, 64)
        assert drained.result(timeout=SECONDS)
        with pytest.raises(ConnectionLost, match="shutting down"):
            ask(busy)
        with pytest.raises(ConnectError):
            executor.connect()


@contextlib.contextmanager
def drained(held: tuple[Executor, Server, Any]) -> Iterator[tuple[Peer, Callable[[], None]]]:
    """A peer, and what begins to drain once a product is in flight; after the block nothing is left."""
    executor, server, lane = held
    with ThreadPoolExecutor(1) as threads, open_raw(executor) as peer:
        draining = list[Future[bool]]()

        def drain() -> None:
            assert lane.started.acquire(timeout=SECONDS)
            draining.append(threads.submit(server.drain, SECONDS))

        peer.hello()
        yield peer, drain
        assert peer.receive_close() == 1001
        peer.close()
        assert draining[0].result(timeout=SECONDS)


def test_draining_answers_what_has_arrived_behind_it(held: tuple[Executor, Server, Any]) -> None:
    _, server, lane = held
    with drained(held) as (peer, drain):
        data = [peer.frame(product(1, 64, request_id=i) + ROW) for i in (1, 2, 3)]
        peer.send(data[0] + data[1] + data[2][:100])  # the last one is still arriving
        drain()
        eventually(lambda: server.draining)
        lane.go.set()
        assert [peer.receive()[0].request_id for _ in (1, 2)] == [1, 2]
        peer.send(data[2][100:])
        assert peer.receive()[0].request_id == 3


def test_draining_reads_no_more_than_had_arrived(held: tuple[Executor, Server, Any]) -> None:
    """Or who always has a request in flight would never be told; what is not answered is sent again."""
    _, server, lane = held
    with drained(held) as (peer, drain):
        (connection,) = server.connections._open
        peer.message(product(1, 64, request_id=1), ROW)
        drain()
        eventually(lambda: connection._stage == HALF_CLOSED)  # type: ignore[attr-defined]
        for number in (2, 3):
            peer.message(product(1, 64, request_id=number), ROW)
        lane.go.set()
        assert peer.receive()[0].request_id == 1


def test_draining_gives_up_in_time(held: tuple[Executor, Server, Any]) -> None:
    """The time is for all sessions together, however many there are."""
    executor, server, lane = held
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(open_raw(executor)) for _ in range(6)]
        for peer in peers:
            peer.hello()
            peer.message(product(1, 64), ROW)
        assert lane.started.acquire(timeout=SECONDS)
        assert not server.drain(0.2)
        lane.go.set()
        for peer in peers:
            assert peer.receive()[0].operation == REPLY


def test_sigterm_answers_drains_and_exits_with_0(
    serve_process: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    """The answer is larger than the sockets hold, so the executor is in the middle of sending it."""
    executor = serve_process(checkpoint("llama"), "--drain-seconds", "60")
    process = executor.process
    assert process is not None
    assert executor.log is not None
    status, page = get(executor.admin_url, "/metrics")
    assert status == 200
    assert names_in(page) >= NAMES - {"symbiosis_refused_total", "symbiosis_handshakes_failed_total"}
    assert get(executor.admin_url, "/healthz") == (200, "ok\n")
    assert get(executor.admin_url, "/readyz") == (200, "ready\n")
    with open_raw(executor) as peer:
        peer.hello()
        rows = 65_536
        peer.message(product(rows, 64, group=2, members=0b11), bytes(rows * 256))
        peer._early = peer.sock.recv(14)
        process.send_signal(signal.SIGTERM)
        eventually(lambda: get(executor.admin_url, "/readyz") == (503, "draining\n"))
        assert get(executor.admin_url, "/healthz") == (200, "ok\n")
        assert process.poll() is None
        fields, body = peer.receive()
        assert (fields.operation, fields.rows, fields.columns) == (REPLY, rows, 192)
        assert len(body) == rows * 192 * 4
        assert peer.receive_close() == 1001
    assert process.wait(timeout=SECONDS) == 0
    log = executor.log.read_text()
    assert "draining" in log
    assert "cut off" not in log
    assert "Traceback" not in log


# -- starting --------------------------------------------------------------------------------------


def test_a_ready_file_says_where(another: Callable[..., Executor], tmp_path: Path) -> None:
    executor = another()
    assert executor.server is not None
    executor.server.write_ready_file(tmp_path / "ready", admin_url="http://127.0.0.1:1")
    told = json.loads((tmp_path / "ready").read_text())
    assert told["url"] == executor.url
    assert set(told) == {"url", "pid", "admin_url"}
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]


@pytest.mark.parametrize("missing", ["server.pem", "server.key"])
def test_certificates_that_are_not_there(tls_dir: Path, tmp_path: Path, missing: str) -> None:
    for name in {"server.pem", "server.key"} - {missing}:
        (tmp_path / name).write_bytes((tls_dir / name).read_bytes())
    with pytest.raises(ConfigurationError, match="symbiosis-provider certs"):
        server_context(tmp_path)
    with pytest.raises(ConfigurationError):
        server_context(tls_dir, client_ca=tmp_path / "no.pem")


def test_no_timer_keeps_a_session(another: Callable[..., Executor]) -> None:
    """Or those of the last fifteen seconds would be kept, with all that they know of the model."""
    executor = another()
    with executor.connect() as session:
        ask(session)
        server = executor.server
        assert server is not None
        timers = [what for _, _, what in server.service.engine.loop._timers]
        assert timers
        assert not any(isinstance(getattr(what, "__self__", None), Connection) for what in timers)
