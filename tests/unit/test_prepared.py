"""Programs that the prepared process forks are like those that are executed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import prepared
import pytest

SERVE = [sys.executable, "-m", "provider.cli", "serve"]


def forked(process: subprocess.Popen[str]) -> bool:
    assert isinstance(process, prepared.Popen)
    return process._status is not None


@pytest.mark.parametrize(
    "words",
    [
        ["provider.cli", "--version"],
        ["provider.cli", "serve", "nothing"],
        ["tenant_sdk.command_line.main", "finetune"],
        ["security.cli", "--help"],
    ],
)
def test_it_says_and_returns_the_same(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = []
    for allowed in ("yes", "no"):
        monkeypatch.setenv("TEST_PREPARED", allowed)
        command = [sys.executable, "-m", *words]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        ) as process:
            done.append((*process.communicate(timeout=800), process.returncode))
            assert forked(process) == (allowed == "yes")
    assert done[0] == done[1]


def test_it_has_its_folder_variables_and_session(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*SERVE, f"{prepared.ROOT}/examples/base_model", "--dev", "--port", "0"],
        env={**os.environ, "TZ": "Asia/Tokyo"},
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert forked(process)
        assert process.stdout is not None
        assert b"+0900" in process.stdout.readline()
        assert os.readlink(f"/proc/{process.pid}/cwd") == str(tmp_path)
        assert os.getsid(process.pid) == process.pid
        process.kill()
        assert process.wait(800) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_others_are_executed(tmp_path: Path) -> None:
    for command, more in (
        ([sys.executable, "-c", ""], {}),
        ([sys.executable, "-B", "-m", "provider.cli", "--version"], {}),
        ([*SERVE, "--help"], {"OMP_NUM_THREADS": "7"}),
        ([*SERVE, "--help"], {"PYTHONPATH": f"{tmp_path}:{prepared.ROOT}"}),
    ):
        with subprocess.Popen(
            command, env={**os.environ, **more}, stdout=subprocess.DEVNULL, text=True
        ) as process:
            assert not forked(process)
            assert process.wait(800) == 0
