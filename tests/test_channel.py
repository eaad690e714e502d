"""A tenant's connection: many threads on it, hostile executors behind it, and its end."""

from __future__ import annotations

import json
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from conftest import Executor
from raw_peers import (
    BINARY,
    CLOSE,
    ERROR,
    PING,
    PONG,
    REPLY,
    TEXT,
    WELCOME,
    Fields,
    Peer,
    eventually,
    frame,
    header,
    scripted_executor,
)

import tenant_sdk.channel as channel_module
from shared.checkpoint import Checkpoint
from shared.errors import ConnectionLost, RequestRefused, RequestTimeout, SymbiosisError, WireError
from shared.header import Direction, Operation
from shared.protocol import GroupShape
from shared.websocket import Incoming
from tenant_sdk.channel import Channel, Pending
from tenant_sdk.connect import client_context, open_connection
from tenant_sdk.remote import RemoteExecutor

SHAPE = GroupShape(4, (4,))


def submit(channel: Channel, rows: int = 1, value: float = 1.0) -> Pending:
    """A product of rows of 4 equal values."""
    return channel.submit(
        lambda protocol: protocol.product(
            Operation.PRODUCT, 0, SHAPE, Direction.FORWARD, 1, rows, torch.float32
        ),
        [torch.full((rows, 4), value)],
    )


def ask(channel: Channel, rows: int = 1, value: float = 1.0) -> Incoming:
    """The answer of such a product."""
    return channel.wait(submit(channel, rows, value))


def answer(peer: Peer, fields: Fields, body: bytes) -> None:
    """Send the rows back."""
    peer.message(struct.pack("<BBBBIIIIHHQ", *fields._replace(operation=REPLY)), body)


def echo(peer: Peer) -> None:
    """Answer everything."""
    while True:
        answer(peer, *peer.receive())


def until_the_end(peer: Peer) -> None:
    """Read and answer nothing."""
    while not peer.at_end():
        pass


@contextmanager
def channel_to(tls_dir: Path, script: Callable[[Peer], None], *, timeout: float = 20.0) -> Iterator[Channel]:
    """A channel to a scripted executor."""
    with scripted_executor(tls_dir, script) as url:
        sock = open_connection(url, "token", client_context(tls_dir / "ca.pem"), 20)
        channel = Channel(sock, url, timeout=timeout, entropy=os.urandom)
        try:
            yield channel
        finally:
            channel.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """More threads than any test here uses."""
    with ThreadPoolExecutor(32) as pool:
        yield pool


def error_of(future: Future[Any]) -> BaseException | None:
    """What a thread raised, or None; fails if it hangs."""
    return future.exception(timeout=20)


# -- many requests ---------------------------------------------------------------------------------


def test_many_threads_get_their_own_answers(
    llama: Executor, checkpoint: Callable[[str], Path], threads: ThreadPoolExecutor
) -> None:
    weights = [
        Checkpoint(checkpoint("llama")).read(f"model.layers.0.self_attn.{name}_proj.weight") for name in "qkv"
    ]
    with llama.connect() as session:

        def work(seed: int) -> None:
            random, generator = Random(seed), torch.Generator().manual_seed(seed)
            for _ in range(20):
                x = torch.randn((random.choice([1, 2, 7, 300]), 64), generator=generator)
                members = random.randint(1, 7)
                got = session._remote.product(Operation.PRODUCT, 0, Direction.FORWARD, members, [x])
                wanted = [x @ w.T for i, w in enumerate(weights) if members >> i & 1]
                for y, expected in zip(got, wanted, strict=True):
                    torch.testing.assert_close(y, expected)

        for future in [threads.submit(work, seed) for seed in range(16)]:
            assert error_of(future) is None
        assert session.stats.requests == 16 * 20


def test_many_requests_in_flight_and_waited_for_in_any_order(tls_dir: Path) -> None:
    with channel_to(tls_dir, echo) as channel:
        pending = [(i, submit(channel, 1 + i % 3, float(i))) for i in range(200)]
        Random(0).shuffle(pending)
        for i, one in pending:
            payload = channel.wait(one).payload
            assert payload is not None
            assert torch.equal(payload, torch.full((1 + i % 3, 4), float(i)))


def test_answers_may_come_in_any_order(tls_dir: Path, threads: ThreadPoolExecutor) -> None:
    def script(peer: Peer) -> None:
        for one in reversed([peer.receive() for _ in range(8)]):
            answer(peer, *one)

    with channel_to(tls_dir, script) as channel:
        futures = [threads.submit(ask, channel, 1, float(i)) for i in range(8)]
        for i, future in enumerate(futures):
            payload = future.result(timeout=20).payload
            assert payload is not None
            assert payload[0, 0] == i


