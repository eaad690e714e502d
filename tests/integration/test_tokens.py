"""Bearer tokens: what the file holds, and who is let in."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import Executor
from raw_peers import SECONDS
from typer.testing import CliRunner

import provider.serve.tokens
from provider.cli import app
from provider.observe.metrics import Metrics
from provider.serve.server import Server, server_context
from provider.serve.tokens import TokenFile
from shared.errors import AuthenticationError, ConfigurationError, ConnectError
from shared.wire.header import Direction, Operation


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    """A token file that does not exist yet."""
    return TokenFile(tmp_path / "tokens.json")


@pytest.fixture
def open_umask() -> Iterator[None]:
    """New files are readable by all unless their maker says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_the_file_holds_a_hash_and_nothing_else(tokens: TokenFile) -> None:
    token = tokens.add("alice")
    assert json.loads(tokens.path.read_text()) == {"alice": hashlib.sha256(token.encode()).hexdigest()}
    assert token not in tokens.path.read_text()
    assert len(token) >= 43  # 32 bytes in base64
    assert tokens.add("bob") != token


@pytest.mark.usefixtures("open_umask")
def test_only_its_owner_reads_it(tokens: TokenFile) -> None:
    leftover = tokens.path.with_name("tokens.json.new")
    leftover.write_text("{}")  # of a run that was cut off, and readable by all
    tokens.add("alice")
    assert stat.S_IMODE(tokens.path.stat().st_mode) == 0o600
    tokens.add("bob")
    assert stat.S_IMODE(tokens.path.stat().st_mode) == 0o600
    assert [path.name for path in tokens.path.parent.iterdir()] == ["tokens.json"]


def test_a_new_token_replaces_the_old_one(tokens: TokenFile) -> None:
    old, other = tokens.add("alice"), tokens.add("bob")
    new = tokens.add("alice")
    assert tokens.tenant_of(old) is None
    assert tokens.tenant_of(new) == "alice"
    assert tokens.tenant_of(other) == "bob"
    assert tokens.check_readable() == 2


@pytest.mark.parametrize("token", ["", "x", "\udcff", "\xff", "a" * 100_000, "alice", "\0"])
def test_anything_else_is_nobody(tokens: TokenFile, token: str) -> None:
    stored = json.loads(tokens.path.read_text())["alice"] if tokens.add("alice") else ""
    assert tokens.tenant_of(token) is None
    assert tokens.tenant_of(stored) is None


def test_every_entry_is_compared_in_constant_time(tokens: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: tokens.add(name) for name in ("alice", "bob", "carol")}
    compared: list[tuple[str, str]] = []

    def compare(a: str, b: str) -> bool:
        compared.append((a, b))
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(
        provider.serve.tokens, "hmac", type("", (), {"compare_digest": staticmethod(compare)})
    )
    for token, tenant in [(given["alice"], "alice"), (given["carol"], "carol"), ("nobody's", None)]:
        compared.clear()
        assert tokens.tenant_of(token) == tenant
        assert len(compared) == 3
        assert {len(text) for pair in compared for text in pair} == {64}


@pytest.mark.parametrize("name", ["", "a b", "../alice", "-alice", ".alice", "a" * 65, "a\n", "a/b", "é"])
def test_names_that_are_none(tokens: TokenFile, name: str) -> None:
    with pytest.raises(ConfigurationError, match="name"):
        tokens.add(name)
    assert not tokens.path.exists()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"alice": 1}', '{"alice": "é"}', '{"alice": "ab"}', '{"alice": {"hash": "x"}}', "\xff"],
)
def test_a_damaged_file_lets_nobody_in(tokens: TokenFile, text: str) -> None:
    tokens.path.write_text(text)
    for use in (tokens.check_readable, lambda: tokens.tenant_of("x"), lambda: tokens.add("bob")):
        with pytest.raises(ConfigurationError, match="not a token file"):
            use()
    assert tokens.path.read_text() == text


def test_a_missing_file_says_how_to_make_one(tokens: TokenFile) -> None:
    with pytest.raises(ConfigurationError, match="symbiosis-provider token add"):
        tokens.check_readable()


def test_changes_take_effect_without_a_restart(llama: Executor, tls_dir: Path, tokens: TokenFile) -> None:
    alice = tokens.add("alice")
    assert llama.server is not None
    server = Server(
        dataclasses.replace(llama.server.service, metrics=Metrics()),
        context=server_context(tls_dir),
        tokens=tokens,
        port=0,
    )
    executor = Executor(server.url, alice, llama.ca, server=server)
    with executor.connect() as session:
        bob = tokens.add("bob")
        executor.connect(token=bob).close()
        tokens.path.write_text(json.dumps({"bob": json.loads(tokens.path.read_text())["bob"]}))
        with pytest.raises(AuthenticationError):
            executor.connect()
        executor.connect(token=bob).close()
        tokens.path.unlink()
        with pytest.raises(ConnectError):
            executor.connect(token=bob)
        # A token is asked for when a session begins; sessions that are open stay.
        x = torch.ones((1, 64))
        (y,) = session.executor.submit(Operation.PRODUCT, 0, Direction.FORWARD, 1, [x]).result()
        assert y.shape == (1, 64)
    assert server.drain(SECONDS)


def test_the_command_prints_the_token_once(tokens: TokenFile) -> None:
    result = CliRunner().invoke(app, ["token", "add", "alice", "--token-file", str(tokens.path)])
    assert tokens.tenant_of(result.stdout.strip()) == "alice"
