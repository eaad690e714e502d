"""Sockets of libraries that listen although nobody shall connect to them."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # a filter's one instruction: keep 0 bytes of a packet


def drop_all_packets(listener: socket.socket) -> None:
    """Have the kernel drop every packet that comes to a listening socket.

    Its owner goes on listening, and notices nothing. To close it instead would make the owner fail.
    """
    code = ctypes.create_string_buffer(_RETURN_NOTHING, len(_RETURN_NOTHING))
    program = struct.pack("HP", 1, ctypes.addressof(code))  # struct sock_fprog, with its padding
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


@contextmanager
def groups_without_listeners() -> Iterator[None]:
    """Around the making of process groups: close their listening sockets, once all members are connected.

    gloo listens on a port for each group, has no key, keeps the descriptor of every connection, and ends the
    process when it has no more.
    """
    before = {each.getsockname() for each in _listening()}
    yield
    for each in _listening():
        if each.getsockname() not in before:
            drop_all_packets(each)


def _listening() -> Iterator[socket.socket]:
    """TCP sockets of this process that listen; each is the caller's until it asks for the next one."""
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptor = os.dup(int(name))
        except OSError:  # that of the folder itself
            continue
        try:
            each = socket.socket(fileno=descriptor)
        except OSError:  # no socket
            os.close(descriptor)
            continue
        with each:
            internet = each.family in (socket.AF_INET, socket.AF_INET6)
            if internet and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield each
