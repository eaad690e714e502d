"""Write ``messages.json``: byte-exact examples of the wire protocol, made by this project's code.

``check_vectors.py`` checks them and shares no code with the project; ``tests/unit/test_vectors.py`` runs
both. Run this after a change of the protocol that is meant: ``python tests/vectors/make_vectors.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from manifests import MANIFEST, MANIFESTS
from ring_numbers import GRADIENTS, INTEGERS, PLANES, SEED, masks, planes, product, products

from shared.errors import WireError
from shared.ring.mask_stream import MaskStream
from shared.ring.upper_bits import take_upper_bits
from shared.wire.frames import MessageReader, Opcode, encode_control, encode_message, frame_header, xor_mask
from shared.wire.header import (
    ANSWER_BITS,
    DTYPE_CODES,
    DTYPE_NAMES,
    EXACT,
    HEADER_BYTES,
    PROTOCOL_VERSION,
    SUBPROTOCOL,
    Direction,
    Header,
    Operation,
)
from shared.wire.incoming import Incoming
from shared.wire.messages import (
    ErrorInfo,
    Fetch,
    Hello,
    Message,
    encode,
)
from shared.wire.protocol import ExecutorProtocol, GroupShape, TenantProtocol

FILE = Path(__file__).with_name("messages.json")
MASK = bytes.fromhex("37fa213d")  # of RFC 6455 §5.7; a real one is random
FLOAT32, INT32 = DTYPE_CODES[torch.float32], DTYPE_CODES[torch.int32]


def fields(header: Header) -> dict[str, int]:
    """A header's fields by name."""
    return {name: int(value) for name, value in header._asdict().items()}


def joined(pieces: Any) -> bytes:
    """All bytes of a message; its pieces may share a buffer."""
    return b"".join(bytes(piece) for piece in pieces)


def fragmented(data: bytes, at: list[int], *, mask: bytes) -> bytes:
    """A message as several frames, with a ping after the first of them."""
    out = b""
    for number, (start, stop) in enumerate(pairwise([0, *at, len(data)])):
        body = bytearray(data[start:stop])
        if mask:
            xor_mask(memoryview(body), mask, memoryview(body))
        opcode = Opcode.CONTINUATION if number else Opcode.BINARY
        out += frame_header(opcode, len(body), mask, fin=stop == len(data)) + body
        if number == 0:
            out += encode_control(Opcode.PING, b"between", mask)
    return out


def message(
    name: str, header: Header, payload: list[torch.Tensor] | Message | bytes, numerics: str = "float32"
) -> dict[str, Any]:
    """One message on the wire, as its sender must send it and the same without mask."""
    from_tenant = header.operation not in (Operation.WELCOME, Operation.REPLY, Operation.ERROR)
    mask = MASK if from_tenant else b""
    content: dict[str, Any]
    if isinstance(payload, Message):
        blocks: list[torch.Tensor] | bytes = encode(payload)
        header = header._replace(rows=1, columns=len(blocks))
        content = {"json": msgspec.to_builtins(payload)}
    elif isinstance(payload, bytes):
        blocks = payload
        content = {"seed": payload.hex()}
    else:
        bits = header.answer_bits if header.truncated else EXACT
        blocks = [take_upper_bits(block, bits) for block in payload]
        shown = [block >> EXACT - bits if header.truncated else block for block in payload]
        content = {"blocks": [{"shape": list(block.shape), "values": block.tolist()} for block in shown]}
    plain = joined(encode_message(header, blocks))
    whole = plain[len(frame_header(Opcode.BINARY, HEADER_BYTES + header.payload_bytes)) :]
    return {
        "name": name,
        "numerics": numerics,
        "sender": "tenant" if from_tenant else "executor",
        "header": fields(header),
        **content,
        "message": whole.hex(),
        "mask": mask.hex(),
        "frame": joined(encode_message(header, blocks, mask)).hex(),
        "frames": fragmented(whole, [10, 32, len(whole) - 1], mask=mask).hex(),
    }


