"""Which transport leads to an executor: TLS websocket, shared memory on this machine, or a call."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable

from shared.transport.endpoint import Endpoint
from tenant_sdk.connection.channel import Channel
from tenant_sdk.connection.colocated import open_colocated
from tenant_sdk.connection.handshake import check_token, open_connection
from tenant_sdk.connection.inprocess import InprocessChannel
from tenant_sdk.connection.urls import over_tls
from tenant_sdk.connection.websocket_channel import WebsocketChannel


def open_channel(
    where: str | Endpoint,
    token: str,
    context: ssl.SSLContext,
    timeout: float,
    on_connect: Callable[[ssl.SSLSocket | None], None],
) -> Channel:
    """Connect to an executor.

    Args:
        where: ``wss://host:port``, ``ipc://`` and a directory, or an executor in this process.
        token: as the provider printed it.
        context: for TLS.
        timeout: seconds without progress.
        on_connect: told who is there, the socket after TLS or None for this machine; raises to go no further.

    Raises:
        ConfigurationError, ConnectError: no session, with the reason.
    """
    if not isinstance(where, str):
        on_connect(None)
        return InprocessChannel(where, token)
    if not over_tls(where):
        check_token(token)
        on_connect(None)
        return open_colocated(where, token, timeout)
    sock = open_connection(where, token, context, timeout)
    try:
        on_connect(sock)
        return WebsocketChannel(sock, where, timeout=timeout, entropy=os.urandom)
    except BaseException:
        sock.close()
        raise
