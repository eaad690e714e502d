"""The message protocol as two state machines without I/O (``shared/PROTOCOL.md``).

Both are asked about every header before anything is allocated for its payload: the executor's
whether it will serve such a request, the tenant's whether it waits for such an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

from shared.errors import WireError
from shared.wire.header import (
    BYTES,
    DTYPE_CODES,
    DTYPE_NAMES,
    MAX_MEMBERS,
    PRODUCTS,
    RINGS,
    Direction,
    Header,
    Operation,
    member_indices,
)
from shared.wire.messages import TENANT_FILES, GroupInfo, Manifest, digest_of

MAX_REQUEST_CONTROL_BYTES = 64 * 1024
MAX_ANSWER_CONTROL_BYTES = 16 * 1024 * 1024  # a manifest of 65,536 experts
MAX_NAME = 256  # characters of any name in a manifest, all of them printable: messages and logs show them
MAX_GROUPS, MAX_PARAMETERS, MAX_AXES = 1 << 16, 1 << 20, 8
MAX_WIDTH = 1 << 24  # of a group's inputs, and of all its outputs: a row of 64 MiB


class RequestWidths(NamedTuple):
    """Widths of one kind of request: direction and members are given."""

    request_columns: int  # D forward, the sum of the members' O backward
    answer_columns: int  # the other way round; on the ring that for each plane
    request_widths: tuple[int, ...]  # of the request's tensors; on the ring there is one
    answer_widths: tuple[int, ...]  # of the answer's


@dataclass(frozen=True)
class GroupShape:
    """Widths of one group.

    Attributes:
        inputs: D.
        outputs: O of each member.
        planes: on the ring how many a weight has, else 0.
        widths: returns the widths of requests in a direction with a bit mask of members.
    """

    inputs: int
    outputs: tuple[int, ...]
    planes: int = 0
    widths: Callable[[int, int], RequestWidths] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Few combinations occur; the bound is for a peer that would try all of them.
        object.__setattr__(self, "widths", lru_cache(maxsize=64)(self._widths))

    @property
    def size(self) -> int:
        """The number of elements of the weight, in one plane."""
        return self.inputs * sum(self.outputs)

    @classmethod
    def of(cls, info: GroupInfo, numerics: str) -> GroupShape:
        """Returns the widths of a manifest's entry. Equal widths share an object, also over sessions."""
        return _shape(info.inputs, tuple(m.outputs for m in info.members), RINGS.get(numerics, 0))

    def _widths(self, direction: int, member_bits: int) -> RequestWidths:
        widths = tuple(self.outputs[i] for i in member_indices(member_bits))
        if self.planes:
            ends = (self.inputs, sum(widths))
            request, answer = ends if direction == Direction.FORWARD else ends[::-1]
            answer *= self.planes
            return RequestWidths(request, answer, (request,), (answer,))
        if direction == Direction.FORWARD:
            return RequestWidths(self.inputs, sum(widths), (self.inputs,), widths)
        return RequestWidths(sum(widths), self.inputs, widths, (self.inputs,))


# An executor that serves thousands of experts to many tenants would otherwise keep millions of equal objects.
@lru_cache(maxsize=1024)
def _shape(inputs: int, outputs: tuple[int, ...], planes: int) -> GroupShape:
    return GroupShape(inputs, outputs, planes=planes)


def split_tensors(payload: torch.Tensor, widths: tuple[int, ...]) -> list[torch.Tensor]:
    """Returns views [T, width] of the tensors that lie in order in a payload [T, sum of widths]."""
    if len(widths) == 1:
        return [payload]
    rows = payload.numel() // sum(widths)
    parts = payload.view(-1).split([rows * width for width in widths])
    return [part.view(rows, width) for part, width in zip(parts, widths, strict=True)]


