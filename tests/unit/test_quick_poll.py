"""Waiting awake where answers come soon, and asleep where they do not."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import pytest

from tenant_sdk.connection import quick_poll
from tenant_sdk.connection.quick_poll import QuickPoll

QUICK = 1e-3


class Poll:
    """In place of ``select.poll``: something is there after so long; time passes by waiting alone."""

    def __init__(self) -> None:
        self.now, self.after, self.asleep = 0.0, 0.0, 0
        self.due: float | None = None

    def register(self, *_: object) -> None:
        pass

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        self.due = self.now + self.after if self.due is None else self.due
        if milliseconds:
            self.asleep += 1
            self.now = min(self.due, self.now + milliseconds / 1000)
        else:
            self.now += 1e-5
        if self.now < self.due:
            return []
        self.due = None
        return [(-1, select.POLLIN)]


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Poll:
    made = Poll()
    monkeypatch.setattr(quick_poll, "select", SimpleNamespace(poll=lambda: made, POLLIN=select.POLLIN))
    monkeypatch.setattr(quick_poll, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture
def poll(system: Poll) -> Iterator[QuickPoll]:
    with closing(QuickPoll(QUICK)) as made:
        yield made


def waits(system: Poll, poll: QuickPoll, *after: float) -> list[int]:
    """How often it fell asleep for each answer."""
    slept = []
    for system.after in after:
        before = system.asleep
        assert poll.poll(10.0)
        slept.append(system.asleep - before)
    return slept


def test_it_sleeps_at_first(system: Poll, poll: QuickPoll) -> None:
    assert waits(system, poll, 5e-4, 5e-4, 5e-4) == [1, 0, 0]


def test_it_sleeps_where_answers_take_long(system: Poll, poll: QuickPoll) -> None:
    assert waits(system, poll, *[0.1] * 4) == [1, 1, 1, 1]


def test_a_late_answer_is_slept_for_and_the_next_one_too(system: Poll, poll: QuickPoll) -> None:
    assert waits(system, poll, 5e-4, 5e-4, 0.1, 5e-4, 5e-4) == [1, 0, 1, 1, 0]


def test_what_nobody_waits_for_is_slept_for(system: Poll, poll: QuickPoll) -> None:
    waits(system, poll, 5e-4, 5e-4)
    slept = system.asleep
    assert poll.poll(10.0, awake=False)
    assert system.asleep == slept + 1


def test_nothing_comes(system: Poll, poll: QuickPoll) -> None:
    waits(system, poll, 5e-4)
    system.after = 100.0
    began = system.now
    assert poll.poll(2.0) == []
    assert system.now - began == pytest.approx(2.0, abs=1e-3)


def test_with_a_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, closing(QuickPoll(QUICK)) as poll:
        poll.register(ours, select.POLLIN)
        assert poll.poll(0.0) == []
        for _ in range(3):
            theirs.send(b"x")
            assert poll.poll(10.0) == [(ours.fileno(), select.POLLIN)]
            ours.recv(1)


def test_it_is_woken() -> None:
    """By another thread, however often, also before it polls; and nobody wakes one that is closed."""
    with closing(QuickPoll(QUICK)) as poll:
        for _ in range(10_000):
            poll.wake()
        while poll.poll(0.0):
            pass
        with ThreadPoolExecutor(1) as threads:
            woken = threads.submit(poll.poll, 800.0)
            poll.wake()
            assert len(woken.result(800.0)) == 1
    poll.wake()
