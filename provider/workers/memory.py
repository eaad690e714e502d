"""Memory that workers map too: allocated for a batch, and free again when nobody reads its answers."""

from __future__ import annotations

import os
import weakref
from collections import deque

from shared.transport.colocated import SharedMemory

_MIN_BYTES = 1 << 20
# What is free and more than this is given back to the machine: small ones, since large ones do for all, and
# very large ones.
_MAX_FREE, _MAX_FREE_BYTES = 16, 256 << 20


class Segment:
    """A piece of memory, for as long as somebody holds on to it.

    Attributes:
        number: by which workers know it.
        size: bytes.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.descriptor = os.memfd_create(f"symbiosis-worker-{number}", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, size)
        self._mapped = SharedMemory(self.descriptor, size)

    def view(self, unused: deque[Segment]) -> SharedMemory:
        """A view, after whose last tensor the segment is appended to ``unused``; from any thread."""
        view = self._mapped.alias()
        weakref.finalize(view.whole, unused.append, self)
        return view


class SegmentPool:
    """All of one lane. Not thread-safe but for the end of views.

    Attributes:
        dropped: numbers of those that are no more, for whoever tells the workers.
        in_use: how many are not free.
    """

    def __init__(self) -> None:
        self.dropped: list[int] = []
        self.in_use = 0
        self._free: list[Segment] = []
        self._unused: deque[Segment] = deque()
        self._made = 0

    def allocate(self, size: int) -> tuple[Segment, SharedMemory]:
        """One of at least so many bytes, and a view that holds it.

        Raises:
            OSError: there is no memory.
        """
        while self._unused:
            self._free.append(self._unused.popleft())
            self.in_use -= 1
        fitting = [segment for segment in self._free if segment.size >= size]
        if fitting:
            segment = min(fitting, key=lambda segment: segment.size)
            self._free.remove(segment)
        else:
            self._made += 1
            segment = Segment(self._made, max(_MIN_BYTES, 1 << (size - 1).bit_length()))
        self._free.sort(key=lambda segment: segment.size)
        while len(self._free) > _MAX_FREE:
            self.dropped.append(self._free.pop(0).number)
        while sum(segment.size for segment in self._free) > _MAX_FREE_BYTES:
            self.dropped.append(self._free.pop().number)
        self.in_use += 1
        return segment, segment.view(self._unused)
