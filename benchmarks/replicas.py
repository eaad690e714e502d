"""Eight tenants on two replicas, one of which is drained in the middle: what fails, how long requests take.

Each tenant is a thread with a session of its own, which knows both replicas and sends one request after the
other. A third of the time passes; one replica gets SIGTERM; a third later the rest begins. A request's time
is what its caller waits, with moving and sending again what was lost.

    python benchmarks/replicas.py --seconds 30
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import torch
from common import Executor, executor, write_model

import tenant_sdk
from shared.errors import SymbiosisError
from shared.wire.header import Direction, Operation
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.remote import RemoteExecutor

PHASES = ("before", "during", "after")


class Tenant(threading.Thread):
    """Sends requests of a few rows through all groups, until it is told to stop.

    Attributes:
        times: of each request, when it began and how many seconds it took.
        failed: requests that raised, by the error's code.
    """

    def __init__(self, replicas: list[Executor], rows: int) -> None:
        super().__init__(daemon=True)
        options = {"token": replicas[0].token, "ca": replicas[0].ca}
        urls = [each.url for each in replicas]
        self.session = tenant_sdk.connect(urls, privacy="plain", **options)  # type: ignore[arg-type]
        self.rows, self.stop = rows, threading.Event()
        self.times: list[tuple[float, float]] = []
        self.failed: Counter[str] = Counter()

    def run(self) -> None:
        """Of Thread."""
        remote: RemoteExecutor = self.session.executor
        requests = []
        for group, shape in enumerate(remote.shapes):
            members = (1 << len(shape.outputs)) - 1
            requests.append((group, members, torch.randn(self.rows, shape.inputs).to(remote.wire_dtype)))
        while True:
            for group, members, tensor in requests:
                if self.stop.is_set():
                    return
                began = time.perf_counter()
                try:
                    remote.submit(
                        Operation.PRODUCT, ProductKey(group, Direction.FORWARD, members), [tensor]
                    ).result()
                except SymbiosisError as error:
                    self.failed[error.code] += 1
                self.times.append((began, time.perf_counter() - began))

    @property
    def replica(self) -> str:
        """The one in use."""
        return next(iter(self.session.stats.replicas.values()))


def percentile(values: list[float], share: float) -> float:
    """The value that so many of all do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def measure(replicas: list[Executor], tenants: list[Tenant], seconds: float) -> list[float]:
    """Let the tenants work, drain the replica that most use; the moments at which phases began and ended."""
    for tenant in tenants:
        tenant.start()
    time.sleep(1.0)  # until all are warm
    marks = [time.perf_counter()]
    time.sleep(seconds / 3)
    used = Counter(tenant.replica for tenant in tenants)
    victim = max(replicas, key=lambda each: used[each.url])
    print(f"tenants by replica: {sorted(used.values())}; draining one of {used[victim.url]}")
    marks.append(time.perf_counter())
    os.kill(victim.pid, signal.SIGTERM)
    for _ in range(2):
        time.sleep(seconds / 3)
        marks.append(time.perf_counter())
    for tenant in tenants:
        tenant.stop.set()
        tenant.join()
    return marks


def report(tenants: list[Tenant], marks: list[float]) -> None:
    """A line a phase."""
    tails: dict[str, float] = {}
    for at, phase in enumerate(PHASES):
        times = [took for each in tenants for began, took in each.times if marks[at] <= began < marks[at + 1]]
        tails[phase] = percentile(times, 0.99)
        print(
            f"{phase:>7}: {len(times):6} requests, p50 {percentile(times, 0.5) * 1e3:7.2f} ms, p99 "
            f"{tails[phase] * 1e3:7.2f} ms, longest {max(times) * 1e3:7.1f} ms; p99 to that before "
            f"{tails[phase] / tails['before']:.2f}"
        )
    failed = sum((each.failed for each in tenants), Counter[str]())
    stats = [each.session.stats for each in tenants]
    print(
        f"requests failed: {failed.total()} {dict(failed) or ''}; moves {sum(each.moves for each in stats)}, "
        f"{sum(each.seconds_reconnecting for each in stats) * 1e3:.0f} ms of reconnecting in all"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)  # that plain is plain is known here
    print(f"load of this machine at the start: {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        work = Path(name)
        write_model(work / "model", layers=arguments.layers, vocabulary=1000)
        options = ("--threads", "1")
        first = opened.enter_context(executor(work / "model", work / "one", *options))
        other = executor(work / "model", work / "other", *options, replica_of=first)
        replicas = [first, opened.enter_context(other)]
        tenants = [Tenant(replicas, arguments.rows) for _ in range(arguments.tenants)]
        report(tenants, measure(replicas, tenants, arguments.seconds))
        for tenant in tenants:
            tenant.session.close()
    print(f"load at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
