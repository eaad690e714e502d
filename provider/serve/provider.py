"""An executor behind its ports, put together as a ``ServeConfig`` says."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from provider.config import ServeConfig
from provider.engine.engine import Engine
from provider.engine.profiling import profiled
from provider.engine.scheduler import LatencyObjective, Opportunistic, make_policy
from provider.executor.base import BaseExecutor
from provider.observe.admin import AdminServer
from provider.observe.metrics import Metrics
from provider.observe.periodic import Periodic
from provider.observe.status import StatusHistory
from provider.observe.transcript import TranscriptWriter
from provider.observe.usage import UsageFile
from provider.serve.certificates import CertificateInUse
from provider.serve.colocated import ColocatedServer
from provider.serve.connection import ConnectionLimits
from provider.serve.descriptors import OF_A_WORKER, estimate_descriptors, raise_open_files_limit
from provider.serve.listening import bound
from provider.serve.preflight import remove_ready_file
from provider.serve.server import Server, server_context
from provider.serve.tokens import TokenFile
from provider.session.quota import Quota, Quotas
from provider.session.tenant import Service
from provider.workers.actors import placed
from provider.workers.pool import Sharding, WorkerPool
from provider.workers.state import WorkerState
from provider.workers.world import World
from shared.errors import ConfigurationError
from shared.wire.messages import Manifest

log = logging.getLogger(__name__)

LIVENESS_SECONDS = 5.0  # for the engine's loop to turn; what takes longer runs elsewhere
DAY = 86400.0
REVOKE_SECONDS = 5.0  # between two looks at whose tokens are still valid


class Provider:
    """A provider. It serves from ``start`` to ``close``. A ``with`` block starts, drains and closes it.

    ::

        with Provider(ServeConfig(model_dir=folder, tls_dir=tls, token_file=tokens, port=0)) as provider:
            print(provider.url)

    Args:
        config: Options of the provider.
        listener: Socket that ``bound`` has bound to the host and port of the configuration. Default:
            ``start`` makes it.
        world: Processes that compute products together, if another program, such as ``torchrun``, has started
            them.
        options: Other arguments of ``BaseExecutor``: ``limits`` and ``progress``.

    Attributes:
        tenants: Number of tenants that had a valid token at the start.
        recording: Writer of the transcript with the tenants' messages. None: there is no transcript.
        server: Server on the TLS port, with its sessions.
        admin_url: URL of the status page.
        local_url: URL for tenants on this machine. Empty: there is none.
    """

    tenants: int
    recording: TranscriptWriter | None
    server: Server
    admin_url: str
    local_url: str

    def __init__(
        self,
        config: ServeConfig,
        *,
        listener: socket.socket | None = None,
        world: World | None = None,
        **options: Any,
    ) -> None:
        self.config, self._listener, self._world, self._options = config, listener, world, options
        self._opened = ExitStack()
        self._local: ColocatedServer | None = None
        self._service: Service | None = None
        self._pool: WorkerPool | None = None
        self._not_ready = "loading"

    def start(self) -> None:
        """Load the checkpoint and listen. Returns when tenants can connect.

        Raises:
            CheckpointError: See ``BaseExecutor``.
            ConfigurationError: An option does not fit the checkpoint or this machine. Nothing stays open.
        """
        with ExitStack() as opened:
            self._start(opened)
            self._opened = opened.pop_all()

    def _start(self, opened: ExitStack) -> None:
        config = self.config
        if config.ready_file is not None:
            remove_ready_file(config.ready_file)
        if config.threads:
            torch.set_num_threads(config.threads)
        descriptors = estimate_descriptors(config.max_connections, local=bool(config.local_dir))
        raise_open_files_limit(descriptors + OF_A_WORKER * len(config.worker_devices))
        context = server_context(config.certificates, config.client_ca)
        self._certificate = CertificateInUse(context, config.certificates, config.client_ca)
        tokens = TokenFile(config.tokens)
        self.tenants = tokens.check_readable()
        # Whatever is taken or cannot be written is reported now: loading may take minutes.
        listener = self._listener or bound(config.host, config.port)
        opened.callback(listener.close)
        metrics, status = self._observe(tokens, opened)
        executor = self._load(opened)
        self.recording = None
        if config.transcript is not None:
            self.recording = TranscriptWriter(config.transcript, executor.manifest)
            opened.callback(self.recording.close)
        service = self._make_service(executor, metrics)
        opened.callback(service.close)
        self._watch(service, status)
        self.server = Server(
            service,
            context=context,
            tokens=tokens,
            host=config.host,
            listener=listener,
            limits=ConnectionLimits(
                config.max_connections, config.tenant_connections, config.max_connection_seconds
            ),
        )
        opened.callback(self.server.stop_listening)
        revoke = partial(self.server.connections.end_revoked, tokens)
        opened.callback(Periodic(REVOKE_SECONDS, revoke, "revocation").close)
        if config.local_dir is not None:
            self._local = ColocatedServer(
                service,
                tokens=tokens,
                directory=config.local_dir.absolute(),
                connections=self.server.connections,
                memory_bytes=config.local_mib << 20,
                tenant_memory_bytes=(config.tenant_mib or config.local_mib) << 20,
            )
            opened.callback(self._local.close)
        self.local_url = self._local.url if self._local else ""
        self._service, self._not_ready = service, ""

    def _load(self, opened: ExitStack) -> BaseExecutor | WorkerPool:
        config = self.config
        options = self._options | {
            "numerics": config.numerics,
            "serve_head": config.serve_head,
            "recorded": config.transcript is not None,
            "part": config.part_of_groups,
        }
        threads, world, devices = config.threads, self._world, config.worker_devices
        if world is not None:
            devices = (config.device,) * world.size
        elif config.launcher == "ray":
            threads = threads or 1
            world = opened.enter_context(placed(len(devices), threads, config.device))
        if not devices:
            return BaseExecutor(config.model_dir, device=config.device, **options)
        options.pop("progress", None)
        sharding = Sharding(devices, config.stripes, threads, world, config.fsdp)
        pool = WorkerPool(config.model_dir, sharding, **options)
        opened.callback(pool.close)
        self._pool = pool
        return pool

    def _make_service(self, executor: BaseExecutor | WorkerPool, metrics: Metrics) -> Service:
        config = self.config
        objective = LatencyObjective(
            config.decode_objective_ms / 1000, config.decode_rows, wait_seconds=config.batch_wait_ms / 1000
        )
        quotas = Quotas(
            Quota(
                config.tenant_mib << 20,
                config.tenant_rows,
                config.tenant_requests,
                config.tenant_mib_per_second * 2**20,
            ),
            Quota(config.total_mib << 20),
        )
        policy = partial(make_policy, config.batching, objective=objective)
        if isinstance(executor, WorkerPool):
            engine = executor.engine(policy, on_batch=metrics.batch)
        else:
            latency = profiled(executor, executor.manifest)
            engine = Engine.of(executor, policy, latency, on_batch=metrics.batch)
        return Service(executor, engine, metrics, quotas, self.recording)

    def _observe(self, tokens: TokenFile, opened: ExitStack) -> tuple[Metrics, StatusHistory]:
        """Open the admin port and the usage file, before anything is loaded: both outlive the engine."""
        config, metrics = self.config, Metrics()
        metrics.certificate(lambda: self._certificate.expires.timestamp())
        status = StatusHistory(metrics, {"model": config.model_dir.name, "summary": "loading"})
        opened.callback(status.close)
        admin = AdminServer(metrics, config.admin_port, self, status, config.admin_host)
        opened.callback(admin.close)
        self.admin_url = admin.url
        if config.usage_file is not None:
            failed = metrics.usage_failures.inc
            usage = UsageFile(config.usage_file, metrics.usage, config.usage_seconds, failed=failed)
            opened.callback(usage.close)
        metrics.tokens(tokens.ends)
        for name, warn in (("tokens", tokens.warn), ("certificate", self._certificate.warn)):
            warn()
            opened.callback(Periodic(DAY, warn, name).close)
        return metrics, status

    def _watch(self, service: Service, status: StatusHistory) -> None:
        config, manifest, policy = self.config, service.executor.manifest, service.engine.policy
        service.metrics.watch(
            lambda: service.engine.waiting,
            lambda: service.quotas.in_flight()[1],
            lambda: policy.tokens.counts if isinstance(policy, Opportunistic) else (0, 0),
        )
        if (pool := self._pool) is not None:
            service.metrics.workers = lambda: pool.states(service.engine.waiting_on)
        status.about = {
            "model": manifest.model,
            "summary": f"{manifest.architecture}, {config.numerics}, {len(manifest.groups)} groups; "
            f"{config.batching} batching; decode objective {config.decode_objective_ms:g} ms a token",
        }

    def alive(self) -> bool:
        """Whether the thread that answers all tenants makes progress."""
        if self._service is None:
            return True  # loading, which has no loop
        turned = threading.Event()
        try:
            self._service.engine.loop.call_soon_threadsafe(turned.set)
        except RuntimeError:  # no thread to be had
            return False
        return turned.wait(LIVENESS_SECONDS)

    def not_ready(self) -> str:
        """Returns the reason why the provider is not ready, in a word or two; empty: it is ready."""
        return self._not_ready or (self._pool.not_ready() if self._pool else "")

    def workers(self) -> list[WorkerState]:
        """Returns the states of the workers; empty: there are none."""
        return list(self.server.service.metrics.workers())

    @property
    def manifest(self) -> Manifest:
        """The list of groups, parameters and files that is sent to tenants."""
        return self.server.service.executor.manifest

    @property
    def url(self) -> str:
        """The URL for tenants."""
        return self.server.url

    def announce(self) -> None:
        """Write the ``ready_file``, if the configuration names one. Signals may be sent from then on.

        Raises:
            ConfigurationError: The file cannot be written.
        """
        if self.config.ready_file is not None:
            more = {"local_url": self.local_url} if self.local_url else {}
            self.server.write_ready_file(self.config.ready_file, admin_url=self.admin_url, **more)

    def reload_certificate(self) -> bool:
        """Read the certificate again, for new sessions. If it cannot be used, keep the present one."""
        return self._certificate.reload()

    def drain(self, seconds: float) -> bool:
        """Stop listening, and answer requests that have arrived. Returns whether sessions ended in time."""
        deadline, self._not_ready = time.monotonic() + seconds, "draining"
        if self.config.ready_file is not None:
            try:
                remove_ready_file(self.config.ready_file, os.getpid())
            except ConfigurationError as error:
                log.error("%s", error)
        self.server.stop_listening()
        if self._local is not None:
            self._local.close()
        return self.server.drain(max(1.0, deadline - time.monotonic()))

    def close(self) -> None:
        """End the provider, and all sessions that are still open."""
        self._opened.close()

    def __enter__(self) -> Provider:
        """Start."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Drain, and close."""
        try:
            self.drain(self.config.drain_seconds)
        finally:
            self.close()
