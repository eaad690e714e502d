"""Locks on files that users of other accounts may be able to read, and so to lock."""

from __future__ import annotations

import errno
import fcntl
import time

SECONDS = 10.0  # a change of a file takes milliseconds
_PAUSE = 0.05


def lock_exclusively(descriptor: int) -> None:
    """Lock an open file, until it is closed.

    Any process that can open the file for reading can hold its lock for ever. So the wait has an end.

    Raises:
        OSError: another process has held the lock for ``SECONDS``; or the file system has no locks.
    """
    last = time.monotonic() + SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= last:
                raise OSError(errno.EWOULDBLOCK, "another process holds its lock") from None
            time.sleep(_PAUSE)
        else:
            return
