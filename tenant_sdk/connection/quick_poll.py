"""Waiting for an answer without falling asleep, where answers come faster than a thread wakes."""

from __future__ import annotations

import select
import time


class QuickPoll:
    """``select.poll`` that asks for a while before it sleeps.

    Falling asleep and being woken takes longer than a small product. It sleeps at once where answers do not
    come that fast, or it would take a processor from the products that it waits for.

    Args:
        seconds: to ask for at most; somewhat more than what is waited for takes when it is quick.
    """

    def __init__(self, seconds: float) -> None:
        self._poll, self._seconds, self._quick = select.poll(), seconds, False
        self.register = self._poll.register

    def poll(self, seconds: float, *, awake: bool = True) -> list[tuple[int, int]]:
        """As ``select.poll``, but in seconds; asleep from the start unless ``awake``."""
        began = now = time.monotonic()
        ready: list[tuple[int, int]] = []
        awake = awake and self._quick
        while awake and not ready and now < began + self._seconds:
            ready, now = self._poll.poll(0), time.monotonic()
        if not ready:
            ready, now = self._poll.poll(max(0.0, began + seconds - now) * 1000), time.monotonic()
            self._quick = not awake and now < began + 2 * self._seconds
        return ready
