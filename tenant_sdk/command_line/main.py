"""``symbiosis-tenant``: fine-tune, generate, fingerprint a checkpoint, find out what is wrong."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, track

from shared import imports
from shared.command_line import escape_output, prints_version
from shared.errors import Message, Names, SymbiosisError, peer_text
from shared.options import flags_of
from tenant_sdk.command_line import options
from tenant_sdk.command_line.context_options import ContextOptions, PromptOptions
from tenant_sdk.command_line.data import data
from tenant_sdk.command_line.gateway import serve
from tenant_sdk.connection.urls import party_name
from tenant_sdk.session.options import SessionConfig
from tenant_sdk.session.profiles import approve
from tenant_sdk.terminal import Terminal
from tenant_sdk.tuning.options import ModelOptions, TrainingOptions
from tenant_sdk.tuning.sampling import Sampling

if TYPE_CHECKING:
    from tenant_sdk.session.session import Session
    from tenant_sdk.tuning.finetuning import TrainingReport
    from tenant_sdk.tuning.progress import TrainingStep

# How messages name the options of all commands.
NAMES: Names = {
    name: flag
    for each in (SessionConfig, TrainingOptions, ModelOptions, PromptOptions, ContextOptions, Sampling)
    for name, flag in flags_of(each).items()
}
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
# Standard output is for results (text, figures); everything else goes to standard error.
_status = Terminal(stderr=True)
_results = Terminal()


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version.", is_eager=True, callback=prints_version("symbiosis-tenant")
        ),
    ] = False,
) -> None:
    """Use a language model whose frozen layers a provider hosts. Text and adapters stay here."""


@contextmanager
def _loading() -> Iterator[None]:
    """Around imports that take seconds."""
    _status.print("loading torch and transformers")
    with imports.at_once():
        yield


def _say_connecting(config: SessionConfig) -> None:
    sources = [party_name(source) for source in config.mask_sources]
    others = f", masks from {' and '.join(sources)}" if sources else ""
    _status.print(f"connecting to {escape(party_name(config.provider))}{escape(others)}")


@contextmanager
def _interruption_told() -> Iterator[None]:
    """Around all that draws on the terminal: what was interrupted is told below it."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        _status.print("interrupted")
        _print_notes(interruption)
        raise


def _shown(line: str) -> str:
    """With options as the command line has them."""
    return line.shown(NAMES) if isinstance(line, Message) else line


def _print_notes(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        _status.print(escape(_shown(note)))


def _print_stats(session: Session, config: SessionConfig, to: Console) -> None:
    stats = session.stats
    waiting = stats.seconds_waiting + stats.seconds_waiting_for_effects
    sources = len(config.mask_sources)
    masked = {
        "one-time": f"every row, each under a mask of its own ({sources} mask source{'s'[: sources != 1]}; "
        f"{stats.effect_rows:,} rows multiplied there)",
        "noise-bank": "with banks of masks that serve many rows each",
        "plain": "nothing; the executor saw every activation",
    }[config.privacy]
    checked = f"{stats.verified_rows:,} of {stats.rows:,} rows" if stats.verified_rows else "nothing"
    if 0 < stats.verified_rows < stats.rows and config.when_verified == "always":
        checked += "; the rest prepared these checks"
    to.print(
        f"session: {stats.requests:,} requests, {stats.rows:,} rows, {stats.bytes_sent / 1e6:.1f} MB sent, "
        f"{stats.bytes_received / 1e6:.1f} MB received, {waiting:.1f} s waiting, "
        f"{stats.seconds_masking:.1f} s masking and checking"
    )
    to.print(f"masked: {masked}")
    to.print(f"checked: {checked}")
    if stats.moves:
        now, often = escape(", ".join(stats.replicas.values())), "s"[: stats.moves != 1]
        to.print(f"replicas: moved {stats.moves} time{often}, at the end with {now}")


@app.command()
@options.command_line.takes
def finetune(training: TrainingOptions, own: ModelOptions, connection: options.SessionOptions) -> None:
    """Train an adapter on files; the text, the adapter and its gradients stay on this machine."""
    from tenant_sdk.storage import TrainingCheckpoints, check_new_folder
    from tenant_sdk.tuning.records import check_data

    TrainingCheckpoints(check_new_folder(training.output), {}).check(resume=training.resume)
    config = connection.session()
    check_data([*training.data, *training.held_out])
    with _loading():
        from tenant_sdk.session.opening import open_session
        from tenant_sdk.tuning.finetuning import Told, check_reports
        from tenant_sdk.tuning.finetuning import finetune as train
        from tenant_sdk.tuning.own import load
        from tenant_sdk.tuning.preview import show_first

    check_reports(training.report_to)
    # Beside the adapter: what lies in the folder of the training goes when it is done.
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", f"{training.output}.runs")
    _say_connecting(config)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
    )
    with (
        _interruption_told(),
        open_session(config) as session,
        Progress(*columns, console=_status) as bar,
    ):
        adapted, words = load(session, own.tokenizer, own.model, training.base, bars=_status.is_terminal)
        report = train(
            training,
            adapted,
            words,
            session,
            Told(
                lambda line: _status.print(escape(_shown(line))),
                _shows_steps(bar),
                lambda example: show_first(_status, words, example),
            ),
            keep_tokenizer=own.tokenizer is not None,
        )
    _print_report(report)
    _print_stats(session, config, _results)
    _results.print(f"adapter: {escape(str(training.output))}")


