"""Where a model's groups would go, and how long products would take there: by shapes and measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from provider.catalog.discovery import groups_of_architecture
from provider.engine.latency import LatencyModel
from provider.engine.profiling import PROFILE_ROWS, shapes_of
from provider.executor.stripes import OutputStripe
from provider.planning.capacity import COPIED_BYTES_PER_SECOND, WORKER_SECONDS, PlacedLanes
from provider.planning.options import Assumed, check_shapes
from provider.workers.planner import Device, Placement, place
from provider.workers.pool import check_lanes, check_stripes
from provider.workers.survey import (
    MEASURED_ELEMENTS,
    devices_of,
    latency_of,
    survey,
    weight_bytes_of,
)
from shared.errors import ConfigurationError, OptionText
from shared.wire.header import RINGS, Direction
from shared.wire.messages import GroupInfo
from shared.wire.protocol import GroupShape

# Of a group's inputs or outputs: products of many rows are measured. The largest vocabulary in use has
# 901,629 tokens.
WIDEST = 1 << 20


@dataclass(frozen=True)
class WorkerLayout:
    """A model's groups on devices.

    Attributes:
        groups: of the model.
        placement: of them.
        latency: of each worker, for its stripe of every group.
        doubts: why figures are extrapolated, in sentences without their full stops; empty: they are not.
        misfit: why the weights do not fit; empty: they do.
        processes: whether each of the devices has one of its own.
    """

    groups: tuple[GroupInfo, ...]
    numerics: str
    placement: Placement
    latency: tuple[LatencyModel, ...]
    doubts: tuple[str, ...]
    misfit: OptionText
    processes: bool

    @property
    def dense_groups(self) -> list[int]:
        """The groups that every row passes: all but experts, of which a token goes to few."""
        return [at for at, group in enumerate(self.groups) if not group.of_expert]

    @property
    def shapes(self) -> list[GroupShape]:
        """Of the groups, in their numerics."""
        return [GroupShape.of(group, self.numerics) for group in self.groups]

    @property
    def itemsize(self) -> int:
        """Bytes of one number on the network."""
        return 2 if self.numerics == "bfloat16" else 4

    def lanes(self) -> PlacedLanes:
        """For a forecast."""
        if not self.processes:
            return PlacedLanes(self.placement, self.latency)
        size = [self.itemsize * (shape.inputs + sum(shape.outputs)) for shape in self.shapes]
        return PlacedLanes(self.placement, self.latency, WORKER_SECONDS, COPIED_BYTES_PER_SECOND, size, 2)

    def products_per_second(self, worker: int, rows: int) -> float:
        """Of a worker that is asked for all its groups equally often, in both directions."""
        groups, lines = self.placement.groups(worker), self.latency[worker].line
        if not groups:
            return 0.0
        both = (Direction.FORWARD, Direction.BACKWARD)
        seconds = [
            lines(group, way).fixed + lines(group, way).per_row * rows for group in groups for way in both
        ]
        return len(seconds) / sum(seconds)

    def layers_per_second(self, rows: int) -> float:
        """Products with whole layers, of all workers at work; of those that share layers the last counts."""
        stripes, count = self.placement.stripes, len(self.placement.devices)
        rates = [self.products_per_second(worker, rows) for worker in range(count)]
        return sum(min(rates[at : at + stripes]) for at in range(0, count, stripes))

    def moved(self, worker: int) -> tuple[float, float, float]:
        """Bytes for a row of a product, on average of its groups and both directions: to the worker, from it,
        and of these what is added to other stripes' answers.
        """
        planes, groups = RINGS.get(self.numerics, 1), self.placement.groups(worker)
        into = out = sums = 0
        for group in groups:
            inputs, outputs = self.groups[group].inputs, sum(self.placement.shape(group, worker).outputs)
            into += inputs + outputs
            out += planes * (outputs + inputs)
            sums += planes * inputs if self.placement.stripes > 1 else 0
        scale = self.itemsize / 2 / max(1, len(groups))
        return into * scale, out * scale, sums * scale


def read_groups(model: Path, *, serve_head: bool = False) -> list[GroupInfo]:
    """The groups of a model, by its folder's ``config.json`` or that file itself; no weights are read.

    Raises:
        CheckpointError: there is none, or it cannot be used.
    """
    folder = check_shapes(model)
    return groups_of_architecture(folder, serve_head=serve_head)


def plan_layout(
    groups: Sequence[GroupInfo],
    names: Sequence[str],
    *,
    numerics: str,
    stripes: int = 1,
    assumed: Assumed | None = None,
    threads: int = 0,
    processes: bool = True,
    allow_misfit: bool = False,
) -> WorkerLayout:
    """Measure devices that are here, and place groups; takes seconds.

    Args:
        groups: of the model.
        names: the device of each worker.
        numerics: in which they would be served.
        stripes: how many workers share each layer's outputs.
        assumed: see ``provider.planning.options``; such devices are not measured.
        threads: see ``survey``.
        processes: each device has a worker process; else there is one device, and it is this process's.
        allow_misfit: place them even if they do not fit, and say so in ``misfit``.

    Raises:
        ConfigurationError: they do not fit, or cannot be divided so.
    """
    assumed, weight_bytes = assumed or {}, weight_bytes_of(numerics)
    check_stripes(groups, stripes)
    check_lanes(groups, len(names), stripes)
    shapes = shapes_of(groups)
    if any(max(shape.inputs, sum(shape.outputs)) > WIDEST for shape in shapes):
        raise ConfigurationError(f"a layer has a width above {WIDEST:,}, which no model has")
    widest = OutputStripe(stripes - 1, stripes)
    widest_shapes = [
        GroupShape(shape.inputs, tuple(len(range(width)[widest.of(width)]) for width in shape.outputs))
        for shape in shapes
    ]
    measured_names = [name for name in names if not {name, name.partition(":")[0]} & assumed.keys()]
    surveys = survey(measured_names, numerics, widest_shapes, threads)
    devices, misfit = devices_of(names, groups, weight_bytes, surveys, widest_shapes, assumed), OptionText()
    try:
        placement = place(shapes, devices, weight_bytes=weight_bytes, stripes=stripes)
    except ConfigurationError as error:
        if not allow_misfit:
            raise
        misfit = error.structured_message
        unlimited: list[Device] = [replace(device, memory=float("inf")) for device in devices]
        placement = place(shapes, unlimited, weight_bytes=weight_bytes, stripes=stripes)
    by_name = {each.name: each for each in surveys}
    latency = tuple(
        latency_of(device, weight_bytes, widest_shapes, by_name.get(device.name)) for device in devices
    )
    doubts = _doubts(devices, assumed, widest_shapes)
    if any(group.of_expert for group in groups):
        doubts += (
            "products, bytes and tokens a second are those of tenants that keep the experts themselves "
            "(local): what padded or routed ones would add is not forecast, only their memory here",
        )
    return WorkerLayout(tuple(groups), numerics, placement, latency, doubts, misfit, processes)


def _doubts(devices: Sequence[Device], assumed: Assumed, shapes: Sequence[GroupShape]) -> tuple[str, ...]:
    doubts = []
    for name in dict.fromkeys(device.name for device in devices if not device.measured):
        source = (
            "as was said" if {name, name.partition(":")[0]} & assumed.keys() else "a guess: it is not here"
        )
        doubts.append(f"the speed of {name} is {source}")
    if any(device.measured for device in devices) and any(shape.size > MEASURED_ELEMENTS for shape in shapes):
        doubts.append("products of large layers were measured with a part of their outputs, and multiplied")
    return tuple(doubts)


def described(layout: WorkerLayout) -> dict[str, Any]:
    """For programs: workers with what they have, and each decision."""
    placement, workers = layout.placement, []
    for worker, device in enumerate(placement.devices):
        into, out, sums = layout.moved(worker)
        workers.append(
            {
                "worker": worker,
                "lane": worker // placement.stripes,
                "device": device.name,
                "groups": placement.groups(worker),
                "memory_bytes": placement.memory(worker),
                "room_bytes": device.memory if device.memory < float("inf") else None,
                "products_per_second": {
                    str(rows): layout.products_per_second(worker, rows) for rows in (1, PROFILE_ROWS)
                },
                "measured": device.measured,
                "row_bytes": {"in": into, "out": out, "summed": sums},
            }
        )
    decisions = [
        {"group": number, "members": [member.name for member in info.members], **decision._asdict()}
        for number, (info, decision) in enumerate(zip(layout.groups, placement.decisions, strict=True))
    ]
    return {
        "numerics": layout.numerics,
        "stripes": placement.stripes,
        "workers": workers,
        "decisions": decisions,
        "extrapolated": list(layout.doubts),
        "misfit": str(layout.misfit),
    }
