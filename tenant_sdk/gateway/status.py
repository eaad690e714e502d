"""Status of a gateway's worker, for the server in front of it, in a file of a private folder."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from shared.atomic import write_atomically

FILE, ENDED_FILE = "status.json", "ended.json"
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
        failure: ``Failure`` of the last step that failed; empty: none did.
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

    def write(self, folder: Path) -> None:
        """Put it where ``read`` finds it, whole or not at all."""
        _write(folder / FILE, self)

    @classmethod
    def read(cls, folder: Path) -> GatewayStatus:
        """The last one written; one of zeros before that."""
        try:
            return msgspec.json.decode((folder / FILE).read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()


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
        while len(self.reasons) > REMEMBERED:
            del self.reasons[next(iter(self.reasons))]
        try:
            _write(folder / ENDED_FILE, self)
        except OSError as error:
            return f"cannot write to {folder}: {error.strerror}"
        return ""

    @classmethod
    def reason(cls, folder: Path, request: str) -> str:
        """Why a sequence of a request ended; empty: none did."""
        try:
            errors = msgspec.json.decode((folder / ENDED_FILE).read_bytes(), type=cls)
        except FileNotFoundError:
            return ""
        return next((why for name, why in errors.reasons.items() if request in name), "")


def request_name(client: str, secret: str) -> str:
    """What vLLM calls a request; ``secret``: 32 digits that nobody else can give."""
    return f"{client or 'all'}.{secret}"


def client_of(sequence: str) -> str:
    """The client of a sequence, by the name that vLLM has for it, which holds that of its request."""
    match = re.search(r"([0-9a-z]+)\.[0-9a-f]{32}", sequence)
    return match[1] if match else ""


def _write(path: Path, record: msgspec.Struct) -> None:
    write_atomically(path, msgspec.json.encode(record))
