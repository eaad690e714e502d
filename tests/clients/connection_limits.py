"""In the gateway's environment: connections that send no whole headers, too many headers, or too many."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn

from tenant_sdk.gateway import connection_limits
from tenant_sdk.gateway.admission import Authenticator, UnauthenticatedConnections
from tenant_sdk.gateway.connection_limits import ConnectionLimits
from tenant_sdk.gateway.http_frontend import CLOSED, FLUSHED
from tenant_sdk.gateway.reservations import Reservations

left: list[str] = []  # paths of answers that clients have taken
waiting: list[str] = []
KEYS = ("a-key-of-enough-letters", "another-key-of-enough")
connection_limits.HEADER_SECONDS = 0.5


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers at once, unless the path is the one for which it waits."""
    if scope["type"] == "http":
        if scope["path"] == "/waiting":
            waiting.append(scope["path"])
            await scope["extensions"][CLOSED]
            waiting.clear()
            return
        body = b" " * (64 << 20) if scope["path"] == "/large" else b""
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})
        await scope["extensions"][FLUSHED]()
        left.append(scope["path"])


def connected() -> socket.socket:
    """To the server."""
    opened = socket.create_connection(("127.0.0.1", port))
    opened.settimeout(60)
    return opened


def ended(connection: socket.socket) -> bool:
    """Whether the server closes it before it says anything."""
    try:
        return connection.recv(100) == b""
    except ConnectionError:
        return True


def asks(connection: socket.socket, key: int) -> bytes:
    """The first line of what is answered with a key; empty: the connection is closed."""
    head = f"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[key]}\r\n\r\n"
    try:
        connection.sendall(head.encode())
        return connection.recv(1000).partition(b"\r\n")[0]
    except ConnectionError:
        return b""


authenticator = Authenticator(KEYS)
connections = ConnectionLimits(
    authenticator,
    Reservations(8, authenticator.clients),
    UnauthenticatedConnections(4),
    Reservations(160 << 20, authenticator.clients),
)
sockets = [socket.create_server(("127.0.0.1", 0))]
port = sockets[0].getsockname()[1]
config = uvicorn.Config(
    application, http=connections.protocol(), ws="none", lifespan="off", log_level="critical"
)
listening: list[socket.socket] = []
startup = uvicorn.Server.startup


async def started(server: Any, sockets: Any = None) -> None:
    """Notes what is listened on."""
    listening.extend(sockets)
    await startup(server, sockets)


uvicorn.Server.startup = started  # type: ignore[method-assign]
connection_limits.accept_several_at_once()
server = uvicorn.Server(config)
thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=sockets)))
thread.start()

OK = b"HTTP/1.1 200 OK"
first = connected()
assert asks(first, 0) == OK
first.close()
assert len(listening) == connection_limits.ACCEPTED
assert len({each.fileno() for each in listening}) == connection_limits.ACCEPTED
assert {each.getsockname()[1] for each in listening} == {port}
unfinished = [connected() for _ in range(3)]
for each in unfinished:
    each.sendall(b"GET / HTTP/1.1\r\nHost: local")
assert all(map(ended, unfinished)), "headers that do not end"
kept = connected()
assert asks(kept, 0) == OK
kept.sendall(b"GET / HTTP/1.1\r\nHost: local")
assert ended(kept), "headers of a second request that do not end"
connection_limits.HEADER_SECONDS = 600.0
large = connected()
try:
    large.sendall(b"GET / HTTP/1.1\r\n")
    for _ in range(100):
        large.sendall(b"a: " + b"b" * 10_000 + b"\r\n")
except ConnectionError:
    pass
assert ended(large), "headers without an end"
at_once = connected()
at_once.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + 50 * (b"a: " + 1000 * b"b" + b"\r\n") + b"\r\n")
assert ended(at_once), "long headers in one piece"

