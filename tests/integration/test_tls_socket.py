"""TLS of a tenant's connection: data in both directions, and records that have none."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from provider.serve.server import server_context
from provider.serve.tls_socket import CHUNK, RECORDS, BoundedTlsSocket

SECONDS = 800.0
UPDATE, UPDATE_AND_ANSWER = b"\x18\0\0\1\0", b"\x18\0\0\1\1"  # RFC 8446, section 4.6.3
HANDSHAKE, DATA = b"\x16", b"\x17"


class Peer:
    """A client that also writes records of its own making, under the keys that its TLS agreed."""

    def __init__(self, tls: ssl.SSLSocket, raw: socket.socket, secret: bytes) -> None:
        self.tls, self.raw, self._secret, self._count = tls, raw, secret, 0

    def record(self, content: bytes, kind: bytes) -> bytes:
        """One record (RFC 8446, section 5.2); an update changes the keys of the next."""
        head = b"\x17\x03\x03" + struct.pack(">H", len(content) + 1 + 16)
        key, iv = self._expand("key", 32), self._expand("iv", 12)
        nonce = (int.from_bytes(iv, "big") ^ self._count).to_bytes(12, "big")
        self._count += 1
        if kind == HANDSHAKE:
            self._secret, self._count = self._expand("traffic upd", 48), 0
        return head + AESGCM(key).encrypt(nonce, content + kind, head)

    def _expand(self, label: str, length: int) -> bytes:
        name = b"tls13 " + label.encode()
        info = struct.pack(">H", length) + bytes([len(name)]) + name + b"\0"
        return hmac.new(self._secret, info + b"\1", hashlib.sha384).digest()[:length]


class Pair(NamedTuple):
    server: BoundedTlsSocket
    peer: Peer


@pytest.fixture
def pair(tls_dir: Path, tmp_path: Path) -> Iterator[Pair]:
    """Both ends, after the handshake; the server's does not block."""
    context = ssl.create_default_context(cafile=str(tls_dir / "ca.pem"))
    context.keylog_filename = str(tmp_path / "keys")
    near, far = socket.socketpair()
    server = BoundedTlsSocket(near, server_context(tls_dir))
    shaken = threading.Thread(target=server.do_handshake, args=(time.monotonic() + SECONDS,))
    shaken.start()
    raw = socket.socket(fileno=os.dup(far.fileno()))
    with server, raw, context.wrap_socket(far, server_hostname="localhost") as tls:
        shaken.join()
        assert tls.cipher() == ("TLS_AES_256_GCM_SHA384", "TLSv1.3", 256)
        words = (line.split() for line in (tmp_path / "keys").read_text().splitlines())
        secret = next(word[2] for word in words if word[0] == "CLIENT_TRAFFIC_SECRET_0")
        server.setblocking(False)
        yield Pair(server, Peer(tls, raw, bytes.fromhex(secret)))


def received(server: BoundedTlsSocket) -> bytes:
    """All that is there, as a loop reads it."""
    found, buffer = bytearray(), memoryview(bytearray(1 << 20))
    while True:
        try:
            count = server.recv_into(buffer)
        except ssl.SSLWantReadError:
            return bytes(found)
        if count == 0:
            return bytes(found)
        found += buffer[:count]


@pytest.mark.parametrize("piece", [1, 3, 5, 1000, CHUNK])
def test_records_may_arrive_in_any_pieces(pair: Pair, piece: int) -> None:
    server, peer = pair
    contents = [bytes([at]) * size for at, size in enumerate((1, 300, 2, 700, 16_000 if piece > 5 else 3))]
    sent = b"".join(peer.record(content, DATA) for content in contents)
    found = b""
    for at in range(0, len(sent), piece):
        peer.raw.sendall(sent[at : at + piece])
        found += received(server)
    assert found == b"".join(contents)
    assert not server.unread


def test_what_a_chunk_holds_is_told_until_it_is_read(pair: Pair) -> None:
    server, peer = pair
    peer.raw.sendall(b"".join(peer.record(b"x", DATA) for _ in range(3 * RECORDS)))
    buffer = memoryview(bytearray(100))
    for left in range(3 * RECORDS, 0, -1):
        assert server.recv_into(buffer) == 1
        assert bool(server.unread or server.pending()) == (left > 1)
    with pytest.raises(ssl.SSLWantReadError):
        server.recv_into(buffer)


