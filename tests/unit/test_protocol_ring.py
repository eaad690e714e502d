"""Both sides of the protocol on a ring: seeds for masks, answers of two planes, bounds."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_protocol import (
    BFLOAT16,
    FLOAT32,
    HELLO,
    LIMITS,
    MANIFEST,
    PRODUCT_CODES,
    RING,
    RING_MANIFEST,
    _group,
    allocated,
    feed,
    greeted,
    refusal,
    seed,
)

from shared.errors import WireError
from shared.wire.frames import MessageReader, Opcode, frame_header
from shared.wire.header import DTYPE_CODES, EXACT, RINGS, SEED_BYTES, Direction, Header, Operation
from shared.wire.messages import Limits, Manifest, digest_of
from shared.wire.protocol import ExecutorProtocol, GroupShape, TenantProtocol, validate_manifest

__all__ = ["allocated"]  # a fixture

HUGE_MASKS = [
    seed(rows=2**32 - 1),
    seed(rows=101),
    seed(rows=2**32 - 1, columns=2**32 - 1),
    seed(rows=1, group=2, members=1, columns=24_000),
]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"group": 3}, "group"),
        ({"direction": 0}, "direction"),
        ({"dtype": FLOAT32}, "dtype"),
        ({"dtype": BFLOAT16}, "dtype"),
        ({"dtype": 0}, "dtype"),
        ({"dtype": DTYPE_CODES[torch.int64]}, "dtype"),
        ({"members": 0}, "members"),
        ({"members": 0b1000}, "members"),
        ({"answer_bits": 0}, "answer_bits"),
        ({"columns": 7}, "width"),
        ({"columns": 16}, "width"),
        ({"columns": 32}, "width"),
        ({"columns": 2**32 - 1, "rows": 2**32 - 1}, "width"),
        ({"direction": 2}, "width"),
        ({"direction": 2, "columns": 32}, "width"),
        ({"rows": 0}, "zero_rows"),
        ({"rows": 101}, "too_large"),
        ({"rows": 2**32 - 1}, "too_large"),
    ],
)
@pytest.mark.parametrize("operation", [Operation.PRODUCT, Operation.EFFECT, Operation.SEED_EFFECT])
def test_a_ring_refuses_what_cannot_be(operation: Operation, change: dict[str, int], code: str) -> None:
    protocol = greeted(RING)
    assert refusal(protocol.accept, seed(operation=operation, **change)) == (code, False)
    assert refusal(protocol.accept, seed(operation=operation)) is None


def test_only_a_ring_expands_seeds() -> None:
    for header in (seed(), seed(dtype=FLOAT32), seed(rows=0), seed(group=9)):
        assert refusal(greeted().accept, header) == ("operation", False)
    before = ExecutorProtocol(MANIFEST)
    assert refusal(before.accept, seed()) == ("unexpected", True)


def test_the_mask_of_a_seed_and_its_answer_must_fit() -> None:
    """As if the mask had been sent: 32 bytes must not make an executor allocate what rows may not."""
    protocol = greeted(RING)
    for operation in (Operation.PRODUCT, Operation.SEED_EFFECT):
        answer_over = seed(operation=operation, group=2, direction=2, members=1, columns=1, rows=1)
        assert refusal(protocol.accept, answer_over) == ("too_large", False)
        mask_over = seed(operation=operation, group=2, members=1, columns=24_000, rows=1)
        assert refusal(protocol.accept, mask_over) == ("too_large", False)
    # A row has 8 inputs and 2 x 16 outputs: only answers are over this limit, for both planes are in them.
    limits = Limits(max_message_bytes=1 << 16, max_rows=1 << 20)
    roomy = ExecutorProtocol(msgspec.structs.replace(RING_MANIFEST, limits=limits))
    roomy.accept(HELLO)
    assert refusal(roomy.accept, seed(rows=512)) is None
    assert refusal(roomy.accept, seed(rows=513)) == ("too_large", False)
    assert refusal(roomy.accept, seed(rows=1024, answer_bits=16)) is None
    assert refusal(roomy.accept, seed(rows=1025, answer_bits=16)) == ("too_large", False)


@pytest.mark.parametrize("header", HUGE_MASKS)
@pytest.mark.parametrize("fin", [True, False])
def test_a_seed_for_gigabytes_costs_nothing(allocated: list[int], header: Header, fin: bool) -> None:
    """The payload's length is right, so the mask's own size is what must be refused."""
    protocol = greeted(RING)
    reader = MessageReader(protocol.accept, masked=False, max_message_bytes=LIMITS.max_message_bytes)
    data = frame_header(Opcode.BINARY, 64, fin=fin) + header.pack() + bytes(SEED_BYTES)
    if not fin:
        data += frame_header(Opcode.CONTINUATION, 0)
    (event,) = feed(reader, data)
    assert event.error is not None
    assert event.error.code in ("too_large", "width")
    assert event.payload is None
    assert allocated == []
    good = frame_header(Opcode.BINARY, 64) + seed(request_id=2).pack() + bytes(range(SEED_BYTES))
    (event,) = feed(reader, good)
    assert event.error is None
    assert event.header == seed(request_id=2)
    assert event.payload.dtype == torch.uint8
    assert event.payload.tolist() == [list(range(SEED_BYTES))]
    assert sum(allocated) <= SEED_BYTES


@pytest.mark.parametrize("length", [0, 1, 31, 33, 96, 5000])
@pytest.mark.parametrize("fin", [True, False])
def test_a_seed_of_another_length_is_refused(allocated: list[int], length: int, fin: bool) -> None:
    """96 bytes are the mask itself, 3 rows of 8."""
    reader = MessageReader(greeted(RING).accept, masked=False, max_message_bytes=LIMITS.max_message_bytes)
    data = frame_header(Opcode.BINARY, 32 + length, fin=fin) + seed().pack() + bytes(length)
    data += b"" if fin else frame_header(Opcode.CONTINUATION, 0)
    if length > SEED_BYTES and not fin:
        with pytest.raises(WireError) as caught:
            feed(reader, data)
        assert (caught.value.code, caught.value.fatal) == ("payload_length", True)
    else:
        (event,) = feed(reader, data)
        assert (event.error.code, event.error.fatal, event.payload) == ("payload_length", False, None)
    assert sum(allocated) <= SEED_BYTES


@given(
    direction=st.sampled_from([Direction.FORWARD, Direction.BACKWARD]),
    members=st.integers(1, 7),
    rows=st.integers(1, 100),
    operation=PRODUCT_CODES,
    numerics=st.sampled_from(list(RINGS)),
)
def test_both_sides_agree_about_every_product_of_a_ring(
    direction: Direction, members: int, rows: int, operation: Operation, numerics: str
) -> None:
    tenant, executor = TenantProtocol(), greeted(numerics)
    shape, planes = GroupShape.of(RING_MANIFEST.groups[0], numerics), RINGS[numerics]
    dtype = DTYPE_CODES[torch.int32]
    request = Header(operation, direction, dtype, rows=rows, members=members, answer_bits=EXACT)
    header = tenant.product(request, shape)
    executor.accept(header)
    answer = executor.answer(header)
    tenant.accept(answer)
    outputs = sum(n for i, n in enumerate((8, 4, 4)) if members >> i & 1)
    widths = (8, planes * outputs) if direction == Direction.FORWARD else (outputs, planes * 8)
    assert (header.columns, answer.columns) == widths
    assert answer == header._replace(operation=Operation.REPLY, columns=widths[1])
    assert shape.widths(direction, members).answer_widths == (widths[1],)
    if operation == Operation.SEED_EFFECT:
        assert (header.payload_bytes, answer.payload_bytes) == (SEED_BYTES, 4 * rows * widths[1])
    for change in (
        {"columns": widths[1] * 2},
        {"columns": widths[1] - 1},
        {"dtype": FLOAT32},
        {"operation": operation},
    ):
        assert refusal(tenant.accept, answer._replace(**change)) == ("unexpected", True)
    tenant.answered(answer.request_id)
    assert refusal(tenant.accept, answer) == ("unexpected", True)


@pytest.mark.parametrize(
    ("bounds", "numerics"),
    [(bounds, "ring-fine") for bounds in (((8 << 14) + 1, 0), (0, (5 << 14) + 1))]
    + [(bounds, "ring") for bounds in (None, (-1, 0), (0, -1), (32_641**2 + 1, 0), (0, (5 << 30) + 1))]
    + [(bounds, "ring") for bounds in ((2**63, 0), (0, 10**400))],
)
def test_a_ring_without_possible_bounds_is_refused(bounds: tuple[int, int] | None, numerics: str) -> None:
    """int8 squared is 2^14 at most, a row of int16 little more than 32,639^2.

    And a number that no float holds must not get further.
    """

    def manifest(bounds: tuple[int, int] | None) -> Manifest:
        group = msgspec.structs.replace(_group(8, 2, 3), bounds=bounds)
        changed = msgspec.structs.replace(RING_MANIFEST, numerics=numerics, groups=(group,))
        return msgspec.structs.replace(changed, digest=digest_of(changed))

    full = (8 << 14, 5 << 14) if numerics == "ring-fine" else (32_641**2, 5 << 30)
    for good in ((0, 0), (1, 1), full):
        validate_manifest(manifest(good))
    with pytest.raises(WireError, match="bounds") as caught:
        validate_manifest(manifest(bounds))
    assert caught.value.code == "manifest"
    # Nobody reads them without a ring.
    validate_manifest(msgspec.structs.replace(manifest(bounds), numerics="float32"))


@pytest.mark.parametrize("offered", [("bfloat16",), ("int32", "float32"), ()])
def test_the_ring_sends_int32_and_nothing_else(offered: tuple[str, ...]) -> None:
    """Native code takes answers for int32."""
    validate_manifest(RING_MANIFEST)
    with pytest.raises(WireError, match="anything but int32"):
        validate_manifest(msgspec.structs.replace(RING_MANIFEST, wire_dtypes=offered))
