"""Limits repeated log lines: a state that lasts, or a thousand events a second. No clock of its own."""

from __future__ import annotations


class LogRateLimiter:
    """Whether something is to be said, for the first time or again.

    Args:
        seconds: between two times.
        times: that it may be said within those seconds.

    Attributes:
        said_at: when it was said first within the last seconds, on the caller's clock; None: it is to be said
            when it comes next.
        left_out: how often it was not to be said since it was said last.
    """

    def __init__(self, seconds: float, times: int = 1) -> None:
        self._seconds, self._times, self._left = seconds, times, 0
        self.said_at: float | None = None
        self.left_out = 0

    def due(self, now: float) -> bool:
        """Whether it was not said lately, or not so often; then it counts as said now."""
        if self.said_at is None or now - self.said_at > self._seconds:
            self.said_at, self._left = now, self._times
        if not self._left:
            self.left_out += 1
            return False
        self._left -= 1
        return True

    def more(self) -> str:
        """What was left out before, to be added to a line; nothing was: empty."""
        left_out, self.left_out = self.left_out, 0
        return f" ({left_out} more since the last line)" if left_out else ""
