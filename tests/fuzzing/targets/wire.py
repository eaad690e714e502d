"""What comes over a network: the handshake, frames, headers and control messages, at both ends."""

from __future__ import annotations

import json
import logging
import math
import select
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from fuzzing.oracle import ROOT, Finding, Target
from provider.engine.engine import Completion
from provider.engine.loop import READ
from provider.serve.admission import Identity, identify
from provider.serve.handshake import HANDSHAKE_ERRORS, _upgrade
from provider.serve.websocket_connection import WebsocketConnection
from provider.session.tenant import Service, TenantSession
from shared.errors import SymbiosisError, WireError
from shared.wire.frames import MessageReader, Opcode, encode_control, encode_message, frame_header
from shared.wire.header import HEADER_BYTES, Direction, Header, Operation, RequestClass, parse_header
from shared.wire.messages import ErrorInfo, Fetch, Hello, Manifest, Message, decode, digest_of, encode
from shared.wire.protocol import ExecutorProtocol, GroupShape, TenantProtocol, validate_manifest
from tenant_sdk.connection.channel import Channel, ResponseFuture
from tenant_sdk.connection.handshake import upgrade
from tenant_sdk.connection.websocket_channel import MAX_ANSWER_BYTES, WebsocketChannel

_MASK = bytes.fromhex("37fa213d")
_KINDS: tuple[type[Message], ...] = (Hello, Fetch, ErrorInfo, Manifest)
_SLICES = (1, 7, 100, 1 << 14)  # bytes that arrive together
_TOKEN = "a-token-of-this-fuzzer"


@cache
def vectors() -> Any:
    """The byte-exact examples of the protocol's document."""
    return json.loads((ROOT / "tests" / "vectors" / "messages.json").read_bytes())


@cache
def manifest(numerics: str = "ring") -> Manifest:
    """That of the vectors."""
    return msgspec.convert(vectors()["manifests"][numerics], Manifest)


class _Socket:
    """A TLS socket with what a peer has sent; writing goes nowhere.

    The first byte of an input says in which slices it arrives.
    """

    def __init__(self, data: bytes) -> None:
        self._size, self.left, self.sent = _SLICES[data[0] % len(_SLICES)] if data else 1, data[1:], b""

    def recv_into(self, buffer: memoryview) -> int:
        piece = self.left[: min(self._size, len(buffer))]
        buffer[: len(piece)] = piece
        self.left = self.left[len(piece) :]
        return len(piece)

    def recv(self, size: int) -> bytes:
        data = bytearray(min(size, 1 << 14))
        return bytes(data[: self.recv_into(memoryview(data))])

    def discard(self) -> int:
        return len(self.recv(1 << 14))

    def send(self, data: bytes | memoryview) -> int:
        self.sent += bytes(data)
        return len(data)

    sendall = send
    unsent = unread = 0

    def flush(self) -> int:
        return 0

    def pending(self) -> int:
        return len(self.left)

    def gettimeout(self) -> float:
        return 600.0

    def fileno(self) -> int:
        return 0

    def _nothing(self, *_: Any) -> None:
        pass

    settimeout = setblocking = unwrap = shutdown = close = _nothing


# -- headers and control messages ------------------------------------------------------------------


def header(data: bytes) -> None:
    """A header that is read is written as it was."""
    data = data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
    found = parse_header(data)
    if found.pack() != data:
        raise Finding("the header would be written otherwise")
    if found.payload_bytes != math.prod(found.payload_shape) * found.payload_dtype.itemsize:
        raise Finding("the payload has another size than its tensor")


def control_message(data: bytes) -> None:
    """A message that is read is written so that it is read as the same."""
    kind = _KINDS[data[0] % len(_KINDS)] if data else Hello
    found = decode(data[1:], kind)
    if decode(encode(found), kind) != found:
        raise Finding("the message would be another")


