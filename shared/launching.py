"""Programs of this project as processes of their own: for tests, audits, benchmarks and the demo."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.errors import SymbiosisError

START_SECONDS = 120.0
END_SECONDS = 60.0


class LaunchError(SymbiosisError):
    """A program did not start."""


def free_port() -> int:
    """A port of 127.0.0.1 at which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Program:
    """A process that writes a file when it is ready; a context in which it runs.

    Args:
        command: words, without a shell.
        ready: the file, as ``--ready-file`` names it. An old one is removed.
        log: the output and the errors are added to this file.
        environment: variables besides those of this process.
        group: lead a group of processes, so that ``stop`` can end what it started.
    """

    def __init__(
        self,
        command: Sequence[object],
        ready: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        group: bool = False,
    ) -> None:
        self.ready, self.log, self._group = ready, log, group
        self._name = " ".join(map(str, command[:4]))
        ready.unlink(missing_ok=True)
        with log.open("ab") as output:
            self.process = subprocess.Popen(  # noqa: S603 - the words are the caller's, and no shell sees them
                list(map(str, command)),
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
                start_new_session=group,
            )

    def wait_until_ready(self, seconds: float = START_SECONDS) -> str:
        """The content of the file, once it is there.

        Raises:
            LaunchError: the process ended or took too long; with its last words.
        """
        deadline = time.monotonic() + seconds
        while not self.ready.exists():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                status = f"ended with status {self.process.returncode}"
                how = status if ended else f"is not ready after {seconds:.0f} s"
                # An error keeps the beginning of long texts.
                last = self.log.read_text(errors="replace")[-1500:]
                raise LaunchError(f"{self._name} {how}:\n{last}")
            time.sleep(0.05)
        return self.ready.read_text()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it with a signal and wait; kill it, and its group, if it goes on for a minute."""
        self.process.send_signal(number)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            if self._group:
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Program:
        """The program itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop it."""
        self.stop()
