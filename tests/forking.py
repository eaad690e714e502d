"""Forked children of a test, also such as have their parent's process id."""

from __future__ import annotations

import os
import signal
import socket
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tenant_sdk import ConnectionLost

CHILD_SECONDS = 800  # a child that takes longer hangs, and is killed
_BYTES_SENT = 200  # tcpi_bytes_sent in Linux's struct tcp_info


def fork() -> int:
    """``os.fork`` without the warning that there are threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


@contextmanager
def as_in_a_new_namespace() -> Iterator[None]:
    """Children forked in the block believe that they have their parent's process id."""
    parent = os.getpid()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: parent)
        yield


def in_child(action: Callable[[], object]) -> None:
    """Run something in a child with the parent's process id; fails with what it raises, or if it hangs."""
    read, write = os.pipe()
    with as_in_a_new_namespace():
        child = fork()
        if child == 0:
            signal.alarm(CHILD_SECONDS)
            try:
                action()
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}".encode()[:4000])
            finally:
                os._exit(0)
    os.close(write)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with os.fdopen(read, "rb") as told:
        assert (status, told.read().decode()) == (0, "")


def refused(*actions: Callable[[], object]) -> None:
    """Every one of them is refused in a child."""
    for action in actions:
        with pytest.raises(ConnectionLost, match="stays in the process"):
            action()


def bytes_sent(sock: socket.socket) -> int:
    """By TCP, through whichever process's descriptor of this connection."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("<Q", info, _BYTES_SENT)[0])
