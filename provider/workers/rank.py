"""A worker that others have started: joins the executor, and again when it was lost.

``torchrun`` starts everything again when one of its processes ends. So what it starts only looks after the
worker, which is a process of its own: ``python -m provider.workers.rank``.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from provider.workers.world import World, processors_each
from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from provider.workers.link import Assignment

log = logging.getLogger(__name__)

LOST = 75  # exit status of a worker that shall join again; EX_TEMPFAIL of sysexits.h
RESTART_SECONDS = 1.0  # before it does
LINGER_SECONDS = 5.0  # for one whose link has ended


def supervise(seconds: float) -> None:
    """Until the executor has ended; or this process is told to, and then ``seconds`` longer at most."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    run_until_stopped(stop, seconds, {})


def run_until_stopped(stop: threading.Event, seconds: float, environment: Mapping[str, str]) -> None:
    """A worker, again and again, until the executor has ended.

    Args:
        stop: to end, which takes at most ``seconds``.
        environment: of the worker, beside that of this process.
    """
    while True:
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "provider.workers.rank"],
            env=os.environ | environment,
            stdin=subprocess.PIPE,  # which ends with this process, however that ends
            process_group=0,
        ) as worker:
            status = _wait(worker, stop, seconds)
        if status == 0 or stop.is_set():
            return
        log.error("the worker is lost (exit status %d); it is started again", status)
        stop.wait(RESTART_SECONDS)


def _wait(worker: subprocess.Popen[bytes], stop: threading.Event, seconds: float) -> int:
    while not stop.is_set():
        try:
            return worker.wait(0.5)
        except subprocess.TimeoutExpired:
            pass
    try:
        return worker.wait(seconds)  # the executor may have requests in flight
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()


def _adapted(assignment: Assignment, world: World) -> Assignment:
    """A share as the executor describes it, with what it cannot know of this machine."""
    threads = assignment.threads or processors_each(world.local_size)
    device = f"cuda:{world.local_rank}" if assignment.device == "cuda" else assignment.device
    return msgspec.structs.replace(assignment, threads=threads, device=device)


def end_with_the_parent() -> None:
    """Have this process end when the one that started it does, without whose word it might go on for ever.

    Standard input is a pipe that the parent never writes to.
    """

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _end_after(ended: threading.Event) -> None:
    """A worker that hangs in a product does not read that its link has ended."""
    ended.wait()
    time.sleep(LINGER_SECONDS)
    os._exit(LOST)


def main() -> None:
    """Entry point of the worker itself."""
    end_with_the_parent()
    from provider.workers.worker import Worker  # isort: skip - first: it says how threads spin
    from provider.workers.distributed import join

    world = World.from_environment()
    if world is None:
        sys.exit("started by hand? torchrun starts workers")
    try:
        link = join(world.store(), world.rank)
        threading.Thread(target=_end_after, args=(link.ended,), daemon=True).start()
        Worker(link, partial(_adapted, world=world)).run()
    except EOFError:
        status = 0
    except (OSError, ConfigurationError) as error:
        print(f"rank {world.rank}: {error}", file=sys.stderr)
        status = LOST
    sys.stderr.flush()
    os._exit(status)  # without waiting for threads that wait for the other end


if __name__ == "__main__":
    main()
