"""Websocket peers by the ``websockets`` library, for tests, which block.

They run in event loops: the library's own blocking peers use one TLS socket from two threads at once, which
OpenSSL does not allow, and now and then hang or crash.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from raw_peers import SECONDS, SUBPROTOCOL
from websockets.asyncio.client import connect
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import ServerConnection, serve
from websockets.protocol import Protocol

T = TypeVar("T")


class _Loop:
    """An event loop in a thread of its own, for as long as the block lasts."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> _Loop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T], seconds: float | None = SECONDS) -> T:
        """What it returns or raises; TimeoutError if it takes longer."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, seconds), self._loop).result()


class Peer:
    """One end of a connection.

    Attributes:
        library: the connection as the library has it, to look at.
    """

    def __init__(self, loop: _Loop, library: Connection) -> None:
        self._loop, self.library = loop, library

    def send(self, message: str | bytes | Iterable[bytes]) -> None:
        """A message, in one frame or in those given."""
        self._loop.run(self.library.send(message))

    def recv(self, seconds: float | None = SECONDS) -> str | bytes:
        """The next message; None waits for ever."""
        return self._loop.run(self.library.recv(), seconds)

    def ping(self, data: bytes) -> None:
        """Wait for the answer to one."""

        async def answered() -> None:
            await (await self.library.ping(data))

        self._loop.run(answered())

    def write(self, frames: Callable[[Protocol], object]) -> None:
        """Frames that the library would not send like this: ``frames(protocol)``."""

        async def written() -> None:
            frames(self.library.protocol)
            self.library.send_data()

        self._loop.run(written())

    def write_raw(self, data: bytes) -> None:
        """Bytes that are no frame."""

        async def written() -> None:
            self.library.transport.write(data)

        self._loop.run(written())

    def cut(self) -> None:
        """End the connection without a word."""
        self.library.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    def close(self, code: int = 1000) -> None:
        """Say why, and wait for the other side."""
        self._loop.run(self.library.close(code))


@contextmanager
def dialled(url: str, ca: Path, authorization: str, **options: Any) -> Iterator[Peer]:
    """A client, closed in the end; ``options`` are the library's."""
    given: dict[str, Any] = {
        "ssl": ssl.create_default_context(cafile=str(ca)),
        "subprotocols": [SUBPROTOCOL],
        "additional_headers": {"Authorization": authorization},
        "max_size": None,
        "proxy": None,
    }

    async def open_() -> Connection:
        return await connect(url, **(given | options))

    with _Loop() as loop:
        peer = Peer(loop, loop.run(open_()))
        try:
            yield peer
        finally:
            peer.close()


@contextmanager
def serving(handler: Callable[[Peer], None], tls_dir: Path, **options: Any) -> Iterator[str]:
    """A server; yields its URL. Each connection has a thread; who is left in the end is told 1001."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls_dir / "server.pem", tls_dir / "server.key")
    with _Loop() as loop, ThreadPoolExecutor(64) as threads:

        async def run(library: ServerConnection) -> None:
            await asyncio.get_running_loop().run_in_executor(threads, handler, Peer(loop, library))

        async def open_() -> Any:
            given: dict[str, Any] = {"ssl": context, "subprotocols": [SUBPROTOCOL], "max_size": None}
            return await serve(run, "127.0.0.1", 0, **(given | options))

        async def close() -> None:
            server.close()
            await server.wait_closed()

        server = loop.run(open_())
        try:
            yield f"wss://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            loop.run(close())
