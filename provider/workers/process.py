"""A worker's process: started, given its share, listened to, and started again when it ends or stops."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import msgspec
import torch
from safetensors.torch import load

from provider.workers.link import DONE, LOADED, REFUSED, SCALES, SHARE, Done, Failure, Link, Loaded, Share
from shared.errors import SymbiosisError

log = logging.getLogger(__name__)

LOAD_SECONDS = 600.0  # without a word from a worker that loads
LOOK_SECONDS = 0.5  # between two looks whether something is late
BACK_OFF = (0.0, 0.5, 2.0, 10.0)  # before a worker is started again; the last again and again


class Ready(NamedTuple):
    """A worker's share, with bounds, and the scales of its groups by their numbers."""

    loaded: Loaded
    scales: Mapping[str, torch.Tensor]


class Owner(Protocol):
    """Who gives a worker its batches; called from the thread that attends the worker."""

    def done(self, worker: WorkerProcess, what: Done) -> None:
        """It has multiplied a batch."""
        ...

    def late(self, worker: WorkerProcess, now: float) -> bool:
        """Whether it has had one for too long."""
        ...

    def lost(self, worker: WorkerProcess) -> None:
        """It has ended, or stopped, and will not answer what it had."""
        ...

    def back(self, worker: WorkerProcess) -> None:
        """It has been started again, and has its share."""
        ...


class WorkerProcess:
    """One worker, from now until ``close``.

    Args:
        name: in the log.
        share: what it shall hold.
        owner: see there.

    Attributes:
        link: to it; None while it is away.
        restarts: how often it was started again.
    """

    def __init__(self, name: str, share: Share, owner: Owner) -> None:
        self.name, self.share, self._owner = name, share, owner
        self.link: Link | None = None
        self.restarts = 0
        self._closing = False
        self._process, self._fresh = _start()
        self._attendant = threading.Thread(target=self._attend, name=f"worker-{name}", daemon=True)

    def ready(self) -> Ready:
        """Wait until the worker has its share; it may be given batches from then on.

        Raises:
            SymbiosisError: it cannot load it.
        """
        ready = self._give_share()
        self._attendant.start()
        return ready

    @property
    def pid(self) -> int:
        """Of the process; another one after each restart."""
        return self._process.pid

    def close(self) -> None:
        """End it for good."""
        self._closing = True
        for link in (self.link, self._fresh):
            if link is not None:
                link.close()
        if self._attendant.is_alive():
            self._attendant.join(5)
        self._process.kill()
        self._process.wait()

    def _give_share(self) -> Ready:
        link, scales = self._fresh, dict[str, torch.Tensor]()
        try:
            link.send(SHARE, msgspec.json.encode(self.share))
            while True:
                if not link.readable(LOAD_SECONDS):
                    raise TimeoutError(f"nothing for {LOAD_SECONDS:.0f} s")
                kind, content, _ = link.receive()
                if kind == SCALES:
                    scales = load(content)
                elif kind == REFUSED:
                    failure = msgspec.json.decode(content, type=Failure)
                    raise SymbiosisError(f"worker {self.name} cannot load its share: {failure.message}")
                elif kind == LOADED:
                    break
        except (OSError, EOFError) as error:
            raise SymbiosisError(
                f"worker {self.name} ended while it loaded its share ({error}); it may have been for memory"
            ) from error
        self.link = link
        return Ready(msgspec.json.decode(content, type=Loaded), scales)

    # -- the thread that attends it ----------------------------------------------------------------

    def _attend(self) -> None:
        while not self._closing:
            try:
                self._listen()
            except (OSError, EOFError) as error:
                self._end(error)
                self._bring_back()

    def _listen(self) -> None:
        """Until the worker ends, or is late.

        Raises:
            OSError, EOFError: so to speak.
        """
        link = self.link
        if link is None:
            raise EOFError("there is no worker")
        while True:
            if link.readable(LOOK_SECONDS):
                kind, content, _ = link.receive()
                if kind == DONE:
                    self._owner.done(self, msgspec.json.decode(content, type=Done))
            elif self._owner.late(self, time.monotonic()):
                raise TimeoutError("it does not answer")

    def _end(self, error: Exception) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.close()
        self._process.kill()
        status = self._process.wait()
        if not self._closing:
            log.error("worker %s is lost (%s, exit status %d); it is started again", self.name, error, status)
        self._owner.lost(self)

    def _bring_back(self) -> None:
        began, tries = time.monotonic(), 0
        while not self._closing:
            time.sleep(BACK_OFF[min(tries, len(BACK_OFF) - 1)])
            tries += 1
            self.restarts += 1
            try:
                self._process, self._fresh = _start()
                self._give_share()
            except (SymbiosisError, OSError) as error:
                log.error("%s", error)
                self._fresh.close()
                self._process.kill()
                self._process.wait()
                continue
            log.warning("worker %s is back after %.1f s", self.name, time.monotonic() - began)
            self._owner.back(self)
            return


def _start() -> tuple[subprocess.Popen[bytes], Link]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(  # noqa: S603 - this program
            [sys.executable, "-m", "provider.workers.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,  # Ctrl-C is for the executor, which ends its workers
        )
    return process, Link(ours)
