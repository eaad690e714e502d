"""One executor for many tenants: batching, co-serving, and against one model instance a job.

    make bench                       # or: python benchmarks/serving.py --rounds 5 --only batching

Every comparison alternates between its sides in each round, so that a machine whose speed drifts favours
neither. "Replayed" tenants send the requests of real ones and compute nothing (``load.py``); "real" ones
are processes with transformers, PEFT and the SDK (``tenant.py``). Everything runs on one machine: tenants
and executor share its processors. Prints tables, and writes serving.json and serving.png into --output.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import torch
from common import (
    Executor,
    arguments,
    cpu_seconds,
    executor,
    forget_peak_memory,
    metrics,
    peak_memory_mib,
    pss_mib,
    spread,
    write_model,
)
from load import bursty, poisson
from plot_serving import plot
from rich.console import Console
from rich.table import Table

console = Console(width=None if sys.stdout.isatty() else 150)
HERE = Path(__file__).parent
Plan = dict[str, Any]


# -- processes -------------------------------------------------------------------------------------


@contextmanager
def started(script: str, plans: list[Plan]) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that have said that they are ready."""
    running = []
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at the end
    try:
        for plan in plans:
            process = subprocess.Popen(
                [sys.executable, str(HERE / script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(plan) + "\n")
            process.stdin.flush()
            running.append(process)
        for process in running:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                errors.seek(0)
                raise SystemExit(f"a process of {script} ended before it was ready:\n{errors.read()[-2000:]}")
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()
        errors.close()


def results(running: list[subprocess.Popen[str]], begin: float) -> list[Any]:
    """Let them begin, and collect what they print."""
    for process in running:
        assert process.stdin is not None
        process.stdin.write(f"{begin}\n")
        process.stdin.flush()
    return [json.loads(process.stdout.read()) for process in running if process.stdout is not None]


def replay(running: Executor, plans: list[Plan], seconds: float, processes: int = 2) -> dict[str, Any]:
    """What replayed tenants saw, and what the executor did meanwhile."""
    plans = [{**plan, "token": running.tokens.add(plan["name"])} for plan in plans]
    common = {"url": running.url, "ca": authority(running, running.url), "timeout": 120, "seconds": seconds}
    parts = [part for part in (plans[i::processes] for i in range(processes)) if part]
    with started("load.py", [{**common, "tenants": part} for part in parts]) as tenants:
        before, processor = metrics(running), cpu_seconds(running.pid)
        told = [tenant for part in results(tenants, time.time() + 0.2) for tenant in part]
        after, processor = metrics(running), cpu_seconds(running.pid) - processor
    change = {name: value - before.get(name, 0.0) for name, value in after.items()}
    errors: Counter[str] = Counter()
    for tenant in told:
        errors.update(tenant["errors"])
    return {
        "seconds": seconds,
        "tokens": [latency for tenant in told for _, latency in tenant["tokens"]],
        "steps": [latency for tenant in told for _, latency in tenant["steps"]],
        "passes": {t["name"]: t["passes"] for t in told},
        "rows": {t["name"]: t["rows"] for t in told},
        "errors": dict(errors),
        "rows_per_product": change["symbiosis_batch_rows_sum"] / max(1, change["symbiosis_batch_rows_count"]),
        "in_products": change["symbiosis_product_cpu_seconds_total"] / processor if processor else 0.0,
        "met": change.get("symbiosis_decode_tokens_met_total", 0.0),
        "late": change.get("symbiosis_decode_tokens_late_total", 0.0),
        "peak_mib": peak_memory_mib(running.pid),
    }


def real(plans: list[Plan], watched: int | None = None) -> dict[str, Any]:
    """What real tenants, or processes with a whole model, reached; memory of all together."""
    with started("tenant.py", plans) as running:
        if watched:
            forget_peak_memory(watched)
        before = pss_mib(watched) if watched else 0.0
        told = results(running, time.time() + 1.0)
        executor_mib = max(before, pss_mib(watched) if watched else 0.0)
    return {
        # To the end of each one's last piece of work: some take seconds.
        "done": sum(len(each["times"]) / sum(each["times"][-1]) for each in told),
        "latency": [latency for each in told for _, latency in each["times"]],
        "memory_mib": sum(each["pss_mib"] for each in told) + executor_mib,
        "executor_peak_mib": peak_memory_mib(watched) if watched else 0.0,
    }


# -- what is measured ------------------------------------------------------------------------------


def batching(folder: Path, work: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """32 decoding tenants under each policy; and lockstep with one slow tenant."""
    folder = large_model(work)
    tenants = [{"name": f"tenant-{i}", "prompt": 0, "tokens": 1 << 30} for i in range(32)]
    few = [{"name": f"fast-{i}", "prompt": 0, "tokens": 1 << 30, "think": 0.002} for i in range(3)]
    slow = [{"name": "slow", "prompt": 0, "tokens": 1 << 30, "think": 0.05}]
    found: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        running = {
            policy: stack.enter_context(executor(folder, work / f"batching-{policy}", "--batching", policy))
            for policy in ("none", "opportunistic", "lockstep")
        }
        for number in range(rounds):
            for policy in ("none", "opportunistic"):
                console.print(f"batching {number + 1}/{rounds}: {policy}, 32 tenants", highlight=False)
                found.setdefault(policy, []).append(replay(running[policy], tenants, seconds))
            for policy in ("opportunistic", "lockstep"):
                for plans, name in ((few, "fast alone"), (few + slow, "with a slow one")):
                    console.print(f"batching {number + 1}/{rounds}: {policy}, {name}", highlight=False)
                    found.setdefault(f"{policy}, {name}", []).append(
                        replay(running[policy], plans, seconds / 2)
                    )
    return found


def show_batching(found: dict[str, Any]) -> list[Table]:
    table = Table(title="32 replayed tenants decode: tokens a second, milliseconds a token")
    for column in ("policy", "tokens/s", "ratio", "median ms", "rows in a product", "errors"):
        table.add_column(column)
    base = _median(found["none"], _rate)
    for policy in ("none", "opportunistic"):
        runs = found[policy]
        table.add_row(
            policy,
            spread([_rate(run) for run in runs], 1, 1),
            f"{_median(runs, _rate) / base:.2f}",
            spread([statistics.median(run["tokens"]) for run in runs], 1e3, 0),
            spread([run["rows_per_product"] for run in runs], 1, 1),
            error_counts(runs),
        )
    other = Table(title="Three fast tenants, alone and beside a slow one: tokens a second of the fast")
    for column in ("policy", "alone", "beside", "kept"):
        other.add_column(column)
    for policy in ("opportunistic", "lockstep"):
        alone, beside = found[f"{policy}, fast alone"], found[f"{policy}, with a slow one"]
        kept = _median(beside, _fast) / max(1e-9, _median(alone, _fast))
        other.add_row(
            policy,
            spread([_fast(run) for run in alone], 1, 1),
            spread([_fast(run) for run in beside], 1, 1),
            f"{kept:.2f}",
        )
    return [table, other]


OBJECTIVE_MS = 200.0
TRACES: dict[str, Callable[..., list[float]]] = {"bursty": bursty, "poisson": poisson}


def chatting(trace: Callable[..., list[float]], seconds: float, draw: random.Random) -> list[Plan]:
    """Four tenants with conversations of 32 rows and 12 tokens, which arrive as in a trace."""
    chat = {"prompt": 32, "tokens": 12, "think": 0.001}
    return [{"name": f"chat-{i}", **chat, "arrivals": trace(0.05, seconds, draw)} for i in range(4)]


def coserving(
    folder: Path, work: Path, rounds: int, seconds: float, trace: Callable[..., list[float]] = bursty
) -> dict[str, Any]:
    """Conversations that arrive as in a trace beside fine-tuning; against either alone, and taking turns."""
    found: dict[str, list[dict[str, Any]]] = {}
    tune = [{"name": f"tune-{i}", "tune": 256} for i in range(2)]
    objective = ("--decode-objective-ms", str(OBJECTIVE_MS))
    with (
        executor(folder, work / "coserving", *objective) as running,
        executor(folder, work / "turns", "--batching", "none") as turns,
    ):
        for number in range(rounds):
            chats = chatting(trace, 2 * seconds, random.Random(number))
            for where, plans, name in (
                (running, tune, "fine-tuning alone"),
                (running, chats, "chats alone"),
                (running, chats + tune, "together"),
                (turns, chats + tune, "together, taking turns"),
            ):
                console.print(f"co-serving {number + 1}/{rounds}: {name}", highlight=False)
                told = replay(where, plans, 2 * seconds)
                found.setdefault(name, []).append({**told, "trace": trace.__name__})
    return found


def show_coserving(found: dict[str, Any]) -> list[Table]:
    table = Table(
        title=f"Chats ({found['together'][0]['trace']}) beside fine-tuning; "
        f"objective: {OBJECTIVE_MS:g} ms of a token in the executor"
    )
    for column in (
        "",
        "tokens",
        "met",
        "as the tenant sees it",
        "ms: median",
        "95th",
        "99th",
        "tuning rows/s",
    ):
        table.add_column(column)
    for column in ("kept", "errors", "peak MiB"):
        table.add_column(column)
    alone = _median(found["fine-tuning alone"], tuned_rows)
    for name, runs in found.items():
        waits = sorted(1e3 * waited for run in runs for waited in run["tokens"])
        cells = [name, str(len(waits)), "", "", "", "", ""]
        if waits:
            met, late = (sum(run[key] for run in runs) for key in ("met", "late"))  # by the executor's count
            cells[2] = f"{met / (met + late):.1%}" if met + late else "not counted"
            within = sum(waited <= OBJECTIVE_MS for waited in waits) / len(waits)
            cells[3:] = [
                f"{within:.1%}",
                f"{statistics.median(waits):.0f}",
                f"{np.quantile(waits, 0.95):.0f}",
                f"{np.quantile(waits, 0.99):.0f}",
            ]
        rate = _median(runs, tuned_rows)
        cells += [spread([tuned_rows(run) for run in runs], 1, 0), f"{rate / alone:.0%}" if rate else ""]
        table.add_row(*cells, error_counts(runs), f"{max(run['peak_mib'] for run in runs):.0f}")
    return [table]


def tuned_rows(run: dict[str, Any]) -> float:
    """Rows through one group, a second, of all fine-tuning tenants."""
    return sum(rows for name, rows in run["rows"].items() if name.startswith("tune")) / run["seconds"]


def _rate(run: dict[str, Any]) -> float:
    return sum(run["passes"].values()) / run["seconds"]


def _fast(run: dict[str, Any]) -> float:
    return sum(count for name, count in run["passes"].items() if name.startswith("fast")) / run["seconds"]


def _median(runs: list[dict[str, Any]], of: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(map(of, runs))


def error_counts(runs: list[dict[str, Any]]) -> str:
    total: Counter[str] = Counter()
    for run in runs:
        total.update(run["errors"])
    return ", ".join(f"{code}: {count}" for code, count in total.items()) or "none"


def large_model(work: Path, layers: int = 2) -> Path:
    """Some layers of the shape of Llama 2 7B's, with a vocabulary in proportion; written once.

    Every layer of a model costs the same on either side of a comparison, so that what holds for two of
    them holds for 32; more do not fit into this machine as often as there are processes here. In bfloat16,
    as models are given away, and computed with in float32: processes that map a file of the type that they
    compute with would share its pages, which no two GPUs or containers do.
    """
    folder = work / f"large-{layers}"
    if not folder.exists():
        console.print(f"writing {layers} layers of a large model", highlight=False)
        shape = {"width": 4096, "feed_forward": 11008, "heads": 32, "vocabulary": 1000 * layers}
        write_model(folder, layers=layers, dtype=torch.bfloat16, **shape)
    return folder


def dedicated(folder: Path, work: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Eight decoding and four tuning tenants, real ones, against as many processes with a whole model."""
    folder = large_model(work)
    decode = {"work": "decode", "batch": 1, "length": 32, "threads": 1, "seconds": seconds}
    tune = {"work": "tune", "batch": 1, "length": 128, "threads": 1, "seconds": 2 * seconds}
    found: dict[str, list[dict[str, Any]]] = {}
    for name, count, plan in (("decode", 8, decode), ("tune", 4, tune)):
        local = [{**plan, "folder": str(folder), "seed": i} for i in range(count)]
        with executor(folder, work / f"dedicated-{name}", *local_options(work, name)) as running:
            for number in range(rounds):
                console.print(f"dedicated {number + 1}/{rounds}: {name}, {count} processes", highlight=False)
                found.setdefault(f"{name}, a model each", []).append(real(local))
                for carrier, url in carriers(running).items():
                    tenants = [
                        {
                            **plan,
                            "seed": i,
                            "url": url,
                            "ca": authority(running, url),
                            "token": running.tokens.add(f"tenant-{i}"),
                        }
                        for i in range(count)
                    ]
                    console.print(f"dedicated {number + 1}/{rounds}: {name}, {carrier}", highlight=False)
                    found.setdefault(f"{name}, {carrier}", []).append(real(tenants, running.pid))
    return found


def show_dedicated(found: dict[str, Any]) -> list[Table]:
    table = Table(title="Real tenants on one executor against a model instance each")
    for column in ("", "done a second", "ratio", "memory MiB", "less by"):
        table.add_column(column)
    for name, runs in found.items():
        base = found[f"{name.split(',')[0]}, a model each"]
        memory = _median(runs, lambda run: run["memory_mib"])
        table.add_row(
            name,
            spread([run["done"] for run in runs], 1, 2),
            f"{_median(runs, lambda run: run['done']) / _median(base, lambda run: run['done']):.2f}",
            f"{memory:.0f}",
            f"{_median(base, lambda run: run['memory_mib']) / memory:.2f}",
        )
    return [table]


def memory(folder: Path, work: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """One to five tenants that tune, against as many processes, with a base of more than 1 GB."""
    folder = large_model(work, layers=4)
    plan = {"work": "tune", "batch": 1, "threads": 1, "seconds": seconds / 3}
    found: dict[str, Any] = {}
    with executor(folder, work / "memory") as running:

        def tenants(count: int, length: int) -> dict[str, Any]:
            access = {"url": running.url, "ca": str(running.ca)}
            plans = [{**plan, **access, "length": length, "seed": i} for i in range(count)]
            for i, each in enumerate(plans):
                each["token"] = running.tokens.add(f"tenant-{i}")
            return real(plans, running.pid)

        for number in range(rounds):
            for count in (1, 3, 5):
                console.print(f"memory {number + 1}/{rounds}: {count} tuning", highlight=False)
                found.setdefault("shared", {}).setdefault(count, []).append(tenants(count, 128))
                local = [{**plan, "length": 128, "folder": str(folder), "seed": i} for i in range(count)]
                found.setdefault("local", {}).setdefault(count, []).append(real(local))
        for length in (128, 512, 1024):  # once: these take long
            console.print(f"memory: a sequence of {length} tokens", highlight=False)
            found.setdefault("by length", {})[length] = tenants(1, length)
    found["base_mib"] = 2 * sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20
    return found


def show_memory(found: dict[str, Any]) -> list[Table]:
    table = Table(title=f"Memory of N tuning jobs, MiB in all; base model {found['base_mib']:.0f} MiB")
    for column in ("N", "a model each", "one executor", "less by", "peak of the executor"):
        table.add_column(column)
    for count, shared in found["shared"].items():
        local, together = ([run["memory_mib"] for run in runs] for runs in (found["local"][count], shared))
        peaks = [run["executor_peak_mib"] for run in shared]
        ratio = statistics.median(local) / statistics.median(together)
        table.add_row(
            str(count), spread(local, 1, 0), spread(together, 1, 0), f"{ratio:.2f}", spread(peaks, 1, 0)
        )
    lengths = ", ".join(
        f"{n} tokens: {run['executor_peak_mib']:.0f}" for n, run in found["by length"].items()
    )
    table.caption = f"peak of the executor by sequence length: {lengths} MiB"
    return [table]


def efficiency(folder: Path, work: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """How much of the executor's processor time is inside products, when tuning tenants saturate it."""
    found: dict[str, list[dict[str, Any]]] = {}
    tune = [{"name": f"tune-{i}", "tune": 512} for i in range(4)]
    with executor(
        folder, work / "efficiency", "--threads", "1", *local_options(work, "efficiency")
    ) as running:
        for number in range(rounds):
            for carrier, url in carriers(running).items():
                console.print(f"efficiency {number + 1}/{rounds}: {carrier}", highlight=False)
                found.setdefault(carrier, []).append(
                    replay(Executor(**{**vars(running), "url": url}), tune, seconds)
                )
    return found


def show_efficiency(found: dict[str, Any]) -> list[Table]:
    table = Table(title="Four tuning tenants saturate one executor thread")
    for column in ("", "processor time inside products", "rows a second", "rows in a product"):
        table.add_column(column)
    for carrier, runs in found.items():
        table.add_row(
            carrier,
            spread([100 * run["in_products"] for run in runs], 1, 0) + " %",
            spread([tuned_rows(run) for run in runs], 1, 0),
            spread([run["rows_per_product"] for run in runs], 1, 0),
        )
    return [table]


def carriers(running: Executor) -> dict[str, str]:
    """The URLs under which an executor is reached."""
    return {"over TLS": running.url, "co-located": running.local_url}


def authority(running: Executor, url: str) -> str | None:
    """What to trust, where there are certificates."""
    return str(running.ca) if url.startswith("wss") else None


def local_options(work: Path, name: str) -> list[str]:
    """Options that open the co-located transport."""
    return ["--local-dir", str(work / f"{name}-local")]


PARTS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[dict[str, Any]], list[Table]]]] = {
    "batching": (batching, show_batching),
    "coserving": (coserving, show_coserving),
    "efficiency": (efficiency, show_efficiency),
    "dedicated": (dedicated, show_dedicated),
    "memory": (memory, show_memory),
}


def main() -> None:
    """Run everything, or what ``--only`` names."""
    parser = arguments(__doc__, rounds=5, output="out/bench")
    parser.add_argument("--seconds", type=float, default=12.0, help="of one run of one side")
    parser.add_argument("--only", choices=PARTS, action="append", help="repeat for more; default: all")
    parser.add_argument(
        "--trace", choices=TRACES, default="bursty", help="of the chats' arrivals in coserving"
    )
    options = parser.parse_args()
    PARTS["coserving"] = partial(coserving, trace=TRACES[options.trace]), show_coserving
    found: dict[str, Any] = {}
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name:
        work = Path(name)
        folder = work / "model"
        console.print("writing the model")
        write_model(folder)
        for part, (measure, show) in PARTS.items():
            if options.only and part not in options.only:
                continue
            found[part] = measure(folder, work, options.rounds, options.seconds)
            for table in show(found[part]):
                console.print(table)
            (options.output / "serving.json").write_text(json.dumps(found, indent=1))
    plot(found, options.output / "serving.png")
    console.print(f"wrote {options.output}/serving.json and .png")


if __name__ == "__main__":
    main()
