"""One large request over a link of 1 Gbit/s each way: do upload, product and download overlap?

    python benchmarks/link.py --rounds 5
    python benchmarks/link.py --rounds 3 --iteration   # of training, instead

The executor runs in a network namespace of its own, behind a pair of virtual interfaces that ``tc`` limits in
both directions; that needs root, and Linux's ``sch_tbf``. Upload and download are measured as that many bytes
over plain TCP on the same link, the product as the executor's code takes for all rows at once. One after the
other, a request takes the sum of the three; at best it takes as long as the longest.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from common import arguments, executor, save, spread, write_model
from rich.console import Console
from rich.table import Table
from split_execution import BATCH, SEQUENCE, Executors, iteration, load

import tenant_sdk
from provider.executor.base import BaseExecutor
from shared.wire.header import Direction
from tenant_sdk.connection.websocket_channel import PIECE_BYTES, WebsocketChannel

SPACE, HERE, THERE = "symbiosis-link", "10.77.0.1", "10.77.0.2"
ROWS = 1024
SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        peer, _ = server.accept()
        with peer, peer.makefile("rb") as file:
            up, down = map(int, file.readline().split())
            file.read(up)
            peer.sendall(bytes(down) or b"x")
"""


def run(*command: str) -> None:
    """A command of iproute2's."""
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def link(rate: str) -> Iterator[None]:
    """A namespace behind a limited link; SystemExit says why not."""
    if os.geteuid() != 0 or not shutil.which("tc"):
        raise SystemExit("skipped: a limited link needs root, and iproute2's `ip` and `tc`")
    run("ip", "netns", "add", SPACE)
    try:
        run("ip", "link", "add", "symb0", "type", "veth", "peer", "name", "symb1", "netns", SPACE)
        inside = ("ip", "netns", "exec", SPACE)
        for where, name, address in (((), "symb0", HERE), (inside, "symb1", THERE)):
            run(*where, "ip", "address", "add", f"{address}/24", "dev", name)
            run(*where, "ip", "link", "set", name, "up")
            limit = ("rate", rate, "burst", "256kb", "latency", "50ms")
            run(*where, "tc", "qdisc", "add", "dev", name, "root", "tbf", *limit)
        run(*inside, "ip", "link", "set", "lo", "up")
        yield
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"skipped: {' '.join(error.cmd)}: {error.stderr.decode().strip()}") from error
    finally:
        with suppress(subprocess.CalledProcessError):
            run("ip", "netns", "delete", SPACE)


def seconds(action: Callable[..., object], *arguments: object) -> float:
    """How long something takes."""
    started = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - started


def transfer(port: int, up: int, down: int) -> None:
    """So many bytes there, and so many back."""
    with socket.create_connection((THERE, port)) as sock:
        sock.sendall(b"%d %d\n" % (up, down))
        sock.sendall(bytes(up))
        left = down or 1
        while left:
            left -= len(sock.recv(1 << 16))


def asked(session: tenant_sdk.Session, *request: Any) -> None:
    """One request and its answer."""
    session.products.submit(*request).result()


def main() -> None:
    """Measure in turn, print a table, write link.json."""
    parser = arguments(__doc__, rounds=5, output="out/bench")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--piece-kib", type=int, nargs="+", default=[0, PIECE_BYTES >> 10])
    parser.add_argument(
        "--iteration", action="store_true", help="whole iterations, of benchmarks/split_execution.py"
    )
    options = parser.parse_args()
    if options.iteration:
        iterations(options.rate, options.rounds)
        return
    found: dict[str, list[float]] = {}
    columns = ("up, ms", "product, ms", "down, ms", *map(_title, options.piece_kib))
    table = Table("request", *columns, "last, of the longest")
    with tempfile.TemporaryDirectory() as folder, link(options.rate):
        work = Path(folder)
        write_model(work / "model", layers=2)
        inside = ("ip", "netns", "exec", SPACE)
        bare = subprocess.Popen([*inside, sys.executable, "-c", SERVE, THERE], stdout=subprocess.PIPE)
        try:
            assert bare.stdout is not None
            port = int(bare.stdout.readline())
            for numerics, privacy, answers in (
                ("float32", "plain", "exact"),
                ("ring", "one-time", "exact"),
                ("ring", "one-time", "half"),
            ):
                options_ = ("--host", THERE, "--numerics", numerics)
                with executor(
                    work / "model", work / f"{numerics}-{answers}", *options_, prefix=inside, host=THERE
                ) as running:
                    base = BaseExecutor(work / "model", numerics=numerics)
                    sources = [f"local:{work / 'model'}"] if privacy == "one-time" else []
                    with running.connect(
                        privacy=privacy,
                        mask_sources=sources,
                        answers=answers,
                    ) as session:
                        label = numerics if answers == "exact" else f"{numerics}, half"
                        _measure(table, found, label, session, base, port, options.piece_kib, options.rounds)
        finally:
            bare.terminate()
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    save(options.output / "link.json", found)


