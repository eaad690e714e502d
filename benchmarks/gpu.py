"""Everything that is measured on GPUs: one layer's products, CUDA graphs, tenants, two devices.

    python benchmarks/gpu.py --output out/gpu
    python benchmarks/gpu.py --device cpu --smoke    # whether this program works; its figures mean nothing

``layers``: one layer's product of 1 to 4,096 rows: the ring by each kernel that is exact here, against
bfloat16; what share that is of the device's bfloat16 peak, and the ring's of its int8 peak; and the same
product as a worker computes it, from rows in the host's memory to answers there, with the next begun while
one runs. ``graphs``: products of few rows, called as they are and replayed as a CUDA graph. ``tenants``: 32
of them that decode, or tune, over the local transport, with layers of the shape of Llama 2 7B's, by an
executor on one device, by a worker on it, and by workers on two devices, each with half of the layers.

Every kernel is first checked against integers of the CPU. gpu.json is written after each figure, in case the
GPU is taken away.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from provider.executor.loading import LoadedGroup
from provider.executor.products import GroupExecutor
from provider.executor.weights import FloatWeight, GroupWeight, RingWeight
from shared.devices import pin
from shared.ring.fixed_point import LARGEST
from shared.ring.product import KERNELS, fastest_kernel, fault
from shared.transport.colocated import SharedMemory
from shared.wire.header import Direction
from shared.wire.messages import GroupInfo, Member

BOTH = (Direction.FORWARD, Direction.BACKWARD)
IN_FLIGHT = 2  # batches that a worker has
console = Console(width=None if sys.stdout.isatty() else 150)


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        shapes: inputs and outputs of layers.
        rows: of products; few of those for graphs.
        square: the side of the matrices by which a peak is found.
        tenants: how many; each has ``tune`` rows in a step.
        least: seconds of one measurement.
        numerics: of executors.
    """

    shapes: tuple[tuple[int, int], ...] = (
        (768, 768),
        (4096, 4096),
        (4096, 22016),
        (11008, 4096),
        (8192, 8192),
    )
    rows: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 4096)
    few: tuple[int, ...] = (1, 2, 4, 8, 16)
    square: int = 8192
    tenants: int = 32
    tune: int = 128
    least: float = 0.05
    numerics: tuple[str, ...] = ("ring", "bfloat16")


SMOKE = Sizes(((32, 48),), (1, 8), (1, 2), 64, 2, 8, 0.0, ("ring",))


@dataclass(frozen=True)
class Machine:
    """Where it is measured: a device, and the kernels of the ring that are exact on it."""

    device: torch.device
    kernels: tuple[str, ...]
    sizes: Sizes

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU; else it is the CPU, to try this program."""
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Until all that is queued is done."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds_of(self, function: Callable[[], object], calls: int = 20) -> float:
        """Of one of so many calls in a row, or fewer long ones, until all is done: the median."""
        function()
        self.wait()
        began = time.perf_counter()
        function()
        self.wait()
        enough = self.sizes.least / 5 / (time.perf_counter() - began)
        calls = max(1, min(calls, round(enough)))  # a GPU is rented by the minute
        times: list[float] = []
        while sum(times) * calls < self.sizes.least or len(times) < 5:
            began = time.perf_counter()
            for _ in range(calls):
                function()
            self.wait()
            times.append((time.perf_counter() - began) / calls)
        return statistics.median(times)

    def integers(self, dtype: torch.dtype, most: int, *shape: int) -> torch.Tensor:
        """Random ones, of both signs."""
        return torch.randint(-most, most, shape, dtype=dtype, device=self.device)

    def halves(self, *shape: int) -> torch.Tensor:
        """Random bfloat16."""
        return torch.randn(shape, device=self.device).bfloat16()


def peaks(machine: Machine) -> dict[str, float]:
    """Products and sums a second of a large product of two squares."""
    size = machine.sizes.square
    bytes_, halves = machine.integers(torch.int8, 128, size, size), machine.halves(size, size)
    return {
        "int8": size**3 / machine.seconds_of(lambda: torch._int_mm(bytes_, bytes_.T)),
        "bfloat16": size**3 / machine.seconds_of(lambda: halves @ halves.T),
    }


# -- one layer -------------------------------------------------------------------------------------


def pinned(machine: Machine, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Rows of zeros in memory of the host as a worker has it: ordinary memory, which the GPU was told of."""
    memory = SharedMemory.private(shape[0] * shape[1] * dtype.itemsize)
    pin(memory.whole, machine.device)
    return memory.tensor(0, dtype, shape).zero_()


