"""File descriptors: the number that an executor needs, and the error when there are none left."""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading

log = logging.getLogger(__name__)

ADVICE = "raise the limit of open files (ulimit -n; LimitNOFILE= of systemd) or allow fewer connections"
OWN = 64  # of the executor itself: libraries, checkpoint, ports, files that are read for a moment
OF_A_CONNECTION = 1  # its socket
OF_A_WORKER = 32  # its link, and memory that both have mapped
OF_A_LOCAL_SESSION = 12  # sockets, pipes and memory


def none_left(error: BaseException | None) -> bool:
    """Returns whether an error, or a cause of it, is a want of descriptors."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__
    return False


def explained(error: Exception) -> str:
    """Returns an error for the provider's log, with advice if it is a want of descriptors."""
    return f"out of file descriptors; {ADVICE}" if none_left(error) else str(error)


def estimate_descriptors(max_connections: int, *, local: bool) -> int:
    """Returns how many descriptors a process may need; ``local``: sessions may be of this machine."""
    return OWN + max_connections * (OF_A_LOCAL_SESSION if local else OF_A_CONNECTION)


def raise_open_files_limit(wanted: int) -> int:
    """Raise this process's limit, which is 1024 on many systems, as far as it may. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "%d file descriptors are allowed, and as many connections as are allowed may need %d; %s",
            allowed,
            wanted,
            ADVICE,
        )
    return allowed


class ReserveDescriptor:
    """A descriptor kept for when there are no others: released, it lets one more peer in, to be told."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        self.acquire()

    def acquire(self) -> bool:
        """Open the descriptor, unless it is open. Returns whether there is one."""
        with self._lock:
            if self._descriptor is None:
                try:
                    self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                except OSError:
                    return False
            return True

    def release(self) -> bool:
        """Close the descriptor. Returns whether there was one."""
        with self._lock:
            if self._descriptor is None:
                return False
            os.close(self._descriptor)
            self._descriptor = None
            return True
