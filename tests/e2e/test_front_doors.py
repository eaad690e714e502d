"""Front doors: an executor whose TLS is done by processes of their own, which may die without it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from channels import error_of
from conftest import Executor, executor_processes
from raw_colocated import memories
from raw_peers import HELLO, PING, REPLY, SECONDS, TEXT, Peer, eventually, header, open_raw, product
from transports import Start

import tenant_sdk
from provider.executor.base import BaseExecutor
from provider.observe.metrics import Metrics
from provider.serve.front_door import Plan
from provider.serve.front_doors import FrontDoors
from provider.serve.tokens import TokenFile
from shared.errors import AuthenticationError, ConfigurationError, ConnectionLost
from shared.wire.header import Direction, Operation

pytest_plugins = ("transport_fixtures", "wire_fixtures")

DOORS = 2
TENANT_CONNECTIONS = 4
ROW = bytes(256)


@pytest.fixture(scope="module")
def served(
    tls_dir: Path,
    token_file: tuple[Path, str],
    checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Executor]:
    """An executor with two front doors; its last test ends it."""
    work = tmp_path_factory.mktemp("served")
    with executor_processes(tls_dir, token_file, work) as start:
        yield start(
            checkpoint("llama"),
            *("--front-doors", str(DOORS), "--tenant-connections", str(TENANT_CONNECTIONS)),
        )


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], Path]) -> BaseExecutor:
    return BaseExecutor(checkpoint("llama"))


def children(executor: Executor) -> set[int]:
    """Of an executor that are alive, or were not waited for."""
    assert executor.process is not None
    pid = executor.process.pid
    found = set[int]()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError):  # it has ended
            found |= set(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def counted(executor: Executor, name: str) -> float:
    """A sample of the metrics page; 0 if it was never counted."""
    with urllib.request.urlopen(f"{executor.admin_url}/metrics", timeout=SECONDS) as page:
        found = re.search(rf"(?m)^{re.escape(name)} (\S+)$", page.read().decode())
    return float(found[1]) if found else 0.0


def at_rest(executor: Executor) -> None:
    """Nobody is connected any more."""
    eventually(lambda: counted(executor, "symbiosis_connections") == 0)


def ask(session: tenant_sdk.Session, rows: torch.Tensor) -> torch.Tensor:
    """A forward product of group 0's three members, side by side."""
    return torch.cat(session._remote.product(Operation.PRODUCT, 0, Direction.FORWARD, 7, [rows]), 1)


def expected(reference: BaseExecutor, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat(reference.product(0, Direction.FORWARD, 7, [rows]), 1)


def draw(seed: int, rows: int) -> torch.Tensor:
    return torch.randn((rows, 64), generator=torch.Generator().manual_seed(seed))


def test_tenants_at_both_doors_at_once(
    served: Executor, reference: BaseExecutor, token_file: tuple[Path, str], threads: ThreadPoolExecutor
) -> None:
    tokens = [served.token, TokenFile(token_file[0]).add("bob")]
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(served.connect(token=tokens[i % 2])) for i in range(6)]
        held = {pid: memories(pid) for pid in children(served)}
        # The kernel wakes whoever has waited longest, but either may have been late to wait again.
        assert len(held) == DOORS
        assert sum(held.values()) == len(sessions)
        assert counted(served, "symbiosis_connections") == len(sessions)

        def work(seed: int) -> None:
            for size in (1, 3, 300, 1):
                x = draw(seed + size, size)
                torch.testing.assert_close(ask(sessions[seed], x), expected(reference, x))

        for future in [threads.submit(work, seed) for seed in range(len(sessions))]:
            assert error_of(future) is None
    at_rest(served)
    for tenant in ("alice", "bob"):
        assert counted(served, f'symbiosis_tenant_rows_total{{tenant="{tenant}"}}') == 3 * 305


def test_a_wrong_token_and_other_failed_handshakes_are_counted(served: Executor) -> None:
    reason = 'symbiosis_handshakes_failed_total{{reason="{}"}}'.format
    with pytest.raises(AuthenticationError, match="refused the token"):
        served.connect(token="not-a-token")
    eventually(lambda: counted(served, reason("unauthorized")) == 1)
    with pytest.raises(Exception, match="HTTP 400"):
        open_raw(served, subprotocol="symbiosis.v9")
    eventually(lambda: counted(served, reason("protocol_version")) == 1)


