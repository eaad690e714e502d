"""An executor whose products cost nothing, over TLS and co-located; ``transports.py`` starts it."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
from provider.engine.batching import Done

from provider.executor.base import BaseExecutor
from provider.observe.metrics import Metrics
from provider.serve.colocated import ColocatedServer
from provider.serve.server import Server, server_context
from provider.serve.tokens import TokenFile
from provider.session.tenant import Service
from shared.memory import keep_freed_memory
from shared.wire.header import Header, RequestClass


class Echo:
    """In place of a scheduler: the rows are their own product."""

    def run(self, tenant: str, header: Header, blocks: list[torch.Tensor]) -> Done:
        return Done(blocks, RequestClass.PREFILL, 0.0, 0.0)

    def answered(self, *_: object) -> None:
        """Nothing to read ahead."""


def echo_service(folder: Path) -> Service:
    """Everything of an executor but the products."""
    return Service(BaseExecutor(folder), Echo(), Metrics())


def main(folder: Path, work: Path) -> None:
    """Serve until standard input ends."""
    keep_freed_memory()
    torch.set_num_threads(1)
    service = echo_service(folder)
    tokens = TokenFile(work / "tokens.json")
    server = Server(service, context=server_context(work / "tls"), tokens=tokens, port=0)
    local = ColocatedServer(service, tokens=tokens, directory=work / "local", sessions=server.sessions)
    gc.collect()
    gc.freeze()
    server.write_ready_file(work / "ready.json", local_url=local.url)
    sys.stdin.read()
    local.close()
    server.drain()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
