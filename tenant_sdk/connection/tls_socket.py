"""The socket of a TLS connection: it notes which group was agreed, and ends without a word in a child."""

from __future__ import annotations

import os
import socket
import ssl

from shared.forks import register_for_fork
from tenant_sdk.connection.key_exchange import UNKNOWN, group_of, peek


class TlsSocket(ssl.SSLSocket):
    """Made by the contexts of ``handshake.client_context``.

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