def messages() -> list[dict[str, Any]]:
    """Every operation, direction and dtype."""
    q, k = torch.tensor([[1.0, -2.5, 0.125], [3e38, 1e-45, -0.0]]), torch.tensor([[7.0, 8.0], [9.0, 10.0]])
    x = torch.tensor([[0.1, 0.2, 0.3, 0.4], [-1.0, -2.0, -3.0, -4.0]])
    both = {"dtype": FLOAT32, "group": 0, "rows": 2, "members": 0b11}
    ask, back = Header(Operation.PRODUCT, Direction.FORWARD), Header(Operation.PRODUCT, Direction.BACKWARD)
    made = [
        message("hello", Header(Operation.HELLO, request_id=1), Hello("example/1")),
        message("welcome", Header(Operation.WELCOME, request_id=1), MANIFEST),
        message("forward of two members", ask._replace(request_id=2, columns=4, **both), [x]),
        message(
            "its answer, member by member",
            ask._replace(operation=Operation.REPLY, request_id=2, columns=5, **both),
            [q, k],
        ),
        message("backward of two members", back._replace(request_id=3, columns=5, **both), [q, k]),
        message(
            "its answer",
            back._replace(operation=Operation.REPLY, request_id=3, columns=4, **both),
            [x],
        ),
        message(
            "forward of the second member alone, with the largest id",
            ask._replace(
                request_id=2**32 - 1, columns=4, request_class=1, **(both | {"members": 0b10, "rows": 1})
            ),
            [x[:1]],
        ),
        message(
            "effect of one bfloat16 row",
            Header(Operation.EFFECT, Direction.FORWARD, 2, 1, 4, 1, 3, 1),
            [torch.tensor([[1.5, -3.0, 1e30]], dtype=torch.bfloat16)],
        ),
        message(
            "fetch rows of a parameter",
            Header(Operation.FETCH, request_id=5),
            Fetch("parameter", "model.embed_tokens.weight", 1, 3),
        ),
        message(
            "fetch bytes of a file",
            Header(Operation.FETCH, request_id=6),
            Fetch("file", "config.json", 0, 120),
        ),
        message(
            "error of one request",
            Header(Operation.ERROR, request_id=6),
            ErrorInfo("fetch", "no such parameter or file"),
        ),
        message(
            "error of the connection, with a time to wait",
            Header(Operation.ERROR),
            ErrorInfo("too_large", "gr\u00f6\u00dfer als erlaubt", 2.5),
        ),
        message(
            "a message of 200 bytes has a longer frame header",
            Header(Operation.REPLY, dtype=0, request_id=7, rows=1, columns=168),
            [torch.arange(168, dtype=torch.uint8).reshape(1, 168)],
        ),
    ]
    for dtype_name, dtype in DTYPE_NAMES.items():
        block = torch.tensor([[0, 1, 2], [100, 50, 1]]).to(dtype)
        header = Header(Operation.REPLY, dtype=DTYPE_CODES[dtype], request_id=8, rows=2, columns=3)
        made.append(message(f"a parameter in {dtype_name}", header, [block]))
    return made + ring_messages("ring") + ring_messages("ring-fine")


def ring_messages(numerics: str) -> list[dict[str, Any]]:
    """What differs from floats: every request of products, the manifest, scales."""
    welcome = Header(Operation.WELCOME, request_id=1)
    made = [message(f"{numerics}: welcome", welcome, MANIFESTS[numerics], numerics)]
    for name, operation, direction, members, rows in (
        ("forward of two members", Operation.PRODUCT, Direction.FORWARD, 0b11, INTEGERS),
        ("backward of two members", Operation.PRODUCT, Direction.BACKWARD, 0b11, GRADIENTS),
        ("backward of the second", Operation.EFFECT, Direction.BACKWARD, 0b10, GRADIENTS[:, 3:].contiguous()),
        ("effect of a seed", Operation.SEED_EFFECT, Direction.FORWARD, 0b11, MaskStream(SEED).draw(2, 4)),
    ):
        answer = product(PLANES[numerics], [3, 2], direction, members, rows)
        payload = SEED if operation == Operation.SEED_EFFECT else [rows]
        for bits in ANSWER_BITS:
            ask = Header(operation, direction, INT32, 0, 2, *rows.shape, members, answer_bits=bits)
            reply = ask._replace(operation=Operation.REPLY, columns=answer.shape[1])
            made.append(message(f"{numerics}: {name}, {bits} bits", ask, payload, numerics))
            made.append(message(f"{numerics}: its answer", reply, [answer], numerics))
    fetch = Fetch("scales", "0", 1, 4)
    reply = Header(Operation.REPLY, dtype=FLOAT32, request_id=3, rows=3, columns=1)
    made.append(message(f"{numerics}: fetch scales", Header(Operation.FETCH, request_id=3), fetch, numerics))
    made.append(message(f"{numerics}: scales", reply, [PLANES[numerics].scales[1:4].view(3, 1)], numerics))
    return made


