"""The 32 bytes in front of every message."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import WireError
from shared.wire.header import (
    ANSWER_BITS,
    DTYPE_CODES,
    DTYPE_NAMES,
    DTYPES,
    HEADER_BYTES,
    PRODUCTS,
    PROTOCOL_VERSION,
    SEED_BYTES,
    Direction,
    Header,
    Operation,
    member_indices,
    parse_header,
    request_id_of,
)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
HEADERS = st.builds(
    Header,
    operation=st.integers(1, 8),
    direction=st.integers(0, 2),
    dtype=st.integers(0, 7),
    group=U32,
    request_id=U32,
    rows=U32,
    columns=U32,
    members=U64,
    request_class=st.integers(0, 3),
    answer_bits=st.sampled_from((0, *ANSWER_BITS)),
)


def possible(header: Header) -> Header:
    """The same, without what its operation does not have."""
    if header.operation in PRODUCTS:
        return header
    bits = header.answer_bits if header.operation == Operation.REPLY else 0
    return header._replace(request_class=0, answer_bits=bits)


HEADERS = HEADERS.map(possible)


@given(HEADERS)
def test_a_header_survives_the_wire(header: Header) -> None:
    data = header.pack()
    assert len(data) == HEADER_BYTES
    assert parse_header(data) == header
    assert parse_header(memoryview(data + b"payload")) == header
    assert request_id_of(data) == header.request_id


def test_every_field_is_where_the_table_says() -> None:
    header = Header(
        Operation.PRODUCT, Direction.BACKWARD, 2, 0x04030201, 0x14131211, 0x24232221, 0x34333231, 1 << 63 | 1
    )
    expected = bytes([PROTOCOL_VERSION, 3, 2, 2])
    expected += bytes([1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14, 0x21, 0x22, 0x23, 0x24, 0x31, 0x32, 0x33, 0x34])
    expected += bytes(4) + bytes([1, 0, 0, 0, 0, 0, 0, 0x80])
    assert header.pack() == expected


@pytest.mark.parametrize(
    ("offset", "value", "code", "fatal"),
    [
        (0, 0, "protocol_version", True),
        (0, 1, "protocol_version", True),
        (0, 255, "protocol_version", True),
        (1, 0, "operation", False),
        (1, 9, "operation", False),
        (1, 255, "operation", False),
        (2, 3, "direction", False),
        (2, 255, "direction", False),
        (3, 8, "dtype", False),
        (3, 255, "dtype", False),
        (20, 4, "request_class", False),
        (21, 0x80, "request_class", False),
        (22, 1, "answer_bits", False),
        (22, 33, "answer_bits", False),
        (23, 0x80, "answer_bits", False),
    ],
)
def test_a_wrong_byte_is_refused_with_its_code(offset: int, value: int, code: str, fatal: bool) -> None:
    data = bytearray(Header(Operation.PRODUCT, Direction.FORWARD, 1, 0, 9, 1, 1, 1).pack())
    data[offset] = value
    with pytest.raises(WireError) as caught:
        parse_header(data)
    assert (caught.value.code, caught.value.fatal) == (code, fatal)
    assert request_id_of(data) == 9


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_are_a_header_or_a_wire_error(data: bytes) -> None:
    refused = None
    try:
        header = parse_header(data)
    except WireError as error:
        refused = error
    if refused is None:
        assert header.pack() == data
    else:
        fields = ("operation", "direction", "dtype", "request_class", "answer_bits")
        assert refused.code in ("protocol_version", *fields)
        assert refused.fatal == (refused.code == "protocol_version")


@given(HEADERS)
def test_sizes_do_not_wrap_around(header: Header) -> None:
    """2^16 x 2^16 float64 would be 0 in 32 bits and (2^32-1)^2 x 8 would be small in 64."""
    itemsize = struct.calcsize({0: "B", 1: "f", 2: "e", 3: "e", 4: "d", 5: "q", 6: "i", 7: "?"}[header.dtype])
    if header.operation == Operation.SEED_EFFECT:
        header = header._replace(operation=Operation.EFFECT)
    if header.operation == Operation.REPLY and header.answer_bits:
        itemsize = header.answer_bits // 8
    assert header.payload_bytes == header.rows * header.columns * itemsize
    if header.rows and header.columns:
        assert header.payload_bytes >= max(header.rows, header.columns)


def test_the_largest_header_says_how_large_it_is() -> None:
    largest = Header(Operation.PRODUCT, 1, DTYPE_CODES[torch.float64], rows=2**32 - 1, columns=2**32 - 1)
    assert largest.payload_bytes == (2**32 - 1) ** 2 * 8 > 2**66


@given(HEADERS)
def test_a_seed_has_32_bytes_whatever_its_mask_has(header: Header) -> None:
    """Rows, columns and dtype are the mask's; the other operations' are the payload's own."""
    seed = header._replace(operation=Operation.SEED_EFFECT)
    assert (seed.payload_shape, seed.payload_dtype) == ((1, SEED_BYTES), torch.uint8)
    assert seed.payload_bytes == SEED_BYTES == 32
    if header.operation != Operation.SEED_EFFECT and not header.truncated:
        assert header.payload_shape == (header.rows, header.columns)
        assert header.payload_dtype == DTYPES[header.dtype]


def test_products_are_what_names_a_group() -> None:
    assert {Operation.PRODUCT, Operation.EFFECT, Operation.SEED_EFFECT} == PRODUCTS
    assert sorted(Operation) == list(range(1, 9))


@pytest.mark.parametrize("field", ["group", "request_id", "rows", "columns"])
def test_a_field_that_does_not_fit_is_never_cut(field: str) -> None:
    with pytest.raises(struct.error):
        Header(Operation.PRODUCT)._replace(**{field: 2**32}).pack()


@given(U64)
def test_member_indices_are_the_bits(members: int) -> None:
    indices = member_indices(members)
    assert indices == sorted(set(indices))
    assert sum(1 << i for i in indices) == members


def test_the_dtype_table_is_closed_and_one_to_one() -> None:
    assert sorted(DTYPES) == list(range(8))
    assert len(set(DTYPES.values())) == len(DTYPES) == len(DTYPE_NAMES)
    assert {code: DTYPE_CODES[dtype] for code, dtype in DTYPES.items()} == {c: c for c in DTYPES}
