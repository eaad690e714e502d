"""What a wrong or hostile tenant sends, against a real executor; another tenant never notices."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RING, Executor
from raw_peers import (
    BACKWARD,
    CONTINUATION,
    EFFECT,
    FETCH,
    FORWARD,
    HELLO,
    PRODUCT,
    REPLY,
    SECONDS,
    TEXT,
    Peer,
    counted,
    frame,
    header,
    open_raw,
    product,
)

import provider.serve.websocket_connection
import tenant_sdk
from shared.errors import NonFiniteError
from shared.wire.header import PROTOCOL_VERSION, RINGS
from shared.wire.messages import Limits

pytest_plugins = ("wire_fixtures",)
pytestmark = pytest.mark.usefixtures("goes_on")

# -- requests that fail alone ----------------------------------------------------------------------

ROW = bytes(256)  # one row of 64 float32
HUGE = 2**32 - 1
NAN, INF = struct.pack("<64f", *[0.0] * 63, float("nan")), struct.pack("<64f", float("inf"), *[0.0] * 63)
BOTH = struct.pack("<64f", float("inf"), float("-inf"), *[1.0] * 62)
FETCH_FILE: dict[str, Any] = {"kind": "file", "name": "config.json", "start": 0, "stop": 1}


def control(**fields: int) -> bytes:
    """The header of a FETCH."""
    return header(FETCH, **({"request_id": 7, "rows": 1} | fields))


def fetch(**change: Any) -> tuple[bytes, bytes]:
    """A FETCH that is good but for the fields given."""
    data = json.dumps(FETCH_FILE | change).encode()
    return control(columns=len(data)), data


# Of each error of a header one; tests/vectors has all.
REFUSED: dict[str, tuple[str, tuple[bytes, bytes]]] = {
    "unknown group": ("group", (product(1, 64, group=8), ROW)),
    "unknown direction": ("direction", (product(1, 64, direction=3), ROW)),
    "unknown dtype": ("dtype", (product(1, 64, dtype=8), ROW)),
    "unknown operation": ("operation", (product(1, 64)[:1] + b"\x09" + product(1, 64)[2:], ROW)),
    "a seed where no ring is": ("operation", (product(1, 64)[:1] + b"\x08" + product(1, 64)[2:], ROW[:32])),
    "executor's operation": ("operation", (header(REPLY, request_id=7), b"")),
    "too wide": ("width", (product(1, 65), ROW + bytes(4))),
    "backward of the wrong members": ("width", (product(1, 64, direction=BACKWARD, members=2), ROW)),
    "zero rows": ("zero_rows", (product(0, 64), b"")),
    "a member too many": ("members", (product(1, 64, members=0b1000), ROW)),
    "request class": ("request_class", (product(1, 64, request_class=4), ROW)),
    "answer bits of floats": ("answer_bits", (product(1, 64, answer_bits=16), ROW)),
    "payload too long": ("payload_length", (product(1, 64), ROW + b"\0")),
    "payload much too long": ("payload_length", (product(1, 64), ROW * 500)),
    "gigabytes promised": ("payload_length", (product(2**24, 64), ROW)),
    "more than 64 bits promised": ("payload_length", (product(HUGE, HUGE, dtype=4), ROW)),
    "too many rows": ("too_large", (product(65_537, 64), ROW * 65_537)),
    "NaN": ("non_finite", (product(1, 64), NAN)),
    "infinity": ("non_finite", (product(1, 64), INF)),
    "infinities that cancel": ("non_finite", (product(1, 64), BOTH)),
    "NaN in an effect": ("non_finite", (b"\4\4" + product(1, 64)[2:], NAN)),
    "NaN in a gradient": ("non_finite", (product(1, 64, direction=BACKWARD), NAN)),
    "NaN in bfloat16": ("non_finite", (product(1, 64, dtype=2), bytes(126) + b"\xc0\x7f")),
    "second HELLO": ("unexpected", (header(HELLO, request_id=7, rows=1, columns=2), b"{}")),
    "control message in rows": ("control_message", (control(rows=2, columns=1), b"{}")),
    "control message of floats": ("control_message", (control(columns=1, dtype=1), b"{}{}")),
    "control message too large": ("too_large", (control(columns=65_537), bytes(65_537))),
    "no JSON": ("control_message", (control(columns=2), b"\xff\xfe")),
    "empty JSON": ("control_message", (control(), b"")),
    "unknown field": ("control_message", fetch(pickle="gASVAAA=")),
    "a very long unknown field": ("control_message", fetch(**{"\u0001" * 9_000: 1})),
    "wrong type": ("control_message", fetch(start="0")),
    "unknown kind": ("fetch", fetch(kind="weights")),
    "scales where no ring is": ("fetch", fetch(kind="scales", name="0")),
    "a path": ("fetch", fetch(name="../config.json")),
    "an absolute path": ("fetch", fetch(name="/etc/passwd")),
    "a served weight": ("fetch", fetch(kind="parameter", name="model.layers.0.self_attn.q_proj.weight")),
    "negative range": ("fetch", fetch(start=-1)),
    "empty range": ("fetch", fetch(stop=0)),
    "range past the end": ("fetch", fetch(stop=10**30)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_fails_alone(
    llama: Executor, raw: Peer, weight: torch.Tensor, name: str, no_large_tensor: None
) -> None:
    code, (head, payload) = REFUSED[name]
    with counted(llama, "symbiosis_refused_total", code=code):
        raw.message(head, payload)
        assert raw.receive_error() == (7, code)
    raw.message(product(1, 64), struct.pack("<64f", *[1.0] * 64))
    fields, body = raw.receive()
    assert (fields.operation, fields.request_id) == (REPLY, 7)
    torch.testing.assert_close(torch.frombuffer(bytearray(body), dtype=torch.float32), weight.sum(1))


@pytest.fixture
def no_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the request, so that another code is returned, if it makes a tensor of over 32 MiB."""
    empty = torch.empty

    def watched(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **{**options, "device": "meta"})
        if made.nbytes > 32 << 20:
            raise MemoryError(f"{made.nbytes} bytes")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", watched)