def manifest_message(data: bytes) -> None:
    """A manifest that a tenant accepts: all that is computed from it stays within bounds."""
    found = decode(data, Manifest)
    found = msgspec.structs.replace(found, digest=digest_of(found))
    validate_manifest(found)
    for info in found.groups:
        shape = GroupShape.of(info, found.numerics)
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            shape.widths(direction, (1 << len(info.members)) - 1)
    for parameter in found.parameters:
        rows, columns = parameter.rows
        if rows * columns != math.prod(parameter.shape):
            raise Finding("the parameter has another size than its rows")
    ExecutorProtocol(found)
    if decode(encode(found), Manifest) != found:
        raise Finding("the manifest would be another")


# -- frames ----------------------------------------------------------------------------------------


def executor_frames(data: bytes) -> None:
    """Frames that an executor reads: valid messages, or a fatal error; nothing large is allocated."""
    limits = manifest().limits
    _read(data, ExecutorProtocol(manifest()).accept, masked=True, most=limits.max_message_bytes)


def tenant_frames(data: bytes) -> None:
    """The same of a tenant that waits for answers."""
    _read(data, _asked(TenantProtocol()).accept, masked=False, most=MAX_ANSWER_BYTES)


def _asked(protocol: TenantProtocol) -> TenantProtocol:
    """Waits for a welcome, products with answers of all widths, and a part of a file."""
    protocol.control(Operation.HELLO, 20, Header(Operation.WELCOME, rows=1))
    shape = GroupShape.of(manifest().groups[0], manifest().numerics)
    for bits in (16, 24, 32):
        asked = Header(Operation.PRODUCT, Direction.FORWARD, 6, rows=2, members=3, answer_bits=bits)
        protocol.product(asked, shape)
    protocol.control(Operation.FETCH, 30, Header(Operation.REPLY, rows=1, columns=120))
    return protocol


def _read(data: bytes, accept: Callable[[Header], None], *, masked: bool, most: int) -> None:
    taken = 0

    def allocate(given: Header) -> torch.Tensor:
        nonlocal taken
        taken = max(taken, given.payload_bytes)
        return torch.empty(given.payload_shape, dtype=given.payload_dtype)

    reader = MessageReader(accept, masked=masked, max_message_bytes=most, allocate=allocate)
    sock = _Socket(data)
    while sock.left:
        for event in reader.received(sock.recv_into(reader.get_buffer())):
            payload, error = getattr(event, "payload", None), getattr(event, "error", None)
            if error is not None and error.fatal:
                raise Finding("a fatal error that does not end the connection")
            if payload is not None and payload.nbytes != event.header.payload_bytes:
                raise Finding("the payload has another size than its header says")
    if taken > most:
        raise Finding(f"{taken} bytes were allocated, and {most} are the most")


class _Loop:
    """Of an executor: calls what was put off, one after the other; no time passes."""

    closed = False

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()
        self.call_soon_threadsafe = self.calls.append
        self.waits = 0

    def modify(self, _: int, events: int) -> None:
        self.waits = events

    def register(self, _: int, ready: Callable[[int], None]) -> None:
        self.ready, self.waits = ready, READ

    def nothing(self, *_: Any) -> None:
        pass

    call_later = call_later_weak = unregister = nothing

    def run_in_time_slice(self, _: str, __: float, read: Callable[[float], None]) -> None:
        self.calls.append(lambda: read(math.inf))


class _Engine:
    """Answers each product with zeros, later."""

    def __init__(self) -> None:
        self.loop, self.protocol = _Loop(), ExecutorProtocol(manifest())

    def submit(self, _: str, __: int, header: Header, ___: torch.Tensor, done: Callable[[Any], None]) -> None:
        answer = self.protocol.answer(header)
        tensor = torch.zeros(answer.payload_shape, dtype=answer.payload_dtype)
        self.loop.call_soon_threadsafe(lambda: done(Completion([tensor], RequestClass.DECODE, 0.0, 0.0)))

    def session_ended(self, *_: Any) -> None:
        pass

    def defer(self, _: Any) -> None:
        pass


