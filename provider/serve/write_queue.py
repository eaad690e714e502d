"""What is to be written to a tenant, in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from provider.serve.tls_socket import BoundedTlsSocket


class _Message(NamedTuple):
    """A message to write, and what to call when it is written."""

    pieces: Iterator[bytes | memoryview]
    on_sent: Callable[[], None]


class WriteQueue:
    """Messages of one connection, of which the first may have been written in part.

    Attributes:
        written: bytes that have left so far.
    """

    def __init__(self, sock: BoundedTlsSocket) -> None:
        self._sock = sock
        self._waiting: deque[_Message] = deque()
        self._current: _Message | None = None  # has begun
        self._piece = memoryview(b"")  # the rest of a piece of it
        self.written = 0

    def __len__(self) -> int:
        return len(self._waiting) + (self._current is not None)

    def append(
        self, pieces: Iterator[bytes | memoryview], on_sent: Callable[[], None] = lambda: None
    ) -> None:
        """Write a message behind all others, and call ``on_sent`` when TLS has taken it."""
        self._waiting.append(_Message(pieces, on_sent))

    def write(self, until: float) -> bool:
        """Write what the socket takes, until a time of ``time.monotonic``.

        Returns:
            Whether everything is written.

        Raises:
            ssl.SSLWantWriteError, ssl.SSLWantReadError: the socket takes no more at the moment.
            OSError: the connection broke.
        """
        while self._current or self._waiting:
            if time.monotonic() > until:
                return False
            if not self._piece:
                message = self._current = self._current or self._waiting.popleft()
                piece = next(message.pieces, None)
                if piece is None:
                    self._current = None
                    message.on_sent()
                    continue
                self._piece = memoryview(piece)
            count = self._sock.send(self._piece)
            self._piece = self._piece[count:]
            self.written += count
        self.written += self._sock.flush()
        return True

    def drop(self, kept: int) -> None:
        """Forget all messages that have not begun, but for the last ``kept``."""
        while len(self._waiting) > kept:
            self._waiting.popleft().on_sent()

    def clear(self) -> None:
        """Forget everything, and tell nobody."""
        self._waiting.clear()
        self._current, self._piece = None, memoryview(b"")