def test_a_tenant_with_too_many_connections_is_turned_away(served: Executor) -> None:
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(served.connect()) for _ in range(TENANT_CONNECTIONS)]
        with pytest.raises(ConnectionLost, match="too many connections") as caught:
            served.connect()
        assert caught.value.retry_after
        with open_raw(served) as peer:
            assert peer.receive_close() == 1013
        ask(sessions[0], draw(0, 1))
    assert counted(served, 'symbiosis_handshakes_failed_total{reason="tenant_full"}') == 2
    at_rest(served)


def script(*frames: Callable[[Peer], bytes]) -> Callable[[Peer], list[Any]]:
    """Say HELLO and these, and note what comes back until the end."""

    def run(peer: Peer) -> list[Any]:
        peer.hello()
        peer.send(b"".join(frame(peer) for frame in frames))
        told: list[Any] = []
        while True:
            try:
                fields, body = peer.receive()
                told.append((fields, body))
            except EOFError as error:  # with the close frame's code, or without one
                return [*told, str(error)]
            if fields.request_id == LAST:
                return told

    return run


LAST = 99


def last(peer: Peer) -> bytes:
    """A request that is answered, and after which the script ends."""
    return peer.frame(product(1, 64, request_id=LAST) + struct.pack("<64f", *range(64)))


@pytest.mark.parametrize(
    "run",
    [
        script(lambda p: p.frame(product(1, 64) + ROW, length=(64 << 20) + 33)),  # too large a frame
        script(lambda p: p.frame(product(1 << 18, 64) + ROW, fin=False), last),  # a fragment amid a message
        script(lambda p: p.frame(header(77) + ROW), last),  # no operation
        script(lambda p: p.frame(header(HELLO, rows=1, columns=2) + b"{}"), last),  # a second HELLO
        script(lambda p: p.frame(product(2, 64) + ROW), last),  # another length
        script(lambda p: p.frame(product(1, 63) + ROW[:252]), last),  # another width
        script(lambda p: p.frame(product(70_000, 64) + bytes(256 * 70_000)), last),  # too many rows
        script(lambda p: p.frame(product(1, 64) + struct.pack("<64f", *[float("nan")] * 64)), last),
        script(lambda p: p.frame(header(5, rows=1, columns=3, request_id=3) + b"{,}"), last),
        script(lambda p: p.frame(header(5, rows=1, columns=59) + FETCH_NOTHING), last),
        script(lambda p: p.frame(b"no header")),
        script(lambda p: p.frame(b"text", TEXT)),
        script(lambda p: p.frame(product(1, 64) + ROW, mask=b"")),
        script(lambda p: p.frame(product(1, 64, version=1) + ROW)),
    ],
)
def test_what_breaks_the_protocol_gets_the_same_answers(
    run: Callable[[Peer], list[Any]], served: Executor, llama: Executor
) -> None:
    """From an executor without front doors and from one with some."""
    with open_raw(llama) as peer:
        without = run(peer)
    with open_raw(served) as peer:
        assert run(peer) == without
    at_rest(served)


FETCH_NOTHING = b'{"kind":"parameter","name":"nothing","start":0,"stop":9999}'


def test_a_hello_is_said_as_soon_as_its_header_is_there(served: Executor) -> None:
    with open_raw(served) as peer:
        peer.send(peer.frame(header(HELLO, rows=1, columns=40) + bytes(7), fin=False))
        peer.send(peer.frame(b"", opcode=0))
        assert peer.receive_error() == (1, "payload_length")
        peer.send(last(peer))
        assert peer.receive()[0].operation == REPLY
    assert counted(served, 'symbiosis_refused_total{code="payload_length"}') >= 1


def test_requests_of_all_sizes_in_one_write(served: Executor, reference: BaseExecutor) -> None:
    """The end of one and the beginning of the next are in one TLS record, and lie in the same memory."""
    sizes = [80, 81, 1, 70, 1, 1, 2000, 90, 2]  # of 256 bytes a row; a TLS record has 16 KiB
    with open_raw(served) as peer:
        peer.hello()
        messages = [
            peer.frame(product(n, 64, request_id=i, members=7) + draw(i, n).numpy().tobytes())
            for i, n in enumerate(sizes, 1)
        ]
        peer.send(b"".join(messages))  # the answers until the large one fit into the sockets
        for i, n in enumerate(sizes, 1):
            fields, body = peer.receive()
            assert (fields.operation, fields.request_id) == (REPLY, i)
            blocks = reference.product(0, Direction.FORWARD, 7, [draw(i, n)])
            got = torch.frombuffer(bytearray(body), dtype=torch.float32)
            torch.testing.assert_close(got, torch.cat([block.reshape(-1) for block in blocks]))
        peer.send(peer.frame(b"alive?", PING))
        assert peer.receive_frame() == (10, b"alive?")
    at_rest(served)


