"""Check ``messages.json`` against the protocol as ``shared/PROTOCOL.md`` tells it.

Written from that text, RFC 6455 and FIPS 197 (AES) with the standard library alone, so that a mistake
in the project's code is not repeated here. ``python tests/vectors/check_vectors.py [FILE]`` prints what is
wrong and exits with 1, or prints how many vectors are right.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from pathlib import Path

VERSION = 4
SUBPROTOCOL = "symbiosis.v4"
RINGS = {"ring": 1, "ring-fine": 2}  # planes of a weight
LARGEST = 127 * 256 + 127
HEADER = struct.Struct("<BBBBIIIIHHQ")
NAMES = ["operation", "direction", "dtype", "group", "request_id", "rows", "columns"]
NAMES += ["request_class", "answer_bits", "members"]
HELLO, WELCOME, PRODUCT, EFFECT, FETCH, REPLY, ERROR, SEED_EFFECT = range(1, 9)
REQUESTS = (HELLO, PRODUCT, EFFECT, FETCH, SEED_EFFECT)
PRODUCTS = (PRODUCT, EFFECT, SEED_EFFECT)
FORWARD = 1
SEED = 32
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
    header = dict(zip(NAMES, values[1:], strict=True))
    if values[0] != VERSION:
        raise Refused("protocol_version", fatal=True)
    checks = {
        "operation": 1 <= header["operation"] <= 8,
        "direction": header["direction"] <= 2,
        "dtype": header["dtype"] in DTYPES,
        "request_class": header["request_class"] <= (3 if values[1] in PRODUCTS else 0),
        "answer_bits": header["answer_bits"]
        in ((0, 16, 24, 32) if values[1] in (*PRODUCTS, REPLY) else (0,)),
    }
    for code, right in checks.items():
        if not right:
            raise Refused(code, request_id=header["request_id"])
    return header


def payload_bytes(header: dict[str, int]) -> int:
    """Python integers do not overflow."""
    if header["operation"] == SEED_EFFECT:
        return SEED
    size = DTYPES[header["dtype"]][1]
    if header["operation"] == REPLY and header["answer_bits"]:
        size = header["answer_bits"] // 8
    return header["rows"] * header["columns"] * size


def columns_of(group: dict, header: dict[str, int], numerics: str) -> tuple[int, int]:
    """Of a product's request and of its answer."""
    outputs = sum(m["outputs"] for i, m in enumerate(group["members"]) if header["members"] >> i & 1)
    asked, answered = group["inputs"], outputs
    if header["direction"] != FORWARD:
        asked, answered = answered, asked
    return asked, RINGS.get(numerics, 1) * answered


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
    check(operation in REQUESTS, "operation")
    check(operation != SEED_EFFECT or manifest["numerics"] in RINGS, "operation")
    if operation in (HELLO, FETCH):
        check(header["dtype"] == 0 and header["rows"] == 1, "control_message")
        check(payload_bytes(header) <= REQUEST_CONTROL, "too_large")
        return
    check(header["group"] < len(manifest["groups"]), "group")
    check(header["direction"] in (1, 2), "direction")
    check(DTYPES[header["dtype"]][0] in manifest["wire_dtypes"], "dtype")
    check(bool(header["answer_bits"]) == (manifest["numerics"] in RINGS), "answer_bits")
    group = manifest["groups"][header["group"]]
    check(0 < header["members"] < 2 ** len(group["members"]), "members")
    columns = columns_of(group, header, manifest["numerics"])
    check(header["columns"] == columns[0], "width")
    check(header["rows"] > 0, "zero_rows")
    limits, itemsize = manifest["limits"], DTYPES[header["dtype"]][1]
    check(header["rows"] <= limits["max_rows"], "too_large")
    row = max(columns[0] * itemsize, columns[1] * (header["answer_bits"] or 8 * itemsize) // 8)
    check(header["rows"] * row <= limits["max_message_bytes"], "too_large")


def accept_answer(header: dict[str, int], asked: dict[str, int], manifest: dict) -> None:
    """The checks of a tenant that waits for the answer to one product."""
    columns = columns_of(manifest["groups"][asked["group"]], asked, manifest["numerics"])[1]
    if header["operation"] == ERROR:
        known = header["request_id"] in (0, asked["request_id"])
        right = known and header["dtype"] == 0 and payload_bytes(header) <= REQUEST_CONTROL
    else:
        right = header == asked | {"operation": REPLY, "columns": columns, "request_class": 0}
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


# -- AES-256 in counter mode -----------------------------------------------------------------------


def twice(byte: int) -> int:
    """Multiplication by x in GF(2^8), FIPS 197 §4.2."""
    return (byte << 1 ^ (0x11B if byte & 0x80 else 0)) & 0xFF


def make_sbox() -> list[int]:
    """§5.1.1: the inverse in GF(2^8), then an affine map."""
    powers = [1]  # of 3, which are all but 0
    while len(powers) < 255:
        powers.append(powers[-1] ^ twice(powers[-1]))
    box = [0x63] * 256
    for i, power in enumerate(powers):
        inverse = powers[-i % 255]
        turned = (inverse << 8 | inverse) >> 4
        box[power] = (inverse ^ turned ^ turned >> 1 ^ turned >> 2 ^ turned >> 3) & 0xFF ^ 0x63
    return box


SBOX = make_sbox()


def expand_key(key: bytes) -> list[bytes]:
    """§5.2: 15 round keys of a key of 32 bytes."""
    words, constant = [key[at : at + 4] for at in range(0, 32, 4)], 1
    while len(words) < 60:
        word = words[-1]
        if len(words) % 8 == 0:
            word = bytes(SBOX[b] for b in word[1:] + word[:1])
            word, constant = bytes([word[0] ^ constant]) + word[1:], twice(constant)
        elif len(words) % 8 == 4:
            word = bytes(SBOX[b] for b in word)
        words.append(bytes(a ^ b for a, b in zip(word, words[-8], strict=True)))
    return [b"".join(words[at : at + 4]) for at in range(0, 60, 4)]


def encrypt(block: bytes, keys: list[bytes]) -> bytes:
    """§5.1: one block of 16 bytes, column after column."""
    state = [a ^ b for a, b in zip(block, keys[0], strict=True)]
    for number, key in enumerate(keys[1:], 1):
        state = [SBOX[state[at * 5 % 16]] for at in range(16)]  # and the rows are shifted
        if number < 14:
            mixed = []
            for at in range(0, 16, 4):
                a = state[at : at + 4]
                every = a[0] ^ a[1] ^ a[2] ^ a[3]
                mixed += [a[i] ^ every ^ twice(a[i] ^ a[(i + 1) % 4]) for i in range(4)]
            state = mixed
        state = [a ^ b for a, b in zip(state, key, strict=True)]
    return bytes(state)


def mask_bytes(seed: bytes, start: int, count: int) -> bytes:
    """``count`` integers of a seed's mask, from the one at ``start``."""
    first, last = start // 4, -(-(start + count) // 4)
    keys = expand_key(seed)
    stream = b"".join(encrypt(at.to_bytes(16, "big"), keys) for at in range(first, last))
    return stream[4 * (start - 4 * first) :][: 4 * count]


# -- the ring --------------------------------------------------------------------------------------


def plane_of_norm(weight: list[list[float]], norm: float) -> tuple[list[list[int]], list[float]]:
    """One plane, whose rows have this norm, and the scales."""
    plane, scales = [], []
    for row in weight:
        unit = max(abs(w) for w in row) / LARGEST
        squares = sum(round(w / unit) ** 2 for w in row) if unit else 0
        scale = unit * math.sqrt(squares) / norm
        (rounded,) = struct.unpack("<f", struct.pack("<f", scale))
        plane.append([min(LARGEST, max(-LARGEST, round(w / scale))) if rounded else 0 for w in row])
        scales.append(rounded)
    return plane, scales


def one_plane_of(weight: list[list[float]]) -> tuple[list[list[list[int]]], list[float]]:
    """The plane of numerics ``ring``, in a list, and the scales."""
    plane, scales = plane_of_norm(weight, LARGEST)
    share = max(dot(v, v) for v in transposed(plane)) / LARGEST**2
    share = 2 * min(share, 4 * len(weight) / len(weight[0]))
    norm = 2**15 * math.sqrt(2 * math.sqrt(2 / (1 + share * 2 * len(weight) / len(weight[0]))))
    if norm < LARGEST:
        plane, scales = plane_of_norm(weight, norm)
    return [plane], scales


def planes_of(weight: list[list[float]]) -> tuple[list[list[list[int]]], list[float]]:
    """Those of ``ring-fine``; Python's floats are binary64 and ``round`` goes to even."""
    first, second, scales = [], [], []
    for row in weight:
        scale = max(abs(w) for w in row) / 127
        (rounded,) = struct.unpack("<f", struct.pack("<f", scale))
        ratios = [w / scale if rounded else 0.0 for w in row]
        first.append([round(r) for r in ratios])
        second.append([min(127, max(-128, round(256 * (r - round(r))))) for r in ratios])
        scales.append(rounded)
    return [first, second], scales


def dot(a: list[int], b: list[int]) -> int:
    """The product of two vectors."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def transposed(rows: list[list[int]]) -> list[list[int]]:
    """Columns for rows."""
    return [list(column) for column in zip(*rows, strict=True)]


def check_mask(vector: dict, _: dict) -> None:
    """The integers of a seed."""
    seed, start = bytes.fromhex(vector["seed"]), vector["start"]
    if "values" in vector:
        values = vector["values"]
        expect(mask_bytes(seed, start, len(values)) == struct.pack(f"<{len(values)}i", *values), "values")
    else:
        data = mask_bytes(seed, start, vector["count"])
        expect(hashlib.sha256(data).hexdigest() == vector["sha256"], "sha256")


def check_planes(vector: dict, _: dict) -> None:
    """Planes, scales and bounds of a weight."""
    planes, scales = (one_plane_of if vector["numerics"] == "ring" else planes_of)(vector["weight"])
    expect(planes == vector["planes"], "planes")
    expect(scales == vector["scales"], "scales")
    bounds = [
        max(dot(v, v) for plane in planes for v in plane),
        max(dot(v, v) for plane in planes for v in transposed(plane)),
    ]
    expect(bounds == vector["bounds"], "bounds")


def check_product(vector: dict, vectors: dict) -> None:
    """An answer, modulo 2^32."""
    chosen, at = [], 0
    for i, outputs in enumerate(vector["outputs"]):
        if vector["members"] >> i & 1:
            chosen += range(at, at + outputs)
        at += outputs
    planes = [[plane[j] for j in chosen] for plane in vectors["planes"][vector["weight"]]["planes"]]
    if vector["direction"] != FORWARD:
        planes = [transposed(plane) for plane in planes]
    answer = [[dot(row, w) for plane in planes for w in plane] for row in vector["rows"]]
    wrapped = [[(n + 2**31) % 2**32 - 2**31 for n in row] for row in answer]
    expect(wrapped == vector["answer"], "answer")
    for bits, upper in vector["upper"].items():
        expect([[n >> 32 - int(bits) for n in row] for row in wrapped] == upper, f"upper {bits} bits")


# -- the vectors -----------------------------------------------------------------------------------


def element(value: float, dtype: int) -> bytes:
    """One element as it is on the wire."""
    _, _, how = DTYPES[dtype]
    return struct.pack("<" + how, value) if how else struct.pack("<f", value)[2:]


def check_message(vector: dict, vectors: dict) -> None:
    """Its bytes, its frame and its fragments are those of its fields and values."""
    manifest = vectors["manifests"][vector["numerics"]]
    message = bytes.fromhex(vector["message"])
    header = header_of(message)
    expect(header == vector["header"], "header")
    payload = message[32:]
    expect(len(payload) == payload_bytes(header), "length")
    from_tenant = header["operation"] in REQUESTS
    expect(vector["sender"] == ("tenant" if from_tenant else "executor"), "sender")
    if "json" in vector:
        expect(json.loads(payload) == vector["json"], "json")
        expect((header["rows"], header["dtype"]) == (1, 0), "control message")
    elif "seed" in vector:
        expect(header["operation"] == SEED_EFFECT and payload.hex() == vector["seed"], "seed")
    else:
        bits = header["answer_bits"] if header["operation"] == REPLY else 0
        values = b"".join(
            value.to_bytes(bits // 8, "little", signed=True) if bits else element(value, header["dtype"])
            for block in vector["blocks"]
            for row in block["values"]
            for value in row
        )
        expect(values == payload, "values")
        expect(all(block["shape"][0] == header["rows"] for block in vector["blocks"]), "rows")
        expect(sum(block["shape"][1] for block in vector["blocks"]) == header["columns"], "columns")
        expect(len(vector["blocks"]) == 1 or vector["numerics"] not in RINGS, "a ring has no blocks")
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


def check_frame(vector: dict, _: dict) -> None:
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


def check_outcome(vector: dict, vectors: dict) -> None:
    """How a stream is refused, if it is."""
    got = outcome(vector, vectors["manifests"][vector["numerics"]])
    expect(got == (vector["code"], vector["fatal"], vector["request_id"]), f"gives {got}")


def digest(manifest: dict) -> str:
    """Of all that a tenant downloads, and of the weights."""
    members = [
        [
            member["name"],
            member["tensor"],
            member.get("transposed", False),
            group["inputs"],
            member["outputs"],
        ]
        for group in manifest["groups"]
        if not group.get("head", False)
        for member in group["members"]
    ]
    what = [
        *(manifest[name] for name in ("weights", "architecture", "base_prefix")),
        sorted(members),
        sorted([p["name"], p["dtype"], p["shape"], p["sha256"]] for p in manifest["parameters"]),
        sorted([f["name"], f["size"], f["sha256"]] for f in manifest["files"]),
    ]
    text = json.dumps(what, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


CHECKS = {
    "messages": check_message,
    "frames": check_frame,
    "refused_requests": check_outcome,
    "refused_answers": check_outcome,
    "masks": check_mask,
    "planes": check_planes,
    "products": check_product,
}


def check(vectors: dict) -> tuple[int, list[str]]:
    """How many vectors there are, and what is wrong with them."""
    wrong, count = [], 0
    if (vectors["protocol_version"], vectors["subprotocol"]) != (VERSION, SUBPROTOCOL):
        wrong.append("another version")
    for name, manifest in vectors["manifests"].items():
        if manifest["digest"] != digest(manifest):
            wrong.append(f"manifest {name}: another digest")
    for kind, check_one in CHECKS.items():
        expect(vectors[kind], f"no {kind}")
        for number, vector in enumerate(vectors[kind]):
            count += 1
            name = f"{kind}[{number}] {vector.get('name', '')}"
            try:
                check_one(vector, vectors)
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
