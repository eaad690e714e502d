"""A tenant's connection to executors that stop, die, lie or refuse."""

from __future__ import annotations

import json
import signal
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from channels import ask, channel_to, echo, error_of, submit, until_the_end
from clocks import SimulatedClock
from conftest import Executor
from raw_peers import (
    ERROR,
    PING,
    PONG,
    REPLY,
    SECONDS,
    TEXT,
    WELCOME,
    Peer,
    eventually,
    frame,
    header,
)

from shared.errors import ConnectError, ConnectionLost, RequestRefused, RequestTimeout, WireError
from shared.wire.header import Direction, Operation
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.connection.replicas.reconnecting import single_replica

pytest_plugins = ("wire_fixtures",)


def _state(task: Path) -> str:
    """Of a thread, such as T: stopped."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def test_an_executor_that_stops_and_one_that_is_killed(
    serve_process: Callable[..., Executor], checkpoint: Callable[[str], Path], threads: ThreadPoolExecutor
) -> None:
    executor = serve_process(checkpoint("llama"))
    assert executor.process is not None
    with executor.connect() as patient, executor.connect() as impatient:

        def work(session: Any) -> None:
            x = torch.ones((4, 64))
            session.executor.submit(Operation.PRODUCT, ProductKey(0, Direction.FORWARD, 1), [x]).result()

        work(patient)
        work(impatient)
        executor.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{executor.process.pid}/task")
        eventually(lambda: all(_state(task) == "T" for task in tasks.iterdir()))
        waiting = [threads.submit(work, patient) for _ in range(3)]
        # Only now: until here, slow is not silent.
        impatient.executor.connection.channel.timeout = 1.0
        failed = error_of(threads.submit(work, impatient))
        assert isinstance(failed, RequestTimeout)
        assert "made no progress for 1 s" in str(failed)
        with pytest.raises(ConnectError):
            executor.connect(timeout=1.0)
        assert not any(future.done() for future in waiting)
        executor.process.kill()  # also a stopped process
        executor.process.wait()  # or its port may still take connections
        for future in waiting:
            assert isinstance(error_of(future), ConnectionLost)
        with pytest.raises(ConnectError, match="is the executor running"):
            work(patient)


@pytest.mark.parametrize("rows", [1, 1 << 21])
def test_an_executor_that_does_not_read_or_answer(tls_dir: Path, rows: int) -> None:
    """32 MiB do not fit into the sockets, so here not even the request can be sent."""
    leave = threading.Event()
    with channel_to(tls_dir, lambda _: leave.wait(SECONDS) and None, timeout=0.2) as channel:
        with pytest.raises(RequestTimeout, match="doctor"):
            ask(channel, rows)
        leave.set()


def test_slow_progress_is_progress(tls_dir: Path) -> None:
    """The timeout is for silence: this answer takes longer, in pieces."""
    clock, readers = SimulatedClock(), list[Any]()

    def script(peer: Peer) -> None:
        fields, body = peer.receive()
        data = frame(struct.pack("<BBBBIIIIHHQ", *fields._replace(operation=REPLY)) + body)
        for at in range(0, len(data), 8):
            before = readers[0].progress
            clock.time += 0.7 * SECONDS
            peer.send(data[at : at + 8])
            eventually(lambda before=before: readers[0].progress > before)  # type: ignore[misc]

    with channel_to(tls_dir, script, timeout=SECONDS, clock=clock) as channel:
        readers.append(channel._reader)  # type: ignore[attr-defined]
        assert ask(channel).payload is not None


def test_the_timeout_counts_from_the_last_progress(tls_dir: Path) -> None:
    """To the second, on the clock that it is given; pings are none."""
    clock = SimulatedClock()

    def script(peer: Peer) -> None:
        peer.receive()
        clock.time += SECONDS - 1.0
        peer.send(peer.frame(b"", PING))
        assert peer.receive_frame()[0] == PONG  # it goes on
        clock.time += 2.0
        peer.send(peer.frame(b"", PING))
        until_the_end(peer)

    with (
        channel_to(tls_dir, script, timeout=SECONDS, clock=clock) as channel,
        pytest.raises(RequestTimeout, match=f"made no progress for {SECONDS:g} s"),
    ):
        ask(channel)


def reply(request_id: int = 1, **change: int) -> bytes:
    """The header of the answer to ``ask``, but for the fields given."""
    fields = {"direction": 1, "dtype": 1, "rows": 1, "columns": 4, "members": 1}
    return header(REPLY, **(fields | {"request_id": request_id} | change))


def error_message(body: bytes, request_id: int = 1) -> bytes:
    """A frame with an ERROR."""
    return frame(header(ERROR, request_id=request_id, rows=1, columns=len(body)) + body)


ROW = bytes(16)
INFO = json.dumps({"code": "too_large", "message": "no", "retry_after": None}).encode()
HUGE = 2**32 - 1
HOSTILE: dict[str, tuple[bytes, str]] = {
    "an answer nobody asked for": (frame(reply(2) + ROW), "unexpected"),
    "an answer to nothing": (frame(reply(0) + ROW), "unexpected"),
    "another group": (frame(reply(group=1) + ROW), "unexpected"),
    "another direction": (frame(reply(direction=2) + ROW), "unexpected"),
    "another dtype": (frame(reply(dtype=6) + ROW), "unexpected"),
    "more rows": (frame(reply(rows=2) + ROW * 2), "unexpected"),
    "fewer columns": (frame(reply(columns=3) + ROW[:12]), "unexpected"),
    "other members": (frame(reply(members=2) + ROW), "unexpected"),
    "gigabytes announced": (frame(reply(rows=1 << 28), fin=False), "unexpected"),
    "exabytes announced": (frame(reply(rows=HUGE, columns=HUGE), fin=False), "unexpected"),
    "gigabytes of error": (frame(header(ERROR, rows=1, columns=HUGE), fin=False), "unexpected"),
    "a huge frame": (frame(reply(), length=1 << 40), "too_large"),
    "two answers at once": (frame(reply() + ROW) * 2, "unexpected"),
    "a welcome": (frame(header(WELCOME, rows=1, columns=2) + b"{}"), "unexpected"),
    "payload too short": (frame(reply() + ROW[:-1]), "payload_length"),
    "payload too long": (frame(reply() + ROW + b"\0"), "payload_length"),
    "masked": (frame(reply() + ROW, mask=b"abcd"), "frame"),
    "text": (frame(b"hello", TEXT), "text"),
    "another version": (frame(b"\1" + reply()[1:] + ROW), "protocol_version"),
    "unknown operation": (frame(b"\4\x09" + reply()[2:] + ROW), "operation"),
    "request class": (frame(reply(request_class=1) + ROW), "request_class"),
    "an error about everything": (error_message(INFO, 0), "too_large"),
    "an error that is none": (error_message(b"oops"), "control_message"),
    "an error with more fields": (error_message(INFO[:-1] + b',"path":"/"}'), "control_message"),
    "an error about nothing": (error_message(INFO, 9), "unexpected"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_ends_the_session(
    tls_dir: Path, monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor, name: str
) -> None:
    data, code = HOSTILE[name]
    empty = torch.empty

    def watched(size: Any, **options: Any) -> torch.Tensor:
        assert empty(size, **options, device="meta").nbytes <= 1 << 20
        return empty(size, **options)

    def script(peer: Peer) -> None:
        peer.receive()
        peer.receive()
        peer.send(data)
        until_the_end(peer)

    with channel_to(tls_dir, script) as channel:
        monkeypatch.setattr(torch, "empty", watched)
        pending = [submit(channel), submit(channel)]
        if name == "an answer nobody asked for":
            channel._protocol.answered(2)
        futures = [threads.submit(channel.wait, one) for one in pending]
        errors = [error_of(future) for future in futures]
        if name == "two answers at once":  # the first of them is good
            assert errors.pop(0) is None
        for error in errors:
            assert isinstance(error, WireError), repr(error)
            assert error.code == code
        with pytest.raises(WireError):
            submit(channel)


def test_a_refused_request_leaves_the_session_open(tls_dir: Path) -> None:
    def script(peer: Peer) -> None:
        peer.receive()
        info = {"code": "busy", "message": "try later", "retry_after": 1.5}
        peer.control(ERROR, info)
        echo(peer)

    with channel_to(tls_dir, script) as channel:
        with pytest.raises(RequestRefused, match="try later") as caught:
            ask(channel)
        assert (caught.value.code, caught.value.retry_after) == ("busy", 1.5)
        assert ask(channel).payload is not None


def test_an_end_without_a_close_frame(tls_dir: Path) -> None:
    with (
        channel_to(tls_dir, lambda peer: peer.send(frame(reply() + ROW)[:20])) as channel,
        pytest.raises(ConnectionLost, match="new session"),
    ):
        ask(channel)


@pytest.mark.parametrize("manifest", [b"{}", b"\xff", b'{"server":1}'])
def test_a_welcome_that_is_no_manifest(tls_dir: Path, manifest: bytes) -> None:
    def script(peer: Peer) -> None:
        peer.receive()
        peer.message(header(WELCOME, rows=1, columns=len(manifest)), manifest)
        peer.at_end()

    with channel_to(tls_dir, script) as channel, pytest.raises(WireError, match="control_message"):
        RemoteExecutor(single_replica(lambda: channel))
