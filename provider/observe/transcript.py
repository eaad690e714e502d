"""Records the requests of this executor for an audit: every header, payload and time.

The file is what a curious provider would keep, so it is as confidential as the tenants' traffic.
Format: ``MAGIC``, the manifest as a length and JSON, then records. A record is a kind (one byte), a
session number, a time, and what belongs to the kind; the last one is END, and a file without it was cut.
"""

from __future__ import annotations

import enum
import logging
import os
import struct
import threading
import time
from pathlib import Path

import torch

from shared.errors import ConfigurationError
from shared.wire.header import Header
from shared.wire.messages import Manifest, encode

log = logging.getLogger(__name__)

MAGIC = b"symbiosis transcript 2\n"
LENGTH = struct.Struct("<I")
RECORD = struct.Struct("<BId")  # kind, session, seconds since the epoch


class RecordKind(enum.IntEnum):
    """What follows the record's fixed part."""

    END = 0  # nothing: recording was stopped as intended
    OPENED = 1  # length and name of the tenant, UTF-8
    CLOSED = 2  # nothing
    REQUEST = 3  # header, payload; written before anything is computed
    ANSWERED = 4  # id of a request of the session, and seconds until its answer was computed (``ANSWER``)


ANSWER = struct.Struct("<Id")  # request id, seconds


class TranscriptWriter:
    """Appends to a new file in a folder; from any thread.

    When the disk is full, recording ends with an error in the log and serving goes on.

    Args:
        folder: made if it is not there, readable by this user only.
        manifest: what is served.

    Raises:
        ConfigurationError: the file cannot be made.
    """

    def __init__(self, folder: str | Path, manifest: Manifest) -> None:
        name = time.strftime("provider-%Y%m%dT%H%M%SZ", time.gmtime()) + f"-{os.getpid()}.transcript"
        self.path = Path(folder) / name
        self._lock = threading.Lock()
        self._sessions = 0
        self._complete = 0  # bytes up to the end of the last complete record
        try:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file: int | None = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigurationError(f"cannot record into {folder}: {error.strerror}") from error
        text = encode(manifest)
        self._append([MAGIC, LENGTH.pack(len(text)), text])

    def opened(self, tenant: str) -> int:
        """A session began; its number."""
        with self._lock:
            self._sessions += 1
            session = self._sessions
        name = tenant.encode()
        self._append([RECORD.pack(RecordKind.OPENED, session, time.time()), LENGTH.pack(len(name)), name])
        return session

    def closed(self, session: int) -> None:
        """A session ended."""
        self._append([RECORD.pack(RecordKind.CLOSED, session, time.time())])

    def request(self, session: int, header: Header, payload: torch.Tensor) -> None:
        """A product is asked for."""
        fixed = RECORD.pack(RecordKind.REQUEST, session, time.time()) + header.pack()
        self._append([fixed, payload.contiguous().view(torch.uint8).numpy().data.cast("B")])

    def answered(self, session: int, request_id: int, seconds: float) -> None:
        """A request of the session has its answer."""
        times = ANSWER.pack(request_id, seconds)
        self._append([RECORD.pack(RecordKind.ANSWERED, session, time.time()) + times])

    def close(self) -> None:
        """Mark the transcript as complete."""
        self._append([RECORD.pack(RecordKind.END, 0, time.time())], last=True)

    def _append(self, pieces: list[bytes | memoryview], *, last: bool = False) -> None:
        with self._lock:
            file = self._file
            if file is None:
                return
            try:
                for piece in pieces:
                    left = memoryview(piece)
                    while left:
                        left = left[os.write(file, left) :]
                self._complete += sum(len(piece) for piece in pieces)
                if last:  # under the same lock, so that nothing follows the end
                    os.close(file)
                    self._file = None
            except OSError as error:
                log.error("the transcript %s ends here, serving goes on: %s", self.path, error.strerror)
                self._abandon(file)

    def _abandon(self, file: int) -> None:
        self._file = None
        try:
            os.ftruncate(file, self._complete)
        except OSError:
            pass  # a reader notices a record that is cut
        os.close(file)
