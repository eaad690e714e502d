"""The two state machines: what an executor serves, and what a tenant waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import WireError
from shared.wire.frames import MessageReader, Opcode, frame_header
from shared.wire.header import ANSWER_BITS, DTYPE_CODES, DTYPES, EXACT, RINGS, Direction, Header, Operation
from shared.wire.messages import FileInfo, GroupInfo, Limits, Manifest, Member, ParameterInfo, digest_of
from shared.wire.protocol import (
    MAX_ANSWER_CONTROL_BYTES,
    MAX_REQUEST_CONTROL_BYTES,
    ExecutorProtocol,
    GroupShape,
    TenantProtocol,
    validate_manifest,
)

FLOAT32, BFLOAT16, INT32 = (DTYPE_CODES[d] for d in (torch.float32, torch.bfloat16, torch.int32))
LIMITS = Limits(max_message_bytes=1 << 16, max_rows=100)
GROUPS = (
    GroupInfo(8, (Member("q", 8, "q.weight"), Member("k", 4, "k.weight"), Member("v", 4, "v.weight"))),
    GroupInfo(16, (Member("down", 6, "down.weight"),)),
    # One row fits forward and not backward, where its answer is 24,000 columns wide.
    GroupInfo(24_000, (Member("wide", 1, "wide.weight"),)),
)
MANIFEST = Manifest(
    server="test/1",
    model="tiny",
    architecture="LlamaForCausalLM",
    base_prefix="model",
    weights="0" * 64,
    digest="",
    numerics="float32",
    wire_dtypes=("float32", "bfloat16"),
    limits=LIMITS,
    groups=GROUPS,
    parameters=(ParameterInfo("norm.weight", (8,), "float32", "00" * 32),),
    unavailable=(),
    files=(),
)
MANIFEST = msgspec.structs.replace(MANIFEST, digest=digest_of(MANIFEST))
RING = "ring-fine"  # whose answers have other widths than those of floats
RING_MANIFEST = msgspec.structs.replace(
    MANIFEST,
    numerics=RING,
    wire_dtypes=("int32",),
    groups=tuple(msgspec.structs.replace(group, bounds=(1000, 2000)) for group in GROUPS),
)
MANIFESTS = {"float32": MANIFEST, RING: RING_MANIFEST}
MANIFESTS["ring"] = msgspec.structs.replace(RING_MANIFEST, numerics="ring")
HELLO = Header(Operation.HELLO, request_id=1, rows=1, columns=15)


def greeted(numerics: str = "float32") -> ExecutorProtocol:
    """An executor that has been said HELLO to."""
    protocol = ExecutorProtocol(MANIFESTS[numerics])
    protocol.accept(HELLO)
    return protocol


def refusal(accept: Callable[[Header], None], header: Header) -> tuple[str, bool] | None:
    """Code and whether it is fatal, or None if the header is accepted."""
    try:
        accept(header)
    except WireError as error:
        return error.code, error.fatal
    return None


def product(**fields: Any) -> Header:
    """A good forward product of all members of group 0, but for the fields given."""
    good = Header(Operation.PRODUCT, Direction.FORWARD, FLOAT32, 0, 1, rows=3, columns=8, members=0b111)
    return good._replace(**fields)


def seed(**fields: Any) -> Header:
    """The same for a ring executor, whose rows are the mask of a seed."""
    return product(**({"operation": Operation.SEED_EFFECT, "dtype": INT32, "answer_bits": EXACT} | fields))


# -- the executor's side -------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", MANIFESTS)
def test_hello_comes_first_and_once(numerics: str) -> None:
    protocol = ExecutorProtocol(MANIFESTS[numerics])
    good = product() if numerics == "float32" else seed()
    for header in (product(), seed(), Header(Operation.FETCH, rows=1, columns=2), Header(Operation.REPLY)):
        assert refusal(protocol.accept, header) == ("unexpected", True)
    assert refusal(protocol.accept, HELLO) is None
    assert refusal(protocol.accept, HELLO) == ("unexpected", False)
    assert refusal(protocol.accept, good) is None


def test_groups_of_equal_widths_share_one_shape() -> None:
    first, second = (GroupInfo(8, (Member(name, 4, f"{name}.weight"),)) for name in "ab")
    assert GroupShape.of(first, RING) is GroupShape.of(second, RING)
    assert GroupShape.of(first, RING) is not GroupShape.of(first, "ring")


@pytest.mark.parametrize(
    "bad", [HELLO._replace(rows=2), HELLO._replace(dtype=FLOAT32), HELLO._replace(columns=1 << 20)]
)
def test_a_refused_hello_was_not_said(bad: Header) -> None:
    protocol = ExecutorProtocol(MANIFEST)
    assert refusal(protocol.accept, bad) is not None
    assert refusal(protocol.accept, product()) == ("unexpected", True)
    assert refusal(protocol.accept, HELLO) is None


@pytest.mark.parametrize("operation", [Operation.WELCOME, Operation.REPLY, Operation.ERROR])
def test_tenants_do_not_answer(operation: Operation) -> None:
    assert refusal(greeted().accept, product(operation=operation)) == ("operation", False)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"group": 3}, "group"),
        ({"group": 2**32 - 1}, "group"),
        ({"direction": 0}, "direction"),
        ({"dtype": DTYPE_CODES[torch.float64]}, "dtype"),
        ({"dtype": DTYPE_CODES[torch.uint8]}, "dtype"),
        ({"dtype": INT32}, "dtype"),
        ({"members": 0}, "members"),
        ({"members": 0b1000}, "members"),
        ({"members": 2**64 - 1}, "members"),
        ({"columns": 7}, "width"),
        ({"columns": 9}, "width"),
        ({"columns": 0}, "width"),
        ({"direction": 2, "columns": 8}, "width"),
        ({"rows": 0}, "zero_rows"),
        ({"rows": 101}, "too_large"),
        ({"rows": 2**32 - 1}, "too_large"),
    ],
)
@pytest.mark.parametrize("operation", [Operation.PRODUCT, Operation.EFFECT])
def test_a_product_that_cannot_be_is_refused(operation: Operation, change: dict[str, int], code: str) -> None:
    protocol = greeted()
    assert refusal(protocol.accept, product(operation=operation, **change)) == (code, False)
    assert refusal(protocol.accept, product(operation=operation)) is None


def test_the_answer_must_fit_too() -> None:
    protocol = greeted()
    narrow = product(group=2, direction=Direction.BACKWARD, members=1, columns=1, rows=1)
    assert narrow.payload_bytes == 4
    assert refusal(protocol.accept, narrow) == ("too_large", False)
    assert refusal(protocol.accept, narrow._replace(dtype=BFLOAT16)) is None


@pytest.mark.parametrize("operation", [Operation.HELLO, Operation.FETCH])
def test_control_messages_are_one_small_row_of_bytes(operation: Operation) -> None:
    good = Header(operation, rows=1, columns=MAX_REQUEST_CONTROL_BYTES)

    def fresh() -> Callable[[Header], None]:
        return (ExecutorProtocol(MANIFEST) if operation == Operation.HELLO else greeted()).accept

    assert refusal(fresh(), good) is None
    assert refusal(fresh(), good._replace(columns=good.columns + 1)) == ("too_large", False)
    assert refusal(fresh(), good._replace(columns=2**32 - 1)) == ("too_large", False)
    assert refusal(fresh(), good._replace(rows=2, columns=1)) == ("control_message", False)
    assert refusal(fresh(), good._replace(rows=0)) == ("control_message", False)
    assert refusal(fresh(), good._replace(dtype=FLOAT32, columns=1)) == ("control_message", False)


SMALL = st.integers(0, 20)
ANY_HEADER = st.builds(
    Header,
    operation=st.integers(1, 8),
    direction=st.integers(0, 2),
    dtype=st.integers(0, 7),
    group=SMALL | st.integers(0, 2**32 - 1),
    request_id=st.integers(0, 2**32 - 1),
    rows=SMALL | st.integers(0, 2**32 - 1),
    columns=SMALL | st.sampled_from([24_000]) | st.integers(0, 2**32 - 1),
    members=SMALL | st.integers(0, 2**64 - 1),
    request_class=st.integers(0, 2**16 - 1),
    answer_bits=st.sampled_from((0, *ANSWER_BITS)),
)
PRODUCT_CODES = st.sampled_from([Operation.PRODUCT, Operation.EFFECT, Operation.SEED_EFFECT])


@st.composite
def good_products(draw: st.DrawFn) -> Header:
    """Right for some executor, unless it has too many rows."""
    group = draw(st.integers(0, 2))
    direction, members = draw(st.integers(1, 2)), draw(st.integers(1, 7)) if group == 0 else 1
    columns = GroupShape.of(GROUPS[group], "float32").widths(direction, members).request_columns
    dtype, rows = draw(st.sampled_from([FLOAT32, INT32])), draw(st.integers(1, 120))
    bits = draw(st.sampled_from(ANSWER_BITS)) if dtype == INT32 else 0
    operation = draw(PRODUCT_CODES)
    return Header(operation, direction, dtype, group, 1, rows, columns, members, answer_bits=bits)


HEADERS = ANY_HEADER | good_products()


@given(header=HEADERS, numerics=st.sampled_from(list(MANIFESTS)))
def test_what_is_accepted_is_small_and_has_a_small_answer(header: Header, numerics: str) -> None:
    protocol = greeted(numerics)
    if refusal(protocol.accept, header) is not None:
        return
    if header.operation == Operation.FETCH:
        assert header.payload_bytes <= MAX_REQUEST_CONTROL_BYTES
        return
    ring = numerics != "float32"
    assert header.operation in (Operation.PRODUCT, Operation.EFFECT, Operation.SEED_EFFECT)[: 2 + ring]
    answer = protocol.answer(header)
    assert max(header.payload_bytes, answer.payload_bytes) <= LIMITS.max_message_bytes
    assert header.rows * header.columns * DTYPES[header.dtype].itemsize <= LIMITS.max_message_bytes
    assert 0 < header.rows <= LIMITS.max_rows
    group = GROUPS[header.group]
    outputs = sum(m.outputs for i, m in enumerate(group.members) if header.members >> i & 1)
    widths = (group.inputs, outputs) if header.direction == Direction.FORWARD else (outputs, group.inputs)
    assert (header.columns, answer.columns) == (widths[0], widths[1] * RINGS.get(numerics, 1))
    assert answer == header._replace(operation=Operation.REPLY, columns=answer.columns, request_class=0)


# -- nothing is allocated for what is refused ------------------------------------------------------


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every tensor that is made from here on; none is made that is larger than 1 MiB."""
    sizes: list[int] = []
    empty = torch.empty

    def watched(size: tuple[int, ...], **options: Any) -> torch.Tensor:
        count = options.get("dtype", torch.float32).itemsize
        for n in size:
            count *= n
        assert count <= 1 << 20, f"{count} bytes would have been allocated"
        sizes.append(count)
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", watched)
    return sizes