def frame(opcode: Opcode, length: int, mask: bytes, sent: bytes, *, fin: bool = True) -> dict[str, Any]:
    """A frame's header by its fields, and what is sent."""
    return {"opcode": int(opcode), "fin": fin, "length": length, "mask": mask.hex(), "hex": sent.hex()}


def frames() -> list[dict[str, Any]]:
    """Frame headers of every length form, and control frames."""
    made: list[dict[str, Any]] = []
    for length in (0, 125, 126, 65_535, 65_536, 1 << 31, 1 << 33):
        for mask in (b"", MASK):
            for fin in (True, False):
                sent = frame_header(Opcode.BINARY, length, mask, fin=fin)
                made.append(frame(Opcode.BINARY, length, mask, sent, fin=fin))
    for opcode, data in (
        (Opcode.PING, b""),
        (Opcode.PONG, b"same as the ping"),
        (Opcode.PING, bytes(125)),
        (Opcode.CLOSE, (1000).to_bytes(2, "big")),
        (Opcode.CLOSE, (1002).to_bytes(2, "big") + b"protocol_version"),
    ):
        for mask in (b"", MASK):
            sent = encode_control(opcode, data, mask)
            made.append({**frame(opcode, len(data), mask, sent), "data": data.hex()})
    return made


def outcome(accept: Callable[[Header], None], data: bytes, *, masked: bool) -> dict[str, Any]:
    """How the project's reader refuses a stream: code, whether fatal, and the request that it names."""
    reader = MessageReader(accept, masked=masked, max_message_bytes=MANIFEST.limits.max_message_bytes)
    try:
        while data:
            buffer = reader.get_buffer()
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            data = data[count:]
            for event in reader.received(count):
                if isinstance(event, Incoming) and event.error is not None:
                    return {"code": event.error.code, "fatal": False, "request_id": event.header.request_id}
    except WireError as error:
        return {"code": error.code, "fatal": error.fatal, "request_id": 0}
    return {"code": None, "fatal": False, "request_id": 0}


def framed(data: bytes, mask: bytes, *, opcode: int = 2, first: int = 0x80) -> bytes:
    """One frame, whatever its content."""
    body = bytearray(data)
    if mask:
        xor_mask(memoryview(body), mask, memoryview(body))
    start = bytearray(frame_header(Opcode.BINARY, len(data), mask))
    start[0] = first | opcode
    return bytes(start + body)


def several(first: bytes, second: bytes) -> bytes:
    """A tenant's message in two frames."""
    return framed(first, MASK, first=0) + framed(second, MASK, opcode=0)


def changed(data: bytes, at: int, value: int) -> bytes:
    """The same bytes but one."""
    return data[:at] + bytes([value]) + data[at + 1 :]


