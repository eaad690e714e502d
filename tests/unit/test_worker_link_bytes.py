"""What a link does with bytes that no worker of this version sends."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import pytest

from provider.workers.link import ALIVE, MEMORY, LocalLink

FRAME = struct.Struct("<IB")


@pytest.fixture
def ends() -> Iterator[tuple[LocalLink, socket.socket]]:
    """A link, and the socket at its other end."""
    ours, theirs = socket.socketpair()
    link = LocalLink(ours)
    with theirs:
        yield link, theirs
    link.close()


def test_memory_without_a_descriptor_ends_the_link(ends: tuple[LocalLink, socket.socket]) -> None:
    link, theirs = ends
    theirs.sendall(FRAME.pack(8, MEMORY) + bytes(8))
    with pytest.raises(OSError, match="memory that is none"):
        link.receive()
    assert not link.memory


def test_a_descriptor_beside_another_message_ends_the_link(ends: tuple[LocalLink, socket.socket]) -> None:
    """And it is closed."""
    link, theirs = ends
    reads, writes = os.pipe()
    socket.send_fds(theirs, [FRAME.pack(0, ALIVE)], [writes])
    os.close(writes)
    with pytest.raises(OSError, match="memory that is none"):
        link.receive()
    with open(reads, "rb") as pipe:
        assert pipe.read() == b""  # nobody has the other end open


def test_a_length_takes_no_memory_before_its_bytes_are_there(ends: tuple[LocalLink, socket.socket]) -> None:
    link, theirs = ends
    theirs.sendall(FRAME.pack((1 << 32) - 1, ALIVE) + b"x")
    theirs.shutdown(socket.SHUT_WR)
    before = _peak()
    with pytest.raises(EOFError):
        link.receive()
    assert _peak() - before < 1 << 30


def _peak() -> int:
    """The largest address space that this process had, in bytes."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmPeak"))
    return int(line.split()[1]) << 10
