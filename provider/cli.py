"""``symbiosis-provider``: certificates, tokens, and the executor itself."""

from __future__ import annotations

import datetime
import gc
import json
import logging
import os
import queue
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

# Threads that spin for long between products take the processor from TLS, and from tenants on the
# same machine. Must be set before torch loads its runtime; docs/explanation/performance.md has the effect.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Half a megabyte of code each; a thousand otherwise (see provider.executor.weights).
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm
from typer.core import TyperCommand, TyperGroup

from provider.config import ServeConfig
from provider.dev import Development
from provider.executor.memory_check import memory_errors
from provider.observe.log import console as _errors
from provider.observe.log import log_to_console, logs_json
from provider.observe.supervisor import notify
from provider.planning.options import PlanOptions, check_shapes, parse_assumed, parse_network
from provider.serve.certificates import DEFAULT_DAYS, DEFAULT_HOSTS, write_certificates
from provider.serve.listening import bound
from provider.serve.preflight import check_inputs, check_outputs, check_world
from provider.serve.tokens import OVERLAP_DAYS, TokenFile, check_tenant, shown
from provider.workers.rank import supervise
from provider.workers.world import World
from shared import imports
from shared.command_line import CommandLine, escape_output, prints_version, with_usual_help
from shared.errors import ConfigurationError, OptionText, SymbiosisError, counted
from shared.memory import FreedMemory, keep_freed_memory
from shared.options import flags_of

if TYPE_CHECKING:
    from provider.serve.provider import Provider

log = logging.getLogger(__name__)

# A file or pipe has no width of its own, and eighty columns would break the tables.
_tables = Console(width=None if sys.stdout.isatty() else 150)
CONFIGURATION = 78  # exit status; EX_CONFIG of sysexits.h

_Command, _Group = with_usual_help(TyperCommand), with_usual_help(TyperGroup)
app = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
token_app = typer.Typer(cls=_Group, no_args_is_help=True, help="Manage the tokens of tenants.")
app.add_typer(token_app, name="token")


_NAMES = flags_of(ServeConfig) | flags_of(PlanOptions)
_command_line = CommandLine(typer.Option, typer.Argument)


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the version.",
            is_eager=True,
            callback=prints_version("symbiosis-provider"),
        ),
    ] = False,
) -> None:
    """Host the frozen layers (the linear layers) of a language model for tenants."""


@app.command(cls=_Command)
def certs(
    directory: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for the PEM files.")],
    host: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads it at run time
        typer.Option(
            metavar="HOST",
            help="Name or address of the executor. Repeat for several. Default: localhost, 127.0.0.1, ::1.",
        ),
    ] = None,
    days: Annotated[
        int, typer.Option(metavar="DAYS", min=1, max=825, help="Days that the certificates are valid.")
    ] = DEFAULT_DAYS,
    force: Annotated[bool, typer.Option("--force", help="Replace existing certificates.")] = False,
) -> None:
    """Make a development CA, and certificates for a server and a client."""
    if (directory / "ca.pem").exists() and not force:
        raise ConfigurationError(
            f"{directory} holds certificates, and tenants who trust them would not trust new ones; choose "
            "another folder, or replace them with --force"
        )
    now = datetime.datetime.now(datetime.UTC)
    write_certificates(directory, host or DEFAULT_HOSTS, now=now, days=days)
    print(
        f"wrote ca.pem (give it to tenants), server.pem/.key and client.pem/.key in {directory}, "
        f"valid until {now + datetime.timedelta(days=days):%Y-%m-%d}"
    )


_Days = Annotated[
    Optional[int],  # noqa: UP045 - typer reads it at run time
    typer.Option(metavar="DAYS", min=1, max=3650, help="Days that the token is valid. Default: no limit."),
]


def _tenant(name: str) -> str:
    """An argument that is no name reads as an option that is out of range."""
    try:
        return check_tenant(name)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from error


def _print_token(token: str, days: int | None) -> None:
    valid = "for ever; --days N makes one that expires"
    if days is not None:
        valid = f"for {counted(days, 'day')}"
    _errors.print(f"valid {valid}; it is shown only now", highlight=False)
    print(token)


@token_app.command("add", cls=_Command)
def token_add(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.", callback=_tenant)],
    token_file: Annotated[
        Path, typer.Option(metavar="FILE", help="File for the token's hash. It is created if needed.")
    ],
    days: _Days = None,
) -> None:
    """Make a token for a tenant, and print it once. The tenant's older tokens become invalid."""
    tokens = TokenFile(token_file)
    older = tokens.count_valid(tenant)
    token = tokens.add(tenant, days)
    if older:
        _errors.print(
            f"this ended {counted(older, 'older token')} of {tenant}; `token rotate` keeps the newest "
            "for a while",
            highlight=False,
        )
    _print_token(token, days)


