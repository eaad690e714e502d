"""How `symbiosis-tenant finetune` shows a training."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from shared.errors import counted
from tenant_sdk.command_line.output import RESULTS, STATUS

if TYPE_CHECKING:
    from tenant_sdk.tuning.finetuning import TrainingReport
    from tenant_sdk.tuning.progress import TrainingStep
    from tenant_sdk.tuning.samples import Sample

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 50
_SHOWN_SAMPLES = 3  # held-out prompts
_SHOWN_LINES, _SHOWN_TEXT = 6, 200  # of each, and characters of a line


class ShownTraining:
    """A bar with loss and speed; losses as lines where there is no terminal."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
        )
        self._bar = Progress(*columns, console=STATUS, disable=not STATUS.is_terminal)
        self._steps = self._bar.add_task("training", total=None, told="", visible=False)
        self._evaluations = self._bar.add_task("held-out loss", total=None, told="", visible=False)
        self._loss, self._evaluated, self._new = "", False, False
        self._losses: list[float] = []
        self._held_out: list[float] = []
        self._samples: Sequence[Sample] = ()

    def __enter__(self) -> ShownTraining:
        """Draw."""
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing."""
        self._bar.stop()

    def step(self, now: TrainingStep) -> None:
        """A step is done."""
        if now.loss is not None:
            self._loss = f"loss {now.loss:.4f}"
            self._losses.append(now.loss)
        if now.held_out is not None and self._held_out[-1:] != [now.held_out]:
            self._held_out.append(now.held_out)
            self._new = True
        # A bar keeps the last measurement. A line has only what was measured since the line before.
        shown = now.held_out is not None and (self._new or STATUS.is_terminal)
        held_out = f"held-out {now.held_out:.4f}" if shown else ""
        speed = f"{now.tokens_per_second:,.0f} tokens/s, {now.bytes_per_second / 1e6:,.1f} MB/s"
        # Behind the last step come a measurement and answers.
        seconds = now.seconds_left if now.step < now.steps else None
        left = "" if seconds is None else f"{timedelta(seconds=round(seconds))} left"
        text = ", ".join(filter(None, (self._loss, held_out, speed, left)))
        self._bar.update(self._evaluations, visible=False)
        self._bar.update(self._steps, completed=now.step, total=now.steps, visible=True, told=text)
        if now.loss is not None and not STATUS.is_terminal:
            STATUS.print(f"step {now.step} of {now.steps}: {text}")
            self._new = False

    def evaluating(self, done: int, total: int) -> None:
        """The held-out loss is measured."""
        self._bar.update(self._evaluations, completed=done, total=total, visible=True)
        if not self._evaluated and not STATUS.is_terminal:
            STATUS.print(f"measuring the held-out loss on {counted(total, 'example')}")
        self._evaluated = True

    def samples(self, samples: Sequence[Sample]) -> None:
        """Keep held-out prompts and their answers, until nothing is drawn any more."""
        self._samples = samples

    def outcome(self) -> None:
        """Print held-out answers, and how losses went."""
        print_samples(self._samples)
        for name, values in (("loss", self._losses), ("held-out", self._held_out)):
            if len(values) > 1:
                RESULTS.print(f"{name:<9} {plotted(values)}  {values[0]:.4f} → {values[-1]:.4f}")


def plotted(values: Sequence[float], width: int = _WIDTH) -> str:
    """Values as bars, one for each or for the mean of neighbours."""
    count = min(width, len(values))
    parts = [values[at * len(values) // count : (at + 1) * len(values) // count] for at in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    return "".join(_BARS[round((each - low) / ((high - low) or 1) * (len(_BARS) - 1))] for each in means)


def _last_lines(prompt: str) -> list[str]:
    """Of a prompt, as a template renders it; one at least."""
    lines = [line for line in prompt.splitlines() if line.strip()]
    return [_end(line) for line in lines[-_SHOWN_LINES:]] or [""]


def _end(text: str) -> str:
    """The end of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_TEXT else f"… {line[-_SHOWN_TEXT:]}"


def print_report(report: TrainingReport) -> None:
    """Print losses, perplexities and right answers."""
    since = f" since step {report.resumed_at}" if report.resumed_at else ""
    RESULTS.print(
        f"loss: {report.first_loss:.4f} at the start, {report.last_loss:.4f} at the end of "
        f"{counted(report.steps, 'step')} ({report.seconds:.1f} s{since})"
    )
    if report.best_step is not None:
        RESULTS.print(f"best: the adapter is that of step {report.best_step}")
    if report.perplexity_before is not None and report.perplexity_after is not None:
        RESULTS.print(
            f"held-out perplexity: {report.perplexity_before:.2f} before, {report.perplexity_after:.2f} after"
        )
    print_right(report.answered, report.right_base, report.right_adapter)


def print_samples(samples: Sequence[Sample]) -> None:
    """Print some held-out prompts and their answers."""
    if len(samples) > _SHOWN_SAMPLES:
        RESULTS.print(f"{len(samples)} held-out prompts were answered; the first {_SHOWN_SAMPLES}:")
    for sample in samples[:_SHOWN_SAMPLES]:
        first, *others = _last_lines(sample.prompt)
        RESULTS.print(f"[bold]held-out[/]  {escape(first)}")
        for line in others:
            RESULTS.print(f"{'':<10}{escape(line)}")
        answers = (("expected", sample.expected), ("base", sample.base), ("adapter", sample.adapted))
        for name, answer in answers:
            if answer is not None:
                RESULTS.print(f"  {name:<8}  {escape(_end(answer))}")


def print_right(answered: int, base: int | None, adapter: int | None) -> None:
    """Print how many held-out answers are right; None: not known."""
    right = ((base, "base"), (adapter, "adapter"))
    said = [f"{count} of {answered} by the {name}" for count, name in right if count is not None]
    if answered:
        RESULTS.print(f"held-out answers right to the letter: {', '.join(said)}")
