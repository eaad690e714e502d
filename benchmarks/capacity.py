"""How right `symbiosis-provider plan` is: forecasts against what an executor and tenants then reach over TLS.

    python benchmarks/capacity.py --rounds 3

What a request costs beside its product is measured with a model so small that its products take next to
nothing. Then the demo's model and a larger one of random weights are forecast from products of synthetic
weights, and measured: a real executor over TLS on the loopback, on the first processor, and tenants of the
SDK that compute nothing themselves (``load.py``) on the others. Last come forecasts for models that are not
here, which are extrapolated. Prints tables, and writes capacity.json into --output. Needs Linux, and two
processors.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from common import Executor, arguments, cpu_seconds, executor, metrics, pss_mib, save, spread, write_model
from rich.console import Console
from rich.table import Table
from serving import replay

from provider.planning.capacity import Tenants, plan
from provider.planning.layout import WorkerLayout, plan_layout, read_groups
from provider.planning.options import NetworkLink, parse_network
from provider.planning.simulation import CapacityForecast, Costs

console = Console(width=150)
HERE, EXAMPLE = {0}, Path(__file__).parents[1] / "examples" / "base_model"
OTHERS = set(range(1, os.cpu_count() or 1)) or {0}
LOADS = ((1, 1), (4, 1), (16, 1), (1, 256), (4, 256))  # tenants, rows; of one row: they decode
CALIBRATION = {"layers": 2, "width": 64, "feed_forward": 128, "heads": 4, "vocabulary": 100}
LOOPBACK = 1e11  # bytes a second; what it costs processors is counted there
LARGE = {  # hidden, intermediate, layers, heads, key-value heads
    "70B-shaped": (8192, 28672, 80, 64, 8),
    "400B-shaped": (16384, 53248, 126, 128, 8),
}
DEVICES = 8
ASSUMED = {
    "cuda": (141e9, 4.8e12, 2e13)
}  # memory and its rate of a data sheet; products on the ring, a guess


@contextmanager
def on(processors: set[int]) -> Iterator[None]:
    """This process, and those that it starts, on some processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def measured(running: Executor, tenants: int, rows: int, seconds: float) -> dict[str, float]:
    """Requests a second of all tenants, and what each took of the executor's processor beside its product."""
    own = {"tune": rows} if rows > 1 else {"prompt": 0, "tokens": 1 << 30}
    plans = [{"name": f"tenant-{i}", **own} for i in range(tenants)]
    before, processor = metrics(running), cpu_seconds(running.pid)
    with on(OTHERS):
        told = replay(running, plans, seconds, processes=min(tenants, len(OTHERS)))
    after, processor = metrics(running), cpu_seconds(running.pid) - processor
    moved = [
        after[f"symbiosis_{way}_bytes_total"] - before.get(f"symbiosis_{way}_bytes_total", 0.0)
        for way in ("received", "sent")
    ]
    requests = sum(told["rows"].values()) / rows
    return {
        "requests_per_second": requests / told["seconds"],
        "overhead": processor * (1 - told["in_products"]) / requests,
        "up": moved[0] / requests,
        "down": moved[1] / requests,
        "busy": processor / told["seconds"],
    }


def calibrated(work: Path, seconds: float) -> tuple[Costs, NetworkLink]:
    """What a request and a byte cost executor and tenants, and how long both wait for each other besides."""
    folder = work / "calibration"
    write_model(folder, **CALIBRATION)  # type: ignore[arg-type]
    with serving(folder, work / "calibrating") as running:
        one = measured(running, 1, 1, seconds)
        many = measured(running, 8, 1, seconds)
        tune = measured(running, 1, 2048, seconds)
    request, tenant = many["overhead"], 1 / many["requests_per_second"]
    waited = max(0.0, 1 / one["requests_per_second"] - request - tenant)
    size = tune["up"] + tune["down"]
    byte = max(0.0, tune["overhead"] - request) / size
    own = max(0.0, 1 / tune["requests_per_second"] - request - tenant - waited - byte * size) / size
    return Costs(request, byte, tenant, own), NetworkLink(waited / 2, LOOPBACK)


def serving(folder: Path, work: Path) -> Any:
    """An executor on the first processor."""
    pinned = ("taskset", "-c", "0")
    return executor(folder, work, "--numerics", "ring", "--threads", "1", prefix=pinned)


def forecast(
    layout: WorkerLayout, tenants: int, rows: int, costs: Costs, link: NetworkLink
) -> tuple[CapacityForecast, float, float]:
    """Of one load, with the bytes of a token up and down."""
    machines = min(tenants, len(OTHERS))
    found = plan(
        layout.lanes(),
        layout.shapes,
        itemsize=layout.itemsize,
        link=link,
        tenants=Tenants(tenants, rows, machines),
        costs=costs,
    )
    if rows > 1:
        return found.tune, *found.step_bytes
    return found.decode, *found.token_bytes


