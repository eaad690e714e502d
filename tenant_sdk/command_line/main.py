"""``symbiosis-tenant``: fine-tune, generate, fingerprint a checkpoint, find faults."""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.markup import escape
from rich.progress import track
from typer.core import TyperCommand, TyperGroup

from shared import imports
from shared.command_line import escape_output, prints_version, with_usual_help
from shared.errors import ConfigurationError, OptionText, SymbiosisError, peer_text
from tenant_sdk.command_line import options
from tenant_sdk.command_line.answers import chat, generate
from tenant_sdk.command_line.data import data
from tenant_sdk.command_line.draft import UNITS, callbacks_of, draft, print_draft
from tenant_sdk.command_line.evaluation import evaluate
from tenant_sdk.command_line.gateway import serve
from tenant_sdk.command_line.output import (
    NAMES,
    RESULTS,
    STATUS,
    Lines,
    bars,
    loading,
    print_notes,
    print_stats,
    report_interruption,
    say_connecting,
    say_kept,
    shown,
)
from tenant_sdk.command_line.training import ShownTraining, print_report
from tenant_sdk.drafts.options import KEPT_PARTS, VIRTUAL_TOKENS, DraftOptions
from tenant_sdk.session.options import TRAINING
from tenant_sdk.session.profiles import approve
from tenant_sdk.tuning.options import ModelOptions, TrainingOptions

if TYPE_CHECKING:
    from tenant_sdk.drafts.making import DraftReport
    from tenant_sdk.session.session import Session

_Command, _Group = with_usual_help(TyperCommand), with_usual_help(TyperGroup)
app = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version.", is_eager=True, callback=prints_version("symbiosis-tenant")
        ),
    ] = False,
) -> None:
    """Use a language model whose linear layers a provider hosts. Text and adapters stay on this machine."""


@app.command(cls=_Command)
@options.command_line.takes
def finetune(training: TrainingOptions, local: ModelOptions, connection: options.SessionOptions) -> None:
    """Train an adapter on files; the text, the adapter and its gradients stay on this machine."""
    from tenant_sdk.storage import check_new_folder
    from tenant_sdk.tuning.checkpoints import TrainingCheckpoints
    from tenant_sdk.tuning.records import check_data, find_conversations

    TrainingCheckpoints(check_new_folder(training.output), {}).check(resume=training.resume)
    making = _draft_after(training)
    config = connection.session()
    config = replace(config, keep_for=config.keep_for or TRAINING)
    check_data([*training.data, *training.held_out])
    talks, system = find_conversations(training.data)  # the files may be others when the training ends
    with loading():
        from tenant_sdk.drafts.passes import check_supported
        from tenant_sdk.session.opening import open_session
        from tenant_sdk.tuning.data import has_chat_template
        from tenant_sdk.tuning.finetuning import TrainingCallbacks
        from tenant_sdk.tuning.finetuning import finetune as train
        from tenant_sdk.tuning.local_model import load
        from tenant_sdk.tuning.preview import show_first
        from tenant_sdk.tuning.trackers import check_reports

    check_reports(training.report_to)
    # Beside the adapter: what lies in the folder of the training goes when it is done.
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", f"{training.output}.runs")
    say_connecting(config)
    shows, models, drafted = ShownTraining(), list[Any](), None
    with report_interruption(), open_session(config) as session:
        say_kept(session)
        adapted, tokenizer = load(
            session, local.tokenizer, local.model, training.base, bars=STATUS.is_terminal
        )
        if making is not None:
            check_supported(adapted)  # before the training, not after it
        callbacks = TrainingCallbacks(
            lambda line: STATUS.print(escape(shown(line))),
            shows.step,
            lambda example: show_first(STATUS, tokenizer, example),
            shows.evaluating,
            shows.samples,
            models.append,
        )
        with shows:
            report = train(
                training, adapted, tokenizer, session, callbacks, keep_tokenizer=local.tokenizer is not None
            )
        templated = has_chat_template(tokenizer)
        if making is not None:
            drafted = _make_draft(making, models[0], tokenizer, session, training.output)
    shows.outcome()
    print_report(report)
    if making is not None and drafted is not None:
        print_draft(drafted, making.output)
    print_stats(session, config, RESULTS)
    RESULTS.print(f"adapter: {escape(str(training.output))}")
    # What was learned without the chat template is asked for without it.
    words = ("chat",) if talks else ("generate", "--prompt", "...", *(["--raw"] if templated else []))
    more = ["--system", system] if system else []
    if making is not None and drafted is not None and drafted.pays_from < math.inf:
        more += ["--draft", str(making.output)]
    RESULTS.print(f"next: {escape(connection.command([*words, *more], training.output))}")


def _draft_after(training: TrainingOptions) -> DraftOptions | None:
    """The options of a draft that is made at the end of a training; None: there is none."""
    if training.with_draft is None:
        return None
    from tenant_sdk.storage import check_new_folder
    from tenant_sdk.tuning.adapter_config import read_raw_config
    from tenant_sdk.tuning.checkpoints import TrainingCheckpoints

    if pipes := [path for path in training.data if path.exists() and not path.is_file()]:
        raise ConfigurationError(
            OptionText(
                "{with_draft} reads the data a second time, which is possible only for files: write {} to a "
                "file",
                str(pipes[0]),
            )
        )
    if training.adapter is not None and read_raw_config(training.adapter).get("num_virtual_tokens"):
        raise ConfigurationError(VIRTUAL_TOKENS)
    output = check_new_folder(training.with_draft)
    TrainingCheckpoints(output, {}, parts=KEPT_PARTS).check(resume=False)
    return DraftOptions(
        output,
        data=training.data,
        sequence_length=training.sequence_length,
        train_on_prompt=training.train_on_prompt,
        batch_size=training.batch_size,
        seed=training.seed,
    )


