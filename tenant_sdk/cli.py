"""``symbiosis-tenant``: fine-tune, generate, fingerprint a checkpoint, find out what is wrong."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
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
from shared.errors import SymbiosisError, peer_text
from shared.options import escape_output, in_options, prints_version
from tenant_sdk import cli_options as options
from tenant_sdk import context_options as contexts
from tenant_sdk.config import SessionConfig
from tenant_sdk.connection.urls import party_name
from tenant_sdk.gateway.command import serve
from tenant_sdk.profiles import approve
from tenant_sdk.terminal import Terminal
from tenant_sdk.tuning.data_command import data

if TYPE_CHECKING:
    from tenant_sdk.session import Session

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
# Standard output is for results (text, figures); everything else goes to standard error.
_status = Terminal(stderr=True)
_results = Terminal()


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show it.", is_eager=True, callback=prints_version("symbiosis-tenant")
        ),
    ] = False,
) -> None:
    """Use a language model whose frozen layers a provider hosts, keeping text and adapters here."""


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


def _print_notes(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        _status.print(escape(note))


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
def finetune(
    connection: options.SessionOptions,
    data: Annotated[
        list[Path],
        typer.Option(
            help="What to learn from: plain text, or JSONL whose records have `text`, or `prompt` and "
            "`completion`, or `messages`; all in UTF-8. Repeat for several files. `symbiosis-tenant data` "
            "shows what is learned of them."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder to make for the adapter, in PEFT's format.")],
    method: Annotated[
        str,
        typer.Option(help="lora, rslora, adalora, ia3, vera, loha, lokr, prefix, prompt or p-tuning."),
    ] = "lora",
    rank: Annotated[int, typer.Option(min=1, help="Of the low-rank methods.")] = 8,
    target_modules: Annotated[
        str, typer.Option(help="Layers that low-rank methods adapt: names with commas, or all-linear.")
    ] = "all-linear",
    virtual_tokens: Annotated[int, typer.Option(min=1, help="Of prefix, prompt and p-tuning.")] = 20,
    learning_rate: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Default: by method, 0.001 for lora."),
    ] = None,
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Optimizer steps, instead of --epochs."),
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = 3.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Blocks or records a step.")] = 8,
    sequence_length: contexts.SequenceLength = contexts.LENGTH,
    max_length: contexts.MaxLength = None,
    memory_gib: contexts.Memory = None,
    train_on_prompt: contexts.TrainOnPrompt = False,
    packing: Annotated[
        bool,
        typer.Option(
            "--packing", help="Put the records of a step into one row instead of padding them: fewer bytes."
        ),
    ] = False,
    seed: options.Seed = 0,
    held_out: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(
            help="Data to measure perplexity on, before and after; not learned from. Repeat for several."
        ),
    ] = None,
    save_steps: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 50,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted training.")] = False,
    report_to: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="tensorboard (files in OUTPUT.runs), wandb or another that the Trainer knows. Losses, "
            "options and the model's configuration go there, no text. Repeat for several.",
            metavar="NAME",
        ),
    ] = None,
    tokenizer: options.Tokenizer = None,
    model: options.Model = None,
    base: options.Base = None,
) -> None:
    """Train an adapter on files; the text, the adapter and its gradients stay on this machine."""
    from tenant_sdk.storage import TrainingCheckpoints, check_new_folder
    from tenant_sdk.tuning.adapters import find_method
    from tenant_sdk.tuning.records import check_data

    find_method(method)
    TrainingCheckpoints(check_new_folder(output), {}).check(resume=resume)
    config = connection.session()
    check_data([*data, *(held_out or ())])
    with _loading():
        from tenant_sdk.composition import open_session
        from tenant_sdk.tuning.finetuning import TrainingOptions
        from tenant_sdk.tuning.finetuning import finetune as train
        from tenant_sdk.tuning.own import load
        from tenant_sdk.tuning.preview import show_first
        from tenant_sdk.tuning.progress import TrainingStep

    # Beside the adapter: what lies in the folder of the training goes when it is done.
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", f"{output}.runs")
    training = TrainingOptions(
        data=tuple(data),
        output=output,
        held_out=tuple(held_out or ()),
        method=method,
        rank=rank,
        targets=tuple(name.strip() for name in target_modules.split(",")),
        virtual_tokens=virtual_tokens,
        learning_rate=learning_rate,
        steps=steps,
        epochs=epochs,
        batch_size=batch_size,
        sequence_length=contexts.text_length(sequence_length, max_length),
        memory_gib=memory_gib,
        seed=seed,
        save_steps=save_steps,
        resume=resume,
        train_on_prompt=train_on_prompt,
        packing=packing,
        report_to=tuple(report_to or ()),
    )
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
        adapted, words = load(session, tokenizer, model, base, bars=_status.is_terminal)
        task = bar.add_task("training", total=None, loss="", speed="", visible=False)

        def show(now: TrainingStep) -> None:
            left = timedelta(seconds=round(now.seconds_left))
            fields = {"speed": f"{now.tokens_per_second:,.0f} tokens/s, {left} left"}
            if now.loss is not None:
                fields["loss"] = f"{now.loss:.4f}"
            bar.update(task, completed=now.step, total=now.steps, visible=True, **fields)  # type: ignore[arg-type]
            if now.loss is not None and not _status.is_terminal:
                _status.print(f"step {now.step} of {now.steps}: loss {fields['loss']}, {fields['speed']}")

        report = train(
            training,
            adapted,
            words,
            session,
            show=show,
            say=lambda line: _status.print(escape(line)),
            preview=lambda example: show_first(_status, words, example),
            keep_tokenizer=tokenizer is not None,
        )
    since = f" since step {report.resumed_at}" if report.resumed_at else ""
    _results.print(
        f"loss: {report.first_loss:.4f} at the start, {report.last_loss:.4f} at the end of {report.steps} "
        f"steps ({report.seconds:.1f} s{since})"
    )
    if report.perplexity_before is not None and report.perplexity_after is not None:
        _results.print(
            f"held-out perplexity: {report.perplexity_before:.2f} before, {report.perplexity_after:.2f} after"
        )
    _print_stats(session, config, _results)
    _results.print(f"adapter: {escape(str(output))}")


@app.command()
@options.command_line.takes
def generate(
    connection: options.SessionOptions,
    prompt: contexts.Prompt = None,
    prompt_file: contexts.PromptFile = None,
    adapter: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder of an adapter, as finetune writes it."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after so many tokens at the latest.")] = 100,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest tokens of this share.")] = 1.0,
    seed: options.Seed = 0,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="The prompt is what a user says to a chat model, and what is written the answer: the "
            "tokenizer's chat template puts the prompt into a conversation. Without this the model goes on "
            "from the prompt as it is.",
        ),
    ] = False,
    stop: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="Stop after this text, besides where the model ends its own. Repeat for several.",
            metavar="TEXT",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            help="Above 1: make tokens less likely that the prompt or the text has already. It also keeps an "
            "adapter from copying out of the prompt, so 1, off, is the default."
        ),
    ] = 1.0,
    allow_loops: Annotated[
        bool,
        typer.Option(
            "--allow-loops",
            help="Go on when the text only repeats itself (its end three times over, 32 tokens or more); "
            "without this it ends there, and says so.",
        ),
    ] = False,
    kv: contexts.Kv = None,
    kv_memory_gib: contexts.KvMemory = 0.0,
    kv_folder: contexts.KvFolder = None,
    memory_gib: contexts.PromptMemory = 1.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="No figures at the end.")] = False,
    tokenizer: options.Tokenizer = None,
    model: options.Model = None,
    allow_other_base: Annotated[
        bool, typer.Option("--allow-other-base", help="Load an adapter that was made for another model.")
    ] = False,
) -> None:
    """Continue a prompt, with or without an adapter; the text and the adapter stay on this machine."""
    from tenant_sdk.storage import check_adapter_folder
    from tenant_sdk.tuning.sampling import Sampling

    text = contexts.prompt_text(prompt, prompt_file)
    config = connection.session()
    if adapter is not None:
        check_adapter_folder(adapter)
    sampling = Sampling(
        max_new_tokens,
        temperature,
        top_p,
        seed,
        repetition_penalty=repetition_penalty,
        stop=tuple(stop or ()),
        stop_loops=not allow_loops,
    )
    with _loading():
        from tenant_sdk.composition import open_session
        from tenant_sdk.sequences.contexts import LongContext, default_place
        from tenant_sdk.tuning.folders import load_adapter
        from tenant_sdk.tuning.generation import stream
        from tenant_sdk.tuning.own import load, not_used, tokenizer_in

    place = LongContext(kv or "host", kv_memory_gib, kv_folder, memory_gib)
    _say_connecting(config)
    if tokenizer is None and adapter is not None and tokenizer_in(adapter):
        _status.print(escape(not_used(adapter)))
    with open_session(config) as session:
        ready, words = load(session, tokenizer, model, bars=_status.is_terminal)
        if adapter is not None:
            ready = load_adapter(ready, adapter, session, allow_other_base=allow_other_base)
        if kv is None:
            place = replace(place, kv=default_place(ready))
        fitting = partial(place.fitting, ready, session.manifest.groups)
        written = stream(ready, words, text, sampling, chat=chat, fitting=fitting)
    if quiet:
        return
    _status.print(
        f"{written.tokens} tokens in {written.seconds:.1f} s, {written.tokens / written.seconds:.1f} "
        f"tokens/s; ended by: {written.end}"
    )
    _print_stats(session, config, _status)


@app.command()
def fingerprint(
    checkpoint: Annotated[
        Path, typer.Argument(help="Checkpoint that you trust: folder, or hub:NAME[@REVISION].")
    ],
    output: Annotated[Path, typer.Option(help="File to write; an existing one is replaced.")],
    key_env: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="VAR", help="Variable with the key to write it under. Not given or set: a new key."
        ),
    ] = None,
    numerics: Annotated[
        str, typer.Option(help="Of the executors whose answers will be checked: ring or ring-fine.")
    ] = "ring",
) -> None:
    """Make a file with which sessions check answers against your own checkpoint's weights.

    A new key is printed once: with it answers can be forged, so keep it apart from the file.
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
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for an executor to listen.")
    ] = 30.0,
) -> None:
    """Check executors step by step; at the first failure, say what is wrong and what to do."""
    targets, terms = executors.targets(wait)
    urls = escape(" and ".join(target.party for target in targets))
    _status.print(f"examining {urls} (loading torch takes some seconds)")
    with imports.at_once():
        from tenant_sdk.doctor import diagnose

    failed = False
    for title, results in diagnose(targets, terms):
        if title:
            _results.print(f"[bold]{escape(title)}[/]")
        for result in results:
            mark = {True: "[green]✓[/]", False: "[bold red]✗[/]", None: "[yellow]![/]"}[result.ok]
            _results.print(f"{mark} {result.step:<13}{_escaped(result.detail, executors.names)}")
            if result.remedy:
                _results.print(f"  {'':<13}→ {_escaped(result.remedy, executors.names)}")
            failed |= result.ok is False
    if failed:
        raise typer.Exit(1)


app.command()(serve)
app.command()(data)


@app.command()
def trust(
    file: Annotated[Path, typer.Argument(help="symbiosis.toml, or a tracker's, that you have read.")],
) -> None:
    """Let commands use a file that they find in the folder where they run, until it changes."""
    _results.print(f"{escape(str(approve(file)))} is used by commands that find it, until it changes")


def _escaped(message: str, names: Mapping[str, str] = options.NAMES) -> str:
    """What errors say, in the words of this command line and without markup."""
    return escape(in_options(message, names))


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
        _status.print(f"[bold red]error:[/] {_escaped(str(error))}")
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
