"""How long an executor does without a worker that was killed, or stopped, while a tenant asks for products.

    python benchmarks/worker_faults.py --rounds 5

Noticed: until ``/readyz`` says so. Serving again: until a product of that worker's groups is answered. The
other worker's groups are asked for all the time; its longest answer meanwhile stands beside.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch
from common import Executor, arguments, executor, save, spread, write_model
from rich.console import Console
from rich.table import Table

import tenant_sdk
from provider.workers.pool import place_groups
from shared.wire.header import Direction

FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
ROWS = 8


def ready(running: Executor) -> bool:
    try:
        with urllib.request.urlopen(f"{running.admin_url}/readyz", timeout=10):  # noqa: S310
            return True
    except urllib.error.HTTPError:
        return False


def pid_of(running: Executor, worker: int) -> int:
    with urllib.request.urlopen(f"{running.admin_url}/status.json", timeout=10) as answer:  # noqa: S310
        return int(json.load(answer)["workers"][worker]["pid"])


def connect(running: Executor) -> tenant_sdk.Session:
    return running.connect(privacy="plain")


def ask(session: tenant_sdk.Session, group: int) -> float:
    """Seconds of a product."""
    info = session.manifest.groups[group]
    began, rows = time.perf_counter(), torch.ones(ROWS, info.inputs)
    session.products.submit(group, Direction.FORWARD, (1 << len(info.members)) - 1, [rows]).result()
    return time.perf_counter() - began


class Spared(threading.Thread):
    """Asks for a group of the other worker until it is stopped."""

    def __init__(self, session: tenant_sdk.Session, group: int) -> None:
        super().__init__()
        self._session, self._group = session, group
        self.stopped, self.times = threading.Event(), list[float]()

    def run(self) -> None:
        while not self.stopped.is_set():
            self.times.append(ask(self._session, self._group))


def one_round(running: Executor, fault: signal.Signals, worker: int) -> dict[str, float]:
    """Of an executor that has lost no worker yet: one that is lost again within a minute is held back."""
    with connect(running) as session, connect(running) as other:
        lane_of = place_groups(session.manifest.groups, ["cpu"] * 2, 1, "ring").lane_of
        group, spared = lane_of.index(worker), Spared(other, lane_of.index(1 - worker))
        ask(session, group)
        spared.start()
        try:
            began = time.perf_counter()
            os.kill(pid_of(running, worker), fault)
            asker = threading.Thread(target=ask, args=(session, group))  # else nobody would miss it
            asker.start()
            while ready(running):
                time.sleep(0.002)
            noticed = time.perf_counter() - began
            asker.join()
            ask(session, group)
            again = time.perf_counter() - began
        finally:
            spared.stopped.set()
            spared.join()
    return {"noticed": noticed, "again": again, "others": max(spared.times), "products": len(spared.times)}


def main() -> None:
    parser = arguments(__doc__, rounds=5, output="out/worker_faults.json")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "model"
        write_model(folder, layers=4, width=256, feed_forward=512, heads=4, vocabulary=1000)
        for name, fault in FAULTS.items():
            found[name] = []
            for i in range(options.rounds):
                served = Path(work) / f"{name}-{i}"
                with executor(folder, served, "--numerics", "ring", "--workers", "2") as running:
                    found[name].append(one_round(running, fault, i % 2))
    table = Table(title=f"Seconds, median of {options.rounds} (range), after a worker was lost")
    for title in ("", "noticed", "serving again", "longest answer of the other", "its products meanwhile"):
        table.add_column(title, justify="right")
    for name, rounds in found.items():
        cells = [spread([each[of] for each in rounds]) for of in ("noticed", "again", "others")]
        table.add_row(name, *cells, f"{statistics.median(each['products'] for each in rounds):.0f}")
    Console(width=120).print(table)
    save(options.output, found)


if __name__ == "__main__":
    main()
