"""Waiting for an answer without falling asleep, where answers come faster than a thread wakes."""

from __future__ import annotations

import select
import socket
import time


class QuickPoll:
    """``select.poll`` that asks for a while before it sleeps, and that another thread can wake.

    Falling asleep and being woken takes longer than a small product. It sleeps at once where answers do not
    come that fast, or it would take a processor from the products that it waits for.

    Args:
        seconds: to ask for at most; somewhat more than what is waited for takes when it is quick.
    """

    def __init__(self, seconds: float) -> None:
        self._poll, self._seconds, self._quick = select.poll(), seconds, False
        self.register = self._poll.register
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._wake_descriptor = self._wake_read.fileno()
        self.register(self._wake_read, select.POLLIN)

    def wake(self) -> None:
        """End the ``poll`` of another thread, or the next one."""
        try:
            self._wake_write.send(b"x")
        except OSError:
            pass  # it has been woken a thousand times already, or is closed

    def close(self) -> None:
        """Give the descriptors back; nobody may poll."""
        self._wake_read.close()
        self._wake_write.close()

    def poll(self, seconds: float, *, awake: bool = True) -> list[tuple[int, int]]:
        """Wait as ``select.poll`` does, but in seconds; asleep from the start unless ``awake``.

        Returns:
            The descriptors that are ready, with one of its own if it was woken; none if the time is over.
        """
        began = now = time.monotonic()
        ready: list[tuple[int, int]] = []
        awake = awake and self._quick
        while awake and not ready and now < began + self._seconds:
            ready, now = self._poll.poll(0), time.monotonic()
        if not ready:
            ready, now = self._poll.poll(max(0.0, began + seconds - now) * 1000), time.monotonic()
            self._quick = not awake and now < began + 2 * self._seconds
        for descriptor, _ in ready:
            if descriptor == self._wake_descriptor:
                self._wake_read.recv(4096)
        return ready
