"""Executors for an audit: real processes behind TLS, each with a transcript, and a token for each session."""

from __future__ import annotations

import datetime
import json
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from provider.serve.certificates import write_certificates
from provider.serve.tokens import TokenFile
from security.recordings.transcript import Transcript, read_transcript
from shared.errors import SymbiosisError
from shared.launching import Program


class AuditError(SymbiosisError):
    """The audit itself could not be done."""


@dataclass
class ExecutorProcess:
    """One operator's executor, as a process of its own.

    Args:
        folder: for its certificates, tokens, log and transcripts.
        model: checkpoint folder.
        numerics: ``float32`` or ``ring``.
        workers: processes that share the layers; 0: none.
    """

    folder: Path
    model: Path
    numerics: str
    workers: int = 0
    url: str = ""
    admin_url: str = ""
    _program: Program | None = None
    _crashed: set[str] = field(default_factory=set)  # names of transcripts that may be cut

    def __post_init__(self) -> None:
        """Certificates, as ``symbiosis-provider certs`` makes them."""
        self.folder.mkdir(parents=True)
        write_certificates(self.folder / "tls", now=datetime.datetime.now(datetime.UTC))

    @property
    def ca(self) -> Path:
        """Certificate authority to trust."""
        return self.folder / "tls" / "ca.pem"

    @property
    def log(self) -> Path:
        """Everything that the process wrote."""
        return self.folder / "executor.log"

    def token(self, tenant: str) -> str:
        """A new token for a tenant of that name; also while the executor runs."""
        return TokenFile(self.folder / "tokens.json").add(tenant)

    def launch(self, port: int = 0) -> None:
        """Begin to start; ``await_ready`` waits for the end of it."""
        ready = self.folder / "ready.json"
        options = {
            "--numerics": self.numerics,
            "--workers": self.workers,
            "--tls-dir": self.folder / "tls",
            "--token-file": self.folder / "tokens.json",
            "--transcript": self.folder / "transcripts",
            "--ready-file": ready,
            "--port": port,
        }
        command = [sys.executable, "-P", "-m", "provider.cli", "serve", str(self.model)]
        command += [str(word) for option in options.items() for word in option]
        self._program = Program(command, ready, self.log, {"GOMP_SPINCOUNT": "1000"})

    def await_ready(self) -> None:
        """Wait until it listens.

        Raises:
            LaunchError: it does not, with its last words.
        """
        assert self._program is not None
        ready = json.loads(self._program.wait_until_ready())
        self.url, self.admin_url = ready["url"], ready["admin_url"]

    def pause(self) -> None:
        """Let the process answer nothing from now on, until it is restarted."""
        assert self._program is not None
        self._program.process.send_signal(signal.SIGSTOP)

    def crash(self) -> None:
        """Kill the process, and start it again at the same port."""
        self.stop(signal.SIGKILL)
        self._crashed |= {file.name for file in self._recordings()}
        self.launch(int(self.url.rpartition(":")[2]))
        self.await_ready()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the process and wait for that."""
        if self._program is not None:
            self._program.stop(number)
            self._program = None

    def transcripts(self) -> list[Transcript]:
        """What it recorded, in order, also before a crash.

        Raises:
            TranscriptError: one is cut that no crash cut.
        """
        return [read_transcript(file, cut=file.name in self._crashed) for file in self._recordings()]

    @property
    def newest(self) -> Path:
        """The file that it records into."""
        return self._recordings()[-1]

    def so_far(self) -> Transcript:
        """What it recorded since it was started last, while it goes on."""
        return read_transcript(self.newest, cut=True)

    def _recordings(self) -> list[Path]:
        paths = (self.folder / "transcripts").glob("*.transcript")
        return sorted(paths, key=lambda file: file.stat().st_mtime)
