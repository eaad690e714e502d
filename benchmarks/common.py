"""What the benchmarks share: a model, an executor process, summaries."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tenant_sdk
from provider.serve.tokens import TokenFile
from shared.launching import Program, free_port

# The model of the design's figures: per token and layer 4,352 inputs and 7,936 outputs go over the wire.
LAYERS, WIDTH, FEED_FORWARD, HEADS, VOCABULARY = 12, 768, 2048, 12, 32000


def write_model(
    folder: Path,
    *,
    layers: int = LAYERS,
    width: int = WIDTH,
    feed_forward: int = FEED_FORWARD,
    heads: int = HEADS,
    vocabulary: int = VOCABULARY,
    context: int = 2048,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Save a Llama-shaped model with random weights; by default 12 layers and d = 768."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=context,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)


@dataclass(frozen=True)
class Executor:
    """A running executor process."""

    url: str
    pid: int
    token: str
    ca: Path
    admin_url: str
    tokens: TokenFile  # to add tenants
    local_url: str = ""  # with --local-dir

    def connect(self, **options: Any) -> tenant_sdk.Session:
        """A session of the tenant ``bench``."""
        return tenant_sdk.connect(self.url, token=self.token, ca=self.ca, **options)


def provider(*arguments: str) -> str:
    """Run ``symbiosis-provider`` and return what it printed."""
    command = [sys.executable, "-m", "provider.cli", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class ExecutorProcess:
    """Serves a checkpoint from a process of its own; can be killed, and comes back at its port.

    Args:
        options: of ``symbiosis-provider serve``.
        prefix: words before the command.
        replica_of: another one, whose certificate and tokens this one has too.

    Attributes:
        executor: the running one.
    """

    executor: Executor

    def __init__(
        self,
        folder: Path,
        work: Path,
        *options: object,
        prefix: Sequence[str] = (),
        host: str = "127.0.0.1",
        replica_of: Executor | None = None,
    ) -> None:
        work.mkdir(exist_ok=True)
        tls, tokens, self._ready = work / "tls", work / "tokens.json", work / "ready.json"
        if replica_of is not None:
            tls, tokens, self._token = replica_of.ca.parent, replica_of.tokens.path, replica_of.token
        else:
            provider("certs", str(tls), "--host", host)
            self._token = provider("token", "add", "bench", "--token-file", str(tokens))
        command = [*prefix, sys.executable, "-m", "provider.cli", "serve", folder, "--tls-dir", tls]
        command += ["--token-file", tokens, "--ready-file", self._ready, "--port", free_port(), *options]
        self._command, self._log = command, work / "executor.log"
        self._ca, self._tokens = tls / "ca.pem", TokenFile(tokens)
        self.start()

    def start(self) -> None:
        """Serve, and return when tenants can connect."""
        self.program = Program(self._command, self._ready, self._log)
        try:
            told = json.loads(self.program.wait_until_ready())
        except BaseException:
            self.program.stop()
            raise
        self.executor = Executor(
            told["url"],
            told["pid"],
            self._token,
            self._ca,
            told["admin_url"],
            self._tokens,
            told.get("local_url", ""),
        )

    def restart(self, number: int = signal.SIGKILL) -> None:
        """End it with a signal, and start it again."""
        self.program.stop(number)
        self.start()

    def workers(self) -> list[int]:
        """Process ids of its workers."""
        url = f"{self.executor.admin_url}/status.json"
        with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310
            return [worker["pid"] for worker in json.load(answer)["workers"]]

    def kill_worker(self, which: int) -> None:
        """End one of its workers, which it starts again itself."""
        workers = self.workers()
        with suppress(ProcessLookupError):
            os.kill(workers[which % len(workers)], signal.SIGKILL)


@contextmanager
def executor(folder: Path, work: Path, *options: str, **more: Any) -> Iterator[Executor]:
    """Serve a checkpoint with float32 products until the block ends; the arguments of ``ExecutorProcess``."""
    process = ExecutorProcess(folder, work, "--numerics", "float32", *options, **more)
    try:
        yield process.executor
    finally:
        process.program.stop()


def arguments(document: str, *, rounds: int = 0, output: str = "") -> argparse.ArgumentParser:
    """What a benchmark takes on its command line, with these defaults; it adds its own."""
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds)
    if output:
        parser.add_argument("--output", type=Path, default=Path(output))
    return parser


def save(path: Path, found: Any) -> None:
    """Write what was found, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))


def peak_memory_mib(pid: int | None = None) -> float:
    """Largest resident set so far of a process, in MiB; default this one."""
    for line in Path(f"/proc/{pid or os.getpid()}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise SystemExit("no VmHWM: the memory figures need Linux")


def forget_peak_memory(pid: int) -> None:
    """Begin anew to look for the largest resident set of a process."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def pss_mib(pid: int | None = None) -> float:
    """Memory of a process in MiB, with what it shares divided among those who share it."""
    return _memory_mib(pid, "Pss")


def own_mib(pid: int | None = None) -> float:
    """Memory of a process in MiB without mapped files, which other programs change."""
    return _memory_mib(pid, "Anonymous", "Pss_Shmem", "SwapPss")


def _memory_mib(pid: int | None, *kinds: str) -> float:
    lines = Path(f"/proc/{pid or os.getpid()}/smaps_rollup").read_text().splitlines()[1:]
    found = {name.rstrip(":"): int(value) for name, value, _ in map(str.split, lines)}
    return sum(found[kind] for kind in kinds) / 1024


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def metrics(running: Executor) -> dict[str, float]:
    """An executor's metrics, summed over labels."""
    with urllib.request.urlopen(f"{running.admin_url}/metrics", timeout=10) as answer:  # noqa: S310
        text = answer.read().decode()
    found: dict[str, float] = {}
    for name, value in re.findall(r"(?m)^(symbiosis_\w+)(?:\{.*\})? (\S+)$", text):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """Median and range: ``1.23 (1.20-1.31)``."""
    marks = (min(values), statistics.median(values), max(values))
    low, middle, high = (f"{value * scale:.{digits}f}" for value in marks)
    return f"{middle} ({low}-{high})"
