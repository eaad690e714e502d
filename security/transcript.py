"""Read the transcript that an executor recorded (``provider.transcript``)."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field
from pathlib import Path

import torch

from provider.transcript import LENGTH, MAGIC, RECORD, SECONDS, Record
from shared.errors import SymbiosisError, WireError
from shared.header import HEADER_BYTES, Header, parse_header
from shared.messages import Manifest, decode


class TranscriptError(SymbiosisError):
    """A transcript that cannot be used."""


@dataclass
class Request:
    """One request as the executor saw it.

    ``payload`` is what was sent; times are in seconds: ``arrived`` since the epoch, ``seconds`` until the
    answer was computed, or nan: it failed, or the executor died.
    """

    session: int
    arrived: float
    header: Header
    payload: memoryview | bytes
    seconds: float = math.nan

    @property
    def kind(self) -> tuple[int, int, int]:
        """Group, direction, members: what masks are made for."""
        return self.header.group, self.header.direction, self.header.members

    @property
    def rows(self) -> torch.Tensor:
        """What was sent, [T, C] float32, bfloat16 or int32; of a seed its bytes [1, 32]. A copy."""
        shape, dtype = self.header.payload_shape, self.header.payload_dtype
        if not len(self.payload):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.payload), dtype=dtype).view(shape)


@dataclass
class Transcript:
    """A whole recording."""

    manifest: Manifest
    requests: list[Request] = field(default_factory=list)
    tenants: dict[int, str] = field(default_factory=dict)  # by session


def newest(folder: str | Path) -> Path:
    """The last transcript of a folder.

    Raises:
        TranscriptError: there is none.
    """
    found = sorted(Path(folder).glob("*.transcript"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise TranscriptError(f"no transcript in {folder}; `symbiosis-provider serve --transcript` makes one")
    return found[-1]


def read_transcript(path: str | Path, *, digest: str | None = None, cut: bool = False) -> Transcript:
    """A transcript from a file; rows are mapped, and read when they are used.

    Args:
        path: the file, or a folder, of which the newest is taken.
        digest: of the weights that it must be about.
        cut: accept one that is cut or still being written, and use what is complete.

    Raises:
        TranscriptError: no transcript, of another version or model, or cut.
    """
    path = newest(path) if Path(path).is_dir() else Path(path)
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise TranscriptError(f"cannot read {path}: {error}") from error
    if data[: len(MAGIC)] != MAGIC:
        version = bytes(data[: len(MAGIC)])
        if version.startswith(MAGIC[:-2]):
            raise TranscriptError(f"{path} was written by another version: {version!r} instead of {MAGIC!r}")
        raise TranscriptError(f"{path} is no transcript of an executor")
    cursor = _Cursor(data, len(MAGIC))
    transcript: Transcript | None = None
    try:
        manifest = decode(cursor.sized(), Manifest)
        if digest is not None and manifest.digest != digest:
            raise TranscriptError(
                f"{path} is of another model: {manifest.model}, digest {manifest.digest[:16]}, "
                f"instead of {digest[:16]}"
            )
        transcript = Transcript(manifest)
        last: dict[int, Request] = {}
        while _record(cursor, transcript, last):
            pass
    except EOFError:
        if transcript is None or not cut:
            found = len(transcript.requests) if transcript else 0
            raise TranscriptError(
                f"{path} is cut after {found} requests: the provider was killed, is still writing, or had no "
                "space. To use what is there: --cut"
            ) from None
    except (WireError, ValueError) as error:
        raise TranscriptError(f"{path} is damaged at byte {cursor.at}: {error}") from error
    return transcript


class _Cursor:
    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data, self.at = data, at

    def take(self, size: int) -> memoryview:
        if self.at + size > len(self._data):
            raise EOFError
        self.at += size
        return memoryview(self._data)[self.at - size : self.at]

    def sized(self) -> bytes:
        (length,) = LENGTH.unpack(self.take(LENGTH.size))
        return bytes(self.take(length))


def _record(cursor: _Cursor, into: Transcript, last: dict[int, Request]) -> bool:
    """Read one record; whether more follow. ``last`` is each session's last request."""
    kind, session, at = RECORD.unpack(cursor.take(RECORD.size))
    if kind == Record.OPENED:
        into.tenants[session] = cursor.sized().decode()
    elif kind == Record.REQUEST:
        header = parse_header(cursor.take(HEADER_BYTES))
        last[session] = Request(session, at, header, cursor.take(header.payload_bytes))
        into.requests.append(last[session])
    elif kind == Record.ANSWERED:
        (seconds,) = SECONDS.unpack(cursor.take(SECONDS.size))
        if session not in last:
            raise ValueError("an answer to nothing")
        last[session].seconds = seconds
    elif kind not in (Record.END, Record.CLOSED):
        raise ValueError(f"unknown record {kind}")
    return bool(kind != Record.END)
