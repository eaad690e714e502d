"""A clock for connections on which time passes only when somebody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

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
