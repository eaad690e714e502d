"""Requests a second of one executor process: rows of 3 KiB from many connections, against a bare echo.

    python benchmarks/request_rate.py --rounds 5

Clients are one process that computes nothing: each connection sends its next request as soon as it has the
answer of the last. The echo is uvloop's event loop, which is C, with the same bytes over the same TLS and no
product. Processor time is the serving process's, products included.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import ssl
import statistics
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from common import Executor, arguments, cpu_seconds, executor, save, spread, write_model
from rich.console import Console
from rich.table import Table

from provider.serve.server import server_context
from shared.wire.frames import encode_message
from shared.wire.header import DTYPE_CODES, HEADER_BYTES, Direction, Header, Operation
from shared.wire.messages import Hello, encode
from tenant_sdk.connection.handshake import client_context, open_connection, open_tcp, start_tls

MASK = b"rate"
WIDTH, OUTPUTS = 768, 2304  # q, k and v of a model with d = 768


def framed(header: Header, body: Any) -> bytes:
    return b"".join(bytes(piece) for piece in encode_message(header, body, MASK))


PRODUCT = Header(Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.float32], 0, 7, 1, WIDTH, 7)
REQUEST = framed(PRODUCT, [torch.ones(1, WIDTH)])
ANSWER_BYTES = 4 + HEADER_BYTES + 4 * OUTPUTS


def greeted(running: Executor, name: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection that has been said HELLO on, and its WELCOME read."""
    sock = open_connection(running.url, running.tokens.add(name), context, 30.0)
    hello = encode(Hello("request_rate"))
    sock.sendall(framed(Header(Operation.HELLO, request_id=1, rows=1, columns=len(hello)), hello))
    sock.settimeout(30.0)
    data = sock.recv(1 << 16)
    kind = data[1] & 127
    size, start = struct.unpack("!H", data[2:4])[0], 4
    if kind == 127:
        size, start = struct.unpack("!Q", data[2:10])[0], 10
    got = len(data)
    while got < size + start:
        got += len(sock.recv(1 << 16))
    return sock


def drive(sockets: list[ssl.SSLSocket], pid: int, seconds: float) -> tuple[float, float]:
    """Requests a second, and the serving process's processor seconds for each."""
    epoll = select.epoll()
    waiting: dict[int, list[Any]] = {}
    buffer = bytearray(1 << 16)
    for sock in sockets:
        sock.setblocking(False)
        epoll.register(sock, select.EPOLLIN)
        waiting[sock.fileno()] = [sock, 0]
        sock.send(REQUEST)
    for phase in (1.0, seconds):  # the first warms up
        began, cpu, done = time.perf_counter(), cpu_seconds(pid), 0
        while time.perf_counter() - began < phase:
            for descriptor, _ in epoll.poll(1.0):
                state = waiting[descriptor]
                try:
                    while state[1] < ANSWER_BYTES:
                        count = state[0].recv_into(buffer)
                        if not count:
                            raise SystemExit("a connection was closed")
                        state[1] += count
                except ssl.SSLWantReadError:
                    continue
                state[1] -= ANSWER_BYTES
                done += 1
                state[0].send(REQUEST)
        took = time.perf_counter() - began
    epoll.close()
    return done / took, (cpu_seconds(pid) - cpu) / done


def echo(tls: str, told: Any) -> None:
    """Answer so many bytes with so many others, with uvloop."""
    import asyncio

    import uvloop

    class Echo(asyncio.Protocol):
        got = 0

        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.got += len(data)
            while self.got >= len(REQUEST):
                self.got -= len(REQUEST)
                self.transport.write(bytes(ANSWER_BYTES))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Echo, "127.0.0.1", 0, ssl=server_context(tls))
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(main())


def main() -> None:
    """Measure in turn, print a table, write request_rate.json."""
    parser = arguments(__doc__, rounds=5, output="out/bench")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_model(work / "model", layers=2)
        with executor(work / "model", work / "work") as running:
            context = client_context(running.ca)
            ours, theirs = multiprocessing.Pipe()
            bare = multiprocessing.get_context("spawn").Process(
                target=echo, args=(str(running.ca.parent), theirs), daemon=True
            )
            bare.start()
            port = ours.recv()
            for round_number in range(options.rounds):
                for count in options.connections:
                    for what in ("echo", "executor"):
                        sockets = []
                        for i in range(count):
                            if what == "echo":
                                raw = open_tcp("127.0.0.1", port, 30.0)
                                sockets.append(start_tls(raw, "127.0.0.1", context))
                            else:
                                sockets.append(greeted(running, f"{round_number}-{count}-{i}", context))
                        pid = running.pid if what == "executor" else int(bare.pid or 0)
                        result = drive(sockets, pid, options.seconds)
                        found.setdefault(f"{what}, {count}", []).append(result)
                        for sock in sockets:
                            sock.close()
            bare.terminate()
    table = Table("connections", "executor, requests/s", "echo, requests/s", "ratio", "executor, us each")
    for count in options.connections:
        ours_, bare_ = found[f"executor, {count}"], found[f"echo, {count}"]
        ratio = statistics.median(r[0] for r in ours_) / statistics.median(r[0] for r in bare_)
        table.add_row(
            str(count),
            spread([r[0] for r in ours_], digits=0),
            spread([r[0] for r in bare_], digits=0),
            f"{ratio:.2f}",
            spread([r[1] for r in ours_], 1e6, 0),
        )
    Console().print(table)
    save(options.output / "request_rate.json", found)


if __name__ == "__main__":
    main()
