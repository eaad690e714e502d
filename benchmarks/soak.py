"""Tenants that come, train, decode and go, for a long time: do memory, descriptors, threads or latency grow?

    python benchmarks/soak.py --minutes 60

A provider and a mask source are processes of their own. Tenants open sessions under one-time masks, train a
step of LoRA, write some tokens, and close. One of them loses its connection each time. Meanwhile tokens are
rotated, and the certificate is read again. This program notes memory, descriptors and threads of each process
and the seconds of a round. It prints slopes with 99 % intervals, without a first third in which
caches fill. It exits with 1 if something grows: its interval lies above 0, and it would grow by more than a
twentieth in eight hours.

Memory that is free may still belong to a process: an executor keeps up to a gigabyte, and new blocks land in
pages of it that were not touched before. So resident memory grows for thousands of sessions though no memory
is lost. Sessions without work, some hundred a second, are opened and closed first, until that is over.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import torch
from common import Executor, anonymous_mib, arguments, executor, save, write_model
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import logging

import tenant_sdk

FIRST_SESSIONS = 8000  # without work, at each executor; its memory stays the same from some 7000 on
SAMPLE_SECONDS = 2.0
ROTATE_SECONDS = 20.0
HOURS = 8
GROWTH = 0.05
BLOCKS = 10
# Student's t for 99 % and nine degrees of freedom. Eleven lines are judged by their lower ends, so a run in
# which nothing grows fails once in twenty times.
STUDENT = 3.25
console = Console(width=None if sys.stdout.isatty() else 120)


class Slope(NamedTuple):
    """Of a series: its mean, and by how much it grows in an hour, with the half width of the interval."""

    mean: float
    hourly: float
    half: float

    def grows(self) -> bool:
        """Whether it does so beyond doubt, and by an amount that matters."""
        return self.hourly - self.half > 0 and HOURS * self.hourly > GROWTH * self.mean


def slope(times: list[float], values: list[float]) -> Slope:
    """By least squares, with an interval of 99 % from blocks, since neighbours are alike."""
    x, y = np.array(times) / 3600, np.array(values)
    hourly = float(np.polyfit(x, y, 1)[0])
    # The spread of the slopes that remain when one of the blocks is left out (jackknife).
    blocks = np.array_split(np.arange(len(x)), BLOCKS)
    without = [np.polyfit(np.delete(x, block), np.delete(y, block), 1)[0] for block in blocks if len(block)]
    spread = float(np.sqrt((len(without) - 1) * np.var(without)))
    return Slope(float(y.mean()), hourly, STUDENT * spread)


def connect(executors: tuple[Executor, Executor]) -> tenant_sdk.Session:
    """Open a session with one-time masks."""
    provider, source = executors
    return provider.connect(
        mask_sources=[source.url],
        mask_source_token=source.token,
        mask_source_ca=source.ca,
        allow_same={"all"},
    )


def open_first_sessions(executors: tuple[Executor, Executor]) -> None:
    """Open and close sessions, one after the other."""
    for _ in track(range(FIRST_SESSIONS), "first sessions", console=console, transient=True):
        connect(executors).close()


def work(
    number: int, executors: tuple[Executor, Executor], ends: threading.Event, rounds: list[float]
) -> None:
    """A tenant: sessions, one after the other."""
    logging.set_verbosity_error()
    words = torch.arange(16)[None] + number
    while not ends.is_set():
        began = time.monotonic()
        with connect(executors) as session:
            model = get_peft_model(session.load_model(progress=False), LoraConfig(target_modules=["q_proj"]))
            model(words, labels=words).loss.backward()
            model.generate(words[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
            if number == 0:  # and its requests move to a new connection
                session.executor.connection.channel.close()
                model(words)
        gc.collect()  # models are cycles of objects, which Python would free at a time of its own
        rounds.append(time.monotonic() - began)


def sample(pid: int) -> dict[str, float]:
    """Of a process: MiB, descriptors, threads."""
    if pid == os.getpid():
        ctypes.CDLL(None).malloc_trim(0)  # give free memory back, so that what is left is in use
    here = Path(f"/proc/{pid}")
    descriptors = len(list((here / "fd").iterdir()))
    return {
        "MiB": anonymous_mib(pid),
        "descriptors": descriptors,
        "threads": len(list((here / "task").iterdir())),
    }


def watch(
    executors: dict[str, Executor], minutes: float, rounds: list[list[float]]
) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds, and what was seen then."""
    times: list[float] = []
    seen: dict[str, list[float]] = {}
    began = rotated = time.monotonic()
    while time.monotonic() - began < 60 * minutes:
        time.sleep(SAMPLE_SECONDS)
        if time.monotonic() - rotated > ROTATE_SECONDS:
            rotated = time.monotonic()
            for running in executors.values():
                running.tokens.rotate("other", overlap_days=0)
                os.kill(running.pid, signal.SIGHUP)
        times.append(time.monotonic() - began)
        pids = {"tenants": os.getpid(), **{name: running.pid for name, running in executors.items()}}
        for name, pid in pids.items():
            for kind, value in sample(pid).items():
                seen.setdefault(f"{name}: {kind}", []).append(value)
        latest = [done[-1] for done in rounds if done]
        seen.setdefault("seconds of a round", []).append(statistics.mean(latest) if latest else float("nan"))
        files = sum(len(inside) for _, _, inside in os.walk(tempfile.gettempdir()))
        seen.setdefault("temporary files", []).append(files)
    return times, seen


def main() -> int:
    """Watch, print slopes, write soak.json; 1 if something grows."""
    parser = arguments(__doc__, output="out/soak.json")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--tenants", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="symbiosis-soak-") as name, ExitStack() as running:
        folder, tempfile.tempdir = Path(name), name
        write_model(folder / "model", layers=2, width=128, feed_forward=256, heads=4, vocabulary=500)
        parties = {
            party: running.enter_context(executor(folder / "model", folder / party, "--numerics", "ring"))
            for party in ("provider", "mask source")
        }
        for party in parties.values():
            party.tokens.add("other")
        ends, rounds = threading.Event(), [list[float]() for _ in range(options.tenants)]
        both = (parties["provider"], parties["mask source"])
        open_first_sessions(both)
        tenants = [
            threading.Thread(target=work, args=(at, both, ends, done), daemon=True)
            for at, done in enumerate(rounds)
        ]
        for tenant in tenants:
            tenant.start()
        times, seen = watch(parties, options.minutes, rounds)
        alive = all(tenant.is_alive() for tenant in tenants)
        ends.set()
        for tenant in tenants:
            tenant.join()
    first = len(times) // 3
    found = {what: slope(times[first:], values[first:]) for what, values in seen.items()}
    table = Table(title=f"{options.minutes:g} minutes, {sum(map(len, rounds))} sessions")
    for title in ("", "mean", "an hour more", "interval", ""):
        table.add_column(title, justify="right")
    for what, line in found.items():
        verdict = "grows" if line.grows() else ""
        table.add_row(what, f"{line.mean:.2f}", f"{line.hourly:+.2f}", f"± {line.half:.2f}", verdict)
    console.print(table)
    grows = [what for what, line in found.items() if line.grows()]
    console.print(f"grows: {', '.join(grows) or 'nothing'}" + ("" if alive else "; a tenant failed"))
    save(options.output, {"times": times, "seen": seen})
    return int(bool(grows) or not alive)


if __name__ == "__main__":
    sys.exit(main())