class _Errors(logging.Handler):
    """What the executor logs of its own failures is a finding."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        raise Finding(f"the executor failed: {record.getMessage()}") from error


@contextmanager
def _failures_found() -> Iterator[None]:
    """Have failures of the executor be findings, and all else that it logs be lost."""
    logs = [logging.getLogger(name) for name in ("provider.session.tenant", "provider.serve.connection")]
    before = [(log.level, log.propagate) for log in logs]
    handler = _Errors(logging.ERROR)
    for log in logs:
        log.addHandler(handler)
        log.setLevel(logging.ERROR)
        log.propagate = False
    try:
        yield
    finally:
        for log, (level, propagate) in zip(logs, before, strict=True):
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagate


def websocket_connection(data: bytes) -> None:
    """A whole connection of an executor, without a socket, until the tenant has left."""
    with _failures_found():
        _websocket_connection(data)


def _websocket_connection(data: bytes) -> None:
    engine, sock = _Engine(), _Socket(data)
    metrics: Any = _Anything()
    catalog: Any = SimpleNamespace(fetch=_fetch)
    served: Any = SimpleNamespace(catalog=catalog, manifest=manifest())
    downloads: Any = _Anything()
    service = Service(served, engine, metrics, downloads=downloads)  # type: ignore[arg-type]

    def opened(tenant: str, send: Any, peer: str) -> TenantSession:
        return TenantSession(service, tenant, send, peer)

    tls: Any = sock
    connection = WebsocketConnection(tls, Identity("alice", ""), "somewhere", opened, 65_536, 16)
    ended: list[bool] = []
    connection.start(engine.loop, lambda: ended.append(True))  # type: ignore[arg-type]
    for _ in range(4 * len(data) + 100):
        if ended:
            return
        if engine.loop.calls:
            engine.loop.calls.popleft()()
        else:
            engine.loop.ready(READ if sock.left or engine.loop.waits & READ else select.EPOLLHUP)
    raise Finding("the connection does not end")


class _Anything:
    """Has everything, and does nothing."""

    def __getattr__(self, _: str) -> Any:
        return self

    def __call__(self, *_: Any) -> Any:
        return self


def _fetch(asked: Fetch, request_id: int) -> tuple[Header, Callable[[], torch.Tensor]]:
    if not 0 <= asked.start < asked.stop <= 120:
        raise WireError("range", "there is no such part")
    columns = asked.stop - asked.start
    answer = Header(Operation.REPLY, request_id=request_id, rows=1, columns=columns)
    return answer, lambda: torch.zeros((1, columns), dtype=torch.uint8)


def tenant_channel(data: bytes) -> None:
    """A whole channel of a tenant, without a socket, until the executor has left."""
    channel = WebsocketChannel.__new__(WebsocketChannel)
    Channel.__init__(channel, "wss://executor", 600.0)
    sock: Any = _Socket(data)
    channel._sock, channel._entropy = sock, lambda count: _MASK
    _asked(channel._protocol)
    channel._reader = MessageReader(
        channel._protocol.accept, masked=False, max_message_bytes=MAX_ANSWER_BYTES
    )
    channel._pending = {number: ResponseFuture() for number in range(1, 6)}
    while True:  # until ConnectionLost, which says that nothing is left
        channel._read()


# -- the handshake ---------------------------------------------------------------------------------


class _ServerSocket(_Socket):
    def recv(self, size: int) -> bytes:
        if size == 1 and not self.left:  # does anything follow the request?
            raise ssl.SSLWantReadError
        return super().recv(size)


def upgrade_of_tenant(data: bytes) -> None:
    """What a tenant sends before it is admitted: refused, or admitted, and only with the token."""
    tokens: Any = SimpleNamespace(tenant_of=lambda token: "alice" if token == _TOKEN else None)
    sock: Any = _ServerSocket(data)
    _upgrade(sock, lambda token: identify(token, tokens), math.inf)
    if _TOKEN.encode() not in data or not sock.sent.startswith(b"HTTP/1.1 101 "):
        raise Finding("somebody was admitted")


class _ClientSocket(_Socket):
    """Puts the key's hash, which a client wants to see, where an input has ``ACCEPT``."""

    def sendall(self, data: bytes) -> int:
        from websockets.utils import accept_key

        for line in data.split(b"\r\n"):
            if line.lower().startswith(b"sec-websocket-key: "):
                key = line.split(b": ")[1].decode()
                self.left = self.left.replace(b"ACCEPT", accept_key(key).encode())
        return len(data)


