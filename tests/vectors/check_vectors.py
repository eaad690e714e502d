"""Check ``messages.json`` against the protocol as ``shared/PROTOCOL.md`` tells it.

Written from that text and RFC 6455 with the standard library alone, so that a mistake in the
project's code is not repeated here. ``python tests/vectors/check_vectors.py [FILE]`` prints what is
wrong and exits with 1, or prints how many vectors are right.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

VERSION = 1
SUBPROTOCOL = "symbiosis.v1"
HEADER = struct.Struct("<BBBBIIIIHHQ")
NAMES = ("operation", "direction", "dtype", "group", "request_id", "rows", "columns", "members")
HELLO, WELCOME, PRODUCT, EFFECT, FETCH, REPLY, ERROR = range(1, 8)
FORWARD = 1
# code: name, bytes, how struct writes one element (bfloat16 is the upper half of a float32)
DTYPES = {
    0: ("uint8", 1, "B"),
    1: ("float32", 4, "f"),
    2: ("bfloat16", 2, ""),
    3: ("float16", 2, "e"),
    4: ("float64", 8, "d"),
    5: ("int64", 8, "q"),
    6: ("int32", 4, "i"),
    7: ("bool", 1, "?"),
}
CODES = {name: code for code, (name, _, _) in DTYPES.items()}
REQUEST_CONTROL, ANSWER = 64 << 10, 1 << 30


class Refused(Exception):
    """A message or stream that the receiver refuses."""

    def __init__(self, code: str, *, fatal: bool = False, request_id: int = 0) -> None:
        super().__init__(code)
        self.code, self.fatal, self.request_id = code, fatal, request_id


class Wrong(Exception):
    """A vector that is not what it says."""


def expect(right: bool, what: str) -> None:
    """Unlike ``assert`` this also checks under ``python -O``."""
    if not right:
        raise Wrong(what)


# -- RFC 6455 --------------------------------------------------------------------------------------


def unmask(data: bytes, mask: bytes) -> bytes:
    """§5.3."""
    return bytes(byte ^ mask[i % 4] for i, byte in enumerate(data)) if mask else data


def frame_header(data: bytes) -> tuple[int, bool, int, int, bytes, int]:
    """§5.2: opcode, fin, reserved bits, length, mask, and where the payload begins."""
    length, at = data[1] & 0x7F, 2
    if length >= 126:
        size = 2 if length == 126 else 8
        length, at = int.from_bytes(data[2 : 2 + size], "big"), 2 + size
    mask = data[at : at + 4] if data[1] & 0x80 else b""
    return data[0] & 0x0F, bool(data[0] & 0x80), data[0] >> 4 & 7, length, mask, at + len(mask)


def message_of(
    data: bytes, *, masked: bool, limit: int
) -> tuple[bytes, int, bool, list[tuple[int, bytes]], bytes]:
    """The first message of a stream.

    Returns:
        Its bytes as far as they are here, its length so far, whether it came in one frame, the
        control frames before its end, and what follows it.
    """
    message, length, started, whole, controls = b"", 0, False, False, []
    while data:
        opcode, fin, reserved, size, mask, at = frame_header(data)
        body, data = unmask(data[at : at + size], mask), data[at + size :]
        if reserved or opcode not in (0, 1, 2, 8, 9, 10) or bool(mask) != masked:
            raise Refused("frame", fatal=True)
        if opcode >= 8:
            if size > 125 or not fin:
                raise Refused("frame", fatal=True)
            controls.append((opcode, body))
            continue
        if opcode == 1:
            raise Refused("text", fatal=True)
        if (opcode == 0) != started:
            raise Refused("frame", fatal=True)
        if length + size > limit + 32:
            raise Refused("too_large", fatal=True)
        whole = fin and not started
        started, message, length = True, message + body, length + size
        if fin and length < 32:
            raise Refused("header", fatal=True)
        if fin:
            break
    return message, length, whole, controls, data


# -- the protocol ----------------------------------------------------------------------------------


def header_of(message: bytes) -> dict[str, int]:
    """Parse the first 32 bytes, checks in the order of the text."""
    values = HEADER.unpack_from(message)
    header = dict(zip(NAMES, (*values[1:8], values[10]), strict=True))
    if values[0] != VERSION:
        raise Refused("protocol_version", fatal=True)
    checks = {
        "operation": 1 <= header["operation"] <= 7,
        "direction": header["direction"] <= 2,
        "dtype": header["dtype"] in DTYPES,
        "reserved": values[8] == values[9] == 0,
    }
    for code, right in checks.items():
        if not right:
            raise Refused(code, request_id=header["request_id"])
    return header


def payload_bytes(header: dict[str, int]) -> int:
    """Python integers do not overflow."""
    return header["rows"] * header["columns"] * DTYPES[header["dtype"]][1]


def accept_request(header: dict[str, int], manifest: dict, *, greeted: bool) -> None:
    """The executor's checks, in the order of the text."""

    def check(right: bool, code: str, *, fatal: bool = False) -> None:
        if not right:
            raise Refused(code, fatal=fatal, request_id=0 if fatal else header["request_id"])

    operation = header["operation"]
    if operation == HELLO:
        check(not greeted, "unexpected")
    else:
        check(greeted, "unexpected", fatal=True)
    check(operation in (HELLO, PRODUCT, EFFECT, FETCH), "operation")
    if operation in (HELLO, FETCH):
        check(header["dtype"] == 0 and header["rows"] == 1, "control_message")
        check(payload_bytes(header) <= REQUEST_CONTROL, "too_large")
        return
    check(header["group"] < len(manifest["groups"]), "group")
    check(header["direction"] in (1, 2), "direction")
    check(DTYPES[header["dtype"]][0] in manifest["wire_dtypes"], "dtype")
    group = manifest["groups"][header["group"]]
    check(0 < header["members"] < 2 ** len(group["members"]), "members")
    outputs = sum(m["outputs"] for i, m in enumerate(group["members"]) if header["members"] >> i & 1)
    asked, answered = (
        (group["inputs"], outputs) if header["direction"] == FORWARD else (outputs, group["inputs"])
    )
    check(header["columns"] == asked, "width")
    check(header["rows"] > 0, "zero_rows")
    limits, itemsize = manifest["limits"], DTYPES[header["dtype"]][1]
    check(header["rows"] <= limits["max_rows"], "too_large")
    check(header["rows"] * max(asked, answered) * itemsize <= limits["max_message_bytes"], "too_large")


