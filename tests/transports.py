"""One executor behind all transports."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tenant_sdk
from provider.inprocess import InprocessExecutor
from provider.serve.colocated import ColocatedServer
from provider.serve.front_door import Plan
from provider.serve.front_doors import FrontDoors
from provider.serve.server import Server
from provider.session.tenant import Service
from shared.transport.endpoint import Endpoint

TRANSPORTS = ("tls", "front door", "colocated", "inprocess")


@dataclass(frozen=True)
class Everywhere:
    """An executor that can be reached in every way."""

    service: Service
    server: Server
    local: ColocatedServer
    inprocess: InprocessExecutor
    token: str
    ca: Path
    directory: Path

    def where(self, transport: str) -> str | Endpoint:
        """What to connect to."""
        if transport == "front door":
            return f"wss://127.0.0.1:{self.front_door[0].getsockname()[1]}"
        places: dict[str, str | Endpoint] = {
            "tls": self.server.url,
            "colocated": self.local.url,
            "inprocess": self.inprocess,
        }
        return places[transport]

    def connect(self, transport: str, **options: Any) -> tenant_sdk.Session:
        """A session; ``plain`` unless the test says otherwise."""
        given: dict[str, Any] = {"token": self.token, "privacy": "plain"}
        if transport in ("tls", "front door"):
            given["ca"] = self.ca
        return tenant_sdk.connect(self.where(transport), **(given | options))

    @cached_property
    def front_door(self) -> tuple[socket.socket, FrontDoors]:
        """Another port, with a process of its own; started when it is first asked for."""
        listener = socket.create_server(("127.0.0.1", 0))
        plan = Plan(
            listener=listener.fileno(),
            url=self.local.url,
            manifest=self.service.executor.manifest,
            tls_dir=str(self.ca.parent),
            client_ca=None,
            token_file=str(self.server.tokens.path),
            max_connections=256,
            drain_seconds=10.0,
        )
        return listener, FrontDoors(1, plan, self.service.metrics)

    def metric(self, name: str, **labels: str) -> float:
        """The current value of a metric; 0 if it was never counted."""
        return self.service.metrics.registry.get_sample_value(name, labels) or 0.0

    def end(self) -> bool:
        """Drain everything; whether all sessions ended in time."""
        self.inprocess.close()
        self.server.stop_listening()
        self.local.close()
        clean = True
        if "front_door" in vars(self):
            listener, doors = self.front_door
            clean = doors.drain()
            listener.close()
        return self.server.drain(10.0) and clean


Start = Callable[..., Everywhere]
