"""A bare echo over TLS with the websockets library: what a round trip costs without us.

Usage: echo_server.py TLS_DIR PORT_FILE
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from pathlib import Path

from websockets.asyncio.server import ServerConnection, serve


async def echo(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


async def main(tls: Path, port_file: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(tls / "server.pem", tls / "server.key")
    async with serve(echo, "127.0.0.1", 0, ssl=context, compression=None, max_size=1 << 28) as server:
        temporary = port_file.with_suffix(".new")
        temporary.write_text(str(server.sockets[0].getsockname()[1]))
        temporary.replace(port_file)
        await asyncio.Future()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
