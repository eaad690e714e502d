"""Draws what ``serving.py`` measured.

python benchmarks/plot_serving.py out/bench/serving.json docs/images/serving.png
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLUE, GREY, ORANGE = "#4878a8", "#b0b0b0", "#e0a030"


def _batching(axis: plt.Axes, data: dict[str, Any]) -> None:
    policies = ("none", "opportunistic")
    rates = [
        statistics.median(sum(run["passes"].values()) / run["seconds"] for run in data[policy])
        for policy in policies
    ]
    _bars(axis, list(policies), rates, [GREY, BLUE])
    axis.set_title("32 tenants decode: tokens a second", fontsize=10)


def _dedicated(axis: plt.Axes, data: dict[str, Any]) -> None:
    for place, work in enumerate(("decode", "tune")):
        base = statistics.median(run["done"] for run in data[f"{work}, a model each"])
        for shift, (carrier, colour) in enumerate((("over TLS", BLUE), ("co-located", ORANGE))):
            ratio = statistics.median(run["done"] for run in data[f"{work}, {carrier}"]) / base
            at = place + 0.4 * shift - 0.2
            axis.bar(at, ratio, width=0.36, color=colour, label=carrier if not place else None)
            axis.text(at, ratio, f"{ratio:.2f}", ha="center", va="bottom")
    axis.axhline(1, color=GREY, linewidth=1)
    axis.set_xticks([0, 1], ["8 decode", "4 tune"])
    axis.set_title("one executor: times a model each", fontsize=10)
    axis.set_ylim(top=1.3 * axis.get_ylim()[1])
    axis.legend(frameon=False, loc="upper right", ncols=2)


def _memory(axis: plt.Axes, data: dict[str, Any]) -> None:
    counts = sorted(data["local"], key=int)
    for side, colour, label in (("local", GREY, "a model each"), ("shared", BLUE, "one executor")):
        sizes = [statistics.median(r["memory_mib"] for r in data[side][count]) / 1024 for count in counts]
        axis.plot([int(count) for count in counts], sizes, "o-", color=colour, label=label)
    axis.set_ylim(bottom=0)
    axis.set_xticks([int(count) for count in counts])
    axis.set_xlabel("tuning tenants")
    axis.set_title("memory of all together, GiB", fontsize=10)
    axis.legend(frameon=False)


def _coserving(axis: plt.Axes, data: dict[str, Any]) -> None:
    for name, colour in (("chats alone", GREY), ("together", BLUE), ("together, taking turns", ORANGE)):
        latencies = sorted(1e3 * v for run in data[name] for v in run["tokens"])
        share = np.arange(1, len(latencies) + 1) / len(latencies)
        axis.plot(latencies, 100 * share, color=colour, label=name)
    axis.set_xlabel("milliseconds a token, as the tenant sees it")
    axis.set_ylabel("% of tokens")
    axis.set_title("decoding beside fine-tuning", fontsize=10)
    axis.set_xlim(right=1.6 * axis.get_xlim()[1])
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def _bars(axis: plt.Axes, names: list[str], values: list[float], colours: list[str]) -> None:
    axis.bar(names, values, color=colours)
    for place, value in enumerate(values):
        axis.text(place, value, f"{value:.1f}", ha="center", va="bottom")


PANELS: dict[str, Callable[[plt.Axes, dict[str, Any]], None]] = {
    "batching": _batching,
    "dedicated": _dedicated,
    "memory": _memory,
    "coserving": _coserving,
}


def plot(found: dict[str, Any], path: Path) -> None:
    """Of what was measured, a panel each; nothing if there is none."""
    panels = [name for name in PANELS if name in found]
    if not panels:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(3.9 * len(panels), 3.4), layout="constrained")
    for axis, name in zip(np.atleast_1d(axes), panels, strict=True):
        axis.spines[["top", "right"]].set_visible(False)
        PANELS[name](axis, found[name])
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
