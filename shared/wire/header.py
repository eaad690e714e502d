"""The 32-byte little-endian header in front of every message (``shared/PROTOCOL.md``, "Header").

::

    offset  size  field
         0     1  version      PROTOCOL_VERSION
         1     1  operation    Operation
         2     1  direction    Direction
         3     1  dtype        code in DTYPES
         4     4  group        group id of a product or effect, else 0
         8     4  request_id   chosen by the tenant, repeated in the answer
        12     4  rows
        16     4  columns      of the payload's tensor; of the mask, if the payload is its seed
        20     2  request_class  RequestClass of a product or effect, else 0
        22     2  answer_bits  on the ring, of a product or effect and its answer: one of ANSWER_BITS, else 0
        24     8  members      bit i: member i of the group takes part
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import torch

from shared.errors import WireError

PROTOCOL_VERSION = 4
SUBPROTOCOL = "symbiosis.v4"
HEADER_BYTES = 32
SEED_BYTES = 32
# Numerics on the ring (``shared.ring.fixed_point``): planes of a weight, whose answers lie side by side.
RINGS = {"ring": 1, "ring-fine": 2}
MAX_MEMBERS = 64
EXACT = 32
ANSWER_BITS = (16, 24, EXACT)  # upper bits of each number of an answer on the ring that travel

_STRUCT = struct.Struct("<BBBBIIIIHHQ")


def half_bits(numerics: str) -> int:
    """Returns the bits of a half answer: 16 on the ring; 24 with two planes, so that it stays more exact."""
    return 24 if RINGS.get(numerics, 1) > 1 else 16


def wire_dtypes(numerics: str) -> tuple[str, ...]:
    """Returns the element types of rows in some numerics, the usual one first."""
    return ("int32",) if numerics in RINGS else ("float32", "bfloat16")


class Operation(enum.IntEnum):
    """What a message is. Tenants send HELLO, PRODUCT, EFFECT, SEED_EFFECT and FETCH; executors the rest."""

    HELLO = 1
    WELCOME = 2
    PRODUCT = 3
    EFFECT = 4
    FETCH = 5
    REPLY = 6
    ERROR = 7
    SEED_EFFECT = 8  # an EFFECT whose rows are the mask of a seed, which is all that travels


_OPERATIONS = frozenset(Operation)
PRODUCTS = frozenset({Operation.PRODUCT, Operation.EFFECT, Operation.SEED_EFFECT})


class Direction(enum.IntEnum):
    """``FORWARD`` multiplies rows by W transposed, ``BACKWARD`` output gradients by W."""

    NONE = 0
    FORWARD = 1
    BACKWARD = 2


class RequestClass(enum.IntEnum):
    """How urgent a product is, as its tenant declares; executors believe it within a budget of rows."""

    UNDECLARED = 0
    DECODE = 1  # somebody waits for the next token
    PREFILL = 2  # somebody waits for the first token
    FINETUNING = 3  # nobody waits: training, and effects fetched ahead


MAX_CLASS = max(RequestClass)
_WITH_ANSWER_BITS = PRODUCTS | {Operation.REPLY}

# The closed table of element types. A code that is not here is refused; no type name ever
# comes from the wire. Code 0 is raw bytes (JSON of control messages, parts of files).
DTYPES: dict[int, torch.dtype] = {
    0: torch.uint8,
    1: torch.float32,
    2: torch.bfloat16,
    3: torch.float16,
    4: torch.float64,
    5: torch.int64,
    6: torch.int32,
    7: torch.bool,
}
_ITEM_BYTES = {code: dtype.itemsize for code, dtype in DTYPES.items()}
TRUNCATED_DTYPES = {16: torch.int16, 24: torch.uint8}
BYTES = 0
DTYPE_CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in DTYPES.items()}
DTYPE_NAMES: dict[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


class Header(NamedTuple):
    """One parsed header; see the module's table."""

    operation: int
    direction: int = Direction.NONE
    dtype: int = BYTES
    group: int = 0
    request_id: int = 0
    rows: int = 0
    columns: int = 0
    members: int = 0
    request_class: int = RequestClass.UNDECLARED
    answer_bits: int = 0

    @property
    def truncated(self) -> bool:
        """Whether the payload is an answer of which only the upper bits travel."""
        return self.operation == Operation.REPLY and 0 < self.answer_bits < EXACT

    @property
    def payload_shape(self) -> tuple[int, int]:
        """Rows and columns of the payload, in elements of ``payload_dtype``."""
        if self.operation == Operation.SEED_EFFECT:
            return 1, SEED_BYTES
        return self.rows, self.columns * (3 if self.truncated and self.answer_bits == 24 else 1)

    @property
    def payload_dtype(self) -> torch.dtype:
        """The dtype of the payload's elements; three bytes are an element of an answer of 24 bits."""
        if self.truncated:
            return TRUNCATED_DTYPES[self.answer_bits]
        return DTYPES[BYTES if self.operation == Operation.SEED_EFFECT else self.dtype]

    @property
    def payload_bytes(self) -> int:
        """Exact size in bytes of the payload; Python integers do not overflow."""
        if self.operation == Operation.SEED_EFFECT:
            return SEED_BYTES
        item = self.answer_bits // 8 if self.truncated else _ITEM_BYTES[self.dtype]
        return self.rows * self.columns * item

    def pack(self) -> bytes:
        """Returns the 32 bytes of this header."""
        return _STRUCT.pack(
            PROTOCOL_VERSION,
            self.operation,
            self.direction,
            self.dtype,
            self.group,
            self.request_id,
            self.rows,
            self.columns,
            self.request_class,
            self.answer_bits,
            self.members,
        )


def parse_header(data: bytes | bytearray | memoryview) -> Header:
    """Parse the first 32 bytes of a message.

    Raises:
        WireError: ``protocol_version`` (fatal), ``operation``, ``direction``, ``dtype``,
            ``request_class`` or ``answer_bits``.
    """
    (
        version,
        operation,
        direction,
        dtype,
        group,
        request_id,
        rows,
        columns,
        request_class,
        answer_bits,
        members,
    ) = _STRUCT.unpack_from(data)
    if version != PROTOCOL_VERSION:
        raise WireError(
            "protocol_version",
            f"the message has protocol version {version}, this side speaks {PROTOCOL_VERSION}; "
            "install matching versions on both sides",
            fatal=True,
        )
    if operation not in _OPERATIONS:
        raise WireError("operation", f"unknown operation {operation}")
    if direction > 2:
        raise WireError("direction", f"unknown direction {direction}; forward is 1, backward is 2")
    if dtype not in DTYPES:
        raise WireError("dtype", f"unknown dtype code {dtype}")
    if request_class > (MAX_CLASS if operation in PRODUCTS else 0):
        raise WireError("request_class", f"a product's class is at most {MAX_CLASS}, others have none")
    if answer_bits and (answer_bits not in ANSWER_BITS or operation not in _WITH_ANSWER_BITS):
        raise WireError("answer_bits", f"a product's answer has one of {ANSWER_BITS} bits, others have none")
    return Header(
        operation, direction, dtype, group, request_id, rows, columns, members, request_class, answer_bits
    )


def request_id_of(data: bytes | bytearray | memoryview) -> int:
    """Returns the request id of a header that may be invalid otherwise, so that its error can name it."""
    return int.from_bytes(data[8:12], "little")


def member_indices(member_bits: int) -> list[int]:
    """Returns the positions of the bits set in ``member_bits``, ascending."""
    return [i for i in range(member_bits.bit_length()) if member_bits >> i & 1]
