"""Limits repeated log lines: a state that lasts, or a thousand events a second. No clock of its own."""

from __future__ import annotations


class LogRateLimiter:
    """Whether something is to be logged, for the first time or again.

    Args:
        seconds: between two times.
        times: that it may be logged within those seconds.

    Attributes:
        logged_at: when it was logged first within the last seconds, on the caller's clock; None: it is to be
            logged when it comes next.
        left_out: how often it was not to be logged since it was logged last.
    """

    def __init__(self, seconds: float, times: int = 1) -> None:
        self._seconds, self._times, self._left = seconds, times, 0
        self.logged_at: float | None = None
        self.left_out = 0

    def due(self, now: float) -> bool:
        """Whether it was not logged lately, or not so often; then it counts as logged now."""
        if self.logged_at is None or now - self.logged_at > self._seconds:
            self.logged_at, self._left = now, self._times
        if not self._left:
            self.left_out += 1
            return False
        self._left -= 1
        return True

    def more(self) -> str:
        """What was left out before, to be added to a line; nothing was: empty."""
        left_out, self.left_out = self.left_out, 0
        return f" ({left_out} more since the last line)" if left_out else ""
