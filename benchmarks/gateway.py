"""A gateway: many adapters against one, processes of their own, vLLM alone; and how long clients wait.

    make gateway                                     # vLLM, in an environment of its own
    python benchmarks/gateway.py                     # 6 layers, d = 256
    python benchmarks/gateway.py --layers 12 --width 768 --feed-forward 2048 --heads 12
    python benchmarks/gateway.py --model out/models/SmolLM2-135M-Instruct   # made by `make demo`

Everything shares this machine's processors: the gateway with its three processes, provider and mask source.
Masks are one-time, answers are verified. Sides of a comparison take turns; medians of rounds, and range.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import itertools

import openai
import peft
import psutil
import torch
from common import Executor, arguments, executor, save, spread, write_model
from distance import away
from rich.console import Console
from rich.table import Table
from serving import results, started
from transformers import AutoModelForCausalLM

from shared.launching import free_port

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("SYMBIOSIS_GATEWAY_PYTHON", ROOT / ".venv-gateway" / "bin" / "python"))
TOKENIZER = ROOT / "examples" / "base_model"
ADAPTERS, RANK = 32, 16
PROMPT = "And in the beginning God created the heaven and the earth, number"
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
console = Console(highlight=False)


class Told(NamedTuple):
    """What clients of one round saw: times of tokens in seconds since each asked."""

    seconds: float
    times: list[list[float]]

    @property
    def rate(self) -> float:
        """Tokens a second of all."""
        return sum(map(len, self.times)) / self.seconds

    @property
    def firsts(self) -> list[float]:
        """Seconds to the first token."""
        return [each[0] for each in self.times]

    @property
    def between(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for each in self.times for a, b in itertools.pairwise(each)]


async def ask(client: openai.AsyncOpenAI, name: str, number: int, tokens: int) -> list[float]:
    """One client's stream."""
    began, times = time.perf_counter(), list[float]()
    stream = await client.completions.create(
        model=name,
        prompt=f"{PROMPT} {number}",
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for _ in stream:
        times.append(time.perf_counter() - began)
    return times[:tokens]


def load(url: str, names: Sequence[str], tokens: int) -> Told:
    """A client for each name, at once."""

    async def all_at_once() -> list[list[float]]:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600
        ) as client:
            return await asyncio.gather(*(ask(client, name, at, tokens) for at, name in enumerate(names)))

    began = time.perf_counter()
    times = asyncio.run(all_at_once())
    return Told(time.perf_counter() - began, times)


@contextmanager
def server(
    command: Sequence[object], url: str, log: Path, health: str = "/health", **environment: str
) -> Iterator[str]:
    """A server's process, from its first answer to the end of the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=output,
            stderr=output,
            env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT), **environment},
        )
    try:
        while subprocess.run(["curl", "-sf", "-o", "/dev/null", f"{url}{health}"], check=False).returncode:  # noqa: S607
            if process.poll() is not None:
                raise SystemExit(log.read_text()[-3000:])
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def gateway(
    provider: Executor, masks: Executor, adapters: Path, work: Path, *options: object
) -> Iterator[str]:
    """With one-time masks."""
    port = free_port()
    command = [
        PYTHON,
        "-m",
        "tenant_sdk.command_line.main",
        "serve",
        "--provider",
        provider.url,
        "--ca",
        provider.ca,
    ]
    command += ["--token-env", "PROVIDER_TOKEN", "--mask-source", masks.url, "--mask-source-ca", masks.ca]
    command += ["--mask-source-token-env", "MASKS_TOKEN", "--allow-same", "all", "--port", port]
    command += [
        "--name",
        "base",
        "--adapters",
        adapters,
        "--max-adapters",
        ADAPTERS,
        "--mask-budget-mib",
        1024,
        *options,
    ]
    tokens = {"PROVIDER_TOKEN": provider.token, "MASKS_TOKEN": masks.token}
    with server(command, f"http://127.0.0.1:{port}", work / "gateway.log", "/healthz", **tokens) as url:
        yield url


@contextmanager
def alone(model: Path, work: Path) -> Iterator[str]:
    """vLLM with the whole model."""
    port = free_port()
    command = [PYTHON, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", "base", "--host", "127.0.0.1", "--port", port, "--dtype", "float32"]
    command += ["--enforce-eager", "--max-num-seqs", 32, "--kv-cache-memory-bytes", 1 << 30]
    with server(command, f"http://127.0.0.1:{port}", work / "alone.log") as url:
        yield url


def masks_ahead(url: str) -> int:
    """Rows of all layers for which the gateway has effects in store."""
    with urllib.request.urlopen(f"{url}/status.json") as answer:  # noqa: S310
        return int(json.load(answer)["samples"][-1]["masks_ahead"])


def wait_for_masks(url: str) -> None:
    """Until the gateway fetches no more effects ahead."""
    before = -1
    while (now := masks_ahead(url)) != before:
        before = now
        time.sleep(3.0)


def write_adapters(model: Path, folder: Path) -> list[str]:
    """Random LoRA adapters of all linear layers."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False)
    names = [f"adapter-{at:02}" for at in range(ADAPTERS)]
    adapted = peft.get_peft_model(base, config, names[0])
    for at, name in enumerate(names):
        torch.manual_seed(at)
        if at:
            adapted.add_adapter(name, config)
    adapted.save_pretrained(folder)
    return names


