"""Executor and tenant on one machine: opening, deaths, and the tenant's side."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from channels import error_of
from conftest import Executor
from raw_colocated import RawTenant, memories, request_session
from raw_colocated import ones_product as product
from raw_peers import (
    PRODUCT,
    REPLY,
    SECONDS,
    WELCOME,
    eventually,
)
from raw_peers import (
    product as product_header,
)
from transports import Start, TransportServers

import tenant_sdk
from provider.serve.colocated import ColocatedServer
from provider.serve.connection import ConnectionLimits, Connections
from provider.serve.tokens import TokenFile
from shared.errors import (
    ConfigurationError,
    ConnectError,
    ConnectionLost,
    ProtocolVersionError,
    RequestTimeout,
)
from shared.wire.header import PROTOCOL_VERSION, Direction, Operation
from shared.wire.messages import Limits
from tenant_sdk.command_line.doctor import examine
from tenant_sdk.command_line.options import Target
from tenant_sdk.connection.colocated import Areas, open_colocated
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.session.profiles import Secret

pytest_plugins = ("transport_fixtures", "wire_fixtures")

ROW = 64 * 4  # bytes


# -- opening a session -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ((), "protocol_version"),
        ((b"",), "protocol_version"),
        ((b"symbiosis.v1", b"token"), "protocol_version"),
        ((b"symbiosis.v%d" % (PROTOCOL_VERSION - 1), b"token"), "protocol_version"),
        ((b"symbiosis.v4",), "unauthorized"),
        ((b"symbiosis.v4", b"wrong"), "unauthorized"),
        ((b"symbiosis.v4", b"\xff\0"), "unauthorized"),
        ((b"symbiosis.v4", b"wrong", b"more"), "unauthorized"),
    ],
)
def test_who_is_not_let_in(
    one: TransportServers, all_well: None, frames: tuple[bytes, ...], code: str
) -> None:
    failed = one.metric("symbiosis_handshakes_failed_total", reason=code)
    kind, info = request_session(one.directory, *(frames or (b"",)))
    assert (kind, info["code"]) == (b"refused", code)
    assert one.metric("symbiosis_handshakes_failed_total", reason=code) == failed + 1


def test_as_many_sessions_as_allowed_over_all_transports(
    everywhere: Start, checkpoint: Callable[[str], Path]
) -> None:
    few = everywhere(checkpoint("llama"), max_connections=2)
    with few.connect("tls"), few.connect("colocated") as session:
        with pytest.raises(ConnectError, match="as many sessions") as caught:
            few.connect("colocated")
        assert caught.value.retry_after
        with pytest.raises(ConnectError):
            few.connect("tls")
        product(session)


def test_directories_that_are_not_private(one: TransportServers, directory: Path) -> None:
    tmp_path = directory.parent

    def refused(directory: Path, match: str) -> None:
        with pytest.raises(ConfigurationError, match=match):
            ColocatedServer(
                one.service,
                tokens=TokenFile(tmp_path / "tokens"),
                directory=directory,
                connections=Connections(one.service.metrics, one.service.engine.loop, ConnectionLimits(1, 1)),
            )

    refused(one.directory, "another executor is at work")
    opened = tmp_path / "open"
    opened.mkdir(mode=0o755)
    refused(opened, "open to others: its mode is 755")
    with pytest.raises(ConnectError, match=r"not trusted.*open to others"):
        open_colocated(f"ipc://{opened}", "token", 1.0)
    link = tmp_path / "link"
    link.symlink_to(one.directory)
    refused(link, "not a directory")
    refused(tmp_path / "no" / "parent", "No such file")
    refused(Path("relative"), "not a co-located executor's URL")
    refused(tmp_path / ("x" * 90), "too long a path")
    if os.geteuid() == 0:
        os.chown(opened, 1234, 1234)
        refused(opened, "belongs to another user")


def test_where_nobody_listens() -> None:
    with short_directory() as empty:
        with pytest.raises(ConnectError, match="No such file"):
            open_colocated(f"ipc://{empty / 'nothing'}", "token", SECONDS)
        with pytest.raises(ConnectError, match="nobody listens"):
            open_colocated(f"ipc://{empty}", "token", SECONDS)


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """Sockets want short paths, which pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="symbiosis-") as name:
        yield Path(name)