def accept_answer(header: dict[str, int], asked: dict[str, int], manifest: dict) -> None:
    """The checks of a tenant that waits for the answer to one product."""
    group = manifest["groups"][asked["group"]]
    outputs = sum(m["outputs"] for i, m in enumerate(group["members"]) if asked["members"] >> i & 1)
    columns = outputs if asked["direction"] == FORWARD else group["inputs"]
    if header["operation"] == ERROR:
        known = header["request_id"] in (0, asked["request_id"])
        right = known and header["dtype"] == 0 and payload_bytes(header) <= REQUEST_CONTROL
    else:
        right = header == asked | {"operation": REPLY, "columns": columns}
    if not right:
        raise Refused("unexpected", fatal=True)


def outcome(vector: dict, manifest: dict) -> tuple[str | None, bool, int]:
    """Code, whether fatal, and request id, for the stream of a vector."""
    asked = vector.get("asked")
    limit = ANSWER if asked else manifest["limits"]["max_message_bytes"]
    data = bytes.fromhex(vector["hex"])
    try:
        message, length, whole, _, _ = message_of(data, masked=asked is None, limit=limit)
        header = header_of(message)
        if whole and length - 32 != payload_bytes(header):
            raise Refused("payload_length", request_id=header["request_id"])
        if asked:
            accept_answer(header, asked, manifest)
        else:
            accept_request(header, manifest, greeted=vector["greeted"])
        if length - 32 > payload_bytes(header):
            raise Refused("payload_length", fatal=True)
        if length - 32 < payload_bytes(header):
            raise Refused("payload_length", request_id=header["request_id"])
    except Refused as refused:
        return refused.code, refused.fatal, refused.request_id
    return None, False, 0


