"""The socket of a TLS connection: it records the agreed group, and ends without a word in a child."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shared.forks import register_for_fork
from tenant_sdk.connection.key_exchange import UNKNOWN, group_of, peek


class ClientTlsSocket(ssl.SSLSocket):
    """The class of sockets of ``handshake.client_context``.

    Attributes:
        seen_group: see ``key_exchange.agreed``, which asks Python first.
    """

    seen_group = UNKNOWN

    def do_handshake(self, block: bool = False) -> None:
        """See ``ssl.SSLSocket``."""
        register_for_fork(self)
        timeout = self.gettimeout()
        if timeout and hasattr(socket, "TCP_CORK") and not hasattr(self, "group"):
            # Held back, so that nothing can be there yet when OpenSSL has written its part and would read on.
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            self.settimeout(0)
            try:
                super().do_handshake()
            except ssl.SSLWantReadError:
                pass
            finally:
                self.settimeout(timeout)
                self.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
            self.seen_group = group_of(peek(self, timeout))
        super().do_handshake(block)

    def forked(self) -> None:
        """See ``shared.forks``. OpenSSL's state is left alone: another thread may have been inside of it."""
        descriptor = self.detach()
        if descriptor >= 0:
            os.close(descriptor)


def end_reads(sock: socket.socket) -> None:
    """End what another thread reads from a socket; it then gets no more than has arrived.

    OpenSSL reads until a record has data. A peer that sends only records without any, such as session
    tickets, keeps the thread for as long as it sends: neither a timeout nor Ctrl-C reaches it.
    """
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # that of ``SSLSocket`` would also end its TLS
    except OSError:
        pass  # it has ended


@contextmanager
def reads_end(sock: socket.socket, seconds: float) -> Iterator[None]:
    """Limit the time of the reads in the block, whatever the peer sends; see ``end_reads``."""
    timer = threading.Timer(seconds, end_reads, [sock])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
