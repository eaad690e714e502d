"""A proxy between a tenant and a real executor that reads, keeps, withholds and changes messages.

It ends TLS on both sides and speaks websocket by the ``websockets`` library alone, so nothing of the
project's framing is used; headers are read with ``raw_peers``.
"""

from __future__ import annotations

import contextlib
import json
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from conftest import Executor
from raw_peers import FETCH, PRODUCT, REPLY, WELCOME, Fields
from their_peers import Peer, dialled, serving
from websockets.exceptions import ConnectionClosed

from shared.wire.messages import Manifest, decode, digest_of, encode

SEED_EFFECT = 8
PRODUCTS = (PRODUCT, SEED_EFFECT)
_LAYOUT = "<BBBBIIIIHHQ"


class Message(NamedTuple):
    """A header and the bytes behind it."""

    fields: Fields
    body: bytes


def parse(data: bytes | str) -> Message:
    """A whole message."""
    assert isinstance(data, bytes)
    return Message(Fields(*struct.unpack_from(_LAYOUT, data)), data[32:])


# A request and its answer's body to the body that the tenant gets.
Change = Callable[[Message, bytes], bytes]


class InterceptingProxy:
    """Sits at an address of its own; ``executor`` is what a tenant connects to.

    Attributes:
        behind: the executor; another one for connections to come.
        changes: applied to answers of products (and effects), one after the other.
        scales: makes of a fetch and its answer, which holds scales, what the tenant gets.
        manifest: applied to the manifest, decoded.
        keep: whether to keep requests.
        requests: of products, as they came, if kept.
        gate: answers of products wait while it is closed.
        held: how many connections' answers wait.
        asked: set by the next request of a product, for who waits for one.
    """

    def __init__(self, upstream: Executor, tls_dir: Path) -> None:
        self.upstream = upstream
        self._connections: set[Peer] = set()
        self.changes: list[Change] = []
        self.scales: Callable[[dict[str, Any], bytes], bytes] = lambda _, body: body
        self.manifest: Callable[[dict[str, Any]], dict[str, Any]] = lambda manifest: manifest
        self.keep = False
        self.requests: list[Message] = []
        self.gate = threading.Event()
        self.gate.set()
        self.product_requested = threading.Event()
        self.held = 0
        self._serving = contextlib.ExitStack()
        url = self._serving.enter_context(serving(self._relay, tls_dir, compression=None))
        self.executor = Executor(url, upstream.token, upstream.ca)

    def _relay(self, tenant: Peer) -> None:
        self._connections.add(tenant)
        assert tenant.library.request is not None
        authorization = tenant.library.request.headers["Authorization"]
        with (
            contextlib.suppress(ConnectionClosed),
            dialled(self.upstream.url, self.upstream.ca, authorization, compression=None) as executor,
        ):
            # Executors answer in order, so one after the other loses nothing.
            while True:
                data = tenant.recv(None)
                request = parse(data)
                executor.send(data)
                if request.fields.operation in PRODUCTS:
                    if self.keep:
                        self.requests.append(request)
                    self.product_requested.set()
                tenant.send(self._changed(request, executor.recv()))

    def _changed(self, request: Message, data: bytes | str) -> bytes:
        fields, body = parse(data)
        operation = request.fields.operation
        if fields.operation == WELCOME:
            lie = decode(json.dumps(self.manifest(json.loads(body))).encode(), Manifest)
            body = encode(msgspec.structs.replace(lie, digest=digest_of(lie)))  # or nobody would read further
            fields = fields._replace(columns=len(body))
        elif operation == FETCH:
            fetch = json.loads(request.body)
            if fetch["kind"] == "scales":
                body = self.scales(fetch, body)
        elif operation in PRODUCTS and fields.operation == REPLY:
            for change in self.changes:
                body = change(request, body)
            self.held += 1
            self.gate.wait()
            self.held -= 1
        return struct.pack(_LAYOUT, *fields) + body

    def cut(self) -> None:
        """End all connections without a word; new ones are welcome."""
        while self._connections:
            self._connections.pop().cut()

    def claim(self, other: Executor) -> None:
        """Have the executor claim another one's weights: its digest, bounds and scales."""
        with other.connect() as session:
            theirs = [session.executor.scales(group) for group in range(len(session.manifest.groups))]
            manifest = json.loads(encode(session.manifest))
        self.manifest = lambda _: manifest
        self.scales = lambda fetch, _: (
            theirs[int(fetch["name"])][fetch["start"] : fetch["stop"]].numpy().tobytes()
        )

    def close(self) -> None:
        """End; connections are dropped."""
        self.gate.set()
        self._serving.close()


@contextlib.contextmanager
def intercepted(upstream: Executor, tls_dir: Path) -> Iterator[InterceptingProxy]:
    """A proxy for as long as the block lasts."""
    proxy = InterceptingProxy(upstream, tls_dir)
    try:
        yield proxy
    finally:
        proxy.close()
