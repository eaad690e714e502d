"""How sessions end, and what the log says: a goodbye, a token that is valid no more, no room."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RING, TENANT, Executor
from raw_peers import ERROR, INT32, SECONDS, TEXT, eventually, open_raw, product

import tenant_sdk
from provider.config import ServeConfig
from provider.observe.metrics import Metrics
from provider.serve.provider import Provider
from provider.serve.tokens import TokenFile
from shared.errors import AuthenticationError, ConnectError, WireError
from shared.log_rate_limit import LogRateLimiter
from shared.wire.header import Direction, Operation
from tenant_sdk.connection.keys import ProductKey


class Served:
    """A provider with a token file and a clock of its own, by both transports."""

    def __init__(
        self, provider: Provider, tokens: TokenFile, ca: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.provider, self.tokens, self.ca, self._caplog = provider, tokens, ca, caplog

    def connect(self, url: str, token: str) -> tenant_sdk.Session:
        """With patience: it would wait for an executor that became unavailable."""
        ca = self.ca if url.startswith("wss") else None
        return Executor(url, token, self.ca).connect(ca=ca, patience=10 * SECONDS)

    def entries(self, start: str) -> list[Any]:
        return [record for record in self._caplog.records if record.getMessage().startswith(start)]


@pytest.fixture
def serving(
    checkpoint: Callable[[str], Path],
    tls_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Served]:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("provider.serve.provider.REVOKE_SECONDS", 0.05)
    tokens = TokenFile(tmp_path / "tokens.json")
    tokens.add("somebody")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own paths are too long for sockets
        config = ServeConfig(
            model_dir=checkpoint("llama"),
            tls_dir=tls_dir,
            token_file=tokens.path,
            port=0,
            numerics=RING,
            local_dir=Path(folder) / "here",
            max_connections=2,
        )
        with Provider(config) as provider:
            yield Served(provider, tokens, tls_dir / "ca.pem", caplog)


def ask(session: tenant_sdk.Session) -> None:
    rows = [torch.ones((1, 64), dtype=torch.int32)]
    session.executor.submit(Operation.PRODUCT, ProductKey(0, Direction.FORWARD, 1), rows).result()


@pytest.mark.parametrize("transport", ["url", "local_url"])
@pytest.mark.parametrize("how", ["removed", "replaced", "expired"])
def test_who_has_no_valid_token_any_more_is_shut_out(serving: Served, transport: str, how: str) -> None:
    tokens, url = serving.tokens, getattr(serving.provider, transport)
    other = tokens.add("other")
    with serving.connect(url, tokens.add(TENANT)) as session, serving.connect(url, other) as stays:
        ask(session)
        if how == "removed":
            tokens.remove(TENANT)
        elif how == "replaced":
            tokens.add(TENANT)
        else:
            past = datetime.now(UTC) - timedelta(days=40)
            TokenFile(tokens.path, lambda: past).add(TENANT, days=30)
        with pytest.raises(WireError, match=r"\[unauthorized\] the token of this session"):
            eventually(lambda: ask(session) is not None)
        with pytest.raises(AuthenticationError):
            ask(session)
        ask(stays)
    eventually(lambda: len(serving.entries("tenant other left")) == 1)
    (entry,) = serving.entries(f"tenant {TENANT} is shut out")
    peer = "127.0.0.1" if transport == "url" else "local"
    assert (entry.tenant, entry.peer, entry.reason) == (TENANT, peer, "revoked")
    assert not serving.entries("tenant other is shut out")


ROWS, COLUMNS, REQUESTS = 20_000, 64, 12


@pytest.mark.parametrize("patient", [True, False])
def test_a_slow_reader_is_shut_out_too(
    serving: Served, patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the answer that has begun, and the reason, and has seconds for both; the others are dropped."""
    if not patient:
        monkeypatch.setattr("provider.serve.websocket_connection.END_SECONDS", 0.0)
    quotas = serving.provider.server.service.quotas
    with open_raw(Executor(serving.provider.url, serving.tokens.add(TENANT), serving.ca)) as peer:
        peer.hello()
        for number in range(REQUESTS):
            head = product(ROWS, COLUMNS, dtype=INT32, request_id=number + 1)
            peer.message(head, bytes(ROWS * COLUMNS * 4))
        eventually(lambda: quotas.in_flight()[0] > 0 and not serving.provider.server.service.engine.waiting)
        serving.tokens.remove(TENANT)
        eventually(lambda: len(serving.entries(f"tenant {TENANT} is shut out")) == 1)
        if not patient:
            eventually(lambda: quotas.in_flight() == (0, 0))
            return
        eventually(lambda: quotas.in_flight()[0] <= 2 * ROWS)
        operations = [peer.receive()[0].operation]
        while operations[-1] != ERROR:
            operations.append(peer.receive()[0].operation)
        peer.receive_close()
        assert len(operations) < REQUESTS


def test_who_has_two_tokens_goes_on_with_either(serving: Served) -> None:
    tokens = serving.tokens
    old = tokens.add(TENANT)
    with serving.connect(serving.provider.url, old) as session:
        with serving.connect(serving.provider.url, tokens.rotate(TENANT)) as another:
            serving.provider.server.connections.end_revoked(tokens)
            ask(another)
            ask(session)
        tokens.path.write_text("{")  # an editor's slip shuts nobody out
        serving.provider.server.connections.end_revoked(tokens)
        ask(session)
    assert not serving.entries(f"tenant {TENANT} is shut out")