def feed(reader: MessageReader, data: bytes) -> list[Any]:
    """All events of some bytes."""
    events: list[Any] = []
    while data:
        buffer = reader.get_buffer()
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        events += reader.received(count)
        data = data[count:]
    return events


HUGE = [
    product(rows=2**32 - 1),
    product(rows=2**32 - 1, columns=2**32 - 1),
    product(rows=2**31, columns=2**31, dtype=DTYPE_CODES[torch.float64]),  # 2^65: 0 in 64 bits
    product(rows=2**30, columns=8),  # 32 GiB
    Header(Operation.FETCH, request_id=1, rows=1, columns=2**32 - 1),
    Header(Operation.HELLO, request_id=1, rows=2**32 - 1, columns=2**32 - 1),
]


@pytest.mark.parametrize("header", HUGE)
@pytest.mark.parametrize("fin", [True, False])
def test_a_header_that_asks_for_gigabytes_costs_nothing(
    allocated: list[int], header: Header, fin: bool
) -> None:
    """In one frame the lengths contradict each other; in several the header is all there is to go by."""
    protocol = greeted()
    reader = MessageReader(protocol.accept, masked=False, max_message_bytes=LIMITS.max_message_bytes)
    data = frame_header(Opcode.BINARY, 40, fin=fin) + header.pack() + bytes(8)
    if not fin:
        data += frame_header(Opcode.CONTINUATION, 0)
    (event,) = feed(reader, data)
    assert event.error is not None
    assert event.error.code in (("payload_length",) if fin else ("too_large", "width", "dtype", "unexpected"))
    assert event.header.request_id == 1
    assert event.payload is None
    assert allocated == []
    # The position in the stream is known, so the next request is served.
    good = product(request_id=2)
    data = frame_header(Opcode.BINARY, 32 + good.payload_bytes) + good.pack() + bytes(good.payload_bytes)
    (event,) = feed(reader, data)
    assert event.error is None
    assert event.payload.shape == (good.rows, good.columns)
    assert sum(allocated) <= good.payload_bytes


