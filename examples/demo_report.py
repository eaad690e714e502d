"""How the demo shows itself: stages with progress, a picture, a table."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table


class Display:
    """Stages on the terminal; each leaves one line."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)

    @contextmanager
    def stage(self, what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Show a spinner, or a bar of ``total`` steps which the yielded function moves."""
        started = time.perf_counter()
        if self.console.is_terminal:
            columns = [SpinnerColumn(), TextColumn(what)]
            columns += [BarColumn(), MofNCompleteColumn()] if total else []
            with Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True) as progress:
                task = progress.add_task(what, total=total)
                yield lambda: progress.advance(task)
        else:
            print(f"  {what} ...", flush=True)
            done = itertools.count(1)
            yield lambda: self._line(next(done), total)
        seconds = time.perf_counter() - started
        self.console.print(f"[green]✓[/] {escape(what)}  [dim]{seconds:.1f} s[/]", soft_wrap=True)

    @staticmethod
    def _line(done: int, total: int | None) -> None:
        if done % 20 == 0:
            print(f"    {done} of {total}", flush=True)

    def show_logs(self, logs: list[Path], lines: int = 30) -> None:
        """The ends of the executors' logs."""
        self.console.print("[bold red]the demo failed; the executors' last lines:[/]")
        for log in filter(Path.exists, logs):
            self.console.print(f"[bold]{escape(str(log))}[/]", soft_wrap=True)
            self.console.print(escape("\n".join(log.read_text(errors="replace").splitlines()[-lines:])))


def draw_losses(remote: list[float], local: list[float], privacy: str, path: Path) -> None:
    """Both loss curves on top of each other, and their difference below."""
    steps = range(1, len(remote) + 1)
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(7.2, 5.4), height_ratios=(3, 1.3), layout="constrained"
    )
    above.plot(steps, local, color="#f4a259", linewidth=5, solid_capstyle="round", label="all local")
    above.plot(steps, remote, color="#1d3557", linewidth=1.4, label=f"through the executors, {privacy}")
    above.set_ylabel("training loss (nats per token)")
    above.set_title("Fine-tuning on private notes: the same training in two places")
    above.legend(frameon=False)
    difference = [a - b for a, b in zip(remote, local, strict=True)]
    power = math.floor(math.log10(max(map(abs, difference)) or 1))
    superscript = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    below.axhline(0, color="#999999", linewidth=0.8)
    below.plot(steps, [each / 10**power for each in difference], color="#b23a48", linewidth=1.2)
    below.set_ylabel(f"difference (10{superscript} nats)")
    below.set_xlabel("optimizer step")
    below.set_xlim(0.5, len(remote) + 0.5)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.align_ylabels()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def print_table(console: Console, summary: dict[str, Any], output: Path) -> None:
    """The figures side by side, then the texts and where the files are."""
    remote, local, traffic = summary["executor"], summary["local"], summary["traffic"]
    table = Table(
        title=f"{summary['steps']} steps of {summary['tokens_per_step']} tokens, LoRA, {summary['privacy']}"
    )
    table.add_column("")
    table.add_column("through the executors", justify="right")
    table.add_column("all local", justify="right")
    rows = [
        ("held-out perplexity before", "perplexity_before", ".1f"),
        ("held-out perplexity after", "perplexity_after", ".2f"),
        ("seconds to fine-tune", "train_seconds", ".1f"),
        ("seconds to generate", "generate_seconds", ".1f"),
    ]
    table.add_row("first loss", f"{remote['losses'][0]:.4f}", f"{local['losses'][0]:.4f}")
    table.add_row("last loss", f"{remote['losses'][-1]:.4f}", f"{local['losses'][-1]:.4f}")
    for name, key, form in rows:
        table.add_row(name, f"{remote[key]:{form}}", f"{local[key]:{form}}")
    table.add_row("largest difference of loss", f"{summary['largest_loss_difference']:.1e}", "")
    table.add_row("same greedy tokens", "yes" if summary["same_tokens"] else "no", "")
    same = summary["saved_adapter_gives_same_tokens"]
    table.add_row("saved adapter, plain PEFT: same tokens", "yes" if same else "no", "")
    table.add_row(
        "round trips of the session",
        f"{traffic['requests']:,} + {traffic['effect_requests']:,} for masks",
        "0",
    )
    sent, received = traffic["bytes_sent"] / 1e6, traffic["bytes_received"] / 1e6
    table.add_row("sent / received in the session", f"{sent:,.0f} MB / {received:,.0f} MB", "0")
    console.print(table)
    console.print(f"[bold]prompt[/]           {escape(summary['prompt'])}", soft_wrap=True)
    for label, key in (("base model", "text_base_model"), ("with the adapter", "text_executor")):
        text = " ".join(summary[key].split())
        console.print(f"[bold]{label:<16}[/] {escape(text)}", soft_wrap=True)
    if told := summary["gateway"]:
        same = "the same" if summary["gateway_gives_same_tokens"] else "NOT the same"
        console.print(
            f"[bold]{'gateway':<16}[/] {told['clients']} streams of OpenAI's client at once, half of the "
            f"base model, half of the adapter: {told['tokens_per_second']:.0f} tokens a second, the first "
            f"after {told['first_token_seconds']:.2f} s; {same} tokens as above",
            soft_wrap=True,
        )
    console.print()
    for label, text in privacy_lines(summary["masking"]):
        console.print(f"[bold]{label:<16}[/] {escape(text)}", soft_wrap=True)
    console.print(
        f"\nadapter, summary.json, loss.png and the logs are in {escape(str(output))}; "
        f"{summary['seconds']:.0f} s in all",
        soft_wrap=True,
    )


def privacy_lines(masking: dict[str, Any]) -> list[tuple[str, str]]:
    """What was masked, who saw what, what was checked, in words."""
    saw = masking["provider_saw"]
    rows = f"{saw['rows']:,} rows of activations and gradients, {saw['bytes'] / 1e6:,.0f} MB"
    source = masking.get("mask_source_saw")
    if source is None:
        return [("provider saw", f"{rows}; masks: {saw['masked']}, worth little or nothing (SECURITY.md)")]
    return [
        ("masked", f"{rows}: {saw['masked']}"),
        ("provider saw", "those masked rows, which are uniform random integers to it, and when they came"),
        ("mask source saw", f"{source['seeds']:,} random seeds, {source['bytes'] / 1e3:,.0f} kB, and no row"),
        (
            "checked",
            f"{masking['checked_rows']:,} rows of answers, all of them right; the other "
            f"{masking['rows_for_fingerprints']:,} rows were for the fingerprints",
        ),
        (
            "trust",
            f"{len(masking['authorities'])} authorities ("
            + ", ".join(f"{name}: {shown}…" for name, shown in masking["authorities"].items())
            + f") and {masking['tokens']} tokens, so neither operator can act as the other or as the tenant",
        ),
        (
            "promise",
            "this one machine ran both executors, so it could subtract the masks (allow_same); with two "
            "operators that do not collude, neither learns of rows more than their numbers, kinds and times",
        ),
    ]
