"""Devices of this machine, measured: memory, and products of synthetic weights.

``python -m provider.workers.survey`` answers a ``SurveyRequest`` on standard input with a list of
``DeviceSurvey``: so an executor asks about accelerators, on which it keeps nothing itself.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import torch

from provider.engine.latency import (
    GUESSED_BYTES_PER_SECOND,
    GUESSED_PRODUCTS_PER_SECOND,
    LatencyModel,
)
from provider.engine.profiling import profile
from provider.executor.loading import LoadedGroup, Numerics, device_of
from provider.executor.memory_check import BASE_BYTES, STORED_BYTES, available_memory
from provider.executor.products import GroupExecutor
from provider.executor.weights import FloatWeight, GroupWeight, RingWeight
from provider.workers.planner import Device
from provider.workers.world import processors_each
from shared.errors import ConfigurationError, OptionReference
from shared.latency import LinearLatency
from shared.ring.fixed_point import LARGEST
from shared.wire.header import RINGS, Direction
from shared.wire.messages import GroupInfo, Member
from shared.wire.protocol import GroupShape

# Of an accelerator that is not here, a second: bytes, and multiplications on the ring, each eight of int8.
GUESSED_ACCELERATOR = (1e12, 1e13)
ACCELERATOR_BYTES = 1 << 30  # that a device's runtime and rows take beside the weights
MEASURED_ELEMENTS = 1 << 26  # of a shape at most, and of all its copies, so that it takes seconds
_SECONDS = 600.0


class DeviceSurvey(msgspec.Struct, frozen=True):
    """Of one device.

    Attributes:
        memory: free bytes; infinity is written as None.
        lines: forward and backward (fixed, per row) seconds of each shape; None: the device is not here.
    """

    name: str
    memory: float | None
    lines: list[tuple[tuple[float, float], tuple[float, float]]] | None


class SurveyRequest(msgspec.Struct, frozen=True):
    """What shall be found out; ``shapes`` as (inputs, outputs of the members)."""

    devices: list[str]
    numerics: str
    shapes: list[tuple[int, tuple[int, ...]]]


def survey(
    devices: Sequence[str], numerics: str, shapes: Sequence[GroupShape], threads: int = 0
) -> list[DeviceSurvey]:
    """Measure products of each different shape on each different device, in this process; takes seconds.

    With so many threads on the CPU; 0: all workers there together have one a core. Shapes of more than
    MEASURED_ELEMENTS are measured by a part of their outputs, and the time multiplied.
    """
    surveys = []
    for name in dict.fromkeys(devices):
        try:
            device = device_of(name)
        except ConfigurationError:
            surveys.append(DeviceSurvey(name, None, None))
            continue
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        workers = list(devices).count(name)
        before = torch.get_num_threads()
        if device.type == "cpu":
            torch.set_num_threads(threads or processors_each(workers))
        try:
            lines = _measured(shapes, numerics, device)
        finally:
            torch.set_num_threads(before)
        if device.type != "cpu":
            lines = [tuple((a * workers, b * workers) for a, b in both) for both in lines]  # type: ignore[misc]
        surveys.append(DeviceSurvey(name, free, lines))
    return surveys


def survey_in_subprocess(
    devices: Sequence[str], numerics: str, shapes: Sequence[GroupShape]
) -> list[DeviceSurvey]:
    """The same in a process of its own, which leaves nothing behind on the devices.

    Raises:
        ConfigurationError: it failed.
    """
    wish = SurveyRequest(list(devices), numerics, [(shape.inputs, shape.outputs) for shape in shapes])
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "provider.workers.survey"],
            input=msgspec.json.encode(wish),
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(
            "{} do not answer for {:.0f} s", OptionReference("devices", ",".join(devices)), _SECONDS
        ) from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigurationError(
            "{} cannot be measured: {}", OptionReference("devices", ",".join(devices)), "".join(last)
        )
    return msgspec.json.decode(done.stdout, type=list[DeviceSurvey])


def devices_of(
    names: Sequence[str],
    groups: Sequence[GroupInfo],
    weight_bytes: int,
    surveys: Sequence[DeviceSurvey] = (),
    shapes: Sequence[GroupShape] = (),
    assumed: Mapping[str, Sequence[float]] | None = None,
) -> list[Device]:
    """Devices as the planner wants them: measured where they were, else with guesses.

    Args:
        names: of each worker's.
        groups: what will be loaded: part of it lies in memory twice meanwhile.
        surveys, shapes: what was measured, of which shapes.
        assumed: by a device's name, or its kind (``cuda``), to go by instead: bytes of memory, bytes and
            multiplications a second.
    """
    by_name, counts = {each.name: each for each in surveys}, Counter(names)
    devices_found = []
    for name in names:
        here = by_name.get(name)
        kind = name.partition(":")[0]
        known = next((assumed[each] for each in (name, kind) if each in assumed), None) if assumed else None
        if known is not None:
            memory, *rates = known
            devices_found.append(Device(name, memory, rates[0] / counts[name], rates[1] / counts[name]))
            continue
        if kind == "cpu":
            largest = max((m.outputs * g.inputs for g in groups for m in g.members), default=0)
            available = available_memory()[0] - len(names) * (BASE_BYTES + STORED_BYTES * largest)
        else:
            free = here.memory if here is not None else None
            available = float("inf") if free is None else free - counts[name] * ACCELERATOR_BYTES
        if here is not None and here.lines:
            devices_found.append(
                Device(name, available, *_rates(here.lines, shapes, weight_bytes), measured=True)
            )
            continue
        guessed = (GUESSED_BYTES_PER_SECOND, GUESSED_PRODUCTS_PER_SECOND)
        reads, multiplies = guessed if kind == "cpu" else GUESSED_ACCELERATOR
        devices_found.append(Device(name, available, reads / counts[name], multiplies / counts[name]))
    return devices_found


def latency_of(
    device: Device, weight_bytes: int, shapes: Sequence[GroupShape], survey: DeviceSurvey | None
) -> LatencyModel:
    """A model for shapes: of the lines measured of these same shapes, or of the device's two rates."""
    model = LatencyModel(shapes)
    for number, shape in enumerate(shapes):
        fixed = shape.size * weight_bytes / device.bytes_per_second
        both = [(fixed, shape.size / device.multiplications_per_second)] * 2
        if survey is not None and survey.lines is not None:
            both = list(survey.lines[number])
        for direction, line in zip((Direction.FORWARD, Direction.BACKWARD), both, strict=True):
            model.set(number, direction, LinearLatency(*line))
    return model


