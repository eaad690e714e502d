"""Bearer tokens: what the file holds, and who is let in."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RING, Executor
from raw_peers import SECONDS
from typer.testing import CliRunner

import provider.serve.tokens
from provider.cli import app
from provider.observe.metrics import Metrics
from provider.serve.server import Server, server_context
from provider.serve.tokens import TokenFile
from shared.errors import AuthenticationError, ConfigurationError
from shared.wire.header import Direction, Operation
from tenant_sdk.command_line.main import app as tenant_app
from tenant_sdk.connection.keys import ProductKey


class Clock:
    """Says what it is set to."""

    def __init__(self) -> None:
        self.now = datetime(2020, 3, 1, 12, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def pass_days(self, days: float) -> None:
        self.now += timedelta(days=days)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(tmp_path: Path, clock: Clock) -> TokenFile:
    """A token file that does not exist yet."""
    return TokenFile(tmp_path / "tokens.json", clock)


@pytest.fixture
def open_umask() -> Iterator[None]:
    """New files are readable by all unless their maker says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_the_file_holds_a_hash_a_time_and_nothing_else(tokens: TokenFile) -> None:
    token = tokens.add("alice")
    entry = {"sha256": hashlib.sha256(token.encode()).hexdigest(), "made": "2020-03-01T12:00:00Z"}
    assert json.loads(tokens.path.read_text()) == {"alice": [entry]}
    assert token not in tokens.path.read_text()
    assert len(token) >= 43  # 32 bytes in base64
    assert tokens.add("bob") != token


@pytest.mark.usefixtures("open_umask")
def test_only_its_owner_reads_it(tokens: TokenFile) -> None:
    tokens.add("alice")
    assert stat.S_IMODE(tokens.path.stat().st_mode) == 0o600
    tokens.add("bob")
    assert stat.S_IMODE(tokens.path.stat().st_mode) == 0o600
    assert [path.name for path in tokens.path.parent.iterdir()] == ["tokens.json"]


