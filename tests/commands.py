"""The command lines as processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from click.testing import Result
from conftest import Executor
from typer.testing import CliRunner

from tenant_sdk.command_line.main import app

ROOT = Path(__file__).parents[1]
BASE_MODEL = ROOT / "examples" / "base_model"
TRAIN, HELD_OUT = (ROOT / "examples" / "data" / f"clinic_notes_{name}.txt" for name in ("train", "heldout"))
# Short processes on a machine with few cores: a second thread costs more than it brings.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
SECONDS = 800


def start(
    module: str,
    *arguments: object,
    token: str | None = None,
    secrets: dict[str, str] | None = None,
    **options: object,
) -> subprocess.Popen[str]:
    environment = {**ENVIRONMENT, **(secrets or {})} | ({} if token is None else {"TENANT_TOKEN": token})
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        text=True,
        env=environment,
        **{  # type: ignore[call-overload]
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **options,
        },
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return process.returncode, out, err


def ok(process: subprocess.Popen[str]) -> tuple[str, str]:
    status, out, err = finish(process)
    assert status == 0, f"{process.args}\n{out}\n{err}"
    return out, err


def at(executor: Executor) -> tuple[object, ...]:
    """The options that a tenant gives to reach an executor."""
    return ("--provider", executor.url, "--ca", executor.ca, "--token-env", "TENANT_TOKEN")


def tenant(command: str, executor: Executor, *more: object, **options: object) -> subprocess.Popen[str]:
    return start(
        "tenant_sdk.command_line.main",
        command,
        *at(executor),
        *more,
        **({"token": executor.token} | options),  # type: ignore[arg-type]
    )


def here(command: str, executor: Executor, *more: object, secrets: dict[str, str] | None = None) -> Result:
    """What ``tenant`` starts, in this process, which has imported already what takes seconds."""
    environment = {"TENANT_TOKEN": executor.token, **(secrets or {})}
    return CliRunner().invoke(app, list(map(str, (command, *at(executor), *more))), env=environment)


def ok_here(command: str, executor: Executor, *more: object, **options: dict[str, str]) -> tuple[str, str]:
    """As ``ok``."""
    done = here(command, executor, *more, **options)
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.stdout, done.stderr
