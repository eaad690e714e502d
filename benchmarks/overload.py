"""Three times as much work as an executor can do, in rounds: refusals, memory, and others' waiting times.

    python benchmarks/overload.py --minutes 10

The executor is a process of its own, with a quota of rows in flight. A round has three parts: silence, in
which its memory is noted; full load, in which six tenants keep as many rows in flight as their quota allows;
overload, in which eighteen tenants keep three times as many, and repeat at once what is refused. Meanwhile
clients that squat are connected: they do not finish TLS, a handshake, HELLO or a request, or read no answer.
In full load and overload another tenant, within its quota, asks for one row at a time.

It exits with 1 if memory after the last round is more than a tenth above that before the second; if the
p99 of the tenant within its quota is above three times that at full load; if a refusal has no ``retry_after``
or another code than ``overloaded``; or if a tenant's connection ends without a close frame.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import ssl
import statistics
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from common import Executor, executor, pss_mib, write_model
from rich.console import Console
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

import tenant_sdk
from shared.wire.header import (
    DTYPE_CODES,
    EXACT,
    HEADER_BYTES,
    SUBPROTOCOL,
    Direction,
    Header,
    Operation,
    parse_header,
)
from shared.wire.messages import ErrorInfo, Hello, decode, encode
from tenant_sdk.connection.keys import ProductKey

WIDTH = 512
REQUEST_ROWS, QUOTA = 16, 64  # rows of a request, and of a tenant in flight
TENANTS, TIMES = 6, 3
AFTER_REFUSAL = 0.003  # seconds; the executor asks for more
IDLE, FULL, OVER = 0.15, 0.35, 0.5  # shares of a round
SQUATTERS = 8  # of each of five kinds
MAX_MEMORY, MAX_TIMES = 1.1, 3.0
HELLO = encode(Hello("overload"))
ROWS = Header(
    *(Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.int32], 0, 1, REQUEST_ROWS, WIDTH, 7),
    answer_bits=EXACT,
)
console = Console(width=None if sys.stdout.isatty() else 120)


class Load(NamedTuple):
    """What a process of tenants is told: until when which tenants send, and how much each at once."""

    url: str
    ca: str
    tokens: list[str]
    window: int
    seconds: float
    squat: bool


class Tenant:
    """A tenant that keeps a window of requests in flight and repeats those that are refused."""

    def __init__(self, load: Load, token: str, counts: Counter[str]) -> None:
        self.load, self.token, self.counts = load, token, counts
        self.payload = b"\1" * (4 * REQUEST_ROWS * WIDTH)

    async def run(self, until: float) -> None:
        """Send and count until then."""
        try:
            async with opened(self.load, self.token) as connection:
                await greet(connection)
                for at in range(self.load.window):
                    await self._send(connection, at)
                while time.monotonic() < until:
                    answer = await connection.recv(decode=False)
                    header = parse_header(answer)
                    if header.operation == Operation.ERROR:
                        await self._refused(decode(answer[HEADER_BYTES:], ErrorInfo))
                    else:
                        self.counts["answers"] += 1
                    await self._send(connection, header.request_id)
        except ConnectionClosed as error:
            told = error.rcvd
            self.counts[f"closed: {told.code} {told.reason}" if told else "closed without a reason"] += 1

    async def _send(self, connection: ClientConnection, number: int) -> None:
        await connection.send(ROWS._replace(request_id=number).pack() + self.payload)

    async def _refused(self, error: ErrorInfo) -> None:
        wait = "" if error.retry_after else ", no retry_after"
        self.counts[f"refused: {error.code}{wait}"] += 1
        await asyncio.sleep(AFTER_REFUSAL)


def opened(load: Load, token: str) -> connect:
    """A websocket with a token."""
    return connect(
        load.url,
        ssl=trusting(load.ca),
        subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]
        additional_headers={"Authorization": f"Bearer {token}"},
        compression=None,
        max_size=None,
        ping_interval=None,
    )


def trusting(ca: str) -> ssl.SSLContext:
    """TLS 1.3 with an authority of one's own."""
    context = ssl.create_default_context(cafile=ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


async def greet(connection: ClientConnection) -> None:
    """Say HELLO and read WELCOME."""
    await connection.send(Header(Operation.HELLO, request_id=1, rows=1, columns=len(HELLO)).pack() + HELLO)
    await connection.recv()


async def squat(load: Load, kind: int, token: str) -> None:
    """Hold a connection in one of five states, until the executor ends it; then another."""
    at = urlsplit(load.url)
    while True:
        with contextlib.suppress(OSError, ConnectionClosed):
            if kind < 2:
                security = trusting(load.ca) if kind else None
                reader, writer = await asyncio.open_connection(at.hostname, at.port, ssl=security)
                writer.write(b"GET / HTTP/1.1\r\nHost: " if kind else b"\x16\x03\x01")
                await reader.read()
                writer.close()
                continue
            async with opened(load, token) as connection:
                if kind > 2:
                    await greet(connection)
                if kind == 3:  # half a request
                    connection.transport.write(b"\x82\xff" + (HEADER_BYTES + 4 * WIDTH).to_bytes(8, "big"))
                    connection.transport.write(bytes(4) + ROWS._replace(rows=1).pack())
                if kind == 4:  # answers that nobody reads
                    connection.transport.pause_reading()
                    payload = b"\1" * (4 * REQUEST_ROWS * WIDTH)
                    while True:
                        await connection.send(ROWS.pack() + payload)
                await connection.wait_closed()
        await asyncio.sleep(0.5)


async def loaded(load: Load, pipe: Connection) -> None:
    """Run all tenants, and those that squat; tell the counts, and end this process with its connections."""
    counts: Counter[str] = Counter()
    until = time.monotonic() + load.seconds
    kinds = range(5) if load.squat else ()
    squatters = [
        asyncio.create_task(squat(load, kind, load.tokens[at])) for kind in kinds for at in range(SQUATTERS)
    ]
    await asyncio.gather(*(Tenant(load, token, counts).run(until) for token in load.tokens))
    failed = [task for task in squatters if task.done()]
    pipe.send(counts + Counter({f"a squatter failed: {task.exception()!r}": 1 for task in failed}))
    os._exit(0)


def run_load(load: Load, pipe: Connection) -> None:
    """Main of a process."""
    os.nice(10)  # the load is that of other machines, and must not take this one's processors
    torch.set_num_threads(1)
    asyncio.run(loaded(load, pipe))


def beside(load: Load, session: tenant_sdk.Session) -> tuple[list[float], Counter[str]]:
    """Seconds of single rows of a tenant within its quota while a load runs; and what its tenants counted."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_load, args=(load, theirs))
    process.start()
    times: list[float] = []
    row = torch.ones((1, WIDTH), dtype=torch.int32)
    while not ours.poll():
        began = time.monotonic()
        session.executor.submit(Operation.PRODUCT, ProductKey(0, Direction.FORWARD, 7), [row]).result()
        times.append(time.monotonic() - began)
        time.sleep(0.01)
    counts: Counter[str] = ours.recv()
    process.join()
    return times, counts


def p99(times: list[float]) -> float:
    """In milliseconds."""
    return 1e3 * statistics.quantiles(times, n=100)[98]


def rounds(running: Executor, count: int, seconds: float) -> list[str]:
    """Print each round; what did not hold."""
    tokens = [running.tokens.add(f"tenant-{at}") for at in range(TIMES * TENANTS)]
    window = QUOTA // REQUEST_ROWS
    memory: list[float] = []
    alone: list[float] = []
    within: list[float] = []
    all_counts: Counter[str] = Counter()
    with tenant_sdk.connect(running.url, token=running.token, ca=running.ca, privacy="plain") as session:
        for number in range(count):
            time.sleep(IDLE * seconds)
            memory.append(pss_mib(running.pid))
            load = Load(running.url, str(running.ca), tokens[:TENANTS], window, FULL * seconds, squat=False)
            full, done = beside(load, session)
            load = load._replace(tokens=tokens, window=TIMES * window, seconds=OVER * seconds, squat=True)
            over, counts = beside(load, session)
            rates = done["answers"] / FULL / seconds, counts["answers"] / OVER / seconds
            rest = {kind: count for kind, count in counts.items() if kind != "answers"}
            offered = counts.total() / OVER / seconds / rates[0]
            console.print(
                f"round {number + 1}: {memory[-1]:.0f} MiB; p99 {p99(full):.1f} ms at full load "
                f"({rates[0]:.0f} answers a second), {p99(over):.1f} ms in overload ({rates[1]:.0f}, "
                f"{offered:.1f} times as many asked for); {rest}"
            )
            alone, within = alone + full, within + over
            all_counts += done + counts
        time.sleep(IDLE * seconds)
        memory.append(pss_mib(running.pid))
    ratio, grown = p99(within) / p99(alone), memory[-1] / memory[min(1, len(memory) - 2)]
    failed = [kind for kind in all_counts if kind not in ("answers", "refused: overloaded")]
    failed += [f"p99 {ratio:.2f} times that at full load"] if ratio > MAX_TIMES else []
    failed += [f"memory {grown:.2f} times"] if grown > MAX_MEMORY else []
    console.print(
        f"p99 within the quota: {ratio:.2f} times that at full load; memory {grown:.2f} times that before "
        f"the second round; {all_counts['answers']:,} answers, "
        f"{all_counts['refused: overloaded']:,} refusals; failed: {', '.join(failed) or 'nothing'}",
        soft_wrap=True,
    )
    return failed


def main() -> int:
    """Run; 1 if something did not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name:
        folder = Path(name)
        write_model(folder / "model", layers=2, width=WIDTH, feed_forward=1024, heads=8, vocabulary=500)
        quota = ("--numerics", "ring", "--tenant-rows", str(QUOTA))
        with executor(folder / "model", folder / "executor", *quota) as running:
            failed = rounds(running, options.rounds, 60 * options.minutes / options.rounds)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