def _shows_steps(bar: Progress) -> Callable[[TrainingStep], None]:
    """Shows each step on a bar, and losses as lines where there is no terminal."""
    task = bar.add_task("training", total=None, loss="", speed="", visible=False)

    def show(now: TrainingStep) -> None:
        left = timedelta(seconds=round(now.seconds_left))
        fields = {"speed": f"{now.tokens_per_second:,.0f} tokens/s, {left} left"}
        if now.loss is not None:
            fields["loss"] = f"{now.loss:.4f}"
        bar.update(task, completed=now.step, total=now.steps, visible=True, **fields)  # type: ignore[arg-type]
        if now.loss is not None and not _status.is_terminal:
            _status.print(f"step {now.step} of {now.steps}: loss {fields['loss']}, {fields['speed']}")

    return show


def _print_report(report: TrainingReport) -> None:
    since = f" since step {report.resumed_at}" if report.resumed_at else ""
    _results.print(
        f"loss: {report.first_loss:.4f} at the start, {report.last_loss:.4f} at the end of {report.steps} "
        f"steps ({report.seconds:.1f} s{since})"
    )
    if report.perplexity_before is not None and report.perplexity_after is not None:
        _results.print(
            f"held-out perplexity: {report.perplexity_before:.2f} before, {report.perplexity_after:.2f} after"
        )


@app.command()
@options.command_line.takes
def generate(
    given: PromptOptions,
    sampling: Sampling,
    context: ContextOptions,
    own: ModelOptions,
    connection: options.SessionOptions,
) -> None:
    """Continue a prompt, with or without an adapter; the text and the adapter stay on this machine."""
    from tenant_sdk.storage import check_adapter_folder

    text, adapter = given.text(), given.adapter
    config = connection.session()
    if adapter is not None:
        check_adapter_folder(adapter)
    with _loading():
        from tenant_sdk.sequences.contexts import LongContext, default_place
        from tenant_sdk.session.opening import open_session
        from tenant_sdk.tuning.folders import load_adapter
        from tenant_sdk.tuning.generation import stream
        from tenant_sdk.tuning.own import load, not_used, tokenizer_in

    place = LongContext(context.kv or "host", context.kv_memory_gib, context.kv_folder, context.memory_gib)
    _say_connecting(config)
    if own.tokenizer is None and adapter is not None and tokenizer_in(adapter):
        _status.print(escape(_shown(not_used(adapter))))
    with open_session(config) as session:
        ready, words = load(session, own.tokenizer, own.model, bars=_status.is_terminal)
        if adapter is not None:
            ready = load_adapter(ready, adapter, session, allow_other_base=given.allow_other_base)
        if context.kv is None:
            place = replace(place, kv=default_place(ready))
        fitting = partial(place.fitting, ready, session.manifest.groups)
        written = stream(ready, words, text, sampling, chat=given.chat, fitting=fitting)
    if given.quiet:
        return
    _status.print(
        f"{written.tokens} tokens in {written.seconds:.1f} s, {written.tokens / written.seconds:.1f} "
        f"tokens/s; ended by: {_shown(written.end)}"
    )
    _print_stats(session, config, _status)


