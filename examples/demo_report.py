"""How the demo shows itself: stages with progress, a picture, a table."""

from __future__ import annotations

import itertools
import sys
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

mpl.rcdefaults()  # in place of what a file of the working directory may say

SHOWN, _MOST = 3, 240  # held-out messages, and characters of each


class Display:
    """Stages on the terminal; each leaves one line."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)

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

    def show_logs(self, logs: list[Path]) -> None:
        """The ends of the executors' logs."""
        self.console.print("[bold red]the demo failed; the executors' last lines:[/]")
        for log in filter(Path.exists, logs):
            self.console.print(f"[bold]{escape(str(log))}[/]", soft_wrap=True)
            self.console.print(escape("\n".join(log.read_text(errors="replace").splitlines()[-30:])))


def draw_losses(losses: list[float], held_out: dict[int, float], privacy: str, path: Path) -> None:
    """The training loss of each step, and the held-out loss where it was measured."""
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="#1d3557", linewidth=1.4, label="training")
    axes.plot(list(held_out), list(held_out.values()), "o-", color="#f4a259", linewidth=1.8, label="held out")
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlabel("optimizer step")
    axes.set_title(f"Fine-tuning on private messages through the executors, {privacy}")
    axes.set_xlim(-0.5, len(losses) + 0.5)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def print_summary(console: Console, summary: dict[str, Any], output: Path) -> None:
    """Held-out answers, figures, what each party saw, and where the files are."""
    console.print()
    for answer in summary["answers"][:SHOWN]:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, key in (
            ("held-out message", "prompt"),
            ("right answer", "expected"),
            ("base model", "base"),
            ("adapter, executors", "adapted"),
            ("adapter, plain PEFT", "plain"),
        ):
            table.add_row(name, escape(_end(answer[key])))
        console.print(table)
        console.print()
    training, traffic, count = summary["training"], summary["traffic"], len(summary["answers"])
    table = Table(title=f"{training['steps']} steps, {training['seconds']:.0f} s, LoRA, {summary['privacy']}")
    for name in ("", "before", "after"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row(
        f"fields right to the letter, {count} messages",
        f"{summary['fields_right_before']:.0%}",
        f"{summary['fields_right_after']:.0%}",
    )
    table.add_row(
        "answers right to the letter",
        f"{training['right_base']} of {training['answered']}",
        f"{training['right_adapter']} of {training['answered']}",
    )
    table.add_row(
        "held-out perplexity", f"{training['perplexity_before']:.1f}", f"{training['perplexity_after']:.2f}"
    )
    console.print(table)
    lines = [
        (
            "plain PEFT",
            f"{summary['same_in_plain_transformers']} of {count} answers of the saved adapter are the same "
            "in plain transformers and PEFT",
        )
    ]
    if told := summary["gateway"]:
        same = "the same answer" if summary["gateway_gives_same_answer"] else "NOT the same answer"
        lines.append(
            (
                "gateway",
                f"{told['clients']} streams of OpenAI's client at once, half of the base model, half of the "
                f"adapter: {told['tokens_per_second']:.0f} tokens a second, the first after "
                f"{told['first_token_seconds']:.2f} s; {same} as above",
            )
        )
    lines.append(
        (
            "traffic",
            f"{traffic['requests']:,} requests and {traffic['effect_requests']:,} for masks, "
            f"{traffic['bytes_sent'] / 1e6:,.0f} MB sent, {traffic['bytes_received'] / 1e6:,.0f} MB received",
        )
    )
    for label, text in [*lines, *privacy_lines(summary["masking"])]:
        console.print(f"[bold]{label:<16}[/] {escape(text)}", soft_wrap=True)
    console.print(
        f"\nadapter, summary.json, loss.png and the logs are in {escape(str(output))}; "
        f"{summary['seconds']:.0f} s in all",
        soft_wrap=True,
    )


def _end(text: str) -> str:
    """The end of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST else f"… {line[-_MOST:]}"


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
