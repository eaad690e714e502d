"""Which worker has which groups: decided by memory and speed, without I/O, clock or tensors.

Largest first, each group to whoever would be done first with all that it then has (Graham's LPT rule), among
those that it fits on. So a device that is twice as fast gets twice the products. Who has how many of each
shape is decided so; which of them, so that a pass asks one worker after the other: tenants then keep out of
each other's way, while those that meet at a worker with many groups in a row would go from worker to worker
together.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from provider.executor.memory_check import gib
from provider.executor.stripes import OutputStripe
from shared.errors import ConfigurationError, Metavar, OptionReference, OptionText
from shared.wire.protocol import GroupShape

REFERENCE_ROWS = 128  # of the product by which devices are compared; profiling measures as many


@dataclass(frozen=True)
class Device:
    """Where one worker's products run.

    Attributes:
        name: ``cpu``, ``cuda:1``, ...; devices of one name share its memory.
        memory: bytes that weights may take there.
        bytes_per_second: at which a weight comes from memory.
        multiplications_per_second: of a weight's elements by rows'.
        measured: here; else these two are guesses.
    """

    name: str
    memory: float
    bytes_per_second: float
    multiplications_per_second: float
    measured: bool = False

    def seconds(self, size: float, weight_bytes: int, rows: int = REFERENCE_ROWS) -> float:
        """Of a product with a weight of so many elements."""
        read = size * weight_bytes / self.bytes_per_second
        return read + size * rows / self.multiplications_per_second


class Decision(NamedTuple):
    """Where a group goes, and why, in a sentence without its full stop."""

    lane: int
    reason: str


@dataclass(frozen=True)
class Placement:
    """Workers and what they have. A lane is one worker, or as many as there are stripes.

    Attributes:
        shapes: of the groups.
        devices: of the workers; worker w is stripe ``w % stripes`` of lane ``w // stripes``.
        decisions: for each group.
    """

    shapes: tuple[GroupShape, ...]
    devices: tuple[Device, ...]
    weight_bytes: int
    stripes: int
    decisions: tuple[Decision, ...]

    @property
    def lane_of(self) -> list[int]:
        """The lane of each group."""
        return [decision.lane for decision in self.decisions]

    def groups(self, worker: int) -> list[int]:
        """Numbers of the groups of which a worker has its stripe."""
        return [group for group, lane in enumerate(self.lane_of) if lane == worker // self.stripes]

    def memory(self, worker: int) -> float:
        """Bytes of the weights that a worker keeps."""
        sizes = (stripe_size(self.shapes[group], self._stripe(worker)) for group in self.groups(worker))
        return float(self.weight_bytes * sum(sizes))

    def shape(self, group: int, worker: int) -> GroupShape:
        """Of what a worker has of a group."""
        shape, stripe = self.shapes[group], self._stripe(worker)
        return GroupShape(shape.inputs, tuple(_width(outputs, stripe) for outputs in shape.outputs))

    def _stripe(self, worker: int) -> OutputStripe:
        return OutputStripe(worker % self.stripes, self.stripes)


def _width(outputs: int, stripe: OutputStripe) -> int:
    part = stripe.of(outputs)
    return int(part.stop - part.start)


def stripe_size(shape: GroupShape, stripe: OutputStripe) -> int:
    """Elements of a stripe of a group's weight."""
    return shape.inputs * sum(_width(outputs, stripe) for outputs in shape.outputs)


class _Lanes:
    """Lanes that are being filled."""

    def __init__(self, devices: Sequence[Device], weight_bytes: int, stripes: int) -> None:
        self._weight_bytes, self._stripes = weight_bytes, stripes
        self._lanes = [devices[at : at + stripes] for at in range(0, len(devices), stripes)]
        self._free = {device.name: device.memory for device in devices}
        self._seconds = [0.0] * len(self._lanes)

    def __len__(self) -> int:
        return len(self._lanes)

    def done(self, lane: int, shape: GroupShape) -> float:
        """When a lane would be done if it had this group too: of its workers the last counts."""
        sizes = zip(self._lanes[lane], self._sizes(shape), strict=True)
        return self._seconds[lane] + max(device.seconds(size, self._weight_bytes) for device, size in sizes)

    def remaining(self, lane: int, shape: GroupShape) -> float:
        """Bytes that would be left where it is the tightest; below 0: it does not fit."""
        free = dict(self._free)
        self._reserve(free, lane, shape)
        return min(free[device.name] for device in self._lanes[lane])

    def put(self, lane: int, shape: GroupShape) -> None:
        """It has this group now."""
        self._seconds[lane] = self.done(lane, shape)
        self._reserve(self._free, lane, shape)

    def name(self, lane: int) -> str:
        """As people may read it."""
        return f"worker {lane}" if self._stripes == 1 else f"workers {lane}.0 to {lane}.{self._stripes - 1}"

    def _reserve(self, free: dict[str, float], lane: int, shape: GroupShape) -> None:
        for device, size in zip(self._lanes[lane], self._sizes(shape), strict=True):
            free[device.name] -= self._weight_bytes * size

    def _sizes(self, shape: GroupShape) -> list[int]:
        return [stripe_size(shape, OutputStripe(index, self._stripes)) for index in range(self._stripes)]


_Choice = Callable[[_Lanes, GroupShape, list[int]], Decision]


def _by_speed(lanes: _Lanes, shape: GroupShape, fitting: list[int]) -> Decision:
    if len(lanes) == 1:
        return Decision(0, "there is no other place")
    order = sorted(range(len(lanes)), key=lambda lane: (lanes.done(lane, shape), lane))
    lane = next(each for each in order if each in fitting)
    if lane == order[0]:
        return Decision(lane, "no other would be done sooner with it")
    return Decision(lane, f"{lanes.name(order[0])} would be done sooner with it, but has no room")


