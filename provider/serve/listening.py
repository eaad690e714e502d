"""The socket at which an executor listens: its port is taken first, and opened once it can serve."""

from __future__ import annotations

import errno
import os
import socket

from shared.errors import ConfigurationError, Metavar, OptionReference, OptionText

BACKLOG = 128


def bound(host: str, port: int, option: str = "port") -> socket.socket:
    """Returns a socket with an address, at which nobody can connect before ``listen``.

    Args:
        option: the name of the option that gave the port.

    Raises:
        ConfigurationError: the port is in use, or there is no such address here.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as socket.create_server does
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise _refused(host, port, error, option) from error
    return sock


def listen(sock: socket.socket) -> socket.socket:
    """Let others connect to a socket that is ``bound``; returns it.

    Raises:
        ConfigurationError: somebody else took the port in between.
    """
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        host, port, *_ = sock.getsockname()
        raise _refused(host, port, error) from error
    return sock


def _refused(host: str, port: int, error: OSError, option: str = "port") -> ConfigurationError:
    number = OptionReference(option, Metavar("NUMBER"))
    advice = {
        errno.EADDRINUSE: OptionText(
            "; end the process that listens there, or choose another {} (0: any)", number
        ),
        errno.EACCES: OptionText("; choose {} above 1023", number),
        errno.EADDRNOTAVAIL: OptionText("; {host} is one of this machine's", host=Metavar("ADDRESS")),
    }.get(error.errno or 0, "")
    return ConfigurationError("cannot listen on {}:{}: {}{}", host, port, str(error.strerror), advice)
