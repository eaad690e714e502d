"""Does something now and then, in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Periodic:
    """Calls something whenever the clock reaches a multiple of an interval, until it is closed.

    Args:
        seconds: the interval; 3600: on the hour, UTC.
        callback: is called; an error is logged, and it is called again the next time.
        name: of the thread.
    """

    def __init__(self, seconds: float, callback: Callable[[], None], name: str) -> None:
        self._seconds, self._callback = seconds, callback
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Call it no more; a running call ends first."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds - time.time() % self._seconds):
            try:
                self._callback()
            except Exception:
                log.exception("%s goes on after a fault", threading.current_thread().name)
