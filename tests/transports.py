"""One executor behind all transports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tenant_sdk
from provider.inprocess import InprocessExecutor
from provider.serve.colocated import ColocatedServer
from provider.serve.server import Server
from provider.session.tenant import Service
from shared.transport.endpoint import Endpoint

TRANSPORTS = ("tls", "colocated", "inprocess")


@dataclass(frozen=True)
class TransportServers:
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
        places: dict[str, str | Endpoint] = {
            "tls": self.server.url,
            "colocated": self.local.url,
            "inprocess": self.inprocess,
        }
        return places[transport]

    def connect(self, transport: str, **options: Any) -> tenant_sdk.Session:
        """A session; ``plain`` unless the test says otherwise."""
        given: dict[str, Any] = {"token": self.token, "privacy": "plain", "patience": 0.0}
        if transport == "tls":
            given["ca"] = self.ca
        return tenant_sdk.connect(self.where(transport), **(given | options))

    def metric(self, name: str, **labels: str) -> float:
        """The current value of a metric; 0 if it was never counted."""
        return self.service.metrics.registry.get_sample_value(name, labels) or 0.0

    def end(self) -> bool:
        """Drain everything; whether all sessions ended in time."""
        self.inprocess.close()
        self.server.stop_listening()
        self.local.close()
        return self.server.drain(10.0)


Start = Callable[..., TransportServers]
