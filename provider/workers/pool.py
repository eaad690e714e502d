"""Workers of this machine that hold a checkpoint together: which group is where."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from provider.catalog.catalog import Catalog
from provider.catalog.discovery import discover, part_of
from provider.engine.lanes import RowRange
from provider.engine.latency import LatencyModel, Line, Shape
from provider.engine.profiling import shapes_of
from provider.executor.loading import Numerics
from provider.executor.room import check_room
from provider.executor.stripes import Stripe
from provider.workers.distributed import Rank
from provider.workers.lane import WorkerLane
from provider.workers.link import Loaded, Share
from provider.workers.process import Process, Summon
from provider.workers.state import WorkerState
from provider.workers.world import World
from shared.checkpoint import Checkpoint
from shared.errors import ConfigurationError
from shared.wire.messages import GroupInfo, Limits, Manifest


def place(shapes: Sequence[Shape], workers: int) -> list[int]:
    """The worker of each group: the largest first, each to whoever has least so far."""
    sizes = [0] * workers
    worker_of = [0] * len(shapes)
    for group in sorted(range(len(shapes)), key=lambda group: (-shapes[group].size, group)):
        worker_of[group] = sizes.index(min(sizes))
        sizes[worker_of[group]] += shapes[group].size
    return worker_of


def check_stripes(groups: Sequence[GroupInfo], stripes: int) -> None:
    """Refuse what cannot be divided.

    Raises:
        ConfigurationError: a layer has fewer outputs than stripes.
    """
    least = min(member.outputs for group in groups for member in group.members)
    if least < stripes:
        raise ConfigurationError(f"stripes={stripes} is too many: a layer has {least} outputs")


def _check_weights(checkpoint: Checkpoint, rank: str, loaded: Loaded) -> None:
    if loaded.weights != checkpoint.weights_digest(loaded.groups.values()):
        raise ConfigurationError(
            f"rank {rank} has read other weights than rank 0 from {checkpoint.folder}; give all machines the "
            "same checkpoint"
        )


class WorkerPool:
    """Processes that hold a share of the weights each.

    Args:
        folder: the checkpoint.
        workers: how many, a multiple of ``stripes``.
        stripes: how many of them share each weight's outputs; 1: each group is with one worker alone, so that
            nothing is gathered.
        numerics, device, limits, serve_head, recorded, part: see ``BaseExecutor``.
        threads: of one product; 0: all workers of a machine together have one a core.
        world: who else takes part: rank 0 is a process of this machine, others join. ``workers`` of them.

    Attributes:
        catalog: the manifest, and what tenants download.
        lanes: of the engine.
        lane_of: of each group the number of its lane.
        latency: as the workers measured it, all at the same time.

    Raises:
        CheckpointError: see ``discover``.
        ConfigurationError: the workers cannot be divided so.
        SymbiosisError: a worker cannot load its share.
    """

    def __init__(
        self,
        folder: str | Path,
        workers: int,
        stripes: int = 1,
        *,
        numerics: str,
        device: str = "cpu",
        threads: int = 0,
        limits: Limits | None = None,
        serve_head: bool = False,
        recorded: bool = False,
        part: tuple[int, int] | None = None,
        world: World | None = None,
    ) -> None:
        kind, checkpoint = Numerics.named(numerics), Checkpoint(folder)
        found = discover(checkpoint, serve_head=serve_head)
        groups: list[GroupInfo] = list(found.groups)
        self.latency = LatencyModel(shapes_of(groups))
        check_stripes(groups, stripes)
        served = part_of(groups, *part) if part else (0, len(groups))
        check_room(checkpoint.name, groups[slice(*served)], kind.weight_bytes if device == "cpu" else 0)
        self.lane_of = place(self.latency.shapes, workers // stripes)
        threads = threads or (0 if world else max(1, (os.cpu_count() or 1) // workers))
        summons: list[Summon] = [Process] * (workers // stripes)
        if world is not None:
            store = world.store()
            summons[1:] = [Rank(store, rank) for rank in range(1, world.size)]
        self.lanes: list[WorkerLane] = []
        scales: dict[int, torch.Tensor] = {}
        with ExitStack() as opened:
            for number in range(workers // stripes):
                own = {group: groups[group] for group in range(*served) if self.lane_of[group] == number}
                shares = [
                    Share(
                        str(checkpoint.folder),
                        numerics,
                        device,
                        threads,
                        own,
                        Stripe(index, stripes) if stripes > 1 else None,
                        digest=world is not None,
                    )
                    for index in range(stripes)
                ]
                lane = WorkerLane(str(number), shares, self._expected, summons[number])
                opened.callback(lane.close)
                self.lanes.append(lane)
            for lane in self.lanes:  # which load at the same time
                for worker in lane.workers:
                    ready = worker.ready()
                    if world is not None:
                        _check_weights(checkpoint, worker.name, ready.loaded)
                    scales |= {int(group): tensor for group, tensor in ready.scales.items()}
                    for group, info in ready.loaded.groups.items():
                        groups[group] = info
                    for line in ready.loaded.lines:
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
                part=served if part else None,
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

    def states(self, waiting: Callable[[int], int]) -> list[WorkerState]:
        """Of all workers, from any thread; ``waiting``: see ``Engine.waiting_on``."""
        return [state for number, lane in enumerate(self.lanes) for state in lane.states(waiting(number))]

    def not_ready(self) -> str:
        """Which workers are away, and why; empty: none."""
        away = [worker for lane in self.lanes for worker in lane.away()]
        return "; ".join(f"worker {worker.name} is being started again: {worker.why}" for worker in away)
