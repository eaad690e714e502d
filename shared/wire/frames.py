"""WebSocket frames (RFC 6455 §5) without I/O and without copies.

The opening handshake is done by the ``websockets`` library. Its frame layer copies a payload
several times between socket and application, which for megabytes of activations costs more than TLS
does; so frames are read here straight into the tensor that will hold them, and written straight
from it. ``docs/explanation/performance.md`` has the measurement, and
``tests/integration/test_websocket_interop.py`` runs both ends against the library.

A message of ours (``shared.wire.incoming``) is one binary message.
"""

from __future__ import annotations

import ctypes
import enum
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shared.compat import apply_mask
from shared.errors import WireError
from shared.wire.header import HEADER_BYTES, Header
from shared.wire.incoming import Incoming, check_header, new_payload, tensor_bytes

# One TLS record carries 16 KiB, so a read never returns more.
RECORD_BYTES = 16 * 1024
# Masked in pieces that stay in the second-level cache between masking and encrypting.
CHUNK_BYTES = 256 * 1024


class Opcode(enum.IntEnum):
    """The opcodes of RFC 6455 §5.2."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


_OPCODES = frozenset(int(opcode) for opcode in Opcode)


@dataclass(slots=True)
class Control:
    """A ping, pong or close frame and its payload (at most 125 bytes)."""

    opcode: Opcode
    data: bytes


def frame_header(opcode: Opcode, length: int, mask: bytes = b"", *, fin: bool = True) -> bytes:
    """Returns the 2 to 14 bytes before a frame's payload of ``length`` bytes; ``mask``: empty or 4 bytes."""
    first = opcode | (0x80 if fin else 0)
    masked = 0x80 if mask else 0
    if length < 126:
        return struct.pack("!BB", first, masked | length) + mask
    if length < 1 << 16:
        return struct.pack("!BBH", first, masked | 126, length) + mask
    return struct.pack("!BBQ", first, masked | 127, length) + mask


def xor_mask(data: memoryview, mask: bytes, out: memoryview, offset: int = 0) -> None:
    """Computes ``out[i] = data[i] ^ mask[(offset + i) % 4]``; ``out`` may be ``data`` itself."""
    shift = offset % 4
    mask = mask[shift:] + mask[:shift]
    whole = len(data) & ~3
    if whole:
        np.bitwise_xor(
            np.frombuffer(data[:whole], np.uint32),
            np.frombuffer(mask, np.uint32)[0],
            out=np.frombuffer(out[:whole], np.uint32),
        )
    for i in range(whole, len(data)):
        out[i] = data[i] ^ mask[i % 4]


