"""Clocks for connections, on which no time passes by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from raw_peers import SECONDS

from tenant_sdk.connection.clock import Clock


class SimulatedClock(Clock):
    """Starts at 1000 s.

    Attributes:
        time: now; tests may let it pass.
        waited: seconds, of each wait.
        while_waiting: called in each wait, before the time has passed.
    """

    def __init__(self) -> None:
        self.time, self.waited = 1000.0, list[float]()
        self.while_waiting: Callable[[], object] = lambda: None

    def now(self) -> float:
        """See Clock."""
        return self.time

    def wait(self, until: float, ended: threading.Event) -> bool:
        """See Clock."""
        self.waited.append(until - self.time)
        self.while_waiting()
        if not ended.is_set():
            self.time = max(self.time, until)
        return ended.is_set()


def only_closing_ends_waits(patch: pytest.MonkeyPatch) -> list[float]:
    """In all connections; a list to which each wait adds the seconds that it would have taken."""
    waited: list[float] = []

    def wait(clock: Clock, until: float, ended: threading.Event) -> bool:
        waited.append(until - clock.now())
        assert ended.wait(SECONDS), "a connection waits, and nobody ends it"
        return True

    patch.setattr(Clock, "wait", wait)
    return waited
