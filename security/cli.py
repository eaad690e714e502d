"""The command ``symbiosis-audit``."""

from __future__ import annotations

import enum
import shlex
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from shared import imports
from shared.command_line import CommandLine, escape_output, prints_version, with_usual_help
from shared.errors import ConfigurationError, OptionReference, SymbiosisError
from shared.options import Option, check_fields
from tenant_sdk.command_line.output import report_interruption
from tenant_sdk.terminal import visible

if TYPE_CHECKING:
    from security.deployment import TranscriptReport
    from security.recordings.transcript import Transcript
    from security.verdicts.claim import Verdict

_Command, _Group = with_usual_help(TyperCommand), with_usual_help(TyperGroup)
app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)
_command_line = CommandLine(typer.Option, typer.Argument)
_COLORS = {"holds": "green", "weak": "yellow", "skipped": "yellow", "REFUTED": "bold red"}
_EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@dataclass(frozen=True)
class AuditOptions:
    """Options of ``symbiosis-audit run``.

    Raises:
        ConfigurationError: an option is not one of its choices, or a file is missing.
    """

    report: Annotated[Path, Option("", "Folder for report.json and report.html.")]
    model: Annotated[Path | None, Option("", "Checkpoint folder. Default: that of the examples.")] = None
    text: Annotated[
        Path | None,
        Option("", "Real text of tenants, one example a line. Default: that of the examples."),
    ] = None
    quick: Annotated[bool, Option("", "Run fewer trials, with wider confidence intervals.")] = False
    seed: Annotated[int, Option("", "Seed of everything random except masks.", minimum=0)] = 0
    workers: Annotated[
        int, Option("", "Processes that share the layers of each executor (serve --workers).", minimum=0)
    ] = 0
    answers: Annotated[
        str,
        Option(
            "", "Answers that tenants with one-time masks request: exact or half.", choices=("exact", "half")
        ),
    ] = "exact"
    gateway: Annotated[
        Path | None,
        Option(
            "",
            "Path of python or symbiosis-tenant in an environment with vLLM. With it, the audit also attacks "
            "the traffic of gateways. Default: .venv-gateway, or this environment if it has vLLM, or none.",
        ),
    ] = None
    no_gateway: Annotated[bool, Option("", "Skip the traffic of gateways.")] = False

    def __post_init__(self) -> None:
        check_fields(self)
        for path, what in ((self.model, "model"), (self.text, "text")):
            if path is not None and not path.exists():
                raise ConfigurationError("{}: there is no such file", OptionReference(what, path))


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Show what is being done, and afterwards how long it took."""
    started = time.perf_counter()
    with console.status(escape(what)):
        if not console.is_terminal:
            print(f"  {what} ...", flush=True)
        yield
    console.print(
        f"[green]✓[/] {escape(what)}  [dim]{time.perf_counter() - started:.1f} s[/]", soft_wrap=True
    )


def _check_packages() -> None:
    """That the packages of the extra ``audit`` are there.

    Raises:
        ConfigurationError: one is not.
    """
    if missing := [name for name in ("scipy", "matplotlib", "jinja2") if find_spec(name) is None]:
        raise ConfigurationError(
            f"the audit needs {' and '.join(missing)}: pip install '.[audit]' in a checkout of this project"
        )


def _check_writable(folder: Path) -> None:
    """Before minutes of work, that their report can be written; the folder is made.

    Raises:
        ConfigurationError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"cannot write the report into {folder}: {error.strerror}; name another folder with --report"
        ) from error


@app.command(cls=_Command)
@_command_line.takes
def run(options: AuditOptions) -> None:
    """Let tenants work in every mode, attack the data that each party saw, and judge all of CLAIMS.md.

    This takes seven to ten minutes on two idle cores, or three to five with
    --quick, and up to 6 GiB of memory. The audit of three gateways takes three
    more minutes and needs vLLM. Without vLLM, claims about gateways are skipped.

    Recordings are in the folder TMPDIR, and are removed at the end. Those of a
    large model need much space: with --quick and a model of 135 million
    parameters, some 20 GB.

    A control is the same attack without the defence. A control is "weak" if it
    had so few trials that it may have succeeded by chance.

    Exit status 0: every claim that was not skipped holds, and every control
    succeeded or was weak. 1: a claim does not hold, or a control failed. If a
    control failed, the failure of the other attacks proves nothing. 2: an error;
    nothing is known.
    """
    _check_packages()
    _check_writable(options.report)
    with stage("loading"), imports.without_gc():
        import transformers

        transformers.logging.disable_progress_bar()
        from security.audit import Audit
        from security.recordings.gateway_process import gateway_command
        from security.report.environment import text_file
        from security.report.page import write_html, write_json
        from security.verdicts.claims import judge
        from security.verdicts.plan import FULL_PLAN, QUICK_PLAN

    text = options.text or _EXAMPLES / "data" / "clinic_notes_train.txt"
    lines = [line.strip() for line in text.read_text().splitlines() if len(line.split()) > 8]
    audit = Audit(
        options.model or _EXAMPLES / "base_model",
        lines,
        QUICK_PLAN if options.quick else FULL_PLAN,
        stage,
        options.seed,
        options.workers,
        None if options.no_gateway else gateway_command(options.gateway),
        options.answers,
    )
    with report_interruption(), tempfile.TemporaryDirectory(prefix="symbiosis-audit-") as folder:
        result = audit.run(Path(folder))
    result.about |= {
        "command": shlex.join(["symbiosis-audit", *sys.argv[1:]]),
        "quick": options.quick,
        "text": text_file(text),
    }
    verdicts = judge(result)
    write_json(result, verdicts, options.report / "report.json")
    page = options.report / "report.html"
    with stage("drawing"):
        write_html(result, verdicts, page)
    _print_verdicts(verdicts)
    console.print(f"{page}: {result.about['seconds']:.0f} s", soft_wrap=True)
    if any(verdict.refuted for verdict in verdicts):
        raise typer.Exit(1)


