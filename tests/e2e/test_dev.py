"""``serve --dev``: what it makes, what it prints, and that both processes end together."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import shlex
import shutil
import signal
import socket
import tomllib
from pathlib import Path

import pytest
import torch
from commands import BASE_MODEL, finish, ok, start
from conftest import RING
from developments import development
from raw_peers import eventually

import provider.dev
import tenant_sdk
from provider.config import ServeConfig
from provider.dev import _COMMANDS, Development, _party
from provider.serve import certificates
from provider.serve.certificates import still_valid, write_certificates
from provider.serve.tokens import TokenFile
from shared.atomic import write_atomically
from shared.errors import SymbiosisError
from shared.launching import free_port

SHORT: dict[str, list[str]] = {
    "doctor": [],
    "finetune": ["--sequence-length", "64", "--batch-size", "2"],
    "generate": ["--max-new-tokens", "4"],
}
NOW = datetime.datetime.now(datetime.UTC)


def source_of(folder: Path) -> int:
    """The process id of the mask source."""
    return int(json.loads((folder / "symbiosis-dev" / "masks" / "ready.json").read_bytes())["pid"])


def ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"  # nobody has asked for its exit status


def test_what_it_prints_can_be_typed(tmp_path: Path) -> None:
    with development(tmp_path, "--numerics", RING) as running:
        assert "the masks hide nothing from their operator" in running.printed
        for party in ("provider", "masks"):
            kept = tmp_path / "symbiosis-dev" / party / "token"
            assert kept.stat().st_mode & 0o777 == 0o600
            assert kept.read_text() not in running.printed
        said = []
        for command in running.commands:
            program, *words = shlex.split(command)
            assert program == "symbiosis-tenant"
            words = [{"120": "2"}.get(word, word) for word in words]  # steps
            words += SHORT[words[0]]
            said.append(ok(start("tenant_sdk.command_line.main", *words, cwd=tmp_path)))
        assert "lists the same files and parameters as the provider" in said[0][0]
        assert "adapter: symbiosis-dev/adapter" in said[1][0]
        assert "4 tokens in" in said[2][1]
        source = source_of(tmp_path)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(800) == 0
        eventually(lambda: ended(source))

    assert "allow_transcript" not in (tmp_path / "symbiosis-dev" / "symbiosis.toml").read_text()


def test_a_tenant_goes_on_after_a_restart(tmp_path: Path) -> None:
    """In the folder, with the authorities and tokens of the first run."""
    port, folder = free_port(), tmp_path / "symbiosis-dev"
    with contextlib.ExitStack() as opened:
        with development(tmp_path, "--numerics", RING, "--port", port, "--transcript", "t") as first:
            assert "The mask source is not recorded" in first.printed
            profile = tomllib.loads((folder / "symbiosis.toml").read_text())
            assert profile["allow_transcript"] is True
            (source,) = profile["mask_sources"]
            session = opened.enter_context(
                tenant_sdk.connect(
                    profile["provider"],
                    token=(folder / "provider" / "token").read_text(),
                    ca=folder / profile["ca"],
                    mask_sources=[source["url"]],
                    mask_source_token=(folder / "masks" / "token").read_text(),
                    mask_source_ca=folder / source["ca"],
                    allow_same=set(profile["allow_same"]),
                    allow_transcript=True,
                    mask_budget_mib=0.0,
                    patience=120.0,
                )
            )
            model = session.load_model(progress=False)
            words = torch.arange(8)[None]
            before = model(words).logits
            kept = [folder / party / name for party in ("provider", "masks") for name in ("ca.pem", "token")]
            contents = [path.read_bytes() for path in kept]
            first.process.send_signal(signal.SIGTERM)
            assert first.process.wait(800) == 0
        with development(tmp_path, "--numerics", RING, "--port", port, "--transcript", "t") as second:
            again = tomllib.loads((folder / "symbiosis.toml").read_text())
            assert (again["provider"], again["mask_sources"]) == (profile["provider"], [source])
            assert torch.equal(model(words).logits, before)
            assert session.stats.reconnections >= 2
            assert [path.read_bytes() for path in kept] == contents
            masks = source_of(tmp_path)
            second.process.kill()
            eventually(lambda: ended(masks))  # who is killed says nothing to anybody


@pytest.mark.parametrize("taken", [False, True])
def test_the_mask_source_keeps_its_port_if_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, taken: bool
) -> None:
    port, config = free_port(), ServeConfig(model_dir=BASE_MODEL, dev=True, dev_dir=tmp_path)
    assert Development(config)._source_port() == 0  # there was none before
    (tmp_path / "symbiosis.toml").write_text(f'[[mask_sources]]\nurl = "wss://127.0.0.1:{port}"\n')
    with contextlib.ExitStack() as opened:
        if taken:
            opened.enter_context(contextlib.closing(socket.create_server(("127.0.0.1", port))))
        assert Development(config)._source_port() == (0 if taken else port)
    assert ("is in use, so it gets another one" in caplog.text) == taken


def test_a_token_is_kept_while_it_is_valid(tmp_path: Path) -> None:
    kept, tokens = tmp_path / "token", TokenFile(tmp_path / "tokens.json")
    _party(tmp_path)
    first = kept.read_text()
    _party(tmp_path)
    assert kept.read_text() == first
    for change in (lambda: kept.write_text("another"), kept.unlink, tokens.path.unlink):
        change()
        _party(tmp_path)
        assert tokens.tenant_of(kept.read_text()) == "dev"
        assert tokens.count_valid("dev") == 1


def test_what_it_prints_fits_the_model(tmp_path: Path) -> None:
    """A chat model is trained on chats, with settings of its own size, and asked in a chat."""
    chats = tmp_path / "chats"
    shutil.copytree(BASE_MODEL, chats)
    (chats / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    plain = tmp_path / "plain"
    shutil.copytree(BASE_MODEL, plain)
    for model, data, use in (
        (
            BASE_MODEL,
            "note_fields_train.jsonl --steps 120 --rank 16 --learning-rate 0.005 --base",
            "generate",
        ),
        (plain, f"note_fields_train.jsonl --base {plain} --output", "generate"),
        (chats, "chats_heldout.jsonl --epochs 1 --batch-size 4 --packing --learning-rate 0.002", "chat"),
    ):
        words = Development(ServeConfig(model_dir=model, dev=True, dev_dir=tmp_path / "dev"))._training()
        training = _COMMANDS.format(one_operator="", also="", folder="", **words)
        assert data in training
        assert f"symbiosis-tenant {use} --profile" in training


def test_it_ends_with_its_mask_source(tmp_path: Path) -> None:
    """And reads its certificate again together with it."""
    log = tmp_path / "symbiosis-dev" / "masks" / "log"
    with development(tmp_path) as running:
        running.process.send_signal(signal.SIGHUP)
        eventually(lambda: log.read_text().count("certificate for localhost") == 2)
        os.kill(source_of(tmp_path), signal.SIGKILL)
        assert running.process.wait(800) == 1


def test_a_mask_source_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told why, in the words of the log."""
    folder, made = tmp_path / "symbiosis-dev", provider.dev.source_command

    def damaged(config: ServeConfig, ready: Path, port: int = 0) -> list[str]:
        (config.dev_dir / "masks" / "tokens.json").write_text("{")
        return made(config, ready, port)

    monkeypatch.setattr(provider.dev, "source_command", damaged)
    config = ServeConfig(model_dir=BASE_MODEL, dev=True, dev_dir=folder)
    with Development(config) as running, pytest.raises(SymbiosisError) as caught:
        running.instructions("wss://localhost:1")
    assert "the mask source ended by itself (status 78)" in str(caught.value)
    assert "its last line: error:" in str(caught.value)
    assert "is not a token file" in str(caught.value)


