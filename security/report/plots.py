"""The report's pictures, as SVG texts that stand in the page itself."""

from __future__ import annotations

import io
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from security.attacks.masking import Randomness
from security.recordings.capture import bank_name
from security.verdicts.plan import AuditResult

mpl.rcdefaults()  # matplotlib reads a file of the working directory, which others may have written
mpl.rcParams.update(
    {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def reuse_curve(result: AuditResult) -> str:
    """Tokens recovered against messages seen, for each number of masks."""
    figure, axes = plt.subplots(figsize=(5.6, 3.4))
    for label, points in result.figures["mask reuse"].items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=bank_name(label))
    axes.axhline(0.95, color="#777", linewidth=0.9, linestyle=":", label="95 %")
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="messages seen, each with a known first token",
        ylabel="share of tokens read",
        ylim=(-0.02, 1.03),
    )
    axes.legend(frameon=False, loc="lower right")
    return _svg(figure)


def extraction_curve(result: AuditResult) -> str:
    """Error of the stolen adapter against the tokens that passed through it, in the clear."""
    figure, axes = plt.subplots(figsize=(5.6, 3.4))
    axes.plot(
        *zip(*result.figures["adapter error by tokens"], strict=True),
        marker="o",
        markersize=3,
        color="#b30000",
        label="first layer",
    )
    axes.axhline(1e-2, color="#777", linewidth=0.9, linestyle=":", label="bound of the control")
    axes.axvline(
        result.about["width"], color="#777", linewidth=0.9, linestyle="--", label="inputs of the layer"
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="tokens seen", ylabel="relative error of the stolen adapter")
    axes.legend(frameon=False)
    return _svg(figure)


def byte_histogram(result: AuditResult) -> str:
    """How often each byte value was sent, over what uniform bytes would do: a panel for each stream."""
    figure, panels = plt.subplots(
        len(result.randomness), figsize=(5.6, 2.4 * len(result.randomness)), sharex=True, squeeze=False
    )
    for (mode, found), axes in zip(result.randomness.items(), panels[:, 0], strict=True):
        relative = found.histogram / found.histogram.mean()
        band = _band(found)
        limit = 1.2 * max(3 * band, float(np.abs(relative - 1).max()))
        axes.axhspan(1 - band, 1 + band, color="#ccc", zorder=0)
        axes.plot(relative, linewidth=1, color="#225ea8")
        axes.set(ylabel="frequency / uniform", ylim=(1 - limit, 1 + limit))
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.set_title(f"{mode}, {found.bytes_tested / 1e6:,.0f} MB", fontsize=10, loc="left")
    panels[-1, 0].set(xlabel="byte value")
    figure.tight_layout()
    return _svg(figure)


def outside_band(randomness: Randomness) -> int:
    """How many of the 256 byte values lie outside the 99 % band, where 2 or 3 are expected."""
    return int((np.abs(randomness.histogram / randomness.histogram.mean() - 1) > _band(randomness)).sum())


def _band(randomness: Randomness) -> float:
    """How far from the mean, in units of it, the frequency of a uniform byte is 1 time in 100."""
    return float(2.58 / np.sqrt(randomness.histogram.mean()))


def timing(result: AuditResult) -> str:
    """Seconds of a product against its rows, as the provider sees them under one-time masks."""
    points: Any = np.array(result.figures["traffic"]["rows and seconds"], float)
    figure, axes = plt.subplots(figsize=(5.6, 3.4))
    axes.scatter(points[:, 0], points[:, 1] * 1e3, s=6, alpha=0.4, color="#225ea8")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="rows of the request", ylabel="ms from arrival to the product")
    return _svg(figure)
