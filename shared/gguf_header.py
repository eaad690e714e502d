"""The header of a GGUF file, walked before a library reads it: its lengths must fit into the file.

The format is that of ggml's specification of GGUF, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

_VERSIONS = (2, 3)  # with lengths of 64 bits
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of numbers, by their type
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_MAX_WEIGHTS = 8  # for each byte of the file
_MAX_VALUES = 1 << 22  # the library makes objects of each; vocabularies have up to a million


def check_header(file: Path) -> None:
    """Refuse a file whose header says more than the file holds, or so much that reading it takes minutes.

    Raises:
        ValueError: what is wrong.
        OSError: it cannot be read.
    """
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Header(data).check()


class _Header:
    """The bytes of a file, and the place that is read."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._values = data, 0, 0

    def check(self) -> None:
        """See ``check_header``."""
        self._skip(4)  # magic
        if (version := self._number("I")) not in _VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
                raise ValueError("it is big-endian: convert_hf_to_gguf.py makes others, without --bigendian")
            raise ValueError(f"its version is {version}, and 2 and 3 are read")
        tensors, keys = self._number("Q"), self._number("Q")
        for _ in self._counted(keys):
            self._skip(self._number("Q"))  # its name
            if (kind := self._number("I")) != _ARRAY:
                self._skip_values(kind, 1)
            else:
                self._skip_values(self._number("I"), self._number("Q"))
        for _ in self._counted(tensors):
            self._skip(self._number("Q"))
            if (dimensions := self._number("I")) > _MAX_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions, and {_MAX_DIMENSIONS} are the most")
            weights = math.prod(self._number("Q") for _ in range(dimensions))
            _, offset = self._number("I"), self._number("Q")
            if not weights:
                raise ValueError("a tensor has no element")
            if weights > _MAX_WEIGHTS * len(self._data) or offset > len(self._data):
                raise ValueError("a tensor goes beyond its end")

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self._at:
            raise ValueError("it ends within its header")
        self._at += size

    def _number(self, form: str) -> int:
        begins = self._at
        self._skip(struct.calcsize(form))
        return int(struct.unpack_from(f"<{form}", self._data, begins)[0])

    def _counted(self, count: int) -> range:
        """As many times, if they are not too many in all."""
        self._values += count
        if self._values > _MAX_VALUES:
            raise ValueError(f"it says more than {_MAX_VALUES:,} values")
        return range(count)

    def _skip_values(self, kind: int, count: int) -> None:
        times = self._counted(count)
        if kind == _STRING:
            for _ in times:
                self._skip(self._number("Q"))
        elif kind in _SIZES:
            self._skip(count * _SIZES[kind])
        else:
            raise ValueError(f"a value has type {kind}, which is not known here")