@pytest.mark.parametrize("transport", ["url", "local_url"])
def test_a_goodbye_is_no_broken_connection(serving: Served, transport: str) -> None:
    token = serving.tokens.add(TENANT)
    for _ in range(10):
        with serving.connect(getattr(serving.provider, transport), token) as session:
            ask(session)
    eventually(lambda: len(serving.entries(f"tenant {TENANT} left")) == 10)
    assert not serving.entries(f"tenant {TENANT}: connection ended")
    peer = "127.0.0.1" if transport == "url" else "local"
    for entry in serving.entries(f"tenant {TENANT} "):  # that it came, and that it left
        assert (entry.tenant, entry.peer) == (TENANT, peer)


def test_a_tenant_that_comes_and_goes_fills_no_log(serving: Served) -> None:
    limits = serving.provider.server.service.log_limits
    limits[TENANT] = LogRateLimiter(10 * SECONDS, 3)
    token = serving.tokens.add(TENANT)
    for _ in range(8):
        serving.connect(serving.provider.url, token).close()
    serving.connect(serving.provider.url, serving.tokens.add("other")).close()
    eventually(lambda: len(serving.entries("tenant other left")) == 1)
    assert [len(serving.entries(f"tenant {TENANT} {what}")) for what in ("connected", "left")] == [3, 3]


def test_a_tenant_that_breaks_the_protocol_again_and_again_fills_no_log(serving: Served) -> None:
    limits = serving.provider.server.service.log_limits
    limits[TENANT] = LogRateLimiter(10 * SECONDS, 3)
    executor = Executor(serving.provider.url, serving.tokens.add(TENANT), serving.ca)
    for _ in range(8):
        with open_raw(executor) as peer:
            peer.send(peer.frame(b"text", TEXT))
            while peer.sock.recv(1 << 16):  # the error, and the end
                pass
    told = [
        serving.entries(f"tenant {TENANT}{what}") for what in (" broke the protocol", ": connection ended")
    ]
    assert sum(map(len, told)) == 3


def test_an_expired_token_is_told_from_an_unknown_one(serving: Served) -> None:
    past = datetime.now(UTC) - timedelta(days=40)
    expired = TokenFile(serving.tokens.path, lambda: past).add(TENANT, days=30)
    for token, reason, tenant in ((expired, "expired", TENANT), ("A" * 43, "unauthorized", None)):
        with pytest.raises(AuthenticationError):
            serving.connect(serving.provider.url, token)
        eventually(lambda reason=reason: failed(serving, reason) == 1)  # type: ignore[misc]
        (entry,) = serving.entries(f"no session for 127.0.0.1: {reason}")
        assert (entry.peer, entry.reason) == ("127.0.0.1", reason)
        assert getattr(entry, "tenant", None) == tenant
        with pytest.raises(AuthenticationError):
            serving.connect(serving.provider.local_url, token)
        assert failed(serving, reason) == 2
        assert not any(token in record.getMessage() for record in serving.entries(""))


def failed(serving: Served, reason: str) -> float:
    metrics: Metrics = serving.provider.server.service.metrics
    return metrics.by_label("symbiosis_handshakes_failed_total", "reason")[reason]


def test_a_fault_in_a_handshake_is_counted(serving: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr("provider.serve.server.handshake", fails)
    with pytest.raises(ConnectError):
        Executor(serving.provider.url, "x", serving.ca).connect()
    eventually(lambda: failed(serving, "internal") == 1)


def test_metrics_show_when_tokens_end(serving: Served) -> None:
    tokens, metrics = serving.tokens, serving.provider.server.service.metrics
    tokens.add("soon", days=3)
    tokens.rotate("soon", days=30)  # the last one counts

    def ends() -> dict[str, float]:
        return metrics.by_label("symbiosis_token_expires_timestamp_seconds", "tenant")

    assert ends().keys() == {"soon"}  # those of others do not end
    assert ends()["soon"] == pytest.approx((datetime.now(UTC) + timedelta(days=30)).timestamp(), abs=SECONDS)
    tokens.path.write_text("{")
    assert ends() == {}


def test_a_full_executor_says_so_but_not_each_time(serving: Served) -> None:
    token, url = serving.tokens.add(TENANT), serving.provider.url
    with serving.connect(url, token), serving.connect(url, token):
        for _ in range(3):
            with pytest.raises(ConnectError):
                Executor(url, token, serving.ca).connect()
    assert failed(serving, "full") == 3
    (entry,) = serving.entries("no session for 127.0.0.1: full")
    assert (entry.levelname, entry.peer, entry.reason) == ("WARNING", "127.0.0.1", "full")
    assert "2 connections" in entry.getMessage()


def test_tls_names_what_it_stumbled_over(serving: Served, tmp_path: Path) -> None:
    import datetime as times

    from provider.serve.certificates import write_certificates

    write_certificates(tmp_path / "other", now=times.datetime.now(UTC))
    with pytest.raises(ConnectError):
        Executor(serving.provider.url, "x", tmp_path / "other" / "ca.pem").connect()
    eventually(lambda: failed(serving, "tls") == 1)
    (entry,) = serving.entries("no session for 127.0.0.1: tls")
    assert "TLSV1_ALERT_UNKNOWN_CA" in entry.getMessage()
