"""Which transport leads to an executor: TLS websocket, shared memory on this machine, or a call."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable

from tenant_sdk.connection.channel import Channel
from tenant_sdk.connection.colocated import open_colocated
from tenant_sdk.connection.handshake import check_token, open_connection, open_tcp, start_tls
from tenant_sdk.connection.inprocess import InprocessChannel
from tenant_sdk.connection.places import Place
from tenant_sdk.connection.urls import over_tls, split_url
from tenant_sdk.connection.websocket_channel import WebsocketChannel

OnConnect = Callable[[ssl.SSLSocket | None], None]


def open_channel(
    place: Place,
    token: str,
    context: ssl.SSLContext,
    timeout: float,
    on_connect: OnConnect,
    opening: float | None = None,
) -> Channel:
    """Connect to an executor.

    Args:
        place: ``wss://host:port``, ``ipc://`` and a directory, or an executor in this process.
        token: as the provider printed it.
        context: for TLS.
        timeout: seconds without progress.
        on_connect: told who is there, the socket after TLS or None for this machine; raises to go no further.
        opening: seconds without progress until it is open; default: ``timeout``.

    Raises:
        ConfigurationError, ConnectError: no session, with the reason.
    """
    where = place.where
    if not isinstance(where, str):
        on_connect(None)
        return InprocessChannel(where, token)
    if not over_tls(where):
        check_token(token)
        on_connect(None)
        return open_colocated(where, token, timeout)
    sock = open_connection(where, token, context, opening or timeout, place.address)
    try:
        on_connect(sock)
        return WebsocketChannel(sock, str(place), timeout=timeout, entropy=os.urandom)
    except BaseException:
        sock.close()
        raise


def look_at(place: Place, context: ssl.SSLContext, timeout: float, on_connect: OnConnect) -> None:
    """See who is there, and say nothing: neither a token nor a request.

    Args and Raises: see ``open_channel``.
    """
    if not isinstance(place.where, str) or not over_tls(place.where):
        on_connect(None)
        return
    host, port = split_url(place.where)
    with open_tcp(host, port, timeout, place.address) as raw, start_tls(raw, host, context) as sock:
        on_connect(sock)
