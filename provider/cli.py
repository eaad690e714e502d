"""``symbiosis-provider``: certificates, tokens, and the executor itself."""

from __future__ import annotations

import datetime
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

# Threads that spin for long between products take the processor from TLS, and from tenants on the
# same machine. Must be set before torch loads its runtime; docs/performance.md has the effect.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Half a megabyte of code each; a thousand otherwise (see provider.executor.weights).
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")

import typer
from rich.markup import escape
from tqdm import tqdm

from provider.observe.log import console as _errors
from provider.observe.log import log_to_console
from provider.serve.certificates import DEFAULT_DAYS, DEFAULT_HOSTS, write_certificates
from provider.serve.descriptors import allow, needed
from provider.serve.tokens import TokenFile
from shared.errors import ConfigurationError, SymbiosisError
from shared.memory import FreedMemory, keep_freed_memory

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
token_app = typer.Typer(no_args_is_help=True, help="Manage the tokens of tenants.")
app.add_typer(token_app, name="token")


@app.callback()
def _root() -> None:
    """Host the frozen layers of a language model for tenants."""


@app.command()
def certs(
    directory: Annotated[Path, typer.Argument(help="Where the PEM files go.")],
    host: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads it at run time
        typer.Option(help="Name or address of the executor; repeat for more. Default: this machine."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=825, help="How long they are valid.")] = DEFAULT_DAYS,
    force: Annotated[bool, typer.Option("--force", help="Replace certificates that are there.")] = False,
) -> None:
    """Make a development CA with a server and a client certificate."""
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


@token_app.command("add")
def token_add(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.")],
    token_file: Annotated[Path, typer.Option(help="Stores the token's hash; made if needed.")],
) -> None:
    """Print a new token for a tenant, which replaces an older one; it is shown only now."""
    print(TokenFile(token_file).add(tenant))


@token_app.command("remove")
def token_remove(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.")],
    token_file: Annotated[Path, typer.Option(help="Made by `token add`.")],
) -> None:
    """Forget a tenant; open sessions go on, no further one opens."""
    TokenFile(token_file).remove(tenant)


