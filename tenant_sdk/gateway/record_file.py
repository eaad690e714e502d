"""A file with the last record of one writer, written in place: it needs no space on a disk that is full."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

_SLOT_BYTES = 64 << 10  # bytes of the file for one record; it has two, of which the writer takes the older
_HEADER = struct.Struct("<QII")  # number of the record, its bytes, CRC-32 of number and record
MAX_BYTES = _SLOT_BYTES - _HEADER.size  # of a record


def write_record(path: Path, record: bytes) -> None:
    """Write a record of at most ``MAX_BYTES``; one thread at a time.

    Raises:
        OSError: the file is not there yet, and cannot be made; or this disk has errors.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(file).st_size < 2 * _SLOT_BYTES:
            os.posix_fallocate(file, 0, 2 * _SLOT_BYTES)
        numbers = [number for number, _ in _records(os.pread(file, 2 * _SLOT_BYTES, 0))]
        at = numbers.index(min(numbers))
        number = max(numbers) + 1
        os.pwrite(file, _HEADER.pack(number, len(record), _check(number, record)) + record, at * _SLOT_BYTES)
    finally:
        os.close(file)


def read_record(path: Path) -> bytes | None:
    """The last record that is complete; None: there is none."""
    try:
        number, record = max(_records(path.read_bytes()))
    except FileNotFoundError:
        return None
    return record if number else None


def _records(data: bytes) -> list[tuple[int, bytes]]:
    """Number and content in each slot; 0: the slot has none, or one that is being written."""
    found = []
    for slot in (data[:_SLOT_BYTES], data[_SLOT_BYTES:]):
        number, length, check = _HEADER.unpack_from(slot.ljust(_HEADER.size, b"\0"))
        record = slot[_HEADER.size : _HEADER.size + length]
        complete = len(record) == length and _check(number, record) == check
        found.append((number, record) if complete else (0, b""))
    return found


def _check(number: int, record: bytes) -> int:
    return zlib.crc32(record, number & 0xFFFFFFFF)