pipelined = connected()
pipelined.sendall(2 * b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
assert ended(pipelined), "a request that comes before the last one is answered"
pipelined.close()

for more, status in (
    (b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"411"),
    (b"Content-Length: 10000000\r\n\r\n", b"413"),
    (b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 20\r\n\r\n", b"400"),
    (b"a: b\r\n" * 200, b"431"),
    (b"", b"414"),
):
    refused = connected()
    path = b"/" if more else b"/" + 1000 * b"%41"
    refused.sendall(b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + more)
    said = refused.recv(1000)
    assert said.split()[1] == status, said
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == int(status)
    assert ended(refused), "what it sends behind it is not parsed"

connection_limits.HEADER_SECONDS = 0.1
endless = connected()
endless.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000\r\n\r\n")
assert endless.recv(1000).startswith(OK)
assert ended(endless), "a body that nobody waits for"
connection_limits.HEADER_SECONDS = 600.0

connection_limits.UNREAD_SECONDS = 600.0
asking = connected()
head = f"GET /large HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[0]}\r\n\r\n".encode()
asking.sendall(head)
assert asking.recv(1), "the answer has begun"
asking.sendall(head)
for _ in range(600):
    if not connections.known.total:
        break
    time.sleep(0.1)
assert not connections.known.total, "a request while the last answer is not read"
asking.close()


def unread_by(key: int) -> socket.socket:
    """A connection with a large answer that has begun, or a closed one."""
    asking = connected()
    asking.sendall(
        f"GET /large HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[key]}\r\n\r\n".encode()
    )
    return asking


def settles(done: Callable[[], bool]) -> bool:
    """Whether it becomes true."""
    for _ in range(600):
        if done():
            return True
        time.sleep(0.1)
    return False


# Of 160 MiB one key has 120: the second answer of 64 MiB is one too many, and another key's is not.
assert settles(lambda: left.count("/large") == 1), "the answer above, whose connection was closed"
left.clear()
first, second, third = (unread_by(key) for key in (0, 0, 1))
assert first.recv(1)
assert third.recv(1)
assert settles(lambda: connections.known.taken == {"0": 1, "1": 1}), connections.known.taken
assert all(taken > 50 << 20 for taken in connections.unread.taken.values())
assert settles(lambda: left.count("/large") == 1), (
    "that of the connection that was closed; the others keep their places"
)
reading = first.makefile("rb")
while reading.readline().strip():
    continue
assert len(reading.read(64 << 20)) == 64 << 20
assert settles(lambda: left.count("/large") == 2)
for each in (first, second, third):
    each.close()
assert settles(lambda: not connections.unread.total)
assert settles(lambda: not connections.known.total)

connection_limits.UNREAD_SECONDS = 0.1
unread = connected()
unread.sendall(f"GET /large HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[0]}\r\n\r\n".encode())
assert unread.recv(1), "the answer has begun"
for _ in range(600):  # what is left of it in the system's buffers hides from here that the server has closed
    if not connections.known.total:
        break
    time.sleep(0.1)
assert not connections.known.total, "an answer that is not read"
unread.close()

leaving = connected()
leaving.sendall(b"GET /waiting HTTP/1.1\r\nHost: localhost\r\n\r\n")
assert settles(lambda: bool(waiting))
leaving.close()
assert settles(lambda: not waiting), "a request that waits, whose connection is closed"

unauthenticated = [connected() for _ in range(8)]
assert all(map(ended, unauthenticated[:4])), "of those without a key the ones that waited longest make room"
assert asks(unauthenticated[-1], 0) == OK
known, answers = list[socket.socket](), list[bytes]()
for _ in range(6):  # one after the other, or they would all be without a key together
    known.append(connected())
    answers.append(asks(known[-1], 0))
assert answers.count(OK) == 5, "one key has six of eight places, and two stay for the other"
others = [connected() for _ in range(2)]
assert [asks(each, 1) for each in others] == [OK, OK]
for each in [*unauthenticated, *known, *others, *unfinished, kept, large]:
    each.close()
server.should_exit = True
thread.join()
assert connections.known.total == 0, "who leaves gives the slot back"
assert not connections.unauthenticated.waiting
print(json.dumps({"known": connections.known.taken}))
