"""Messages to systemd about a service with ``Type=notify`` (sd_notify(3))."""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Send ``READY=1``, ``STOPPING=1`` or ``STATUS=...`` to ``$NOTIFY_SOCKET``; nothing if there is none."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # not in the file system
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect(address)
            sock.send(state.encode())
    except OSError as error:
        log.warning("cannot notify the supervisor of %s: %s", state, error.strerror)
