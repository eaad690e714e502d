"""What an executor and its workers say to each other, on one machine.

Control goes through a pair of sockets that the worker inherits, rows through memory that both have mapped: no
copy of a row ever goes through a socket. Nothing is unpickled; both are the same program of the same version,
which the worker is started with.

A message is its length, a kind and its content. An end that closes ends the other one.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from provider.engine.lanes import RowRange
from provider.executor.stripes import Stripe
from shared.errors import WireError
from shared.transport.colocated import SharedMemory, aligned
from shared.wire.header import DTYPES, HEADER_BYTES, Header, Operation, parse_header
from shared.wire.messages import GroupInfo
from shared.wire.protocol import Plan

_FRAME = struct.Struct("<IB")
_BATCH = struct.Struct("<BI")  # slot, pieces
_PIECE = struct.Struct(f"<{HEADER_BYTES}sIIQQ")  # header, rows from and to, places of payload and answer
# Kinds: what to hold; that it is held, and its scales; a slot's memory; a batch, and that it is done.
SHARE, LOADED, SCALES, MEMORY, BATCH, DONE, REFUSED = range(7)
_LARGEST = 1 << 30  # of a message; scales of a large model are megabytes


class Share(msgspec.Struct, frozen=True):
    """What a worker shall hold, and how.

    Attributes:
        folder: the checkpoint.
        numerics, device: as for ``BaseExecutor``.
        threads: of one product; 0: one a core.
        groups: by their numbers in the manifest.
        stripe: of these groups' outputs; None: all of them.
    """

    folder: str
    numerics: str
    device: str
    threads: int
    groups: dict[int, GroupInfo]
    stripe: Stripe | None = None


class Line(msgspec.Struct, frozen=True):
    """What ``provider.engine.profiling`` measured: see ``provider.engine.latency.Line``."""

    group: int
    direction: int
    fixed: float
    per_row: float


class Loaded(msgspec.Struct, frozen=True):
    """A worker has its share: its groups, on the ring with bounds, and how long its products take."""

    groups: dict[int, GroupInfo]
    lines: list[Line]


class Failure(msgspec.Struct, frozen=True):
    """What an exception becomes on its way: ``code`` is empty for one that is no tenant's business."""

    message: str
    code: str = ""
    retry_after: float | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Of an answer that is none."""
        if isinstance(error, WireError):
            return cls(error.message, error.code, error.retry_after)
        return cls(f"{type(error).__name__}: {error}")

    def error(self) -> Exception:
        """The exception on the other side."""
        if self.code:
            return WireError(self.code, self.message, retry_after=self.retry_after)
        return RuntimeError(f"in a worker: {self.message}")


class Done(msgspec.Struct, frozen=True):
    """A batch is multiplied; its answers lie where they should, but for those that failed."""

    slot: int
    processor_seconds: float
    failures: dict[int, Failure]  # by their place in the batch


class Link:
    """One end. One thread at a time may send, and one may receive."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, kind: int, content: bytes, descriptor: int | None = None) -> None:
        """Send a message, with a descriptor if it is about one.

        Raises:
            OSError: the other end is gone.
        """
        data = _FRAME.pack(len(content), kind) + content
        if descriptor is None:
            self._socket.sendall(data)
        else:
            socket.send_fds(self._socket, [data], [descriptor])

    def receive(self) -> tuple[int, bytes, int | None]:
        """A message's kind and content, and its descriptor, which is the caller's.

        Raises:
            EOFError: the other end is gone.
            OSError: the connection broke.
        """
        head, descriptors, _flags, _address = socket.recv_fds(self._socket, _FRAME.size, 1)
        head += self._exactly(_FRAME.size - len(head)) if head else b""
        if not head:
            raise EOFError("the other end of the link is gone")
        length, kind = _FRAME.unpack(head)
        if length > _LARGEST:
            raise EOFError(f"a message of {length} bytes on the link")
        return kind, self._exactly(length), descriptors[0] if descriptors else None

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self._socket.recv_into(view)
            if not got:
                raise EOFError("the other end of the link is gone")
            view = view[got:]
        return bytes(data)

    def readable(self, seconds: float) -> bool:
        """Whether there is something to ``receive`` within some seconds, or the other end is gone."""
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def close(self) -> None:
        """End it, also for who waits."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()


class Piece(NamedTuple):
    """Rows of a request as they cross: where its payload is, and where its answer goes."""

    header: Header
    start: int
    stop: int
    payload_at: int
    answer_at: int


def layout(batch: Sequence[RowRange], plan: Plan, itemsize: int, parts: int) -> tuple[list[Piece], int]:
    """Where a batch's rows and answers lie in a slot's memory, and how many bytes they take.

    Rows that lie in one block cross alone; seeds, and rows in several blocks, with all of their request.

    Args:
        parts: how many answers there will be for each piece, one behind the other; see ``answer_blocks``.
    """
    pieces, at = [], 0
    for request, start, stop in batch:
        header, rows = request.header, stop - start
        if _alone(header, plan):
            header, start, stop = header._replace(rows=rows), 0, rows
        answer_at = at + aligned(header.payload_bytes)
        pieces.append(Piece(header, start, stop, at, answer_at))
        at = answer_at + parts * aligned(rows * plan.answer_columns * itemsize)
    return pieces, at


def _alone(header: Header, plan: Plan) -> bool:
    return header.operation != Operation.SEED_EFFECT and len(plan.request_widths) == 1


def crossing(rows: RowRange, plan: Plan) -> torch.Tensor:
    """What of a request's payload crosses; see ``layout``."""
    payload = rows.request.payload
    return payload[rows.start : rows.stop] if _alone(rows.request.header, plan) else payload


def answer_blocks(memory: SharedMemory, piece: Piece, plan: Plan, part: int = 0) -> list[torch.Tensor]:
    """Views of an answer's blocks, which lie one behind the other."""
    rows, dtype = piece.stop - piece.start, DTYPES[piece.header.dtype]
    size = rows * plan.answer_columns
    flat = memory.tensor(piece.answer_at + part * aligned(size * dtype.itemsize), dtype, (1, size)).view(-1)
    return [block.view(rows, -1) for block in flat.split([rows * width for width in plan.answer_widths])]


def encode_batch(slot: int, pieces: Sequence[Piece]) -> bytes:
    """Content of a message of the kind BATCH."""
    packed = (_PIECE.pack(piece.header.pack(), *piece[1:]) for piece in pieces)
    return _BATCH.pack(slot, len(pieces)) + b"".join(packed)


def decode_batch(content: bytes) -> tuple[int, list[Piece]]:
    """The slot and the pieces."""
    slot, count = _BATCH.unpack_from(content)
    packed = _PIECE.iter_unpack(memoryview(content)[_BATCH.size : _BATCH.size + count * _PIECE.size])
    return slot, [Piece(parse_header(header), *places) for header, *places in packed]
