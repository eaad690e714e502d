"""Starts front doors, starts those again that die, and ends them."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import threading
import time
from typing import IO, cast

from provider.observe.metrics import Metrics
from provider.serve.front_door import FAILED, READY, REFUSED, Plan
from shared.errors import ConfigurationError
from shared.wire.messages import encode

log = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0  # before one that died is started again
START_SECONDS = 60.0  # for all of them to be ready
GRACE_SECONDS = 2.0  # on top of what a front door takes to drain
_LABEL = re.compile(r"[a-z_]{1,40}")


class FrontDoors:
    """Processes that let tenants in for this executor; see ``provider.serve.front_door``.

    Args:
        count: how many.
        plan: for each of them.
        metrics: counts what they tell.

    Raises:
        ConfigurationError: one did not start; it has logged why.
    """

    def __init__(self, count: int, plan: Plan, metrics: Metrics) -> None:
        self._plan, self._metrics = plan, metrics
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._begun = threading.Semaphore(0)  # one is ready, or has failed
        self._clean, self._failed = True, False
        self._threads = [threading.Thread(target=self._keep, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + START_SECONDS
        for _ in self._threads:
            if not self._begun.acquire(timeout=max(0.0, deadline - time.monotonic())):
                self._failed = True
        if self._failed:
            self.drain()
            raise ConfigurationError("a front door did not start; what it logged says why")

    def drain(self) -> bool:
        """Let all of them answer what has arrived, and end; whether they did so in time."""
        self._stopping.set()
        with self._lock:
            for process in self._running:
                process.terminate()
        deadline = time.monotonic() + self._plan.drain_seconds + GRACE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            for process in self._running:
                process.kill()
        for thread in self._threads:
            thread.join()
        return self._clean

    def _keep(self) -> None:
        """Keep one running."""
        while True:
            try:
                status = self._run()
                if self._stopping.is_set():
                    # SIGTERM ends those at once that were not ready.
                    self._clean &= status in (0, -signal.SIGTERM)
                    return
                log.warning("a front door ended with status %d; starting another", status)
            except OSError as error:
                log.error("cannot start a front door: %s", error)
                self._failed = True
                self._begun.release()
            if self._stopping.wait(PAUSE_SECONDS):
                return

    def _run(self) -> int:
        """Start one and count what it tells until it ends; its exit status."""
        process = subprocess.Popen(
            # -P: what lies in the working directory is not for it to import.
            [sys.executable, "-P", "-m", "provider.serve.front_door"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._plan.listener],
            start_new_session=True,  # Ctrl-C is for the executor, which tells the others
        )
        with self._lock:
            self._running.add(process)
            if self._stopping.is_set():
                process.terminate()
        ready = False
        try:
            with process:
                stdin, stdout = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
                stdin.write(encode(self._plan) + b"\n")
                stdin.flush()
                for line in stdout:
                    word, _, label = line.decode(errors="replace").strip().partition(" ")
                    if word == READY:
                        ready = True
                        self._begun.release()
                    elif word == FAILED and _LABEL.fullmatch(label):
                        self._metrics.handshake_failed(label)
                    elif word == REFUSED and _LABEL.fullmatch(label):
                        self._metrics.refused.labels(label).inc()
        except BrokenPipeError:
            pass  # it died before it had read its plan
        with self._lock:
            self._running.discard(process)
        if not ready:
            self._failed = True
            self._begun.release()
        return process.wait()
