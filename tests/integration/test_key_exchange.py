"""Which group a TLS handshake agreed on, who says so, and a log of its keys, which is refused."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import Executor
from hypothesis import given
from hypothesis import strategies as st
from raw_peers import SECONDS
from ring_sessions import ExecutorFactory, one_time
from transports import Start, TransportServers

import tenant_sdk
from shared.errors import ConfigurationError, TlsError
from tenant_sdk import Stats
from tenant_sdk.command_line.checks import CheckResult
from tenant_sdk.command_line.doctor import _key_exchange, examine
from tenant_sdk.command_line.options import Target
from tenant_sdk.connection.handshake import client_context, open_tcp, start_tls
from tenant_sdk.connection.key_exchange import UNKNOWN, agreed, group_of, hybrid, prefer

pytest_plugins = ("ring_fixtures", "transport_fixtures")

CURVES = {"prime256v1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521", "X25519": "X25519"}


@contextmanager
def tls_server(tls_dir: Path, curve: str | None, first: int | None = None) -> Iterator[tuple[str, int]]:
    """One TLS handshake in a curve. ``first``: the answer comes in two pieces, so many bytes first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls_dir / "server.pem", tls_dir / "server.key")
    if curve:
        context.set_ecdh_curve(curve)

    def handshake() -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_side=True)
        raw, _ = listener.accept()
        with raw:
            raw.settimeout(SECONDS)
            while True:
                try:
                    tls.do_handshake()
                except ssl.SSLWantReadError:
                    pass
                else:
                    break
                answer = outgoing.read()
                if first is not None and answer:
                    raw.sendall(answer[:first])
                    threading.Event().wait(0.02)  # for most readers to see the first piece alone
                    answer = answer[first:]
                raw.sendall(answer)
                incoming.write(raw.recv(1 << 16))
            with suppress(ConnectionError):  # the client leaves when it knows the group
                raw.sendall(outgoing.read())
                raw.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=handshake)
        thread.start()
        yield "127.0.0.1", listener.getsockname()[1]
        thread.join(SECONDS)
    assert not thread.is_alive()


def group_with(tls_dir: Path, curve: str | None, first: int | None = None) -> str:
    with tls_server(tls_dir, curve, first) as (host, port):
        raw = open_tcp(host, port, SECONDS)
        with start_tls(raw, host, client_context(tls_dir / "ca.pem")) as sock:
            assert sock.gettimeout() == SECONDS
            return agreed(sock)


@pytest.mark.parametrize("curve", CURVES)
def test_the_group_of_a_real_handshake(curve: str, tls_dir: Path) -> None:
    """Also of one that the server asked to begin again, with another group than the client's first."""
    assert group_with(tls_dir, curve) == CURVES[curve]


@pytest.mark.parametrize("first", [1, 4, 5, 50])
def test_an_answer_that_comes_in_pieces(first: int, tls_dir: Path) -> None:
    assert group_with(tls_dir, "X25519", first) == "X25519"


def hello(group: bytes = b"\x11\xec", message: int = 2, more: bytes = b"") -> bytes:
    """A TLS record with a ServerHello (RFC 8446 4.1.3); ``group``: of its key share."""
    version = struct.pack(">HHH", 43, 2, 0x304)
    extensions = version + struct.pack(">HH", 51, len(group) + len(more)) + group + more
    body = b"\3\3" + bytes(32) + b"\0" + b"\x13\1\0" + struct.pack(">H", len(extensions)) + extensions
    message_ = bytes([message]) + len(body).to_bytes(3, "big") + body
    return b"\x16\3\3" + struct.pack(">H", len(message_)) + message_


def test_groups_by_their_numbers() -> None:
    assert group_of(hello()) == "X25519MLKEM768"
    assert group_of(hello(b"\0\x1d", more=b"\0\x20" + bytes(32))) == "X25519"
    assert group_of(hello(b"\0\x17")) == "P-256"
    assert group_of(hello(b"\xab\xcd")) == "group 0xabcd"


@pytest.mark.parametrize(
    "data", [b"", b"220 mail.example ESMTP\r\n", hello(message=1), hello(b""), hello()[:-1], hello()[:60]]
)
def test_what_is_no_answer_has_no_group(data: bytes) -> None:
    assert group_of(data) == UNKNOWN