def test_changes_wait_for_each_other(tokens: TokenFile) -> None:
    """Also the first ones, which make the file. Those who can read the folder alone hold nobody up."""
    folder = os.open(tokens.path.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    tokens.add("first")
    names = [f"tenant-{number}" for number in range(12)]
    with ThreadPoolExecutor(12) as threads:
        given = [*threads.map(TokenFile(tokens.path).add, names)]
        os.close(folder)
    assert [tokens.tenant_of(token) for token in given] == names
    tokens.path.unlink()
    with ThreadPoolExecutor(12) as threads:
        given = [*threads.map(TokenFile(tokens.path).add, names)]
    assert [TokenFile(tokens.path).tenant_of(token) for token in given] == names


def test_a_change_does_not_wait_for_ever(tokens: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group may read a token file, and so lock it."""
    monkeypatch.setattr("provider.file_lock.SECONDS", 0.0)
    tokens.add("alice")
    with tokens.path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for change in (tokens.add, tokens.rotate, tokens.remove):
            with pytest.raises(ConfigurationError, match=r"cannot change .*: another process holds its lock"):
                change("alice")
    tokens.remove("alice")


def test_a_new_token_replaces_the_old_one(tokens: TokenFile) -> None:
    old, other = tokens.add("alice"), tokens.add("bob")
    new = tokens.add("alice")
    assert tokens.tenant_of(old) is None
    assert tokens.tenant_of(new) == "alice"
    assert tokens.tenant_of(other) == "bob"
    assert tokens.check_readable() == 2


@pytest.mark.parametrize("token", ["", "x", "\udcff", "\xff", "a" * 100_000, "alice", "\0"])
def test_anything_else_is_nobody(tokens: TokenFile, token: str) -> None:
    tokens.add("alice")
    (stored,) = json.loads(tokens.path.read_text())["alice"]
    assert tokens.tenant_of(token) is None
    assert tokens.tenant_of(stored["sha256"]) is None


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
    [
        *(
            "{",
            "[]",
            '{"alice": 1}',
            '{"alice": "é"}',
            '{"alice": "ab"}',
            '{"alice": {"hash": "x"}}',
            "\xff",
        ),
        '{"alice": [{"sha256": "ab"}]}',
        '{"alice": [{"sha256": "%s", "expires": "2020-03-01T12:00:00"}]}' % ("0" * 64),  # of no zone
        '{"alice": [{"sha256": "%s", "until": "2020-03-01T12:00:00Z"}]}' % ("0" * 64),
    ],
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


def test_an_empty_file_says_how_to_make_another(tokens: TokenFile) -> None:
    """One is left behind if a process is killed that makes a file where there are no hard links."""
    tokens.path.touch()
    with pytest.raises(ConfigurationError, match="is empty; remove it, and make it again with `symbiosis-"):
        tokens.add("bob")


@pytest.mark.parametrize("slip", ["broken", "latin", "removed", "folder"])
def test_a_file_that_breaks_while_it_is_used_locks_nobody_out(
    tokens: TokenFile, caplog: pytest.LogCaptureFixture, slip: str
) -> None:
    alice = tokens.add("alice")
    good = tokens.path.read_bytes()
    assert tokens.check_readable() == 1
    tokens.path.unlink()
    if slip == "broken":
        tokens.path.write_text('{"broken')
    elif slip == "latin":
        tokens.path.write_bytes(good[:-1] + ', "Jürg": []}'.encode("latin-1"))
    elif slip == "folder":
        tokens.path.mkdir()
    with caplog.at_level(logging.INFO):
        assert [tokens.tenant_of(each) for each in (alice, "x", alice)] == ["alice", None, "alice"]
        (record,) = caplog.records  # once, not for each who comes
        assert record.levelname == "ERROR"
        assert str(tokens.path) in record.getMessage()
        assert "the tokens that were read last are still valid" in record.getMessage()
        if slip == "folder":
            tokens.path.rmdir()
        tokens.path.write_bytes(good)
        bob = tokens.add("bob")
        assert [tokens.tenant_of(each) for each in (alice, bob)] == ["alice", "bob"]
        assert [each.levelname for each in caplog.records] == ["ERROR", "INFO"]
    tokens.remove("alice")
    assert tokens.tenant_of(bob) == "bob"
    tokens.path.write_text("{")  # what was revoked stays so
    assert tokens.tenant_of(alice) is None
    assert alice not in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_owner_group_and_mode_stay(tokens: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens.add("alice")
    os.chown(tokens.path, 12345, 23456)
    tokens.path.chmod(0o640)
    for change in (lambda: tokens.add("bob"), lambda: tokens.rotate("alice"), lambda: tokens.remove("bob")):
        change()
        now = tokens.path.stat()
        assert (stat.S_IMODE(now.st_mode), now.st_uid, now.st_gid) == (0o640, 12345, 23456)
    before = tokens.path.read_bytes()

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(ConfigurationError, match="belongs to user 12345; run this as that user"):
        tokens.add("carol")
    assert tokens.path.read_bytes() == before
    assert [path.name for path in tokens.path.parent.iterdir()] == ["tokens.json"]


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
        tokens.path.unlink()  # a slip: who was known stays known
        executor.connect(token=bob).close()
        with pytest.raises(AuthenticationError):
            executor.connect()
        # A token is asked for when a session begins; sessions that are open stay.
        x = torch.ones((1, 64))
        (y,) = session.executor.submit(Operation.PRODUCT, ProductKey(0, Direction.FORWARD, 1), [x]).result()
        assert y.shape == (1, 64)
    assert server.drain(SECONDS)


# -- expiry and rotation ---------------------------------------------------------------------------


def test_a_token_ends_and_its_holder_is_told(tokens: TokenFile, clock: Clock) -> None:
    short, lasting = tokens.add("alice", days=3), tokens.add("bob")
    clock.pass_days(2.999)
    assert tokens.tenant_of(short) == "alice"
    clock.pass_days(0.001)
    with pytest.raises(
        AuthenticationError, match="this token expired at 2020-03-04 12:00 UTC; ask the provider"
    ):
        tokens.tenant_of(short)
    assert tokens.tenant_of(lasting) == "bob"
    assert tokens.tenant_of("nobody's") is None


def test_two_tokens_are_valid_while_one_is_rotated(tokens: TokenFile, clock: Clock) -> None:
    old, other = tokens.add("alice"), tokens.add("bob", days=100)
    new = tokens.rotate("alice", days=30)
    clock.pass_days(6.9)
    assert [tokens.tenant_of(each) for each in (old, new, other)] == ["alice", "alice", "bob"]
    newest = tokens.rotate("alice", overlap_days=14)  # the first is forgotten: no more than two at a time
    assert [tokens.tenant_of(each) for each in (old, new, newest)] == [None, "alice", "alice"]
    clock.pass_days(14)
    with pytest.raises(AuthenticationError, match="expired"):
        tokens.tenant_of(new)
    assert tokens.tenant_of(newest) == "alice"
    assert tokens.check_readable() == 2


def test_rotation_lengthens_no_life(tokens: TokenFile, clock: Clock) -> None:
    old = tokens.add("alice", days=2)
    tokens.rotate("alice", overlap_days=7)
    clock.pass_days(2)
    with pytest.raises(AuthenticationError):
        tokens.tenant_of(old)


def test_without_overlap_the_old_token_ends_at_once(tokens: TokenFile) -> None:
    old = tokens.add("alice")
    new = tokens.rotate("alice", overlap_days=0)
    assert [tokens.tenant_of(each) for each in (old, new)] == [None, "alice"]
    with pytest.raises(ConfigurationError, match="no tenant 'carol'"):
        tokens.rotate("carol")


def test_files_without_times_are_read_and_kept(tokens: TokenFile) -> None:
    former = {"alice": hashlib.sha256(b"first").hexdigest(), "bob": hashlib.sha256(b"second").hexdigest()}
    tokens.path.write_text(json.dumps(former))
    assert tokens.tenant_of("first") == "alice"
    carol, alice = tokens.add("carol"), tokens.rotate("alice")
    found = [tokens.tenant_of(each) for each in ("first", alice, "second", carol)]
    assert found == ["alice", "alice", "bob", "carol"]


def test_a_warning_some_days_before(
    tokens: TokenFile, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    tokens.add("alice", days=10)
    tokens.add("bob")
    tokens.add("carol", days=10)
    token = tokens.rotate("carol", days=100)  # who has a newer one needs no warning
    with caplog.at_level(logging.WARNING):
        tokens.warn()
        assert not caplog.records
        clock.pass_days(4)
        tokens.warn()
        (record,) = caplog.records
        assert "tenant alice expires at 2020-03-11 12:00 UTC" in record.getMessage()
        assert (record.tenant, record.seconds) == ("alice", 6 * 86400)  # type: ignore[attr-defined]
        tokens.path.write_text("{")
        tokens.warn()
        assert "not a token file" in caplog.text
    assert token not in caplog.text


def test_a_file_that_all_may_read_is_mentioned(tokens: TokenFile, caplog: pytest.LogCaptureFixture) -> None:
    tokens.add("alice")
    tokens.path.chmod(0o640)
    tokens.warn()
    assert not caplog.records
    tokens.path.chmod(0o644)
    tokens.warn()
    assert f"chmod 640 {tokens.path}" in caplog.text


def test_who_has_only_expired_tokens_is_not_counted(tokens: TokenFile, clock: Clock) -> None:
    tokens.add("alice", days=1)
    tokens.add("bob")
    assert tokens.check_readable() == 2
    clock.pass_days(1)
    assert tokens.check_readable() == 1


@pytest.mark.parametrize("local", [False, True])
def test_who_comes_with_an_expired_token_reads_why(
    serve_process: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
    tokens: TokenFile,
    clock: Clock,
    local: bool,
) -> None:
    clock.now = datetime.now(UTC) - timedelta(days=3)
    former, valid = tokens.add("alice", days=2), tokens.add("bob", days=5)
    with tempfile.TemporaryDirectory() as folder:
        more = ("--local-dir", f"{folder}/here") if local else ()
        executor = serve_process(checkpoint("llama"), "--token-file", str(tokens.path), *more)
        if local:
            executor = dataclasses.replace(executor, url=f"ipc://{folder}/here")
        to = {"ca": None} if local else {}
        with pytest.raises(
            AuthenticationError,
            match=r"this token expired at .* UTC; ask its operator for a new one",
        ):
            executor.connect(token=former, **to)
        executor.connect(token=valid, **to).close()
    assert executor.log is not None
    log = executor.log.read_text()
    assert "the token of tenant bob expires" in log
    assert former not in log
    assert valid not in log


# -- the commands ----------------------------------------------------------------------------------


def command(*words: object) -> tuple[str, str]:
    """What it prints, and what it says beside."""
    result = CliRunner().invoke(app, ["token", *map(str, words)])
    assert result.exit_code == 0, result
    return result.stdout, result.stderr


def test_who_is_refused_reads_where_the_token_is_from(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = serve(checkpoint("llama"), numerics=RING)
    monkeypatch.setenv("GOOD", executor.token)
    monkeypatch.setenv("BAD", "x" * 43)
    other = executor.url.replace("127.0.0.1", "localhost")
    where = ("generate", "--prompt", "x", "--provider", executor.url, "--ca", str(executor.ca))
    source = ("--mask-source", other, "--mask-source-ca", str(executor.ca), "--allow-same", "all")

    def refused(*words: str) -> str:
        error = CliRunner().invoke(tenant_app, [*where, *words]).exception
        assert isinstance(error, AuthenticationError)
        return str(error)

    said = refused("--token-env", "BAD", "--privacy", "plain")
    assert said.startswith(
        f"{executor.url} refused the token: missing or unknown bearer token; ask its operator"
    )
    assert said.endswith("This one was given with --token-env BAD")
    said = refused("--token-env", "GOOD", *source, "--mask-source-token-env", "BAD")
    assert said.startswith(f"mask source {other} refused the token")
    assert said.count(other) == 1
    assert "ask the provider" not in said
    assert said.endswith("This one was given with --mask-source-token-env BAD")


def test_the_command_prints_the_token_once_and_how_long_it_is_valid(tokens: TokenFile) -> None:
    tokens._clock = lambda: datetime.now(UTC)
    file = ("--token-file", tokens.path)
    out, said = command("add", "alice", *file)
    assert tokens.tenant_of(out.strip()) == "alice"
    assert "valid for ever; --days N makes one that expires" in said
    new, said = command("rotate", "alice", *file, "--days", 30)
    assert "valid for 30 days" in said
    assert [tokens.tenant_of(each.strip()) for each in (out, new)] == ["alice", "alice"]


def test_the_list_shows_no_token_and_no_hash(tokens: TokenFile) -> None:
    tokens.path.write_text(json.dumps({"former": "0" * 64}))
    given = [tokens.add("alice", days=1), tokens.rotate("alice"), tokens.add("bob")]
    out, _ = command("list", "--token-file", tokens.path)
    lines = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert lines == [
        ["TENANT", "MADE", "EXPIRES"],
        ["alice", "2020-03-01 12:00", "2020-03-02 12:00 (expired)"],
        ["alice", "2020-03-01 12:00", "never"],
        ["bob", "2020-03-01 12:00", "never"],
        ["former", "unknown", "never"],
    ]
    for token in given:
        assert token not in out
    assert not re.search("[0-9a-f]{8}", out)


def test_the_command_says_which_tokens_it_ended(tokens: TokenFile) -> None:
    file = ("--token-file", tokens.path)
    assert "ended" not in command("add", "alice", *file)[1]
    command("rotate", "alice", *file)
    said = command("add", "alice", *file, "--days", 1)[1]
    assert "this ended 2 older tokens of alice; `token rotate` keeps the newest for a while" in said
    assert "valid for 1 day;" in said


def test_mistakes_look_alike(tokens: TokenFile) -> None:
    for words in (("add", ""), ("add", "alice", "--days", "0")):
        result = CliRunner().invoke(app, ["token", *words, "--token-file", str(tokens.path)])
        assert result.exit_code == 2
        assert "Usage" in result.output
    assert not tokens.path.exists()
    result = CliRunner().invoke(app, ["token", "list", "--token-file", str(tokens.path)])
    assert result.output == ""  # no table in front of the error
    assert "does not exist" in str(result.exception)


def test_a_change_waits_for_another(tmp_path: Path) -> None:
    """A tenant that is removed while another is added must not come back."""
    path = tmp_path / "tokens.json"
    TokenFile(path).add("carol")
    adding = TokenFile(path)
    write, removing = adding._write, threading.Thread(target=TokenFile(path).remove, args=("carol",))

    def write_late(tokens: Any) -> None:
        removing.start()
        removing.join(0.3)  # it would be done by now
        write(tokens)

    adding._write = write_late  # type: ignore[method-assign]
    adding.add("dave")
    removing.join()
    assert (TokenFile(path).count_valid("carol"), TokenFile(path).count_valid("dave")) == (0, 1)
