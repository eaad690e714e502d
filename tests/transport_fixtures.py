"""Executors behind all three transports.

A test module takes them with ``pytest_plugins = ("transport_fixtures",)``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transports import Everywhere, Start

from provider.colocated import ColocatedServer
from provider.executor import BaseExecutor
from provider.inprocess import InprocessExecutor
from provider.server import Server, server_context
from provider.session import Service
from provider.tokens import TokenFile
from shared.messages import Limits


@pytest.fixture(scope="module")
def everywhere(tls_dir: Path, token_file: tuple[Path, str]) -> Iterator[Start]:
    """Start one: ``everywhere(folder, numerics=...)``."""
    started: list[Everywhere] = []

    def start(
        folder: Path,
        *,
        limits: Limits | None = None,
        service: Callable[[BaseExecutor], Service] = Service.of,
        memory_bytes: int = 1 << 30,
        max_connections: int = 256,
        **options: Any,
    ) -> Everywhere:
        made = service(BaseExecutor(folder, limits=limits, **options))
        tokens = TokenFile(token_file[0])
        server = Server(
            made, context=server_context(tls_dir), tokens=tokens, port=0, max_connections=max_connections
        )
        # Sockets want short paths.
        directory = Path(tempfile.mkdtemp(prefix="symbiosis-"))
        local = ColocatedServer(
            made, tokens=tokens, directory=directory, sessions=server.sessions, memory_bytes=memory_bytes
        )
        inprocess = InprocessExecutor(made, tokens)
        started.append(
            Everywhere(made, server, local, inprocess, token_file[1], tls_dir / "ca.pem", directory)
        )
        return started[-1]

    yield start
    for one in started:
        one.end()
        one.directory.rmdir()  # nothing is left in it