def _make_draft(
    making: DraftOptions, model: Any, tokenizer: Any, session: Session, adapter: Path
) -> DraftReport:
    """Make the draft of an adapter that is saved."""
    from tenant_sdk.drafts.making import make_draft

    try:
        with bars(UNITS) as show:
            return make_draft(making, model, tokenizer, session, callbacks_of(show))
    except BaseException as error:
        words = shlex.join(["symbiosis-tenant", "draft", "--resume", "--adapter", str(adapter)])
        error.add_note(OptionText("the adapter is complete; `{} ...` continues with its draft", words))
        raise


@app.command(cls=_Command)
def fingerprint(
    checkpoint: Annotated[
        Path, typer.Argument(help="Checkpoint that you trust: folder, GGUF file, or hub:NAME\\[@REVISION].")
    ],
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="File to write. An existing file is replaced.")
    ],
    key_env: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="VAR",
            help="Environment variable with the key of an earlier file. If the option is missing or the "
            "variable is not set, the command makes a new key.",
        ),
    ] = None,
    numerics: Annotated[
        str, typer.Option(metavar="NAME", help="Numerics of the executors: ring or ring-fine.")
    ] = "ring",
) -> None:
    """Make a file of fingerprints, to check executors' products against your own checkpoint's weights.

    A new key is printed once. Keep it apart from the file: with both, products can be forged.
    """
    with imports.without_gc():
        from tenant_sdk.products.fingerprints import write_fingerprints

    progress = partial(track, console=STATUS, transient=True)
    passed_key = os.environ.get(key_env or "") or None
    key = write_fingerprints(checkpoint, output, key=passed_key, numerics=numerics, progress=progress)
    if passed_key is None:
        print(key)
    variable = key_env or "FINGERPRINT_KEY"
    STATUS.print(
        f"wrote {escape(str(output))}; use it with --fingerprints {escape(str(output))} "
        f"--fingerprint-key-env {variable}"
        + (f" after `export {variable}=...`: the key is shown only now" if passed_key is None else "")
    )


@app.command(cls=_Command)
@options.command_line.takes
def doctor(
    executors: options.SessionOptions,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Maximum time to wait until all executors listen.")
    ] = 30.0,
) -> None:
    """Check executors step by step. At the first failure, print the fault and a remedy."""
    targets, rules = executors.targets(wait)
    urls = escape(" and ".join(target.party for target in targets))
    STATUS.print(f"examining {urls} (loading torch takes some seconds)")
    with imports.without_gc():
        from tenant_sdk.command_line.doctor import diagnose

    failed = False
    for title, results in diagnose(targets, rules):
        if title:
            RESULTS.print(f"[bold]{escape(title)}[/]")
        for result in results:
            mark = {True: "[green]✓[/]", False: "[bold red]✗[/]", None: "[yellow]![/]"}[result.ok]
            RESULTS.print(f"{mark} {result.step + ' ':<13}{escape(result.detail.shown(executors.names))}")
            if result.remedy:
                RESULTS.print(f"  {'':<13}→ {escape(result.remedy.shown(executors.names))}")
            failed |= result.ok is False
    if failed:
        raise typer.Exit(1)
    RESULTS.print("[green]no fault was found[/]")


app.command(cls=_Command)(generate)
app.command(cls=_Command)(chat)
app.command(cls=_Command)(draft)
app.command(cls=_Command)(serve)
app.command(cls=_Command)(data)
app.command(cls=_Command)(evaluate)


@app.command(cls=_Command)
def trust(
    file: Annotated[
        Path, typer.Argument(help="symbiosis.toml, or the settings file of a tracker. Read it first.")
    ],
) -> None:
    """Approve a file. Commands that run in its folder then use it, until it changes."""
    RESULTS.print(f"{escape(str(approve(file)))} is used by commands that find it, until it changes")


def run(application: Callable[[], Any]) -> None:
    """Run a command line; an error that this project raises becomes one line and exit status 1."""
    escape_output()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[Lines()])
    if not sys.warnoptions:
        # Deprecations between libraries are no news to whoever types a command.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
    try:
        application()
    except SymbiosisError as error:
        error.show_options(NAMES)
        STATUS.print(f"[bold red]error:[/] {escape(str(error))}")
        print_notes(error)
        sys.exit(1)
    except BaseException as error:
        # How the compiled part of a tokenizer gives up on a text; the class has no name that can be imported.
        if type(error).__name__ != "PanicException":
            raise
        reason = escape(peer_text(str(error)))
        STATUS.print(f"[bold red]error:[/] the tokenizer cannot read the text: {reason}")
        sys.exit(1)


def main() -> None:
    """Entry point of ``symbiosis-tenant``."""
    run(app)


if __name__ == "__main__":
    main()
