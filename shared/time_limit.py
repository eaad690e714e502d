"""A limit on work that nobody can bound beforehand."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_POLL_SECONDS = 0.2  # between two readings of the clock


class TimeLimitExceeded(BaseException):
    """Work took too long. No ``Exception``, which libraries catch and go on."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Stop this thread's work in the block once this process has used so much of a processor.

    Python raises an exception in the thread between two of its instructions; a call into C that lasts ends
    first. The time of a busy machine does not count, that of this process's other threads does.

    Raises:
        TimeLimitExceeded: the block took longer.
    """
    thread, over, end = threading.get_ident(), threading.Event(), time.process_time() + seconds
    raised = False

    def watch() -> None:
        nonlocal raised
        while not over.wait(_POLL_SECONDS):
            if time.process_time() > end:
                raised = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(TimeLimitExceeded)
                )

    watching = threading.Thread(target=watch, name="limit of time", daemon=True)
    watching.start()
    try:
        try:
            yield
        finally:
            over.set()
    finally:
        while watching.is_alive():  # one may come just before ``over`` is set, and others would follow it
            with suppress(TimeLimitExceeded):
                over.set()
                watching.join()
        if raised:
            # One that was asked for since comes now. Taken back with NULL, it would have Python 3.11 look for
            # it for ever, and hang under a debugger or a profiler.
            with suppress(TimeLimitExceeded):
                time.sleep(0)
                time.sleep(0)