def compare(
    name: str, folder: Path, work: Path, costs: Costs, link: NetworkLink, options: Any
) -> list[dict[str, Any]]:
    """Forecasts and measurements of one model."""
    groups = read_groups(folder)
    with on(HERE):
        layout = plan_layout(groups, ["cpu"], numerics="ring", threads=1, processes=False)
    found = []
    with serving(folder, work) as running:
        memory = pss_mib(running.pid)
        for tenants, rows in LOADS:
            runs = [measured(running, tenants, rows, options.seconds) for _ in range(options.rounds)]
            expected, up, down = forecast(layout, tenants, rows, costs, link)
            requests = len(groups) * (2 if rows > 1 else 1)
            rates = [rows * run["requests_per_second"] / requests for run in runs]
            got = statistics.median(rates)
            told = f"forecast {rows * expected.passes_per_second:,.1f} tokens/s, measured {got:,.1f}"
            console.print(f"{name}, {tenants} tenants, {rows} rows: {told}", highlight=False)
            found.append(
                {
                    "model": name,
                    "tenants": tenants,
                    "rows": rows,
                    "forecast": rows * expected.passes_per_second,
                    "measured": rates,
                    "error": rows * expected.passes_per_second / got - 1,
                    "limit": expected.limit,
                    "bytes_forecast": up + down,
                    "bytes_measured": requests / rows * statistics.median(r["up"] + r["down"] for r in runs),
                    "mib_forecast": (layout.placement.memory(0) + (256 << 20)) / 2**20,
                    "mib_measured": memory,
                }
            )
    return found


def show(found: list[dict[str, Any]]) -> None:
    table = Table(title="Tokens a second: forecast from synthetic weights, and measured over TLS")
    titles = (
        "model",
        "tenants",
        "rows",
        "forecast",
        "measured",
        "error",
        "limited by",
        "bytes a token",
        "measured",
    )
    for title in titles:
        table.add_column(title)
    for each in found:
        table.add_row(
            each["model"],
            str(each["tenants"]),
            str(each["rows"]),
            f"{each['forecast']:,.1f}",
            spread(each["measured"], 1, 1),
            f"{each['error']:+.0%}",
            each["limit"],
            f"{each['bytes_forecast']:,.0f}",
            f"{each['bytes_measured']:,.0f}",
        )
    console.print(table)
    for name in dict.fromkeys(each["model"] for each in found):
        first = next(each for each in found if each["model"] == name)
        sizes = f"forecast {first['mib_forecast']:,.0f} MiB, measured {first['mib_measured']:,.0f}"
        console.print(f"memory of {name}: {sizes}")
    errors = sorted(abs(each["error"]) for each in found)
    console.print(f"error: median {statistics.median(errors):.0%}, largest {errors[-1]:.0%}")


def extrapolated(work: Path) -> list[dict[str, Any]]:
    """Forecasts for models and devices that are not here."""
    table = Table(
        title=f"Extrapolated, not measured: {DEVICES} devices assumed as {ASSUMED['cuda']}, 10Gbit,0.5ms"
    )
    titles = (
        "model",
        "stripes",
        "GiB each",
        "tenants",
        "decoding, tokens/s",
        "limited by",
        "tuning, tokens/s",
        "limited by",
    )
    for title in titles:
        table.add_column(title)
    found = []
    for name, (hidden, intermediate, layers, heads, shared) in LARGE.items():
        folder = work / name
        folder.mkdir()
        shape = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
        more = {"num_attention_heads": heads, "num_key_value_heads": shared, "vocab_size": 128256}
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape, **more}
        (folder / "config.json").write_text(json.dumps(config))
        groups = read_groups(folder)
        for stripes in (1, DEVICES):
            names = [f"cuda:{i}" for i in range(DEVICES)]
            layout = plan_layout(
                groups, names, numerics="ring", stripes=stripes, assumed=ASSUMED, allow_misfit=True
            )
            for tenants in (1, 16):
                told = plan(
                    layout.lanes(),
                    layout.shapes,
                    itemsize=4,
                    link=parse_network("10Gbit,0.5ms"),
                    tenants=Tenants(tenants, 512),
                )
                memory = max(told.memory) / 2**30
                rates = told.decode.passes_per_second, 512 * told.tune.passes_per_second
                limits = told.decode.limit, told.tune.limit
                found.append({"model": name, "stripes": stripes, "tenants": tenants, "tokens": rates})
                table.add_row(
                    name,
                    str(stripes),
                    f"{memory:.1f}",
                    str(tenants),
                    f"{rates[0]:,.2f}",
                    limits[0],
                    f"{rates[1]:,.1f}",
                    limits[1],
                )
    console.print(table)
    return found


def main() -> None:
    """Calibrate, compare, extrapolate."""
    parser = arguments(__doc__, rounds=3, output="out/bench")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one measurement")
    options = parser.parse_args()
    console.print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    with tempfile.TemporaryDirectory(prefix="symbiosis-capacity-") as name:
        work = Path(name)
        costs, link = calibrated(work, options.seconds)
        console.print(f"of a request: {costs}, {link}")
        large = work / "large"
        write_model(large)
        found = compare("demo", EXAMPLE, work / "demo", costs, link, options)
        found += compare("12 layers, d = 768", large, work / "served", costs, link, options)
        show(found)
        more = extrapolated(work)
    console.print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    data = {"costs": costs._asdict(), "link": link._asdict(), "compared": found, "extrapolated": more}
    save(options.output / "capacity.json", data)


if __name__ == "__main__":
    main()