def _copy(tensor: torch.Tensor) -> bytes:
    """Returns a small contiguous CPU tensor's bytes; without numpy, whose code a lone row would wait for."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("a contiguous tensor of the CPU is wanted")
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def encode_message(
    header: Header, tensors: Sequence[torch.Tensor] | bytes, mask: bytes = b""
) -> Iterator[bytes | memoryview]:
    """Returns the bytes of one message, in pieces to be written in order.

    Args:
        header: its ``payload_bytes`` is the size of all tensors together.
        tensors: contiguous CPU tensors sent one behind the other, or bytes.
        mask: 4 fresh random bytes on the tenant's side, empty on the executor's.

    A masked piece is valid only until the next one is taken: they share one buffer.
    """
    head, total = header.pack(), HEADER_BYTES + header.payload_bytes
    start = frame_header(Opcode.BINARY, total, mask)
    if total <= RECORD_BYTES:  # one write, one TLS record
        body = b"".join((head, tensors) if isinstance(tensors, bytes) else (head, *map(_copy, tensors)))
        if len(body) != total:
            raise ValueError("the tensors are not as large as the header says")
        return iter((start + (apply_mask(body, mask) if mask else body),))
    views = [memoryview(tensors)] if isinstance(tensors, bytes) else [tensor_bytes(b) for b in tensors]
    if sum(map(len, views)) != header.payload_bytes:
        raise ValueError("the tensors are not as large as the header says")
    if not mask:
        return iter((start + head, *views))
    return _masked_pieces(start + apply_mask(head, mask), views, mask)


def _masked_pieces(start: bytes, views: list[memoryview], mask: bytes) -> Iterator[bytes | memoryview]:
    yield start
    scratch = memoryview(bytearray(CHUNK_BYTES))
    offset = 0
    for view in views:
        for at in range(0, len(view), CHUNK_BYTES):
            piece = view[at : at + CHUNK_BYTES]
            out = scratch[: len(piece)]
            xor_mask(piece, mask, out, offset)
            offset += len(piece)
            yield out


def encode_control(opcode: Opcode, data: bytes = b"", mask: bytes = b"") -> bytes:
    """Returns a ping, pong or close frame; ``data`` is at most 125 bytes."""
    return frame_header(opcode, len(data), mask) + (apply_mask(data, mask) if mask else data)


class MessageReader:
    """Reads one peer's frames: ask for a buffer, fill part of it, say how much, get what completed.

    Call ``get_buffer`` and ``received`` in turn (the interface of ``asyncio.BufferedProtocol``).

    Args:
        accept: called with every message's header before anything is allocated for its payload; returns the
            message's ``admitted``, or raises WireError to refuse it. If that is not fatal, the payload is
            skipped.
        masked: whether the peer must mask its frames (tenants must, executors must not).
        max_message_bytes: payloads above this are refused and fatal, because skipping costs too.
        allocate: where the payload of an accepted header goes, if it does not arrive at once.
        steps: at most so many units, of which a frame has one to three, are parsed in one call; None: all.

    Attributes:
        unparsed: the last call stopped early: call ``received(0)`` before you ask for a buffer.
        idle_frames: control frames and fragments of few bytes so far, of which peers need hardly any.
    """

    def __init__(
        self,
        accept: Callable[[Header], object],
        *,
        masked: bool,
        max_message_bytes: int,
        allocate: Callable[[Header], torch.Tensor] = new_payload,
        steps: int | None = None,
    ) -> None:
        self._accept, self._allocate, self._steps = accept, allocate, steps
        self.unparsed, self.idle_frames = False, 0
        self._masked = masked
        self._max_frame = max_message_bytes + HEADER_BYTES
        self._scratch = memoryview(bytearray(RECORD_BYTES))
        self._have = 0  # bytes in scratch not yet parsed
        self.progress = 0  # bytes of messages so far; control frames and empty fragments are none
        # The frame being read.
        self._frame_left = 0
        self._fin = True
        self._mask = b""
        self._mask_at = 0  # offset of the next payload byte within its frame
        # The message being read.
        self._in_message = False
        self._head = b""
        self._message: Incoming | None = None  # once its header is complete
        self._view = memoryview(b"")
        self._filled = 0
        self._message_bytes = 0  # length of its frames so far
        self._direct = False

    @property
    def mid_message(self) -> bool:
        """Whether a message or a frame header has begun and not ended."""
        return self._in_message or self._have > 0 or self._frame_left > 0

    def drop(self) -> None:
        """Forget what has been read of a message: no more follows."""
        self._message, self._view, self._scratch = None, memoryview(b""), memoryview(b"")

    def get_buffer(self) -> memoryview:
        """Returns where the next received bytes go; never empty."""
        self._direct = self._frame_left > 0 and self._filled < len(self._view) and self._have == 0
        if self._direct:
            return self._view[self._filled : self._filled + self._frame_left]
        return self._scratch[self._have :]

    def received(self, count: int) -> list[Incoming | Control]:
        """Take ``count`` bytes that were written into the last buffer.

        Raises:
            WireError: always fatal: the byte stream cannot be followed any further.
        """
        events: list[Incoming | Control] = []
        if self._direct:
            self._consume(self._view[self._filled : self._filled + count], events, in_place=True)
            return events
        self._have += count
        data = self._scratch[: self._have]
        at = steps = 0
        while steps != self._steps:
            used = self._step(data[at:], events)
            if not used:
                break
            at += used
            steps += 1
        rest = bytes(data[at:])
        self._scratch[: len(rest)] = rest
        self._have = len(rest)
        self.unparsed = steps == self._steps and self._have > 0
        return events

    def _step(self, data: memoryview, events: list[Incoming | Control]) -> int:
        """Parse one unit from the front of ``data``. Returns how many bytes it used; 0: it needs more."""
        if self._frame_left:
            piece = data[: self._frame_left]
            if self._in_message and self._message is None:
                piece = piece[: HEADER_BYTES - len(self._head)]
            if piece:
                self._consume(piece, events, in_place=False)
            return len(piece)
        return self._frame_header(data, events)

    def _frame_header(self, data: memoryview, events: list[Incoming | Control]) -> int:
        if len(data) < 2:
            return 0
        first, second = data[0], data[1]
        length, size = second & 0x7F, 2
        if length == 126:
            size = 4
        elif length == 127:
            size = 10
        masked = bool(second & 0x80)
        end = size + (4 if masked else 0)
        if len(data) < end:
            return 0
        if size > 2:
            length = int.from_bytes(data[2:size], "big")
        mask = bytes(data[size:end])
        fin, opcode = bool(first & 0x80), first & 0x0F
        if first & 0x70 or opcode not in _OPCODES:
            raise WireError("frame", "reserved bits or opcode in a websocket frame", fatal=True)
        if masked != self._masked:
            raise WireError("frame", "websocket frame masked on the wrong side", fatal=True)
        if opcode >= Opcode.CLOSE:
            if length > 125 or not fin:
                raise WireError("frame", "websocket control frame too long or fragmented", fatal=True)
            if len(data) < end + length:
                return 0
            body = bytes(data[end : end + length])
            self.idle_frames += 1
            events.append(Control(Opcode(opcode), apply_mask(body, mask) if mask else body))
            return end + length
        if opcode == Opcode.TEXT:
            raise WireError("text", "text message; this protocol is binary", fatal=True)
        if (opcode == Opcode.CONTINUATION) != self._in_message:
            raise WireError("frame", "websocket continuation out of order", fatal=True)
        before = self._message_bytes if self._in_message else 0
        if before + length > self._max_frame:
            raise WireError(
                "too_large",
                f"message of {length} bytes; the limit is {self._max_frame}",
                fatal=True,
            )
        if not self._in_message:
            if fin and length < HEADER_BYTES:
                raise WireError("header", f"message of {length} bytes is shorter than its header", fatal=True)
            if fin and end + length <= len(data):
                events.append(self._whole(data[end : end + length], mask))
                return end + length
            self._in_message = True
            self._head, self._message, self._view, self._filled = b"", None, memoryview(b""), 0
        if length < HEADER_BYTES and not fin:
            self.idle_frames += 1
        self._frame_left, self._fin, self._mask, self._mask_at = length, fin, mask, 0
        self._message_bytes = before + length
        if length == 0 and fin:
            self._finish(events)
        return end

    def _whole(self, data: memoryview, mask: bytes) -> Incoming:
        """Parses a small message that arrived at once, as those of decoding do."""
        self.progress += len(data)
        body = bytearray(apply_mask(data, mask) if mask else data)
        message = check_header(body, self._accept, len(body) - HEADER_BYTES)
        if message.error is None:
            if len(body) == HEADER_BYTES:
                message.payload = new_payload(message.header)
            else:
                message.body = body
        return message

    def _consume(self, data: memoryview, events: list[Incoming | Control], *, in_place: bool) -> None:
        """Take payload bytes of the current frame: header first, then tensor."""
        count = len(data)
        self.progress += count
        if self._message is None:
            head = bytearray(data)
            if self._mask:
                xor_mask(data, self._mask, memoryview(head), self._mask_at)
            self._head += bytes(head)
            if len(self._head) == HEADER_BYTES:
                self._open()
        elif self._message.error is None:
            out = self._view[self._filled : self._filled + count]
            if len(out) < count:
                raise WireError("payload_length", "message longer than its header says", fatal=True)
            if self._mask:
                xor_mask(data, self._mask, out, self._mask_at)
            elif not in_place:
                out[:] = data
            self._filled += count
        self._mask_at += count
        self._frame_left -= count
        if self._frame_left == 0 and self._fin:
            self._finish(events)

    def _open(self) -> None:
        """Check a complete header, then allocate memory for the payload."""
        follows = self._message_bytes - HEADER_BYTES if self._fin else None
        message = self._message = check_header(self._head, self._accept, follows)
        if message.error is None:
            payload = message.payload = self._allocate(message.header)
            self._view = tensor_bytes(payload)

    def _finish(self, events: list[Incoming | Control]) -> None:
        self._in_message = False
        message, self._message, self._view = self._message, None, memoryview(b"")
        if message is None:  # in several frames; one frame is refused by its length
            raise WireError(
                "header", f"message of {self._message_bytes} bytes is shorter than its header", fatal=True
            )
        if message.error is None and self._filled != message.header.payload_bytes:
            message.payload = None
            message.error = WireError("payload_length", "message shorter than its header says")
        events.append(message)