class ExecutorProtocol:
    """The executor's side of one connection: HELLO first, then products, effects and fetches."""

    def __init__(self, manifest: Manifest) -> None:
        self._shapes = [GroupShape.of(g, manifest.numerics) for g in manifest.groups]
        self._ring, self._serves = manifest.numerics in RINGS, manifest.serves
        self._limits = manifest.limits
        self._dtypes = {DTYPE_CODES[DTYPE_NAMES[name]]: name for name in manifest.wire_dtypes}
        self.hello_received = False

    def accept(self, header: Header) -> None:
        """Check a request's header; nothing has been allocated yet.

        Raises:
            WireError: with the code of what is wrong; fatal if no HELLO came first.
        """
        operation = header.operation
        if operation == Operation.HELLO:
            if self.hello_received:
                raise WireError("unexpected", "HELLO was already said on this connection")
        elif not self.hello_received:
            raise WireError("unexpected", "the first message must be HELLO", fatal=True)
        if operation == Operation.SEED_EFFECT and not self._ring:
            raise WireError("operation", "only an executor with ring numerics expands seeds")
        if operation in PRODUCTS:
            self._accept_product(header)
        elif operation in (Operation.HELLO, Operation.FETCH):
            if header.dtype != BYTES or header.rows != 1:
                raise WireError("control_message", "control messages have one row of bytes")
            if header.payload_bytes > MAX_REQUEST_CONTROL_BYTES:
                raise WireError("too_large", f"control message over {MAX_REQUEST_CONTROL_BYTES} bytes")
            self.hello_received = True
        else:
            raise WireError("operation", f"tenants do not send operation {operation}")

    def _accept_product(self, header: Header) -> None:
        if header.group >= len(self._shapes):
            raise WireError(
                "group", f"unknown group {header.group}; this executor serves {len(self._shapes)}"
            )
        if not self._serves(header.group):
            raise WireError(
                "group", f"group {header.group} is served elsewhere; the manifest says which are here"
            )
        if header.direction not in (Direction.FORWARD, Direction.BACKWARD):
            raise WireError("direction", "a product is forward (1) or backward (2)")
        if header.dtype not in self._dtypes:
            raise WireError("dtype", f"send one of {', '.join(self._dtypes.values())}")
        if bool(header.answer_bits) != self._ring:
            raise WireError("answer_bits", "answers on the ring have 16, 24 or 32 bits; others have 0 here")
        shape = self._shapes[header.group]
        if not 0 < header.members < 1 << len(shape.outputs):
            raise WireError("members", f"group {header.group} has {len(shape.outputs)} members")
        widths = shape.widths(header.direction, header.members)
        if header.columns != widths.request_columns:
            raise WireError(
                "width",
                f"group {header.group} takes {widths.request_columns} columns here, not {header.columns}",
            )
        if header.rows == 0:
            raise WireError("zero_rows", "a product needs at least one row")
        if header.rows > self._limits.max_rows:
            raise WireError(
                "too_large", f"{header.rows} rows; the limit is {self._limits.max_rows}, split the request"
            )
        request = header._replace(operation=Operation.PRODUCT).payload_bytes  # of a seed, its mask
        size = max(request, self.answer(header).payload_bytes)
        if size > self._limits.max_message_bytes:
            raise WireError(
                "too_large",
                f"{size} bytes; the limit is {self._limits.max_message_bytes}, split the request",
            )

    def answer(self, header: Header) -> Header:
        """Returns the header of the answer to an accepted product or effect."""
        columns = self._shapes[header.group].widths(header.direction, header.members).answer_columns
        return header._replace(operation=Operation.REPLY, columns=columns, request_class=0)