def test_some_key_updates_are_usual(pair: Pair) -> None:
    server, peer = pair
    for content in (b"before", b"after"):
        updates = b"".join(peer.record(UPDATE, HANDSHAKE) for _ in range(RECORDS // 2))
        peer.raw.sendall(updates + peer.record(content, DATA))
        assert received(server) == content


@pytest.mark.parametrize("update", [UPDATE, UPDATE_AND_ANSWER])
def test_a_peer_that_only_updates_keys_is_ended(pair: Pair, update: bytes) -> None:
    """OpenSSL alone would read all of them in one call, and then wait for more."""
    server, peer = pair
    records = [peer.record(update, HANDSHAKE) for _ in range(100 * RECORDS)]
    peer.raw.sendall(b"".join(records))
    with pytest.raises(ssl.SSLError, match="records without data"):
        received(server)
    assert server.unread  # the rest of them was not looked at
    assert server.unsent <= CHUNK


def test_data_between_key_updates_is_returned_after_few_of_them(pair: Pair) -> None:
    server, peer = pair
    one = [peer.record(UPDATE, HANDSHAKE) for _ in range(RECORDS - 1)]
    for _ in range(10):
        one.append(peer.record(b"x", DATA))
        one += [peer.record(UPDATE, HANDSHAKE) for _ in range(RECORDS - 2)]
    peer.raw.sendall(b"".join(one))
    buffer = memoryview(bytearray(100))
    assert [server.recv_into(buffer) for _ in range(10)] == [1] * 10


def test_an_end_and_a_cut(pair: Pair) -> None:
    server, peer = pair
    peer.raw.sendall(peer.record(b"data", DATA)[:-1])
    assert received(server) == b""
    peer.raw.shutdown(socket.SHUT_WR)
    assert server.recv_into(memoryview(bytearray(10))) == 0


def test_a_record_under_other_keys(pair: Pair) -> None:
    server, peer = pair
    peer.raw.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(ssl.SSLError, match="BAD_RECORD_MAC"):
        received(server)


def test_a_peer_that_reads_slowly(pair: Pair) -> None:
    """What was encrypted waits, but no more than a chunk of it."""
    server, peer = pair
    data = memoryview(os.urandom(8 << 20))
    reader, found = None, bytearray()

    def read() -> None:
        while len(found) < len(data):
            found.extend(peer.tls.recv(1 << 16))

    left = data
    while len(left) or server.unsent:
        try:
            left = left[server.send(left) :] if len(left) else left
            server.flush()
        except ssl.SSLWantWriteError:
            assert 0 < server.unsent < 2 * CHUNK
            if reader is None:
                reader = threading.Thread(target=read)
                reader.start()
    assert reader is not None
    reader.join()
    assert bytes(found) == data


def test_the_end_of_tls_is_told(pair: Pair) -> None:
    server, peer = pair
    server.unwrap()
    server.shutdown(socket.SHUT_WR)
    assert peer.tls.recv(10) == b""  # an end, and no cut, which would be an error
    peer.raw.sendall(b"anything")
    assert server.discard() == len(b"anything")  # without a look at it


def test_a_handshake_has_an_end(tls_dir: Path) -> None:
    near, far = socket.socketpair()
    with far, BoundedTlsSocket(near, server_context(tls_dir)) as server:
        far.sendall(b"\x16\x03\x01\x00\x01\x00" * RECORDS)
        with pytest.raises(ssl.SSLError):
            server.do_handshake(time.monotonic() + SECONDS)
    near, far = socket.socketpair()
    with far, BoundedTlsSocket(near, server_context(tls_dir)) as server, pytest.raises(TimeoutError):
        server.do_handshake(time.monotonic())


@pytest.mark.parametrize("at_once", [0, 1, 5])
def test_bytes_that_come_one_by_one_stretch_no_deadline(tls_dir: Path, at_once: int) -> None:
    """Of a handshake; a peer that sends a byte now and then would keep a connection for ever."""
    near, far = socket.socketpair()
    stop, record = threading.Event(), b"\x16\x03\x01\x40\x00" + bytes(1 << 14)  # OpenSSL waits for all of it

    def dribble() -> None:
        far.sendall(record[:at_once])
        for byte in record[at_once:]:
            if stop.wait(0.01):
                break
            far.sendall(bytes([byte]))

    thread = threading.Thread(target=dribble)
    with far, BoundedTlsSocket(near, server_context(tls_dir)) as server:
        thread.start()
        try:
            with pytest.raises(TimeoutError):
                server.do_handshake(time.monotonic() + 0.2)
        finally:
            stop.set()
            thread.join()


def test_a_read_has_one_deadline_however_many_bytes_come(pair: Pair) -> None:
    server, peer = pair
    record, stop = peer.record(bytes(16_000), DATA), threading.Event()

    def dribble() -> None:
        at = 0
        while not stop.wait(0.01):
            peer.raw.sendall(record[at : at + 1])
            at += 1

    thread = threading.Thread(target=dribble)
    thread.start()
    try:
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.recv(100)
    finally:
        stop.set()
        thread.join()
