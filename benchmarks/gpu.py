"""Everything that is measured on a GPU, in less than ten minutes: ring products by each kernel, and an
executor's.

    python benchmarks/gpu.py --output out/gpu

One layer's product of 1 to 4,096 rows: the ring by Triton's kernel and by torch's int8 product, against
bfloat16; with the share of what the device's int8 units do for the largest product. Then the same from rows
in the host's memory to answers there, as an executor computes them. Every kernel is first checked against
integers of the CPU. Writes
gpu.json, which docs/performance.md quotes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from provider.executor.weights import FloatWeight, RingWeight
from shared.devices import to_device, to_host
from shared.ring.fixed_point import LARGEST
from shared.ring.product import KERNELS, fastest_kernel, fault
from shared.wire.header import Direction

SHAPES = ((768, 768), (4096, 4096), (4096, 22016), (11008, 4096), (8192, 8192))  # inputs, outputs
ROWS = (1, 4, 16, 64, 256, 1024, 4096)
DEVICE = "cuda:0"
console = Console()


def seconds_of(function: Callable[[], object], calls: int = 20, least: float = 0.05) -> float:
    """Of one of so many calls in a row, by the device's clock: their median.

    Calls are queued faster than they run, or else it is Python that takes the time.
    """
    function()
    times: list[float] = []
    while sum(times) * calls < least or len(times) < 5:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            function()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / calls)
    return statistics.median(times)


def int8_peak() -> float:
    """Products and sums a second of a large int8 product."""
    size = 8192
    a = torch.randint(-128, 128, (size, size), dtype=torch.int8, device=DEVICE)
    return size**3 / seconds_of(lambda: torch._int_mm(a, a.T))


def layer(inputs: int, outputs: int, peak: float, kernels: list[str]) -> list[dict[str, Any]]:
    """Figures of one shape, forward and backward."""
    weight = torch.randint(-LARGEST, LARGEST, (outputs, inputs), dtype=torch.int16, device=DEVICE)
    half = torch.randn(outputs, inputs, device=DEVICE).bfloat16()
    found = []
    for rows in ROWS:
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            forward = direction == Direction.FORWARD
            columns, answered = (inputs, outputs) if forward else (outputs, inputs)
            x = torch.randint(-(2**31), 2**31, (rows, columns), dtype=torch.int32, device=DEVICE)
            out = torch.empty((rows, answered), dtype=torch.int32, device=DEVICE)
            w, floats = (weight.T, half.T) if forward else (weight, half)
            xs = torch.randn(rows, columns, device=DEVICE).bfloat16()
            times = {"bfloat16": seconds_of(lambda xs=xs, floats=floats: xs @ floats)}
            for name in kernels:
                kernel = KERNELS[name]
                times[name] = seconds_of(lambda kernel=kernel, x=x, w=w, out=out: kernel(x, w, out))
            ring, floats_here = RingWeight(weight[None], [outputs]), FloatWeight(half, [outputs])
            here, here_floats = x.cpu().pin_memory(), xs.cpu().pin_memory()
            times |= {
                "executor, ring": seconds_of(
                    lambda ring=ring, here=here, d=direction: through(ring, here, d), calls=1
                ),
                "executor, bfloat16": seconds_of(
                    lambda ring=floats_here, here=here_floats, d=direction: through(ring, here, d), calls=1
                ),
            }
            products = 7 * rows * inputs * outputs  # of digits
            found.append(
                {
                    "inputs": inputs,
                    "outputs": outputs,
                    "rows": rows,
                    "direction": direction.name.lower(),
                    "seconds": times,
                    "share of int8 peak": products / min(times[name] for name in kernels) / peak,
                }
            )
    return found


def through(weight: RingWeight | FloatWeight, rows: torch.Tensor, direction: Direction) -> list[torch.Tensor]:
    """From the host and back, as ``GroupExecutor.compute``."""
    return to_host(weight.apply(direction, 1, to_device([rows], torch.device(DEVICE))))


def main() -> None:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("out/gpu"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here")
    faults = {name: fault(KERNELS[name], DEVICE) for name in ("triton", "int8", "float64")}
    for name, reason in faults.items():
        console.print(f"{torch.cuda.get_device_name()}: {name}: {reason or 'exact'}", highlight=False)
    kernels = [name for name in ("triton", "int8") if not faults[name]]
    if not kernels:
        raise SystemExit("no kernel of the ring is exact here")
    fastest = next(name for name, kernel in KERNELS.items() if kernel is fastest_kernel(DEVICE))
    peak = int8_peak()
    found = []
    for inputs, outputs in SHAPES:
        console.print(f"{inputs} -> {outputs}", highlight=False)
        found += layer(inputs, outputs, peak, kernels)
    names = list(found[0]["seconds"])
    table = Table(title=f"One layer, ms; int8 peak {peak / 1e12:.0f} T products a second", highlight=False)
    for column in ("layer", "rows", "", *names, "ring / bfloat16", "share of int8 peak"):
        table.add_column(column)
    for each in found:
        times = each["seconds"]
        table.add_row(
            f"{each['inputs']} -> {each['outputs']}",
            str(each["rows"]),
            each["direction"],
            *(f"{1e3 * times[name]:.3f}" for name in names),
            f"{min(times[name] for name in kernels) / times['bfloat16']:.2f}",
            f"{each['share of int8 peak']:.0%}",
        )
    console.print(table)
    options.output.mkdir(parents=True, exist_ok=True)
    told = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "faults": faults,
        "chosen": fastest,
        "int8 peak": peak,
        "layers": found,
    }
    (options.output / "gpu.json").write_text(json.dumps(told, indent=1))
    console.print(f"wrote {options.output}/gpu.json")


if __name__ == "__main__":
    main()