@token_app.command("rotate", cls=_Command)
def token_rotate(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.")],
    token_file: Annotated[Path, typer.Option(metavar="FILE", help="File that `token add` made.")],
    days: _Days = None,
    overlap_days: Annotated[
        int, typer.Option(metavar="DAYS", min=0, max=365, help="Days that the present token stays valid.")
    ] = OVERLAP_DAYS,
) -> None:
    """Make a further token for a tenant, and print it once. The present one stays valid for some days."""
    _print_token(TokenFile(token_file).rotate(tenant, days, overlap_days), days)


@token_app.command("list", cls=_Command)
def token_list(
    token_file: Annotated[Path, typer.Option(metavar="FILE", help="File that `token add` made.")],
) -> None:
    """List the tokens: tenant, creation and expiry (UTC)."""
    now, listed = datetime.datetime.now(datetime.UTC), TokenFile(token_file).listed()
    print(f"{'TENANT':<24} {'MADE':<17} EXPIRES")
    for tenant, token in listed:
        ended = " (expired)" if token.ended(now) else ""
        print(f"{tenant:<24} {shown(token.made, 'unknown'):<17} {shown(token.expires)}{ended}")


@token_app.command("remove", cls=_Command)
def token_remove(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.")],
    token_file: Annotated[Path, typer.Option(metavar="FILE", help="File that `token add` made.")],
) -> None:
    """Remove a tenant. Its sessions end within seconds."""
    TokenFile(token_file).remove(tenant)


@app.command(cls=_Command)
@_command_line.takes
def serve(config: ServeConfig) -> None:
    """Serve a checkpoint's linear layers until SIGTERM or SIGINT."""
    log_to_console(config.log_format)
    if config.plan:
        _show_layout(config)
        return
    world = World.from_environment()
    if world is not None:
        check_world(config)
        if world.rank:
            log.info("rank %d of %d: a worker", world.rank, world.size)
            supervise(config.drain_seconds)
            return
    keep_freed_memory()
    # Whatever can be wrong is told before what takes seconds to import, or minutes to load.
    now = datetime.datetime.now(datetime.UTC)
    check_inputs(config, now)
    with ExitStack() as opened:
        listener = opened.enter_context(bound(config.host, config.port))
        check_outputs(config, now)
        development = opened.enter_context(Development(config)) if config.dev else None
        log.info("reading %s", config.model_dir)
        _serve(config, listener, development, world)


def _show_layout(config: ServeConfig) -> None:
    """Print which worker would have what."""
    check_shapes(config.model_dir)
    log.info("loading torch, and measuring products")
    with imports.without_gc():
        from provider.planning.layout import described, plan_layout, read_groups
        from provider.planning.tables import reasons, workers_table

    layout = plan_layout(
        read_groups(config.model_dir, serve_head=config.serve_head),
        config.worker_devices or [config.device],
        numerics=config.numerics,
        stripes=config.stripes,
        threads=config.threads,
        processes=bool(config.worker_devices),
        allow_misfit=True,
    )
    report = {"model": str(config.model_dir)} | described(layout)
    sentences = [*reasons(layout), *layout.doubts]
    _print_plan(layout.misfit, report if config.json else None, [workers_table(layout)], sentences)


def _print_plan(
    misfit: OptionText, report: dict[str, Any] | None, tables: Sequence[Table], sentences: Sequence[str]
) -> None:
    """As JSON, or tables and sentences below a warning; weights that do not fit have an exit status."""
    if report is not None:
        print(json.dumps(report, indent=1))
    else:
        if misfit:
            _tables.print(f"[bold red]{escape(misfit.shown(_NAMES))}.[/]", highlight=False)
        _tables.print(*tables)
        for line in sentences:
            _tables.print(f"{line}.", highlight=False)
    if misfit:
        raise typer.Exit(CONFIGURATION)


@app.command("plan", cls=_Command)
@_command_line.takes
def plan_capacity(options: PlanOptions) -> None:
    """Forecast the throughput of tenants, and name the limiting resource. Reads no weights."""
    link, assumed = parse_network(options.network), parse_assumed(options.assume)
    check_shapes(options.model)
    _errors.print("loading torch, and measuring products", highlight=False)
    with imports.without_gc():
        from provider.planning.capacity import Tenants, plan
        from provider.planning.kept import kept_forecasts
        from provider.planning.layout import described, plan_layout, read_groups
        from provider.planning.tables import (
            assumption,
            kept_table,
            plan_described,
            plan_table,
            reasons,
            source,
            workers_table,
        )
        from shared.wire.header import EXACT, half_bits

    layout = plan_layout(
        read_groups(options.model),
        options.worker_devices or ["cpu"],
        numerics=options.numerics,
        stripes=options.stripes,
        assumed=assumed,
        processes=options.workers > 0 or len(options.worker_devices) > 1,
        allow_misfit=True,
    )
    tenants = Tenants(
        options.tenants,
        options.rows,
        answer_bits=half_bits(options.numerics) if options.answers == "half" else EXACT,
        sources=options.mask_sources,
    )
    lanes, size = layout.lanes(), layout.itemsize
    capacity = plan(
        lanes, layout.shapes, itemsize=size, link=link, tenants=tenants, groups=layout.dense_groups
    )
    forecasts = kept_forecasts(
        lanes,
        layout.shapes,
        layout.dense_groups,
        itemsize=size,
        answer_bits=tenants.answer_bits,
        sources=tenants.sources,
    )
    names = ("network", "tenants", "rows", "answers", "mask_sources")
    asked = {name: getattr(options, name) for name in names}
    report = {"model": str(options.model)} | asked | described(layout) | plan_described(capacity)
    report["kept"] = [each._asdict() for each in forecasts]
    tables = [
        workers_table(layout),
        plan_table(capacity, options.tenants, options.rows, source(layout)),
        kept_table(forecasts),
    ]
    sentences = [*reasons(layout), *layout.doubts, assumption()]
    _print_plan(layout.misfit, report if options.json else None, tables, sentences)


