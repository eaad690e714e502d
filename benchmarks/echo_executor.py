"""An executor whose products cost nothing, over TLS and co-located; ``transports.py`` starts it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from provider.engine.engine import Engine
from provider.engine.lanes import BatchResult, ProcessLane, RowRange
from provider.engine.scheduler import Unbatched
from provider.executor.base import BaseExecutor
from provider.observe.metrics import Metrics
from provider.serve.colocated import ColocatedServer
from provider.serve.server import Server, server_context
from provider.serve.tokens import TokenFile
from provider.session.tenant import Service
from shared.memory import keep_freed_memory


class Echo(ProcessLane):
    """In place of products: the rows themselves."""

    def multiply(self, batch: Sequence[RowRange]) -> BatchResult:
        return BatchResult([self._tensors(rows) for rows in batch])


def echo_service(folder: Path) -> Service:
    """Everything of an executor but the products."""
    base, metrics = BaseExecutor(folder, numerics="float32"), Metrics()
    return Service(base, Engine.of(base, lambda _: Unbatched(), lane=Echo, on_batch=metrics.batch), metrics)


def main(folder: Path, work: Path) -> None:
    """Serve until standard input ends."""
    keep_freed_memory()
    torch.set_num_threads(1)
    service = echo_service(folder)
    tokens = TokenFile(work / "tokens.json")
    server = Server(service, context=server_context(work / "tls"), tokens=tokens, port=0)
    local = ColocatedServer(service, tokens=tokens, directory=work / "local", connections=server.connections)
    gc.collect()
    gc.freeze()
    server.write_ready_file(work / "ready.json", local_url=local.url)
    sys.stdin.read()
    local.close()
    server.drain()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
