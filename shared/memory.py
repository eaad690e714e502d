"""Keeping memory that is freed and needed again a moment later."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Have this process keep up to a gigabyte of what it frees, instead of giving it back at once.

    Requests and answers are tensors of tens of megabytes. The C library gives such blocks back to the
    operating system when they are freed and gets fresh ones, page by page, a moment later, which costs
    more than filling them. Whether the C library knows these options (glibc does).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Threads' own arenas cannot hold large blocks, so they share one.
    settings = ((_M_MMAP_THRESHOLD, KEPT_BYTES), (_M_TRIM_THRESHOLD, KEPT_BYTES), (_M_ARENA_MAX, 1))
    return all(mallopt(option, value) == 1 for option, value in settings)