@contextlib.contextmanager
def scripted_listener(*answer: bytes) -> Iterator[str]:
    """An executor that answers one request, and says nothing more."""
    stop, listening = threading.Event(), threading.Event()

    def run(directory: Path) -> None:
        with zmq.Context.instance().socket(zmq.ROUTER) as listener:  # of this thread alone: ZeroMQ insists
            listener.linger = 1000
            listener.bind(f"ipc://{directory}/door")
            listening.set()
            while not stop.is_set():
                if listener.poll(20):
                    who, *_ = listener.recv_multipart()
                    listener.send_multipart([who, *answer])

    with short_directory() as directory:
        thread = threading.Thread(target=run, args=(directory,))
        thread.start()
        try:
            assert listening.wait(SECONDS)
            yield f"ipc://{directory}"
        finally:
            stop.set()
            thread.join(SECONDS)


GOOD = {
    "session": "session-0123456789abcdef",
    "pid": os.getpid(),
    "descriptor": 0,
    "memory": "symbiosis-0123456789abcdef",
    "size": 1 << 20,
    "max_size": 1 << 22,
}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"session": "../../etc/passwd"}, "cannot be"),
        ({"memory": "../shm/other"}, "cannot be"),
        ({"pid": -1}, "cannot be"),
        ({"descriptor": -1}, "cannot be"),
        ({"size": 0}, "cannot be"),
        ({"max_size": 1 << 62}, "cannot be"),
        ({"max_size": 1 << 10}, "cannot be"),
        ({"more": 1}, "not a valid"),
        ({"pid": 2**22 + 1}, "cannot be opened"),
        ({}, "is something else|cannot be opened"),  # standard input
    ],
)
def test_an_executor_that_offers_no_memory(change: dict[str, Any], match: str) -> None:
    body = json.dumps(GOOD | change).encode()
    with (
        scripted_listener(b"opened", body) as url,
        pytest.raises(ConnectError, match=match),
    ):
        open_colocated(url, "token", SECONDS)


@pytest.mark.parametrize(
    ("sealed", "mode", "size"), [(False, 0o600, 1 << 20), (True, 0o666, 1 << 20), (True, 0o600, 1 << 12)]
)
def test_memory_that_could_be_cut_off_or_is_others(sealed: bool, mode: int, size: int) -> None:
    import fcntl

    descriptor = os.memfd_create(GOOD["memory"], os.MFD_ALLOW_SEALING)  # type: ignore[arg-type]
    os.fchmod(descriptor, mode)
    os.ftruncate(descriptor, size)
    if sealed:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    body = json.dumps(GOOD | {"descriptor": descriptor}).encode()
    try:
        with (
            scripted_listener(b"opened", body) as url,
            pytest.raises(ConnectError, match="something else"),
        ):
            open_colocated(url, "token", SECONDS)
    finally:
        os.close(descriptor)


def test_another_version() -> None:
    body = b'{"code":"protocol_version","message":"I speak symbiosis.v9"}'
    with (
        scripted_listener(b"refused", body) as url,
        pytest.raises(ProtocolVersionError, match=r"v9; this tenant speaks symbiosis\.v4"),
    ):
        open_colocated(url, "token", SECONDS)


# -- executors in processes of their own -----------------------------------------------------------


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as folder:
        yield folder / "made"


def connect(executor: Executor, directory: Path, **options: Any) -> tenant_sdk.Session:
    given = {"token": executor.token, "privacy": "plain", "patience": 0.0} | options
    return tenant_sdk.connect(f"ipc://{directory}", **given)


