"""Chats beside a tenant that tunes with long sequences: whole ones, or in windows.

    python benchmarks/long_serving.py --rounds 5

Four replayed tenants chat (``load.py``; prompts of 32 rows, 12 tokens, arrivals in bursts) while another
one tunes with sequences of 8,192 tokens, which it sends whole or in windows (FlexLLM, section 6.1). The
executor is over TLS on this machine, float32, with an objective of 200 ms for a token; the cases take turns.
Prints a table and writes long_serving.json into --output.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import arguments, executor, forget_peak_memory, save, spread, write_model
from load import bursty
from rich.table import Table
from serving import OBJECTIVE_MS, chatting, console, error_counts, replay, tuned_rows

LENGTH = 8192
WINDOWS = {"whole": LENGTH, "windows of 4,096": 4096, "windows of 1,024": 1024, "windows of 256": 256}


def measure(work: Path, rounds: int, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """What chats and the tuning tenant saw, by case, round after round."""
    write_model(work / "model")
    tune = {
        name: [{"name": f"tune-{rows}", "tune": LENGTH, "window": rows}] for name, rows in WINDOWS.items()
    }
    found: dict[str, list[dict[str, Any]]] = {}
    with executor(work / "model", work / "at", "--decode-objective-ms", str(OBJECTIVE_MS)) as running:
        for number in range(rounds):
            chats = chatting(bursty, seconds, random.Random(number))
            cases = {"chats alone": chats} | {name: chats + plan for name, plan in tune.items()}
            for name, plans in cases.items():
                console.print(f"{number + 1}/{rounds}: {name}", highlight=False)
                forget_peak_memory(running.pid)
                found.setdefault(name, []).append(replay(running, plans, seconds))
    return found


def show(found: dict[str, list[dict[str, Any]]]) -> Table:
    """Milliseconds that a token waited for the executor, and what the tuning tenant reached."""
    table = Table(
        title=f"chats beside tuning with {LENGTH:,} tokens; objective {OBJECTIVE_MS:g} ms of a token"
    )
    for column in ("", "tokens", "met", "ms: median", "95th", "99th", "tuning rows/s", "kept", "peak MiB"):
        table.add_column(column)
    table.add_column("errors")
    whole = statistics.median(tuned_rows(run) for run in found["whole"])
    for name, runs in found.items():
        waits = [1e3 * waited for run in runs for waited in run["tokens"]]
        met, late = (sum(run[key] for run in runs) for key in ("met", "late"))
        row = [name, str(len(waits)), f"{met / (met + late):.1%}" if met + late else ""]
        row += [f"{np.quantile(waits, share):.0f}" if waits else "" for share in (0.5, 0.95, 0.99)]
        rates = [tuned_rows(run) for run in runs]
        row += [spread(rates, 1, 0), f"{statistics.median(rates) / whole:.2f}"] if any(rates) else ["", ""]
        table.add_row(*row, f"{max(run['peak_mib'] for run in runs):.0f}", error_counts(runs))
    return table


def main() -> None:
    """Measure in turn, print a table, write long_serving.json."""
    parser = arguments(__doc__, rounds=5, output="out/bench")
    parser.add_argument("--seconds", type=float, default=24.0, help="of one case")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name:
        found = measure(Path(name), options.rounds, options.seconds)
    console.print(show(found))
    save(options.output / "long_serving.json", found)


if __name__ == "__main__":
    main()
