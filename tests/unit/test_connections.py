"""Which connections an executor keeps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from provider.observe.metrics import Metrics
from provider.serve.connection import (
    AGES,
    CLOSING,
    DRAINING,
    ENDED,
    LINGERING,
    Connection,
    ConnectionLimits,
    Connections,
)
from shared.errors import WireError


class FakeLoop:
    """Time, and timers that a test lets run."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers = list[tuple[float, Callable[[], None]]]()

    def call_later_weak(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.append((self.now + seconds, call))

    def run_until(self, end: float) -> None:
        while due := [timer for timer in self._timers if timer[0] <= end]:
            first = min(due, key=lambda timer: timer[0])
            self._timers.remove(first)
            self.now = first[0]
            first[1]()
        self.now = end


class Tried(Connection):
    """A connection whose peer may send garbage behind the handshake."""

    def __init__(self, garbage: bool) -> None:
        super().__init__("alice", "", "")
        self._garbage, self.drained = garbage, False
        self._session: Any = SimpleNamespace(logged=False)

    def start(self, loop: Any, ended: Callable[[], None]) -> None:
        super().start(loop, ended)
        if self._garbage:
            self._broke(OSError("garbage"))

    def drain(self) -> None:
        self.drained = True

    def _refused(self, error: WireError) -> None:
        raise AssertionError

    def _release(self) -> None:
        pass


def started(loop: FakeLoop, garbage: bool, limits: ConnectionLimits) -> tuple[Connections, Tried]:
    connections = Connections(Metrics(), loop, limits)  # type: ignore[arg-type]
    connections.reserve()
    connections.reserve_for("alice")
    connection = Tried(garbage)
    connections.start(connection)
    return connections, connection


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
def test_a_connection_that_ends_while_it_begins_is_not_kept(seconds: float) -> None:
    """One tenant could fill the memory with them: 42 KB each, for an hour."""
    loop = FakeLoop()
    connections, connection = started(loop, True, ConnectionLimits(1, 1, seconds))
    ended = weakref.ref(connection)
    del connection
    gc.collect()
    assert ended() is None
    connections.reserve()  # there is room again


def test_old_connections_are_drained_once() -> None:
    loop = FakeLoop()
    _, connection = started(loop, False, ConnectionLimits(1, 1, 100.0))
    loop.run_until(90.0 - 1e-6)
    assert not connection.drained
    loop.run_until(110.0 + 100.0 * AGES)
    assert connection.drained
    connection.drained = False
    loop.run_until(1000.0)
    assert not connection.drained


def test_a_drain_that_begins_reaches_those_to_come() -> None:
    """It does not wait, and nothing else makes a connection drain."""
    loop: Any = FakeLoop()
    loop.call_soon_threadsafe = lambda call: call()
    connections, before = started(loop, False, ConnectionLimits(2, 2))
    assert not before.drained
    connections.begin_drain()
    assert connections.draining
    assert before.drained
    connections.reserve()
    connections.reserve_for("alice")
    connections.start(later := Tried(False))
    assert later.drained


def test_a_stage_only_goes_forward() -> None:
    connection = Tried(False)
    for stage in (DRAINING, CLOSING, CLOSING, ENDED):
        connection._advance(stage)
    with pytest.raises(AssertionError, match="back to"):
        connection._advance(LINGERING)