@pytest.mark.usefixtures("no_large_tensor")
@pytest.mark.parametrize(("rows", "columns"), [(2**24, 64), (HUGE, 64), (HUGE, HUGE)])
def test_gigabytes_in_fragments_cost_nothing(llama: Executor, raw: Peer, rows: int, columns: int) -> None:
    """The length of a fragmented message is not known yet, so only the limits stop it."""
    code = "too_large" if columns == 64 else "width"
    with counted(llama, "symbiosis_refused_total", code=code):
        raw.send(raw.frame(product(rows, columns), fin=False))
        raw.send(raw.frame(ROW, CONTINUATION))
        assert raw.receive_error() == (7, code)
    raw.message(product(1, 64), ROW)
    assert raw.receive()[0].operation == REPLY


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_sent(witness: tenant_sdk.Session, value: float) -> None:
    layer = witness.load_model(progress=False).model.layers[0].self_attn.q_proj
    before = witness.stats.requests
    x = torch.zeros((2, 64))
    x[1, 5] = value
    with pytest.raises(NonFiniteError, match="q_proj"):
        layer(x)
    assert witness.stats.requests == before
    y = layer(torch.ones((2, 64), requires_grad=True))
    before = witness.stats.requests
    with pytest.raises(NonFiniteError, match="gradient"):
        (y * value).sum().backward()
    assert witness.stats.requests == before


# -- on a ring -------------------------------------------------------------------------------------

SEED_EFFECT, INT32 = 8, 6
SEED = bytes(range(32))


@pytest.fixture(scope="module")
def ring(serve: Callable[..., Executor], checkpoint: Callable[[str], Path]) -> Executor:
    """The same weights as integers."""
    return serve(checkpoint("llama"), numerics=RING, limits=Limits(32 << 20, 65_536))


def seed_effect(rows: int, columns: int, operation: int = SEED_EFFECT, **fields: int) -> bytes:
    """The header of a forward effect of a seed, of the first member of group 0."""
    defaults = {"direction": FORWARD, "dtype": INT32, "members": 1, "request_id": 7}
    return header(operation, **(defaults | {"rows": rows, "columns": columns} | fields))


