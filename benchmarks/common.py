"""What the benchmarks share: a model, an executor process, summaries."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

# The model of the design's figures: per token and layer 4,352 inputs and 7,936 outputs go over the wire.
LAYERS, WIDTH, FEED_FORWARD, HEADS, VOCABULARY = 12, 768, 2048, 12, 32000


def write_model(folder: Path) -> None:
    """Save the 12-layer, d = 768, Llama-shaped model with random weights, float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@dataclass(frozen=True)
class Executor:
    """A running executor process."""

    url: str
    pid: int
    token: str
    ca: Path
    admin_url: str


def provider(*arguments: str) -> str:
    """Run ``symbiosis-provider`` and return what it printed."""
    command = [sys.executable, "-m", "provider.cli", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def executor(folder: Path, work: Path, *options: str) -> Iterator[Executor]:
    """Serve a checkpoint from a process of its own until the block ends."""
    work.mkdir(exist_ok=True)
    tls, tokens, ready = work / "tls", work / "tokens.json", work / "ready.json"
    provider("certs", str(tls))
    token = provider("token", "add", "bench", "--token-file", str(tokens))
    command = [sys.executable, "-m", "provider.cli", "serve", str(folder), "--tls-dir", str(tls)]
    command += ["--token-file", str(tokens), "--port", "0", "--ready-file", str(ready), *options]
    with (work / "executor.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while not ready.exists():
            if process.poll() is not None:
                raise SystemExit((work / "executor.log").read_text())
            time.sleep(0.1)
        told = json.loads(ready.read_text())
        yield Executor(told["url"], told["pid"], token, tls / "ca.pem", told["admin_url"])
    finally:
        ready.unlink(missing_ok=True)
        process.terminate()
        process.wait(30)


def peak_memory_mib(pid: int | None = None) -> float:
    """Largest resident set so far of a process, in MiB; default this one."""
    for line in Path(f"/proc/{pid or os.getpid()}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise SystemExit("no VmHWM: the memory figures need Linux")


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """Median and range: ``1.23 (1.20-1.31)``."""
    marks = (min(values), statistics.median(values), max(values))
    low, middle, high = (f"{value * scale:.{digits}f}" for value in marks)
    return f"{middle} ({low}-{high})"
