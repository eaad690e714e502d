"""A million replies to tenants at once, each checked: does anybody ever get another's answer?

    python benchmarks/crossings.py --replies 1000000

Every request of every tenant holds a number that no other has, in one place of its row, so that its right
answer, a column of the weight times that number modulo 2^32, is known exactly and nobody else's. Requests go
over real connections to an executor of its own process that batches them; some tenants break their
connection in the middle of a request and come back.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

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

MODEL = Path(__file__).resolve().parent.parent / "examples" / "base_model"
GROUPS = 4  # as many groups as are asked for, so that requests meet
BREAK_EVERY = 5000  # replies of every second tenant
console = Console(width=None if sys.stdout.isatty() else 150)


class Tenant(threading.Thread):
    """Asks one row at a time, and compares."""

    def __init__(self, number: int, tenants: int, replies: int, running: Executor, shown: tqdm[None]) -> None:
        super().__init__(daemon=True)
        self.number, self.tenants, self.replies, self.shown = number, tenants, replies, shown
        self.session = tenant_sdk.connect(
            running.url, token=running.tokens.add(f"tenant-{number}"), ca=running.ca, privacy="plain"
        )
        self.wrong = self.right = self.lost = 0
        self.planes: list[torch.Tensor] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Of Thread."""
        try:
            for i in range(self.replies):
                self._ask(i)
                if self.number % 2 and i % BREAK_EVERY == BREAK_EVERY - 1:
                    self._break()
                self.shown.update()
        except BaseException as error:
            self.error = error

    def _ask(self, i: int) -> None:
        group = (i + self.number) % GROUPS
        planes = self.planes[group]  # [2, O, D]
        place = i % planes.shape[2]
        secret = 1 + self.number + self.tenants * i
        row = torch.zeros((1, planes.shape[2]), dtype=torch.int32)
        row[0, place] = secret
        (answer,) = self._remote(group, row)
        if torch.equal(answer.flatten(), (planes[:, :, place].flatten() * secret)):
            self.right += 1
        else:
            self.wrong += 1

    def _break(self) -> None:
        """Let the connection go while a request is under way; the session opens another."""
        remote = self.session.executor
        rows = torch.zeros((64, self.planes[0].shape[2]), dtype=torch.int32)
        waiting = threading.Thread(target=self._lose, args=(rows,))
        waiting.start()
        remote._channel.close()
        waiting.join()

    def _lose(self, rows: torch.Tensor) -> None:
        try:
            self._remote(0, rows)
        except ConnectionLost:
            self.lost += 1

    def _remote(self, group: int, rows: torch.Tensor) -> list[torch.Tensor]:
        info = self.session.manifest.groups[group]
        everyone = (1 << len(info.members)) - 1
        return self.session.executor.submit(
            Operation.PRODUCT, group, Direction.FORWARD, everyone, [rows]
        ).result()


def main() -> int:
    """Run, and say how many were wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replies", type=int, default=1_000_000)
    parser.add_argument("--tenants", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name,
        executor(MODEL, Path(name) / "executor", "--numerics", "ring") as running,
        tqdm(total=options.replies, unit="reply", mininterval=5.0) as shown,
    ):
        each = options.replies // options.tenants
        tenants = [Tenant(i, options.tenants, each, running, shown) for i in range(options.tenants)]
        manifest = tenants[0].session.manifest
        checkpoint = Checkpoint(MODEL)
        planes = [group_planes(checkpoint, info)[0].int() for info in manifest.groups[:GROUPS]]
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
        f"{rows / products:.2f} rows in a product, {seconds:.0f} s"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
