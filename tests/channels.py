"""Channels to scripted executors, and what is asked over them."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from raw_peers import (
    REPLY,
    SECONDS,
    Fields,
    Peer,
    scripted_executor,
)

from shared.wire.header import DTYPE_CODES, Direction, Header, Operation
from shared.wire.incoming import Incoming
from shared.wire.protocol import GroupShape
from tenant_sdk.connection.channel import Channel, ResponseFuture
from tenant_sdk.connection.clock import CLOCK, Clock
from tenant_sdk.connection.handshake import client_context, open_connection
from tenant_sdk.connection.websocket_channel import WebsocketChannel

SHAPE = GroupShape(4, (4,))


def submit(channel: Channel, rows: int = 1, value: float = 1.0) -> ResponseFuture:
    """A product of rows of 4 equal values."""
    return channel.submit(
        lambda protocol: protocol.product(
            Header(Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.float32], rows=rows, members=1),
            SHAPE,
        ),
        [torch.full((rows, 4), value)],
    )


def ask(channel: Channel, rows: int = 1, value: float = 1.0) -> Incoming:
    """The answer of such a product."""
    return channel.wait(submit(channel, rows, value))


def answer(peer: Peer, fields: Fields, body: bytes) -> None:
    """Send the rows back."""
    peer.message(struct.pack("<BBBBIIIIHHQ", *fields._replace(operation=REPLY)), body)


def echo(peer: Peer) -> None:
    """Answer everything."""
    while True:
        answer(peer, *peer.receive())


def until_the_end(peer: Peer) -> None:
    """Read and answer nothing."""
    while not peer.at_end():
        pass


@contextmanager
def channel_to(
    tls_dir: Path, script: Callable[[Peer], None], *, timeout: float = SECONDS, clock: Clock = CLOCK
) -> Iterator[Channel]:
    """A channel to a scripted executor."""
    with scripted_executor(tls_dir, script) as url:
        sock = open_connection(url, "token", client_context(tls_dir / "ca.pem"), SECONDS)
        channel = WebsocketChannel(sock, url, timeout=timeout, entropy=os.urandom, clock=clock)
        try:
            yield channel
        finally:
            channel.close()


def error_of(future: Future[Any]) -> BaseException | None:
    """What a thread raised, or None; fails if it hangs."""
    return future.exception(timeout=SECONDS)
