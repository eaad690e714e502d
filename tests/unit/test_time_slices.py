"""A tenant's time slices in the executor's loop: its connections share one in each round, in order."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from provider.engine.loop import Loop
from provider.serve.connection import OPEN
from provider.serve.websocket_connection import DISCARDS, WebsocketConnection
from provider.serve.write_queue import WriteQueue


def test_a_connection_is_called_once_however_often_it_asks() -> None:
    """Its socket tells of itself in each round as well, so calls would become more and more."""
    calls: list[Any] = []
    connection: Any = object.__new__(WebsocketConnection)
    connection._loop = SimpleNamespace(call_soon_threadsafe=calls.append)
    connection._reading, connection._resumes, connection._stage = False, False, OPEN
    connection._session, connection._max_in_flight, connection._outgoing = SimpleNamespace(in_flight=0), 1, []
    connection._set_interest = connection._ready = lambda *_, **__: None
    for _ in range(3):
        connection._resume_soon()
    assert len(calls) == 1
    calls.pop()()
    connection._resume_soon()
    assert len(calls) == 1


def test_what_arrives_at_the_end_is_thrown_away_as_it_is() -> None:
    """Not decrypted, and some of it in a round: a peer may go on sending until its last answer is read."""
    thrown = [0]

    def discard() -> int:
        thrown[0] += 1
        return 1 << 16

    connection: Any = object.__new__(WebsocketConnection)
    connection._sock = SimpleNamespace(discard=discard)  # and nothing that decrypts
    connection._discard_until_end()
    assert thrown == [DISCARDS]


class _Task:
    """Nothing to do."""

    def run_once(self) -> float | None:
        return None

    def idle(self, stop: Any) -> None:
        """Nothing."""


class _Rounds:
    """A loop whose rounds a test makes, and a clock that only work moves."""

    def __init__(self) -> None:
        self.now, self.served = 0.0, list[str]()
        self.loop = Loop(_Task(), lambda: self.now)
        self.loop._thread = threading.current_thread()
        self._reads: dict[str, Any] = {}

    def ask(self, tenant: str, name: str, seconds: float, *, endless: bool = True) -> None:
        """Of a connection whose each callback takes so long; it asks again each time if it is endless."""

        def read(_: float) -> None:
            self.served.append(name)
            self.now += seconds
            if endless:
                self.loop.run_in_time_slice(tenant, 2.0, self._reads[name])

        self._reads.setdefault(name, read)
        self.loop.run_in_time_slice(tenant, 2.0, self._reads[name])

    def round(self) -> list[str]:
        """Who was served in it."""
        self.served.clear()
        self.loop.call_soon_threadsafe(lambda: None)  # so that it does not wait
        self.loop._round()
        return list(self.served)


@pytest.fixture
def rounds() -> Iterator[_Rounds]:
    made = _Rounds()
    yield made
    made.loop._close_descriptors()


def test_connections_of_a_tenant_share_its_seconds_in_order(rounds: _Rounds) -> None:
    """Whoever floods, the others are served."""
    for name in "abcd":
        rounds.ask("alice", name, 1.5)
    assert rounds.served == ["a", "a"]  # before others ask; the second began within 2 s
    served = [rounds.round() for _ in range(4)]
    assert served == [["b", "a"], ["c", "d"], ["b", "a"], ["c", "d"]]


def test_a_tenants_connections_take_no_time_of_others(rounds: _Rounds) -> None:
    for at in range(60):
        rounds.ask("alice", f"a{at}", 0.5)
    for _ in range(5):
        rounds.ask("bob", "bob", 0.5, endless=False)
        assert rounds.round().count("bob") <= 1
        assert len([name for name in rounds.served if name != "bob"]) <= 4


def test_who_asks_twice_is_served_once(rounds: _Rounds) -> None:
    rounds.ask("alice", "busy", 2.0, endless=False)
    for _ in range(3):
        rounds.ask("alice", "late", 0.1, endless=False)
    assert rounds.round() == ["late"]
    assert rounds.round() == []


def test_a_large_answer_is_written_in_time_slices() -> None:
    """To encrypt it takes time, in which no other tenant is served."""
    sent, asked = list[int](), list[Any]()

    def send(data: memoryview) -> int:
        sent.append(len(data))
        return 1 << 16

    connection: Any = object.__new__(WebsocketConnection)
    connection._loop = SimpleNamespace(
        run_in_time_slice=lambda tenant, seconds, callback: asked.append((tenant, callback))
    )
    sock: Any = SimpleNamespace(send=send, flush=lambda: 0)
    connection.tenant, connection._stage, connection._writing = "alice", OPEN, False
    connection._outgoing = WriteQueue(sock)
    connection._queue(iter((bytes(1 << 20),)))
    assert not sent  # in a time slice alone
    connection._write_in_slice(-1.0)  # there is no time left
    assert not sent
    assert asked == [("alice", connection._write_in_slice)] * 2


def test_what_is_dropped_is_neither_begun_nor_among_the_last() -> None:
    """A message that has begun must end, or the tenant could not read what follows."""
    sent, done = list[bytes](), list[int]()

    def send(data: memoryview) -> int:
        if not capacity:
            raise ssl.SSLWantWriteError
        capacity.pop()
        sent.append(bytes(data))
        return len(data)

    capacity = [1]
    sock: Any = SimpleNamespace(send=send, flush=lambda: 0)
    queue = WriteQueue(sock)
    for number in range(4):
        queue.append(iter((bytes([number]), b"rest")), lambda number=number: done.append(number))  # type: ignore[misc]
    with pytest.raises(ssl.SSLWantWriteError):
        queue.write(float("inf"))
    queue.drop(1)
    assert done == [1, 2]
    assert len(queue) == 2
    capacity += [1] * 3
    assert queue.write(float("inf"))
    assert (sent, done, len(queue)) == ([b"\0", b"rest", b"\3", b"rest"], [1, 2, 0, 3], 0)
