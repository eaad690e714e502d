"""A million replies to tenants at once, each checked: does anybody ever get another's answer?

    python benchmarks/cross_talk.py --replies 1000000

Every request of every tenant holds a number that no other has, in one place of its row, so that its right
answer, a column of the weight times that number modulo 2^32, is known exactly and nobody else's. Requests go
over real connections to an executor of its own process that batches them, a window of each tenant's in
flight at once; some tenants break their connection meanwhile and come back.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from common import Executor, executor, metrics
from rich.console import Console
from tqdm import tqdm

import tenant_sdk
from shared.checkpoint import Checkpoint
from shared.errors import ConnectionLost
from shared.ring.product import group_planes
from shared.wire.header import Direction, Operation
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.remote import LazyResult

MODEL = Path(__file__).resolve().parent.parent / "examples" / "base_model"
GROUPS = 4  # as many groups as are asked for, so that requests meet
BREAK_EVERY = 5000  # replies of every second tenant
console = Console(width=None if sys.stdout.isatty() else 150)


class Asked(NamedTuple):
    """A request in flight, and where its row holds which number."""

    pending: LazyResult
    group: int
    place: int
    secret: int


class Tenant(threading.Thread):
    """Asks for one row at a time, a window of requests in flight at once, and compares.

    Answers are taken in the order of the requests; those of every third window in the reverse order.
    """

    def __init__(
        self, number: int, tenants: int, replies: int, window: int, running: Executor, shown: tqdm[None]
    ) -> None:
        super().__init__(daemon=True)
        self.number, self.tenants, self.replies = number, tenants, replies
        self.window, self.shown = window, shown
        self.session = tenant_sdk.connect(
            running.url, token=running.tokens.add(f"tenant-{number}"), ca=running.ca, privacy="plain"
        )
        self._requests = itertools.count()
        self.wrong = self.right = self.lost = 0
        self.planes: list[torch.Tensor] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Of Thread."""
        try:
            for round_number, first in enumerate(range(0, self.replies, self.window)):
                count = min(self.window, self.replies - first)
                asked = [self._ask() for _ in range(count)]
                self._take(asked[::-1] if round_number % 3 == 2 else asked)
                if self.number % 2 and first // BREAK_EVERY < (first + count) // BREAK_EVERY:
                    self._break()
                self.shown.update(count)
        except BaseException as error:
            self.error = error

    def _ask(self) -> Asked:
        i = next(self._requests)
        secret = 1 + self.number + self.tenants * i
        group = (i + self.number) % GROUPS
        columns = self.planes[group].shape[2]
        place = i % columns
        row = torch.zeros((1, columns), dtype=torch.int32)
        row[0, place] = secret
        everyone = (1 << len(self.session.manifest.groups[group].members)) - 1
        pending = self.session.executor.submit(
            Operation.PRODUCT, ProductKey(group, Direction.FORWARD, everyone), [row]
        )
        return Asked(pending, group, place, secret)

    def _take(self, asked: list[Asked]) -> None:
        for pending, group, place, secret in asked:
            (answer,) = pending.result()
            planes = self.planes[group]  # [2, O, D]
            if torch.equal(answer.flatten(), planes[:, :, place].flatten() * secret):
                self.right += 1
            else:
                self.wrong += 1

    def _break(self) -> None:
        """Let the connection go while a window is in flight; the session opens another."""
        asked = [self._ask() for _ in range(self.window)]
        with ThreadPoolExecutor(1) as threads:
            taking = threads.submit(self._lose, asked)
            self.session.executor.connection.channel.close()
            taking.result()

    def _lose(self, asked: list[Asked]) -> None:
        for each in asked:
            try:
                self._take([each])
            except ConnectionLost:
                self.lost += 1


def main() -> int:
    """Run, and say how many were wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replies", type=int, default=1_000_000)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--window", type=int, default=8, help="requests of each tenant in flight at once")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name,
        executor(MODEL, Path(name) / "executor", "--numerics", "ring") as running,
        tqdm(total=options.replies, unit="reply", mininterval=5.0) as shown,
    ):
        each = options.replies // options.tenants
        tenants = [
            Tenant(i, options.tenants, each, options.window, running, shown) for i in range(options.tenants)
        ]
        manifest = tenants[0].session.manifest
        checkpoint = Checkpoint(MODEL)
        planes = [group_planes(checkpoint, info, 1)[0].int() for info in manifest.groups[:GROUPS]]
        began = time.monotonic()
        for tenant in tenants:
            tenant.planes = planes
            tenant.start()
        for tenant in tenants:
            tenant.join()
        seconds = time.monotonic() - began
        told = metrics(running)
        for tenant in tenants:
            tenant.session.close()
            if tenant.error is not None:
                raise tenant.error
    wrong, right = sum(t.wrong for t in tenants), sum(t.right for t in tenants)
    rows, products = told["symbiosis_batch_rows_sum"], told["symbiosis_batch_rows_count"]
    lost = sum(tenant.lost for tenant in tenants)
    console.print(
        f"{right:,} replies right, {wrong} wrong; {lost} lost with connections that were broken on purpose; "
        f"{rows / products:.2f} rows in a product, {right / seconds:,.0f} replies a second, {seconds:.0f} s"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