def iterations(rate: str, rounds: int) -> None:
    """Seconds of training steps with provider and mask source behind the link, by mode."""
    modes = ("plain float32", "plain, ring", "one-time", "one-time, half answers")
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(link(rate))
        write_model(work / "model")
        inside = ("ip", "netns", "exec", SPACE)
        running = Executors(
            *(
                stack.enter_context(
                    executor(
                        work / "model",
                        work / name,
                        *("--host", THERE, "--numerics", numerics),
                        prefix=inside,
                        host=THERE,
                    )
                )
                for name, numerics in (("float32", "float32"), ("ring", "ring"), ("source", "ring"))
            )
        )
        loaded = {mode: load(mode, work / "model", running) for mode in modes}
        ids = torch.randint(0, 32000, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
        for number in range(-1, rounds + 1):  # two warm up
            for mode, (model, _) in loaded.items():
                parameters = [p for p in model.parameters() if p.requires_grad]
                taken = seconds(iteration, model, torch.optim.AdamW(parameters, lr=1e-4), ids)
                if number > 0:
                    found[mode].append(taken)
    table = Table("mode", "iteration, s", "ratio", title=f"{rate} each way")
    plain = statistics.median(found["plain float32"])
    for mode, taken in found.items():
        table.add_row(mode, spread(taken), f"{statistics.median(taken) / plain:.2f}")
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def _title(kib: int) -> str:
    return f"pieces of {kib} KiB, ms" if kib else "whole, ms"


def _measure(
    table: Table,
    found: dict[str, list[float]],
    kind: str,
    session: tenant_sdk.Session,
    base: BaseExecutor,
    port: int,
    piece_kib: list[int],
    rounds: int,
) -> None:
    ring, half = kind.startswith("ring"), kind.endswith("half")
    for name, group, direction in (
        ("q, k, v forward", 0, Direction.FORWARD),
        ("down forward", 3, Direction.FORWARD),
        ("q, k, v backward", 0, Direction.BACKWARD),
    ):
        info = session.manifest.groups[group]
        members = (1 << len(info.members)) - 1
        plan = session.executor.shapes[group].widths(direction, members)
        up, down = ROWS * plan.request_columns * 4, ROWS * plan.answer_columns * (2 if half else 4)
        widths = [info.inputs] if direction == Direction.FORWARD else [m.outputs for m in info.members]
        rows = [torch.randn(ROWS, width) for width in widths]
        zeros = base.zeros(group, direction, members, ROWS)
        label = f"{kind}, {name}"
        for round_number in range(rounds + 1):
            times = {
                "up": seconds(transfer, port, up, 0),
                "down": seconds(transfer, port, 0, down),
                "product": seconds(base.compute, group, direction, members, zeros),
            }
            for kib in piece_kib:
                WebsocketChannel.piece_bytes = kib << 10
                if round_number and ring:  # effects of rows to come are fetched ahead
                    session.products.fill(256 << 20, 120)
                times[_title(kib)] = seconds(asked, session, group, direction, members, rows)
            for key, value in times.items():
                if round_number:  # the first one warms up
                    found.setdefault(f"{label}, {key}", []).append(value)
        longest = max(statistics.median(found[f"{label}, {key}"]) for key in ("up", "down", "product"))
        last = statistics.median(found[f"{label}, {_title(piece_kib[-1])}"])
        columns = ("up", "product", "down", *map(_title, piece_kib))
        cells = [spread(found[f"{label}, {key}"], 1e3, 1) for key in columns]
        table.add_row(label, *cells, f"{last / longest:.2f}")


if __name__ == "__main__":
    main()