RING_REFUSED: dict[str, tuple[str, tuple[bytes, bytes]]] = {
    "no seed": ("payload_length", (seed_effect(2, 64), b"")),
    "33 bytes": ("payload_length", (seed_effect(2, 64), SEED + b"\0")),
    "the mask itself": ("payload_length", (seed_effect(2, 64), bytes(512))),
    "as many rows as there are": ("too_large", (seed_effect(HUGE, 64), SEED)),
    "a mask of more than 64 bits": ("width", (seed_effect(HUGE, HUGE), SEED)),
    "an answer over the limit": ("too_large", (seed_effect(65_536, 64, group=2, members=3), SEED)),
    "as wide as two planes": ("width", (seed_effect(2, 128), SEED)),
    "a seed of floats": ("dtype", (seed_effect(2, 64, dtype=1), SEED)),
    "floats": ("dtype", (product(1, 64), ROW)),
    "unknown scales": ("fetch", fetch(kind="scales", name="8")),
    "no scales": ("fetch", fetch(kind="scales", name="0", stop=0)),
}  # fmt: skip


@pytest.mark.usefixtures("no_large_tensor")
@pytest.mark.parametrize("name", RING_REFUSED)
def test_a_bad_request_of_a_ring_fails_alone(ring: Executor, name: str) -> None:
    code, (head, payload) = RING_REFUSED[name]
    with open_raw(ring) as peer, counted(ring, "symbiosis_refused_total", code=code):
        peer.hello()
        peer.message(head, payload)
        assert peer.receive_error() == (7, code)
        peer.message(seed_effect(2, 64), SEED)
        fields, body = peer.receive()
        columns = RINGS[RING] * 64
        assert (fields.operation, fields.rows, fields.columns, fields.dtype) == (REPLY, 2, columns, INT32)
        assert len(body) == 2 * columns * 4


@pytest.mark.usefixtures("no_large_tensor")
@pytest.mark.parametrize("rows", [65_537, HUGE])
def test_a_seed_for_gigabytes_in_fragments_costs_nothing(ring: Executor, rows: int) -> None:
    with open_raw(ring) as peer:
        peer.hello()
        peer.send(peer.frame(seed_effect(rows, 64), fin=False) + peer.frame(SEED, CONTINUATION))
        assert peer.receive_error() == (7, "too_large")
        peer.send(peer.frame(seed_effect(1, 64) + SEED[:9], fin=False) + peer.frame(SEED[9:], CONTINUATION))
        assert peer.receive()[0].operation == REPLY


def test_a_seed_longer_than_32_bytes_in_fragments_ends_the_connection(ring: Executor) -> None:
    with open_raw(ring) as peer, counted(ring, "symbiosis_refused_total", code="payload_length"):
        peer.hello()
        peer.send(peer.frame(seed_effect(1, 64), fin=False) + peer.frame(bytes(33), CONTINUATION))
        assert peer.receive_error() == (0, "payload_length")
        assert peer.receive_close() == 1002


# -- the end of the connection ---------------------------------------------------------------------

GOOD = product(1, 64) + ROW
FATAL: dict[str, tuple[bytes, str, int]] = {
    "text": (frame(b"hello", TEXT, mask=b"abcd"), "text", 1002),
    "unmasked": (frame(GOOD), "frame", 1002),
    "reserved bit 1": (frame(GOOD, mask=b"abcd", reserved=4), "frame", 1002),
    "reserved opcode": (frame(GOOD, 3, mask=b"abcd"), "frame", 1002),
    "continuation of nothing": (frame(GOOD, CONTINUATION, mask=b"abcd"), "frame", 1002),
    "message inside another": (frame(GOOD, mask=b"abcd", fin=False) * 2, "frame", 1002),
    "fragmented ping": (frame(b"", 9, mask=b"abcd", fin=False), "frame", 1002),
    "shorter than a header": (frame(GOOD[:31], mask=b"abcd"), "header", 1002),
    "the version before": (
        frame(bytes([PROTOCOL_VERSION - 1]) + GOOD[1:], mask=b"abcd"), "protocol_version", 1002
    ),
    "oversized by far": (frame(b"", mask=b"abcd", length=2**64 - 1), "too_large", 1009),
}  # fmt: skip


