"""Frames in and out: any cut, any fragmentation, any garbage."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_peers import BINARY, CONTINUATION, PING, PONG, frame
from test_protocol import LIMITS, asked, greeted, product
from test_protocol import seed as seed_effect

from shared.errors import WireError
from shared.wire.frames import (
    CHUNK_BYTES,
    RECORD_BYTES,
    Control,
    MessageReader,
    Opcode,
    encode_control,
    encode_message,
    frame_header,
    xor_mask,
)
from shared.wire.header import BYTES, DTYPES, HEADER_BYTES, SEED_BYTES, Header, Operation
from shared.wire.incoming import Incoming
from shared.wire.protocol import TenantProtocol

SEEDS = st.integers(0, 2**32 - 1)
MASK = bytes.fromhex("37fa213d")


def accept_all(_: Header) -> None:
    """Refuse nothing."""


def reader(
    accept: Callable[[Header], None] = accept_all, *, masked: bool = False, steps: int | None = None
) -> MessageReader:
    """A reader of messages up to 1 MiB."""
    return MessageReader(accept, masked=masked, max_message_bytes=1 << 20, steps=steps)


def feed(into: MessageReader, data: bytes, cut: Callable[[], int] = lambda: 1 << 30) -> list[Any]:
    """All events of a stream that arrives in pieces of ``cut()`` bytes."""
    events: list[Any] = []
    at = 0
    while at < len(data):
        buffer = into.get_buffer()
        assert len(buffer) > 0, "a reader that takes no byte would hang"
        count = min(len(buffer), len(data) - at, cut())
        buffer[:count] = data[at : at + count]
        events += into.received(count)
        while into.unparsed:
            events += into.received(0)
        at += count
    return events


def message(random: Random, size: int, request_id: int = 1) -> tuple[Header, bytes]:
    """A header and its payload: a tensor of any dtype and about ``size`` elements, or now and then a seed."""
    dtype = random.randrange(len(DTYPES))
    if random.random() < 0.1:  # of a mask of any size
        rows, columns = random.getrandbits(32), random.getrandbits(32)
        header = Header(Operation.SEED_EFFECT, 1, dtype, 0, request_id, rows, columns, 1)
        return header, random.randbytes(SEED_BYTES)
    rows = random.randint(1, max(1, min(size, 9)))
    columns = size // rows
    header = Header(6, random.randrange(3), dtype, random.randrange(5), request_id, rows, columns, 1)
    data = random.randbytes(header.payload_bytes)
    return header, bytes(b & 1 for b in data) if DTYPES[dtype] == torch.bool else data


def stream(
    random: Random, messages: list[tuple[Header, bytes]], *, masked: bool
) -> tuple[bytes, list[bytes]]:
    """Messages as frames cut anywhere with pings anywhere between them; and the pings' payloads."""
    out, pings = b"", []

    def key() -> bytes:
        return random.randbytes(4) if masked else b""

    for header, payload in messages:
        left = header.pack() + payload
        opcode = BINARY
        while True:
            if random.random() < 0.3:
                pings.append(random.randbytes(random.choice([0, 1, 125])))
                out += frame(pings[-1], random.choice([PING, PONG]), mask=key())
            count = random.choice([len(left), random.randint(0, len(left)), random.randint(0, 40)])
            # A frame that ends the message must hold its header's rest, or be the whole of it.
            fin = count >= len(left) and random.random() < 0.8
            out += frame(left[:count], opcode, mask=key(), fin=fin)
            left, opcode = left[count:], CONTINUATION
            if fin:
                break
    return out, pings


def check_events(events: list[Any], messages: list[tuple[Header, bytes]], pings: list[bytes]) -> None:
    """The events are these messages and pings, each in order."""
    assert [e.data for e in events if isinstance(e, Control)] == pings
    got = [e for e in events if isinstance(e, Incoming)]
    assert [e.header for e in got] == [header for header, _ in messages]
    for event, (header, payload) in zip(got, messages, strict=True):
        assert event.error is None
        if header.operation == Operation.SEED_EFFECT:
            assert (event.payload.shape, event.payload.dtype) == ((1, SEED_BYTES), torch.uint8)
        else:
            assert event.payload.shape == (header.rows, header.columns)
            assert event.payload.dtype == DTYPES[header.dtype]
        assert event.payload.is_contiguous()
        assert event.payload.reshape(-1).view(torch.uint8).numpy().tobytes() == payload


SIZES = st.lists(st.integers(0, 40) | st.sampled_from([2000, 9000, 40_000]), min_size=1, max_size=4)