def test_a_request_larger_than_all_buffers_while_answers_arrive(tls_dir: Path) -> None:
    """Both sides write at once; neither may wait for the other to read first."""
    with channel_to(tls_dir, echo) as channel:
        pending = [submit(channel, 1 << 19, float(i)) for i in range(4)]
        for i, one in enumerate(pending):
            payload = channel.wait(one).payload
            assert payload is not None
            assert payload.shape == (1 << 19, 4)
            assert payload[-1, -1] == i


# -- who leads -------------------------------------------------------------------------------------


def test_leadership_goes_to_a_thread_that_still_waits(tls_dir: Path, threads: ThreadPoolExecutor) -> None:
    first_done = threading.Event()

    def script(peer: Peer) -> None:
        requests = [peer.receive() for _ in range(3)]
        answer(peer, *requests[0])
        assert first_done.wait(20)
        for one in requests[1:]:
            answer(peer, *one)

    with channel_to(tls_dir, script) as channel:
        first = submit(channel, value=1.0)
        others = [submit(channel, value=float(i)) for i in (2, 3)]
        leader = threads.submit(channel.wait, first)
        eventually(lambda: first.leads or first.done)
        followers = [threads.submit(channel.wait, one) for one in others]
        eventually(lambda: all(one.waited for one in others))
        assert leader.result(timeout=20).payload is not None
        eventually(lambda: sum(one.leads for one in others) == 1)
        first_done.set()
        for i, future in zip((2, 3), followers, strict=True):
            payload = future.result(timeout=20).payload
            assert payload is not None
            assert payload[0, 0] == i


def interrupt_main_when(condition: Callable[[], bool]) -> None:
    """Ctrl-C, once the main thread is where the test wants it."""
    eventually(condition)
    # The condition says that wait() was entered; asleep a moment later or not, the signal finds it.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_ctrl_c_in_a_follower_harms_nobody_else(tls_dir: Path, threads: ThreadPoolExecutor) -> None:
    interrupted = threading.Event()

    def script(peer: Peer) -> None:
        requests = [peer.receive() for _ in range(3)]
        assert interrupted.wait(20)
        for one in requests:
            answer(peer, *one)
        echo(peer)

    with channel_to(tls_dir, script) as channel:
        first, mine, third = (submit(channel, value=float(i)) for i in range(3))
        leader = threads.submit(channel.wait, first)
        eventually(lambda: first.leads)
        killer = threads.submit(interrupt_main_when, lambda: mine.waited)
        with pytest.raises(KeyboardInterrupt):
            channel.wait(mine)
        assert error_of(killer) is None
        follower = threads.submit(channel.wait, third)
        eventually(lambda: third.waited)
        interrupted.set()
        assert error_of(leader) is None
        assert error_of(follower) is None
        assert error_of(threads.submit(ask, channel)) is None


def test_ctrl_c_in_the_leader_ends_the_session_for_all(tls_dir: Path, threads: ThreadPoolExecutor) -> None:
    """Part of a message may have been sent, so the stream cannot be continued."""
    with channel_to(tls_dir, until_the_end) as channel:
        mine, other = submit(channel), submit(channel)

        def follow() -> None:
            eventually(lambda: mine.leads)
            channel.wait(other)

        follower = threads.submit(follow)
        killer = threads.submit(interrupt_main_when, lambda: other.waited)
        with pytest.raises(KeyboardInterrupt):
            channel.wait(mine)
        assert error_of(killer) is None
        assert isinstance(error_of(follower), ConnectionLost)
        with pytest.raises(ConnectionLost, match="interrupted"):
            submit(channel)


# -- closing ---------------------------------------------------------------------------------------


def test_closing_while_others_wait(tls_dir: Path, threads: ThreadPoolExecutor) -> None:
    def script(peer: Peer) -> None:
        for _ in range(8):
            peer.receive()
        until_the_end(peer)

    with channel_to(tls_dir, script) as channel:
        pending = [submit(channel) for _ in range(8)]
        futures = [threads.submit(channel.wait, one) for one in pending]
        eventually(lambda: all(one.waited for one in pending))
        channel.close()
        for future in futures:
            assert isinstance(error_of(future), ConnectionLost)
        for again in (submit, ask):
            with pytest.raises(ConnectionLost, match="closed"):
                again(channel)
        with pytest.raises(ConnectionLost, match="closed"):
            channel.ping()
        channel.close()


def test_closing_under_load_raises_nothing_else(tls_dir: Path, threads: ThreadPoolExecutor) -> None:
    def work(channel: Channel) -> None:
        while True:
            ask(channel, 3)

    for round_ in range(15):
        with channel_to(tls_dir, echo) as channel:
            futures = [threads.submit(work, channel) for _ in range(4)]
            for _ in range(round_):
                ask(channel)
            channel.close()
            for future in futures:
                error = error_of(future)
                assert isinstance(error, ConnectionLost), repr(error)


