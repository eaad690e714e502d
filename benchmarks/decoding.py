"""Decoding tenants on one executor against as many processes with a whole model, and where the time goes.

    python benchmarks/decoding.py --rounds 5              # 12 layers, d = 768: 48 small groups
    python benchmarks/decoding.py --rounds 5 --large      # two layers of Llama 2 7B's shape

Everybody shares this machine's processors, and each tenant, or whole model, has one thread. Processor time is
of all tenants together and of the executor, the latter also as the kernel's share.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from common import Executor, arguments, cpu_seconds, executor, metrics, save, spread, write_model
from rich.console import Console
from rich.table import Table
from serving import large_model, results, started

console = Console()


def ticks(pid: int) -> tuple[int, int]:
    """Of a process: in its own code, in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]), int(fields[12])


def measure(plans: list[dict[str, Any]], running: Executor, seconds: float) -> dict[str, float]:
    """Tokens a second of all, and processor milliseconds for each token."""
    spent: dict[str, Any] = {}
    with started("tenant.py", plans) as processes:
        begin = time.time() + 0.5
        before = metrics(running), ticks(running.pid), sum(cpu_seconds(p.pid) for p in processes)

        def look() -> None:
            time.sleep(begin + seconds - 0.1 - time.time())  # they end soon after
            spent["executor"] = ticks(running.pid)
            spent["tenants"] = sum(cpu_seconds(p.pid) for p in processes) - before[2]

        watch = threading.Thread(target=look)
        watch.start()
        told = results(processes, begin)
        watch.join()
    change = {name: value - before[0].get(name, 0.0) for name, value in metrics(running).items()}
    own, kernel = (after - first for after, first in zip(spent["executor"], before[1], strict=True))
    tokens = sum(len(each["times"]) for each in told)
    tick = 1e3 / os.sysconf("SC_CLK_TCK")
    return {
        "rate": sum(len(each["times"]) / sum(each["times"][-1]) for each in told),
        "tenants": 1e3 * spent["tenants"] / tokens,
        "executor": tick * (own + kernel) / tokens,
        "kernel": kernel / max(1, own + kernel),
        "products": 1e3 * change["symbiosis_product_cpu_seconds_total"] / tokens,
        "rows": change["symbiosis_batch_rows_sum"] / max(1.0, change["symbiosis_batch_rows_count"]),
    }


def main() -> None:
    """Measure in turn, print a table, write decoding.json."""
    parser = arguments(__doc__, rounds=5, output="out/bench")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--large", action="store_true", help="layers of Llama 2 7B's shape")
    parser.add_argument("--no-local", action="store_true", help="for more tenants than whole models fit here")
    options = parser.parse_args()
    sides = ("split",) if options.no_local else ("split", "local")
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name:
        work = Path(name)
        model = work / "model"
        if options.large:
            model = large_model(work)
        else:
            write_model(model)
        common = {"work": "decode", "batch": 1, "length": 32, "threads": 1, "seconds": options.seconds}
        with executor(model, work / "executor") as running:
            for round_number in range(options.rounds):
                plans: dict[str, list[dict[str, Any]]] = {"split": [], "local": []}
                for i in range(options.tenants):
                    token = running.tokens.add(f"tenant-{round_number}-{i}")
                    connection = {"url": running.url, "token": token, "ca": str(running.ca)}
                    plans["split"].append({**common, **connection, "seed": i})
                    plans["local"].append({**common, "folder": str(model), "seed": i})
                for side in sides:
                    console.print(f"{round_number + 1}/{options.rounds}: {side}", highlight=False)
                    found[side].append(measure(plans[side], running, options.seconds))
    table = Table(title=f"{options.tenants} decode; processor ms a token", highlight=False)
    for column in ("", "tokens/s", "tenants", "executor", "kernel's share", "products", "rows in one"):
        table.add_column(column)
    for side, runs in found.items():
        cells = [spread([run[key] for run in runs], 1, 1) for key in ("rate", "tenants")]
        if side == "split":
            cells += [spread([run["executor"] for run in runs], 1, 1)]
            cells += [spread([run["kernel"] for run in runs])]
            cells += [spread([run[key] for run in runs], 1, 1) for key in ("products", "rows")]
        table.add_row(side, *cells)
    console.print(table)
    rates = [statistics.median(run["rate"] for run in found[side]) for side in sides]
    if len(rates) > 1:
        console.print(f"ratio {rates[0] / rates[1]:.2f}", highlight=False)
    save(options.output / "decoding.json", found)


if __name__ == "__main__":
    main()