@settings(max_examples=200)
@given(
    seed=SEEDS,
    sizes=SIZES,
    masked=st.booleans(),
    mean=st.sampled_from([1, 7, 500, 5000, 1 << 20]),
    steps=st.sampled_from([None, 1, 3, 100]),
)
def test_any_cut_and_any_fragments_give_the_same_tensors(
    seed: int, sizes: list[int], masked: bool, mean: int, steps: int | None
) -> None:
    random = Random(seed)
    if sum(sizes) > 5000:
        mean = max(mean, 500)  # one byte at a time takes too long for these
    messages = [message(random, size, i) for i, size in enumerate(sizes)]
    data, pings = stream(random, messages, masked=masked)
    into = reader(masked=masked, steps=steps)
    check_events(feed(into, data, lambda: random.randint(1, mean)), messages, pings)
    assert not into.mid_message


@pytest.mark.parametrize("steps", [1, 3, 100])
def test_parsing_stops_after_some_steps(steps: int) -> None:
    """Small frames take time, so that a reader looks at the clock between them."""
    pings = frame(b"?", PING) * 50
    into = reader(steps=steps)
    into.get_buffer()[: len(pings)] = pings
    assert len(into.received(len(pings))) == min(steps, 50)
    assert into.unparsed == (steps < 50)
    while into.unparsed:
        assert into.mid_message
        assert len(into.received(0)) <= steps
    assert into.idle_frames == 50


@settings(max_examples=50)
@given(seed=SEEDS, sizes=SIZES)
def test_a_large_payload_is_read_where_it_stays(seed: int, sizes: list[int]) -> None:
    """Reads of more than one record go straight into the tensor."""
    random = Random(seed)
    messages = [message(random, size + 3 * RECORD_BYTES) for size in sizes]
    into = reader()
    for header, payload in messages:
        if header.operation == Operation.SEED_EFFECT:
            continue
        data = frame(header.pack() + payload)
        events = feed(into, data[:100])
        buffer = into.get_buffer()
        assert len(buffer) == len(data) - 100
        buffer[:] = data[100:]
        events += into.received(len(buffer))
        check_events(events, [(header, payload)], [])


@given(seed=SEEDS, sizes=SIZES, masked=st.booleans())
def test_a_message_that_is_refused_is_skipped(seed: int, sizes: list[int], masked: bool) -> None:
    random = Random(seed)
    messages = [message(random, size, i) for i, size in enumerate(sizes)]
    refused = {i for i in range(len(sizes)) if random.random() < 0.5}

    def accept(header: Header) -> None:
        if header.request_id in refused:
            raise WireError("group", "no")

    data, pings = stream(random, messages, masked=masked)
    events = feed(reader(accept, masked=masked), data, lambda: random.randint(1, 5000))
    got = [e for e in events if isinstance(e, Incoming)]
    assert [e.header.request_id for e in got] == list(range(len(sizes)))
    assert {e.header.request_id for e in got if e.error is not None} == refused
    assert all((e.payload is None) == (e.header.request_id in refused) for e in got)
    good = [m for m in messages if m[0].request_id not in refused]
    check_events([e for e in events if isinstance(e, Control) or e.error is None], good, pings)


@settings(max_examples=30)
@given(seed=SEEDS, size=st.integers(0, 60))
def test_mid_message_until_the_last_byte(seed: int, size: int) -> None:
    random = Random(seed)
    one = message(random, size)
    data, _ = stream(random, [one], masked=False)
    into = reader()
    assert not into.mid_message
    for at in range(len(data) - 1):
        complete = [e for e in feed(into, data[at : at + 1]) if isinstance(e, Incoming)]
        assert not complete
        # Between a ping and the first frame of a message nothing has begun.
        assert into.mid_message or data[at + 1] in (BINARY, 0x80 | BINARY, 0x80 | PING, 0x80 | PONG)
    feed(into, data[-1:])
    assert not into.mid_message


# -- what the stream cannot be followed after ------------------------------------------------------

