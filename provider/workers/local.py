"""A worker of the executor's machine: ``python -m provider.workers.local DESCRIPTOR``.

The descriptor is the link's socket, inherited from ``provider.workers.process``.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading


def _end_with(descriptor: int) -> None:
    """Also in the middle of loading or of a product: whoever started this needs it no more, or is gone."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def main() -> None:
    """Entry point."""
    descriptor = int(sys.argv[1])
    # Before torch is imported: of many workers that start at the same time each takes a minute for that.
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    from provider.workers.worker import Worker  # isort: skip - first: it says how threads spin
    from provider.workers.link import LocalLink

    try:
        Worker(LocalLink(socket.socket(fileno=descriptor))).run()
    except (EOFError, ConnectionError):
        pass  # the executor has ended, or wants this worker to


if __name__ == "__main__":
    main()
