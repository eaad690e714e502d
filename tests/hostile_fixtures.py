"""Fixtures of the tests of hostile files: a real executor whose provider lies in what it supplies.

A test module takes them with ``pytest_plugins = ("hostile_fixtures",)``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from conftest import RING, Executor
from hostile_files import SECRET, TOKENIZER

from provider.executor.base import BaseExecutor
from provider.serve.server import Server, server_context
from provider.serve.tokens import TokenFile
from provider.session.tenant import Service
from shared.wire.messages import Manifest, digest_of


@pytest.fixture
def hostile(
    checkpoint: Callable[[str], Path], tls_dir: Path, token_file: tuple[Path, str], tmp_path: Path
) -> Iterator[Callable[..., Executor]]:
    """An executor that multiplies rightly and serves other files: ``hostile({"config.json": b"{}"})``.

    None in place of a file leaves it out; ``lie`` changes what the manifest lists. The provider itself
    loads the honest checkpoint first, so what it serves afterwards need not make sense; its manifest
    lists it truly, since a lie is found at once.
    """
    servers: list[Server] = []

    def start(
        files: dict[str, bytes | None],
        architecture: str = "llama",
        numerics: str = RING,
        *,
        serve_head: bool = False,
        lie: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    ) -> Executor:
        folder = tmp_path / f"hostile{len(servers)}"
        shutil.copytree(checkpoint(architecture), folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / name, folder)
        base = BaseExecutor(folder, numerics=numerics, serve_head=serve_head)
        served = base.catalog.checkpoint.files
        for name, data in files.items():
            served.pop(name, None)
            if data is not None:
                served[name] = data
        manifest = lie(msgspec.structs.replace(base.manifest, files=base.catalog.checkpoint.tenant_files()))
        weights = base.catalog.checkpoint.weights_digest(manifest.groups)
        manifest = msgspec.structs.replace(manifest, weights=weights)
        base.catalog.manifest = msgspec.structs.replace(manifest, digest=digest_of(manifest))
        server = Server(
            Service.of(base), context=server_context(tls_dir), tokens=TokenFile(token_file[0]), port=0
        )
        servers.append(server)
        return Executor(server.url, token_file[1], tls_dir / "ca.pem", server=server)

    yield start
    for server in servers:
        server.drain(1.0)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the tenant's, which could be read as a word list."""
    path = tmp_path / "environ"
    path.write_text(f"{SECRET}\n[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\n")
    return path