HEAD = product().pack()
FATAL: dict[str, tuple[bytes, str]] = {
    **{f"reserved bit {bit}": (frame(HEAD, reserved=bit), "frame") for bit in (1, 2, 4)},
    **{f"opcode {code}": (frame(HEAD, code), "frame") for code in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)},
    "masked on the wrong side": (frame(HEAD, mask=MASK), "frame"),
    "masked ping on the wrong side": (frame(b"", PING, mask=MASK), "frame"),
    "text": (frame(b"hello", 1), "text"),
    "long ping": (frame(bytes(126), PING), "frame"),
    "very long ping": (frame(b"", PING, length=1 << 40), "frame"),
    "fragmented ping": (frame(b"", PING, fin=False), "frame"),
    "continuation of nothing": (frame(HEAD, CONTINUATION), "frame"),
    "new message inside another": (frame(HEAD, fin=False) + frame(HEAD), "frame"),
    "text inside another": (frame(HEAD, fin=False) + frame(b"a", 1), "text"),
    "empty message": (frame(b""), "header"),
    "31 bytes": (frame(HEAD[:31]), "header"),
    "31 bytes in two frames": (frame(HEAD[:20], fin=False) + frame(HEAD[20:31], CONTINUATION), "header"),
    "nothing in two frames": (frame(b"", fin=False) + frame(b"", CONTINUATION), "header"),
    "oversized": (frame(b"", length=(1 << 20) + 33), "too_large"),
    "oversized by far": (frame(b"", length=(1 << 64) - 1), "too_large"),
    "oversized in parts": (
        frame(HEAD, fin=False) + frame(b"", CONTINUATION, fin=False, length=(1 << 20) + 1),
        "too_large",
    ),
    "another version": (frame(b"\x01" + HEAD[1:]), "protocol_version"),
    "parts longer than the header says": (
        frame(HEAD, fin=False) + frame(bytes(97), CONTINUATION),
        "payload_length",
    ),
}


@pytest.mark.parametrize("name", FATAL)
@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_fatal(name: str, piece: int) -> None:
    data, code = FATAL[name]
    with pytest.raises(WireError) as caught:
        feed(reader(greeted().accept), data, lambda: piece)
    assert (caught.value.code, caught.value.fatal) == (code, True)


def test_tenants_must_mask() -> None:
    with pytest.raises(WireError) as caught:
        feed(reader(masked=True), frame(HEAD))
    assert (caught.value.code, caught.value.fatal) == ("frame", True)


def test_a_seed_is_a_payload_of_32_bytes() -> None:
    """In one frame or in several; whatever its mask has, which is not allocated here."""
    head, mask = seed_effect(request_id=5, rows=100), bytes(range(SEED_BYTES))
    data = head.pack() + mask
    for sent in (frame(data), frame(data[:40], fin=False) + frame(data[40:], CONTINUATION)):
        for piece in (1, 7, 1 << 20):
            (event,) = feed(reader(greeted("ring").accept), sent, lambda piece=piece: piece)
            check_events([event], [(head, mask)], [])


@pytest.mark.parametrize("size", [0, 1, 95, 97, 1000, 40_000])
@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_a_payload_of_another_length_fails_its_request_only(size: int, piece: int) -> None:
    into = reader(greeted().accept)
    bad, good = product(request_id=5), product(request_id=6)
    data = frame(bad.pack() + bytes(size)) + frame(good.pack() + bytes(96))
    first, second = feed(into, data, lambda: piece)
    assert (first.header.request_id, first.payload) == (5, None)
    assert (first.error.code, first.error.fatal) == ("payload_length", False)
    assert (second.header, second.error) == (good, None)


def test_parts_shorter_than_the_header_says_fail_their_request_only() -> None:
    into = reader(greeted().accept)
    data = frame(product(request_id=5).pack(), fin=False) + frame(bytes(95), CONTINUATION)
    (event,) = feed(into, data)
    assert (event.header.request_id, event.error.code, event.error.fatal) == (5, "payload_length", False)
    assert not into.mid_message


# -- garbage ---------------------------------------------------------------------------------------


def fuzz(data: bytes, random: Random, *, masked: bool, tenant: bool) -> None:
    """The oracle: valid events, or one fatal WireError; nothing else, and it ends."""
    if tenant:
        protocol = TenantProtocol()
        asked(protocol)
        accept, limit = protocol.accept, 1 << 20
    else:
        numerics = random.choice(["float32", "ring"])
        accept, limit = greeted(numerics).accept, LIMITS.max_message_bytes
    into = MessageReader(accept, masked=masked, max_message_bytes=limit)
    refused: WireError | None = None
    events: list[Any] = []
    try:
        events = feed(into, data, lambda: random.randint(1, 3000))
    except WireError as error:
        refused = error
    assert refused is None or refused.fatal
    for event in events:
        if isinstance(event, Control):
            assert len(event.data) <= 125
        elif event.error is None:
            of_seed = event.header.operation == Operation.SEED_EFFECT
            shape = (1, SEED_BYTES) if of_seed else (event.header.rows, event.header.columns)
            assert event.payload.shape == shape
            assert event.header.rows * event.header.columns <= limit
            assert event.header.payload_bytes <= limit
        else:
            assert event.payload is None
            assert not event.error.fatal


