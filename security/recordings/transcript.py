"""Read the transcript that an executor recorded (``provider.observe.transcript``)."""

from __future__ import annotations

import math
import os
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch

from provider.observe.transcript import ANSWER, LENGTH, MAGIC, RECORD, RecordKind
from shared.checkpoint import Checkpoint
from shared.encoded import is_sparse
from shared.errors import SymbiosisError, WireError
from shared.wire.header import HEADER_BYTES, PRODUCTS, Header, parse_header
from shared.wire.messages import Manifest, decode
from shared.wire.protocol import MAX_ANSWER_CONTROL_BYTES, ExecutorProtocol, validate_manifest

_LONGEST_NAME = 4096  # bytes; token files bound no name that their owner writes by hand
_LATEST = 1e11  # seconds since the epoch


class TranscriptError(SymbiosisError):
    """A transcript that cannot be used."""


@dataclass
class RecordedRequest:
    """One request as the executor saw it.

    What was sent lies in ``parts`` of the file ``path``, offsets and sizes. Times are in seconds: ``arrived``
    since the epoch, ``seconds`` until the answer was computed, or nan: it failed, or the executor died.
    """

    session: int
    arrived: float
    header: Header
    path: Path
    parts: tuple[tuple[int, int], ...]
    seconds: float = math.nan

    @property
    def payload(self) -> bytes:
        """What was sent, read anew each time: all requests together may be larger than the memory."""
        return self._read(0, sum(size for _, size in self.parts))

    def _read(self, start: int, size: int) -> bytes:
        found, end, begins = [], start + size, 0
        with self.path.open("rb", buffering=0) as file:
            for at, length in self.parts:
                skip, stop = max(0, start - begins), min(length, end - begins)
                if skip < stop:
                    found.append(os.pread(file.fileno(), stop - skip, at + skip))
                begins += length
        return b"".join(found)

    @property
    def kind(self) -> tuple[int, int, int]:
        """Group, direction, members: what masks are made for."""
        return self.header.group, self.header.direction, self.header.members

    @property
    def stream(self) -> tuple[int, int, int, int]:
        """The same, and how much of the answer was asked for: masks of one stream serve in their order."""
        return *self.kind, self.header.answer_bits

    @property
    def rows(self) -> torch.Tensor:
        """What was sent, [T, C] float32, bfloat16 or int32; of a seed its bytes [1, 32]. A copy."""
        shape, dtype = self.header.payload_shape, self.header.payload_dtype
        if not self.header.payload_bytes:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.payload), dtype=dtype).view(shape)

    def some_rows(self, first: int, count: int) -> torch.Tensor:
        """These of ``rows``, [count, C]. Nothing else is read: requests may be large, and asked for often."""
        (rows, columns), dtype = self.header.payload_shape, self.header.payload_dtype
        size = self.header.payload_bytes // rows
        return torch.frombuffer(bytearray(self._read(first * size, count * size)), dtype=dtype).view(
            count, columns
        )


@dataclass
class Transcript:
    """A complete recording."""

    manifest: Manifest
    requests: list[RecordedRequest] = field(default_factory=list)
    tenants: dict[int, str] = field(default_factory=dict)  # by session


def newest(folder: str | Path) -> Path:
    """The last transcript of a folder.

    Raises:
        TranscriptError: there is none.
    """
    paths = sorted(Path(folder).glob("*.transcript"), key=lambda path: path.stat().st_mtime)
    if not paths:
        raise TranscriptError(f"no transcript in {folder}; `symbiosis-provider serve --transcript` makes one")
    return paths[-1]


def read_transcript(path: str | Path, *, digest: str | None = None, cut: bool = False) -> Transcript:
    """Returns the transcript in a file. Rows are read when they are used.

    Args:
        path: File of the transcript, or a folder. The newest transcript in the folder is read.
        digest: Digest of the weights that the transcript must have. Default: any.
        cut: Accept a transcript that is cut off or still being written, and use its complete part.

    Raises:
        TranscriptError: The file is no transcript, has another version or model, or is cut off.
    """
    path = newest(path) if Path(path).is_dir() else Path(path)
    try:
        if is_sparse(path):  # its own manifest says how large requests may be
            raise TranscriptError(f"most of {path} is a hole: it was not copied as a whole")
        with path.open("rb") as file:
            return _read(path, file, digest, cut=cut)
    except OSError as error:
        raise TranscriptError(f"cannot read {path}: {error}") from error