@app.command()
def fingerprint(
    checkpoint: Annotated[
        Path, typer.Argument(help="Checkpoint that you trust: folder, GGUF file, or hub:NAME\\[@REVISION].")
    ],
    output: Annotated[Path, typer.Option(help="File to write. An existing file is replaced.")],
    key_env: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="VAR", help="Environment variable with an earlier key. Not given or not set: a new key."
        ),
    ] = None,
    numerics: Annotated[str, typer.Option(help="Numerics of the executors: ring or ring-fine.")] = "ring",
) -> None:
    """Make a file of fingerprints, to check answers against your own checkpoint's weights.

    A new key is printed once. Keep it apart from the file: with the key, answers can be forged.
    """
    with imports.at_once():
        from tenant_sdk.products.fingerprints import write_fingerprints

    progress = partial(track, console=_status, transient=True)
    given = os.environ.get(key_env or "") or None
    key = write_fingerprints(checkpoint, output, key=given, numerics=numerics, progress=progress)
    if given is None:
        print(key)
    variable = key_env or "FINGERPRINT_KEY"
    _status.print(
        f"wrote {escape(str(output))}; use it with --fingerprints {escape(str(output))} "
        f"--fingerprint-key-env {variable}"
        + (f" after `export {variable}=...`: the key is shown only now" if given is None else "")
    )


@app.command()
@options.command_line.takes
def doctor(
    executors: options.SessionOptions,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait until an executor listens.")
    ] = 30.0,
) -> None:
    """Check executors step by step; at the first failure, say what is wrong and what to do."""
    targets, rules = executors.targets(wait)
    urls = escape(" and ".join(target.party for target in targets))
    _status.print(f"examining {urls} (loading torch takes some seconds)")
    with imports.at_once():
        from tenant_sdk.command_line.doctor import diagnose

    failed = False
    for title, results in diagnose(targets, rules):
        if title:
            _results.print(f"[bold]{escape(title)}[/]")
        for result in results:
            mark = {True: "[green]✓[/]", False: "[bold red]✗[/]", None: "[yellow]![/]"}[result.ok]
            _results.print(f"{mark} {result.step:<13}{escape(result.detail.shown(executors.names))}")
            if result.remedy:
                _results.print(f"  {'':<13}→ {escape(result.remedy.shown(executors.names))}")
            failed |= result.ok is False
    if failed:
        raise typer.Exit(1)


app.command()(serve)
app.command()(data)


@app.command()
def trust(
    file: Annotated[
        Path, typer.Argument(help="symbiosis.toml, or a tracker's file, after you have read it.")
    ],
) -> None:
    """Let commands use this file if it is in the folder where they run, until it changes."""
    _results.print(f"{escape(str(approve(file)))} is used by commands that find it, until it changes")


def run(application: Callable[[], Any]) -> None:
    """Run a command line; an error that this project raises becomes one line and exit status 1."""
    escape_output()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if not sys.warnoptions:
        # Deprecations between libraries are no news to whoever types a command.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
    try:
        application()
    except SymbiosisError as error:
        error.show_options(NAMES)
        _status.print(f"[bold red]error:[/] {escape(str(error))}")
        _print_notes(error)
        sys.exit(1)
    except BaseException as error:
        # How the compiled part of a tokenizer gives up on a text; the class has no name that can be imported.
        if type(error).__name__ != "PanicException":
            raise
        reason = escape(peer_text(str(error)))
        _status.print(f"[bold red]error:[/] the tokenizer cannot read the text: {reason}")
        sys.exit(1)


def main() -> None:
    """Entry point of ``symbiosis-tenant``."""
    run(app)


if __name__ == "__main__":
    main()
