"""Ways to share weights among devices, on a simulated clock: by group, striped, and gathered (fsdp).

    python benchmarks/simulated_cluster.py --output docs/images/cluster.png
    python benchmarks/sharding.py --output out/sharding.json
    python benchmarks/simulated_cluster.py --validate out/sharding.json

The policy is the executor's own. Products take what their weights' bytes and multiplications do on a device,
and messages what an alpha-beta link makes of them: ``alpha + bytes / beta``, in collectives of p devices
``alpha log2(p)`` and, of n bytes in all, for a broadcast, scatter or gather ``n / beta``, for a gather of
weights by all ``(p - 1) / p n / beta``, for sums twice that (Thakur, Rabenseifner and Gropp, 2005). With
--validate it is two workers of this machine that are simulated, and compared with what ``sharding.py``
measured.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import arguments

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import matplotlib
import torch
from plot_serving import BLUE, GREY, ORANGE
from rich.console import Console
from rich.table import Table
from sharding import LOADS, SHAPES

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from provider.engine.latency import LatencyModel
from provider.engine.scheduler import Opportunistic
from provider.planning.capacity import PlacedLanes, pass_steps
from provider.planning.layout import WorkerLayout, plan_layout, read_groups
from provider.planning.options import NetworkLink
from provider.planning.simulation import CapacityForecast, Costs, Load, Product, Simulation, Step
from provider.workers.planner import Device, place
from provider.workers.survey import latency_of
from shared.wire.header import Direction, RequestClass
from shared.wire.protocol import GroupShape

console = Console(width=150)
BY_GROUP, STRIPED, FSDP = "by group", "striped", "fsdp"
COLOURS = {BY_GROUP: BLUE, STRIPED: ORANGE, FSDP: GREY}
LAYER = ((8192, (8192, 1024, 1024)), (8192, (8192,)), (8192, (28672, 28672)), (28672, (8192,)))  # 70B-shaped
LAYERS, WEIGHT_BYTES, NUMBER_BYTES = 80, 2, 4
DEVICE = Device("a device", math.inf, 4.8e12, 2e13)
LINK = NetworkLink(1e-5, 5e10)  # of each device: 10 microseconds, 400 Gbit/s
TENANT_SECONDS = 1e-3  # between an answer and the next request, network and all
TENANTS = (1, 4, 16, 64)
COUNTS = (2, 8, 64)
WORK = {
    "decoding: tokens/s": (1, RequestClass.DECODE),
    "tuning, 512 rows: tokens/s": (512, RequestClass.FINETUNING),
}
NO_LINK = NetworkLink(0.0, math.inf)


@dataclass
class Cluster:
    """Lanes of devices that are alike; see ``provider.planning.simulation.Lanes``.

    Args:
        way: BY_GROUP: a lane for each device. STRIPED, FSDP: all devices are one lane.
        shapes: of the groups.
        latency: of a whole group's product on one device.
        devices: how many.
        link: of each device, and of the executor that asks them.
    """

    way: str
    shapes: Sequence[GroupShape]
    latency: LatencyModel
    devices: int
    link: NetworkLink
    depth: int = 2
    weight_bytes: int = WEIGHT_BYTES

    def __post_init__(self) -> None:
        """Place the groups."""
        together = self.way != BY_GROUP
        lanes = [DEVICE] * (1 if together else self.devices)
        self._lane_of = place(self.shapes, lanes, weight_bytes=self.weight_bytes).lane_of
        self.count = len(lanes)
        self._hops = max(1, math.ceil(math.log2(self.devices))) if together else 1

    def of(self, group: int) -> int:
        """See ``Lanes``."""
        return self._lane_of[group]

    def product(self, group: int, direction: Direction, rows: int) -> Product:
        """See ``Lanes``. Messages of one product travel while another is multiplied."""
        shape, line = self.shapes[group], self.latency.line(group, direction)
        sizes = [NUMBER_BYTES * rows * width for width in (shape.inputs, sum(shape.outputs))]
        into, out = sizes if direction == Direction.FORWARD else sizes[::-1]
        rate, share = self.link.bytes_per_second, (self.devices - 1) / self.devices
        reading, multiplying, gathering = line.fixed, line.per_row * rows, 0.0
        answering = out / rate
        if self.way == STRIPED:
            reading, multiplying = reading / self.devices, multiplying / self.devices
            if direction == Direction.BACKWARD:
                answering = 2 * share * out / rate
        elif self.way == FSDP:
            multiplying = line.per_row * math.ceil(rows / self.devices)
            gathering = share * self.weight_bytes * shape.size / rate
        alphas = self.link.seconds * self._hops * (3 if self.way == FSDP else 2)
        seconds = alphas + gathering + into / rate + reading + multiplying + answering
        return Product(seconds, reading, max(gathering, into / rate, reading + multiplying, answering))

    def model(self) -> LatencyModel:
        """What the policy is told."""
        told = LatencyModel(self.shapes)
        for group in range(len(self.shapes)):
            for direction in (Direction.FORWARD, Direction.BACKWARD):
                few, many = (self.product(group, direction, rows).busy for rows in (1, 129))
                line = told.line(group, direction)
                line.per_row = max((many - few) / 128, 1e-12)
                line.fixed = max(few - line.per_row, 1e-9)
        return told


def simulated(
    lanes: Cluster | PlacedLanes,
    steps: Sequence[Step],
    tenants: int,
    rows: int,
    what: RequestClass,
    costs: Costs,
    link: NetworkLink = NO_LINK,
) -> CapacityForecast:
    """Of tenants with this link to the executor."""
    load = Load(tenants, rows, what, steps)
    return Simulation(Opportunistic(lanes.model()), lanes, link, costs, load).run(1.0, 0.5)


def curves(layers: int) -> list[dict[str, Any]]:
    """Forecasts of all ways, on all numbers of devices."""
    shapes = [GroupShape(*each, planes=1) for each in LAYER] * layers
    latency, found = latency_of(DEVICE, WEIGHT_BYTES, shapes, None), []
    costs = Costs(0.0, 0.0, TENANT_SECONDS)
    asker = NetworkLink(0.0, LINK.bytes_per_second)  # all rows pass it once, whoever multiplies them
    for name, (rows, what) in WORK.items():
        directions = [Direction.FORWARD] if rows == 1 else [Direction.FORWARD, Direction.BACKWARD]
        steps = pass_steps(shapes, NUMBER_BYTES, directions)
        for devices in COUNTS:
            for way in COLOURS:
                cluster = Cluster(way, shapes, latency, devices, LINK)
                for tenants in TENANTS:
                    told = simulated(cluster, steps, tenants, rows, what, costs, asker)
                    rate = rows * told.passes_per_second
                    found.append(
                        {
                            "work": name,
                            "devices": devices,
                            "way": way,
                            "tenants": tenants,
                            "rate": rate,
                            "seconds": told.pass_seconds,
                            "rows": told.rows,
                        }
                    )
                console.print(
                    f"{name}, {devices} devices, {way}: {rate:,.1f} with {tenants}", highlight=False
                )
    return found


def draw(found: list[dict[str, Any]], layers: int, path: Path) -> None:
    """A row of panels for each kind of work: a panel for each number of devices, and one tenant's wait."""
    figure, axes = plt.subplots(2, 4, figsize=(15, 7.4), layout="constrained")
    for line, name in zip(axes, WORK, strict=True):
        own = [each for each in found if each["work"] == name]
        for axis, devices in zip(line, COUNTS, strict=False):
            for way, colour in COLOURS.items():
                points = [each for each in own if (each["devices"], each["way"]) == (devices, way)]
                axis.plot(
                    [p["tenants"] for p in points], [p["rate"] for p in points], "o-", color=colour, label=way
                )
            axis.set_xlabel("tenants")
            axis.set_title(f"{name}, {devices} devices", fontsize=10)
            _scaled(axis, TENANTS)
        for way, colour in COLOURS.items():
            points = [each for each in own if (each["tenants"], each["way"]) == (1, way)]
            seconds = [p["seconds"] for p in points]
            line[-1].plot([p["devices"] for p in points], seconds, "o-", color=colour, label=way)
        line[-1].set_xlabel("devices")
        line[-1].set_title(f"{name.split(':')[0]}: one tenant waits, s", fontsize=10)
        _scaled(line[-1], COUNTS)
        rates = [each["rate"] for each in own]
        for axis in line[:3]:
            axis.set_ylim(min(rates) / 1.5, max(rates) * 1.5)
    axes[0][0].legend(frameon=False)
    figure.supxlabel(
        f"Simulated, not measured: {layers} layers of hidden size 8192 and intermediate size 28672 on the "
        f"ring, 2 bytes a weight; devices of {DEVICE.bytes_per_second / 1e12:g} TB/s and\n"
        f"{DEVICE.multiplications_per_second:.0e} multiplications/s; links of {LINK.seconds * 1e6:g} µs and "
        f"{LINK.bytes_per_second / 1e9:g} GB/s; {TENANT_SECONDS * 1e3:g} ms between an answer and a tenant's "
        "next request; the executor's own thread costs nothing",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _scaled(axis: plt.Axes, ticks: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks, [str(each) for each in ticks])
    axis.spines[["top", "right"]].set_visible(False)


# -- two workers of this machine -------------------------------------------------------------------


def validate(path: Path, numerics: str) -> list[dict[str, Any]]:
    """Compare with what ``sharding.py`` measured; its loads of one row and one caller calibrate."""
    measured, found = json.loads(path.read_text()), []
    for shape, told in measured.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(_config(*SHAPES[shape])))
            groups = read_groups(Path(folder))
        rates = {
            way: {load: statistics.median(v) for load, v in own.items()} for way, own in told["rates"].items()
        }
        one, by_group, striped, *more = rates
        count = os.cpu_count() or 1
        names = ["cpu"] * count
        alone = plan_layout(groups, ["cpu"], numerics=numerics, threads=count, processes=False)
        spread = plan_layout(groups, names, numerics=numerics)
        sharing = plan_layout(groups, names, numerics=numerics, stripes=count)
        request = max(1e-6, 1 / rates[one]["1 x 1"] - _one_row(alone))
        hop = max(1e-6, 1 / rates[by_group]["1 x 1"] - request - _one_row(spread))
        copied = _copies()
        row = [NUMBER_BYTES * (each.inputs + sum(each.outputs)) for each in alone.placement.shapes]
        lanes: dict[str, Cluster | PlacedLanes] = {
            one: alone.lanes(),
            by_group: PlacedLanes(spread.placement, spread.latency, hop, copied, row, 2),
            striped: PlacedLanes(sharing.placement, sharing.latency, hop, copied, row, 2),
        }
        for way in more:
            if FSDP in way.lower():
                link = NetworkLink(hop / 3, copied)
                of = alone.placement
                lanes[way] = Cluster(
                    FSDP, of.shapes, spread.latency[0], count, link, weight_bytes=of.weight_bytes
                )
        console.print(
            f"{shape}: {request * 1e6:.0f} us a request, {hop * 1e6:.0f} us to a worker and back, "
            f"{copied / 1e9:.1f} GB/s copied"
        )
        steps = pass_steps(alone.shapes, NUMBER_BYTES, (Direction.FORWARD, Direction.BACKWARD))
        for way, each in lanes.items():
            for callers, rows in LOADS:
                load = f"{callers} x {rows}"
                costs = Costs(request, 0.0, 0.0)
                told = simulated(each, steps, callers, rows, RequestClass.UNDECLARED, costs)
                expected, got = told.passes_per_second * len(steps), rates[way][load]
                found.append(
                    {
                        "layers": shape,
                        "way": way,
                        "load": load,
                        "simulated": expected,
                        "measured": got,
                        "error": expected / got - 1,
                        "calibrated": load == "1 x 1" and way in (one, by_group),
                    }
                )
    return found