@app.command()
def serve(
    model_dir: Annotated[Path, typer.Argument(help="Checkpoint folder with safetensors.")],
    tls_dir: Annotated[Path, typer.Option(help="Folder with server.pem and server.key.")],
    token_file: Annotated[Path, typer.Option(help="Made by `token add`.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 picks a free port.")] = 8765,
    numerics: Annotated[
        str, typer.Option(help="float32, bfloat16 or ring; tenants' one-time masks need ring.")
    ] = "float32",
    ready_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Gets {url, pid, admin_url}, and local_url if there is one, once all is open."),
    ] = None,
    admin_port: Annotated[
        int, typer.Option(help="Loopback port of the status page, /metrics and /healthz; 0 picks one.")
    ] = 0,
    client_ca: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Also ask tenants for a certificate signed by this authority."),
    ] = None,
    serve_head: Annotated[bool, typer.Option(help="Also serve the output head.")] = False,
    max_connections: Annotated[int, typer.Option(help="Close further connections at once.")] = 256,
    tenant_connections: Annotated[int, typer.Option(help="Turn further ones of one tenant away.")] = 64,
    drain_seconds: Annotated[float, typer.Option(help="How long SIGTERM waits for requests.")] = 10.0,
    device: Annotated[str, typer.Option(help="Where products run: cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[int, typer.Option(help="Threads of one product; 0: one a core.")] = 0,
    batching: Annotated[
        str, typer.Option(help="opportunistic, none or lockstep: which requests share a product.")
    ] = "opportunistic",
    decode_objective_ms: Annotated[
        float, typer.Option(min=1.0, help="What the executor may take of one decoded token's time.")
    ] = 100.0,
    batch_wait_ms: Annotated[
        float, typer.Option(help="The most that a request waits for others to join it.")
    ] = 5.0,
    tenant_mib: Annotated[
        int, typer.Option(help="MiB of requests and answers that one tenant may have in flight; 0: any.")
    ] = 512,
    total_mib: Annotated[
        int, typer.Option(help="MiB of requests and answers in flight in all; 0: any.")
    ] = 2048,
    tenant_rows: Annotated[int, typer.Option(help="Rows that one tenant may have in flight; 0: any.")] = 0,
    tenant_requests: Annotated[
        float, typer.Option(help="Requests that one tenant may send in a second; 0: any.")
    ] = 0.0,
    tenant_mib_per_second: Annotated[
        float, typer.Option(help="MiB of requests that one tenant may send in a second; 0: any.")
    ] = 0.0,
    local_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Also let tenants of this machine and user in, through this directory (ipc://DIR)."
        ),
    ] = None,
    local_mib: Annotated[
        int, typer.Option(help="MiB of shared memory of all local sessions together.")
    ] = 2048,
    transcript: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Record what tenants send into this folder, for an audit; tenants are told."),
    ] = None,
) -> None:
    """Serve a checkpoint's frozen layers until SIGTERM or SIGINT."""
    log_to_console()
    import torch

    from provider.engine.engine import Engine, profile
    from provider.engine.scheduler import POLICIES, Objective, Opportunistic, make_policy
    from provider.executor.base import BaseExecutor
    from provider.observe.admin import AdminServer
    from provider.observe.metrics import Metrics
    from provider.observe.status import Status
    from provider.observe.transcript import Transcript
    from provider.serve.colocated import ColocatedServer
    from provider.serve.server import Server, server_context
    from provider.session.quota import Limit, Quotas
    from provider.session.tenant import Service

    if batching not in POLICIES:
        raise ConfigurationError(f"unknown --batching {batching!r}; choose from {', '.join(POLICIES)}")
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    allow(needed(max_connections, local=bool(local_dir)))
    context = server_context(tls_dir, client_ca)
    tokens = TokenFile(token_file)
    tenants = tokens.check_readable()

    def progress(items: Any, what: str) -> Any:
        return tqdm(items, desc=what, unit="group", file=sys.stderr)

    executor = BaseExecutor(
        model_dir,
        numerics=numerics,
        device=device,
        serve_head=serve_head,
        recorded=transcript is not None,
        progress=progress,
    )
    # What is loaded stays: the garbage collector need not walk it again in the middle of requests.
    gc.collect()
    gc.freeze()
    metrics = Metrics()
    recording = None
    if transcript is not None:
        recording = Transcript(transcript, executor.manifest)
        _errors.print(
            f"[bold red]RECORDING[/] everything that tenants send into {recording.path}; tenants are told, "
            "and refuse unless they allow it"
        )
    objective = Objective(decode_objective_ms / 1000, wait_seconds=batch_wait_ms / 1000)
    latency = profile(executor)
    policy = make_policy(batching, latency, objective)
    quotas = Quotas(
        Limit(tenant_mib << 20, tenant_rows, tenant_requests, tenant_mib_per_second * 2**20),
        Limit(total_mib << 20),
    )
    engine = Engine.of(executor, lambda latency: policy, latency, on_batch=metrics.batch)
    server = Server(
        Service(executor, engine, metrics, quotas, recording),
        context=context,
        tokens=tokens,
        host=host,
        port=port,
        max_connections=max_connections,
        tenant_connections=tenant_connections,
    )
    local = local_dir and ColocatedServer(
        server.service,
        tokens=tokens,
        directory=local_dir.absolute(),
        sessions=server.sessions,
        memory_bytes=local_mib << 20,
        tenant_memory_bytes=(tenant_mib or local_mib) << 20,
    )
    metrics.watch(
        lambda: engine.waiting,
        lambda: quotas.in_flight()[1],
        lambda: policy.tokens.counts if isinstance(policy, Opportunistic) else (0, 0),
    )
    about = f"{executor.manifest.architecture}, {numerics}, {len(executor.manifest.groups)} groups"
    status = Status(
        metrics,
        {
            "model": executor.manifest.model,
            "summary": f"{about}; {batching} batching; decode objective {decode_objective_ms:g} ms a token",
        },
    )
    admin = AdminServer(metrics, admin_port, lambda: not server.draining, status)
    local_url = local.url if local else ""
    urls = f"{server.url} and {local_url}" if local_url else server.url
    _errors.print(
        f"serving [bold]{executor.manifest.model}[/] ({executor.manifest.architecture}, {numerics}, "
        f"{len(executor.manifest.groups)} groups, digest {executor.manifest.digest[:16]}) "
        f"to {tenants} tenants at {urls}; status at http://127.0.0.1:{admin.port}/"
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if ready_file is not None:
        more = {"local_url": local_url} if local_url else {}
        server.write_ready_file(ready_file, admin_url=f"http://127.0.0.1:{admin.port}", **more)
    # With a timeout: a signal that another thread takes runs its handler only when this one wakes.
    freed = FreedMemory()
    while not stop.wait(0.5):
        freed.give_back()
    _errors.print("draining")
    deadline = time.monotonic() + drain_seconds
    server.stop_listening()
    if local:
        local.close()
    clean = server.drain(max(1.0, deadline - time.monotonic()))
    server.service.close()
    admin.close()
    status.close()
    if recording is not None:
        recording.close()
    _errors.print("stopped" if clean else "stopped; some requests were cut off")


def run(application: Callable[[], Any]) -> None:
    """Run a command line; an error that this project raises becomes one line and exit status 1."""
    try:
        application()
    except SymbiosisError as error:
        _errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(1)


def main() -> None:
    """Entry point of ``symbiosis-provider``."""
    run(app)


if __name__ == "__main__":
    main()