@pytest.mark.parametrize("name", FATAL)
def test_a_broken_stream_ends_with_its_reason(llama: Executor, raw: Peer, name: str) -> None:
    data, code, close = FATAL[name]
    with counted(llama, "symbiosis_refused_total", code=code):
        raw.send(data)
        assert raw.receive_error() == (0, code)
    assert raw.receive_close() == close
    assert raw.at_end()


def test_a_frame_one_byte_over_the_limit(llama: Executor) -> None:
    with open_raw(llama) as peer, counted(llama, "symbiosis_refused_total", code="too_large"):
        limit = peer.hello()["limits"]["max_message_bytes"]
        peer.send(peer.frame(b"", length=32 + limit + 1))
        assert peer.receive_error() == (0, "too_large")
        assert peer.receive_close() == 1009


@pytest.mark.parametrize("operation", [PRODUCT, EFFECT, FETCH, SEED_EFFECT])
def test_a_request_before_hello_ends_the_connection(llama: Executor, operation: int) -> None:
    with open_raw(llama) as peer, counted(llama, "symbiosis_refused_total", code="unexpected"):
        peer.message(header(operation, rows=1, columns=2), SEED if operation == SEED_EFFECT else b"{}")
        assert peer.receive_error() == (0, "unexpected")
        assert peer.receive_close() == 1002


@pytest.mark.parametrize("data", [b"\x82", frame(GOOD, mask=b"abcd")[:9], frame(GOOD, mask=b"abcd")[:-1]])
def test_a_frame_that_is_cut_off(raw: Peer, data: bytes) -> None:
    raw.send(data)
    raw.close()  # the fixture sees to it that the executor forgets the session


@pytest.mark.parametrize("answered", [False, True])
def test_a_tenant_that_leaves_in_the_middle_of_a_request(raw: Peer, answered: bool) -> None:
    """16 MiB in, 32 MiB out: more than the sockets hold, so the executor is in the middle of its answer."""
    rows = 65_536
    raw.message(product(rows, 64, members=0b111), bytes(256 * rows))
    if answered:
        raw.sock.recv(1)
    raw.close()


def test_a_tenant_that_stalls(llama: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider.serve.websocket_connection, "STALL_SECONDS", 0.2)
    with open_raw(llama) as peer:
        peer.hello()
        peer.send(frame(GOOD, mask=os.urandom(4))[:-1])
        assert peer.at_end()


def test_a_session_may_be_idle_for_longer(
    llama: Executor, monkeypatch: pytest.MonkeyPatch, raw: Peer
) -> None:
    """The time without a byte counts inside a message only."""
    monkeypatch.setattr(provider.serve.websocket_connection, "STALL_SECONDS", 0.05)
    with open_raw(llama) as peer:
        peer.hello()
        peer.sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            peer.sock.recv(1)
        peer.sock.settimeout(SECONDS)
        peer.message(product(1, 64), ROW)
        assert peer.receive()[0].operation == REPLY


def test_a_message_that_moves_by_a_byte_now_and_then(
    llama: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold its quota for as long as it likes."""
    monkeypatch.setattr(provider.serve.websocket_connection, "STALL_SECONDS", 0.2)
    with open_raw(llama) as peer:
        peer.hello()
        peer.send(frame(product(1000, 64) + bytes(256_000), mask=bytes(4))[:1000])
        peer.sock.settimeout(0.01)
        for _ in range(int(SECONDS / 0.01)):
            try:
                if peer.sock.recv(1 << 16) == b"":
                    return
            except TimeoutError:
                peer.send(b"\0")
        pytest.fail("the connection is still open")


@pytest.mark.parametrize(("first", "again"), [(b"", b"\x8a"), (b"\x02\x80\0\0\0\0", b"\0")])
def test_a_flood_of_frames_without_data(
    llama: Executor, monkeypatch: pytest.MonkeyPatch, first: bytes, again: bytes
) -> None:
    """Control frames and empty fragments take time, and no quota counts them."""
    monkeypatch.setattr(provider.serve.websocket_connection, "STALL_SECONDS", 0.2)
    with open_raw(llama) as peer:
        peer.hello()
        peer.send(first + (again + b"\x80\0\0\0\0") * 1001)
        assert peer.receive_error() == (0, "frame")
        assert peer.receive_close() == 1002
