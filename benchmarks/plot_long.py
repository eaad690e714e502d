"""Draws what ``long_generation.py``, ``long_tuning.py`` and ``long_serving.py`` measured.

python benchmarks/plot_long.py out/bench docs/images/long-contexts.png
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter

COLOURS = {"transformers": "#b0b0b0", "host": "#4878a8", "disk": "#e0a030", "half": "#609060"}
LABELS = {"transformers": "transformers' cache", "half": "disk, half of the layers in memory"}
PLAN_COLOURS = {
    "as is": "#b0b0b0",
    "checkpointing, asked again": "#d0a0a0",
    "chunks, checkpointing, disk": "#609060",
    "windows in memory": "#4878a8",
    "windows on disk": "#e0a030",
}


def _tokens(axis: plt.Axes, counts: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [f"{count // 1024}K" for count in counts])
    axis.minorticks_off()
    axis.set_xlabel("tokens")


def _generation(time: plt.Axes, memory: plt.Axes, found: dict[str, Any]) -> None:
    contexts = sorted(map(int, set(found["times"]) - {"256"}))
    for place, colour in COLOURS.items():
        rounds = [
            [statistics.median(each) for each in found["times"][str(context)]["ms"][place]]
            for context in contexts
        ]
        middle = [statistics.median(each) for each in rounds]
        label = LABELS.get(place, place)
        time.plot(contexts, middle, "o-", color=colour, label=label)
        time.fill_between(contexts, list(map(min, rounds)), list(map(max, rounds)), color=colour, alpha=0.2)
        peaks = [found["memory"][place][str(context)]["mib"] / 1024 for context in contexts]
        memory.plot(contexts, peaks, "o-", color=colour, label=label)
    time.set_title("a new token, ms", fontsize=10)
    time.set_yscale("log", base=2)
    time.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    time.legend(frameon=False, fontsize=8)
    memory.set_title("generating: memory of the tenant, GiB", fontsize=10)
    for axis in (time, memory):
        _tokens(axis, contexts)


def _tuning(axis: plt.Axes, cases: list[dict[str, Any]]) -> None:
    for way, colour in PLAN_COLOURS.items():
        points = sorted((case["length"], case["peak_mib"] / 1024) for case in cases if case["way"] == way)
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color=colour, label=way)
    _tokens(axis, [1 << power for power in range(10, 16)])
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_title("tuning: memory of a step, GiB", fontsize=10)
    axis.legend(frameon=False, fontsize=8)


def _serving(axis: plt.Axes, found: dict[str, Any]) -> None:
    for place, runs in enumerate(found.values()):
        waits = [1e3 * waited for run in runs for waited in run["tokens"]]
        low, middle, high = (float(np.quantile(waits, share)) for share in (0.5, 0.95, 0.99))
        for value, colour in ((high, "#d0d8e0"), (middle, "#90aac8"), (low, "#4878a8")):
            axis.barh(place, value, color=colour, height=0.7)
        axis.text(high, place, f" {low:.0f}, {middle:.0f}, {high:.0f}", va="center", fontsize=8)
    axis.set_yticks(range(len(found)), list(found), fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(right=1.3 * axis.get_xlim()[1])
    axis.set_title("a chat's token beside tuning, ms: 50th, 95th, 99th percentile", fontsize=10)


def main() -> None:
    """Read a folder of results, write a picture."""
    folder, picture = map(Path, sys.argv[1:])
    read = {
        name: json.loads((folder / f"long_{name}.json").read_text())
        for name in ("generation", "tuning", "serving")
    }
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    _generation(axes[0, 0], axes[0, 1], read["generation"])
    _tuning(axes[1, 0], read["tuning"]["cases"])
    _serving(axes[1, 1], read["serving"])
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
