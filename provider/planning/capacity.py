"""Forecasts for the tenants of a placement over a link, and the limits behind them. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from provider.engine.latency import LatencyModel
from provider.engine.scheduler import Opportunistic
from provider.executor.memory_check import BASE_BYTES
from provider.planning.options import NetworkLink
from provider.planning.simulation import CapacityForecast, Costs, Load, Product, Simulation, Step
from provider.workers.planner import Placement
from shared.wire.header import EXACT, Direction, RequestClass
from shared.wire.protocol import GroupShape
from shared.wire.traffic import TokenBytes, token_bytes

# Of one request beside its product, over TLS: benchmarks/capacity.py, docs/how-to/capacity.md.
COSTS = Costs(119e-6, 1.13e-9, 144e-6, 0.43e-9)
MAX_REQUESTS = 50_000  # that count in a simulation, which takes some seconds then
# A batch's way to a worker of this machine and back, and how fast its rows and answers are copied. Guesses
# for an ordinary machine; benchmarks/simulated_cluster.py --validate measures them.
WORKER_SECONDS, COPIED_BYTES_PER_SECOND = 3e-4, 4e9


def pass_steps(
    shapes: Sequence[GroupShape],
    itemsize: int,
    directions: Sequence[Direction] = (Direction.FORWARD,),
    groups: Sequence[int] | None = None,
    answer_bits: int = EXACT,
) -> list[Step]:
    """The requests of a pass: all groups, or some, in order, and backward in the other order."""
    steps, requested = [], list(range(len(shapes)) if groups is None else groups)
    for direction in directions:
        for group in requested if direction == Direction.FORWARD else reversed(requested):
            member_bits = (1 << len(shapes[group].outputs)) - 1
            widths = shapes[group].widths(direction, member_bits)
            up = widths.request_columns * itemsize
            down = widths.answer_columns * (answer_bits // 8 if shapes[group].planes else itemsize)
            steps.append(Step(group, direction, member_bits, up, down))
    return steps


@dataclass
class PlacedLanes:
    """Lanes as a placement has them.

    Args:
        placement: see there.
        latency: of each worker, for its stripe of every group.
        round_trip: what a batch takes to a worker and back, beside its product; 0 in this process.
        copied: bytes a second at which rows are copied there, and answers back; None: they are not.
        row_bytes: of each group, of rows and answers together.
    """

    placement: Placement
    latency: Sequence[LatencyModel]
    round_trip: float = 0.0
    copied: float | None = None
    row_bytes: Sequence[float] = ()
    depth: int = 1

    def __post_init__(self) -> None:
        """Count the lanes."""
        self.count = len(self.placement.devices) // self.placement.stripes
        self._lane_of = self.placement.lane_of

    def of(self, group: int) -> int:
        """See ``Lanes``."""
        return self._lane_of[group]

    def product(self, group: int, direction: Direction, rows: int) -> Product:
        """See ``Lanes``: of a lane's workers the last counts."""
        first = self._lane_of[group] * self.placement.stripes
        lines = [self.latency[first + i].line(group, direction) for i in range(self.placement.stripes)]
        reading, busy = max(
            ((line.fixed, line.fixed + line.per_row * rows) for line in lines), key=lambda each: each[1]
        )
        copying = rows * self.row_bytes[group] / self.copied if self.copied else 0.0
        return Product(busy + self.round_trip + copying, reading, max(busy, copying))

    def model(self) -> LatencyModel:
        """What the policy is told of products."""
        latency = LatencyModel(self.placement.shapes)
        for group in range(len(self.placement.shapes)):
            for direction in (Direction.FORWARD, Direction.BACKWARD):
                worker = self._lane_of[group] * self.placement.stripes
                line = replace(self.latency[worker].line(group, direction))  # a copy, since it learns
                latency.set(group, direction, line)
        return latency


@dataclass(frozen=True)
class CapacityPlan:
    """What a model would reach.

    Attributes:
        decode: of tenants who decode one row each.
        tune: of tenants who tune with ``rows`` rows a step.
        token_bytes: on the tenants' networks for one decoded token, up and down, with effects.
        step_bytes: for one row of a step, forward and backward, up and down, with effects.
        memory: bytes of each worker's weights.
        process_bytes: that each process has beside them.
    """

    decode: CapacityForecast
    tune: CapacityForecast
    token_bytes: TokenBytes
    step_bytes: TokenBytes
    memory: list[float]
    process_bytes: int = field(default=BASE_BYTES)


@dataclass(frozen=True)
class Tenants:
    """Who works at the same time.

    Attributes:
        count: of tenants.
        rows: of a tuning step: sequences times tokens.
        machines: processors that they share; 0: each has one.
        answer_bits: that they ask for, on the ring.
        sources: mask sources whose effects they download.
    """

    count: int
    rows: int
    machines: int = 0
    answer_bits: int = EXACT
    sources: int = 0


def plan(
    lanes: PlacedLanes,
    shapes: Sequence[GroupShape],
    *,
    itemsize: int,
    link: NetworkLink,
    tenants: Tenants,
    costs: Costs = COSTS,
    groups: Sequence[int] | None = None,
) -> CapacityPlan:
    """Forecast decoding and tuning, each by all tenants at once, with nobody else there.

    Args:
        lanes: where products run, and how long they take.
        shapes: of the groups, in their numerics.
        itemsize: bytes of one number on the network.
        link: to the tenants.
        tenants: how many there are, and what they ask for.
        costs: of requests.
        groups: that every row passes; None: all.
    """
    forecasts, sizes = [], []
    for what, count, directions in (
        (RequestClass.DECODE, 1, (Direction.FORWARD,)),
        (RequestClass.FINETUNING, tenants.rows, (Direction.FORWARD, Direction.BACKWARD)),
    ):
        steps = pass_steps(shapes, itemsize, directions, groups, tenants.answer_bits)
        load = Load(tenants.count, count, what, steps, tenants.machines)
        passes = min(2.0, MAX_REQUESTS / len(steps) / tenants.count)
        simulation = Simulation(Opportunistic(lanes.model()), lanes, link, costs, load)
        forecasts.append(simulation.run(passes, passes / 2))
        passed = shapes if groups is None else [shapes[group] for group in groups]
        kind = {"itemsize": itemsize, "answer_bits": tenants.answer_bits, "sources": tenants.sources}
        sizes.append(token_bytes(passed, directions, **kind))
    workers = range(len(lanes.placement.devices))
    memory = [lanes.placement.memory(worker) for worker in workers]
    return CapacityPlan(forecasts[0], forecasts[1], sizes[0], sizes[1], memory)
