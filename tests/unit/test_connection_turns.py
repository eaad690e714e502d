"""A tenant's turns in the executor's loop: one is enough for each round, also at the end of a connection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from provider.serve.websocket_connection import DISCARDS, WebsocketConnection


def test_a_connection_is_called_once_however_often_it_asks() -> None:
    """Its socket tells of itself in each round as well, so calls would become more and more."""
    calls: list[Any] = []
    connection: Any = object.__new__(WebsocketConnection)
    connection._loop = SimpleNamespace(call_soon_threadsafe=calls.append)
    connection._resumes, connection._read_closed, connection._ended = False, False, True
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
