"""Products a second of one executor and of workers that share its weights, on the same processors.

    python benchmarks/sharding.py --rounds 5
    python benchmarks/sharding.py --rounds 5 --numerics float32   # also shards that are gathered: --fsdp

Callers submit to the engine itself, each its next request when it has the answer of the last, through all
groups forward and then backward, as tenants that tune do; each begins at another place of its pass, or, with
``--together``, all at the same. No TLS: what is compared is where products run.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from common import arguments, pss_mib, save, spread, write_model
from rich.console import Console
from rich.table import Table

from provider.config import FLOATS
from provider.engine.engine import Completion, Engine
from provider.engine.profiling import profiled
from provider.engine.scheduler import Opportunistic
from provider.executor.base import BaseExecutor
from provider.workers.pool import Sharding, WorkerPool
from shared.wire.header import DTYPE_CODES, DTYPE_NAMES, Direction, Header, Operation, RequestClass
from shared.wire.messages import Manifest
from shared.wire.protocol import GroupShape

SHAPES = {"small": (768, 2048, 4), "large": (4096, 11008, 2)}  # hidden, intermediate, layers
BY_GROUP, GATHERED = "workers, by group", "workers, FSDP"
LOADS = ((8, 64), (8, 512), (1, 512), (1, 1))  # callers, rows


def requests(manifest: Manifest, rows: int) -> list[tuple[Header, torch.Tensor]]:
    dtype = DTYPE_NAMES[manifest.wire_dtypes[0]]
    made = []
    groups = list(enumerate(manifest.groups))
    passes = [(Direction.FORWARD, groups), (Direction.BACKWARD, groups[::-1])]
    for direction, order in passes:
        for group, info in order:
            members = (1 << len(info.members)) - 1
            columns = GroupShape.of(info, manifest.numerics).widths(direction, members).request_columns
            header = Header(
                Operation.PRODUCT,
                direction,
                DTYPE_CODES[dtype],
                group,
                1,
                rows,
                columns,
                members,
                request_class=RequestClass.FINETUNING,
            )
            made.append((header, torch.ones((rows, columns), dtype=dtype)))
    return made


def product(engine: Engine, tenant: str, header: Header, payload: torch.Tensor) -> None:
    """Wait until a request of a tenant is answered."""
    answered: Future[Completion | Exception] = Future()
    engine.loop.call_soon_threadsafe(
        lambda: engine.submit(tenant, tenant, header, payload, answered.set_result)
    )
    if isinstance(answer := answered.result(), Exception):
        raise answer


def products_per_second(
    engine: Engine, manifest: Manifest, callers: int, rows: int, seconds: float, *, together: bool = False
) -> float:
    asked, done, ends = requests(manifest, rows), [0] * callers, [time.perf_counter() + seconds]

    def call(caller: int) -> None:
        begin = 0 if together else caller * len(asked) // callers
        while True:
            for header, payload in asked[begin:] + asked[:begin]:
                product(engine, f"tenant-{caller}", header, payload)
                done[caller] += 1
                if time.perf_counter() > ends[0]:
                    return

    began = time.perf_counter()
    threads = [threading.Thread(target=call, args=(caller,)) for caller in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - began)


def one_process(folder: Path, numerics: str, threads: int) -> tuple[Engine, Manifest, list[int]]:
    torch.set_num_threads(threads)
    executor = BaseExecutor(folder, numerics=numerics)
    latency = profiled(executor, executor.manifest)
    return Engine.of(executor, Opportunistic, latency), executor.manifest, [os.getpid()]


def workers(
    folder: Path, numerics: str, count: int, stripes: int = 1, *, fsdp: bool = False
) -> tuple[Engine, Manifest, list[int]]:
    pool = WorkerPool(folder, Sharding(["cpu"] * count, stripes, fsdp=fsdp), numerics=numerics)
    policy = Opportunistic(pool.latency)
    engine = Engine(pool.lanes, policy, pool.latency, lane_of=pool.lane_of.__getitem__)
    return engine, pool.manifest, [worker.pid for lane in pool.lanes for worker in lane.workers]


def main() -> None:
    parser = arguments(__doc__, rounds=5, output="out/sharding.json")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement")
    parser.add_argument("--numerics", default="ring")
    parser.add_argument("--together", action="store_true", help="callers begin at the same group")
    parser.add_argument("--shapes", default="small,large")
    options = parser.parse_args()
    count = os.cpu_count() or 1
    measure = partial(products_per_second, seconds=options.seconds, together=options.together)
    ways: dict[str, Callable[[Path], tuple[Engine, Manifest, list[int]]]] = {
        f"one process, {count} threads": lambda folder: one_process(folder, options.numerics, count),
        f"{count} {BY_GROUP}": lambda folder: workers(folder, options.numerics, count),
        f"{count} workers, striped": lambda folder: workers(folder, options.numerics, count, count),
    }
    if options.numerics in FLOATS:
        ways[f"{count} {GATHERED}"] = lambda folder: workers(folder, options.numerics, count, fsdp=True)
    found: dict[str, Any] = {}
    for shape in options.shapes.split(","):
        hidden, intermediate, layers = SHAPES[shape]
        with tempfile.TemporaryDirectory() as work, ExitStack() as opened:
            folder = Path(work) / "model"
            more = {"layers": layers, "heads": hidden // 128, "vocabulary": 1000}
            write_model(folder, width=hidden, feed_forward=intermediate, **more)
            made = {name: way(folder) for name, way in ways.items()}
            for engine, _, _ in made.values():
                opened.callback(engine.close)
            memory = {name: [pss_mib(pid) for pid in pids] for name, (_, _, pids) in made.items()}
            rates: dict[str, dict[str, list[float]]] = {name: {} for name in made}
            for _ in range(options.rounds):
                for callers, rows in LOADS:
                    for name, (engine, manifest, _) in made.items():
                        rate = measure(engine, manifest, callers, rows)
                        rates[name].setdefault(f"{callers} x {rows}", []).append(rate)
        found[shape] = {"rates": rates, "memory_mib": memory}
        show(shape, rates, memory)
    save(options.output, found)


def show(shape: str, rates: dict[str, dict[str, list[float]]], memory: dict[str, list[float]]) -> None:
    first = next(iter(rates.values()))
    table = Table(title=f"{shape} layers: products a second (against one process); callers x rows")
    for title in ("", *first, "MiB each"):
        table.add_column(title, justify="right")
    for name, own in rates.items():
        cells = [
            f"{spread(values, 1.0, 0)} ({statistics.median(map(truediv, values, first[load])):.2f})"
            for load, values in own.items()
        ]
        table.add_row(name, *cells, ", ".join(f"{each:.0f}" for each in memory[name]))
    console = Console(width=160)
    console.print(table)
    by_group, gathered = (
        next((own for name, own in rates.items() if name.endswith(way)), {}) for way in (BY_GROUP, GATHERED)
    )
    for load, values in gathered.items():
        console.print(f"{load}: by group {spread([*map(truediv, by_group[load], values)])} times FSDP")


if __name__ == "__main__":
    main()
