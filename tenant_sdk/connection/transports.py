"""Which transport leads to an executor: TLS websocket, shared memory on this machine, or a call."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable

from tenant_sdk.connection.channel import Channel
from tenant_sdk.connection.clock import CLOCK, Clock
from tenant_sdk.connection.colocated import open_colocated
from tenant_sdk.connection.handshake import check_token, open_connection, open_tcp, start_tls
from tenant_sdk.connection.inprocess import InprocessChannel
from tenant_sdk.connection.replicas.addresses import Address
from tenant_sdk.connection.urls import over_tls, split_url
from tenant_sdk.connection.websocket_channel import WebsocketChannel

OnConnect = Callable[[ssl.SSLSocket | None], None]


def open_channel(
    address: Address,
    token: str,
    context: ssl.SSLContext,
    timeout: float,
    on_connect: OnConnect,
    opening: float | None = None,
    clock: Clock = CLOCK,
) -> Channel:
    """Connect to an executor.

    Args:
        address: ``wss://host:port``, ``ipc://`` and a directory, or an executor in this process.
        token: as the provider printed it.
        context: for TLS.
        timeout: see ``Channel``.
        on_connect: told who is there, the socket after TLS or None for this machine; raises to go no further.
        opening: seconds without progress until it is open; default: ``timeout``.
        clock: for these times.

    Raises:
        ConfigurationError, ConnectError: no session, with the reason.
    """
    target = address.target
    if not isinstance(target, str):
        on_connect(None)
        return InprocessChannel(target, token, timeout)
    if not over_tls(target):
        check_token(token)
        on_connect(None)
        return open_colocated(target, token, timeout, clock)
    sock = open_connection(target, token, context, opening or timeout, address.ip, clock)
    try:
        on_connect(sock)
        return WebsocketChannel(sock, str(address), timeout=timeout, entropy=os.urandom, clock=clock)
    except BaseException:
        sock.close()
        raise


def probe_executor(address: Address, context: ssl.SSLContext, timeout: float, on_connect: OnConnect) -> None:
    """See who is there, and say nothing: neither a token nor a request.

    Args and Raises: see ``open_channel``.
    """
    if not isinstance(address.target, str) or not over_tls(address.target):
        on_connect(None)
        return
    host, port = split_url(address.target)
    with open_tcp(host, port, timeout, address.ip) as raw, start_tls(raw, host, context) as sock:
        on_connect(sock)
