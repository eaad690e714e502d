"""The known state of a worker at a moment, for observers; nothing is decided by it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from provider.executor.loading import Numerics
from provider.workers.link import Assignment


@dataclass
class Multiplied:
    """What a worker has multiplied since the executor started, also before it was started again.

    Attributes:
        products, rows: of one product may be rows of many requests.
        seconds: in which it had something to multiply; at most 1 a second.
        until: when it finished the last, of the monotonic clock.
    """

    products: int = 0
    rows: int = 0
    seconds: float = 0.0
    until: float = 0.0

    def add(self, rows: int, began: float, ended: float) -> None:
        """One more product, which it was given at ``began``, perhaps behind another one."""
        self.products += 1
        self.rows += rows
        self.seconds += ended - max(began, self.until)
        self.until = ended


class WorkerState(NamedTuple):
    """One worker.

    Attributes:
        name: of the log.
        pid: of its process, the last one.
        up: it has its share and takes batches; else it is being started again.
        since: when that began, in seconds since the epoch.
        why: it is not up; empty: it is.
        device: where its products run.
        groups: how many it holds, or a stripe of.
        stripe: which, of how many; empty: its groups are with it alone.
        restarts, products, rows, seconds: since the executor started; see ``Multiplied``.
        batches: that it has now.
        waiting: requests without an answer, whose groups it holds.
        resident_bytes: of its process; 0: there is none now.
        weight_bytes: of its share, as it is multiplied with.
    """

    name: str
    pid: int
    up: bool
    since: float
    why: str
    device: str
    groups: int
    stripe: str
    restarts: int
    products: int
    rows: int
    seconds: float
    batches: int
    waiting: int
    resident_bytes: int
    weight_bytes: int


def weight_bytes(assignment: Assignment) -> int:
    """Of all weights of a share."""
    elements = 0
    for info in assignment.groups.values():
        for member in info.members:
            outputs = range(member.outputs)
            elements += info.inputs * len(
                outputs[assignment.stripe.of(member.outputs)] if assignment.stripe else outputs
            )
    return elements * Numerics.named(assignment.numerics).weight_bytes


def resident_bytes(pid: int) -> int:
    """Of a process of this machine; 0: it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