def validate_manifest(manifest: Manifest) -> None:
    """Check what the types alone do not, so that a hostile manifest cannot do harm later.

    Raises:
        WireError: ``manifest``.
    """
    if len(manifest.groups) > MAX_GROUPS or len(manifest.parameters) > MAX_PARAMETERS:
        raise WireError("manifest", "the executor announces more layers than any model has")
    if manifest.part and not 0 <= manifest.part[0] < manifest.part[1] <= len(manifest.groups):
        raise WireError("manifest", "the executor announces a part of its groups that cannot be")
    for number, group in enumerate(manifest.groups):
        outputs = [member.outputs for member in group.members]
        possible = all(width > 0 for width in outputs) and sum(outputs) <= MAX_WIDTH
        if not (0 < len(group.members) <= MAX_MEMBERS and 0 < group.inputs <= MAX_WIDTH and possible):
            raise WireError("manifest", "the executor's manifest has a group of impossible shape")
        experts = [member.expert for member in group.members if member.expert is not None]
        if experts and (len(group.members) > 1 or not 0 <= experts[0] < 1 << 31):
            raise WireError("manifest", "the executor's manifest has an impossible expert")
        # No int8 squared is over 2^14, no int16 over 2^30; rows of one plane have norms of 32,639 and
        # what rounding adds, half of each element at most.
        fine = (group.inputs << 14, sum(outputs) << 14)
        coarse = ((32_640 + math.isqrt(group.inputs) // 2) ** 2, sum(outputs) << 30)
        largest_bounds = fine if RINGS.get(manifest.numerics, 0) > 1 else coarse
        if (
            manifest.numerics in RINGS
            and manifest.serves(number)
            and not (
                group.bounds and all(0 <= b <= m for b, m in zip(group.bounds, largest_bounds, strict=True))
            )
        ):
            raise WireError("manifest", "the executor's manifest has a group without possible bounds")
    for parameter in manifest.parameters:
        possible = len(parameter.shape) <= MAX_AXES and all(0 < n < 1 << 31 for n in parameter.shape)
        if parameter.dtype not in DTYPE_NAMES or not possible:
            raise WireError("manifest", f"parameter {parameter.name[:80]!r} has an impossible type")
    for file in manifest.files:
        if not 0 <= file.size <= TENANT_FILES.get(file.name, 0):
            raise WireError("manifest", f"the executor announces a file of {file.size} bytes")
    words = [manifest.server, manifest.model, manifest.architecture, manifest.base_prefix, manifest.numerics]
    words += [parameter.name for parameter in manifest.parameters]
    words += [word for group in manifest.groups for m in group.members for word in (m.name, m.tensor)]
    words += manifest.unavailable
    if not all(word.isprintable() and len(word) <= MAX_NAME for word in words):
        raise WireError("manifest", "the executor's manifest has a name that is no name")
    limits = manifest.limits
    if min(limits.max_rows, limits.max_in_flight) < 1 or limits.max_message_bytes < 1 << 16:
        raise WireError("manifest", "the executor's limits leave no room for a request")
    for what, names in (
        ("layer", [member.name for group in manifest.groups for member in group.members]),
        ("parameter", [parameter.name for parameter in manifest.parameters]),
        ("file", [file.name for file in manifest.files]),
    ):
        if len(set(names)) < len(names):
            raise WireError("manifest", f"the executor's manifest names a {what} twice")
    if manifest.numerics in RINGS and manifest.wire_dtypes != ("int32",):
        raise WireError("manifest", "an executor of the ring that sends anything but int32")
    if not set(manifest.wire_dtypes) <= set(DTYPE_NAMES):
        raise WireError("manifest", "the executor offers unknown dtypes")
    if manifest.digest != digest_of(manifest):
        raise WireError("manifest", "the executor's digest is not that of what its manifest lists")


@dataclass(slots=True)
class TenantProtocol:
    """The tenant's side of one connection: numbers requests and knows which answers are awaited."""

    _expected: dict[int, Header] = field(default_factory=dict)
    _next_id: int = 1

    def control(self, operation: Operation, size: int, answer: Header) -> Header:
        """Returns the header of a control request of ``size`` bytes, whose answer is like ``answer``."""
        request_id = self._new_id()
        self._expected[request_id] = answer._replace(request_id=request_id)
        return Header(operation, request_id=request_id, rows=1, columns=size)

    def product(self, request: Header, shape: GroupShape) -> Header:
        """Returns the header of a product or effect request.

        Args:
            request: the header without its id, its columns, and the answer bits of floats.
            shape: the group's.
        """
        request_id = self._new_id()
        widths = shape.widths(request.direction, request.members)
        request_header = request._replace(
            request_id=request_id,
            columns=widths.request_columns,
            answer_bits=request.answer_bits if shape.planes else 0,
        )
        self._expected[request_id] = request_header._replace(
            operation=Operation.REPLY, columns=widths.answer_columns, request_class=0
        )
        return request_header

    def _new_id(self) -> int:
        request_id = self._next_id
        self._next_id = request_id % 0xFFFFFFFF + 1
        return request_id

    def expected(self, request_id: int) -> Header:
        """Returns the header of the answer that a request in flight must get, unless it is an error."""
        return self._expected[request_id]

    def accept(self, header: Header) -> None:
        """Check an answer's header; nothing has been allocated yet.

        Raises:
            WireError: ``unexpected``, always fatal: an executor that answers what was not asked
                cannot be followed any further.
        """
        expected = self._expected.get(header.request_id)
        if header.operation == Operation.ERROR:
            known = expected is not None or header.request_id == 0
            if known and header.dtype == BYTES and header.payload_bytes <= MAX_REQUEST_CONTROL_BYTES:
                return
        elif expected is not None and expected.operation == Operation.WELCOME:
            known = header._replace(columns=0) == expected._replace(columns=0)
            if known and header.payload_bytes <= MAX_ANSWER_CONTROL_BYTES:
                return
        elif header == expected:
            return
        raise WireError("unexpected", "the executor sent an answer that was not asked for", fatal=True)

    def answered(self, request_id: int) -> None:
        """Record that an answer is complete: its id is free again."""
        self._expected.pop(request_id, None)
