"""Executors behind all transports.

A test module takes them with ``pytest_plugins = ("transport_fixtures",)``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from raw_colocated import memories, ones_product
from raw_peers import eventually
from transports import Start, TransportServers

from provider.executor.base import BaseExecutor
from provider.inprocess import InprocessExecutor
from provider.serve.colocated import ColocatedServer
from provider.serve.connection import ConnectionLimits
from provider.serve.server import Server, server_context
from provider.serve.tokens import TokenFile
from provider.session.tenant import Service
from shared.wire.messages import Limits


@pytest.fixture(scope="module")
def everywhere(tls_dir: Path, token_file: tuple[Path, str]) -> Iterator[Start]:
    """Start one: ``everywhere(folder, numerics=...)``."""
    started: list[TransportServers] = []

    def start(
        folder: Path,
        *,
        limits: Limits | None = None,
        service: Callable[[BaseExecutor], Service] = Service.of,
        memory_bytes: int = 1 << 30,
        max_connections: int = 256,
        tenant_connections: int = 64,
        **options: Any,
    ) -> TransportServers:
        made = service(BaseExecutor(folder, limits=limits, **{"numerics": "float32", **options}))
        tokens = TokenFile(token_file[0])
        server = Server(
            made,
            context=server_context(tls_dir),
            tokens=tokens,
            port=0,
            limits=ConnectionLimits(max_connections, tenant_connections),
        )
        # Sockets want short paths.
        directory = Path(tempfile.mkdtemp(prefix="symbiosis-"))
        local = ColocatedServer(
            made,
            tokens=tokens,
            directory=directory,
            connections=server.connections,
            memory_bytes=memory_bytes,
        )
        inprocess = InprocessExecutor(made, tokens)
        started.append(
            TransportServers(made, server, local, inprocess, token_file[1], tls_dir / "ca.pem", directory)
        )
        return started[-1]

    yield start
    for one in started:
        one.end()
        one.directory.rmdir()  # nothing is left in it


@pytest.fixture(scope="module")
def one(everywhere: Start, checkpoint: Callable[[str], Path]) -> TransportServers:
    return everywhere(checkpoint("llama"))


@pytest.fixture
def all_well(one: TransportServers) -> Iterator[None]:
    """After every test here another tenant's session gets its answer, and nothing is left."""
    with one.connect("colocated") as witness:
        expected = ones_product(witness)
        yield
        assert torch.equal(ones_product(witness), expected)
        eventually(lambda: one.metric("symbiosis_connections") == 1)
    eventually(lambda: memories() == 0)
    eventually(lambda: os.listdir(one.directory) == ["door"])
