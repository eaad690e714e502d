"""Key exchange of a TLS connection: the preferred groups, and the group that the two ends agreed on.

Python says which group was agreed since 3.15. Before, it is read off the ServerHello, which travels in the
clear (RFC 8446 §4.1.3), as it lies in the socket's buffer, before OpenSSL takes it from there.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

UNKNOWN = "unknown"
_PREFERRED = ("X25519MLKEM768", "X25519", "P-256", "P-384")
_NAMES = {
    0x0017: "P-256",
    0x0018: "P-384",
    0x0019: "P-521",
    0x001D: "X25519",
    0x001E: "X448",
    0x11EB: "SecP256r1MLKEM768",
    0x11EC: "X25519MLKEM768",
    0x11ED: "SecP384r1MLKEM1024",
}
_OPENSSL_NAMES = {
    "secp256r1": "P-256",
    "prime256v1": "P-256",
    "secp384r1": "P-384",
    "secp521r1": "P-521",
    "x25519": "X25519",
    "x448": "X448",
}
_HANDSHAKE, _SERVER_HELLO, _KEY_SHARE = 22, 2, 51
_RECORD_HEADER = 5
_LONGEST_RECORD = 1 << 14


def prefer(context: ssl.SSLContext) -> None:
    """Ask for a hybrid with a post-quantum part first, where Python can (3.15) and OpenSSL has one (3.5).

    Elsewhere OpenSSL's own order stays, which is the same in this since 3.5.
    """
    set_groups = getattr(context, "set_groups", None)
    for first in range(2 if set_groups is not None else 0):
        with contextlib.suppress(ssl.SSLError, ValueError):
            set_groups(":".join(_PREFERRED[first:]))  # type: ignore[misc]
            return


def hybrid(group: str) -> bool:
    """Returns whether only breaking both an elliptic curve and a lattice would reveal recorded traffic."""
    return "MLKEM" in group and not group.startswith("MLKEM")


def agreed(sock: ssl.SSLSocket) -> str:
    """Returns the name of the group of a finished handshake, or ``unknown``."""
    group = getattr(sock, "group", None)
    name = str((group() if group is not None else getattr(sock, "seen_group", "")) or UNKNOWN)
    return _OPENSSL_NAMES.get(name, name)


def group_of(answer: bytes) -> str:
    """Returns the name of the group in the first TLS record of a server's answer, or ``unknown``.

    That may be a ServerHello or a request to begin again with this very group.
    """
    size = int.from_bytes(answer[3:5], "big")
    record = answer[_RECORD_HEADER : _RECORD_HEADER + size]
    at = 4 + 2 + 32  # message header, version, random
    at += 1 + int.from_bytes(record[at : at + 1], "big")  # session id
    at += 2 + 1  # cipher, compression
    end = at + 2 + int.from_bytes(record[at : at + 2], "big")
    if answer[:1] != bytes([_HANDSHAKE]) or record[:1] != bytes([_SERVER_HELLO]) or end > len(record):
        return UNKNOWN
    at += 2
    while at + 4 <= end:
        kind, length = (int.from_bytes(record[i : i + 2], "big") for i in (at, at + 2))
        at += 4
        if kind == _KEY_SHARE and length >= 2 and at + length <= end:
            number = int.from_bytes(record[at : at + 2], "big")
            return _NAMES.get(number, f"group {number:#06x}")
        at += length
    return UNKNOWN


def peek(sock: ssl.SSLSocket, timeout: float) -> bytes:
    """Returns the first TLS record that waits, and leaves it to be read; less, if the peer ends there.

    Args:
        sock: whose timeout is set to the rest of ``timeout`` meanwhile.
        timeout: seconds.

    Raises:
        TimeoutError: it did not come in time.
        OSError: the connection broke.
    """
    deadline = time.monotonic() + timeout

    def waiting(count: int) -> bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)  # or a part would wake it on and on
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left)
        return socket.socket.recv(sock, count, socket.MSG_PEEK)  # not decrypted

    try:
        head = waiting(_RECORD_HEADER)
        size = int.from_bytes(head[3:5], "big")
        if head[:1] != bytes([_HANDSHAKE]) or len(head) < _RECORD_HEADER or size > _LONGEST_RECORD:
            return head
        return waiting(_RECORD_HEADER + size)
    finally:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        sock.settimeout(timeout)