def test_a_door_that_is_killed(served: Executor, reference: BaseExecutor) -> None:
    x = draw(0, 2)
    before = children(served)
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(served.connect())]
        (at,) = [pid for pid in before if memories(pid)]
        while memories(at) == len(sessions):  # until one is at the other door
            assert len(sessions) < TENANT_CONNECTIONS
            sessions.append(stack.enter_context(served.connect()))
        lost, goes_on = [s._remote.channel for s in sessions[:-1]], sessions[-1]
        other_channel = goes_on._remote.channel
        os.kill(at, signal.SIGKILL)
        for channel in lost:
            with pytest.raises(ConnectionLost):
                channel.ping()
        torch.testing.assert_close(ask(goes_on, x), expected(reference, x))
        assert goes_on._remote.channel is other_channel
        torch.testing.assert_close(ask(sessions[0], x), expected(reference, x))  # it connects again
        eventually(lambda: len(children(served)) == DOORS)
        assert len(children(served) & before) == DOORS - 1
    at_rest(served)
    assert served.log is not None
    assert f"ended with status {-signal.SIGKILL}" in served.log.read_text().replace("\n", " ")


def ping_for_ever(session: tenant_sdk.Session) -> None:
    channel = session._remote.channel  # the session would open a new one
    while True:
        channel.ping()


def test_sigterm_answers_drains_and_leaves_nobody(served: Executor) -> None:
    process, doors = served.process, children(served)
    assert process is not None
    assert served.log is not None
    with open_raw(served) as peer, served.connect() as idle:
        peer.hello()
        peer.message(product(65_536, 64, group=2, members=0b11), bytes(65_536 * 256))
        peer._early = peer.sock.recv(14)  # the door is in the middle of sending
        process.send_signal(signal.SIGTERM)

        def health() -> int:
            try:
                with urllib.request.urlopen(f"{served.admin_url}/healthz", timeout=SECONDS) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code

        eventually(lambda: health() == 503)
        with pytest.raises(ConnectionLost, match=r"shutting down|broke"):
            ping_for_ever(idle)
        assert process.poll() is None
        fields, body = peer.receive()
        assert (fields.operation, len(body)) == (REPLY, 65_536 * 192 * 4)
        assert peer.receive_close() == 1001
    assert process.wait(timeout=SECONDS) == 0
    assert not any(map(alive, doors))
    log = served.log.read_text()
    assert "stopped\n" in log
    assert "Traceback" not in log


def test_an_executor_that_is_killed_takes_its_doors_along(
    serve_process: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    with tempfile.TemporaryDirectory(prefix="symbiosis-") as name:  # it cannot remove one of its own
        options = ("--front-doors", "1", "--local-dir", f"{name}/local")
        executor = serve_process(checkpoint("llama"), *options)
        assert executor.process is not None
        doors = children(executor)
        assert len(doors) == 1
        with executor.connect() as session:
            executor.process.kill()
            with pytest.raises(ConnectionLost):
                ping_for_ever(session)
        eventually(lambda: not any(map(alive, doors)))


def test_memory_of_all_is_bounded(everywhere: Start, checkpoint: Callable[[str], Path]) -> None:
    """The first tenant's grows, the second's cannot, for a third there is none."""
    tight = everywhere(checkpoint("llama"), memory_bytes=3 << 20)
    at = Executor(str(tight.where("front door")), tight.token, tight.ca)
    large = product(4000, 64, request_id=3) + bytes(4000 * 256)
    with open_raw(at) as first, open_raw(at) as second:
        for peer in (first, second):
            peer.hello()
        first.send(first.frame(large))
        assert first.receive()[0].operation == REPLY
        second.send(second.frame(large))
        assert second.receive_error() == (3, "overloaded")
        second.send(last(second))
        assert second.receive()[0].operation == REPLY
        with open_raw(at) as third:
            assert third.receive_close() == 1013
    eventually(lambda: tight.metric("symbiosis_connections") == 0)
    assert tight.metric("symbiosis_refused_total", code="overloaded") == 1
    assert tight.metric("symbiosis_handshakes_failed_total", reason="overloaded") == 1


def test_doors_that_cannot_start(llama: Executor, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert llama.server is not None
    plan = Plan(
        listener=llama.server.listener.fileno(),
        url="ipc:///nowhere",
        manifest=llama.server.service.executor.manifest,
        tls_dir=str(tmp_path),
        client_ca=None,
        token_file=str(tmp_path),
        max_connections=1,
        drain_seconds=1.0,
    )
    with pytest.raises(ConfigurationError, match="did not start"):
        FrontDoors(1, plan, Metrics())
    assert "no usable certificate" in capfd.readouterr().err.replace("\n", " ")
