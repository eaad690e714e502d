"""The report's pictures, as SVG texts that stand in the page itself."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from security.capture import ELSEWHERE, ONE_TIME, PLAIN, RING_BANK, RING_MASKS, SAME
from security.plan import BOTH, PROVIDER, Result

COLUMNS = (
    (PLAIN, PROVIDER),
    (SAME, PROVIDER),
    (ELSEWHERE, PROVIDER),
    (RING_BANK, PROVIDER),
    (ONE_TIME, PROVIDER),
    (ONE_TIME, BOTH),
)
mpl.rcParams.update(
    {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def heat_map(result: Result) -> str:
    """Success over chance of every attack on every view: 0 white, 1 dark."""
    names = list(dict.fromkeys(f.attack for f in result.findings if (f.mode, f.sees) in COLUMNS))
    grid = np.full((len(names), len(COLUMNS)), np.nan)
    marks = [["" for _ in COLUMNS] for _ in names]
    for finding in result.findings:
        if (finding.mode, finding.sees) not in COLUMNS:
            continue
        row, column = names.index(finding.attack), COLUMNS.index((finding.mode, finding.sees))
        if not finding.success.trials:
            marks[row][column] = "sees\nnone"
            continue
        above = (abs(finding.success.value) - finding.chance) / (1 - finding.chance)
        grid[row, column] = min(max(above, 0.0), 1.0) if finding.beats_chance else 0.0
        marks[row][column] = f"{finding.success.value:.1%}" if finding.beats_chance else "chance"
    figure, axes = plt.subplots(figsize=(12.5, 0.42 * len(names) + 1.6))
    image = axes.imshow(grid, cmap="OrRd", vmin=0, vmax=1.15, aspect="auto")
    bar = figure.colorbar(
        image,
        ax=axes,
        shrink=0.5,
        fraction=0.02,
        pad=0.01,
        ticks=[0, 0.5, 1],
        boundaries=np.linspace(0, 1, 101),
    )
    bar.set_label("success above chance", fontsize=8)
    for row, line in enumerate(marks):
        for column, mark in enumerate(line):
            dark = np.nan_to_num(grid[row, column]) > 0.6
            axes.text(
                column, row, mark, ha="center", va="center", fontsize=8, color="white" if dark else "#333"
            )
    labels = [f"{mode}\nseen by\n{sees}" for mode, sees in COLUMNS]
    axes.set_xticks(range(len(COLUMNS)), [re.sub("(, | on the | and )", "\\1\n", label) for label in labels])
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0, labelsize=8)
    axes.xaxis.tick_top()
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xticks(np.arange(len(COLUMNS) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(names) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="minor", length=0)
    return _svg(figure)


def reuse_curve(result: Result) -> str:
    """Tokens recovered against messages seen, for each number of masks."""
    figure, axes = plt.subplots(figsize=(5.6, 3.4))
    for label, points in result.figures["mask reuse"].items():
        name = f"floats, {label}" if label.endswith("masks") else f"ring, {RING_MASKS} masks"
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.axhline(0.95, color="#999", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="messages seen, each with a known first token",
        ylabel="fraction of tokens right",
        ylim=(-0.02, 1.03),
    )
    axes.legend(frameon=False, fontsize=8)
    return _svg(figure)


def extraction_curve(result: Result) -> str:
    """Error of the stolen adapter against the tokens that passed through it, in the clear."""
    figure, axes = plt.subplots(figsize=(5.6, 3.4))
    axes.plot(
        *zip(*result.figures["adapter error by tokens"], strict=True),
        marker="o",
        markersize=3,
        color="#b30000",
    )
    axes.axhline(1e-2, color="#999", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="tokens seen", ylabel="relative error of the stolen adapter")
    return _svg(figure)


def byte_histogram(result: Result) -> str:
    """How often each byte value was sent, over what uniform bytes would do, with their 99 % band."""
    figure, axes = plt.subplots(figsize=(5.6, 3.4))
    for mode, found in result.randomness.items():
        expected = found.histogram.sum() / 256
        axes.plot(
            found.histogram / expected, linewidth=1, label=f"{mode} ({found.bytes_tested / 1e6:.0f} MB)"
        )
    tested = min(found.bytes_tested for found in result.randomness.values())
    band = 2.58 / np.sqrt(tested / 256)
    axes.axhspan(1 - band, 1 + band, color="#ddd", zorder=0)
    axes.set(xlabel="byte value", ylabel="frequency / uniform", ylim=(1 - 6 * band, 1 + 6 * band))
    axes.legend(frameon=False, fontsize=8)
    return _svg(figure)


def timing(result: Result) -> str:
    """Seconds of a product against its rows, as the provider sees them under one-time masks."""
    points: Any = np.array(result.figures["traffic"]["rows and seconds"], float)
    figure, axes = plt.subplots(figsize=(5.6, 3.4))
    jitter = np.exp(np.random.default_rng(0).normal(0, 0.02, len(points)))
    axes.scatter(points[:, 0] * jitter, points[:, 1] * 1e3, s=6, alpha=0.5, color="#225ea8")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="rows of a request = tokens of a pass", ylabel="ms until the product is there")
    return _svg(figure)
