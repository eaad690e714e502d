"""Workers of this machine that hold a checkpoint together: which group is where."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from provider.catalog.catalog import Catalog
from provider.catalog.discovery import discover
from provider.engine.lanes import RowRange
from provider.engine.latency import LatencyModel, Line, Shape
from provider.engine.profiling import shapes_of
from provider.executor.loading import Numerics
from provider.workers.lane import WorkerLane
from provider.workers.link import Share
from shared.checkpoint import Checkpoint
from shared.wire.messages import GroupInfo, Limits, Manifest


def place(shapes: Sequence[Shape], workers: int) -> list[int]:
    """The worker of each group: the largest first, each to whoever has least so far."""
    sizes = [0] * workers
    worker_of = [0] * len(shapes)
    for group in sorted(range(len(shapes)), key=lambda group: (-shapes[group].size, group)):
        worker_of[group] = sizes.index(min(sizes))
        sizes[worker_of[group]] += shapes[group].size
    return worker_of


class WorkerPool:
    """Processes that hold a share of the groups each, by group: nothing is gathered.

    Args:
        folder: the checkpoint.
        workers: how many.
        numerics, device, limits, serve_head, recorded: see ``BaseExecutor``.
        threads: of one product; 0: all workers together have one a core.

    Attributes:
        catalog: the manifest, and what tenants download.
        lanes: of the engine, one a worker.
        worker_of: of each group.
        latency: as the workers measured it, all at the same time.

    Raises:
        CheckpointError: see ``discover``.
        SymbiosisError: a worker cannot load its share.
    """

    def __init__(
        self,
        folder: str | Path,
        workers: int,
        *,
        numerics: str,
        device: str = "cpu",
        threads: int = 0,
        limits: Limits | None = None,
        serve_head: bool = False,
        recorded: bool = False,
    ) -> None:
        kind, checkpoint = Numerics.named(numerics), Checkpoint(folder)
        found = discover(checkpoint, serve_head=serve_head)
        groups: list[GroupInfo] = list(found.groups)
        self.latency = LatencyModel(shapes_of(groups))
        self.worker_of = place(self.latency.shapes, workers)
        threads = threads or max(1, (os.cpu_count() or 1) // workers)
        self.lanes: list[WorkerLane] = []
        scales: dict[int, torch.Tensor] = {}
        with ExitStack() as opened:
            for number in range(workers):
                own = {group: info for group, info in enumerate(groups) if self.worker_of[group] == number}
                share = Share(str(checkpoint.folder), numerics, device, threads, own)
                lane = WorkerLane(str(number), share, self._expected)
                opened.callback(lane.close)
                self.lanes.append(lane)
            for lane in self.lanes:  # which load at the same time
                loaded, its_scales = lane.loaded()
                scales |= {int(group): tensor for group, tensor in its_scales.items()}
                for group, info in loaded.groups.items():
                    groups[group] = info
                for line in loaded.lines:
                    self.latency.set(line.group, line.direction, Line(line.fixed, line.per_row))
            self.catalog = Catalog(
                checkpoint,
                found,
                numerics=numerics,
                wire_dtypes=kind.wire_dtypes,
                groups=groups,
                scales=scales,
                limits=limits,
                recorded=recorded,
            )
            opened.pop_all()

    def _expected(self, batch: Sequence[RowRange]) -> float:
        header = batch[0].request.header
        rows = sum(each.stop - each.start for each in batch)
        return self.latency.seconds(header.group, header.direction, header.members, rows)

    def close(self) -> None:
        """End all workers."""
        for lane in self.lanes:
            lane.close()

    @property
    def manifest(self) -> Manifest:
        """The catalog's."""
        return self.catalog.manifest

    def not_ready(self) -> str:
        """Which workers are away; empty: none."""
        away = [lane.name for lane in self.lanes if not lane.available]
        return f"worker {', '.join(away)} is being started again" if away else ""