def test_an_executor_that_is_killed_and_the_next_one_that_drains(
    serve_process: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
    directory: Path,
    threads: ThreadPoolExecutor,
) -> None:
    first = serve_process(checkpoint("llama"), "--local-dir", str(directory))
    assert first.process is not None
    with connect(first, directory) as session, connect(first, directory) as impatient:
        expected = product(session)
        product(impatient)
        # It dies between a handshake and the session's first message, too.
        request_session(directory, b"symbiosis.v4", first.token.encode())
        first.process.send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{first.process.pid}/stat")
        eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
        impatient.executor.connection.channel.timeout = 0.5  # only now: until here, slow is not silent
        with pytest.raises(RequestTimeout, match="no progress"):
            product(impatient)
        waiting = [threads.submit(product, session, rows) for rows in (1, 3000)]
        eventually(lambda: sum(p.waited for p in session.executor.connection.channel._pending.values()) == 2)
        first.process.kill()
        for future in waiting:
            assert isinstance(error_of(future), ConnectionLost)
        assert len(list(directory.glob("session-*"))) == 3
        with pytest.raises(ConnectError, match="nobody listens"):
            product(session)
        (directory / "session-notes.txt").write_text("the operator's own")
        second = serve_process(checkpoint("llama"), "--local-dir", str(directory))
        assert second.process is not None
        assert second.log is not None
        assert sorted(os.listdir(directory)) == ["door", "session-notes.txt"]
        assert torch.equal(product(session), expected)  # it connects again
        product(session, 3000)
        assert memories(second.process.pid) == 1
        channel = session.executor.connection.channel
        second.process.terminate()
        assert second.process.wait(SECONDS) == 0
        assert "stopped\n" in second.log.read_text()
        with pytest.raises(ConnectionLost, match="it is shutting down"):
            channel.ping()
    assert os.listdir(directory) == ["session-notes.txt"]


# -- the tenant's side -----------------------------------------------------------------------------


def test_areas() -> None:
    areas = Areas()
    assert [areas.allocate(64, 256) for _ in range(5)] == [0, 64, 128, 192, None]
    areas.free(64, 64)
    areas.free(128, 64)
    assert areas.allocate(192, 256) is None
    assert areas.allocate(128, 256) == 64
    assert areas.allocate(64, 320) == 256
    assert areas.allocate(0, 320) == 0  # needs no room
    areas.free(0, 0)


def test_many_requests_in_flight_and_waited_for_in_any_order(one: TransportServers, all_well: None) -> None:
    """More than the executor allows at once, and more than there is memory for."""
    with one.connect("colocated") as session:
        remote = session.executor
        expected = product(session)
        pending = []
        for i in range(300):
            x = torch.full((1 + i % 3 * 1000, 64), 1.0)
            pending.append(remote.submit(Operation.PRODUCT, ProductKey(0, Direction.FORWARD, 1), [x]))
        for answer in reversed(pending):
            (payload,) = answer.result()
            torch.testing.assert_close(payload[-1:], expected)


def test_the_largest_request_fits(everywhere: Start, checkpoint: Callable[[str], Path]) -> None:
    small = everywhere(checkpoint("llama"), limits=Limits(max_message_bytes=1 << 16, max_rows=1 << 16))
    with small.connect("colocated") as session:
        assert product(session, 256).shape == (256, 64)
        assert product(session, 2560).shape == (2560, 64)


def test_the_doctor(one: TransportServers, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setenv("TOKEN", one.token)
    found = list(examine(Target(one.local.url, token=Secret("the token", "TOKEN"))))
    assert [f.step for f in found][:6] == ["url", "directory", "token", "protocol", "manifest", "digest"]
    assert all(f.ok for f in found)
    found = list(examine(Target(one.local.url)))
    assert [(f.step, f.ok) for f in found] == [("url", True), ("protocol", True), ("token", None)]
    monkeypatch.setenv("TOKEN", "wrong")
    assert list(examine(Target(one.local.url, token=Secret("the token", "TOKEN"))))[-1].step == "token"
    last = list(examine(Target(f"ipc://{directory}", token=Secret("the token", "TOKEN"))))[-1]
    assert (last.step, last.ok) == ("directory", False)
    assert "--local-dir" in last.remedy
    assert list(examine(Target("ipc://relative")))[-1].step == "url"


def test_operations_over_zeromq_and_through_the_pipe(one: TransportServers, all_well: None) -> None:
    """A product may come either way; its answer comes through the pipe."""
    with RawTenant(one.directory, one.token) as raw:
        raw.hello()
        raw.map[:ROW] = struct.pack("<64f", *[1.0] * 64)
        raw.say(product_header(1, 64), places=(0, 512))
        fields = raw.read_answer()
        assert (fields.operation, fields.request_id, fields.columns) == (REPLY, 7, 64)
        by_socket = raw.map[512 : 512 + ROW]
        raw.ask(product_header(1, 64, request_id=8), 0, 1024)
        assert raw.read_answer().request_id == 8
        assert raw.map[1024 : 1024 + ROW] == by_socket != bytes(ROW)
        assert (PRODUCT, WELCOME) == (3, 2)
