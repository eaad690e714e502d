"""The time as connections see it; tests give them a clock of their own."""

from __future__ import annotations

import threading
import time

CLOSED_RETRY_SECONDS = 5.0  # after which an executor that closed a connection may be back


class Clock:
    """The machine's clock."""

    def now(self) -> float:
        """Returns the time in seconds, which does not go back."""
        return time.monotonic()

    def wait(self, until: float, ended: threading.Event) -> bool:
        """Wait until a time, or until an event if that comes first; whether it has come."""
        return ended.wait(max(0.0, until - self.now()))


CLOCK = Clock()
