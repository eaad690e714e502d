"""Control messages are typed and strict."""

from __future__ import annotations

import json
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import WireError
from shared.wire.messages import (
    TENANT_FILES,
    ErrorInfo,
    Fetch,
    GroupInfo,
    Hello,
    Limits,
    Manifest,
    Member,
    Message,
    ParameterInfo,
    decode,
    digest_of,
    encode,
)

KINDS: tuple[type[Message], ...] = (Hello, Manifest, Fetch, ErrorInfo)


def strategy(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Any message of a kind, from its own types."""
    return st.builds(kind, **{field.name: _any(field.type) for field in msgspec.structs.fields(kind)})


def _any(of: object) -> st.SearchStrategy[object]:
    if isinstance(of, type) and issubclass(of, Message):
        return strategy(of)
    if of == tuple[int, int] | None:
        return st.none() | st.tuples(_any(int), _any(int))
    if typing.get_origin(of) is tuple:
        return st.lists(_any(typing.get_args(of)[0]), max_size=2).map(tuple)
    return {
        str: st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        int: st.integers(-(2**63), 2**63 - 1),
        bool: st.booleans(),
        int | None: st.none() | st.integers(-(2**63), 2**63 - 1),
        float | None: st.none() | st.floats(allow_nan=False, allow_infinity=False),
    }[of]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_survives_the_wire(kind: type[Message]) -> None:
    @given(strategy(kind))
    def check(message: Message) -> None:
        data = encode(message)
        assert decode(data, kind) == message
        assert decode(memoryview(bytearray(data)), kind) == message
        assert isinstance(json.loads(data), dict)

    check()


MADE = [{"made": True}, {"expert": 0}, {"expert": 3}, {"made": True, "expert": 3}]


def test_a_weight_that_is_stored_says_no_more_than_it_did() -> None:
    """Executors and tenants that know nothing of made weights understand each other as before."""
    stored = Member("q", 1, "t")
    assert encode(stored) == b'{"name":"q","outputs":1,"tensor":"t","transposed":false}'
    assert [set(json.loads(encode(msgspec.structs.replace(stored, **more)))) for more in MADE] == [
        {"name", "outputs", "tensor", "transposed", *more} for more in MADE
    ]


def test_the_digest_tells_what_is_made_from_what_is_stored() -> None:
    def digest(**more: object) -> str:
        member = msgspec.structs.replace(Member("q", 1, "t"), **more)
        manifest = Manifest(*["x"] * 7, (), Limits(1, 1), (GroupInfo(1, (member,)),), (), (), ())
        return digest_of(manifest)

    digests = [digest(), *(digest(**more) for more in MADE)]
    assert len(set(digests)) == len(digests)
    assert digest(made=False, expert=None) == digests[0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"1",
        b'"text"',
        b"{}",
        b'{"client": 1}',
        b'{"client": null}',
        b'{"client": "a", "more": 1}',
        b'{"client": "a"} {}',
        b'{"client": "\xff"}',
        b"\xff\xfe{\x00}\x00",
        b'{"client": ' + b"[" * 60_000,
        b'{"' + b"x" * 60_000 + b'": 1}',
        b"[" * 60_000,
        b'{"client": NaN}',
    ],
)
def test_what_is_not_exactly_a_hello_is_refused(data: bytes) -> None:
    with pytest.raises(WireError) as caught:
        decode(data, Hello)
    assert caught.value.code == "control_message"
    assert not caught.value.fatal
    # It is sent back, and must fit into an ERROR whatever the peer wrote.
    assert len(encode(ErrorInfo(caught.value.code, caught.value.message))) < 4096


@pytest.mark.parametrize(
    "change",
    [
        {"kind": 1},
        {"start": "0"},
        {"start": 0.5},
        {"start": True},
        {"stop": None},
        {"stop": [1]},
        {"name": {"a": 1}},
        {"path": "/etc/passwd"},
    ],
)
def test_a_fetch_takes_no_other_types_or_fields(change: dict[str, object]) -> None:
    good = {"kind": "file", "name": "config.json", "start": 0, "stop": 1}
    assert decode(json.dumps(good).encode(), Fetch) == Fetch("file", "config.json", 0, 1)
    with pytest.raises(WireError, match="control_message"):
        decode(json.dumps(good | change).encode(), Fetch)


@pytest.mark.parametrize("field", ["kind", "name", "start", "stop"])
def test_a_fetch_needs_every_field(field: str) -> None:
    good = {"kind": "file", "name": "config.json", "start": 0, "stop": 1}
    del good[field]
    with pytest.raises(WireError, match="control_message"):
        decode(json.dumps(good).encode(), Fetch)


@given(st.binary(max_size=64), st.sampled_from(KINDS))
def test_any_bytes_are_a_message_or_a_wire_error(data: bytes, kind: type[Message]) -> None:
    code = None
    try:
        decode(data, kind)
    except WireError as error:
        code = error.code
    assert code in (None, "control_message")


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Hello("a").client = "b"  # type: ignore[misc]


def test_no_tenant_file_is_a_path() -> None:
    assert len(set(TENANT_FILES)) == len(TENANT_FILES)
    for name in TENANT_FILES:
        assert "/" not in name
        assert "\\" not in name
        assert not name.startswith(".")


def test_the_defaults_of_optional_fields() -> None:
    assert decode(b'{"code":"a","message":"b"}', ErrorInfo).retry_after is None
    assert decode(b'{"name":"a","outputs":1,"tensor":"b"}', Member).transposed is False
    group = decode(b'{"inputs":1,"members":[]}', GroupInfo)
    assert (group.head, group.bounds) == (False, None)


@pytest.mark.parametrize("bounds", ["[]", "[1]", "[1,2,3]", "1", '["1","2"]', "[1.5,2]", "[1,null]", "{}"])
def test_bounds_are_two_integers(bounds: str) -> None:
    assert decode(b'{"inputs":1,"members":[],"bounds":[3,4]}', GroupInfo).bounds == (3, 4)
    with pytest.raises(WireError, match="control_message"):
        decode(b'{"inputs":1,"members":[],"bounds":%s}' % bounds.encode(), GroupInfo)


@pytest.mark.parametrize(
    ("shape", "dtype", "rows"),
    [
        ((), "float32", (1, 1)),
        ((7,), "int64", (7, 1)),
        ((5, 3), "bfloat16", (5, 3)),
        ((1 << 20, 1 << 21), "float32", (1 << 20, 1 << 21)),  # never along the last axis
        ((8, 1 << 10, 1 << 11), "bfloat16", (8, 1 << 21)),  # 4 MiB each
        ((8, 1 << 10, 1 << 11), "float32", (8 << 10, 1 << 11)),
        ((2, 3, 1 << 11, 1 << 11), "float32", (6 << 11, 1 << 11)),
    ],
)
def test_rows_of_a_parameter(shape: tuple[int, ...], dtype: str, rows: tuple[int, int]) -> None:
    assert ParameterInfo("a", shape, dtype, "").rows == rows
