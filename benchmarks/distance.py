"""A relay that holds back what passes: an executor on the same machine, as far away as a network makes it.

``distance.py PORT SECONDS`` prints its own port of 127.0.0.1; what comes there leaves so many seconds later.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

from common import Executor


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """One direction of a connection, until it ends."""
    in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def arrive() -> None:
        data = b"first"
        while data:
            due, data = await in_flight.get()
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            writer.write(data)
            await writer.drain()
        writer.close()

    arriving, data = asyncio.create_task(arrive()), b"first"
    while data:
        try:
            data = await reader.read(1 << 18)
        except ConnectionError:
            data = b""
        in_flight.put_nowait((asyncio.get_running_loop().time() + seconds, data))
    await asyncio.gather(arriving, return_exceptions=True)


async def relay(port: int, seconds: float) -> None:
    """Until the process ends."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        await asyncio.gather(carry(reader, back, seconds), carry(there, writer, seconds))

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def away(running: Executor, round_trip: float) -> Iterator[Executor]:
    """The same executor, so many seconds away, until the block ends."""
    if not round_trip:
        yield running
        return
    port = urlsplit(running.url).port
    command = [sys.executable, __file__, str(port), str(round_trip / 2)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield replace(running, url=f"wss://127.0.0.1:{int(process.stdout.readline())}")
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    asyncio.run(relay(int(sys.argv[1]), float(sys.argv[2])))