def _serve(
    config: ServeConfig, listener: socket.socket, development: Development | None, world: World | None
) -> None:
    """Until a signal, or until a mask source that this started has ended."""
    # Something may be put into it in the middle of getting; an event cannot be set in the middle of waiting.
    signals: queue.SimpleQueue[bool] = queue.SimpleQueue()  # whether to stop, or to read certificates again
    terminal = os.isatty(0)

    def hung_up(*_: object) -> None:
        # A terminal that has been closed says the same as who has renewed the certificate.
        signals.put(terminal and not os.isatty(0))

    signal.signal(signal.SIGHUP, hung_up)
    log.info("loading torch")
    with memory_errors(config.model_dir.name), imports.without_gc():
        from provider.serve.provider import Provider
    log.info("loading weights")

    def progress(items: Any, what: str) -> Any:
        # None: only on a terminal
        return tqdm(items, desc=what, unit="group", file=sys.stderr, disable=True if logs_json() else None)

    provider = Provider(config, listener=listener, world=world, progress=progress)
    provider.start()
    # What is loaded stays: the garbage collector need not walk it again in the middle of requests.
    gc.collect()
    gc.freeze()
    _introduce(provider)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: signals.put(True))
    if development is not None:
        print(development.instructions(provider.url), flush=True)
    provider.announce()
    notify("READY=1")
    # With a timeout: a signal that another thread takes runs its handler only when this one wakes.
    freed = FreedMemory()
    lost = False
    while not lost:
        try:
            if signals.get(timeout=0.5):
                break
            provider.reload_certificate()
            if development is not None:
                development.reload()
        except queue.Empty:
            freed.trim()
            lost = development is not None and not development.alive
    notify("STOPPING=1")
    log.info("draining")
    if development is not None:
        development.stop()
    clean = provider.drain(config.drain_seconds)
    provider.close()
    log.info("stopped" if clean else "stopped; some requests were cut off")
    if development is not None and lost:
        development.check()


def _introduce(provider: Provider) -> None:
    """Say what is served, and where."""
    config, manifest = provider.config, provider.manifest
    if provider.recording is not None:
        log.warning(
            "RECORDING everything that tenants send into %s; they are told, and refuse unless they allow it",
            provider.recording.path,
        )
    for worker in provider.workers():
        where = f"PID {worker.pid}" if worker.pid else "elsewhere"
        log.info("worker %s: %s, on %s, %d groups", worker.name, where, worker.device, worker.groups)
    groups = f"{len(manifest.groups)} groups"
    if manifest.part is not None:
        first, stop = manifest.part
        groups = f"part {config.part}: groups {first} to {stop - 1} of {len(manifest.groups)}"
    if count := len(provider.workers()):
        groups += f", {counted(count, 'worker')}"
    log.info(
        "serving %s (%s, %s, %s, digest %s) to %s at %s; status at %s/",
        manifest.model,
        manifest.architecture,
        config.numerics,
        groups,
        manifest.digest[:16],
        counted(provider.tenants, "tenant"),
        " and ".join(filter(None, (provider.url, provider.local_url))),
        provider.admin_url,
    )
    if not provider.tenants:
        log.warning(
            "no tenant has a valid token: `symbiosis-provider token add TENANT --token-file %s`",
            config.tokens,
        )


def run(application: Callable[[], Any]) -> None:
    """Run a command line; an error that this project raises becomes one line and an exit status.

    It is CONFIGURATION if trying again would not help, else 1; that of options that cannot be read is 2.
    """
    escape_output()
    try:
        application()
    except SymbiosisError as error:
        error.show_options(_NAMES)
        message = str(error)
        if logs_json():
            log.error("%s", message)
        else:
            try:
                _errors.print(f"[bold red]error:[/] {escape(message)}", highlight=False)
            except MemoryError:  # of which this error may tell
                print(f"error: {message}", file=sys.stderr)
        sys.exit(CONFIGURATION if isinstance(error, ConfigurationError) else 1)


def main() -> None:
    """Entry point of ``symbiosis-provider``."""
    run(app)


if __name__ == "__main__":
    main()
