"""``serve --dev``: what it makes, what it prints, and that both processes end together."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shlex
import signal
import socket
import time
from pathlib import Path

import pytest
from commands import BASE_MODEL, finish, ok, start
from conftest import RING
from developments import development

from provider.serve.certificates import still_valid, write_certificates

SHORT: dict[str, list[str]] = {
    "doctor": [],
    "finetune": ["--sequence-length", "64", "--batch-size", "2"],
    "generate": ["--max-new-tokens", "4"],
}
NOW = datetime.datetime.now(datetime.UTC)


def source_of(folder: Path) -> int:
    """The process id of the mask source."""
    return int(json.loads((folder / "symbiosis-dev" / "masks" / "ready.json").read_bytes())["pid"])


def ends(pid: int, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        with contextlib.suppress(ChildProcessError, OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True  # nobody has asked for its exit status
        time.sleep(0.05)
    return False


def test_what_it_prints_can_be_typed(tmp_path: Path) -> None:
    with development(tmp_path, "--numerics", RING) as running:
        assert "masks hide nothing from whoever runs both" in running.printed
        assert set(running.tokens) == {"SYMBIOSIS_TOKEN", "SYMBIOSIS_MASK_TOKEN"}
        made = [path for path in (tmp_path / "symbiosis-dev").rglob("*") if path.is_file()]
        assert len(made) > 10
        for path in made:
            assert not any(token in path.read_text() for token in running.tokens.values()), path
        said = []
        for command in running.commands:
            program, *words = shlex.split(command)
            assert program == "symbiosis-tenant"
            words = [{"120": "2"}.get(word, word) for word in words]  # steps
            words += SHORT[words[0]]
            said.append(ok(start("tenant_sdk.cli", *words, cwd=tmp_path, secrets=running.tokens)))
        assert "lists what the provider lists" in said[0][0]
        assert "adapter: symbiosis-dev/adapter" in said[1][0]
        assert "4 tokens in" in said[2][1]
        source = source_of(tmp_path)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) == 0
        assert ends(source)

    # The folder is used again: the same authorities, other tokens.
    authority = (tmp_path / "symbiosis-dev" / "provider" / "ca.pem").read_bytes()
    with development(tmp_path, "--numerics", RING) as again:
        assert (tmp_path / "symbiosis-dev" / "provider" / "ca.pem").read_bytes() == authority
        assert not set(again.tokens.values()) & set(running.tokens.values())
        source = source_of(tmp_path)
        again.process.kill()
        assert ends(source)  # who is killed says nothing to anybody


def test_it_ends_with_its_mask_source(tmp_path: Path) -> None:
    with development(tmp_path) as running:
        os.kill(source_of(tmp_path), signal.SIGKILL)
        assert running.process.wait(60) == 1


def test_a_mask_source_that_cannot_start(tmp_path: Path) -> None:
    """It is told why, in the words of the log."""
    (tmp_path / "symbiosis-dev" / "masks" / "ready.json.new").mkdir(parents=True)
    status, out, err = finish(start("provider.cli", "serve", BASE_MODEL, "--dev", "--port", 0, cwd=tmp_path))
    assert (status, out) == (1, "")
    assert "the mask source ended by itself (status 78)" in err
    assert "its last line: error: cannot write the ready file" in err
    assert "Traceback" not in err


def test_what_is_refused(tmp_path: Path) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        dev = ("serve", BASE_MODEL, "--dev", "--port", port)
        running = {
            "choose another --port NUMBER": start("provider.cli", *dev, cwd=tmp_path),
            "leave out --tls-dir t": start("provider.cli", *dev, "--tls-dir", "t", cwd=tmp_path),
            "leave out --token-file t": start("provider.cli", *dev, "--token-file", "t", cwd=tmp_path),
            "--host 0.0.0.0 is none of": start("provider.cli", *dev, "--host", "0.0.0.0", cwd=tmp_path),
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
    assert (status, "is a profile of somebody's" in err) == (78, True)
    assert [path.name for path in tmp_path.iterdir()] == ["symbiosis.toml"]


@pytest.mark.parametrize(("days", "valid"), [(90, True), (0, False), (-1, False)])
def test_certificates_are_used_while_they_are_valid(tmp_path: Path, days: int, valid: bool) -> None:
    assert not still_valid(tmp_path, NOW)
    write_certificates(tmp_path, now=NOW - datetime.timedelta(days=2), days=days + 2)
    assert still_valid(tmp_path, NOW + datetime.timedelta(days=1)) == valid
    (tmp_path / "server.key").unlink()
    assert not still_valid(tmp_path, NOW)