def upgrade_of_executor(data: bytes) -> None:
    """What an executor answers to the handshake."""
    sock: Any = _ClientSocket(data)
    upgrade(sock, "wss://localhost:8765", _TOKEN)


# -- seeds -----------------------------------------------------------------------------------------


def _sliced(*streams: bytes) -> list[bytes]:
    """Streams as an input has them, in slices of all sizes by turns."""
    return [bytes([at % len(_SLICES)]) + stream for at, stream in enumerate(streams)]


def _header_seeds() -> list[bytes]:
    return [Header(operation, 1, 1, 0, 1, 2, 3, 1).pack() for operation in Operation] + [
        Header(Operation.PRODUCT, 2, 6, 1, 7, 2, 3, 3, 3, 16).pack(),
        Header(Operation.REPLY, 1, 6, 1, 7, 2, 3, 3, 0, 24).pack(),
    ]


def _control_seeds() -> list[bytes]:
    messages = [
        Hello("x/1"),
        Fetch("file", "config.json", 0, 10),
        ErrorInfo("busy", "Wait.", 0.5),
        manifest(),
    ]
    return [bytes([kind]) + encode(message) for kind, message in enumerate(messages)]


def _manifest_seeds() -> list[bytes]:
    of_part = msgspec.structs.replace(manifest("ring-fine"), part=(0, 2), recorded=True)
    return [encode(manifest(name)) for name in ("float32", "ring")] + [encode(of_part)]


def _requests() -> list[bytes]:
    hello, fetch = encode(Hello("x/1")), encode(Fetch("file", "config.json", 0, 10))
    product = Header(Operation.PRODUCT, 1, 6, 0, 2, 1, 4, 3, 1, 16)
    messages = [
        (Header(Operation.HELLO, request_id=1, rows=1, columns=len(hello)), hello),
        (product, bytes(product.payload_bytes)),
        (Header(Operation.SEED_EFFECT, 1, 6, 0, 3, 2, 4, 3, 3, 32), bytes(32)),
        (Header(Operation.FETCH, request_id=4, rows=1, columns=len(fetch)), fetch),
    ]
    together = [b"".join(map(bytes, encode_message(*message, _MASK))) for message in messages]
    ping = encode_control(Opcode.PING, b"x", _MASK)
    cut = frame_header(Opcode.BINARY, 4, bytes(4), fin=False) + product.pack()[:4]
    cut += frame_header(Opcode.CONTINUATION, 28 + 16, bytes(4)) + product.pack()[4:] + bytes(16)
    end = encode_control(Opcode.CLOSE, b"\3\xe8", _MASK)
    return _sliced(
        *(together[0] + each for each in together), b"".join(together) + end, together[0] + ping + cut
    )