def test_the_socket_is_closed_by_nobody_but_its_leader(tls_dir: Path, threads: ThreadPoolExecutor) -> None:
    """An SSLSocket that is closed under a send sends in the clear what comes next."""

    class Held:
        """A socket that stops inside its first send."""

        def __init__(self, sock: Any) -> None:
            self.sock, self.sending, self.go = sock, threading.Event(), threading.Event()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.sock, name)

        def send(self, data: memoryview) -> int:
            self.sending.set()
            assert self.go.wait(20)
            assert self.sock.fileno() >= 0
            assert self.sock.version() == "TLSv1.3", "the encryption is gone"
            return self.sock.send(data)

    with scripted_executor(tls_dir, echo) as url:
        held = Held(open_connection(url, "token", client_context(tls_dir / "ca.pem"), 20))
        channel = Channel(held, url, timeout=20, entropy=os.urandom)  # type: ignore[arg-type]
        leader = threads.submit(ask, channel)
        assert held.sending.wait(20)
        channel.close()
        held.go.set()
        error = error_of(leader)
        assert isinstance(error, ConnectionLost), repr(error)
        eventually(lambda: held.sock.fileno() == -1)


# -- executors that fail ---------------------------------------------------------------------------


def test_an_executor_that_stops_and_one_that_is_killed(
    serve_process: Callable[..., Executor], checkpoint: Callable[[str], Path], threads: ThreadPoolExecutor
) -> None:
    executor = serve_process(checkpoint("llama"))
    assert executor.process is not None
    with executor.connect() as patient, executor.connect(timeout=0.3) as impatient:

        def work(session: Any) -> None:
            x = torch.ones((4, 64))
            session._remote.product(Operation.PRODUCT, 0, Direction.FORWARD, 1, [x])

        work(patient)
        work(impatient)
        executor.process.send_signal(signal.SIGSTOP)
        waiting = [threads.submit(work, patient) for _ in range(3)]
        started = time.monotonic()
        with pytest.raises(RequestTimeout, match="no progress"):
            work(impatient)
        assert 0.3 <= time.monotonic() - started < 10
        with pytest.raises(RequestTimeout):
            work(impatient)
        assert not any(future.done() for future in waiting)
        executor.process.kill()  # also a stopped process
        for future in waiting:
            assert isinstance(error_of(future), ConnectionLost)
        with pytest.raises(ConnectionLost, match="new session"):
            work(patient)


@pytest.mark.parametrize("rows", [1, 1 << 21])
def test_an_executor_that_does_not_read_or_answer(tls_dir: Path, rows: int) -> None:
    """32 MiB do not fit into the sockets, so here not even the request can be sent."""
    leave = threading.Event()
    with channel_to(tls_dir, lambda _: leave.wait(20) and None, timeout=0.2) as channel:
        with pytest.raises(RequestTimeout, match="doctor"):
            ask(channel, rows)
        leave.set()


def test_slow_progress_is_progress(tls_dir: Path) -> None:
    """The timeout is for silence: this answer takes longer, in pieces."""

    def script(peer: Peer) -> None:
        fields, body = peer.receive()
        data = frame(struct.pack("<BBBBIIIIHHQ", *fields._replace(operation=REPLY)) + body)
        for at in range(0, len(data), 8):
            peer.send(data[at : at + 8])
            threading.Event().wait(0.05)

    with channel_to(tls_dir, script, timeout=0.3) as channel:
        started = time.monotonic()
        assert ask(channel).payload is not None
        assert time.monotonic() - started > 0.3


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
    "another version": (frame(b"\2" + reply()[1:] + ROW), "protocol_version"),
    "unknown operation": (frame(b"\1\x09" + reply()[2:] + ROW), "operation"),
    "reserved": (frame(reply(flags=1) + ROW), "reserved"),
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
        RemoteExecutor(channel, torch.float32)


# -- pings -----------------------------------------------------------------------------------------


def test_an_idle_connection_is_kept_alive(tls_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "KEEPALIVE_SECONDS", 0.02)
    seen: list[int] = []

    def script(peer: Peer) -> None:
        while True:
            opcode, body = peer.receive_frame()
            seen.append(opcode)
            if opcode == PING:
                peer.send(frame(body, PONG))
            elif opcode == BINARY:
                answer(peer, Fields(*struct.unpack_from("<BBBBIIIIHHQ", body)), body[32:])

    with channel_to(tls_dir, script) as channel:
        eventually(lambda: seen.count(PING) >= 3)
        assert ask(channel).payload is not None
    assert set(seen) <= {PING, BINARY, CLOSE}


def test_an_idle_connection_that_died_is_noticed(tls_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "KEEPALIVE_SECONDS", 0.02)
    leave = threading.Event()
    with channel_to(tls_dir, lambda _: leave.wait(20) and None, timeout=0.1) as channel:

        def broken() -> bool:
            return isinstance(channel._broken, SymbiosisError)

        eventually(broken)
        with pytest.raises(RequestTimeout):
            submit(channel)
        leave.set()
