"""How long products take here, measured before anybody asks for one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from provider.engine.latency import LatencyModel
from provider.executor.products import GroupExecutor
from shared.latency import LinearLatency
from shared.wire.header import Direction
from shared.wire.messages import GroupInfo, Manifest
from shared.wire.protocol import GroupShape

PROFILE_ROWS = 128


def shapes_of(groups: Iterable[GroupInfo]) -> list[GroupShape]:
    """Returns the shapes of groups."""
    return [GroupShape(group.inputs, tuple(member.outputs for member in group.members)) for group in groups]


def profile(
    executor: GroupExecutor, groups: Mapping[int, GroupInfo], rounds: int = 3
) -> dict[tuple[int, Direction], LinearLatency]:
    """Measure products of one and of many rows, for each shape and direction; takes seconds at most.

    Args:
        executor: of the groups.
        groups: by their numbers.

    Returns:
        Lines of one group of each shape.
    """
    lines: dict[tuple[int, Direction], LinearLatency] = {}
    alike: dict[GroupShape, list[int]] = {}
    for number, shape in zip(groups, shapes_of(groups.values()), strict=True):
        alike.setdefault(shape, []).append(number)
    for shape, numbers in alike.items():
        everyone = (1 << len(shape.outputs)) - 1
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            times: dict[int, list[float]] = {1: [], PROFILE_ROWS: []}
            for repetition in range(rounds + 1):
                for rows, seconds in times.items():
                    # Another each time, as in a pass through a model.
                    group = numbers[repetition % len(numbers)]
                    tensors = executor.zeros(group, direction, everyone, rows)
                    started = time.perf_counter()
                    executor.compute(group, direction, everyone, tensors)
                    if repetition:  # the first warms up
                        seconds.append(time.perf_counter() - started)
            few, many = (sorted(seconds)[rounds // 2] for seconds in times.values())
            per_row = max(many - few, 0.01 * many) / (PROFILE_ROWS - 1)
            lines[numbers[0], direction] = LinearLatency(max(few - per_row, 0.1 * few), per_row)
    return lines


def profiled(executor: GroupExecutor, manifest: Manifest, rounds: int = 3) -> LatencyModel:
    """Returns a measured latency model of an executor."""
    model = LatencyModel(shapes_of(manifest.groups))
    served = {number: info for number, info in enumerate(manifest.groups) if manifest.serves(number)}
    for (group, direction), line in profile(executor, served, rounds).items():
        model.set(group, direction, line)
    return model