@settings(max_examples=300)
@given(data=st.binary(max_size=300), masked=st.booleans(), tenant=st.booleans(), seed=SEEDS)
def test_random_bytes(data: bytes, masked: bool, tenant: bool, seed: int) -> None:
    fuzz(data, Random(seed), masked=masked, tenant=tenant)
    # The same bytes inside a good frame reach the header's parser.
    random = Random(seed)
    fuzz(frame(data, mask=random.randbytes(4) if masked else b""), random, masked=masked, tenant=tenant)


@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow])
@given(seed=SEEDS, masked=st.booleans(), tenant=st.booleans())
def test_mutated_streams(seed: int, masked: bool, tenant: bool) -> None:
    random = Random(seed)
    messages = []
    for i in range(random.randint(1, 3)):
        head = random.choice([product, seed_effect])(request_id=i, rows=random.randint(1, 3))
        if tenant:  # the answer of the first is awaited
            head = product(operation=Operation.REPLY, rows=3, columns=16)
        messages.append((head, random.randbytes(head.payload_bytes)))
    data = bytearray(stream(random, messages, masked=masked)[0])
    for _ in range(random.randint(1, 6)):
        at = random.randrange(len(data))
        kind = random.randrange(4)
        if kind == 0:
            data[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            data[at] = random.choice([0, 1, 0x7F, 0x80, 0xFF])
        elif kind == 2:
            del data[at : at + random.randint(1, 8)]
            data = data or bytearray(1)
        else:
            data[at:at] = random.randbytes(random.randint(1, 8))
    fuzz(bytes(data), random, masked=masked, tenant=tenant)


# -- the other way ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 125, 126, 127, 65535, 65536, 1 << 31, 1 << 40])
@pytest.mark.parametrize("mask", [b"", MASK])
@pytest.mark.parametrize("fin", [True, False])
def test_frame_headers(length: int, mask: bytes, fin: bool) -> None:
    expected = frame(b"", length=length, mask=mask, fin=fin)
    assert frame_header(Opcode.BINARY, length, mask, fin=fin) == expected


@given(data=st.binary(max_size=70), offset=st.integers(0, 9), in_place=st.booleans())
def test_xor_mask(data: bytes, offset: int, in_place: bool) -> None:
    given_ = bytearray(data)
    out = given_ if in_place else bytearray(len(data))
    xor_mask(memoryview(given_), MASK, memoryview(out), offset)
    assert bytes(out) == bytes(b ^ MASK[(offset + i) % 4] for i, b in enumerate(data))


@pytest.mark.parametrize("mask", [b"", MASK])
@pytest.mark.parametrize(
    "sizes",
    [
        (0,),
        (1,),
        (5, 6, 7),
        (RECORD_BYTES - 32,),
        (RECORD_BYTES - 31,),
        (CHUNK_BYTES + 3, 5, 2 * CHUNK_BYTES),
    ],
)
def test_messages_are_what_the_rfc_says(sizes: tuple[int, ...], mask: bytes) -> None:
    random = Random(sum(sizes))
    tensors = [
        torch.frombuffer(bytearray(random.randbytes(n)) or bytearray(1), dtype=torch.uint8)[:n] for n in sizes
    ]
    header = Header(Operation.REPLY, dtype=BYTES, request_id=3, rows=1, columns=sum(sizes))
    payload = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    # Pieces share a buffer, so each is taken before the next is made.
    sent = b"".join(bytes(piece) for piece in encode_message(header, tensors, mask))
    assert sent == frame(header.pack() + payload, mask=mask)
    assert b"".join(bytes(piece) for piece in encode_message(header, payload, mask)) == sent
    (event,) = feed(reader(masked=bool(mask)), sent)
    assert event.payload.numpy().tobytes() == payload


@pytest.mark.parametrize("dtype", list(DTYPES.values()))
def test_blocks_of_every_dtype_are_sent_as_they_lie_in_memory(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    code = {v: k for k, v in DTYPES.items()}[dtype]
    header = Header(Operation.REPLY, dtype=code, rows=2, columns=3)
    (event,) = feed(reader(), b"".join(bytes(p) for p in encode_message(header, [tensor])))
    assert torch.equal(event.payload, tensor)
    assert HEADER_BYTES + header.payload_bytes < 126


@given(data=st.binary(max_size=125), opcode=st.sampled_from([Opcode.PING, Opcode.PONG, Opcode.CLOSE]))
def test_control_frames(data: bytes, opcode: Opcode) -> None:
    assert encode_control(opcode, data) == frame(data, opcode)
    assert encode_control(opcode, data, MASK) == frame(data, opcode, mask=MASK)
    (event,) = feed(reader(masked=True), frame(data, opcode, mask=MASK))
    assert event == Control(opcode, data)
