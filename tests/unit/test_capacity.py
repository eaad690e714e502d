"""Forecasts of placements: what a lane's product takes, and that what a policy learns changes no product."""

from __future__ import annotations

import copy

import pytest

from provider.engine.latency import LatencyModel
from provider.planning.capacity import PlacedLanes, Tenants, plan
from provider.planning.kept import ROUND_TRIPS, SHARES, kept_forecasts
from provider.planning.options import NetworkLink
from provider.planning.simulation import Costs, Product
from provider.workers.planner import Device, Placement, place
from provider.workers.survey import latency_of
from shared.wire.header import Direction
from shared.wire.protocol import GroupShape

SHAPES = [GroupShape(64, (64, 64), planes=1), GroupShape(64, (64,), planes=1)] * 4
FAST, SLOW = Device("a", 1e9, 2e6, 4e6), Device("b", 1e9, 1e6, 2e6)


def lanes(stripes: int, *devices: Device, **more: float) -> tuple[Placement, PlacedLanes]:
    placement = place(SHAPES, devices, weight_bytes=2, stripes=stripes)
    own = [placement.shape(group, stripes - 1) for group in range(len(SHAPES))]
    latency: list[LatencyModel] = [latency_of(device, 2, own, None) for device in devices]
    size = [4.0 * (shape.inputs + sum(shape.outputs)) for shape in SHAPES]
    return placement, PlacedLanes(placement, latency, row_bytes=size, **more)


def test_a_product_of_a_lane() -> None:
    _, one = lanes(1, FAST)
    reading, multiplying = 2 * 8192 / 2e6, 10 * 8192 / 4e6
    product = one.product(0, Direction.FORWARD, 10)
    assert product == pytest.approx(Product(reading + multiplying, reading, reading + multiplying))


def test_of_stripes_the_slowest_counts() -> None:
    _, alone = lanes(1, SLOW)
    _, both = lanes(2, FAST, SLOW)
    assert both.count == 1
    whole, half = (each.product(0, Direction.BACKWARD, 10) for each in (alone, both))
    assert half.seconds == pytest.approx(whole.seconds / 2)


def test_ways_to_workers_take_time_but_are_not_waited_for_twice() -> None:
    _, near = lanes(1, FAST)
    _, far = lanes(1, FAST, round_trip=0.5, copied=1e3)
    copying = 10 * 4 * (64 + 128) / 1e3
    busy = near.product(0, Direction.FORWARD, 10).busy
    product = far.product(0, Direction.FORWARD, 10)
    assert product.seconds == pytest.approx(busy + 0.5 + copying)
    assert product.busy == pytest.approx(max(busy, copying))


def test_what_the_policy_learns_changes_no_product() -> None:
    placement, near = lanes(1, FAST, SLOW)
    before = copy.deepcopy([near.latency[worker].line(0, Direction.FORWARD) for worker in range(2)])
    found = plan(
        near,
        SHAPES,
        itemsize=4,
        link=NetworkLink(1e-3, 1e6),
        tenants=Tenants(4, 8),
        costs=Costs(1e-4, 1e-9, 1e-4),
    )
    assert before == [near.latency[worker].line(0, Direction.FORWARD) for worker in range(2)]
    assert found.token_bytes == (4 * 8 * 64, 4 * 4 * (128 + 64))
    assert found.step_bytes[0] == found.step_bytes[1] == sum(found.token_bytes)
    assert found.memory == [placement.memory(0), placement.memory(1)]
    assert sum(found.memory) == 2 * sum(shape.size for shape in SHAPES)
    assert 0 < found.tune.passes_per_second < found.decode.passes_per_second


def test_what_is_kept_saves_round_trips_and_bytes() -> None:
    """Far away, tokens a second are as many times as many as there are fewer requests."""
    _, near = lanes(1, FAST)
    found = kept_forecasts(near, SHAPES, range(8), itemsize=4, sources=1)
    assert [each.size for each in found] == 2 * [int(share * 4 * 8 * 8192 * 0.75) for share in SHARES]
    none, _, quarter, half, everything = found[len(SHARES) :]
    assert none.requests == [8] * len(ROUND_TRIPS)
    assert everything.requests == [0] * len(ROUND_TRIPS)
    assert everything.tuning_bytes == 0.0
    assert none.tuning_bytes > half.tuning_bytes > 0
    far = ROUND_TRIPS.index(5e-2)
    assert half.tokens[far] / none.tokens[far] == pytest.approx(8 / half.requests[far], rel=0.1)
    assert quarter.requests[far] == 5
    assert none.tokens == sorted(none.tokens, reverse=True)
