"""The output of the commands of ``symbiosis-tenant`` besides their results."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shared import imports
from shared.errors import Names, OptionText, counted
from shared.options import flags_of
from tenant_sdk.command_line.context_options import AnswerOptions, ContextOptions, PromptOptions
from tenant_sdk.connection.urls import party_name
from tenant_sdk.drafts.options import DraftOptions
from tenant_sdk.session.options import SessionConfig
from tenant_sdk.terminal import Terminal
from tenant_sdk.tuning.options import EvaluationOptions, ModelOptions, TrainingOptions
from tenant_sdk.tuning.sampling import Sampling

if TYPE_CHECKING:
    from tenant_sdk.session.session import Session

_CONFIGURATIONS = (
    *(SessionConfig, TrainingOptions, ModelOptions, AnswerOptions, PromptOptions, ContextOptions, Sampling),
    *(DraftOptions, EvaluationOptions),
)
# How messages name the options of all commands.
NAMES: Names = {name: flag for each in _CONFIGURATIONS for name, flag in flags_of(each).items()}
# Standard output is for results (text, figures); everything else goes to standard error.
STATUS = Terminal(stderr=True)
RESULTS = Terminal()


class Lines(logging.Handler):
    """Writes what is logged as lines on the terminal, above a bar of progress and not into it."""

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        STATUS.print(escape(self.format(record)))


@contextmanager
def loading() -> Iterator[None]:
    """Around imports that take seconds, the first time."""
    if "transformers" not in sys.modules:
        STATUS.print("loading torch and transformers")
    with imports.without_gc():
        yield


def say_connecting(config: SessionConfig) -> None:
    """Name the parties of a session."""
    sources = [party_name(source) for source in config.mask_sources]
    others = f", masks from {' and '.join(sources)}" if sources else ""
    STATUS.print(f"connecting to {escape(party_name(config.provider))}{escape(others)}")


def say_kept(session: Session) -> None:
    """Say which layers the session keeps here, if it has a budget for them."""
    if session.kept is not None:
        STATUS.print(escape(str(session.kept)))


@contextmanager
def bars(units: Mapping[str, str]) -> Iterator[Callable[[str, int, int], None]]:
    """Bars of progress; without a terminal, lines, about ten for each stage.

    Args:
        units: of stages by their names.

    Yields:
        A function that gets the name of a stage, the number of units that are done, and of all.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tenths = dict[str, int]()
    with Progress(*columns, console=STATUS, disable=not STATUS.is_terminal) as progress:
        stages = {name: progress.add_task(name, total=None, visible=False) for name in units}

        def show(name: str, done: int, total: int) -> None:
            if not STATUS.is_terminal and (tenth := 10 * done // max(total, 1)) != tenths.get(name):
                so_far = f"{done} of " if name in tenths else ""
                STATUS.print(f"{name}: {so_far}{counted(total, units[name])}")
                tenths[name] = tenth
            progress.update(stages[name], completed=done, total=total, visible=True)

        yield show


@contextmanager
def report_interruption() -> Iterator[None]:
    """Around all that draws on the terminal: what was interrupted is told below it.

    SIGTERM, with which services and clusters end programs, is as Ctrl-C; a second one is ignored. The same
    holds for SIGHUP, which comes when the terminal is closed, unless `nohup` has it ignored.
    """
    received = 0

    def terminate(number: int, _: object) -> None:
        nonlocal received
        received = number
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM, signal.SIGHUP]
    before = {each: signal.getsignal(each) for each in numbers if signal.getsignal(each) != signal.SIG_IGN}
    for each in before:
        signal.signal(each, terminate)
    try:
        yield
    except KeyboardInterrupt as interruption:
        with suppress(OSError):  # the terminal may be gone
            STATUS.print("interrupted")
            print_notes(interruption)
        if received:
            raise SystemExit(128 + received) from None
        raise
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def shown(line: str) -> str:
    """With options as the command line has them."""
    return line.shown(NAMES) if isinstance(line, OptionText) else line


def print_notes(error: BaseException) -> None:
    """Print what was added to an error."""
    for note in getattr(error, "__notes__", ()):
        STATUS.print(escape(shown(note)))


def print_stats(session: Session, config: SessionConfig, to: Console) -> None:
    """Print what a session sent and received, and what was masked and checked."""
    stats = session.stats
    waiting = stats.seconds_waiting + stats.seconds_waiting_for_effects
    sources = len(config.mask_sources)
    masked = {
        "one-time": f"every row, each under a mask of its own ({counted(sources, 'mask source')}; "
        f"{counted(stats.effect_rows, 'row')} multiplied there)",
        "noise-bank": "with banks of masks that serve many rows each",
        "plain": "nothing; the executor saw every activation",
    }[config.privacy]
    verified, others = f"{stats.verified_rows:,}", stats.rows - stats.verified_rows
    checked = f"{verified} of {stats.rows:,} rows" if stats.verified_rows else "nothing"
    if others and stats.verified_rows and config.when_verified == "always":
        checked = f"all {verified} rows that were used; "
        checked += f"the other {others:,} made fingerprints, or were lost or refused"
    to.print(
        f"session: {counted(stats.requests, 'request')}, {counted(stats.rows, 'row')}, "
        f"{stats.bytes_sent / 1e6:.1f} MB sent, {stats.bytes_received / 1e6:.1f} MB received, "
        f"{waiting:.1f} s waiting, {stats.seconds_masking:.1f} s masking and checking"
    )
    to.print(f"masked: {masked}")
    to.print(f"checked: {checked}")
    if stats.moves:
        now = escape(", ".join(stats.replicas.values()))
        to.print(f"replicas: moved {counted(stats.moves, 'time')}, at the end with {now}")