def refused_requests() -> list[dict[str, Any]]:
    """What an executor with the manifest above refuses, and how."""
    good = Header(Operation.PRODUCT, Direction.FORWARD, FLOAT32, 0, 9, 2, 4, 0b11)
    pack, row = good.pack(), bytes(32)
    fetch = Header(Operation.FETCH, request_id=9, rows=1, columns=2)
    cases: dict[str, bytes] = {
        "good: not refused": framed(pack + row, MASK),
        "unmasked": framed(pack + row, b""),
        "reserved bit": framed(pack + row, MASK, first=0xC0),
        "reserved opcode": framed(pack + row, MASK, opcode=3),
        "text": framed(b"hello", MASK, opcode=1),
        "continuation of nothing": framed(pack + row, MASK, opcode=0),
        "long ping": framed(bytes(126), MASK, opcode=9),
        "fragmented ping": framed(b"", MASK, opcode=9, first=0),
        "a new message inside another": framed(pack, MASK, first=0) * 2,
        "31 bytes": framed(pack[:31], MASK),
        "31 bytes in two frames": several(pack[:9], pack[9:31]),
        "one byte over the limit": frame_header(Opcode.BINARY, 32 + 65_537, MASK),
        "version 0": framed(changed(pack, 0, 0) + row, MASK),
        "version 3": framed(changed(pack, 0, 3) + row, MASK),
        "operation 0": framed(changed(pack, 1, 0) + row, MASK),
        "operation 9": framed(changed(pack, 1, 9) + row, MASK),
        "a seed for floats": framed(changed(pack, 1, 8) + row, MASK),
        "operation of executors": framed(changed(pack, 1, 6) + row, MASK),
        "direction 3": framed(changed(pack, 2, 3) + row, MASK),
        "dtype 8": framed(changed(pack, 3, 8) + row, MASK),
        "request class": framed(changed(pack, 20, 4) + row, MASK),
        "answer bits of floats": framed(changed(pack, 22, 32) + row, MASK),
        "8 answer bits": framed(changed(pack, 22, 8) + row, MASK),
        "direction 0": framed(changed(pack, 2, 0) + row, MASK),
        "dtype that is not offered": framed(changed(pack, 3, 6) + row, MASK),
        "group 3 of 3": framed(changed(pack, 4, 3) + row, MASK),
        "no members": framed(changed(pack, 24, 0) + row, MASK),
        "third member of two": framed(changed(pack, 24, 4) + row, MASK),
        "last member of 64": framed(changed(pack, 31, 0x80) + row, MASK),
        "too narrow": framed(good._replace(columns=3).pack() + row[:24], MASK),
        "backward with the inputs' width": framed(changed(pack, 2, 2) + row, MASK),
        "zero rows": framed(good._replace(rows=0).pack(), MASK),
        "too many rows": framed(good._replace(rows=11).pack() + bytes(176), MASK),
        "an answer over the limit": framed(Header(3, 1, FLOAT32, 2, 9, 2, 2, 1).pack() + bytes(16), MASK),
        "payload one byte short": framed(pack + row[:-1], MASK),
        "payload one byte long": framed(pack + row + b"\0", MASK),
        "gigabytes in one frame": framed(good._replace(rows=2**31).pack() + row, MASK),
        "gigabytes in several": several(good._replace(rows=2**31).pack(), row),
        "2^66 bytes": framed(good._replace(rows=2**32 - 1, columns=2**32 - 1).pack() + row, MASK),
        "frames longer than the header says": several(pack, bytes(33)),
        "frames shorter than the header says": several(pack, bytes(31)),
        "second hello": framed(Header(Operation.HELLO, request_id=9, rows=1, columns=2).pack() + b"{}", MASK),
        "control message of two rows": framed(fetch._replace(rows=2, columns=1).pack() + b"{}", MASK),
        "control message of floats": framed(fetch._replace(dtype=1, columns=1).pack() + bytes(4), MASK),
    }  # fmt: skip
    first = {
        "hello": framed(changed(fetch.pack(), 1, 1) + b"{}", MASK),
        "before hello": framed(pack + row, MASK),
    }
    made = []
    for numerics, greeted, some in (
        ("float32", True, cases),
        ("float32", False, first),
        ("ring", True, refused_by_a_ring()),
        ("ring", False, {"a seed before hello": framed(SEED_EFFECT.pack() + SEED, MASK)}),
    ):
        for name, data in some.items():
            protocol = ExecutorProtocol(MANIFESTS[numerics])
            if greeted:
                protocol.accept(Header(Operation.HELLO, rows=1))
            result = outcome(protocol.accept, data, masked=True)
            made.append({"name": name, "numerics": numerics, "greeted": greeted, "hex": data.hex(), **result})
    return made