def check_served(recorded: Transcript, model: str | Path) -> None:
    """That a checkpoint is what the recorded executor served.

    Raises:
        TranscriptError: it is another.
        CheckpointError: it cannot be read.
    """
    checkpoint, manifest = Checkpoint(model), recorded.manifest
    if checkpoint.holds(manifest):
        return
    members = [member for group in manifest.groups if not group.head for member in group.members]
    missing = sorted(member.tensor for member in members if not checkpoint.has(member))
    served = (
        f"{model} has no {missing[0]}"
        if missing
        else f"those of {model}: {checkpoint.weights_digest(manifest.groups)[:16]}"
    )
    raise TranscriptError(
        f"the transcript is of another model than {model}: {manifest.model}, whose layers' weights have "
        f"SHA-256 {manifest.weights[:16]}; {served}. Name the checkpoint that was served with --model"
    )


def _read(path: Path, file: BinaryIO, digest: str | None, *, cut: bool) -> Transcript:
    version = file.read(len(MAGIC))
    if not version:
        raise TranscriptError(f"cannot read {path}: it is empty")
    if version != MAGIC:
        if version.startswith(MAGIC[:-2]):
            raise TranscriptError(f"{path} was written by another version: {version!r} instead of {MAGIC!r}")
        raise TranscriptError(f"{path} is no transcript of an executor")
    cursor = _Cursor(path, file)
    transcript: Transcript | None = None
    try:
        manifest = decode(cursor.sized(MAX_ANSWER_CONTROL_BYTES), Manifest)
        validate_manifest(manifest)
        if digest is not None and manifest.digest != digest:
            raise TranscriptError(
                f"{path} is of another model: {manifest.model}, digest {manifest.digest[:16]}, "
                f"instead of {digest[:16]}"
            )
        transcript = Transcript(manifest)
        read = _RecordReader(cursor, transcript)
        while read.next():
            pass
    except EOFError:
        if transcript is None or not cut:
            count = len(transcript.requests) if transcript else 0
            raise TranscriptError(
                f"{path} is cut after {count} requests: the provider was killed, is still writing, or had no "
                "space. To use what is there: --cut"
            ) from None
    except (WireError, ValueError) as error:
        raise TranscriptError(f"{path} is damaged at byte {cursor.at}: {error}") from error
    return transcript


class _Cursor:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file, self.at = path, file, file.tell()
        self._size = os.fstat(file.fileno()).st_size

    def pass_over(self, size: int) -> int:
        """Where what is passed over begins."""
        if self.at + size > self._size:
            raise EOFError
        self.at += size
        self._file.seek(size, os.SEEK_CUR)
        return self.at - size

    def take(self, size: int) -> bytes:
        if self.at + size > self._size:
            raise EOFError
        self.at += size
        return self._file.read(size)

    def sized(self, most: int) -> bytes:
        (length,) = LENGTH.unpack(self.take(LENGTH.size))
        if length > most:
            raise ValueError(f"{length} bytes; there can be {most}")
        return self.take(length)


class _RecordReader:
    """Adds records to a transcript, and checks each: the audited executor may have written the file."""

    def __init__(self, cursor: _Cursor, into: Transcript) -> None:
        self._cursor, self._into = cursor, into
        self._protocol = ExecutorProtocol(into.manifest)
        self._protocol.hello_received = True  # control messages are not recorded
        # By session and request id, which a tenant can give to several.
        self._without_answer = defaultdict[tuple[int, int], deque[RecordedRequest]](deque)

    def next(self) -> bool:
        """Read one record; whether more follow.

        Raises:
            EOFError: the file ends before.
            WireError, ValueError: no executor writes this.
        """
        number, session, at = RECORD.unpack(self._cursor.take(RECORD.size))
        kind = RecordKind(number)
        if not 0 <= at < _LATEST:
            raise ValueError("a time that is none")
        if kind == RecordKind.OPENED:
            name = self._cursor.sized(_LONGEST_NAME).decode()
            if not name.isprintable():
                raise ValueError("a tenant's name with control characters")
            self._into.tenants[session] = name
        elif kind != RecordKind.END and session not in self._into.tenants:
            raise ValueError("a session that was not opened")
        elif kind == RecordKind.REQUEST:
            self._request(session, at)
        elif kind == RecordKind.ANSWERED:
            self._answered(session)
        return kind != RecordKind.END

    def _request(self, session: int, at: float) -> None:
        header = parse_header(self._cursor.take(HEADER_BYTES))
        self._protocol.accept(header)
        if header.operation not in PRODUCTS:
            raise ValueError(f"operation {header.operation}, which is not recorded")
        part = self._cursor.pass_over(header.payload_bytes), header.payload_bytes
        request = RecordedRequest(session, at, header, self._cursor.path, (part,))
        self._without_answer[session, header.request_id].append(request)
        self._into.requests.append(request)

    def _answered(self, session: int) -> None:
        request_id, seconds = ANSWER.unpack(self._cursor.take(ANSWER.size))
        requests = self._without_answer.get((session, request_id))
        if not requests:
            raise ValueError("an answer to nothing")
        if not 0 <= seconds < _LATEST:
            raise ValueError("a time that is none")
        requests.popleft().seconds = seconds
        if not requests:
            del self._without_answer[session, request_id]
