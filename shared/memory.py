"""Keeping memory that is freed and needed again a moment later, but not ever more of it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Have this process keep up to a gigabyte of what it frees, instead of giving it back at once.

    Requests and answers are tensors of tens of megabytes. The C library gives such blocks back to the
    operating system when they are freed and gets fresh ones, page by page, a moment later, which costs
    more than filling them. Whether the C library knows these options (glibc does).
    """
    mallopt = _function("mallopt")
    # Threads' own arenas cannot hold large blocks, so they share one.
    settings = ((_M_MMAP_THRESHOLD, KEPT_BYTES), (_M_TRIM_THRESHOLD, KEPT_BYTES), (_M_ARENA_MAX, 1))
    return mallopt is not None and all(mallopt(option, value) == 1 for option, value in settings)


class FreedMemory:
    """Gives back what is free between blocks in use: blocks of mixed sizes leave ever more of it.

    Args:
        max_bytes: bytes that this process may grow by, since this was made or memory was given back last.
    """

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        self._kept, self._trim = max_bytes, _function("malloc_trim")
        self._level = resident_bytes()

    def trim(self) -> bool:
        """Give it back if it is time to; whether it was. Others wait meanwhile, for milliseconds."""
        if self._trim is None or resident_bytes() <= self._level + self._kept:
            return False
        self._trim(0)
        self._level = resident_bytes()
        return True


def resident_bytes() -> int:
    """Of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _function(name: str) -> ctypes._NamedFuncPointer | None:
    try:
        found: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    return found
