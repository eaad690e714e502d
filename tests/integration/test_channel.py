"""A tenant's connection: many threads on it, who of them leads, and its end."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from channels import answer, ask, channel_to, echo, error_of, submit, until_the_end
from raw_peers import (
    BINARY,
    CLOSE,
    PING,
    PONG,
    REPLY,
    SECONDS,
    Fields,
    Peer,
    eventually,
    frame,
    scripted_executor,
)

import tenant_sdk.connection.websocket_channel as channel_module
from shared.errors import ConnectionLost, RequestTimeout, SymbiosisError
from shared.wire.frames import RECORD_BYTES
from tenant_sdk.connection.channel import Channel
from tenant_sdk.connection.handshake import client_context, open_connection
from tenant_sdk.connection.websocket_channel import WebsocketChannel

pytest_plugins = ("wire_fixtures",)


# -- many requests ---------------------------------------------------------------------------------


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
            payload = future.result(timeout=SECONDS).payload
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


def test_an_answer_that_tls_has_decrypted_already(tls_dir: Path) -> None:
    """The end of one answer and all of the next in one TLS record: no byte is left in the socket."""

    def script(peer: Peer) -> None:
        data = b""
        for _ in range(2):
            fields, body = peer.receive()
            data += frame(struct.pack("<BBBBIIIIHHQ", *fields._replace(operation=REPLY)) + body)
        assert len(data) > RECORD_BYTES
        peer.send(data)
        until_the_end(peer)

    with channel_to(tls_dir, script) as channel:
        first, second = submit(channel, 1250), submit(channel)
        assert channel.wait(first).payload is not None
        assert channel.wait(second).payload is not None


# -- who leads -------------------------------------------------------------------------------------


def test_leadership_goes_to_a_thread_that_still_waits(tls_dir: Path, threads: ThreadPoolExecutor) -> None:
    first_done = threading.Event()

    def script(peer: Peer) -> None:
        requests = [peer.receive() for _ in range(3)]
        answer(peer, *requests[0])
        assert first_done.wait(SECONDS)
        for one in requests[1:]:
            answer(peer, *one)

    with channel_to(tls_dir, script) as channel:
        first = submit(channel, value=1.0)
        others = [submit(channel, value=float(i)) for i in (2, 3)]
        leader = threads.submit(channel.wait, first)
        eventually(lambda: first.leads or first.done)
        followers = [threads.submit(channel.wait, one) for one in others]
        eventually(lambda: all(one.waited for one in others))
        assert leader.result(timeout=SECONDS).payload is not None
        eventually(lambda: sum(one.leads for one in others) == 1)
        first_done.set()
        for i, future in zip((2, 3), followers, strict=True):
            payload = future.result(timeout=SECONDS).payload
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
        assert interrupted.wait(SECONDS)
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


def test_ctrl_c_before_a_follower_sleeps(tls_dir: Path, threads: ThreadPoolExecutor) -> None:
    """The moment after it may be chosen to lead, and before it waits."""

    class Interrupting:
        """A lock that lets Ctrl-C through, once, as it is released by the main thread."""

        def __init__(self, lock: Any) -> None:
            self.lock, self.armed = lock, True

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()
            if self.armed and threading.current_thread() is threading.main_thread():
                self.armed = False
                raise KeyboardInterrupt

    interrupted = threading.Event()

    def script(peer: Peer) -> None:
        requests = [peer.receive() for _ in range(2)]
        assert interrupted.wait(SECONDS)
        answer(peer, *requests[0])
        answer(peer, *requests[1])
        echo(peer)

    with channel_to(tls_dir, script) as channel:
        first, mine = submit(channel), submit(channel)
        leader = threads.submit(channel.wait, first)
        eventually(lambda: first.leads)
        channel._lock = Interrupting(channel._lock)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            channel.wait(mine)
        interrupted.set()
        assert error_of(leader) is None
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
            assert self.go.wait(SECONDS)
            assert self.sock.fileno() >= 0
            assert self.sock.version() == "TLSv1.3", "the encryption is gone"
            return self.sock.send(data)

    with scripted_executor(tls_dir, echo) as url:
        held = Held(open_connection(url, "token", client_context(tls_dir / "ca.pem"), SECONDS))
        channel = WebsocketChannel(held, url, timeout=20, entropy=os.urandom)  # type: ignore[arg-type]
        leader = threads.submit(ask, channel)
        assert held.sending.wait(SECONDS)
        channel.close()
        held.go.set()
        error = error_of(leader)
        assert isinstance(error, ConnectionLost), repr(error)
        eventually(lambda: held.sock.fileno() == -1)


@pytest.mark.parametrize("reader", ["request", "keep-alive"])
def test_a_read_that_does_not_end_is_ended(
    reader: str, tls_dir: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As OpenSSL's, as long as a peer sends records without data: nothing else sees a timeout then."""
    if reader == "keep-alive":
        monkeypatch.setattr(channel_module, "KEEPALIVE_SECONDS", 0.02)

    def script(peer: Peer) -> None:
        while True:
            peer.send(frame(b"", PONG))

    with scripted_executor(tls_dir, script) as url:
        sock = open_connection(url, "token", client_context(tls_dir / "ca.pem"), SECONDS)
        channel = WebsocketChannel(sock, url, timeout=0.5, entropy=os.urandom)
        socket.socket.settimeout(sock, None)
        reading = threading.Event()

        def endless(_: memoryview) -> int:
            reading.set()
            while socket.socket.recv(sock, 1 << 16, socket.MSG_PEEK):
                os.read(sock.fileno(), 1 << 16)
            return 0

        monkeypatch.setattr(sock, "recv_into", endless)
        if reader == "keep-alive":
            assert reading.wait(SECONDS)
        assert isinstance(error_of(threads.submit(ask, channel)), RequestTimeout)
        channel.close()


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
    with channel_to(tls_dir, lambda _: leave.wait(SECONDS) and None, timeout=0.1) as channel:

        def broken() -> bool:
            return isinstance(channel._broken, SymbiosisError)

        eventually(broken)
        with pytest.raises(RequestTimeout):
            submit(channel)
        leave.set()
