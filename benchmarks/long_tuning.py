"""How much memory a tuning step with a long sequence takes, and how long, by what is done about it.

    python benchmarks/long_tuning.py                   # or with --lengths 1024 4096 --ratio-length 2048

A 12-layer, d = 768, Llama-shaped model with a vocabulary of 32,000 and random weights, whose frozen layers
are in an executor (float32, privacy plain) of this machine; LoRA r = 8 on q, k, v, o; one sequence. Each
case is a process of its own, which takes one step to warm up (256 tokens) and then measures one: its peak
is the largest resident set of that step less what was resident before it. Times of ways are compared in one
process that takes turns (--ratio-length); medians of ratios are shown, of the clock and of the processor time
of tenant and executor together, which says more where the machine is not idle. Prints tables and writes
long_tuning.json into --output.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from common import arguments, cpu_seconds, executor, forget_peak_memory, peak_memory_mib, write_model
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import logging

import tenant_sdk
from tenant_sdk.model.checkpointing import forget_products, keep_products
from tenant_sdk.sequences.planning import MemoryPlan, StorageTier

MEMORY, DISK, NOWHERE = StorageTier.MEMORY, StorageTier.DISK, StorageTier.NOWHERE
WINDOW = 1024
PLANS: dict[str, MemoryPlan | None] = {
    "as is": None,
    "checkpointing, asked again": None,
    "checkpointing": None,
    "loss by chunks": MemoryPlan(chunked_loss=True),
    "chunks, checkpointing": MemoryPlan(chunked_loss=True, checkpointed=True),
    "chunks, checkpointing, disk": MemoryPlan(chunked_loss=True, checkpointed=True, answers=DISK),
    "windows in memory": MemoryPlan(chunked_loss=True, window=WINDOW),
    "windows on disk": MemoryPlan(chunked_loss=True, window=WINDOW, answers=DISK, states=DISK),
    "windows, asked again": MemoryPlan(chunked_loss=True, window=WINDOW, answers=NOWHERE, states=DISK),
}
# The longest that is worth its minutes.
MAX_LENGTHS = {
    "as is": 4096,
    "checkpointing, asked again": 4096,
    "checkpointing": 4096,
    "loss by chunks": 4096,
}
MAX_LENGTHS |= {"chunks, checkpointing": 8192, "chunks, checkpointing, disk": 8192, "windows in memory": 8192}
MAX_LENGTHS |= {"windows, asked again": 4096}
console = Console(width=None if sys.stdout.isatty() else 150)


class Tuned:
    """A model that is tuned with in one way after another."""

    def __init__(self, told: dict[str, Any]) -> None:
        warnings.filterwarnings("ignore")
        logging.set_verbosity_error()
        torch.set_num_threads(told["threads"])
        self.session = tenant_sdk.connect(
            told["url"], token=told["token"], ca=told["ca"], privacy="plain", timeout=600
        )
        torch.manual_seed(1)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        lora = LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM")
        self.model = get_peft_model(self.session.load_model(progress=False), lora).train()
        self.tuning: tenant_sdk.LongTuning | None = None
        self.processes = (os.getpid(), told["pid"])

    def choose(self, way: str) -> None:
        """Tune in this way from now on."""
        if self.tuning is not None:
            self.tuning.close()
            self.tuning = None
        self.model.gradient_checkpointing_disable()
        plan = PLANS[way]
        if plan is not None:
            self.tuning = tenant_sdk.long_tuning(self.model, 256, window=WINDOW)
            self.tuning.use(plan)
        elif way != "as is":
            (forget_products if way.endswith("again") else keep_products)(self.model)
            self.model.gradient_checkpointing_enable()

    def step(self, length: int) -> tuple[float, float]:
        """Seconds of forward and backward: of the clock, and of the processors."""
        ids = torch.randint(0, 32000, (1, length), generator=torch.Generator().manual_seed(0))
        self.model.zero_grad()
        started, busy = time.perf_counter(), sum(map(cpu_seconds, self.processes))
        self.model(input_ids=ids, labels=ids).loss.backward()
        return time.perf_counter() - started, sum(map(cpu_seconds, self.processes)) - busy


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(told: dict[str, Any]) -> dict[str, Any]:
    """One case: its step's peak, time, rows and bytes."""
    tuned = Tuned(told)
    tuned.choose(told["way"])
    tuned.step(256)
    before, resident = tuned.session.stats, resident_mib()
    forget_peak_memory(os.getpid())
    seconds, busy = tuned.step(told["length"])
    after, spill = tuned.session.stats, getattr(tuned.tuning, "_spill", None)
    return {
        "peak_mib": peak_memory_mib() - resident,
        "resident_mib": resident,
        "seconds": seconds,
        "cpu_seconds": busy,
        "rows": after.rows - before.rows,
        "mib": (after.bytes_sent + after.bytes_received - before.bytes_sent - before.bytes_received) / 2**20,
        "disk_mib": 0 if spill is None else spill.nbytes / 2**20,
    }


