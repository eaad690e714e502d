"""A worker's process: started, given its share, listened to, and started again when it ends or stops."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import msgspec
import torch
from safetensors.torch import load

from provider.engine.loop import Loop
from provider.workers.link import (
    ASSIGNMENT,
    DONE,
    LOADED,
    REFUSED,
    SCALES,
    Assignment,
    Done,
    FailureMessage,
    Loaded,
    LocalLink,
    WorkerLink,
)
from provider.workers.state import Multiplied
from shared.errors import SymbiosisError

log = logging.getLogger(__name__)

_SECRET = ("_TOKEN", "_SECRET", "_PASSWORD")  # ends of names of variables that no worker needs
LOAD_SECONDS = 600.0  # without a word from a worker that loads
MESSAGE_SECONDS = 5.0  # for the rest of a message that has begun
STABLE_SECONDS = 60.0  # after which its next loss is a first one again
BACKOFF_SECONDS = (0.0, 0.5, 2.0, 10.0)  # before a worker is started again; the last again and again


class Ready(NamedTuple):
    """A worker's share, with bounds, and the scales of its groups by their numbers."""

    loaded: Loaded
    scales: Mapping[str, torch.Tensor]


class WorkerOwner(Protocol):
    """Who gives a worker its batches; called in the loop's thread."""

    def done(self, worker: WorkerProcess, what: Done) -> None:
        """It has multiplied a batch."""
        ...

    def lost(self, worker: WorkerProcess) -> None:
        """It has ended, or stopped, and will not answer what it had."""
        ...

    def restart_assignment(self, worker: WorkerProcess) -> Assignment:
        """It is about to be started again, in a thread of its own: what it shall hold then."""
        ...

    def back(self, worker: WorkerProcess) -> None:
        """It has been started again, and has its share."""
        ...


class StartedWorker(Protocol):
    """What multiplies for a worker's name, until it ends.

    Attributes:
        link: to it.
        pid: of its process, if that is on this machine; 0: it is not.
    """

    link: WorkerLink
    pid: int

    def end(self) -> str:
        """End it, if it has not and if that can be; in words how it did."""
        ...


class Process:
    """See StartedWorker: a process of this machine, started now."""

    def __init__(self, stop: threading.Event) -> None:
        ours, theirs = socket.socketpair()
        self.link: WorkerLink = LocalLink(ours, MESSAGE_SECONDS)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this program
                [sys.executable, "-P", "-m", "provider.workers.local", str(theirs.fileno())],
                env={name: value for name, value in os.environ.items() if not name.endswith(_SECRET)},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the executor, which ends its workers
            )
        self.pid = self._process.pid

    def end(self) -> str:
        """End it, if it has not; in words how it did."""
        self._process.kill()
        return f"exit status {self._process.wait()}"


StartWorker = Callable[[threading.Event], StartedWorker]


