"""When to say once more what lasts, or what may happen a thousand times a second. No clock of its own."""

from __future__ import annotations


class LogRateLimiter:
    """Whether something is to be said, for the first time or again.

    Args:
        seconds: between two times.

    Attributes:
        said_at: the last time, on the caller's clock; None: it is to be said when it comes next.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.said_at: float | None = None

    def due(self, now: float) -> bool:
        """Whether it was not said lately; then it counts as said now."""
        if self.said_at is not None and now - self.said_at <= self._seconds:
            return False
        self.said_at = now
        return True
