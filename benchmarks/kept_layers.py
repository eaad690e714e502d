"""Layers that a tenant keeps within a budget: tokens a second and bytes, beside none, at several distances.

    python benchmarks/kept_layers.py
    python benchmarks/kept_layers.py --model out/models/SmolLM2-135M-Instruct

Provider and mask source are processes of this machine, behind a relay that holds back what passes. For each
distance and share of the weights, a session with a budget of that share decodes, and trains LoRA of rank 8 on
all linear layers. Sessions without a budget are measured before and after, in the same way. The estimate of a
session with a budget is the time without one less what the session says that it saves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from common import Executor, executor, write_model
from distance import away
from matplotlib import pyplot
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import logging

import tenant_sdk

ROWS = 256  # tokens of a training step
console = Console(width=None if sys.stdout.isatty() else 120)


class Measured(NamedTuple):
    """One session: seconds of a token, seconds and bytes a token of a training step, and what it kept."""

    token: float
    step: float
    bytes: float
    kept: Any


def measure(pair: tuple[Executor, Executor], gib: float, work: str, tokens: int) -> Measured:
    """Decode, or train, in a session of its own with that budget."""
    provider, source = pair
    with tenant_sdk.connect(
        provider.url,
        token=provider.token,
        ca=provider.ca,
        mask_sources=[source.url],
        mask_source_token=source.token,
        mask_source_ca=source.ca,
        allow_same={"all"},
        keep_gib=gib,
        keep_for=work,
    ) as session:
        model: Any = session.load_model(progress=False)
        torch.manual_seed(0)
        ids = torch.randint(0, 256, (1, ROWS))
        if work == "generation":
            options = {"do_sample": False, "pad_token_id": 0}
            model.generate(ids[:, :8], max_new_tokens=4, min_new_tokens=4, **options)
            began = time.perf_counter()
            model.generate(ids[:, :8], max_new_tokens=tokens + 1, min_new_tokens=tokens + 1, **options)
            return Measured((time.perf_counter() - began) / tokens, 0.0, 0.0, session.kept)
        adapted = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
        times, before = [], 0
        for _ in range(3):
            before, began = session.stats.bytes_sent + session.stats.bytes_received, time.perf_counter()
            adapted(ids, labels=ids).loss.backward()
            times.append(time.perf_counter() - began)
        moved = session.stats.bytes_sent + session.stats.bytes_received - before
        return Measured(0.0, statistics.median(times), moved / ROWS, session.kept)


def main() -> None:
    """Print a table; write kept_layers.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="default: 12 layers, d = 768, random weights")
    parser.add_argument("--distances", type=float, nargs="+", default=[0.0, 1.0, 10.0], help="ms")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.125, 0.25, 0.5, 1.0])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--works", nargs="+", default=["generation", "training"])
    parser.add_argument("--output", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    table = Table(title="with a budget for kept layers, beside none")
    for title in (
        "work",
        "ms away",
        "share",
        "GiB",
        "none, ms",
        "kept, ms",
        "times",
        "estimate, ms",
        "bytes",
    ):
        table.add_column(title, justify="right")
    found = []
    with tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        model = options.model or folder / "model"
        if options.model is None:
            write_model(model, layers=12, width=768, feed_forward=2048, heads=12, vocabulary=1000)
        both = [
            stack.enter_context(executor(model, folder / party, "--numerics", "ring"))
            for party in ("provider", "source")
        ]
        with tenant_sdk.connect(both[0].url, token=both[0].token, ca=both[0].ca, privacy="plain") as session:
            groups = [each for each in session.manifest.groups if not each.head]
        size = 4 * sum(each.inputs * sum(m.outputs for m in each.members) for each in groups) / 2**30
        for distance in options.distances:
            for work in options.works:
                with ExitStack() as relays:
                    pair = tuple(relays.enter_context(away(each, distance / 1e3)) for each in both)
                    row(pair, size, work, distance, options, table, found)
    console.print(table)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "kept_layers.json").write_text(json.dumps(found))
    plot(found, options.output / "kept_layers.png")


def plot(found: list[Any], path: Path) -> None:
    """Times as fast as without kept layers, over the distance, and bytes, for each share."""
    tuning = {each[2]: each[6] for each in found if each[0] == "training"}
    panels = 2 if tuning else 1
    figure, axes = pyplot.subplots(1, panels, figsize=(5 * panels, 4), constrained_layout=True, squeeze=False)
    speed, *others = axes.flat
    for share in sorted({each[2] for each in found}):
        decoding = [each for each in found if each[0] == "generation" and each[2] == share]
        ticks = [f"{each[1]:g} ms" for each in decoding]
        speed.plot(ticks, [1 / each[4] for each in decoding], "o-", label=f"{share:.0%} of the weights")
        speed.plot(ticks, [1 / each[5] for each in decoding], "x:", color=speed.lines[-1].get_color())
    first = {each[1]: each for each in found if each[0] == "generation"}
    speed.plot(
        [f"{each:g} ms" for each in first], [1 / row[3] for row in first.values()], "ks-", label="none"
    )
    speed.set(
        xlabel="round trip", ylabel="tokens a second", title="decoding (dotted: the session's estimate)"
    )
    speed.set_yscale("log")
    for set_formatter in (speed.yaxis.set_major_formatter, speed.yaxis.set_minor_formatter):
        set_formatter(lambda value, _: f"{value:.3g}")
    speed.legend()
    for moved in others:
        moved.bar([f"{share:.0%}" for share in tuning], list(tuning.values()))
        moved.set(
            xlabel="weights that are kept", ylabel="bytes, of those without", title="training", ylim=(0, 1)
        )
    figure.savefig(path, dpi=120)


def row(
    pair: Any, size: float, work: str, distance: float, options: Any, table: Table, found: list[Any]
) -> None:
    """All shares at one distance, each between two sessions that keep nothing."""
    none = [measure(pair, 0.0, work, options.tokens)]
    for share in options.shares:
        kept = measure(pair, share * size * 1.001, work, options.tokens)
        none.append(measure(pair, 0.0, work, options.tokens))
        console.print(f"{work}, {distance:g} ms, {share:g}: {kept.kept}", soft_wrap=True)
        side = "token" if work == "generation" else "step"
        without = statistics.mean(getattr(each, side) for each in none[-2:])
        with_it, saved = getattr(kept, side), kept.kept.seconds[1] - kept.kept.seconds[0]
        estimate = without - saved * (1 if work == "generation" else ROWS)
        bytes_ = (
            kept.bytes / none[-1].bytes
            if none[-1].bytes
            else sum(kept.kept.bytes[0]) / sum(kept.kept.bytes[1])
        )
        cells = [1e3 * without, 1e3 * with_it]
        table.add_row(
            work,
            f"{distance:g}",
            f"{share:g}",
            f"{kept.kept.size / 2**30:.3f}",
            *(f"{each:.0f}" for each in cells),
            f"{without / with_it:.2f}",
            f"{1e3 * estimate:.0f}",
            f"{bytes_:.2f}",
        )
        found.append([work, distance, share, without, with_it, estimate, bytes_])


if __name__ == "__main__":
    main()
