"""Plans as people read them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from provider.engine.profiling import PROFILE_ROWS
from provider.executor.memory_check import gib
from provider.planning.capacity import COSTS, CapacityPlan
from provider.planning.kept import ROUND_TRIPS, TENANT_BYTES_PER_SECOND, KeptForecast
from provider.planning.layout import WorkerLayout
from provider.planning.simulation import CapacityForecast
from provider.workers.planner import Device
from shared.errors import counted
from shared.wire.traffic import SPEEDS

MEASURED = "from products measured here"
EXTRAPOLATED = "extrapolated, not measured"


def source(layout: WorkerLayout) -> str:
    """What figures are, in words for a heading."""
    return EXTRAPOLATED if layout.doubts or layout.misfit else MEASURED


def workers_table(layout: WorkerLayout) -> Table:
    """A row for each worker, and one for all of them."""
    placement, each = layout.placement, (1, PROFILE_ROWS)
    table = Table(title=f"Products {source(layout)}")
    for title in (
        "worker",
        "device",
        "groups",
        "weights",
        "room",
        "products/s, 1 row",
        f"{PROFILE_ROWS} rows",
    ):
        table.add_column(title, justify="right")
    for title in ("bytes a row: to it", "from it", "of these summed", "speed"):
        table.add_column(title, justify="right")
    if placement.stripes > 1:
        table.caption = "A worker's products are with its stripe of a layer, those of all with whole layers."
    sharing = Counter(device.name for device in placement.devices)
    for worker, device in enumerate(placement.devices):
        lane, stripe = divmod(worker, placement.stripes)
        moved = layout.moved(worker)
        table.add_row(
            f"{lane}.{stripe}" if placement.stripes > 1 else str(lane),
            device.name,
            str(len(placement.groups(worker))),
            gib(placement.memory(worker)),
            _room(device, sharing[device.name]),
            *(f"{layout.products_per_second(worker, rows):,.0f}" for rows in each),
            *(f"{size:,.0f}" for size in moved),
            "measured" if device.measured else "guess",
        )
    table.add_section()
    weights = sum(placement.memory(worker) for worker in range(len(placement.devices)))
    rates = [f"{layout.layers_per_second(rows):,.0f}" for rows in each]
    table.add_row("all", "", str(len(placement.shapes)), gib(weights), "", *rates)
    return table


def _room(device: Device, sharing: int) -> str:
    if device.memory == float("inf"):
        return "unknown"
    return gib(device.memory) + (f" for {sharing}" if sharing > 1 else "")


def reasons(layout: WorkerLayout) -> list[str]:
    """A sentence for each decision; those that are alike are one."""
    placement, counts = layout.placement, dict[tuple[int, str, str], int]()
    for shape, decision in zip(placement.shapes, placement.decisions, strict=True):
        widths = " + ".join(map(str, shape.outputs))
        key = decision.lane, f"{shape.inputs} to {widths}", decision.reason
        counts[key] = counts.get(key, 0) + 1
    where = "worker {} has" if placement.stripes == 1 else "the stripes of lane {} have"
    return [
        f"{where.format(lane)} {counted(count, 'group')} of {shape}: {reason}"
        for (lane, shape, reason), count in sorted(counts.items())
    ]


def plan_table(plan: CapacityPlan, tenants: int, rows: int, kind: str) -> Table:
    """What tenants would get; ``kind`` of figures, see ``source``."""
    table = Table(title=f"{counted(tenants, 'tenant')}, {kind}")
    for title in ("", "decoding, a row each", f"tuning, {rows} rows a step"):
        table.add_column(title)
    both = (plan.decode, plan.tune)
    factors = (1, rows)
    lines: list[tuple[str, list[str]]] = [
        ("tokens a second", [f"{f.passes_per_second * n:,.1f}" for f, n in zip(both, factors, strict=True)]),
        ("a tenant waits for a token, a step", [duration(each.pass_seconds) for each in both]),
        ("bytes sent for each token", [f"{sizes.up:,.0f}" for sizes in (plan.token_bytes, plan.step_bytes)]),
        (
            "bytes received for each token, with effects",
            [f"{sizes.down:,.0f}" for sizes in (plan.token_bytes, plan.step_bytes)],
        ),
        *(
            (
                f"most tokens a second of a tenant at {speed} Gbit/s",
                [f"{sizes.tokens_per_second(speed):,.3g}" for sizes in (plan.token_bytes, plan.step_bytes)],
            )
            for speed in SPEEDS
        ),
        ("rows in a product", [f"{each.rows:,.1f}" for each in both]),
        ("limited by", [each.limit for each in both]),
        ("busy: network up", [f"{each.network_up:.0%}" for each in both]),
        ("network down", [f"{each.network_down:.0%}" for each in both]),
        ("the executor's thread", [f"{each.requests:.0%}" for each in both]),
        ("products, of the busiest", [_busy(each) for each in both]),
    ]
    for name, cells in lines:
        table.add_row(name, *cells)
    return table


def kept_table(forecasts: Sequence[KeptForecast]) -> Table:
    """What a tenant gets that keeps layers, by distance."""
    table = Table(
        title="A tenant that keeps frozen layers (keep_gib): their tokens a second, and requests a token",
        caption="by estimate, without the tenant's other layers; its memory reads "
        f"{TENANT_BYTES_PER_SECOND / 1e9:.0f} GB a second",
    )
    for title in (
        "network",
        "GiB kept",
        *(f"{1e3 * each:g} ms away" for each in ROUND_TRIPS),
        "MB a trained token",
    ):
        table.add_column(title, justify="right")
    for each in forecasts:
        cells = [
            f"{count:,.3g} ({requests})" for count, requests in zip(each.tokens, each.requests, strict=True)
        ]
        size, moved = f"{each.size / 2**30:.2f}", f"{each.tuning_bytes / 1e6:,.3g}"
        table.add_row(f"{each.gigabits:g} Gbit/s", size, *cells, moved)
    return table


def duration(seconds: float) -> str:
    """As people read it."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds * 1e3:,.0f} ms"


def assumption() -> str:
    """What a forecast takes for granted of a request, in a sentence without its full stop."""
    micro, nano = 1e6, 1e9
    return (
        f"assumed: a request costs the executor's thread {COSTS.request_seconds * micro:.0f} µs and "
        f"{COSTS.byte_seconds * nano:.2f} ns a byte, and its tenant's machine "
        f"{COSTS.tenant_seconds * micro:.0f} µs and {COSTS.tenant_byte_seconds * nano:.2f} ns a byte; each "
        "tenant has a machine of its own"
    )


def _busy(forecast: CapacityForecast) -> str:
    return f"{forecast.products:.0%}, {forecast.reading:.0%} of it reading weights"


def plan_described(plan: CapacityPlan) -> dict[str, Any]:
    """For programs."""
    description: dict[str, Any] = {}
    for name in ("decode", "tune"):
        forecast: CapacityForecast = getattr(plan, name)
        description[name] = forecast._asdict() | {"limit": forecast.limit}
    description["assumed"] = COSTS._asdict()
    for field in dataclasses.fields(plan):
        if field.name not in description:
            description[field.name] = getattr(plan, field.name)
    return description
