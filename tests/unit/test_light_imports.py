"""What takes seconds to import is imported when it is needed, not for a help or a wrong option."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPORT = """
import atexit, sys
atexit.register(lambda: print("IMPORTED", *({"torch", "transformers", "peft"} & sys.modules.keys())))
"""
TENANT = ("--provider", "wss://localhost:1", "--token-env", "HOME")


def run(program: str, *arguments: str) -> tuple[list[str], str]:
    """Which of the heavy were imported, and what it said."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT + program, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said, _, imported = done.stdout.rpartition("IMPORTED")
    return imported.split(), said + done.stderr


def main(package: str) -> str:
    return f"from {package}.cli import main; main()"


def test_the_sdk_itself() -> None:
    assert run("import tenant_sdk, tenant_sdk.config, tenant_sdk.cli, provider.cli, security.cli") == ([], "")


def test_the_report_tells_what_was_imported() -> None:
    assert run("import tenant_sdk, torch; tenant_sdk.Stats")[0] == ["torch"]


def test_every_name_of_the_sdk_is_there() -> None:
    program = "import tenant_sdk\nfor name in tenant_sdk.__all__: assert name in dir(tenant_sdk); getattr"
    imported, said = run(f"{program}(tenant_sdk, name)")
    assert set(imported) >= {"torch", "transformers"}
    assert said == ""
    assert "has no attribute 'nothing'" in run("import tenant_sdk; tenant_sdk.nothing")[1]


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("provider", ""),
        ("provider", "serve"),
        ("tenant_sdk", ""),
        ("tenant_sdk", "finetune"),
        ("tenant_sdk", "generate"),
        ("tenant_sdk", "doctor"),
        ("tenant_sdk", "fingerprint"),
        ("security", ""),
        ("security", "run"),
    ],
)
def test_help(package: str, command: str) -> None:
    imported, said = run(main(package), *command.split(), "--help")
    assert "Usage:" in said
    assert imported == []


@pytest.mark.parametrize(
    ("package", "arguments", "message"),
    [
        ("provider", ("serve", "m", "--tls-dir", "t", "--token-file", "f", "--batching", "x"), "--batching"),
        ("provider", ("serve", "m", "--config", "no such file"), "cannot read no such file"),
        ("tenant_sdk", ("generate", *TENANT, "--prompt", "x"), "needs a mask source"),
        ("tenant_sdk", ("generate", *TENANT, "--prompt", "x", "--mask-source", "wss://m"), "own token"),
        ("tenant_sdk", ("generate", *TENANT, "--privacy", "plain", "--prompt", "x", "--top-p", "2"), "top-p"),
        (
            "tenant_sdk",
            ("finetune", *TENANT, "--privacy", "plain", "--data", "d", "--output", "o", "--method", "dora"),
            "unknown method 'dora'",
        ),
        ("tenant_sdk", ("doctor", *TENANT, "--allow-same", "all"), "allow_same"),
    ],
)
def test_a_wrong_option(package: str, arguments: tuple[str, ...], message: str) -> None:
    imported, said = run(main(package), *arguments)
    assert message in said
    assert imported == []