def _rates(
    lines: Sequence[tuple[tuple[float, float], tuple[float, float]]],
    shapes: Sequence[GroupShape],
    weight_bytes: int,
) -> tuple[float, float]:
    """Bytes and multiplications a second, of all shapes together."""
    size = 2 * sum(shape.size for shape in shapes)  # both directions
    fixed, per_row = (sum(line[term] for both in lines for line in both) for term in (0, 1))
    return size * weight_bytes / fixed, size / per_row


def _measured(
    shapes: Sequence[GroupShape], numerics: str, device: torch.device
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    known: dict[GroupShape, tuple[tuple[float, float], tuple[float, float]]] = {}
    for shape, count in Counter(shapes).items():
        parts = -(-shape.size // MEASURED_ELEMENTS)
        widths = tuple(max(1, outputs // parts) for outputs in shape.outputs)
        scale = shape.size / (shape.inputs * sum(widths))
        copies = max(1, min(count, MEASURED_ELEMENTS // (shape.inputs * sum(widths))))
        info = GroupInfo(shape.inputs, tuple(Member(str(i), width, "") for i, width in enumerate(widths)))
        loaded = {i: LoadedGroup(_synthetic(info, numerics, device), info) for i in range(copies)}
        measured = profile(GroupExecutor(loaded, numerics, device), dict.fromkeys(loaded, info))
        both = [measured[0, direction] for direction in (Direction.FORWARD, Direction.BACKWARD)]
        forward, backward = ((line.fixed * scale, line.per_row * scale) for line in both)
        known[shape] = forward, backward
    return [known[shape] for shape in shapes]


def _synthetic(info: GroupInfo, numerics: str, device: torch.device) -> GroupWeight:
    """A weight of random numbers, as ``provider.executor.loading`` would make it of a checkpoint."""
    widths = [member.outputs for member in info.members]
    size = (sum(widths), info.inputs)
    if numerics not in RINGS:
        dtype = torch.bfloat16 if numerics == "bfloat16" else torch.float32
        return FloatWeight(torch.randn(size, dtype=dtype, device=device), widths)
    planes, dtype, largest = RINGS[numerics], torch.int16, LARGEST
    if planes > 1:
        dtype, largest = torch.int8, 127
    return RingWeight(torch.randint(-largest, largest, (planes, *size), dtype=dtype, device=device), widths)


def weight_bytes_of(numerics: str) -> int:
    """Of one weight in memory, on the CPU or an accelerator."""
    return Numerics.named(numerics).weight_bytes


def main() -> None:
    """Entry point."""
    wish = msgspec.json.decode(sys.stdin.buffer.read(), type=SurveyRequest)
    shapes = [GroupShape(inputs, outputs) for inputs, outputs in wish.shapes]
    sys.stdout.buffer.write(msgspec.json.encode(survey(wish.devices, wish.numerics, shapes)))


if __name__ == "__main__":
    main()
