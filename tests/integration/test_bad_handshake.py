"""What does not become a session: certificates, tokens, versions, and peers of other kinds."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import json
import logging
import random
import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Executor
from raw_peers import SECONDS, Refused, counted, open_raw, scripted_executor, tls, upgrade_request

import provider.serve.handshake
import tenant_sdk
from provider.observe.metrics import Metrics
from provider.serve.certificates import write_certificates
from provider.serve.server import Server, server_context
from shared.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectError,
    ProtocolVersionError,
    TlsError,
)
from shared.wire.header import PROTOCOL_VERSION

pytest_plugins = ("wire_fixtures",)
pytestmark = pytest.mark.usefixtures("goes_on")


@contextlib.contextmanager
def also_at(llama: Executor, context: ssl.SSLContext, folder: Path) -> Iterator[Executor]:
    """The same executor behind another port with other certificates."""
    assert llama.server is not None
    server = Server(
        dataclasses.replace(llama.server.service, metrics=Metrics()),
        context=context,
        tokens=llama.server.tokens,
        port=0,
    )
    yield Executor(server.url, llama.token, folder / "ca.pem", server=server)
    assert server.drain(SECONDS)


def certificates(folder: Path, *, days_ago: int = 0, hosts: tuple[str, ...] = ("127.0.0.1",)) -> Path:
    """A development CA, made some days ago for 30 days."""
    now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days_ago)
    write_certificates(folder, hosts, now=now, days=30)
    return folder


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("Authorization: Bearer wrong",),
        ("Authorization: Bearer ",),
        ("Authorization: Bearer",),
        ("Authorization: Basic {token}",),
        ("Authorization: {token}",),
        ("Authorization: Bearer {token}x",),
        ("Authorization: Bearer {token}", "Authorization: Bearer {token}"),
        ("Authorization: Bearer \xff\xfe",),
    ],
)
def test_a_wrong_token_is_401(llama: Executor, headers: tuple[str, ...]) -> None:
    lines = [line.format(token=llama.token) for line in headers]
    with (
        counted(llama, "symbiosis_handshakes_failed_total", reason="unauthorized"),
        pytest.raises(Refused) as caught,
    ):
        open_raw(llama, headers=("Sec-WebSocket-Protocol: symbiosis.v4", *lines))
    assert caught.value.status == 401
    info = json.loads(caught.value.body)
    assert info["code"] == "unauthorized"
    assert llama.token not in info["message"]


@pytest.mark.parametrize("token", ["", "two words", "line\nend"])
def test_an_impossible_token_is_not_sent(llama: Executor, token: str) -> None:
    with pytest.raises(ConfigurationError, match="token"):
        llama.connect(token=token)


def test_an_untrusted_certificate(llama: Executor, tmp_path: Path) -> None:
    certificates(tmp_path)
    with (
        counted(llama, "symbiosis_handshakes_failed_total", reason="tls"),
        pytest.raises(TlsError, match=r"another authority signed.*ca\.pem"),
    ):
        llama.connect(ca=tmp_path / "ca.pem")
    with pytest.raises(TlsError, match=r"ca=FILE was not given.*give ca=FILE"):
        llama.connect(ca=None)


def test_an_expired_certificate(llama: Executor, tmp_path: Path) -> None:
    certificates(tmp_path, days_ago=60)
    with (
        also_at(llama, server_context(tmp_path), tmp_path) as executor,
        pytest.raises(TlsError, match=r"expired.*renew"),
    ):
        executor.connect()


def test_a_certificate_of_another_host(llama: Executor, tmp_path: Path) -> None:
    certificates(tmp_path, hosts=("elsewhere.example",))
    with also_at(llama, server_context(tmp_path), tmp_path) as executor:
        with pytest.raises(TlsError, match=r"another host than '127\.0\.0\.1'"):
            executor.connect()
        by_name = executor.url.replace("127.0.0.1", "localhost")
        with pytest.raises(TlsError, match="another host than 'localhost'"):
            tenant_sdk.connect(by_name, token=executor.token, ca=executor.ca, privacy="plain")


def test_plain_ws_is_refused_before_anything_is_sent(llama: Executor) -> None:
    with pytest.raises(ConfigurationError, match="wss://"):
        tenant_sdk.connect(llama.url.replace("wss", "ws"), token=llama.token, ca=llama.ca)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\x82\x85\0\0\0\0hello", bytes(2000)]
)
def test_what_is_no_tls_is_dropped(llama: Executor, data: bytes) -> None:
    host, port = llama.url.removeprefix("wss://").split(":")
    with (
        counted(llama, "symbiosis_handshakes_failed_total", reason="tls"),
        socket.create_connection((host, int(port)), timeout=SECONDS) as sock,
    ):
        sock.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            while answer := sock.recv(4096):
                assert not answer.startswith(b"HTTP")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_plain_http_inside_tls(llama: Executor, method: str) -> None:
    with counted(llama, "symbiosis_handshakes_failed_total", reason="protocol_version"), tls(llama) as sock:
        sock.sendall(f"{method} /metrics HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        answer = b""
        while data := sock.recv(4096):
            answer += data
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"symbiosis.v4" in answer


@pytest.mark.parametrize("data", [b"\x16\x03\x01\0\0", b"not http\r\n\r\n", b"GET /" + b"a" * 20_000])
def test_garbage_inside_tls_is_dropped(llama: Executor, data: bytes) -> None:
    with counted(llama, "symbiosis_handshakes_failed_total", reason="http"), tls(llama) as sock:
        sock.sendall(data + b"\n")
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass


def test_a_websocket_request_with_a_part_missing(llama: Executor) -> None:
    headers = ("Sec-WebSocket-Protocol: symbiosis.v4", f"Authorization: Bearer {llama.token}")
    with counted(llama, "symbiosis_handshakes_failed_total", reason="http"), tls(llama) as sock:
        sock.sendall("\r\n".join(["GET / HTTP/1.1", "Host: a", *headers, "", ""]).encode())
        assert sock.recv(4096).startswith(b"HTTP/1.1 426 ")


SURPLUS = {
    "no frame": b"\xff\xff",
    "a second request": upgrade_request("Sec-WebSocket-Protocol: symbiosis.v4"),
    "a ping": b"\x89\x80abcd",
    "a close": b"\x88\x80abcd",
    "half a frame": b"\x82\xff\0",
    "more than a record": bytes(40_000),
}


@pytest.mark.parametrize("name", SURPLUS)
@pytest.mark.parametrize(
    ("protocol", "token", "status", "code"),
    [
        ("symbiosis.v4", "wrong", 401, "unauthorized"),
        ("symbiosis.v9", "wrong", 400, "protocol_version"),
        ("symbiosis.v4", None, 400, "unexpected"),
    ],
)
def test_bytes_behind_the_request_are_refused(
    llama: Executor,
    caplog: pytest.LogCaptureFixture,
    name: str,
    protocol: str,
    token: str | None,
    status: int,
    code: str,
) -> None:
    """A tenant waits for the answer. Who has no token learns no more than that."""
    request = upgrade_request(
        f"Sec-WebSocket-Protocol: {protocol}", f"Authorization: Bearer {token or llama.token}"
    )
    with (
        caplog.at_level(logging.INFO),
        counted(llama, "symbiosis_handshakes_failed_total", reason=code),
        tls(llama) as sock,
    ):
        sock.sendall(request + SURPLUS[name])
        answer = b""
        while data := sock.recv(4096):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["code"] == code
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_request_of_many_headers_is_dropped_early(llama: Executor) -> None:
    """What anybody may have the executor hold is little, however many connections there are."""
    with (
        counted(llama, "symbiosis_handshakes_failed_total", reason="http"),
        tls(llama) as sock,
        contextlib.suppress(OSError),
    ):
        sock.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(20):
            sock.sendall(b"A: " + b"a" * 1000 + b"\r\n")
        assert sock.recv(1) == b""


@pytest.mark.parametrize("seed", range(4))
def test_nothing_in_a_request_is_worth_a_traceback(
    llama: Executor, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """Requests with lines left out, doubled, swapped, cut and damaged; also by who has a good token."""
    draw = random.Random(seed)
    for _ in range(60):
        lines = upgrade_request(
            "Sec-WebSocket-Protocol: symbiosis.v4",
            f"Authorization: Bearer {draw.choice([llama.token, 'x'])}",
            draw.choice(["Origin: a", "Sec-WebSocket-Extensions: permessage-deflate", "Content-Length: 5"]),
        ).split(b"\r\n")[:-2]
        for _ in range(draw.randrange(4)):
            at = draw.randrange(len(lines))
            lines[at : at + 1] = draw.choice(
                [
                    [],
                    [lines[at], lines[at]],
                    [lines[at][: draw.randrange(len(lines[at]) + 1)]],
                    [lines[at] + draw.randbytes(3).replace(b"\n", b"n")],
                    [draw.choice(lines), lines[at]],
                ]
            )
            lines = lines or [b""]
        with tls(llama) as sock, contextlib.suppress(OSError):
            sock.sendall(b"\r\n".join([*lines, b"", b""]) + draw.choice([b"", b"", b"\xff"]))
            sock.shutdown(socket.SHUT_WR)
    with llama.connect():
        pass  # it serves others
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_who_resets_the_connection_at_once_is_no_failure(
    llama: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = llama.url.removeprefix("wss://").split(":")
    for _ in range(100):
        with socket.create_connection((host, int(port)), timeout=SECONDS) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with llama.connect():
        pass
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_who_is_refused_and_stays_is_dropped(llama: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider.serve.handshake, "LINGER_SECONDS", 0.1)
    with tls(llama) as sock, counted(llama, "symbiosis_handshakes_failed_total", reason="unauthorized"):
        sock.sendall(upgrade_request("Sec-WebSocket-Protocol: symbiosis.v4"))
        assert sock.recv(4096).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_a_request_may_come_in_pieces(llama: Executor, size: int) -> None:
    """Also when a piece ends in the middle of a line's end."""
    request = upgrade_request("Sec-WebSocket-Protocol: symbiosis.v4", f"Authorization: Bearer {llama.token}")
    with tls(llama) as sock:
        for at in range(0, len(request), size):
            sock.sendall(request[at : at + size])
        assert sock.recv(4096).startswith(b"HTTP/1.1 101 ")


