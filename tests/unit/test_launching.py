"""Programs that are started, waited for and ended."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from shared.launching import LaunchError, Program

READY = (
    "import pathlib, sys, signal; print('hello', flush=True); pathlib.Path(sys.argv[1]).write_text('here'); "
)


def program(tmp_path: Path, code: str, **options: bool) -> Program:
    ready = tmp_path / "ready"
    return Program([sys.executable, "-c", code, ready], ready, tmp_path / "log", {"MARK": "1"}, **options)


def test_one_that_is_ready_and_is_ended(tmp_path: Path) -> None:
    (tmp_path / "ready").write_text("of an earlier one")
    with program(tmp_path, "import os; assert os.environ['MARK']; " + READY + "signal.pause()") as running:
        assert running.wait_until_ready() == "here"
    assert running.process.returncode == -signal.SIGTERM
    assert (tmp_path / "log").read_text() == "hello\n"


def test_one_that_ends(tmp_path: Path) -> None:
    running = program(tmp_path, "raise SystemExit('no model')")
    with pytest.raises(LaunchError, match=r"-c .* ended with status 1:\s*no model"):
        running.wait_until_ready()


def test_one_that_takes_too_long(tmp_path: Path) -> None:
    with program(tmp_path, "import signal; signal.pause()") as running, pytest.raises(LaunchError) as error:
        running.wait_until_ready(0.0)
    assert "is not ready after 0 s" in str(error.value)


def test_one_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.launching.END_SECONDS", 0.1)
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY + "signal.pause()"
    with program(tmp_path, code, group=True) as running:
        running.wait_until_ready()
    assert running.process.returncode == -signal.SIGKILL