def executing(
    machine: Machine,
    weight: GroupWeight,
    rows: int,
    direction: Direction,
    dtype: torch.dtype,
    shape: tuple[int, int],
) -> Callable[[], object]:
    """A call that begins a product as a worker does, and waits for the one before the last."""
    inputs, outputs = shape
    info = GroupInfo(inputs, (Member("layer", outputs, "layer"),))
    numerics = "ring" if dtype == torch.int32 else "bfloat16"
    executor = GroupExecutor({0: LoadedGroup(weight, info)}, numerics, machine.device)
    taken, answered = (inputs, outputs) if direction == Direction.FORWARD else (outputs, inputs)
    places = [
        (pinned(machine, (rows, taken), dtype), pinned(machine, (rows, answered), dtype))
        for _ in range(IN_FLIGHT)
    ]
    begun: deque[Callable[[], None]] = deque()

    def begin() -> None:
        places.append(places.pop(0))
        if len(begun) == IN_FLIGHT:
            begun.popleft()()
        wait = executor.begin(0, direction, 1, [places[0][0]], [places[0][1]])
        if wait is not None:
            begun.append(wait)

    return begin


def layer(machine: Machine, shape: tuple[int, int], peak: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Figures of one shape, by rows and direction."""
    inputs, outputs = shape
    weight, half = machine.integers(torch.int16, LARGEST, outputs, inputs), machine.halves(outputs, inputs)
    for rows in machine.sizes.rows:
        for direction in BOTH:
            forward = direction == Direction.FORWARD
            taken, answered = shape if forward else (outputs, inputs)
            x, xs = machine.integers(torch.int32, 2**31 - 1, rows, taken), machine.halves(rows, taken)
            out = torch.empty((rows, answered), dtype=torch.int32, device=machine.device)
            w, floats = (weight.T, half.T) if forward else (weight, half)
            bare = {"bfloat16": machine.seconds_of(lambda xs=xs, floats=floats: xs @ floats)}
            for name in machine.kernels:
                kernel = KERNELS[name]
                bare[name] = machine.seconds_of(lambda kernel=kernel, x=x, w=w, out=out: kernel(x, w, out))
            served = {
                "ring": executing(
                    machine, RingWeight(weight[None], [outputs]), rows, direction, x.dtype, shape
                ),
                "bfloat16": executing(
                    machine, FloatWeight(half, [outputs]), rows, direction, xs.dtype, shape
                ),
            }
            executor = {name: machine.seconds_of(begin) for name, begin in served.items()}
            ring, products = min(bare[name] for name in machine.kernels), rows * inputs * outputs
            yield {
                "inputs": inputs,
                "outputs": outputs,
                "rows": rows,
                "direction": direction.name.lower(),
                "seconds": bare,
                "executor seconds": executor,
                "of bfloat16 peak": products / bare["bfloat16"] / peak["bfloat16"],
                "of int8 peak": 7 * products / ring / peak["int8"],  # of digits
                "executor of bare": {
                    "ring": ring / executor["ring"],
                    "bfloat16": bare["bfloat16"] / executor["bfloat16"],
                },
            }


def layers(machine: Machine, peak: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Of all shapes, with a table."""
    table = Table(title="One layer: ms, and shares", highlight=False)
    for column in ("layer", "rows", "", "bfloat16", *machine.kernels, "ring / bfloat16"):
        table.add_column(column)
    for column in ("of bfloat16 peak", "of int8 peak", "executor, ring", "executor, bfloat16"):
        table.add_column(column)
    for shape in machine.sizes.shapes:
        for each in layer(machine, shape, peak):
            yield each
            times, executor = each["seconds"], each["executor of bare"]
            table.add_row(
                f"{each['inputs']} -> {each['outputs']}",
                str(each["rows"]),
                each["direction"],
                *(f"{1e3 * seconds:.3f}" for seconds in times.values()),
                f"{min(times[name] for name in machine.kernels) / times['bfloat16']:.2f}",
                f"{each['of bfloat16 peak']:.0%}",
                f"{each['of int8 peak']:.0%}",
                *(f"{executor[name]:.0%}" for name in ("ring", "bfloat16")),
            )
    console.print(table)


# -- graphs ----------------------------------------------------------------------------------------


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """The same as a CUDA graph's replay, in the same memory."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries choose and allocate at their first calls
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def graphs(machine: Machine) -> Iterator[dict[str, Any]]:
    """Few rows, from a call until its answer is there: a tenant that decodes asks for one at a time."""
    table = Table(title="Few rows, from the call to the answer on the device: us", highlight=False)
    for column in ("layer", "rows", "", "called", "graph", "called / graph"):
        table.add_column(column)
    for inputs, outputs in machine.sizes.shapes:
        weight, half = (
            machine.integers(torch.int16, LARGEST, outputs, inputs),
            machine.halves(outputs, inputs),
        )
        for rows in machine.sizes.few:
            x, xs = machine.integers(torch.int32, 2**31 - 1, rows, inputs), machine.halves(rows, inputs)
            out = torch.empty((rows, outputs), dtype=torch.int32, device=machine.device)
            answer = torch.empty((rows, outputs), dtype=torch.bfloat16, device=machine.device)
            calls: dict[str, Callable[[], object]] = {
                "bfloat16": lambda xs=xs, half=half, answer=answer: torch.mm(xs, half.T, out=answer)
            }
            for name in machine.kernels:
                calls[name] = lambda name=name, x=x, w=weight, out=out: KERNELS[name](x, w.T, out)
            for name, call in calls.items():
                called = machine.seconds_of(call, calls=1)
                graph = machine.seconds_of(captured(call), calls=1) if machine.cuda else None
                row = {"inputs": inputs, "outputs": outputs, "rows": rows, "kernel": name}
                yield {**row, "called": called, "graph": graph}
                shown = (f"{1e6 * graph:.1f}", f"{called / graph:.2f}") if graph else ("", "")
                table.add_row(f"{inputs} -> {outputs}", str(rows), name, f"{1e6 * called:.1f}", *shown)
    console.print(table)


# -- tenants ---------------------------------------------------------------------------------------


def layouts(machine: Machine) -> dict[str, list[str]]:
    """Options of executors: on one device, and on two if there are."""
    one = str(machine.device)
    if not machine.cuda:
        return {"two workers": ["--devices", f"{one},{one}"]}
    found = {"in the executor": ["--device", one], "one worker": ["--devices", one]}
    if torch.cuda.device_count() > 1:
        other = next(each for each in range(2) if each != (machine.device.index or 0))
        found["two workers"] = ["--devices", f"{one},cuda:{other}"]
    return found


def tenants(machine: Machine, seconds: float) -> Iterator[dict[str, Any]]:
    """What tenants over the local transport get, which ask without a pause and compute nothing themselves."""
    from common import executor, write_model  # with matplotlib and transformers, which the rest does without
    from serving import large_model, local_options, replay

    sizes, number = machine.sizes, 0
    table = Table(title=f"{sizes.tenants} tenants over the local transport", highlight=False)
    for column in (
        "numerics",
        "placement",
        "work",
        "rows through a group a second",
        "rows a product",
        "errors",
    ):
        table.add_column(column)
    with tempfile.TemporaryDirectory(prefix="symbiosis-gpu-") as name:
        work = Path(name)
        if sizes is SMOKE:
            write_model(work / "model", layers=2, width=64, feed_forward=128, heads=2, vocabulary=128)
        folder = work / "model" if sizes is SMOKE else large_model(work)
        cores = torch.get_num_threads()
        works = {"decode": {"prompt": 0, "tokens": 1 << 30}, "tune": {"tune": sizes.tune}}
        for numerics in sizes.numerics:
            for placement, options in layouts(machine).items():
                number += 1
                own = f"{numerics}-{number}"
                local = local_options(work, own)
                with executor(folder, work / own, "--numerics", numerics, *options, *local) as running:
                    over = replace(running, url=running.local_url)
                    for kind, plan in works.items():
                        plans = [{"name": f"tenant-{i}", **plan} for i in range(sizes.tenants)]
                        told = replay(over, plans, seconds, processes=max(1, min(sizes.tenants, cores) // 2))
                        rate = sum(told["rows"].values()) / seconds
                        row = {"numerics": numerics, "placement": placement, "work": kind}
                        yield {**row, "rows a second": rate, **told}
                        shown = f"{rate:,.0f}", f"{told['rows_per_product']:.1f}", str(told["errors"] or "")
                        table.add_row(*row.values(), *shown)
    console.print(table)


# -- all -------------------------------------------------------------------------------------------


def look(name: str, sizes: Sizes) -> tuple[Machine, dict[str, str]]:
    """The machine, and what is wrong with each kernel; says so."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here")
    tried = ("triton", "int8", "float64") if device.type == "cuda" else ("int8",)
    faults = {kernel: fault(KERNELS[kernel], name) for kernel in tried}
    for kernel, reason in faults.items():
        console.print(f"{name}: {kernel}: {reason or 'exact'}", highlight=False)
    kernels = tuple(kernel for kernel in ("triton", "int8") if faults.get(kernel) == "")
    if not kernels:
        raise SystemExit("no kernel of the ring is exact here")
    return Machine(device, kernels, sizes), faults


