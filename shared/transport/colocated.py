"""Formats of both ends of the co-located transport (``shared/PROTOCOL.md``, "Co-located transport").

Control messages go over ZeroMQ, tensors through one piece of shared memory for each session, and the
headers of those tensors through two named pipes: a message over ZeroMQ wakes a thread of its own in each
process before it wakes the one that waits, which is most of a small request's time. The pipes' ends are
also how each side learns that the other has died.

The executor makes the memory, as a sealed memfd: it cannot be made smaller under whoever has it mapped,
has no name in any file system, and is gone with the last process that holds it, however that ends.
"""

from __future__ import annotations

import copy
import mmap
import os
import re
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from shared.errors import ConfigurationError, WireError
from shared.transport import SCHEME
from shared.wire.header import HEADER_BYTES
from shared.wire.incoming import tensor_bytes
from shared.wire.messages import Message

LISTENER = "door"  # the socket in the executor's directory that opens sessions
OPENED, REFUSED = b"opened", b"refused"
END = b""  # the last message of either side
OFFSETS = struct.Struct(
    "<QQ"
)  # behind a request's header: where it lies in the memory, where its answer goes
PREAMBLE_BYTES = HEADER_BYTES + OFFSETS.size
REQUESTS, ANSWERS = ".requests", ".answers"  # a session's pipes, by its name
# A message that is none of the protocol's, by its first byte, which is no version: "have at least so
# many bytes of memory", and the answer "there are so many". With 0 it is a ping.
MEMORY = struct.Struct("<BQ")
MEMORY_BYTE = 0
ALIGNMENT = 64  # of places
MAX_IN_FLIGHT = 64  # requests of one session without an answer
_MEMORY_NAME = re.compile(r"symbiosis-[0-9a-f]{16}")
_SESSION_NAME = re.compile(r"session-[0-9a-f]{16}")
_LONGEST_PATH = 107  # sun_path of Linux, less its final zero


class Opened(Message, frozen=True):
    """How to reach a session that was opened."""

    session: str  # name of its socket in the directory
    pid: int  # of the executor
    descriptor: int  # of the memory, in the executor
    memory: str  # the memory's name
    size: int  # bytes of it
    max_size: int  # bytes that the executor will make it at most

    def check(self) -> None:
        """Refuse what no executor says.

        Raises:
            WireError: ``control_message``.
        """
        if not (
            _SESSION_NAME.fullmatch(self.session)
            and _MEMORY_NAME.fullmatch(self.memory)
            and self.pid > 0
            and self.descriptor >= 0
            and 0 < self.size <= self.max_size < 1 << 47
        ):
            raise WireError("control_message", "the executor describes a session that cannot be", fatal=True)


def directory_of(url: str) -> Path:
    """The directory of an ``ipc://`` URL.

    Raises:
        ConfigurationError: it is not absolute, or too long for the sockets in it.
    """
    path = Path(url.removeprefix(SCHEME))
    if not url.startswith(SCHEME) or not path.is_absolute():
        raise ConfigurationError(
            f"{url!r} is not a co-located executor's URL; it looks like ipc:///run/symbiosis"
        )
    if len(os.fsencode(path)) + len("/session-0123456789abcdef.requests") > _LONGEST_PATH:
        raise ConfigurationError(
            f"{path} is too long a path for sockets; choose one of at most 70 characters"
        )
    return path


def why_not_private(path: Path) -> str:
    """What speaks against trusting a directory, in words; empty: it is this user's alone.

    Raises:
        OSError: it is not there.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a directory"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to another user"
    if stat.S_IMODE(status.st_mode) != 0o700:
        return f"{path} is open to others: its mode is {stat.S_IMODE(status.st_mode):o}, not 700"
    return ""


class SharedMemory:
    """A mapping of a session's memory; both sides have one.

    Args:
        descriptor: of the memory; not needed any more afterwards.
        size: bytes, which the memory is known to have for good.

    Attributes:
        whole: uint8 [size]; all tensors are views of it.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        # All pages at once: in the middle of a request each would cost a fault.
        mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.whole = np.frombuffer(mapping, np.uint8)
        self.size = size

    @classmethod
    def private(cls, size: int) -> SharedMemory:
        """Memory of this process alone that is used alike."""
        memory = cls.__new__(cls)
        memory.whole, memory.size = np.empty(size, np.uint8), size
        return memory

    def alias(self) -> SharedMemory:
        """The same memory, whose tensors keep another array alive."""
        other = copy.copy(self)
        other.whole = np.frombuffer(self.whole.data, np.uint8)  # not a view: those are views of the first
        return other

    def close(self) -> None:
        """Let go of it; the mapping ends with the last view."""
        self.whole, self.size = np.empty(0, np.uint8), 0

    def tensor(self, at: int, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
        """A view of a place; it keeps the mapping alive.

        Args:
            at: offset in bytes.
            dtype, shape: as in a header.

        Raises:
            WireError: ``place``.
        """
        size = shape[0] * shape[1] * dtype.itemsize
        self._check(at, size)
        return torch.from_numpy(self.whole[at : at + size]).view(dtype).view(shape)

    def write(self, at: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copy contiguous tensors to a place, one behind the other.

        Raises:
            WireError: ``place``.
        """
        self._check(at, sum(tensor.nbytes for tensor in tensors))
        for tensor in tensors:
            self.put(at, tensor)
            at += tensor.nbytes

    def put(self, at: int, tensor: torch.Tensor) -> None:
        """Copy a contiguous tensor to somewhere within a place that was checked."""
        data = tensor_bytes(tensor)
        self.whole[at : at + len(data)] = data  # numpy lets go of Python's lock for long ones

    def _check(self, at: int, size: int) -> None:
        """In Python's integers, which do not overflow, before there is a view."""
        if at % ALIGNMENT or not 0 <= at <= self.size - size:
            raise WireError("place", "the request or its answer does not lie within the session's memory")


def aligned(size: int) -> int:
    """Rounded up, so that what follows is aligned."""
    return -(-size // ALIGNMENT) * ALIGNMENT