OLD = f"symbiosis.v{PROTOCOL_VERSION - 1}"


@pytest.mark.parametrize("offered", ["symbiosis.v1", OLD, "symbiosis", "chat", ""])
def test_another_version_in_the_handshake(llama: Executor, offered: str) -> None:
    with (
        counted(llama, "symbiosis_handshakes_failed_total", reason="protocol_version"),
        pytest.raises(Refused) as caught,
    ):
        open_raw(llama, subprotocol=offered)
    assert caught.value.status == 400
    assert json.loads(caught.value.body)["code"] == "protocol_version"


def test_one_of_several_offered_versions_is_chosen(llama: Executor) -> None:
    with open_raw(llama, subprotocol="symbiosis.v9, symbiosis.v4") as peer:
        assert peer.hello()["numerics"] == "float32"


def test_another_version_is_a_version_error(llama: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tenant_sdk.connection.handshake", "shared.transport.refusal"):
        monkeypatch.setattr(importlib.import_module(name), "SUBPROTOCOL", "symbiosis.v9")
    said = r"speaks symbiosis\.v4; install a matching version; this tenant speaks symbiosis\.v9"
    with pytest.raises(ProtocolVersionError, match=said):
        llama.connect()


def test_a_websocket_server_of_something_else(tls_dir: Path) -> None:
    with (
        scripted_executor(tls_dir, lambda _: None, subprotocol=None) as url,
        pytest.raises(ProtocolVersionError, match=r"did not agree to symbiosis\.v4"),
    ):
        tenant_sdk.connect(url, token="token", ca=tls_dir / "ca.pem", privacy="plain")


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno",
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"220 smtp.example ESMTP\r\n",
        b"\0" * 100,
        b"",
    ],
)
def test_a_server_of_something_else(tls_dir: Path, response: bytes) -> None:
    with (
        scripted_executor(tls_dir, lambda _: None, response=response or b" ") as url,
        pytest.raises(ConnectError, match="executor"),
    ):
        tenant_sdk.connect(url, token="token", ca=tls_dir / "ca.pem", privacy="plain")


