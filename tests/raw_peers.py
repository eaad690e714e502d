"""Peers that send whatever bytes a test wants, over real TLS: a raw tenant and a scripted executor.

Written from ``shared/PROTOCOL.md`` and RFC 6455 with nothing of the project's framing, so that a
mistake there is not made here again. Nothing here checks what it sends.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from conftest import Executor

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
HELLO, WELCOME, PRODUCT, EFFECT, FETCH, REPLY, ERROR = range(1, 8)
FORWARD, BACKWARD = 1, 2
FLOAT32, INT32 = 1, 6
SUBPROTOCOL = "symbiosis.v4"
SECONDS = 800.0  # a test that waits longer than this for its peer has failed


class Fields(NamedTuple):
    """The header of ``shared/PROTOCOL.md``, in its order."""

    version: int
    operation: int
    direction: int
    dtype: int
    group: int
    request_id: int
    rows: int
    columns: int
    request_class: int
    answer_bits: int
    members: int


def header(operation: int, **fields: int) -> bytes:
    """32 bytes; what is not given is 0, but version (4), request id (1) and answer bits of int32 (32)."""
    values = dict.fromkeys(Fields._fields, 0) | {"version": 4, "request_id": 1, "operation": operation}
    if fields.get("dtype") == INT32:
        values["answer_bits"] = 32
    return struct.pack("<BBBBIIIIHHQ", *Fields(**(values | fields)))


def product(rows: int, columns: int, **fields: int) -> bytes:
    """The header of a forward float32 product of the first member of group 0."""
    defaults = {"direction": FORWARD, "dtype": FLOAT32, "members": 1, "request_id": 7}
    return header(PRODUCT, **(defaults | {"rows": rows, "columns": columns} | fields))


def frame(
    payload: bytes,
    opcode: int = BINARY,
    *,
    mask: bytes = b"",
    fin: bool = True,
    reserved: int = 0,
    length: int | None = None,
) -> bytes:
    """One frame; ``length`` makes it announce another length than it has."""
    size = len(payload) if length is None else length
    first, masked = opcode | reserved << 4 | (0x80 if fin else 0), 0x80 if mask else 0
    if size < 126:
        start = struct.pack("!BB", first, masked | size)
    elif size < 1 << 16:
        start = struct.pack("!BBH", first, masked | 126, size)
    else:
        start = struct.pack("!BBQ", first, masked | 127, size)
    if mask:
        key = (mask * (len(payload) // 4 + 1))[: len(payload)]
        payload = (int.from_bytes(payload, "big") ^ int.from_bytes(key, "big")).to_bytes(len(payload), "big")
    return start + mask + payload


class Refused(Exception):
    """The handshake ended with an HTTP error."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {body!r}")
        self.status, self.body = status, body


class Peer:
    """One end of an open websocket. ``masks``: it is the tenant's end."""

    def __init__(self, sock: ssl.SSLSocket, *, masks: bool, early: bytes = b"") -> None:
        self.sock, self._masks, self._early = sock, masks, early

    def send(self, data: bytes) -> None:
        """Raw bytes."""
        self.sock.sendall(data)

    def frame(self, payload: bytes, opcode: int = BINARY, **options: Any) -> bytes:
        """A frame, masked as this end must."""
        return frame(payload, opcode, **({"mask": os.urandom(4) if self._masks else b""} | options))

    def message(self, head: bytes, payload: bytes = b"") -> None:
        """Send one message in one frame."""
        self.send(self.frame(head + payload))

    def control(self, operation: int, body: Any, request_id: int = 1) -> None:
        """Send a control message."""
        data = json.dumps(body).encode()
        self.message(header(operation, request_id=request_id, rows=1, columns=len(data)), data)

    def _exactly(self, count: int) -> bytes:
        parts = [self._early[:count]]
        self._early = self._early[count:]
        missing = count - len(parts[0])
        while missing:
            data = self.sock.recv(min(missing, 1 << 16))
            if not data:
                raise EOFError("the peer ended the connection")
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def receive_frame(self) -> tuple[int, bytes]:
        """Opcode and payload of one frame, which must be whole and masked by tenants alone."""
        first, second = self._exactly(2)
        assert first & 0xF0 == 0x80, "fragmented, or reserved bits"
        assert bool(second & 0x80) != self._masks, "masked on the wrong side"
        size = second & 0x7F
        if size >= 126:
            size = int.from_bytes(self._exactly(2 if size == 126 else 8), "big")
        mask = self._exactly(4) if second & 0x80 else b""
        body = self._exactly(size)
        return first & 15, frame(body, mask=mask)[-size:] if mask and size else body

    def receive(self) -> tuple[Fields, bytes]:
        """Header and payload of one message."""
        opcode, body = self.receive_frame()
        if opcode == CLOSE:
            raise EOFError(f"the peer closed: {body!r}")
        assert opcode == BINARY, f"opcode {opcode}: {body!r}"
        fields = Fields(*struct.unpack_from("<BBBBIIIIHHQ", body))
        assert fields.version == 4
        return fields, body[32:]

    def receive_error(self) -> tuple[int, str]:
        """Request id and code of an ERROR."""
        fields, body = self.receive()
        assert fields.operation == ERROR, fields
        info = json.loads(body)
        assert set(info) == {"code", "message", "retry_after"}
        assert info["message"]
        return fields.request_id, info["code"]

    def receive_close(self) -> int:
        """The code of a CLOSE frame."""
        opcode, body = self.receive_frame()
        assert opcode == CLOSE, f"opcode {opcode}: {body!r}"
        return int.from_bytes(body[:2], "big")

    def at_end(self) -> bool:
        """Whether the peer ends the connection without another byte."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True

    def hello(self) -> dict[str, Any]:
        """Say HELLO; the manifest."""
        self.control(HELLO, {"client": "raw"})
        fields, body = self.receive()
        assert fields.operation == WELCOME
        manifest: dict[str, Any] = json.loads(body)
        return manifest

    def close(self) -> None:
        """Drop the connection without a word."""
        self.sock.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tls(executor: Executor, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
    """A TLS connection to an executor."""
    host, port = executor.url.removeprefix("wss://").split(":")
    context = context or ssl.create_default_context(cafile=str(executor.ca))
    sock = socket.create_connection((host, int(port)), timeout=SECONDS)
    try:
        return context.wrap_socket(sock, server_hostname=host)
    except BaseException:
        sock.close()
        raise


def upgrade_request(*headers: str) -> bytes:
    """A websocket handshake's request."""
    key = base64.b64encode(os.urandom(16)).decode()
    lines = ["GET / HTTP/1.1", "Host: executor", "Upgrade: websocket", "Connection: Upgrade"]
    lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def open_raw(
    executor: Executor,
    *,
    token: str | None = None,
    subprotocol: str = SUBPROTOCOL,
    headers: tuple[str, ...] | None = None,
) -> Peer:
    """A tenant that has done TLS and the websocket handshake, and nothing else."""
    if headers is None:
        headers = (
            f"Sec-WebSocket-Protocol: {subprotocol}",
            f"Authorization: Bearer {token or executor.token}",
        )
    sock = tls(executor)
    try:
        sock.sendall(upgrade_request(*headers))
        head, early = _read_head(sock)
        status = int(head.split()[1])
        if status != 101:
            while data := sock.recv(4096):
                early += data
            raise Refused(status, early)
        assert f"sec-websocket-protocol: {SUBPROTOCOL}" in head.lower()
        assert "sec-websocket-extensions" not in head.lower()
    except BaseException:
        sock.close()
        raise
    return Peer(sock, masks=True, early=early)


