"""A second tenant: one product on a ring, from the rows to the answer, written from the documents alone.

The documents are ``shared/PROTOCOL.md``, and of ``docs/explanation`` ``privacy.md`` and ``numerics.md``.
Nothing here comes from the product, so that a mistake there is not made here again. It is slow, and has one
way to do each thing. Header, layout and AES are those of ``vectors/check_vectors.py``, which has the same
rule. The ``websockets`` library makes the frames. Left out are the manifest's digest, and the trials of
fingerprints and challenges on other rows, which need nothing that is not here.

Shapes: T rows, D inputs of the group, C columns of the rows (D, or backward the selected members' outputs), P
planes, A columns of the answer on one plane.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import socket
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from vectors import check_vectors as wire
from websockets.client import ClientProtocol
from websockets.datastructures import Headers
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

FORWARD, BACKWARD = 1, 2
EXACT, HALF = 32, {"ring": 16, "ring-fine": 24}  # answer_bits
LARGEST = 2**31 - 1
LARGEST_NORM = 2.0**24  # of a row of integers
MARGIN = 1 + 2.0**-30  # a sum of squares in binary64 depends on the order of the terms
CHALLENGES = 32  # of a half answer
TAIL = 10 * math.log(2)  # a right row is doubted with a probability of 2^-10 at most
DIGIT = 12  # bits of a challenge in one row


class Wrong(Exception):
    """An answer that the checks refuse."""


# -- frame, send, receive --------------------------------------------------------------------------


class Connection:
    """A session with one executor: a TLS socket, and the ``websockets`` library's state machine."""

    def __init__(self, url: str, token: str, ca: Path) -> None:
        at, context = urlsplit(url), ssl.create_default_context(cafile=ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        plain = socket.create_connection((at.hostname, at.port))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = context.wrap_socket(plain, server_hostname=at.hostname)
        self._protocol = ClientProtocol(parse_uri(url), subprotocols=[wire.SUBPROTOCOL], max_size=wire.ANSWER)
        request = self._protocol.connect()
        request.headers.update(Headers({"Authorization": f"Bearer {token}"}))
        self._protocol.send_request(request)
        self._events = self._received()
        next(self._events)
        if self._protocol.handshake_exc:
            raise self._protocol.handshake_exc
        self._request_id = 0
        hello = {"client": "independent tenant"}
        welcome, body = self._ask(wire.HELLO, json.dumps(hello).encode())
        wire.expect(welcome["operation"] == wire.WELCOME, "no WELCOME")
        self.manifest = json.loads(body)

    def close(self) -> None:
        """Say so, and close."""
        self._protocol.send_close(1000)
        self._flush()
        self._socket.close()

    def _flush(self) -> None:
        self._socket.sendall(b"".join(self._protocol.data_to_send()))

    def _received(self) -> Iterator[object]:
        """What comes: the handshake's response, then frames."""
        while True:
            self._flush()
            yield from self._protocol.events_received()
            data = self._socket.recv(65_536)
            if not data:
                raise ConnectionError("the executor has gone")
            self._protocol.receive_data(data)

    def _message(self) -> bytes:
        """The next message, of one frame or several."""
        parts = []
        for frame in self._events:
            assert isinstance(frame, Frame)
            if frame.opcode in (Opcode.BINARY, Opcode.CONT):
                parts.append(bytes(frame.data))
                if frame.fin:
                    return b"".join(parts)
        raise ConnectionError

    def _ask(self, operation: int, payload: bytes, **fields: int) -> tuple[dict[str, int], bytes]:
        """One request and its answer; control messages need no fields."""
        self._request_id += 1
        header = dict.fromkeys(wire.NAMES, 0) | {"rows": 1, "columns": len(payload)}
        header |= {"operation": operation, "request_id": self._request_id} | fields
        packed = wire.HEADER.pack(wire.VERSION, *(header[name] for name in wire.NAMES))
        self._protocol.send_binary(packed + payload)
        self._flush()
        message = self._message()
        answer, body = wire.header_of(message), message[32:]
        wire.expect(len(body) == wire.payload_bytes(answer), "payload_length")
        if operation in wire.PRODUCTS:
            wire.accept_answer(answer, header, self.manifest)
        wire.expect(answer["operation"] != wire.ERROR, body.decode(errors="replace"))
        return answer, body

    def _fetch(self, kind: str, name: str, stop: int) -> tuple[dict[str, int], bytes]:
        """FETCH from 0."""
        what = {"kind": kind, "name": name, "start": 0, "stop": stop}
        header, body = self._ask(wire.FETCH, json.dumps(what).encode())
        wire.expect((header["operation"], header["rows"]) == (wire.REPLY, stop), "FETCH")
        return header, body

    def scales(self, request: Request) -> np.ndarray:
        """s_j of the selected members, float32 [ΣO_m]."""
        members = self.manifest["groups"][request.group]["members"]
        ends = np.cumsum([member["outputs"] for member in members])
        _, body = self._fetch("scales", str(request.group), int(ends[-1]))
        every = np.split(np.frombuffer(body, "<f4"), ends[:-1])
        return np.concatenate([each for i, each in enumerate(every) if request.members >> i & 1])

    def bias(self, name: str) -> np.ndarray:
        """A parameter of float32 with one axis, whose hash is that of the manifest."""
        (told,) = [each for each in self.manifest["parameters"] if each["name"] == name]
        (length,) = told["shape"]
        header, body = self._fetch("parameter", name, length)
        hashed = hashlib.sha256(f"{told['dtype']} {length} ".encode() + body).hexdigest()
        wire.expect((hashed, header["columns"]) == (told["sha256"], 1), "another parameter")
        return np.frombuffer(body, "<f4")

    def product(self, request: Request, operation: int, payload: bytes, bits: int) -> np.ndarray:
        """The numbers of an answer, signed: int64 [T, P A]."""
        fields = {"group": request.group, "direction": request.direction, "members": request.members}
        fields |= {"dtype": wire.CODES["int32"], "rows": request.rows, "columns": request.columns}
        header, body = self._ask(operation, payload, **fields, answer_bits=bits)
        size = bits // 8
        numbers = [int.from_bytes(body[at : at + size], "little") for at in range(0, len(body), size)]
        return signed(np.array(numbers, np.int64).reshape(header["rows"], header["columns"]), bits)


@dataclass(frozen=True)
class Request:
    """A product, or its effect."""

    group: int
    direction: int
    members: int  # bit i: member i
    rows: int
    columns: int

    @classmethod
    def of(cls, manifest: dict, group: int, direction: int, members: int, rows: int) -> Request:
        """With as many columns as the manifest says."""
        header = {"members": members, "direction": direction}
        columns, _ = wire.columns_of(manifest["groups"][group], header, manifest["numerics"])
        return cls(group, direction, members, rows, columns)

    def opposite(self, manifest: dict, rows: int = 1) -> Request:
        """Of the other direction: its columns are those of this one's answer, on one plane."""
        return Request.of(manifest, self.group, BACKWARD + FORWARD - self.direction, self.members, rows)

    def bound(self, manifest: dict) -> int:
        """β²: the largest squared norm of what a row is multiplied with."""
        bounds: list[int] = manifest["groups"][self.group]["bounds"]
        return bounds[self.direction - 1]


def signed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """int64 numbers modulo 2^bits, from −2^(bits−1) to below 2^(bits−1)."""
    half = 1 << (bits - 1)
    return (numbers + half) % (1 << bits) - half


# -- quantise --------------------------------------------------------------------------------------


def step(norm: float, columns: int, bound: int, product_limit: int) -> float:
    """The smallest c = m/16 · 2^p, m from 8 to 15, with (‖x/c‖ + √C/2) β ≤ product_limit."""
    if norm == 0:
        return 2.0**-513
    most = product_limit / math.sqrt(bound) - math.sqrt(columns) / 2 if bound else LARGEST_NORM
    least = norm * (MARGIN / min(most, LARGEST_NORM))
    _, power = math.frexp(least)  # 2^(p-1) <= least < 2^p
    steps = [m / 16 * 2.0**p for p in (power, power + 1) for m in range(8, 16)]
    return min(c for c in steps if c >= least)


def quantise(x: np.ndarray, bound: int, product_limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows [T, C] of float32 as integers int64, and the steps [T] that are never sent."""
    x = x.astype(np.float64)
    steps = np.array([step(math.sqrt(math.fsum(row * row)), x.shape[1], bound, product_limit) for row in x])
    return np.rint(x * (1 / steps)[:, None]).astype(np.int64), steps


def product_limit(bits: int, sources: int) -> int:
    """Exact answers may be as large as an int32; half answers leave one unit free for each source."""
    return LARGEST - (max(1, sources) << (EXACT - bits) if bits < EXACT else 0)


# -- mask, hide ------------------------------------------------------------------------------------


def mask_of(seed: bytes, rows: int, columns: int) -> np.ndarray:
    """int64 [T, C]: the key stream of AES-256 in counter mode."""
    data = wire.mask_bytes(seed, 0, rows * columns)
    return np.frombuffer(data, "<i4").astype(np.int64).reshape(rows, columns)


def hide(rows: np.ndarray, seeds: Sequence[bytes]) -> bytes:
    """The rows under the sum of one mask for each source, modulo 2^32, as they are sent."""
    masked = rows + sum(mask_of(seed, *rows.shape) for seed in seeds)
    return signed(masked, EXACT).astype("<i4").tobytes()


# -- unmask, check ---------------------------------------------------------------------------------


def unmask(answer: np.ndarray, effects: Sequence[np.ndarray], bits: int) -> np.ndarray:
    """The answer's upper bits less those of every effect: int64 [T, P A]."""
    return signed(answer - sum(effects), bits)


def is_exact(revealed: np.ndarray, rows: np.ndarray, z: np.ndarray, fingerprint: np.ndarray) -> bool:
    """u · z = x_q · f modulo 2^64 in every row; numpy's integers wrap around."""
    left = revealed.astype(np.uint64) @ z.astype(np.uint64)
    return bool(np.array_equal(left, rows.astype(np.uint64) @ fingerprint.astype(np.uint64)))


def units(revealed: np.ndarray, bits: int, sources: int) -> np.ndarray:
    """Half answers less the mean of what rounding has added, in units of 2^(32 − bits): float32."""
    unit = 2 ** (EXACT - bits)
    mean = (sources - 1) / 2 * (unit - 1) / unit
    return revealed.astype(np.float32) - np.float32(mean)


def half_limit(z: np.ndarray, sources: int) -> float:
    """T for challenges [J, P A]: Hsu, Kakade and Zhang (2012), theorem 2.1, for e with variance proxy v."""
    v = 1 / 4 + (sources - 1) / 12
    gram = z.astype(np.float64) @ z.astype(np.float64).T
    traces = np.trace(gram), math.sqrt(np.trace(gram @ gram) * TAIL), np.linalg.eigvalsh(gram)[-1] * TAIL
    return float(v * (traces[0] + 2 * traces[1] + 2 * traces[2]))


def doubted(
    revealed: np.ndarray, rows: np.ndarray, z: np.ndarray, f: np.ndarray, bits: int, sources: int
) -> np.ndarray:
    """Which rows of a half answer exceed the limit: Σ_j (u · z_j − x_q · f_j / 2^k)² > T; bool [T].

    Args:
        revealed: differences of upper bits, [T, P A].
        rows: integers [T, C].
        z: challenges [J, P A].
        f: their exact products [J, C].
    """
    t = units(revealed, bits, sources).astype(np.float64) @ z.T - (rows @ f.T) / 2.0 ** (EXACT - bits)
    return np.asarray((t * t).sum(1) > half_limit(z, sources))


# -- one request -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tenant:
    """A provider and mask sources, all connected."""

    provider: Connection
    sources: Sequence[Connection]

    @property
    def manifest(self) -> dict:
        """The provider's."""
        return self.provider.manifest

    @property
    def planes(self) -> int:
        """P."""
        return wire.RINGS[self.manifest["numerics"]]

    def ask(
        self, request: Request, rows: np.ndarray, bits: int, seeds: Sequence[bytes]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """The provider's answer to masked rows, and every source's effect."""
        answer = self.provider.product(request, wire.PRODUCT, hide(rows, seeds), bits)
        pairs = zip(self.sources, seeds, strict=True)
        return answer, [source.product(request, wire.SEED_EFFECT, seed, bits) for source, seed in pairs]

    def product(self, request: Request, rows: np.ndarray, bits: int = EXACT) -> np.ndarray:
        """Integers times the planes under fresh masks, not checked: int64 [T, P A]."""
        seeds = [secrets.token_bytes(wire.SEED) for _ in self.sources]
        return unmask(*self.ask(request, rows, bits, seeds), bits)

    def times_planes(self, request: Request, z: np.ndarray) -> np.ndarray:
        """z [J, P A] times the planes of this request's opposite, modulo 2^64: int64 [J, C].

        A row of a challenge is too long for an exact product. So z goes in digits, z = Σ 2^(12 i) d_i.
        """
        total = np.zeros((len(z), request.columns), np.uint64)
        at = 0
        while z.any():
            digit = signed(z, DIGIT)
            z = (z - digit) >> DIGIT
            for plane, part in enumerate(np.split(digit, self.planes, axis=1)):
                opposite = request.opposite(self.manifest, len(part))
                longest = int((part * part).sum(1).max())
                wire.expect(longest * opposite.bound(self.manifest) <= LARGEST**2, "a digit is too large")
                made = np.split(self.product(opposite, part), self.planes, axis=1)[plane]
                total += made.astype(np.uint64) << np.uint64(at)
            at += DIGIT
        return total.astype(np.int64)

    def exact_challenge(self, request: Request) -> tuple[np.ndarray, np.ndarray]:
        """z, uniform int32 [P A], and its fingerprint modulo 2^64 [C]."""
        columns = self.planes * request.opposite(self.manifest).columns
        z = np.frombuffer(secrets.token_bytes(4 * columns), "<i4").astype(np.int64)
        return z, self.times_planes(request, z[None])[0]

    def half_challenges(self, request: Request) -> tuple[np.ndarray, np.ndarray]:
        """32 vectors of normally distributed numbers times 256, [J, P A], and their products [J, C]."""
        columns = self.planes * request.opposite(self.manifest).columns
        normal = np.random.default_rng(secrets.randbits(256)).standard_normal((CHALLENGES, columns))
        z = np.rint(256 * normal).astype(np.int64)
        return z, self.times_planes(request, z)

    def multiply(
        self,
        request: Request,
        x: np.ndarray,
        bits: int,
        bias: np.ndarray | None = None,
        seeds: Sequence[bytes] = (),
    ) -> np.ndarray:
        """Float rows [T, C] times the frozen weights, checked: float32 [T, A].

        Args:
            request: a request for as many rows.
            x: float32; the blocks of several members side by side.
            bits: of each number of the answer.
            bias: float32 [A], forward.
            seeds: of the masks; none: fresh ones.

        Raises:
            Wrong: the answer.
        """
        scales, sources = self.provider.scales(request), len(self.sources)
        forward = request.direction == FORWARD
        scaled = x if forward else x * scales
        rows, steps = quantise(scaled, request.bound(self.manifest), product_limit(bits, sources))
        seeds = seeds or [secrets.token_bytes(wire.SEED) for _ in self.sources]
        received = self.ask(request, rows, bits, seeds)
        revealed = unmask(*received, bits)
        if bits == EXACT:
            if not is_exact(revealed, rows, *self.exact_challenge(request)):
                raise Wrong("an exact answer")
        elif doubted(revealed, rows, *self.half_challenges(request), bits, sources).any():
            self.compare(request, rows, bits, seeds, received)
        numbers = revealed if bits == EXACT else units(revealed, bits, sources)
        y = reveal(numbers, steps * 2.0 ** (EXACT - bits), scales if forward else None, self.planes)
        return y if bias is None else y + bias

    def compare(
        self,
        request: Request,
        rows: np.ndarray,
        bits: int,
        seeds: Sequence[bytes],
        received: tuple[np.ndarray, list[np.ndarray]],
    ) -> None:
        """Ask for the same bytes with all bits: they must be right, and end like what was received.

        Raises:
            Wrong: they are not.
        """
        answer, effects = self.ask(request, rows, EXACT, seeds)
        if not is_exact(unmask(answer, effects, EXACT), rows, *self.exact_challenge(request)):
            raise Wrong("an exact answer")
        pairs = zip((answer, *effects), (received[0], *received[1]), strict=True)
        if not all(np.array_equal(whole >> (EXACT - bits), upper) for whole, upper in pairs):
            raise Wrong("a half answer")


# -- reveal ----------------------------------------------------------------------------------------


def reveal(numbers: np.ndarray, steps: np.ndarray, scales: np.ndarray | None, planes: int) -> np.ndarray:
    """y = u₁ s c, or (u₂/256 + u₁) s c, in this order: float32 [T, A].

    Args:
        numbers: int64, or float32 of half answers, [T, P A].
        steps: float64 [T], times 2^(32 − bits).
        scales: float32 [A], or None backward, where they went into the rows.
        planes: P.
    """
    rows = []
    for row, step in zip(numbers, steps, strict=True):
        ordinary = abs(math.frexp(step)[1]) < 64  # binary32 has such steps, and their products with scales
        number = np.float32 if ordinary else np.float64
        first, *second = np.split(row.astype(number), planes)
        y = second[0] * number(1 / 256) + first if second else first
        y = y if scales is None else y * scales.astype(number)
        rows.append((y * number(step)).astype(np.float32))
    return np.array(rows)