@pytest.mark.parametrize("stage", ["tcp", "tls", "bytes"])
def test_a_slow_handshake_is_dropped(llama: Executor, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    # On a busy machine this may end the handshake of TLS, too; that is as slow.
    monkeypatch.setattr(provider.serve.handshake, "HANDSHAKE_SECONDS", 0.3)
    monkeypatch.setattr(provider.serve.handshake, "HANDSHAKE_BYTES", 1 << 20)
    host, port = llama.url.removeprefix("wss://").split(":")
    with (
        counted(llama, "symbiosis_handshakes_failed_total", reason="slow"),
        contextlib.ExitStack() as opened,
        contextlib.suppress(ConnectionError, ssl.SSLError),
    ):
        if stage == "tcp":
            sock: socket.socket = socket.create_connection((host, int(port)), timeout=SECONDS)
        else:
            sock = tls(llama)
        opened.enter_context(sock)
        if stage == "bytes":  # there is always another byte, and never the end of the request
            request = b"GET / HTTP/1.1\r\n" + b"".join(b"A: %s\r\n" % (b"a" * 8000) for _ in range(120))
            for byte in request:
                sock.sendall(bytes([byte]))
            pytest.fail("the executor read a request that took as long as the tenant liked")
        assert sock.recv(1) == b""


def test_tls_1_2_is_refused(llama: Executor, tls_dir: Path) -> None:
    old = ssl.create_default_context(cafile=str(llama.ca))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with counted(llama, "symbiosis_handshakes_failed_total", reason="tls"), pytest.raises(ssl.SSLError):
        tls(llama, old)
    context = server_context(tls_dir)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with also_at(llama, context, tls_dir) as executor, pytest.raises(TlsError, match=r"TLS 1\.3"):
        executor.connect()


def test_a_client_certificate_that_is_asked_for(llama: Executor, tls_dir: Path, tmp_path: Path) -> None:
    pair = (tls_dir / "client.pem", tls_dir / "client.key")
    with also_at(llama, server_context(tls_dir, tls_dir / "ca.pem"), tls_dir) as executor:
        with (
            counted(executor, "symbiosis_handshakes_failed_total", reason="tls"),
            pytest.raises(AuthenticationError, match="client_certificate="),
        ):
            executor.connect()
        certificates(tmp_path)
        with pytest.raises(AuthenticationError, match="client_certificate="):
            executor.connect(client_certificate=(tmp_path / "client.pem", tmp_path / "client.key"))
        with executor.connect(client_certificate=pair) as session:
            assert session.manifest.groups
        with pytest.raises(AuthenticationError, match="token"):
            executor.connect(client_certificate=pair, token="wrong")
