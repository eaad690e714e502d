"""The ring's own figures: products, verification, bytes, and one private layer against encryption.

    make bench                       # or: python benchmarks/ring.py --rounds 5
    python benchmarks/ring.py --products --instructions avx2

Products of one layer as executors compute them in each numerics, against float32's (oneDNN), in turn, weights
changing so that they come from memory; with AVX2 alone for all of them, if that is asked for. What
verification adds to an iteration of benchmarks/split_execution.py. Bytes on the wire against what the format
needs. One private layer of 768 -> 3072, one row, through the whole protocol, against the encrypted product of
concrete-ml-extensions, if that is installed (``pip install -e '.[encrypted-baseline]'``).
Writes ring.json and ring.png into --output.
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from common import LAYERS, arguments, executor, save, spread
from encrypted_product import encrypted_product_seconds
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, logging

import tenant_sdk
from provider.executor.weights import FloatWeight, GroupWeight, RingWeight
from shared.memory import keep_freed_memory
from shared.ring import product
from shared.ring.fixed_point import quantize_weight
from shared.ring.rows import quantize_and_mask, unmask_and_dequantize
from shared.wire.header import RINGS, Direction

logging.set_verbosity_error()
logging.disable_progress_bar()
NUMERICS = ["float32", "bfloat16", *RINGS]
ROWS = (1, 8, 64, 1024)
SHAPES = ((768, 768), (768, 3072), (3072, 768), (4096, 4096), (4096, 8192))  # inputs, outputs
# Inputs and outputs of the groups of the model in common.py, a layer.
GROUPS = ((768, 2304), (768, 768), (768, 4096), (2048, 768))
COLD_BYTES = 128 << 20  # of weights of one kind, more than the caches hold
console = Console(width=None if sys.stdout.isatty() else 150)


def seconds_of(function: Callable[[], object], repeats: int) -> float:
    """Median of some calls."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure_products(rounds: int) -> list[dict[str, Any]]:
    """Seconds of each product, by shape, rows and direction."""
    generator = torch.Generator().manual_seed(0)
    results = []
    for inputs, outputs in SHAPES:
        count = max(2, COLD_BYTES // (2 * inputs * outputs))
        some = [torch.randn(outputs, inputs) for _ in range(min(64, max(2, count // 2)))]
        weights: dict[str, list[GroupWeight]] = {
            "float32": [FloatWeight(weight, [outputs]) for weight in some],
            "bfloat16": [FloatWeight(weight.bfloat16(), [outputs]) for weight in some],
        }
        for name, planes in RINGS.items():
            weights[name] = [RingWeight(quantize_weight(weight, planes).planes, [outputs]) for weight in some]
        for rows, direction in itertools.product(ROWS, (Direction.FORWARD, Direction.BACKWARD)):
            columns = inputs if direction == Direction.FORWARD else outputs
            x = torch.randn(rows, columns, generator=generator)
            integers = torch.randint(-(2**31), 2**31, (rows, columns), generator=generator, dtype=torch.int32)
            given: dict[str, torch.Tensor] = {"float32": x, "bfloat16": x.bfloat16()} | dict.fromkeys(
                RINGS, integers
            )
            cycles = {name: itertools.cycle(each) for name, each in weights.items()}
            ways: dict[str, Callable[[], object]] = {
                name: lambda cycle=cycles[name], rows=given[name], direction=direction: next(cycle).apply(
                    direction, 1, [rows]
                )
                for name in NUMERICS
            }
            times: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(rounds + 1):
                for name, way in ways.items():
                    estimate = seconds_of(way, 1)
                    repeats = max(3, min(50, int(0.1 / max(estimate, 1e-6))))
                    if number:
                        times[name].append(seconds_of(way, repeats))
            name = direction.name.lower()
            results.append({"inputs": inputs, "outputs": outputs, "rows": rows, "direction": name, **times})
            console.print(f"product {inputs} -> {outputs}, {rows} rows, {name}", highlight=False)
    return results


def measure_verification(rounds: int) -> dict[str, list[float]]:
    """Seconds that an iteration's worth of rows takes at the tenant, with and without the check."""
    rows = 1024
    generator = torch.Generator().manual_seed(0)
    times: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(rounds + 1):
        sums = dict.fromkeys(times, 0.0)
        for inputs, outputs in GROUPS:
            for columns, results, scaled in ((inputs, outputs, False), (outputs, inputs, True)):
                x = torch.randn(rows, columns, generator=generator)
                scales = torch.rand(columns if scaled else results, generator=generator)
                request = torch.zeros((rows, columns), dtype=torch.int32)
                answer = torch.zeros((rows, results), dtype=torch.int32)
                effect = torch.zeros_like(answer)
                out = torch.empty(rows, results)
                factor = torch.randint(-(2**50), 2**50, (columns,), generator=generator)
                challenge = torch.randint(-(2**31), 2**31, (results,), generator=generator)
                challenge = challenge.to(torch.int32)
                for name in times:
                    check = name == "with"
                    started = time.perf_counter()
                    hidden = quantize_and_mask(
                        [x], scales if scaled else None, 1e6, request, factor if check else None
                    )
                    assert hidden is not None
                    unmask_and_dequantize(
                        answer,
                        [effect],
                        hidden[0],
                        None if scaled else scales,
                        [out],
                        challenge if check else None,
                        hidden[1],
                    )
                    sums[name] += LAYERS * (time.perf_counter() - started)
        if number:
            for name, value in sums.items():
                times[name].append(value)
    return times


def wire_bytes(session: tenant_sdk.Session) -> tuple[int, int]:
    """Bytes that the provider's connection has sent and received, as TCP counts them."""
    sock = session.executor.connection.channel._sock
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    sent, received = struct.unpack_from("<QQ", info, 120)
    return sent, received


def measure_private_layer(work: Path, rounds: int) -> dict[str, Any]:
    """One row of 768 -> 3072 through the whole protocol, and bytes a row for several row counts."""
    folder = work / "model"
    config = LlamaConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=1, num_attention_heads=12, vocab_size=64
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    result: dict[str, Any] = {"asked": [], "ahead": [], "bytes": []}
    with (
        executor(folder, work / "provider", "--numerics", "ring") as provider,
        executor(folder, work / "source", "--numerics", "ring") as source,
    ):
        options = {"mask_sources": [source.url], "mask_source_token": source.token}
        options |= {"mask_source_ca": source.ca, "allow_same": ["all"]}
        for name, budget in (("asked", 0), ("ahead", 256)):
            with provider.connect(mask_budget_mib=budget, **options) as session:
                group = next(i for i, g in enumerate(session.manifest.groups) if len(g.members) == 2)

                def layer(rows: int, session: tenant_sdk.Session = session, group: int = group) -> None:
                    x = torch.ones(rows, 768)
                    session.products.submit(group, Direction.FORWARD, 1, [x]).result()

                for _ in range(20):
                    layer(1)
                for _ in range(rounds):
                    result[name].append(seconds_of(lambda: layer(1), 100))
                if name == "asked":
                    for rows in (1, 64, 1024):
                        before = wire_bytes(session)
                        for _ in range(10):
                            layer(rows)
                        time.sleep(0.1)  # acknowledgements are counted when they arrive
                        after = wire_bytes(session)
                        up, down = ((b - a) / 10 / rows for a, b in zip(before, after, strict=True))
                        result["bytes"].append(
                            {
                                "rows": rows,
                                "up": up,
                                "down": down,
                                "least up": 4 * 768,
                                "least down": 4 * 3072,
                            }
                        )
    return result


def show_products(products: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title="One layer, ms: median (range); ratios to float32")
    for column in ("layer", "rows", "", *NUMERICS, "ring / float32", "fine / float32"):
        table.add_column(column)
    for each in products:
        middle = {name: statistics.median(each[name]) for name in NUMERICS}
        table.add_row(
            f"{each['inputs']} -> {each['outputs']}",
            str(each["rows"]),
            each["direction"],
            *(spread(each[name], 1e3) for name in NUMERICS),
            *(f"{middle[name] / middle['float32']:.2f}" for name in RINGS),
        )
    console.print(table)


def show(products: list[dict[str, Any]], verification: dict[str, list[float]], layer: dict[str, Any]) -> None:
    """Print the tables."""
    show_products(products)
    extra = statistics.median(verification["with"]) - statistics.median(verification["without"])
    console.print(
        f"verification: hiding and revealing the rows of an iteration takes "
        f"{spread(verification['with'])} s with the check, {spread(verification['without'])} s without: "
        f"{extra:.2f} s an iteration",
        highlight=False,
    )
    table = Table(title="Bytes a row on the wire, 768 -> 3072: measured by TCP, and what the format needs")
    for column in ("rows", "up", "least", "ratio", "down", "least", "ratio"):
        table.add_column(column)
    for each in layer["bytes"]:
        cells = [str(each["rows"])]
        for way in ("up", "down"):
            least = each[f"least {way}"]
            cells += [f"{each[way]:.0f}", str(least), f"{each[way] / least:.3f}"]
        table.add_row(*cells)
    console.print(table)
    console.print(
        f"one private layer, 768 -> 3072, one row, verified: {spread(layer['asked'], 1e3)} ms if the effect "
        f"is asked for as well, {spread(layer['ahead'], 1e3)} ms if it is there",
        highlight=False,
    )
    if layer["encrypted"]:
        middle = statistics.median(layer["encrypted"])
        console.print(
            f"the same encrypted (concrete-ml-extensions): {spread(layer['encrypted'], 1, 1)} s: "
            f"{middle / statistics.median(layer['asked']):,.0f} and "
            f"{middle / statistics.median(layer['ahead']):,.0f} times as long",
            highlight=False,
        )
    else:
        console.print("concrete-ml-extensions is not installed; no comparison with encryption")


def plot(products: list[dict[str, Any]], path: Path) -> None:
    """The ratio of the ring's product to float32's, by rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for inputs, outputs in SHAPES:
        some = [
            each
            for each in products
            if (each["inputs"], each["outputs"], each["direction"]) == (inputs, outputs, "forward")
        ]
        ratios = [statistics.median(e["ring"]) / statistics.median(e["float32"]) for e in some]
        axis.plot([e["rows"] for e in some], ratios, marker="o", label=f"{inputs} → {outputs}")
    axis.axhline(1, color="#888888", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ROWS, [str(rows) for rows in ROWS])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("rows in a product")
    axis.set_ylabel("time in the ring / time in float32")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def use_only(instructions: str) -> None:
    """Compute with these and no better ones; oneDNN and torch, if nobody asked them yet."""
    known = {"avx2": "AVX2", "avx512": "AVX512_CORE", "avx512-vnni": "AVX512_CORE_VNNI"}
    os.environ["ONEDNN_MAX_CPU_ISA"] = known.get(instructions, "ALL")
    os.environ["ATEN_CPU_CAPABILITY"] = "avx2" if instructions == "avx2" else "avx512"
    if instructions == "avx2":
        NUMERICS.remove("bfloat16")  # for which there are no instructions
    kernel = product.KERNELS[instructions]
    product.KERNELS.clear()
    product.KERNELS[instructions] = kernel


def main() -> None:
    """Run everything."""
    parser = arguments(__doc__, rounds=5, output="out/bench")
    parser.add_argument("--products", action="store_true", help="only those")
    parser.add_argument("--instructions", help="for products: avx2, avx512, avx512-vnni, amx; default: all")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    keep_freed_memory()
    if options.instructions:
        use_only(options.instructions)
    products = measure_products(options.rounds)
    if options.products:
        show_products(products)
        save(options.output / "products.json", products)
        return
    verification = measure_verification(options.rounds)
    with tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name:
        console.print("one private layer")
        layer = measure_private_layer(Path(name), options.rounds)
    layer["encrypted"] = []
    for seed in range(min(options.rounds, 3)):
        console.print("one encrypted layer; this takes half a minute")
        measured = encrypted_product_seconds(768, 3072, seed)
        if measured is None:
            break
        layer["encrypted"].append(measured[0])
    show(products, verification, layer)
    data = {"products": products, "verification": verification, "layer": layer}
    save(options.output / "ring.json", data)
    plot(products, options.output / "ring.png")
    console.print(f"wrote {options.output}/ring.json and .png")


if __name__ == "__main__":
    main()