def _print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """One line for each claim."""
    from security.verdicts.claims import CLAIMS

    table = Table(title="Claims", show_lines=False)
    for column in ("claim", "measured", ""):
        table.add_column(column, overflow="fold")
    for claim, verdict in zip(CLAIMS, verdicts, strict=True):
        table.add_row(
            claim.identity,
            escape(verdict.figure),
            f"[{_COLORS[verdict.word]}]{verdict.word}[/]",
        )
    console.print(table)


class Party(enum.StrEnum):
    """What an executor was to its tenants."""

    PROVIDER = "provider"
    MASK_SOURCE = "mask-source"


@app.command(cls=_Command)
def attack(
    transcript: Annotated[
        Path,
        typer.Argument(
            help="Transcript that `symbiosis-provider serve --transcript` wrote. If this is a folder, its "
            "newest transcript is used.",
            exists=True,
        ),
    ],
    model: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Checkpoint folder of the model that was served.")
    ],
    view: Annotated[
        Party,
        typer.Option(
            metavar="provider|mask-source",
            help="Role of the executor that recorded: provider (attack its rows) or mask-source (attack its "
            "seeds).",
        ),
    ] = Party.PROVIDER,
    with_: Annotated[
        Path | None,
        typer.Option(
            "--with",
            metavar="PATH",
            help="The mask source's transcript of the same sessions. Assume that provider and mask source "
            "collude, and subtract the masks. This tests the attack itself: if a one-time session has only "
            "one mask source, the attack must be able to read the text.",
            exists=True,
        ),
    ] = None,
    cut: Annotated[
        bool,
        typer.Option(
            "--cut", help="Accept a transcript whose end is missing, and use its complete messages."
        ),
    ] = False,
    show: Annotated[
        int, typer.Option(metavar="COUNT", help="Number of guessed tokens to show for each attack.", min=1)
    ] = 24,
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="Seed of everything random.")] = 0,
    minutes: Annotated[
        float,
        typer.Option(
            metavar="MINUTES",
            help="Maximum processor time for the attacks on all sessions of one tenant. Sessions for which "
            "no time is left have no verdict.",
            min=0.1,
        ),
    ] = 60.0,
) -> None:
    """Run the passive attacks on a transcript of a real deployment, whose true text is unknown.

    The command attacks each session separately, and prints a verdict for each.
    docs/how-to/auditing.md explains the output.

    Exit status 0: every session's rows (or seeds) look uniform, and no attack did
    better than on random rows. 1: rows (or seeds) of a session do not look
    uniform, or an attack reads text. 2: an error (nothing is known), or at least
    one session has no verdict and no session leaks.
    """
    if with_ is not None and view != Party.PROVIDER:
        raise ConfigurationError("--with names the mask source's recording, so give --view provider")
    _check_packages()
    recorded, source = _read_transcripts(transcript, with_, model, cut=cut)
    with stage("loading"), imports.without_gc():
        import transformers

        transformers.logging.disable_progress_bar()
        from security.deployment import TranscriptAudit

    audit = TranscriptAudit(model, show, seed, stage, console.print, minutes)
    reading = audit.mask_source(recorded) if view == Party.MASK_SOURCE else audit.provider(recorded, source)
    _print_reading(reading)
    if reading.leaks or not reading.complete:
        raise typer.Exit(1 if reading.leaks else 2)


def _read_transcripts(
    transcript: Path, with_: Path | None, model: Path, *, cut: bool
) -> tuple[Transcript, Transcript | None]:
    """An executor's transcript, and that of the mask source, if there is one."""
    with stage("reading"):
        from security.recordings.transcript import check_served, newest, read_transcript

        if transcript.is_dir() and (older := len(list(transcript.glob("*.transcript"))) - 1) > 0:
            read = escape(visible(newest(transcript).name))
            console.print(f"only {read}, the newest, is read; {older} older here: give each by its name")
        recorded = read_transcript(transcript, cut=cut)
        source = read_transcript(with_, digest=recorded.manifest.digest, cut=cut) if with_ else None
        check_served(recorded, model)
    return recorded, source


def _print_reading(reading: TranscriptReport) -> None:
    for note in reading.notes:
        console.print(f"[dim]{escape(note)}[/]", soft_wrap=True)
    for verdict in reading.verdicts:
        color = {True: "bold red", False: "green", None: "bold yellow"}[verdict.leaks]
        console.print(f"[{color}]{escape(verdict.text)}[/]", soft_wrap=True)


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the version.",
            is_eager=True,
            callback=prints_version("symbiosis-audit"),
        ),
    ] = False,
) -> None:
    """Attack every privacy mode, and report the leaks."""


def main() -> None:
    """Entry point of ``symbiosis-audit``."""
    escape_output()
    warnings.simplefilter("ignore", FutureWarning)  # between transformers and peft
    try:
        app()
    except SymbiosisError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except Exception:
        traceback.print_exc()  # Python's own status would be 1, which says that something leaks
        sys.exit(2)


if __name__ == "__main__":
    main()