def main() -> None:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("out/gpu"))
    parser.add_argument("--device", default="cuda:0", help="cpu: to try this program, with --smoke")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, in seconds")
    parser.add_argument("--seconds", type=float, default=8.0, help="of tenants, for each placement and work")
    parser.add_argument("--peak", type=float, help="bfloat16 TFLOP/s of the data sheet; default: measured")
    parser.add_argument("--only", choices=("layers", "graphs", "tenants"), action="append")
    options = parser.parse_args()
    machine, faults = look(options.device, SMOKE if options.smoke else Sizes())
    if machine.cuda:
        torch.cuda.set_device(machine.device)
    peak = peaks(machine)
    if options.peak:
        peak["bfloat16"] = options.peak * 1e12 / 2  # a product and its sum are two operations
    console.print({name: f"{value / 1e12:.3g} T products a second" for name, value in peak.items()})
    told: dict[str, Any] = {
        "device": torch.cuda.get_device_name(machine.device) if machine.cuda else "cpu",
        "torch": torch.__version__,
        "faults": faults,
        "chosen": next(n for n, kernel in KERNELS.items() if kernel is fastest_kernel(str(machine.device))),
        "peaks": peak,
    }
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "layers": lambda: layers(machine, peak),
        "graphs": lambda: graphs(machine),
        "tenants": lambda: tenants(machine, options.seconds),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    for name, measure in parts.items():
        if not options.only or name in options.only:
            told[name] = []
            for row in measure():
                told[name].append(row)
                (options.output / "gpu.json").write_text(json.dumps(told, indent=1))
                brief = {key: value for key, value in row.items() if not isinstance(value, dict)}
                console.print(f"{name}: {brief}", highlight=False)
    console.print(f"wrote {options.output}/gpu.json")


if __name__ == "__main__":
    main()
