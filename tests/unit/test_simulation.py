"""Forecasts on a simulated clock: sums where nobody waits for anybody, and bounds where somebody does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from provider.engine.latency import LatencyModel
from provider.engine.scheduler import Opportunistic, Policy, Unbatched
from provider.planning.capacity import pass_steps
from provider.planning.options import NetworkLink, parse_assumed, parse_network
from provider.planning.simulation import CapacityForecast, Costs, Load, Product, Simulation
from shared.errors import ConfigurationError
from shared.wire.header import Direction, RequestClass
from shared.wire.protocol import GroupShape

GROUPS, FREE = 4, Costs(0.0, 0.0, 0.0)
SHAPES = [GroupShape(10, (10, 20), planes=1)] * GROUPS
FORWARD = pass_steps(SHAPES, 4)
BOTH = pass_steps(SHAPES, 4, (Direction.FORWARD, Direction.BACKWARD))
FAST = NetworkLink(0.0, 1e12)


@dataclass
class Lanes:
    """A product takes ``fixed`` and for each row ``per_row``."""

    fixed: float = 1e-3
    per_row: float = 1e-4
    count: int = 1
    depth: int = 1

    def of(self, group: int) -> int:
        return group % self.count

    def product(self, group: int, direction: Direction, rows: int) -> Product:
        busy = self.fixed + self.per_row * rows
        return Product(busy, self.fixed, busy)


def forecast(
    tenants: int = 1,
    rows: int = 1,
    lanes: Lanes | None = None,
    link: NetworkLink = FAST,
    costs: Costs = FREE,
    policy: Policy | None = None,
    machines: int = 0,
) -> CapacityForecast:
    what = RequestClass.DECODE if rows == 1 else RequestClass.FINETUNING
    load = Load(tenants, rows, what, FORWARD if rows == 1 else BOTH, machines)
    return Simulation(policy or Unbatched(), lanes or Lanes(), link, costs, load).run(4.0)


def opportunistic() -> Opportunistic:
    model = LatencyModel([GroupShape(10, (10, 20))] * GROUPS)
    for direction in (Direction.FORWARD, Direction.BACKWARD):
        line = model.line(0, direction)
        line.fixed, line.per_row = 1e-3, 1e-4
    return Opportunistic(model)


def test_bytes_of_a_pass() -> None:
    assert [(step.group, step.up, step.down) for step in BOTH][:2] == [(0, 40, 120), (1, 40, 120)]
    assert [(step.group, step.up, step.down) for step in BOTH][-2:] == [(1, 120, 40), (0, 120, 40)]
    assert FORWARD[0].member_bits == 0b11


def test_one_tenant_waits_for_each_of_its_requests() -> None:
    costs, link = Costs(2e-3, 1e-6, 3e-3, 2e-6), NetworkLink(5e-3, 1e6)
    expected = 2 * 5e-3 + 160e-6 + 2e-3 + 160e-6 + 3e-3 + 320e-6 + 1.1e-3
    found = forecast(costs=costs, link=link)
    assert found.pass_seconds == pytest.approx(GROUPS * expected)
    assert found.passes_per_second == pytest.approx(1 / found.pass_seconds)
    assert found.limit.startswith("round trips")
    assert found.rows == 1


@pytest.mark.parametrize(
    ("given", "rate", "limit"),
    [
        ({"link": NetworkLink(0.0, 40e3)}, 1 / GROUPS / 3e-3, "network down"),
        ({"costs": Costs(0.01, 0.0, 0.0)}, 1 / GROUPS / 0.01, "requests"),
        ({"costs": Costs(0.0, 1e-4, 0.0)}, 1 / GROUPS / 16e-3, "requests"),
        ({}, 1 / GROUPS / 1.1e-3, "memory bandwidth"),
        ({"lanes": Lanes(1e-4, 1e-3)}, 1 / GROUPS / 1.1e-3, "products"),
        ({"lanes": Lanes(1e-4, 1e-3, count=2)}, 2 / GROUPS / 1.1e-3, "products"),
        ({"costs": Costs(0.0, 0.0, 0.01), "machines": 1}, 1 / GROUPS / 0.01, "round trips"),
    ],
)
def test_many_tenants_reach_what_the_busiest_can(given: dict[str, object], rate: float, limit: str) -> None:
    found = forecast(16, **given)  # type: ignore[arg-type]
    assert found.passes_per_second == pytest.approx(rate, rel=0.05)
    assert found.limit.startswith(limit)


def test_tuning_up_the_network() -> None:
    """Backward more goes up than down: in all as much."""
    found = forecast(4, 100, Lanes(1e-6, 1e-9), NetworkLink(0.0, 1e6))
    assert found.passes_per_second == pytest.approx(1 / (GROUPS * 100 * 160e-6), rel=0.05)
    assert found.limit.startswith("network")


def test_the_executors_own_policy_shares_products() -> None:
    alone, together = forecast(1, policy=opportunistic()), forecast(16, policy=opportunistic())
    assert together.rows > 4
    assert together.passes_per_second > 4 * alone.passes_per_second


def test_a_product_may_be_on_its_way_while_another_is_multiplied() -> None:
    @dataclass
    class Far(Lanes):
        def product(self, group: int, direction: Direction, rows: int) -> Product:
            return Product(2e-3, 0.0, 1e-3)

    one, two = (forecast(8, lanes=Far(depth=depth)) for depth in (1, 2))
    assert one.passes_per_second == pytest.approx(1 / GROUPS / 2e-3, rel=0.05)
    assert two.passes_per_second == pytest.approx(1 / GROUPS / 1e-3, rel=0.05)


def test_networks_and_devices_as_people_write_them() -> None:
    assert parse_network("10Gbit,0.5ms") == NetworkLink(0.25e-3, 1.25e9)
    assert parse_network("1 Gbit/s, 2s") == NetworkLink(1.0, 1.25e8)
    assert parse_assumed(["cuda=1e9,2e12,3"]) == {"cuda": [1e9, 2e12, 3.0]}
    for wrong in ("10Gbit", "fast,1ms", "0Gbit,1ms", "1Gbit,-1ms", "nanGbit,1ms", "1Gbit,1", ""):
        with pytest.raises(ConfigurationError, match="must be bits a second"):
            parse_network(wrong)
    for wrong in ("cuda", "cuda=1,2", "=1,2,3", "cuda=1,2,inf", "cuda=1,2,x"):
        with pytest.raises(ConfigurationError, match="must be bytes of memory"):
            parse_assumed([wrong])
