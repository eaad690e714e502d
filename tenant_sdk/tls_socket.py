"""The socket of a TLS connection: what it knows of itself beyond Python's own, and how it ends in a child."""

from __future__ import annotations

import os
import ssl

from shared.forks import own


class TlsSocket(ssl.SSLSocket):
    """Made by ``connect.client_context``'s contexts."""

    def do_handshake(self, block: bool = False) -> None:
        """See ``ssl.SSLSocket``."""
        own(self)
        super().do_handshake(block)

    def forked(self) -> None:
        """See ``shared.forks``. OpenSSL's state is left alone: another thread may have been inside of it."""
        descriptor = self.detach()
        if descriptor >= 0:
            os.close(descriptor)
