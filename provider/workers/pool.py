"""Workers of this machine that hold a checkpoint together: which group is where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch.distributed import Store  # type: ignore[attr-defined]

from provider.catalog.catalog import Catalog
from provider.catalog.discovery import discover, part_of
from provider.engine.engine import Engine
from provider.engine.lanes import RowRange
from provider.engine.latency import LatencyModel
from provider.engine.profiling import shapes_of
from provider.engine.scheduler import Opportunistic, Policy
from provider.executor.loading import Numerics
from provider.executor.stripes import OutputStripe
from provider.workers.distributed import WaitForRank, announce_end
from provider.workers.gathered import GatheredLane, GatheredLatency
from provider.workers.lane import WorkerLane
from provider.workers.link import Assignment, Loaded
from provider.workers.planner import Placement, place
from provider.workers.process import Process, StartWorker
from provider.workers.state import WorkerState
from provider.workers.survey import DeviceSurvey, devices_of, survey_in_subprocess
from provider.workers.world import World, processors_each
from shared.checkpoint import Checkpoint
from shared.errors import ConfigurationError, Metavar, counted
from shared.wire.header import RINGS
from shared.wire.messages import GroupInfo, Limits, Manifest


def check_stripes(groups: Sequence[GroupInfo], stripes: int) -> None:
    """Refuse what cannot be divided.

    Raises:
        ConfigurationError: a layer has fewer outputs than stripes.
    """
    least = min(member.outputs for group in groups for member in group.members)
    if least < stripes:
        raise ConfigurationError("{stripes} is too many: a layer has {} outputs", least, stripes=stripes)


def check_lanes(groups: Sequence[GroupInfo], workers: int, together: int) -> None:
    """Refuse workers that would have nothing to do.

    Args:
        groups: those that are served.
        workers: how many there are.
        together: how many of them share each layer.

    Raises:
        ConfigurationError: there are more lanes than groups.
    """
    count = len(groups)
    if workers // together > count:
        each = "each worker has" if together == 1 else f"each {together} of them, which share layers, have"
        raise ConfigurationError(
            "{} workers are too many for {} of layers, of which {} at least one: start at most "
            "{}, or have more of them share each layer's outputs ({stripes})",
            *(workers, counted(count, "group"), each, count * together),
            stripes=Metavar("N"),
        )


def _check_weights(checkpoint: Checkpoint, name: str, assignment: Assignment, loaded: Loaded) -> None:
    same = {number: replace(info, bounds=None) for number, info in loaded.groups.items()} == assignment.groups
    if not same or loaded.weights != checkpoint.digest_of_groups(assignment.groups.values()):
        raise ConfigurationError(
            f"worker {name} has read other weights than the executor from {checkpoint.folder}; give all "
            "machines the same checkpoint"
        )


def place_groups(
    groups: Sequence[GroupInfo], devices: Sequence[str], stripes: int, numerics: str, *, per_host: int = 0
) -> Placement:
    """Decide which worker has which groups.

    Workers on the CPU are alike, so nothing is measured for them.

    Args:
        devices: of each worker.
        per_host: each so many workers, in order, are on a machine of their own, which is taken to be like
            this one; 0: all are on this one.

    Raises:
        ConfigurationError: one of the devices is not here, or they have no room for the weights.
    """
    shapes, surveys = shapes_of(groups), list[DeviceSurvey]()
    weight_bytes = Numerics.named(numerics).weight_bytes
    if per_host:
        # Once for all: what is free changes.
        like = {name: devices_of([name] * per_host, groups, weight_bytes)[0] for name in set(devices)}
        known = []
        for rank, name in enumerate(devices):
            # Devices of one name share its memory; a worker on an accelerator has one of its own.
            where = f"machine {rank // per_host}" if name == "cpu" else f"rank {rank}"
            known.append(dataclasses.replace(like[name], name=where))
        return place(shapes, known, weight_bytes=weight_bytes, stripes=stripes)
    if set(devices) != {"cpu"}:
        surveys = survey_in_subprocess(devices, numerics, shapes)
        for each in surveys:
            if each.lines is None:
                raise ConfigurationError(
                    "{devices} names {}, which is not here", each.name, devices=",".join(devices)
                )
    known = devices_of(devices, groups, weight_bytes, surveys, shapes)
    return place(shapes, known, weight_bytes=weight_bytes, stripes=stripes)


@dataclass(frozen=True)
class Sharding:
    """How a checkpoint is shared among workers.

    Attributes:
        devices: of each worker; a multiple of ``stripes``.
        stripes: how many of them share each weight's outputs; 1: each group is with one worker alone, so that
            nothing is gathered.
        threads: of one product; 0: all workers on a machine's processors together have one a core.
        world: who else takes part. Workers are its last ranks; rank 0, if it is one, is a process of this
            machine, others join.
        fsdp: each worker holds a shard of each weight, and all gather it for each product. Floats only, no
            ``world``.
    """

    devices: Sequence[str]
    stripes: int = 1
    threads: int = 0
    world: World | None = None
    fsdp: bool = False

    @property
    def workers_per_lane(self) -> int:
        """How many workers a lane has."""
        return len(self.devices) if self.fsdp else self.stripes

    def lane_devices(self, number: int) -> Sequence[str]:
        """Devices of a lane's workers."""
        return self.devices[number * self.workers_per_lane : (number + 1) * self.workers_per_lane]

    def starts(self, store: Store | None) -> list[StartWorker]:
        """What brings the workers of each lane; ``store``: the world's."""
        starts: list[StartWorker] = [Process] * (len(self.devices) // self.workers_per_lane)
        if self.world is not None and store is not None:
            ranks = range(1, self.world.size)
            starts[len(starts) - len(ranks) :] = [WaitForRank(store, rank) for rank in ranks]
        return starts

    def threads_of(self, start: StartWorker) -> int:
        """Of one product of a worker; 0: it knows itself, for it is on another machine."""
        if self.world is None:  # beside workers on the CPU, those on GPUs leave processors idle
            return self.threads or processors_each(self.devices.count("cpu") or len(self.devices))
        return self.threads or (processors_each(self.world.local_size) if start is Process else 0)


class WorkerPool:
    """Processes that hold a share of the weights each.

    Args:
        folder: the checkpoint.
        sharding: who holds what.
        numerics, limits, serve_head, recorded, part: see ``BaseExecutor``.

    Attributes:
        catalog: the manifest, and what tenants download.
        placement: which worker has which groups, and why.
        lanes: of the engine.
        lane_of: of each group the number of its lane.
        latency: as the workers measured it, all at the same time.

    Raises:
        CheckpointError: see ``discover``.
        ConfigurationError: the workers cannot be divided so, or their devices have no room for the weights.
        SymbiosisError: a worker cannot load its share.
    """

    def __init__(
        self,
        folder: str | Path,
        sharding: Sharding,
        *,
        numerics: str,
        limits: Limits | None = None,
        serve_head: bool = False,
        recorded: bool = False,
        part: tuple[int, int] | None = None,
    ) -> None:
        checkpoint, world = Checkpoint(folder), sharding.world
        with checkpoint.kept_open():
            discovery = discover(checkpoint, serve_head=serve_head)
        groups: list[GroupInfo] = list(discovery.groups)
        self.latency = (GatheredLatency if sharding.fsdp else LatencyModel)(shapes_of(groups))
        check_stripes(groups, sharding.stripes)
        served = part_of(groups, *part) if part else (0, len(groups))
        check_lanes(groups[slice(*served)], len(sharding.devices), sharding.workers_per_lane)
        per_host = world.local_size if world is not None else 0
        self.placement = place_groups(
            groups[slice(*served)], sharding.devices, sharding.workers_per_lane, numerics, per_host=per_host
        )
        self.lane_of = [0] * len(groups)
        self.lane_of[slice(*served)] = self.placement.lane_of
        self._store = world.store() if world is not None else None
        self.lanes: list[WorkerLane] = []
        with ExitStack() as opened:
            for number, start in enumerate(sharding.starts(self._store)):
                lane_groups = {
                    group: groups[group] for group in range(*served) if self.lane_of[group] == number
                }
                lane = self._lane(number, lane_groups, sharding, start, checkpoint, numerics)
                opened.callback(lane.close)
                self.lanes.append(lane)
            scales = self._loaded(groups, checkpoint if world is not None else None)
            self.catalog = Catalog(
                checkpoint,
                discovery,
                numerics=numerics,
                groups=groups,
                scales=scales,
                limits=limits,
                recorded=recorded,
                part=served if part else None,
            )
            opened.pop_all()

    def _lane(
        self,
        number: int,
        groups: dict[int, GroupInfo],
        sharding: Sharding,
        start: StartWorker,
        checkpoint: Checkpoint,
        numerics: str,
    ) -> WorkerLane:
        devices, stripes = sharding.lane_devices(number), sharding.stripes
        digest = sharding.world is not None or numerics not in RINGS
        threads = sharding.threads_of(start)
        whole = Assignment(str(checkpoint.folder), numerics, devices[0], threads, groups, digest=digest)
        if sharding.fsdp:
            return GatheredLane(str(number), whole, len(devices), self._expected)
        cut = [OutputStripe(index, stripes) if stripes > 1 else None for index in range(stripes)]
        assignments = [
            replace(whole, stripe=stripe, device=device) for stripe, device in zip(cut, devices, strict=True)
        ]
        return WorkerLane(str(number), assignments, self._expected, start)

    def _loaded(self, groups: list[GroupInfo], checkpoint: Checkpoint | None) -> dict[int, torch.Tensor]:
        """Wait until all workers, which load at the same time, have their shares; their groups' scales.

        Args:
            groups: of all; they get the workers' bounds.
            checkpoint: to compare their weights with.
        """
        scales: dict[int, torch.Tensor] = {}
        for lane in self.lanes:
            for worker, ready in zip(lane.workers, lane.ready(), strict=True):
                if checkpoint is not None:
                    _check_weights(checkpoint, worker.name, worker.assignment, ready.loaded)
                scales |= {int(group): tensor for group, tensor in ready.scales.items()}
                for group, info in ready.loaded.groups.items():
                    groups[group] = info
                for group, direction, line in ready.loaded.lines:
                    self.latency.set(group, direction, line)
        return scales

    def engine(self, policy: Callable[[LatencyModel], Policy] = Opportunistic, **options: Any) -> Engine:
        """An engine with the workers as its lanes; see ``Engine.of``."""
        lane_of = self.lane_of.__getitem__
        return Engine(self.lanes, policy(self.latency), self.latency, lane_of=lane_of, **options)

    def _expected(self, batch: Sequence[RowRange]) -> float:
        header = batch[0].request.header
        rows = sum(each.stop - each.start for each in batch)
        return self.latency.seconds(header.group, header.direction, header.members, rows)

    def close(self) -> None:
        """End all workers."""
        if self._store is not None:
            announce_end(self._store)
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
        """Which workers are unavailable, and why; empty: none."""
        workers = [worker for lane in self.lanes for worker in lane.unavailable_workers()]
        return "; ".join(f"worker {worker.name} is being started again: {worker.why}" for worker in workers)