@given(data=st.one_of(st.binary(max_size=100), st.binary(max_size=60).map(lambda tail: hello()[:40] + tail)))
def test_no_bytes_do_any_harm(data: bytes) -> None:
    assert isinstance(group_of(data), str)


def test_where_python_knows_the_group_it_is_asked() -> None:
    class Socket:
        def group(self) -> str:
            return "x25519"

    class Context:
        def __init__(self, *unknown: str) -> None:
            self.unknown, self.groups = unknown, ""

        def set_groups(self, groups: str) -> None:
            if any(name in groups for name in self.unknown):
                raise ssl.SSLError("no such group")
            self.groups = groups

    assert agreed(Socket()) == "X25519"  # type: ignore[arg-type]
    made: list[Any] = [Context(), Context("MLKEM"), Context("X25519"), object()]
    for context in made:
        prefer(context)
    assert [getattr(context, "groups", None) for context in made] == [
        "X25519MLKEM768:X25519:P-256:P-384",
        "X25519:P-256:P-384",
        "",
        None,
    ]


def test_hybrids() -> None:
    assert all(map(hybrid, ("X25519MLKEM768", "SecP256r1MLKEM768", "SecP384r1MLKEM1024")))
    assert not any(map(hybrid, ("X25519", "P-256", UNKNOWN, "group 0xabcd", "MLKEM768")))


def test_doctor_says_it(llama: Executor) -> None:
    (found,) = [f for f in examine(Target(llama.url, llama.ca)) if f.step == "key exchange"]
    with start_tls(
        open_tcp("127.0.0.1", int(llama.url.rpartition(":")[2]), SECONDS),
        "127.0.0.1",
        client_context(llama.ca),
    ) as sock:
        group = agreed(sock)
    assert group != UNKNOWN
    assert found.detail.startswith(group)
    assert found.ok is (True if hybrid(group) else None)


def test_what_doctor_says_of_it() -> None:
    well: CheckResult = _key_exchange("X25519MLKEM768")
    assert (well.ok, well.remedy) == (True, "")
    for group in ("X25519", UNKNOWN):
        found = _key_exchange(group)
        assert found.ok is None
        assert "quantum" in found.detail
        assert "3.5" in found.remedy


def test_a_session_says_it_of_every_executor(executors: ExecutorFactory) -> None:
    provider, source, _ = executors("llama")
    with one_time(provider, source) as session:
        stats = session.stats
        assert list(stats.key_exchange) == [provider.url, source.url]
        assert UNKNOWN not in stats.key_exchange.values()
        stats.key_exchange.clear()  # a copy
        assert session.stats.key_exchange
    assert asdict(Stats())["key_exchange"] == {}


@pytest.mark.parametrize("transport", ["colocated", "inprocess"])
def test_without_tls_there_is_none(
    transport: str, everywhere: Start, checkpoint: Callable[[str], Path]
) -> None:
    one: TransportServers = everywhere(checkpoint("llama"))
    with one.connect(transport) as session:
        assert session.stats.key_exchange == {}


# -- a log of the keys ----------------------------------------------------------------------------


def test_a_log_of_the_keys_is_refused(
    llama: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "keys"
    monkeypatch.setenv("SSLKEYLOGFILE", str(log))
    for attempt in (lambda: client_context(None), lambda: client_context(llama.ca), llama.connect):
        with pytest.raises(ConfigurationError, match="SSLKEYLOGFILE"):
            attempt()
    last = list(examine(Target(llama.url, llama.ca)))[-1]
    assert (last.step, last.ok) == ("environment", False)
    assert "unset SSLKEYLOGFILE" in last.remedy
    assert not log.exists()
    monkeypatch.setenv("SSLKEYLOGFILE", "")  # Python logs nothing then
    llama.connect().close()


def test_proxies_of_the_environment_are_not_used(llama: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "wss_proxy", "socks_proxy"):
        for variable in (name, name.upper()):
            monkeypatch.setenv(variable, "http://127.0.0.1:1")
    with llama.connect() as session:
        session.load_model(progress=False)


def test_a_server_that_keeps_silent_is_waited_for_once(tls_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        raw = open_tcp("127.0.0.1", listener.getsockname()[1], 0.2)
        with pytest.raises(TlsError, match="timed out"):
            start_tls(raw, "127.0.0.1", client_context(tls_dir / "ca.pem"))
    assert tenant_sdk.TlsError is TlsError
