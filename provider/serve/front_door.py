"""A front door: a process that does TLS, frames and checks of tenants for an executor in another.

``provider.serve.front_doors`` starts it. It is told what to do by one line on standard input, whose end
tells that the executor has died; it tells what it counts by lines on standard output.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading

import torch

from provider.observe.log import log_to_console
from provider.serve.relay import Relay
from provider.serve.server import Entrance, Sessions, server_context
from provider.serve.tokens import TokenFile
from shared.errors import SymbiosisError
from shared.wire.messages import Manifest, Message, decode

log = logging.getLogger(__name__)

READY, FAILED, REFUSED = "ready", "failed", "refused"  # the first word of a line; after two of them, a label


class Plan(Message, frozen=True):
    """What a front door is told."""

    listener: int  # an inherited descriptor, from which other processes accept as well
    url: str  # of the executor's co-located directory
    manifest: Manifest
    tls_dir: str
    client_ca: str | None
    token_file: str
    max_connections: int  # at this door, handshakes included
    drain_seconds: float


class Told:
    """A ``provider.serve.server.Counts`` that has the executor count."""

    def handshake_failed(self, reason: str) -> None:
        """See ``provider.serve.server.Counts``."""
        _tell(f"{FAILED} {reason}")

    def connected(self, change: int) -> None:
        """The executor counts its own session with the tenant."""


def main() -> None:
    """Serve until SIGTERM, or until standard input ends."""
    log_to_console()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    told = sys.stdin.buffer.readline()
    if not told:
        return
    threading.Thread(target=_end_with_the_executor, daemon=True).start()
    torch.set_num_threads(1)  # nothing is computed here
    plan = decode(told, Plan)
    relay = Relay(plan.url, plan.manifest, lambda code: _tell(f"{REFUSED} {code}"))
    # How many sessions one tenant may have, the executor knows, who sees those of all doors.
    sessions = Sessions(Told(), plan.max_connections, plan.max_connections)
    try:
        Entrance(
            socket.socket(fileno=plan.listener),
            context=server_context(plan.tls_dir, plan.client_ca),
            tokens=TokenFile(plan.token_file),
            sessions=sessions,
            open_session=relay.open,
            max_message_bytes=plan.manifest.limits.max_message_bytes,
        )
    except SymbiosisError as error:
        log.error("no front door: %s", error)
        sys.exit(1)
    _tell(READY)
    # With a timeout: a signal that another thread takes runs its handler only when this one wakes.
    while not stop.wait(0.5):
        pass
    clean = sessions.drain(plan.drain_seconds)
    os._exit(0 if clean else 1)  # without waiting for what was cut off


def _end_with_the_executor() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(1)


def _tell(line: str) -> None:
    try:
        os.write(sys.stdout.fileno(), f"{line}\n".encode())  # at once: threads' lines do not mix
    except OSError:
        pass  # the executor has died


if __name__ == "__main__":
    main()