def _read_head(sock: ssl.SSLSocket) -> tuple[str, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(4096)
        if not piece:
            raise EOFError(f"the connection ended after {data!r}")
        data += piece
    head, _, early = data.partition(b"\r\n\r\n")
    return head.decode("latin-1"), early


@contextlib.contextmanager
def scripted_executor(
    tls_dir: Path,
    script: Callable[[Peer], None],
    *,
    response: bytes | None = None,
    subprotocol: str | None = SUBPROTOCOL,
) -> Iterator[str]:
    """A server of one connection: TLS and handshake as in the protocol, then ``script(peer)``.

    Yields its URL. What the script raises is raised at the end, but for errors of a connection
    that the tenant dropped.

    Args:
        response: sent instead of the handshake's answer.
        subprotocol: confirmed in the handshake; None confirms none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls_dir / "server.pem", tls_dir / "server.key")
    failures: list[BaseException] = []

    def accept_key(head: str) -> str:
        match = re.search(r"(?im)^sec-websocket-key: *(\S+)", head)
        assert match is not None
        digest = hashlib.sha1(f"{match[1]}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
        return base64.b64encode(digest).decode()

    def run() -> None:
        try:
            raw, _ = listener.accept()
            raw.settimeout(SECONDS)
            with raw, context.wrap_socket(raw, server_side=True) as sock:
                head, early = _read_head(sock)
                answer = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                answer += f"Sec-WebSocket-Accept: {accept_key(head)}\r\n"
                if subprotocol is not None:
                    answer += f"Sec-WebSocket-Protocol: {subprotocol}\r\n"
                sock.sendall(response or f"{answer}\r\n".encode())
                if response is None:
                    script(Peer(sock, masks=False, early=early))
        except (OSError, EOFError):
            pass  # the tenant left
        except BaseException as error:
            failures.append(error)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SECONDS)
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"wss://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(SECONDS)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def eventually(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Wait for what another thread or process does in its own time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def metric(executor: Executor, name: str, **labels: str) -> float:
    """The current value of an executor's metric; 0 if it was never counted."""
    assert executor.server is not None
    return executor.server.service.metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.contextmanager
def counted(executor: Executor, name: str, **labels: str) -> Iterator[None]:
    """The counter goes up by one."""
    before = metric(executor, name, **labels)
    yield
    eventually(lambda: metric(executor, name, **labels) > before)
    assert metric(executor, name, **labels) == before + 1


ESTABLISHED, SYN_SENT = 1, 2  # the first byte of TCP_INFO


def connecting(address: tuple[str, int]) -> int:
    """The state of a connection that was begun, when another on this machine has been made."""
    with socket.create_server(("127.0.0.1", 0)) as other, socket.socket() as begun:
        begun.setblocking(False)
        begun.connect_ex(address)
        with socket.create_connection(other.getsockname()[:2], SECONDS):
            return begun.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
