"""Split execution against local: fine-tuning iteration, decoding, one round trip, memory.

    make bench                       # or: python benchmarks/split_execution.py --rounds 5

A 12-layer, d = 768, Llama-shaped model with random weights; LoRA r = 8 on q, k, v, o; batch 2 x 512
for an iteration, one row a step for decoding. Every round measures all modes in turn, so that a
machine whose speed drifts does not favour one. Three executors: float32, ring, and ring as mask source,
all on the tenant's cores; "effects ahead" is what a tenant sees whose mask source is elsewhere and
keeps ahead: all effects are there before the clock starts. Prints tables, and writes
split_execution.json and split_execution.png into --output.
"""

from __future__ import annotations

import argparse
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

# For all modes, local too, which it does not slow down: OpenMP threads that spin while the tenant
# waits take the processor from an executor on the same machine (docs/explanation/performance.md).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from common import Executor, arguments, executor, metrics, peak_memory_mib, save, spread, write_model
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, logging
from websockets.sync.client import connect as websocket_connect

import tenant_sdk
from provider.serve.tokens import TokenFile
from shared.memory import keep_freed_memory
from shared.wire.header import Direction, Operation
from tenant_sdk.connection.keys import ProductKey

logging.set_verbosity_error()
logging.disable_progress_bar()
MODES: dict[str, dict[str, Any]] = {
    "local": {},
    "plain float32": {"privacy": "plain"},
    "plain, bfloat16 on the wire": {"privacy": "plain", "wire_dtype": "bfloat16"},
    "noise-bank float32": {"privacy": "noise-bank"},
    "plain, ring": {"privacy": "plain"},
    "one-time": {"privacy": "one-time", "verify": "always"},
    "one-time, effects ahead": {"privacy": "one-time", "verify": "always", "mask_budget_mib": 0},
    "one-time, half answers": {"privacy": "one-time", "verify": "always", "answers": "half"},
    "one-time, half answers, effects ahead": {
        "privacy": "one-time",
        "verify": "always",
        "answers": "half",
        "mask_budget_mib": 0,
    },
}
AHEAD = {mode for mode in MODES if mode.endswith("effects ahead")}
ITERATION_BUDGET, DECODE_BUDGET = 700 << 20, 200 << 20  # bytes of effects for one of each
BATCH, SEQUENCE, PROMPT, NEW_TOKENS = 2, 512, 64, 32
# A file or pipe has no width of its own, and eighty columns would break the table.
console = Console(width=None if sys.stdout.isatty() else 150)


class Executors(NamedTuple):
    """Who serves what."""

    float32: Executor
    ring: Executor
    source: Executor

    def of(self, mode: str) -> Executor:
        """The provider of a mode."""
        return self.ring if "ring" in mode or "one-time" in mode else self.float32


def load(mode: str, folder: Path, running: Executors) -> tuple[Any, tenant_sdk.Session | None]:
    """The adapted model of one mode, and its session."""
    session = None
    if mode == "local":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        provider, options = running.of(mode), dict(MODES[mode])
        if options["privacy"] == "one-time":
            options |= {
                "mask_sources": [running.source.url],
                "mask_source_token": running.source.token,
                "mask_source_ca": running.source.ca,
                "allow_same": ["all"],
            }
        session = provider.connect(**options)
        model = session.load_model(progress=False)
    torch.manual_seed(1)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM")), session