# -- the vectors -----------------------------------------------------------------------------------


def element(value: float, dtype: int) -> bytes:
    """One element as it is on the wire."""
    _, _, how = DTYPES[dtype]
    return struct.pack("<" + how, value) if how else struct.pack("<f", value)[2:]


def check_message(vector: dict, manifest: dict) -> None:
    """Its bytes, its frame and its fragments are those of its fields and values."""
    message = bytes.fromhex(vector["message"])
    header = header_of(message)
    expect(header == vector["header"], "header")
    payload = message[32:]
    expect(len(payload) == payload_bytes(header), "length")
    from_tenant = header["operation"] in (HELLO, PRODUCT, EFFECT, FETCH)
    expect(vector["sender"] == ("tenant" if from_tenant else "executor"), "sender")
    if "json" in vector:
        expect(json.loads(payload) == vector["json"], "json")
        expect((header["rows"], header["dtype"]) == (1, 0), "control message")
    else:
        values = b"".join(
            element(value, header["dtype"])
            for block in vector["blocks"]
            for row in block["values"]
            for value in row
        )
        expect(values == payload, "values")
        expect(all(block["shape"][0] == header["rows"] for block in vector["blocks"]), "rows")
        expect(sum(block["shape"][1] for block in vector["blocks"]) == header["columns"], "columns")
    if from_tenant:
        accept_request(header, manifest, greeted=header["operation"] != HELLO)
    expect(bool(vector["mask"]) == from_tenant, "mask")
    for name in ("frame", "frames"):
        sent = bytes.fromhex(vector[name])
        got, length, whole, controls, left = message_of(sent, masked=from_tenant, limit=ANSWER)
        expect(length == len(message) and not left, name)
        expect(got == message, name)
        expect(whole == (name == "frame"), name)
        expect(controls == ([] if whole else [(9, b"between")]), "ping")


def check_frame(vector: dict) -> None:
    """A frame header's fields, and a control frame's payload."""
    data = bytes.fromhex(vector["hex"])
    opcode, fin, reserved, length, mask, at = frame_header(data)
    expect(
        (opcode, fin, reserved, length) == (vector["opcode"], vector["fin"], 0, vector["length"]), "fields"
    )
    expect(mask.hex() == vector["mask"], "mask")
    expect(unmask(data[at:], mask).hex() == vector.get("data", ""), "data")
    shortest = 2 if length < 126 else 4 if length < 65_536 else 10
    expect(at == shortest + len(mask), "length not in its shortest form")


def check(vectors: dict) -> tuple[int, list[str]]:
    """How many vectors there are, and what is wrong with them."""
    wrong, count, manifest = [], 0, vectors["manifest"]
    if (vectors["protocol_version"], vectors["subprotocol"]) != (VERSION, SUBPROTOCOL):
        wrong.append("another version")
    for kind in ("messages", "frames", "refused_requests", "refused_answers"):
        expect(vectors[kind], f"no {kind}")
        for number, vector in enumerate(vectors[kind]):
            count += 1
            name = f"{kind}[{number}] {vector.get('name', '')}"
            try:
                if kind == "messages":
                    check_message(vector, manifest)
                elif kind == "frames":
                    check_frame(vector)
                else:
                    got = outcome(vector, manifest)
                    expect(got == (vector["code"], vector["fatal"], vector["request_id"]), f"gives {got}")
            except (Wrong, Refused, LookupError, ValueError, struct.error) as error:
                wrong.append(f"{name}: {error!r}")
    return count, wrong


def main() -> int:
    """Check one file."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("messages.json")
    count, wrong = check(json.loads(path.read_text()))
    for line in wrong:
        print(line)
    print(f"{count - len(wrong)} of {count} vectors are right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