@given(header=HEADERS, fin=st.booleans(), numerics=st.sampled_from(list(MANIFESTS)))
def test_no_header_allocates_more_than_the_limit(header: Header, fin: bool, numerics: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        empty, sizes = torch.empty, []

        def watched(size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
            sizes.append(size[0] * size[1] * dtype.itemsize)
            assert sizes[-1] <= LIMITS.max_message_bytes
            return empty(size, dtype=dtype)

        patch.setattr(torch, "empty", watched)
        reader = MessageReader(
            greeted(numerics).accept, masked=False, max_message_bytes=LIMITS.max_message_bytes
        )
        feed(reader, frame_header(Opcode.BINARY, 32, fin=fin) + header.pack())


def test_a_frame_over_the_limit_is_fatal_before_its_first_byte(allocated: list[int]) -> None:
    reader = MessageReader(greeted().accept, masked=False, max_message_bytes=LIMITS.max_message_bytes)
    with pytest.raises(WireError) as caught:
        feed(reader, frame_header(Opcode.BINARY, 32 + LIMITS.max_message_bytes + 1))
    assert (caught.value.code, caught.value.fatal) == ("too_large", True)
    assert allocated == []


# -- the tenant's side -----------------------------------------------------------------------------


SHAPES = [GroupShape.of(group, "float32") for group in GROUPS]


@given(
    group=st.integers(0, 1),
    direction=st.sampled_from([Direction.FORWARD, Direction.BACKWARD]),
    members=st.integers(1, 7),
    rows=st.integers(1, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    operation=st.sampled_from([Operation.PRODUCT, Operation.EFFECT]),
)
def test_both_sides_agree_about_every_product(
    group: int, direction: Direction, members: int, rows: int, dtype: torch.dtype, operation: Operation
) -> None:
    members = members if group == 0 else 1
    tenant, executor = TenantProtocol(), greeted()
    request = Header(operation, direction, DTYPE_CODES[dtype], group, rows=rows, members=members)
    header = tenant.product(request, SHAPES[group])
    executor.accept(header)
    answer = executor.answer(header)
    tenant.accept(answer)
    tenant.answered(answer.request_id)
    assert refusal(tenant.accept, answer) == ("unexpected", True)


def asked(tenant: TenantProtocol) -> tuple[Header, Header]:
    """A product in flight, and the header of its answer."""
    request = Header(Operation.PRODUCT, Direction.FORWARD, FLOAT32, rows=3, members=0b111)
    header = tenant.product(request, SHAPES[0])
    return header, header._replace(operation=Operation.REPLY, columns=16)


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": 2},
        {"request_id": 0},
        {"operation": Operation.WELCOME},
        {"operation": Operation.PRODUCT},
        {"operation": Operation.HELLO},
        {"operation": Operation.SEED_EFFECT},
        {"direction": Direction.BACKWARD},
        {"dtype": BFLOAT16},
        {"group": 1},
        {"rows": 2},
        {"rows": 4},
        {"rows": 2**32 - 1},
        {"columns": 15},
        {"columns": 2**32 - 1},
        {"members": 0b11},
    ],
)
def test_an_answer_that_differs_in_any_field_is_fatal(change: dict[str, int]) -> None:
    tenant = TenantProtocol()
    _, answer = asked(tenant)
    assert refusal(tenant.accept, answer._replace(**change)) == ("unexpected", True)
    assert refusal(tenant.accept, answer) is None


@given(ANY_HEADER)
def test_a_tenant_takes_no_answer_but_its_own(header: Header) -> None:
    tenant = TenantProtocol()
    _, answer = asked(tenant)
    if refusal(tenant.accept, header) is None:
        assert header == answer or (
            header.operation == Operation.ERROR
            and header.request_id in (0, 1)
            and header.payload_bytes <= MAX_REQUEST_CONTROL_BYTES
        )


def test_errors_answer_what_was_asked_or_everything() -> None:
    tenant = TenantProtocol()
    asked(tenant)
    error = Header(Operation.ERROR, request_id=1, rows=1, columns=MAX_REQUEST_CONTROL_BYTES)
    assert refusal(tenant.accept, error) is None
    assert refusal(tenant.accept, error._replace(request_id=0)) is None
    for change in ({"request_id": 2}, {"dtype": FLOAT32}, {"rows": 2}, {"columns": error.columns + 1}):
        assert refusal(tenant.accept, error._replace(**change)) == ("unexpected", True)


def test_a_welcome_may_have_any_reasonable_size() -> None:
    tenant = TenantProtocol()
    header = tenant.control(Operation.HELLO, 15, Header(Operation.WELCOME, rows=1))
    assert (header.operation, header.rows, header.columns, header.dtype) == (Operation.HELLO, 1, 15, 0)
    welcome = Header(Operation.WELCOME, request_id=1, rows=1, columns=MAX_ANSWER_CONTROL_BYTES)
    assert refusal(tenant.accept, welcome) is None
    for change in ({"columns": welcome.columns + 1}, {"rows": 2}, {"dtype": 7}, {"operation": 6}):
        assert refusal(tenant.accept, welcome._replace(**change)) == ("unexpected", True)


def test_request_ids_skip_zero_when_they_start_again() -> None:
    tenant = TenantProtocol(_next_id=2**32 - 1)
    assert [asked(tenant)[0].request_id for _ in range(3)] == [2**32 - 1, 1, 2]


# -- manifests -------------------------------------------------------------------------------------


def test_a_good_manifest_is_accepted() -> None:
    validate_manifest(MANIFEST)


def _group(inputs: int, *outputs: int) -> GroupInfo:
    return GroupInfo(inputs, tuple(Member(f"m{i}", o, "t") for i, o in enumerate(outputs)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": (_group(8),)}, "shape"),
        ({"groups": (_group(8, *[1] * 65),)}, "shape"),
        ({"groups": (_group(0, 1),)}, "shape"),
        ({"groups": (_group(-1, 1),)}, "shape"),
        ({"groups": (_group(8, 0),)}, "shape"),
        ({"groups": (_group(8, (1 << 24) + 1),)}, "shape"),
        ({"groups": (_group(8, 1 << 23, 1 << 23, 1),)}, "shape"),
        ({"groups": (_group((1 << 24) + 1, 8),)}, "shape"),
        ({"groups": (GroupInfo(8, (Member("q", 1, "t", expert=-1),)),)}, "impossible expert"),
        ({"groups": (GroupInfo(8, (Member("q", 1, "t"), Member("r", 1, "t", expert=0))),)}, "impossible ex"),
        ({"parameters": (ParameterInfo("a", (0,), "float32", ""),)}, "type"),
        ({"parameters": (ParameterInfo("a", (-1, 8), "float32", ""),)}, "type"),
        ({"parameters": (ParameterInfo("a", (1 << 31,), "float32", ""),)}, "type"),
        ({"parameters": (ParameterInfo("a", (8,), "complex64", ""),)}, "type"),
        ({"parameters": (ParameterInfo("a", (8,), "load", ""),)}, "type"),
        ({"limits": Limits(max_message_bytes=(1 << 16) - 1, max_rows=1)}, "limits"),
        ({"limits": Limits(max_message_bytes=1 << 16, max_rows=0)}, "limits"),
        ({"wire_dtypes": ("float32", "object")}, "dtypes"),
        ({"files": (FileInfo("config.json", (1 << 20) + 1, ""),)}, "announces a file"),
        ({"files": (FileInfo("config.json", -1, ""),)}, "announces a file"),
        ({"files": (FileInfo("../config.json", 2, ""),)}, "announces a file"),
        ({"model": "\x1b]0;owned\x07"}, "no name"),
        ({"server": "x" * 257}, "no name"),
        ({"unavailable": ("a\nb",)}, "no name"),
        ({"groups": (GroupInfo(8, (Member("\x00", 1, "t"),)),)}, "no name"),
        ({"files": 2 * (FileInfo("config.json", 2, ""),)}, "a file twice"),
        ({"part": (0, 0)}, "part"),
        ({"part": (-1, 1)}, "part"),
        ({"part": (0, 1 + len(GROUPS))}, "part"),
        ({"parameters": 2 * (ParameterInfo("a", (8,), "float32", ""),)}, "a parameter twice"),
    ],
)
def test_a_manifest_that_could_do_harm_is_refused(change: dict[str, Any], message: str) -> None:
    changed = msgspec.structs.replace(MANIFEST, **change)
    with pytest.raises(WireError, match=message) as caught:
        validate_manifest(msgspec.structs.replace(changed, digest=digest_of(changed)))
    assert caught.value.code == "manifest"


def test_products_of_groups_that_are_elsewhere_are_refused() -> None:
    manifest = msgspec.structs.replace(MANIFEST, part=(0, 1))
    validate_manifest(manifest)  # whose digest is that of the whole
    executor = ExecutorProtocol(manifest)
    executor.hello_received = True
    for group, info in enumerate(GROUPS):
        request = Header(Operation.PRODUCT, Direction.FORWARD, FLOAT32, group, rows=1, members=1)
        header = TenantProtocol().product(request, GroupShape.of(info, manifest.numerics))
        if group == 0:
            executor.accept(header)
            continue
        with pytest.raises(WireError, match="elsewhere") as caught:
            executor.accept(header)
        assert caught.value.code == "group"


def test_a_digest_is_of_what_the_manifest_lists() -> None:
    """So that whoever pins it pins every file and parameter, whatever an executor claims."""
    for change in (
        {"weights": "1" * 64},
        {"architecture": "GPT2LMHeadModel"},
        {"base_prefix": ""},
        {"groups": GROUPS[:-1]},
        {"parameters": ()},
        {"parameters": (ParameterInfo("norm.weight", (8,), "float32", "11" * 32),)},
        {"files": (FileInfo("config.json", 2, "00" * 32),)},
    ):
        with pytest.raises(WireError, match="digest"):
            validate_manifest(msgspec.structs.replace(MANIFEST, **change))
    assert digest_of(RING_MANIFEST) == MANIFEST.digest  # numerics are not in it


def test_every_dtype_has_a_name_that_manifests_may_use() -> None:
    names = tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
    changed = msgspec.structs.replace(
        MANIFEST, parameters=tuple(ParameterInfo(name, (), name, "") for name in names), wire_dtypes=names
    )
    validate_manifest(msgspec.structs.replace(changed, digest=digest_of(changed)))