def test_what_is_refused(tmp_path: Path) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        dev = ("serve", BASE_MODEL, "--dev", "--port", port)
        running = {
            "choose another --port NUMBER": start("provider.cli", *dev, cwd=tmp_path),
            "leave out --tls-dir t": start("provider.cli", *dev, "--tls-dir", "t", cwd=tmp_path),
            "leave out --token-file t": start("provider.cli", *dev, "--token-file", "t", cwd=tmp_path),
            "--host 0.0.0.0 must be one of": start("provider.cli", *dev, "--host", "0.0.0.0", cwd=tmp_path),
            "leave out --numerics float32": start(
                "provider.cli", *dev, "--numerics", "float32", cwd=tmp_path
            ),
        }
        for said, process in running.items():
            status, _, err = finish(process)
            assert (status, said in err) == (78, True), err
            assert "reading" not in err  # nothing has been loaded
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "symbiosis.toml").write_text('provider = "wss://mine.example"')
    status, _, err = finish(
        start("provider.cli", "serve", BASE_MODEL, "--dev", "--port", 0, "--dev-dir", ".", cwd=tmp_path)
    )
    assert (status, "is a profile that this command did not make" in err) == (78, True)
    assert [path.name for path in tmp_path.iterdir()] == ["symbiosis.toml"]


@pytest.mark.parametrize(("days", "valid"), [(90, True), (0, False), (-1, False)])
def test_certificates_are_used_while_they_are_valid(tmp_path: Path, days: int, valid: bool) -> None:
    assert not still_valid(tmp_path, NOW)
    write_certificates(tmp_path, now=NOW - datetime.timedelta(days=2), days=days + 2)
    assert still_valid(tmp_path, NOW + datetime.timedelta(days=1)) == valid
    (tmp_path / "server.key").unlink()
    assert not still_valid(tmp_path, NOW)


@pytest.mark.parametrize("last", ["server.pem", "server.key", "client.pem", "client.key"])
def test_certificates_that_were_renewed_in_part_are_not_used(
    tmp_path: Path, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or a signal, ends the renewal after one of the files."""
    write_certificates(tmp_path, now=NOW)
    assert still_valid(tmp_path, NOW)

    def ends(path: Path, content: bytes, mode: int = 0o600) -> None:
        write_atomically(path, content, mode)
        if path.name == last:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(certificates, "write_atomically", ends)
    with pytest.raises(OSError, match="No space left"):
        write_certificates(tmp_path, now=NOW)
    assert not still_valid(tmp_path, NOW)