SEED_EFFECT = Header(Operation.SEED_EFFECT, Direction.FORWARD, INT32, 0, 9, 2, 4, 0b11, answer_bits=EXACT)


def refused_by_a_ring() -> dict[str, bytes]:
    """What differs from floats."""
    rows = SEED_EFFECT._replace(operation=Operation.PRODUCT)
    wide = SEED_EFFECT._replace(group=2, columns=2, members=1)

    def seeded(length: int = 32, **change: int) -> bytes:
        return framed(SEED_EFFECT._replace(**change).pack() + bytes(length), MASK)

    return {
        "integers: not refused": framed(rows.pack() + bytes(32), MASK),
        "a seed: not refused": seeded(),
        "a seed for the most rows: not refused": seeded(rows=10),
        "a seed for half an effect: not refused": seeded(answer_bits=16),
        "a seed for three quarters of an effect: not refused": seeded(answer_bits=24),
        "integers without answer bits": framed(rows._replace(answer_bits=0).pack() + bytes(32), MASK),
        "a seed without answer bits": seeded(answer_bits=0),
        "a seed for one bit": seeded(answer_bits=1),
        "a seed for 33 bits": seeded(answer_bits=33),
        "floats on a ring": framed(rows._replace(dtype=FLOAT32).pack() + bytes(32), MASK),
        "a seed for floats on a ring": seeded(dtype=FLOAT32),
        "a seed for bytes": seeded(dtype=0),
        "a seed of 31 bytes": seeded(31),
        "a seed of 33 bytes": seeded(33),
        "no seed": seeded(0),
        "a mask for a seed": framed(SEED_EFFECT._replace(rows=3).pack() + bytes(48), MASK),
        "a seed in two frames": several(SEED_EFFECT.pack() + SEED[:5], SEED[5:]),
        "a seed of 31 bytes in two frames": several(SEED_EFFECT.pack(), bytes(31)),
        "a seed of 33 bytes in two frames": several(SEED_EFFECT.pack(), bytes(33)),
        "a seed without rows": seeded(rows=0),
        "a seed for too many rows": seeded(rows=11),
        "a seed for 2^32 - 1 rows": seeded(rows=2**32 - 1),
        "a seed for 2^66 bytes": seeded(rows=2**32 - 1, columns=2**32 - 1),
        "a seed for a mask over the limit": seeded(group=2, direction=2, columns=10_000, members=1),
        "a seed without direction": seeded(direction=0),
        "a seed for no members": seeded(members=0),
        "a seed for a third member of two": seeded(members=4),
        "a seed for an unknown group": seeded(group=3),
        "a seed for too wide a mask": seeded(columns=8),
        "two planes of one row are over the limit": framed(
            wide._replace(operation=Operation.PRODUCT, rows=1).pack() + bytes(8), MASK
        ),
        "two planes of a seed's row are over the limit": framed(wide._replace(rows=1).pack() + SEED, MASK),
    }