def processes(provider: Executor, masks: Executor, count: int, seconds: float) -> float:
    """Tokens a second of processes that generate, each with an adapter and one-time masks of its own."""
    session = {
        "privacy": "one-time",
        "mask_sources": [masks.url],
        "mask_source_ca": str(masks.ca),
        "mask_source_token": masks.token,
        "allow_same": ["all"],
        "mask_budget_mib": 32,
    }
    plan = {"work": "decode", "batch": 1, "length": 16, "threads": 1, "seconds": seconds, "session": session}
    plan |= {"url": provider.url, "token": provider.token, "ca": str(provider.ca)}
    with started("tenant.py", [{**plan, "seed": at} for at in range(count)]) as running:
        told = results(running, time.time() + 1.0)
    return sum(len(each["times"]) for each in told) / seconds


def memory() -> dict[str, float]:
    """GiB of the programs that this one has started, with their processes; shared pages count by share."""
    found: dict[str, float] = {}
    programs = {
        "tenant_sdk.command_line.main": "the gateway",
        "vllm.entrypoints.openai.api_server": "vLLM alone",
    }
    for program in psutil.Process().children():
        words = program.cmdline()
        kind = next((kind for word, kind in programs.items() if word in words), "provider and mask source")
        for process in (program, *program.children(recursive=True)):
            found[kind] = found.get(kind, 0) + process.memory_full_info().pss / 2**30
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """Of a sample."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Measure in turn, print tables, write gateway.json."""
    parser = arguments(__doc__, rounds=5, output="out/bench")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; the next four do not count then")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--feed-forward", type=int, default=704)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--processes", type=int, default=32, help="that generate; 0: leave them out")
    parser.add_argument("--seconds", type=float, default=10.0, help="that these generate for")
    parser.add_argument("--round-trip", type=float, default=0.0, help="to the provider, in ms")
    options = parser.parse_args()
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name, ExitStack() as stack:
        work = Path(name)
        model = options.model or work / "model"
        if options.model is None:
            shape = {"layers": options.layers, "width": options.width, "heads": options.heads}
            write_model(model, feed_forward=options.feed_forward, vocabulary=2048, context=512, **shape)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(TOKENIZER / file, model)
        adapters = write_adapters(model, work / "adapters")
        provider = stack.enter_context(executor(model, work / "provider", "--numerics", "ring"))
        masks = stack.enter_context(executor(model, work / "masks", "--numerics", "ring"))
        distant = stack.enter_context(away(provider, options.round_trip / 1e3))
        url = stack.enter_context(gateway(distant, masks, work / "adapters", work))
        whole = stack.enter_context(alone(model, work))
        for warm in (url, whole):
            load(warm, ["base"] * 8, 8)
        load(url, adapters, 8)
        for at in range(options.rounds):
            console.print(f"round {at + 1} of {options.rounds}")
            for kind, names in {
                "32 adapters": adapters,
                "one adapter": adapters[:1] * 32,
                "32 of the base": ["base"] * 32,
                "8 of the base": ["base"] * 8,
                "one of the base": ["base"],
            }.items():
                wait_for_masks(url)
                found.setdefault(kind, []).append(load(url, names, options.tokens))
            found.setdefault("8, vLLM alone", []).append(load(whole, ["base"] * 8, options.tokens))
        for kind, gibibytes in memory().items():
            console.print(f"memory of {kind}: {gibibytes:.2f} GiB")
        if options.processes:
            console.print(f"{options.processes} processes that generate")
            found["processes"] = [processes(provider, masks, options.processes, options.seconds)]
    show(found, options)


def show(found: dict[str, list[Any]], options: argparse.Namespace) -> None:
    """Tables, and figures as JSON."""
    rates = {kind: [each.rate for each in told] for kind, told in found.items() if kind != "processes"}
    shape = options.model.name if options.model else f"{options.layers} layers, d = {options.width}"
    table = Table(title=f"{shape}, {options.tokens} tokens each")
    for column in ("", "tokens/s", "first token, p50 and p99, ms", "between tokens, p50 and p99, ms"):
        table.add_column(column)
    for kind, told in found.items():
        if kind == "processes":
            continue
        firsts, between = (
            [t for each in told for t in getattr(each, what)] for what in ("firsts", "between")
        )
        cells = [f"{1e3 * quantile(v, 0.5):.0f}, {1e3 * quantile(v, 0.99):.0f}" for v in (firsts, between)]
        table.add_row(kind, spread(rates[kind], digits=1), *cells)
    console.print(table)
    pairs = {
        "32 adapters / one adapter": ("32 adapters", "one adapter"),
        "8 sequences / vLLM alone": ("8 of the base", "8, vLLM alone"),
    }
    ratios = {
        title: [a / b for a, b in zip(rates[one], rates[other], strict=True)]
        for title, (one, other) in pairs.items()
    }
    for title, values in ratios.items():
        console.print(f"{title}: {spread(values)}")
    if "processes" in found:
        ratio = statistics.median(rates["32 adapters"]) / found["processes"][0]
        console.print(
            f"32 adapters / {options.processes} processes: {ratio:.2f} ({found['processes'][0]:.1f} tokens/s)"
        )
    told = {
        "shape": {name: str(value) for name, value in vars(options).items() if name != "output"},
        "rates": rates,
        "ratios": ratios,
    }
    save(options.output / "gateway.json", told)


if __name__ == "__main__":
    main()