class WorkerProcess:
    """One worker, from now until ``close``.

    Args:
        name: in the log.
        assignment: what it shall hold.
        owner: see there.
        start: starts it, or waits until it joins; until the event is set.

    Attributes:
        link: to it; None while it is unavailable.
        restarts: how often it was started again.
        why: it is unavailable; empty: it is not.
        since: when it came, or went, in seconds since the epoch.
        multiplied: what it did so far; its owner counts.

    Raises:
        SymbiosisError: it does not join.
    """

    def __init__(
        self, name: str, assignment: Assignment, owner: WorkerOwner, start: StartWorker = Process
    ) -> None:
        self.name, self.assignment, self._owner, self._start = name, assignment, owner, start
        self.link: WorkerLink | None = None
        self.restarts = 0
        self.why, self.since = "loading", time.time()
        self.multiplied = Multiplied()
        self._first: Ready | None = None
        self._loop: Loop | None = None
        self._tries, self._started_at = 0, time.monotonic()
        self._closing = threading.Event()
        self._process = self._launch()

    def ready(self) -> Ready:
        """Wait until the worker has its share; it may be given batches from then on.

        Raises:
            SymbiosisError: it cannot load it.
        """
        ready = self._ready()
        self.why, self.since = "", time.time()
        self.link = self._process.link
        return ready

    def attach(self, loop: Loop) -> None:
        """Attend it in this loop's thread."""
        self._loop = loop
        loop.call_soon_threadsafe(self._listen)

    @property
    def pid(self) -> int:
        """Of the process; another one after each restart."""
        return self._process.pid

    def kill(self) -> None:
        """End its process; it is then started again."""
        self._process.end()

    def close(self) -> None:
        """End it for good."""
        self._closing.set()
        self._process.link.close(finished=True)
        self._process.end()

    def _launch(self) -> StartedWorker:
        """A fresh one, which loads its share."""
        started = self._start(self._closing)
        try:
            started.link.send(ASSIGNMENT, msgspec.msgpack.encode(self.assignment))
        except OSError:
            pass  # whoever waits for its answer gets the error
        return started

    def _ready(self) -> Ready:
        scales = dict[str, torch.Tensor]()
        try:
            while True:
                kind, content = self._process.link.receive(LOAD_SECONDS)
                if kind == SCALES:
                    scales = load(content)
                elif kind == REFUSED:
                    failure = msgspec.msgpack.decode(content, type=FailureMessage)
                    raise SymbiosisError(f"worker {self.name} cannot load its share: {failure.message}")
                elif kind == LOADED:
                    return self._same(Ready(msgspec.msgpack.decode(content, type=Loaded), scales))
        except (OSError, EOFError) as error:
            raise SymbiosisError(
                f"worker {self.name} ended while it loaded its share ({error}); it may have been for memory"
            ) from error

    def _same(self, ready: Ready) -> Ready:
        """What it has, which is what it had at first: on the ring bounds and scales show it, else a digest.

        Raises:
            SymbiosisError: somebody replaced the checkpoint; tenants would call the answers wrong.
        """
        first = self._first = self._first or ready
        read, had = ready.loaded, first.loaded
        if (read.groups, read.weights) != (had.groups, had.weights) or not all(
            torch.equal(ready.scales[group], scales) for group, scales in first.scales.items()
        ):
            raise SymbiosisError(
                f"worker {self.name} finds other weights than before in {self.assignment.folder}: bring the "
                "checkpoint back, or start the executor again"
            )
        return ready

    # -- the loop's thread ---------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._loop is not None and self.link is not None:
            self.link.listen(self._loop, self._received, self.fail)

    def _received(self, kind: int, content: bytes) -> None:
        if kind == DONE:
            self._owner.done(self, msgspec.msgpack.decode(content, type=Done))

    def fail(self, error: Exception) -> None:
        """It has ended, or must: it is started again."""
        if self.link is None or self._closing.is_set():
            return
        self.why, self.since = str(error), time.time()
        self.link.close()
        self.link = None
        self._owner.lost(self)
        threading.Thread(target=self._restart, args=(error,), name=f"worker-{self.name}", daemon=True).start()

    def _is_back(self) -> None:
        self.why, self.since, self._started_at = "", time.time(), time.monotonic()
        self.link = self._process.link
        self._listen()
        self._owner.back(self)

    # -- a thread that brings it back ----------------------------------------------------------------

    def _restart(self, error: Exception) -> None:
        began = time.monotonic()
        tries = 0 if began - self._started_at > STABLE_SECONDS else self._tries
        self.why = f"{error}, {self._process.end()}"
        log.error("worker %s is lost (%s); it is started again", self.name, self.why)
        while not self._closing.wait(BACKOFF_SECONDS[min(tries, len(BACKOFF_SECONDS) - 1)]):
            tries += 1
            self.restarts += 1
            try:
                self.assignment = self._owner.restart_assignment(self)
                self._process = self._launch()
                if not self._closing.is_set():
                    self._ready()
            except Exception as failure:  # whatever it is: nobody else brings it back
                if not self._closing.is_set():
                    log.error("%s", failure)
                self.why = str(failure)
                self._process.link.close()
                self._process.end()
                continue
            if self._closing.is_set():
                self._process.link.close(finished=True)
                self._process.end()
            elif self._loop is not None:
                self._tries = tries
                log.warning("worker %s is back after %.1f s", self.name, time.monotonic() - began)
                self._loop.call_soon_threadsafe(self._is_back)
            return