def _one_row(layout: WorkerLayout) -> float:
    return len(layout.groups) and 1 / statistics.mean(
        layout.products_per_second(worker, 1) for worker in range(len(layout.placement.devices))
    )


def _copies() -> float:
    """Bytes a second of this machine's memory copied by one thread."""
    block, times = torch.ones(16 << 20, dtype=torch.int32), []
    into = torch.empty_like(block)
    for _ in range(5):
        began = time.perf_counter()
        into.copy_(block)
        times.append(time.perf_counter() - began)
    return block.nbytes / min(times)


def _config(hidden: int, intermediate: int, layers: int) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 12 if hidden % 12 == 0 else 32, "vocab_size": 1000}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape, **heads}


def show(found: list[dict[str, Any]]) -> None:
    table = Table(title="Products a second: simulated, and measured by sharding.py; callers x rows")
    for title in ("layers", "way", "load", "simulated", "measured", "error"):
        table.add_column(title)
    for each in found:
        error = "calibrated" if each["calibrated"] else f"{each['error']:+.0%}"
        table.add_row(
            each["layers"],
            each["way"],
            each["load"],
            f"{each['simulated']:,.0f}",
            f"{each['measured']:,.0f}",
            error,
        )
    console.print(table)
    errors = sorted(abs(each["error"]) for each in found if not each["calibrated"])
    console.print(f"error: median {statistics.median(errors):.0%}, largest {errors[-1]:.0%}")


def main() -> None:
    """Draw curves, or validate."""
    parser = arguments(__doc__, output="out/bench/cluster.png")
    parser.add_argument("--validate", type=Path, help="What sharding.py wrote")
    parser.add_argument("--numerics", default="ring", help="with which sharding.py ran")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--redraw", action="store_true", help="what was simulated last")
    options = parser.parse_args()
    if options.validate:
        found = validate(options.validate, options.numerics)
        show(found)
        options.validate.with_name("cluster-validation.json").write_text(json.dumps(found, indent=1))
        return
    kept = Path("out/bench/cluster.json")
    if options.redraw:
        found = json.loads(kept.read_text())
    else:
        found = curves(options.layers)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found, indent=1))
    draw(found, options.layers, options.output)
    console.print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