def _best_fit(lanes: _Lanes, shape: GroupShape, fitting: list[int]) -> Decision:
    lane = min(fitting, key=lambda lane: (lanes.remaining(lane, shape), lane))
    return Decision(lane, "it leaves the least room there: by speed alone, not everything had found some")


def _fill(
    shapes: Sequence[GroupShape], devices: Sequence[Device], weight_bytes: int, stripes: int, choose: _Choice
) -> dict[int, Decision]:
    """Decisions for as many groups as fit."""
    lanes, decisions = _Lanes(devices, weight_bytes, stripes), dict[int, Decision]()
    for group in sorted(range(len(shapes)), key=lambda group: (-shapes[group].size, group)):
        fitting = [lane for lane in range(len(lanes)) if lanes.remaining(lane, shapes[group]) >= 0]
        if fitting:
            decisions[group] = choose(lanes, shapes[group], fitting)
            lanes.put(decisions[group].lane, shapes[group])
    return decisions


def _placed(
    shapes: Sequence[GroupShape], devices: Sequence[Device], weight_bytes: int, stripes: int
) -> dict[int, Decision]:
    decisions = _fill(shapes, devices, weight_bytes, stripes, _by_speed)
    return (
        decisions
        if len(decisions) == len(shapes)
        else _fill(shapes, devices, weight_bytes, stripes, _best_fit)
    )


def _interleaved(shapes: Sequence[GroupShape], decisions: dict[int, Decision]) -> dict[int, Decision]:
    """The same, groups of one shape exchanged so that lanes have done alike at any place of a pass."""
    counts = Counter(shapes)
    several = [group for group, shape in enumerate(shapes) if counts[shape] > 1]
    left, total = defaultdict[GroupShape, list[Decision]](list), Counter[int]()
    for group in several:
        left[shapes[group]].append(decisions[group])
        total[decisions[group].lane] += shapes[group].size
    interleaved, done, last = dict(decisions), Counter[int](), -1
    for group in several:
        size, candidates = shapes[group].size, left[shapes[group]]
        at = min(
            range(len(candidates)),
            key=lambda at: (
                (done[candidates[at].lane] + size) / total[candidates[at].lane],
                candidates[at].lane == last,
                at,
            ),
        )
        interleaved[group] = candidates.pop(at)
        last = interleaved[group].lane
        done[last] += size
    return interleaved


def place(
    shapes: Sequence[GroupShape], devices: Sequence[Device], *, weight_bytes: int, stripes: int = 1
) -> Placement:
    """Decide where each group goes; the same for the same arguments.

    Args:
        shapes: of all groups, in the manifest's order.
        devices: of the workers, a multiple of ``stripes``; neighbours share layers.
        weight_bytes: of one weight in memory.
        stripes: how many workers share each layer's outputs.

    Raises:
        ConfigurationError: it does not fit; what would.
    """
    lanes_of_groups = _placed(shapes, devices, weight_bytes, stripes)
    if len(lanes_of_groups) < len(shapes):
        raise ConfigurationError(_refusal(shapes, devices, weight_bytes, stripes, len(lanes_of_groups)))
    lanes_of_groups = _interleaved(shapes, lanes_of_groups)
    decisions = tuple(lanes_of_groups[group] for group in range(len(shapes)))
    return Placement(tuple(shapes), tuple(devices), weight_bytes, stripes, decisions)


def _refusal(
    shapes: Sequence[GroupShape], devices: Sequence[Device], weight_bytes: int, stripes: int, placed: int
) -> OptionText:
    def fits(devices: Sequence[Device], weight_bytes: int, stripes: int) -> bool:
        return len(_placed(shapes, devices, weight_bytes, stripes)) == len(shapes)

    memory = {device.name: device.memory for device in devices}
    needed = weight_bytes * sum(shape.size for shape in shapes)
    largest = weight_bytes * max(shape.size for shape in shapes)
    free = ", ".join(f"{name} has {gib(size)}" for name, size in memory.items())
    advice: list[str] = []
    if weight_bytes > 2 and fits(devices, 2, stripes):
        ring, floats = OptionReference("numerics", "ring"), OptionReference("numerics", "bfloat16")
        advice.append(OptionText("{} or {}, which take 2 bytes a weight, would fit", ring, floats))
    divisors = (count for count in range(stripes + 1, len(devices) + 1) if len(devices) % count == 0)
    wider = next((count for count in divisors if fits(devices, weight_bytes, count)), None)
    if wider is not None:
        text = "{stripes} would fit, where each device has its part of each layer"
        advice.append(OptionText(text, stripes=wider))
    widest = max(memory.values())
    if widest > 0 and max(memory, key=lambda name: memory[name]) != "cpu":
        least = max(math.ceil(needed / widest), len(memory) + 1)
        advice.append(f"it takes at least {least} devices of {gib(widest)}")
    total = sum(max(size, 0.0) for size in memory.values())
    if largest < total < needed:
        parts = math.ceil(needed / total)
        text = "with as much room on each, {} hosts or more could serve a part each ({part})"
        advice.append(OptionText(text, parts, part=Metavar(f"k/{parts}")))
    advice.append("choose a smaller model, or free memory")
    return OptionText(
        "the weights do not fit: {} groups take {} at {} bytes a weight, the largest of them {}, and {} for "
        "weights; {} of {} find room. {}",
        *(len(shapes), gib(needed), weight_bytes, gib(largest), free, placed, len(shapes)),
        OptionText.joined("; ", advice),
    )
