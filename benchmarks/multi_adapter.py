"""Eight LoRA adapters trained in one batch, against one after the other.

    python benchmarks/multi_adapter.py --rounds 5
    python benchmarks/multi_adapter.py --shapes small --modes plain,one-time --adapters 8

A step is one optimizer step of every adapter: in one batch, with ``tenant_sdk.tuning.MultiAdapter``, or of
one adapter after the other, with PEFT alone. Llama-shaped models with random weights; LoRA of ranks 4, 8 and
16 on all linear layers. Executors are processes behind TLS, on the tenant's own processors; with one-time
masks a provider and a mask source, every answer verified; once more behind relays that add the round trip of
a network. Every round measures both ways in turn. The last columns say where the time of a step goes. Prints
a table, and writes it to --output as JSON.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from common import Executor, arguments, cpu_seconds, executor, save, spread, write_model
from distance import away
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import logging

import tenant_sdk
from shared.memory import keep_freed_memory
from tenant_sdk import MultiAdapter

logging.set_verbosity_error()
logging.disable_progress_bar()
SHAPES: dict[str, dict[str, int]] = {
    "small": {"width": 256, "feed_forward": 688, "layers": 4, "heads": 4},
    "768": {"width": 768, "feed_forward": 2048, "layers": 4, "heads": 12},
}
VOCABULARY = 1000  # the head is the tenant's, and the same work for both ways
RANKS = (4, 8, 16)
ONE, MANY = "one after the other", "one batch"
FIGURES = ("waiting", "effects", "masking")
COLUMNS = ("model", "mode", "batch", "trip ms", ONE, MANY, "times", "requests", "CPU s", *FIGURES)
console = Console(width=None if sys.stdout.isatty() else 150)


def connect(mode: str, provider: Executor, source: Executor) -> tenant_sdk.Session:
    options: dict[str, Any] = {"privacy": mode}
    if mode == "one-time":
        options |= {
            "mask_sources": [source.url],
            "mask_source_token": source.token,
            "mask_source_ca": source.ca,
            "allow_same": ["all"],
            "verify": "always",
        }
    return provider.connect(**options)


def config(number: int) -> LoraConfig:
    return LoraConfig(r=RANKS[number % len(RANKS)], target_modules="all-linear", task_type="CAUSAL_LM")


def optimizer_of(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


Batches = dict[str, dict[str, torch.Tensor]]
Found = dict[str, dict[str, list[float]]]
Step = Callable[[Batches], None]


def one_after_the_other(session: tenant_sdk.Session, count: int) -> Step:
    """As many trainings, a step of each."""
    models = [get_peft_model(session.load_model(progress=False), config(number)) for number in range(count)]
    optimizers = [optimizer_of([p for p in model.parameters() if p.requires_grad]) for model in models]

    def step(batches: Batches) -> None:
        for model, optimizer, batch in zip(models, optimizers, batches.values(), strict=True):
            model(**batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def one_batch(session: tenant_sdk.Session, count: int) -> Step:
    configs = {f"adapter{number}": config(number) for number in range(count)}
    multi = MultiAdapter(session.load_model(progress=False), configs)
    optimizers = [optimizer_of(multi.parameters(name)) for name in multi.names]

    def step(batches: Batches) -> None:
        torch.stack(list(multi.losses(batches).values())).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def processors(running: tuple[Executor, Executor]) -> float:
    """Seconds that processors have worked for tenant, provider and mask source."""
    return time.process_time() + sum(cpu_seconds(each.pid) for each in running)


def measure(mode: str, running: tuple[Executor, Executor], sizes: tuple[int, int, int], rounds: int) -> Found:
    """Seconds of a step, and shares of it, by way. Sizes: adapters, and sequences and tokens of each."""
    count, *size = sizes
    random = torch.Generator().manual_seed(0)
    batches = {}
    for number in range(count):
        ids = torch.randint(0, VOCABULARY, size, generator=random)
        batches[f"adapter{number}"] = {"input_ids": ids, "labels": ids}
    found: Found = {}
    with ExitStack() as opened:
        sessions = {way: opened.enter_context(connect(mode, *running)) for way in (ONE, MANY)}
        steps = {
            ONE: one_after_the_other(sessions[ONE], count),
            MANY: one_batch(sessions[MANY], count),
        }
        for way in steps:
            found[way] = {name: [] for name in ("seconds", "requests", "processors", *FIGURES)}
        # Fingerprints are made once, and which masks come next is learned: three to warm up.
        for number in range(-3, rounds):
            for way, step in steps.items():
                before, spent, began = sessions[way].stats, processors(running), time.perf_counter()
                step(batches)
                seconds, after = time.perf_counter() - began, sessions[way].stats
                if number < 0:
                    continue
                found[way]["seconds"].append(seconds)
                found[way]["requests"].append(after.requests - before.requests)
                found[way]["processors"].append(processors(running) - spent)
                for name, of in zip(FIGURES, ("waiting", "waiting_for_effects", "masking"), strict=True):
                    part = getattr(after, f"seconds_{of}") - getattr(before, f"seconds_{of}")
                    found[way][name].append(part / seconds)
    return found


def summary(found: Found) -> list[str]:
    """The columns behind those that say what was measured."""
    one, many = found[ONE]["seconds"], found[MANY]["seconds"]
    row = [spread([1 / s for s in one]), spread([1 / s for s in many])]
    row.append(spread([a / b for a, b in zip(one, many, strict=True)]))
    for figure, digits in (
        ("requests", "{:.0f}"),
        ("processors", "{:.2f}"),
        *((name, "{:.0%}") for name in FIGURES),
    ):
        values = (statistics.median(found[way][figure]) for way in (ONE, MANY))
        row.append(", ".join(map(digits.format, values)))
    return row


def main() -> None:
    parser = arguments(__doc__, rounds=5, output="out/multi_adapter.json")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--shapes", default="small,768")
    parser.add_argument("--modes", default="one-time", help="plain, one-time")
    parser.add_argument("--batches", default="1x32,4x64", help="sequences x tokens of an adapter's batch")
    parser.add_argument("--round-trips", default="0,10", help="milliseconds that a network adds")
    parser.add_argument("--threads", type=int, default=1, help="of the tenant; executors need some too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    keep_freed_memory()
    table = Table(title=f"{options.adapters} adapters, steps a second: median of {options.rounds} (range)")
    for column in COLUMNS:
        table.add_column(column)
    results = []
    for shape in options.shapes.split(","):
        with tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name:
            work = Path(name)
            write_model(work / "model", vocabulary=VOCABULARY, **SHAPES[shape])
            ring = ("--numerics", "ring")
            with (
                executor(work / "model", work / "first", *ring) as first,
                executor(work / "model", work / "second", *ring) as second,
            ):
                asked = (each.split(",") for each in (options.round_trips, options.modes, options.batches))
                for milliseconds, mode, batch in itertools.product(*asked):
                    sequences, tokens = map(int, batch.split("x"))
                    seconds, sizes = float(milliseconds) / 1e3, (options.adapters, sequences, tokens)
                    with away(first, seconds) as provider, away(second, seconds) as source:
                        found = measure(mode, (provider, source), sizes, options.rounds)
                    what = (shape, mode, batch, milliseconds)
                    table.add_row(*(row := [*what, *summary(found)]))
                    console.print(*row, highlight=False)
                    results.append(dict(zip(COLUMNS, what, strict=False)) | {"found": found})
    console.print(table)
    save(options.output, results)


if __name__ == "__main__":
    main()