def _answers() -> list[bytes]:
    refused = encode(ErrorInfo("overloaded", "Wait.", 0.5))
    welcome = encode(manifest())
    messages = [
        (Header(Operation.WELCOME, request_id=1, rows=1, columns=len(welcome)), welcome),
        *(
            (answer, bytes(answer.payload_bytes))
            for answer in (
                Header(Operation.REPLY, 1, 6, 0, 2 + at, 2, 5, 3, 0, bits)
                for at, bits in enumerate((16, 24, 32))
            )
        ),
        (Header(Operation.REPLY, request_id=5, rows=1, columns=120), bytes(120)),
        (Header(Operation.ERROR, request_id=2, rows=1, columns=len(refused)), refused),
        (Header(Operation.ERROR, rows=1, columns=len(refused)), refused),
    ]
    together = [b"".join(map(bytes, encode_message(*message))) for message in messages]
    pings = encode_control(Opcode.PING, b"x") + encode_control(Opcode.PONG)
    end = encode_control(Opcode.CLOSE, (1013).to_bytes(2, "big") + b"no room")
    return _sliced(*together, pings + b"".join(together[:5]) + end)


def _upgrade_requests() -> list[bytes]:
    lines = (
        "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        "Sec-WebSocket-Protocol: symbiosis.v4\r\n"
    )
    good = f"{lines}Authorization: Bearer {_TOKEN}\r\n\r\n".encode()
    return _sliced(good, f"{lines}\r\n".encode(), good + b"early", b"GET / HTTP/1.1\r\n\r\n")


def _upgrade_answers() -> list[bytes]:
    good = (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: ACCEPT\r\nSec-WebSocket-Protocol: symbiosis.v4\r\n\r\n"
    )
    found = []
    for status, code in ((401, "unauthorized"), (400, "protocol_version"), (503, "overloaded")):
        body = encode(ErrorInfo(code, "Wait.", 1.0))
        found.append(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
    chunked = b"HTTP/1.1 503 X\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nWait\r\n0\r\n\r\n"
    return _sliced(good, good.replace(b"symbiosis.v4", b"x"), *found, chunked)


_JSON_WORDS = (b'"', b"{", b"[", b"null", b"-1", b"1e400", b"\\ud800", b"\xff", b"9" * 30)
_HTTP_WORDS = (b"\r\n", b"\r\n\r\n", b": ", b"Content-Length: ", b"Transfer-Encoding: chunked", b"\n", b",")
_HTTP_WORDS += (b"Authorization: Bearer ", _TOKEN.encode(), b"Sec-WebSocket-Extensions: permessage-deflate")
_HEADER = ("shared/wire/header.py",)
_FRAMES = ("shared/wire/frames.py", "shared/wire/incoming.py", "shared/wire/protocol.py", *_HEADER)
TARGETS: Sequence[Target] = (
    Target("header", header, _header_seeds, _HEADER),
    Target(
        *("control_message", control_message, _control_seeds, ("shared/wire/messages.py",)),
        words=_JSON_WORDS,
    ),
    Target(
        *("manifest", manifest_message, _manifest_seeds),
        ("shared/wire/messages.py", "shared/wire/protocol.py"),
        words=(*_JSON_WORDS, b'"expert"', b'"bounds"', b'"part"', b'"float16"', b"2147483647"),
    ),
    Target("executor_frames", executor_frames, _requests, _FRAMES),
    Target("tenant_frames", tenant_frames, _answers, _FRAMES),
    Target(
        *("websocket_connection", websocket_connection, _requests),
        (
            "provider/serve/websocket_connection.py",
            "provider/serve/write_queue.py",
            "provider/serve/connection.py",
            "provider/session/tenant.py",
        ),
    ),
    Target(
        *("tenant_channel", tenant_channel, _answers),
        ("tenant_sdk/connection/websocket_channel.py", "tenant_sdk/connection/channel.py"),
    ),
    Target(
        *("upgrade_of_tenant", upgrade_of_tenant, _upgrade_requests),
        ("provider/serve/handshake.py", "provider/serve/admission.py"),
        refusals=HANDSHAKE_ERRORS,
        words=_HTTP_WORDS,
    ),
    Target(
        *(
            "upgrade_of_executor",
            upgrade_of_executor,
            _upgrade_answers,
            ("tenant_sdk/connection/handshake.py",),
        ),
        refusals=(SymbiosisError,),
        words=_HTTP_WORDS,
    ),
)