def ratios(told: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Times of ways over those of "as is" beside them, of the clock and of the processors."""
    tuned = Tuned(told)
    ways = [way for way in told["ways"] if way != "as is"]
    tuned.step(told["length"])
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(told["rounds"]):
        for way in ways:
            tuned.choose("as is")
            usual = tuned.step(told["length"])
            tuned.choose(way)
            clock, busy = tuned.step(told["length"])
            found[way].append((clock / usual[0], busy / usual[1]))
            print(way, found[way][-1], file=sys.stderr, flush=True)
    return found


def case(told: dict[str, Any]) -> Any:
    """Run a case in a process of its own."""
    command = [sys.executable, __file__, "--case", json.dumps(told)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        raise SystemExit(ran.returncode)
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__, rounds=3, output="out/long_tuning")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--ways", nargs="*", default=list(PLANS))
    parser.add_argument("--ratio-length", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--large", action="store_true", help="two layers of the shape of Llama 2 7B's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        told = json.loads(options.case)
        print(json.dumps(ratios(told) if "rounds" in told else measure(told)))
        return
    options.output.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        large = {"layers": 2, "width": 4096, "feed_forward": 11008, "heads": 32, "dtype": torch.bfloat16}
        write_model(Path(work) / "model", **(large if options.large else {"layers": options.layers}))
        with executor(Path(work) / "model", Path(work) / "at") as running:
            told = {
                "url": running.url,
                "pid": running.pid,
                "ways": options.ways,
                "token": running.token,
                "ca": str(running.ca),
                "threads": options.threads,
            }
            table = Table(title="one step, one sequence: peak MiB above what was resident")
            for column in (
                "way",
                "tokens",
                "peak MiB",
                "KiB a token",
                "disk MiB",
                "ms a token",
                "rows a token",
            ):
                table.add_column(column, justify="left" if column == "way" else "right")
            for way in options.ways:
                for length in options.lengths:
                    if length > MAX_LENGTHS.get(way, 1 << 30):
                        continue
                    found = case(told | {"way": way, "length": length})
                    results.append({"way": way, "length": length, **found})
                    table.add_row(
                        way,
                        f"{length:,}",
                        f"{found['peak_mib']:,.0f}",
                        f"{found['peak_mib'] * 1024 / length:,.0f}",
                        f"{found['disk_mib']:,.0f}",
                        f"{found['seconds'] / length * 1e3:.2f}",
                        f"{found['rows'] / length:.1f}",
                    )
                    print(json.dumps(results[-1]), file=sys.stderr, flush=True)
            console.print(table)
            compared = {}
            if options.ratio_length:
                compared = case(told | {"length": options.ratio_length, "rounds": options.rounds})
                table = Table(title=f"time over that of a step as is, {options.ratio_length:,} tokens")
                for column in ("way", "clock", "processors", "all"):
                    table.add_column(column)
                for way, found in compared.items():
                    clock, busy = (statistics.median(each) for each in zip(*found, strict=True))
                    row = " ".join(f"{each[0]:.2f}/{each[1]:.2f}" for each in found)
                    table.add_row(way, f"{clock:.2f}", f"{busy:.2f}", row)
                console.print(table)
    told = {"cases": results, "ratios": compared, "ratio_length": options.ratio_length}
    (options.output / "long_tuning.json").write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
