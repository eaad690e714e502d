"""A limit on work that nobody can bound beforehand."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LOOKS = 0.2  # seconds between looks at the clock


class Interrupted(BaseException):
    """Work took too long. No ``Exception``, which libraries catch and go on."""


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Stop this thread's work in the block once this process has used so much of a processor.

    Python raises an exception in the thread between two of its instructions; a call into C that lasts ends
    first. The time of a busy machine does not count, that of this process's other threads does.

    Raises:
        Interrupted: the block took longer.
    """
    thread, over, end = threading.get_ident(), threading.Event(), time.process_time() + seconds
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def watch() -> None:
        while not over.wait(_LOOKS):
            if time.process_time() > end:
                raise_in(ctypes.c_ulong(thread), ctypes.py_object(Interrupted))

    watching = threading.Thread(target=watch, name="limit of time", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
        raise_in(ctypes.c_ulong(thread), None)  # what it may have asked for since
