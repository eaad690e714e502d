"""Status of a gateway's worker, for the server in front of it, in a file of a private folder."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tenant_sdk.gateway.admission import StepFailure
from tenant_sdk.gateway.record_file import MAX_BYTES, read_record, write_record

FILE, ENDED_FILE = "status", "ended"
MAX_TEXT = 8192  # characters of an error
REMIND_SECONDS = 60.0  # between two lines on what cannot be written
REMEMBERED = 256  # sequences that ended with an error of their own


class GatewayStatus(msgspec.Struct, kw_only=True):
    """Counts since the start, and how the last step ended.

    Attributes:
        steps, failed_steps: of the model; each is a request to the executor for every group.
        sequences: that the steps were for, so that ``sequences / steps`` is the mean batch.
        products, rows: requests to the executor, and rows in them.
        rows_ahead: of masks, for all layers, whose effects are there or ordered; no count.
        bytes_sent, bytes_received: their payloads, and those of masks' effects.
        seconds_waiting: for answers and effects.
        failure: ``StepFailure`` of the last step that failed; empty: none did.
        error: its message.
        failed_at: when, on this machine's monotonic clock.
        failing: neither a step nor a probe was done since.
    """

    steps: int = 0
    failed_steps: int = 0
    sequences: int = 0
    products: int = 0
    rows: int = 0
    rows_ahead: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waiting: float = 0.0
    failure: str = ""
    error: str = ""
    failed_at: float = 0.0
    failing: bool = False

    @property
    def unavailable(self) -> bool:
        """Whether executors are known to be unavailable: requests would be retried in vain."""
        return self.failing and self.failure == StepFailure.UNAVAILABLE

    def write(self, folder: Path) -> None:
        """Put it where ``read`` finds it.

        Raises:
            OSError: it is the first, and the disk is full.
        """
        self.error = self.error[:MAX_TEXT]
        write_record(folder / FILE, msgspec.json.encode(self))

    @classmethod
    def read(cls, folder: Path) -> GatewayStatus:
        """The last one written; one of zeros before that."""
        record = read_record(folder / FILE)
        return cls() if record is None else msgspec.json.decode(record, type=cls)


class StepHealth:
    """Whether steps fail. The thread of steps updates it, and one that probes whether the executor is back.

    Attributes:
        status: for the server in front.
    """

    def __init__(self) -> None:
        self.status, self._lock = GatewayStatus(), threading.Lock()

    def step_failed(self, failure: str, error: str, now: float) -> None:
        """A step failed, for a ``StepFailure``."""
        with self._lock:
            status = self.status
            status.failed_steps += 1
            status.failure, status.error, status.failed_at, status.failing = failure, error, now, True

    def step_done(self) -> bool:
        """A step did not fail; whether the last one had."""
        with self._lock:
            failed, self.status.failing = self.status.failing, False
            return failed

    @property
    def unavailable(self) -> bool:
        """See ``GatewayStatus``."""
        with self._lock:
            return self.status.unavailable

    @property
    def probeable(self) -> float | None:
        """When the last step failed, if a probe can show that the next one would not; else None."""
        with self._lock:
            status = self.status
            return status.failed_at if status.failing and status.failure != StepFailure.WRONG_ANSWER else None

    def probed(self, failed_at: float, failure: str = "", error: str = "") -> bool:
        """A probe that began after a failure has ended.

        Args:
            failed_at: what ``probeable`` was.
            failure, error: of the probe; empty: the executor is back.

        Returns:
            Whether it counts. If a step has ended since, that step does.
        """
        with self._lock:
            status = self.status
            if not status.failing or status.failed_at != failed_at:
                return False
            if failure:
                status.failure, status.error = failure, error
            else:
                status.failing = False
            return True

    def write(self, folder: Path, counts: Mapping[str, float]) -> None:
        """Tell the server how steps go, and these counts.

        Raises:
            OSError: see ``GatewayStatus.write``.
        """
        with self._lock:
            for name, count in counts.items():
                setattr(self.status, name, count)
            self.status.write(folder)


class SequenceErrors(msgspec.Struct):
    """Sequences that ended with an error which is theirs alone, and why.

    Attributes:
        reasons: by the name that vLLM has for the sequence; it begins with that of its request.
    """

    reasons: dict[str, str] = msgspec.field(default_factory=dict)

    def add(self, folder: Path, reasons: dict[str, str]) -> str:
        """Let the server know, before it hears of the end.

        Returns:
            Why that is impossible, such as a full disk; empty: it is done. Steps go on either way.
        """
        self.reasons |= reasons
        while len(self.reasons) > REMEMBERED or len(msgspec.json.encode(self)) > MAX_BYTES:
            del self.reasons[next(iter(self.reasons))]
        try:
            write_record(folder / ENDED_FILE, msgspec.json.encode(self))
        except OSError as error:
            return f"cannot write to {folder}: {error.strerror}"
        return ""

    @classmethod
    def reason(cls, folder: Path, request: str) -> str:
        """Why a sequence of a request ended; empty: none did."""
        record = read_record(folder / ENDED_FILE)
        errors = cls() if record is None else msgspec.json.decode(record, type=cls)
        return next((why for name, why in errors.reasons.items() if request in name), "")


def request_name(client: str, secret: str) -> str:
    """What vLLM calls a request; ``secret``: 32 digits that nobody else can give."""
    return f"{client or 'all'}.{secret}"


def client_of(sequence: str) -> str:
    """The client of a sequence, by the name that vLLM has for it, which holds that of its request."""
    match = re.search(r"([0-9a-z]+)\.[0-9a-f]{32}", sequence)
    return match[1] if match else ""
