"""Sockets of libraries that listen although nobody shall connect to them."""

from __future__ import annotations

import ctypes
import os
import socket
import struct

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # a filter's one instruction: keep 0 bytes of a packet


def close_to_everybody(listener: socket.socket) -> None:
    """Have the kernel drop every packet that comes to a listening socket.

    Its owner goes on listening, and notices nothing. To close it instead would make the owner fail.
    """
    code = ctypes.create_string_buffer(_RETURN_NOTHING, len(_RETURN_NOTHING))
    program = struct.pack("HP", 1, ctypes.addressof(code))  # struct sock_fprog, with its padding
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def close_all_listeners() -> int:
    """Close all listening TCP sockets of this process to everybody; returns how many there are.

    vLLM makes a process group of one process. Its library (gloo) listens on two ports for other members, has
    no key, keeps the descriptor of every connection, and ends the process when it has no more.
    """
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptor = os.dup(int(name))
        except OSError:  # that of the folder itself
            continue
        try:
            with socket.socket(fileno=descriptor) as each:
                internet = each.family in (socket.AF_INET, socket.AF_INET6)
                if internet and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    close_to_everybody(each)
                    found += 1
        except OSError:  # no socket
            os.close(descriptor)
    return found
