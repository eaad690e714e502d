"""Answers of the admin port are fresh, and take a tenth of the time from the loop."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from provider.observe.admin import COOLDOWN, MAX_WAITING, FreshAnswer


class Clock:
    """A clock that goes on where something sleeps or works."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_it_rests_after_each_answer() -> None:
    clock, made = Clock(), list[bytes]()

    def make() -> bytes:
        clock.now += 0.01
        made.append(b"%d" % len(made))
        return made[-1]

    answer = FreshAnswer(make, clock, clock.sleep)
    assert [answer(), answer()] == [b"0", b"1"]
    assert clock.slept == pytest.approx([COOLDOWN * 0.01])
    clock.now += 100.0
    assert answer() == b"2"
    assert len(clock.slept) == 1


def test_who_asks_meanwhile_has_the_next_one() -> None:
    """Not the one that was begun before."""
    begun, go, made = threading.Event(), threading.Event(), list[bytes]()

    def make() -> bytes:
        begun.set()
        go.wait()
        made.append(b"%d" % len(made))
        return made[-1]

    answer = FreshAnswer(make, sleep=lambda _: None)
    with ThreadPoolExecutor(5) as threads:
        first = threads.submit(answer)
        begun.wait()
        waiting = [threads.submit(answer) for _ in range(4)]
        go.set()
        assert first.result() == b"0"
        later = {each.result() for each in waiting}
    # Those who asked while the first one was made have a later one.
    assert b"0" not in later
    assert len(made) <= 5


def test_only_few_wait() -> None:
    """Others have the newest one, since probes need connections too."""
    go, made = threading.Event(), list[bytes]()

    def make() -> bytes:
        if made:
            go.wait()
        made.append(b"%d" % len(made))
        return made[-1]

    answer = FreshAnswer(make, sleep=lambda _: None)
    assert answer() == b"0"
    with ThreadPoolExecutor(MAX_WAITING) as threads:
        waiting = [threads.submit(answer) for _ in range(MAX_WAITING)]
        while answer._slots.acquire(blocking=False):  # until all wait
            answer._slots.release()
        assert answer() == b"0"
        go.set()
        assert b"0" not in {each.result() for each in waiting}


def test_an_error_is_nobodys_answer() -> None:
    answers = iter([ValueError("none"), b"one"])

    def make() -> bytes:
        if isinstance(found := next(answers), Exception):
            raise found
        return found

    answer = FreshAnswer(make, sleep=lambda _: None)
    with pytest.raises(ValueError, match="none"):
        answer()
    assert answer() == b"one"