def iteration(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    """One fine-tuning step."""
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class Clock(LogitsProcessor):
    """Notes when each token's logits are there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


def generate(model: Any, ids: torch.Tensor, count: int) -> float:
    """Seconds a token, for ``count`` tokens after the first, greedily."""
    model.eval()
    clock, number = Clock(), count + 1
    options = {"max_new_tokens": number, "min_new_tokens": number, "do_sample": False}
    model.generate(input_ids=ids, logits_processor=LogitsProcessorList([clock]), **options)
    return (clock.times[-1] - clock.times[0]) / count


def fill(session: tenant_sdk.Session | None, budget: int) -> None:
    """Have all effects of the next round there."""
    session.products.fill(budget, 120, chunk_rows=128)  # a prompt and its tokens


def product_seconds(running: Executor) -> float:
    """Seconds that the executor has spent on products and effects, from its own metrics."""
    return metrics(running).get("symbiosis_batch_seconds_sum", 0.0)


def measure_modes(folder: Path, running: Executors, rounds: int) -> dict[str, dict[str, Any]]:
    """All figures of iteration and decoding, by mode."""
    loaded = {mode: load(mode, folder, running) for mode in MODES}
    optimizers = {
        mode: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        for mode, (model, _) in loaded.items()
    }
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 32000, (BATCH, SEQUENCE), generator=generator)
    figures = ("iteration", "decode", "waiting", "effects", "masking", "product", "source")
    results: dict[str, dict[str, Any]] = {mode: {name: [] for name in figures} for mode in MODES}
    # Fingerprints are made once, and forecasts are learned from what repeats itself: two to warm up.
    for number in range(-1, rounds + 1):
        for mode, (model, session) in loaded.items():
            console.print(f"iteration {max(number, 0)}/{rounds}: {mode}", highlight=False)
            if mode in AHEAD and number > -1:
                fill(session, ITERATION_BUDGET)
            before = session.stats if session else None
            product, source = product_seconds(running.of(mode)), product_seconds(running.source)
            started = time.perf_counter()
            iteration(model, optimizers[mode], ids)
            seconds = time.perf_counter() - started
            after = session.stats if session else None
            if number < 1:
                continue
            result = results[mode]
            result["iteration"].append(seconds)
            if before and after:
                result["waiting"].append(after.seconds_waiting - before.seconds_waiting)
                result["effects"].append(
                    after.seconds_waiting_for_effects - before.seconds_waiting_for_effects
                )
                result["masking"].append(after.seconds_masking - before.seconds_masking)
                result["product"].append(product_seconds(running.of(mode)) - product)
                result["source"].append(product_seconds(running.source) - source)
                result["requests"] = after.requests - before.requests
                result["sent_mib"] = (after.bytes_sent - before.bytes_sent) / 2**20
                result["received_mib"] = (after.bytes_received - before.bytes_received) / 2**20
    prompt = ids[:1, :PROMPT]
    for number in range(-1, rounds + 1):
        for mode, (model, session) in loaded.items():
            console.print(f"decoding {max(number, 0)}/{rounds}: {mode}", highlight=False)
            generate(model, prompt, 2)
            if mode in AHEAD:
                fill(session, DECODE_BUDGET)
            seconds = generate(model, prompt, NEW_TOKENS)
            if number > 0:
                results[mode]["decode"].append(seconds)
    for _, session in loaded.values():
        if session:
            session.close()
    return results


def measure_round_trips(running: Executor, tls: Path, work: Path, rounds: int) -> list[dict[str, Any]]:
    """The layer 768 -> 768 through client and server, against an echo of the same bytes."""
    ready = work / "echo-port"
    echo = subprocess.Popen([sys.executable, str(Path(__file__).with_name("echo_server.py")), tls, ready])
    while not ready.exists():
        time.sleep(0.05)
    context = ssl.create_default_context(cafile=str(tls / "ca.pem"))
    results = []
    session = running.connect(privacy="plain")
    remote = session.executor
    url = f"wss://127.0.0.1:{ready.read_text()}"
    with websocket_connect(url, ssl=context, compression=None, max_size=1 << 28) as socket:
        for rows, repeats in ((1, 1000), (1024, 20)):
            x = torch.randn(rows, 768)
            message = x.numpy().tobytes()
            ours: list[float] = []
            bare: list[float] = []
            spent = 0.0
            for number in range(rounds + 1):
                timings: list[float] = []
                product = product_seconds(running)
                for _ in range(repeats):
                    started = time.perf_counter()
                    remote.submit(Operation.PRODUCT, ProductKey(1, Direction.FORWARD, 1), [x]).result()
                    timings.append(time.perf_counter() - started)
                product = (product_seconds(running) - product) / repeats
                echoes: list[float] = []
                for _ in range(repeats):
                    started = time.perf_counter()
                    socket.send(message)
                    socket.recv()
                    echoes.append(time.perf_counter() - started)
                if number:
                    ours.append(statistics.median(timings) - product)
                    bare.append(statistics.median(echoes))
                    spent += product / rounds
            results.append({"bytes": len(message), "transport": ours, "echo": bare, "product": spent})
    session.close()
    echo.kill()
    echo.wait()
    return results


def probe_memory(mode: str, folder: Path, running: Executors) -> float:
    """Peak memory in MiB of a process of its own that runs one iteration in a mode."""
    command = [sys.executable, __file__, "--probe", mode, "--folder", str(folder)]
    for each in running:
        command += ["--executor", each.url, str(each.ca), each.token]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def probe(mode: str, folder: Path, given: list[list[str]]) -> None:
    """The other side of ``probe_memory``."""
    none = TokenFile("")  # the other side's
    running = Executors(*(Executor(url, 0, token, Path(ca), "", none) for url, ca, token in given))
    model, session = load(mode, folder, running)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    iteration(model, optimizer, torch.randint(0, 32000, (BATCH, SEQUENCE)))
    print(peak_memory_mib())
    if session:
        session.close()


def show(results: dict[str, dict[str, Any]], trips: list[dict[str, Any]], memory: dict[str, float]) -> None:
    """Print the tables."""
    table = Table(
        title=f"Iteration ({BATCH} x {SEQUENCE} tokens) and decoding: median (range), ratio to local"
    )
    columns = ("mode", "iteration s", "ratio", "decode ms/token", "ratio", "requests", "MiB up/down")
    for column in (*columns, "waiting", "product", "source", "effects", "masking", "computing"):
        table.add_column(column)
    local = results["local"]
    for mode, result in results.items():
        row = [mode, spread(result["iteration"])]
        row.append(f"{statistics.median(result['iteration']) / statistics.median(local['iteration']):.2f}")
        row.append(spread(result["decode"], 1e3, 1))
        row.append(f"{statistics.median(result['decode']) / statistics.median(local['decode']):.2f}")
        if result["waiting"]:
            total = sum(result["iteration"])
            names = ("waiting", "product", "source", "effects", "masking")
            waiting, product, source, effects, masking = (sum(result[name]) / total for name in names)
            row += [str(result["requests"]), f"{result['sent_mib']:.0f}/{result['received_mib']:.0f}"]
            computing = 1 - waiting - effects - masking
            row += [f"{v:.0%}" for v in (waiting, product, source, effects, masking, computing)]
        table.add_row(*row)
    console.print(table)
    table = Table(title="One round trip, product time taken off, against a bare websocket echo over TLS")
    for column in ("bytes each way", "ours us", "echo us", "ratio", "product us"):
        table.add_column(column)
    for trip in trips:
        ratio = statistics.median(trip["transport"]) / statistics.median(trip["echo"])
        table.add_row(
            str(trip["bytes"]),
            spread(trip["transport"], 1e6, 0),
            spread(trip["echo"], 1e6, 0),
            f"{ratio:.2f}",
            f"{trip['product'] * 1e6:.0f}",
        )
    console.print(table)
    table = Table(title="Peak memory, MiB, one iteration")
    table.add_column("process")
    table.add_column("MiB")
    for name, value in memory.items():
        table.add_row(name, f"{value:.0f}")
    console.print(table)


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Where an iteration's time goes, as stacked bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 4.4), layout="constrained")
    names = list(results)
    parts: dict[str, list[float]] = {
        "tenant computes": [],
        "tenant masks and checks": [],
        "waits for the provider's product": [],
        "waits for transport, and for processors that others use": [],
    }
    for result in results.values():
        middle = statistics.median(result["iteration"])
        waiting, effects, masking, product = (
            statistics.median(result[k]) if result[k] else 0.0
            for k in ("waiting", "effects", "masking", "product")
        )
        waiting += effects
        for part, value in zip(
            parts.values(), (middle - waiting - masking, masking, product, waiting - product), strict=True
        ):
            part.append(max(value, 0.0))
    left = [0.0] * len(names)
    for (label, values), colour in zip(
        parts.items(), ("#4878a8", "#e0a030", "#6aa84f", "#b0b0b0"), strict=True
    ):
        axis.barh(names, values, left=left, label=label, color=colour)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for position, total in enumerate(left):
        axis.text(total, position, f" {total:.2f} s", va="center")
    axis.invert_yaxis()
    axis.set_xlim(0, max(left) * 1.12)
    axis.set_xlabel("seconds per fine-tuning iteration, median")
    axis.legend(loc="upper center", bbox_to_anchor=(0.4, -0.16), ncols=2, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Run everything."""
    parser = arguments(__doc__, rounds=5, output="out/bench")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--executor", nargs=3, action="append", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    keep_freed_memory()
    if options.probe:
        probe(options.probe, options.folder, options.executor)
        return
    with tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name:
        work = Path(name)
        folder = work / "model"
        console.print("writing the model")
        write_model(folder)
        with (
            executor(folder, work / "float32") as first,
            executor(folder, work / "ring", "--numerics", "ring") as second,
            executor(folder, work / "source", "--numerics", "ring") as third,
        ):
            running = Executors(first, second, third)
            results = measure_modes(folder, running, options.rounds)
            trips = measure_round_trips(first, work / "float32" / "tls", work, options.rounds)
            memory = {f"tenant, {mode}": probe_memory(mode, folder, running) for mode in MODES}
            memory["executor, float32"] = peak_memory_mib(first.pid)
            memory["executor, ring"] = peak_memory_mib(second.pid)
    show(results, trips, memory)
    data = {"iteration_and_decode": results, "round_trips": trips, "peak_memory_mib": memory}
    save(options.output / "split_execution.json", data)
    plot(results, options.output / "split_execution.png")
    console.print(f"wrote {options.output}/split_execution.json and .png")


if __name__ == "__main__":
    main()