def refused_answers() -> list[dict[str, Any]]:
    """What a tenant that waits for one answer refuses; all of it ends the connection."""

    def waiting(operation: Operation, numerics: str) -> tuple[TenantProtocol, Header]:
        protocol = TenantProtocol()
        shape = GroupShape.of(MANIFESTS[numerics].groups[0], numerics)
        dtype = DTYPE_CODES[DTYPE_NAMES[MANIFESTS[numerics].wire_dtypes[0]]]
        request = Header(operation, Direction.FORWARD, dtype, 0, rows=2, members=0b11, answer_bits=EXACT)
        return protocol, protocol.product(request, shape)

    asked = waiting(Operation.PRODUCT, "float32")[1]
    good = asked._replace(operation=Operation.REPLY, columns=5)
    body = bytes(40)
    error = encode(ErrorInfo("group", "no"))
    failed = Header(Operation.ERROR, request_id=1, rows=1, columns=len(error))
    cases: dict[str, bytes] = {
        "the answer: not refused": framed(good.pack() + body, b""),
        "an error: not refused": framed(failed.pack() + error, b""),
        "an error of the connection: not refused": framed(failed._replace(request_id=0).pack() + error, b""),
        "masked": framed(good.pack() + body, MASK),
        "another request's": framed(good._replace(request_id=2).pack() + body, b""),
        "nobody's": framed(good._replace(request_id=0).pack() + body, b""),
        "an error of another request": framed(failed._replace(request_id=2).pack() + error, b""),
        "an error of floats": framed(failed._replace(dtype=1, columns=1).pack() + bytes(4), b""),
        "an error of gigabytes": framed(failed._replace(columns=2**31).pack(), b"", first=0),
        "another group's": framed(good._replace(group=1).pack() + body, b""),
        "the other direction's": framed(good._replace(direction=2).pack() + body, b""),
        "another dtype": framed(good._replace(dtype=6).pack() + body, b""),
        "other members'": framed(good._replace(members=1).pack() + body, b""),
        "one row": framed(good._replace(rows=1).pack() + body[:20], b""),
        "gigabytes": framed(good._replace(rows=2**31).pack(), b"", first=0),
        "a welcome": framed(good._replace(operation=2).pack() + body, b""),
        "a request": framed(good._replace(operation=3).pack() + body, b""),
    }
    fine = asked._replace(operation=Operation.REPLY, dtype=INT32, columns=10)
    fine_cases: dict[str, bytes] = {
        "the answer of a fine ring: not refused": framed(fine.pack() + bytes(80), b""),
        "the product with one plane": framed(fine._replace(columns=5).pack() + body, b""),
        "floats of a ring": framed(fine._replace(dtype=FLOAT32).pack() + bytes(80), b""),
        "half of an answer that was asked for whole": framed(
            fine._replace(answer_bits=16).pack() + body, b""
        ),
        "an answer without bits": framed(fine._replace(answer_bits=0).pack() + bytes(80), b""),
        "a seed from an executor": framed(fine._replace(operation=8).pack() + SEED, b""),
    }
    ring = fine._replace(columns=5)
    ring_cases: dict[str, bytes] = {
        "the answer of a ring: not refused": framed(ring.pack() + body, b""),
        "products with two planes": framed(fine.pack() + bytes(80), b""),
        "floats of a ring of one plane": framed(ring._replace(dtype=FLOAT32).pack() + body, b""),
    }
    made = []
    for operation, numerics, some in (
        (Operation.PRODUCT, "float32", cases),
        (Operation.PRODUCT, "ring", ring_cases),
        (Operation.SEED_EFFECT, "ring", ring_cases),
        (Operation.PRODUCT, "ring-fine", fine_cases),
        (Operation.SEED_EFFECT, "ring-fine", fine_cases),
    ):
        for name, data in some.items():
            protocol, asked = waiting(operation, numerics)
            result = outcome(protocol.accept, data, masked=False)
            made.append(
                {"name": name, "numerics": numerics, "asked": fields(asked), "hex": data.hex(), **result}
            )
    return made


def make() -> str:
    """The whole file."""
    vectors = {
        "protocol_version": PROTOCOL_VERSION,
        "subprotocol": SUBPROTOCOL,
        "manifests": msgspec.to_builtins(MANIFESTS),
        "messages": messages(),
        "frames": frames(),
        "refused_requests": refused_requests(),
        "refused_answers": refused_answers(),
        "masks": masks(),
        "planes": planes(),
        "products": products(),
    }
    lines = []
    for name, value in sorted(vectors.items()):
        if isinstance(value, list):  # a vector a line
            inside = ",\n".join(json.dumps(each, sort_keys=True) for each in value)
            lines.append(f'"{name}": [\n{inside}\n]')
        else:
            lines.append(f'"{name}": {json.dumps(value, sort_keys=True)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(make())
    print(f"wrote {FILE}")
