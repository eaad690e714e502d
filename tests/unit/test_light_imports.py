"""What takes seconds to import is imported when it is needed, not for a help or a wrong option."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from stored_models import TABLE, build

from provider.catalog.discovery import discover
from provider.serve.certificates import write_certificates
from provider.serve.tokens import TokenFile
from shared.checkpoint import Checkpoint
from shared.command_line import version

ROOT = Path(__file__).parents[2]
REPORT = """
import atexit, sys
atexit.register(lambda: print("IMPORTED", *({"torch", "transformers", "peft"} & sys.modules.keys())))
"""
MODEL = str(ROOT / "examples" / "base_model")
CONFIG = str(ROOT / "examples" / "base_model" / "config.json")  # an object, but over many lines
TENANT = ("--provider", "wss://localhost:1", "--token-env", "HOME")
PLAIN = (*TENANT, "--privacy", "plain")
FINETUNE = ("finetune", *PLAIN, "--output", "o")
GENERATE = ("generate", *PLAIN, "--prompt", "x")


def run(program: str, *arguments: str, columns: str = "200") -> tuple[list[str], str]:
    """Which of the heavy were imported, and what it said."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT + program, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": columns},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    said, _, imported = done.stdout.rpartition("IMPORTED")
    return imported.split(), said + done.stderr


def first_line(*arguments: str) -> tuple[str, list[str]]:
    """What a command says first, and which of the heavy had been imported by then."""
    program = """
import logging, sys
from rich.console import Console
def stop(self, line="", **_):
    if not isinstance(line, str):
        return  # how the log warms up
    print(line, "IMPORTED", *({"torch", "transformers", "peft"} & sys.modules.keys()))
    raise SystemExit
Console.print = stop
logging.StreamHandler.emit = lambda self, record: stop(self, record.getMessage())
"""
    module, *words = arguments
    done = subprocess.run(
        [sys.executable, "-c", program + main(module), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    said, _, imported = done.stdout.partition("IMPORTED")
    return said.strip() + done.stderr, imported.split()


def main(package: str) -> str:
    module = "command_line.main" if package == "tenant_sdk" else "cli"
    return f"from {package}.{module} import main; main()"


def test_the_sdk_itself() -> None:
    assert run(
        "import tenant_sdk, tenant_sdk.session.options, tenant_sdk.tuning, provider.cli, security.cli\n"
        "import tenant_sdk.command_line.main"
    ) == ([], "")


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
        ("provider", "plan"),
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
        ("provider", ("serve", "m", "--dev"), "m is not a checkpoint folder"),
        ("provider", ("serve", MODEL, "--tls-dir", "t", "--token-file", "f"), "no usable certificate in t"),
        ("provider", ("serve", "m", "--dev", "--devices", "cpu", "--workers", "1"), "leave out --workers 1"),
        ("provider", ("serve", "m", "--plan"), "m has no config.json"),
        ("provider", ("plan", "m"), "m has no config.json"),
        ("provider", ("plan", MODEL, "--network", "fast"), "--network fast must be bits a second"),
        ("provider", ("plan", MODEL, "--assume", "cuda"), "--assume cuda must be bytes of memory"),
        ("provider", ("plan", MODEL, "--devices", "cpu,cpu,cpu", "--stripes", "2"), "cannot be divided"),
        ("provider", ("serve", MODEL, "--dev", "--host", "no.such.address.invalid"), "--host"),
        ("tenant_sdk", ("generate", *TENANT, "--prompt", "x"), "needs a mask source"),
        ("tenant_sdk", ("generate", *TENANT, "--prompt", "x", "--mask-source", "wss://m"), "own token"),
        ("tenant_sdk", ("generate", *TENANT, "--privacy", "plain", "--prompt", "x", "--top-p", "2"), "top-p"),
        (
            "tenant_sdk",
            ("finetune", *TENANT, "--privacy", "plain", "--data", "d", "--output", "o", "--method", "dora"),
            "unknown method 'dora'",
        ),
        ("tenant_sdk", (*FINETUNE, "--data", "missing"), "cannot read missing: No such file"),
        ("tenant_sdk", (*FINETUNE, "--data", MODEL), f"cannot read {MODEL}: Is a directory"),
        ("tenant_sdk", (*FINETUNE, "--data", __file__, "--held-out", "missing"), "cannot read missing"),
        ("tenant_sdk", (*FINETUNE, "--data", CONFIG), f"{CONFIG}, line 1: "),
        ("tenant_sdk", (*FINETUNE, "--data", __file__, "--resume"), "there is nothing to resume"),
        ("tenant_sdk", (*GENERATE, "--adapter", "missing"), "there is no such folder: missing"),
        ("tenant_sdk", (*GENERATE, "--adapter", MODEL), "there is no adapter_config.json in it"),
        ("tenant_sdk", ("doctor", *TENANT, "--allow-same", "every"), "--allow-same every must be some of"),
        (
            "tenant_sdk",
            ("doctor", *TENANT, "--mask-source", "wss://m", "--mask-source-ca", "a", "--mask-source-ca", "b"),
            "--mask-source-ca: give one",
        ),
    ],
)
def test_a_wrong_option(package: str, arguments: tuple[str, ...], message: str) -> None:
    imported, said = run(main(package), *arguments)
    assert message in said
    assert imported == []


def test_the_first_line_comes_before_what_takes_seconds(tmp_path: Path) -> None:
    write_certificates(tmp_path, now=datetime.datetime.now(datetime.UTC))
    TokenFile(tmp_path / "tokens").add("me")
    served = ("--tls-dir", str(tmp_path), "--token-file", str(tmp_path / "tokens"), "--port", "0")
    finetune = ("finetune", *PLAIN, "--data", __file__, "--output", str(tmp_path / "o"))
    for arguments, said in (
        (("provider", "serve", MODEL, *served), f"reading {MODEL}"),
        (("tenant_sdk", *GENERATE), "loading torch and transformers"),
        (("tenant_sdk", *finetune), "loading torch and transformers"),
        (
            ("tenant_sdk", "doctor", *TENANT),
            "examining wss://localhost:1 (loading torch takes some seconds)",
        ),
    ):
        assert first_line(*arguments) == (said, []), arguments


@pytest.mark.parametrize("there", [False, True])
def test_nobody_looks_for_garbage_in_libraries(there: bool) -> None:
    """While they are imported and afterwards, unless a program with objects of its own has done so before."""
    program = f"""
import gc, sys
from shared import imports
if {there}:
    sys.modules["torch"] = sys
try:
    with imports.without_gc():
        made, collects = [[] for _ in range(1000)], gc.isenabled()
        raise ImportError
except ImportError:
    print(collects, gc.isenabled(), gc.get_freeze_count() > 1000)
"""
    assert run(program)[1] == f"{there} True {not there}\n"


SERVING = """
import sys
import msgspec
from provider.workers.link import Assignment
from provider.workers.worker import load
from shared.wire.messages import GroupInfo
groups = msgspec.json.decode(sys.argv[2], type=dict[int, GroupInfo])
load(Assignment(sys.argv[1], "float32", "cpu", 1, groups, digest=True))
"""


def test_a_worker_of_what_is_stored_as_it_is(tmp_path: Path) -> None:
    """It starts without libraries that only conversions need, digest and all."""
    for architecture, imported in (("bloom", ["torch"]), ("nomic_bert", ["torch", "transformers"])):
        folder = tmp_path / architecture
        build(*TABLE[architecture], folder)
        groups = dict(enumerate(discover(Checkpoint(folder)).groups))
        heavy, said = run(SERVING, str(folder), msgspec.json.encode(groups).decode())
        assert sorted(heavy) == imported, said


def test_connecting_is_said_when_what_takes_seconds_is_there() -> None:
    program = """
import sys
from rich.console import Console
def heard(self, line="", **_):
    sys.stdout.write(f"{line} {'transformers' in sys.modules and 'peft' in sys.modules}\\n")
Console.print = heard
"""
    _, said = run(program + main("tenant_sdk"), *GENERATE, "--patience", "0")
    first, second, third = said.splitlines()
    assert first == "loading torch and transformers False"
    assert second == "connecting to wss://localhost:1 True"
    assert "error" in third


@pytest.mark.parametrize(
    ("package", "name"), [("provider", "provider"), ("tenant_sdk", "tenant"), ("security", "audit")]
)
def test_the_version(package: str, name: str) -> None:
    imported, said = run(main(package), "--version")
    assert said == f"symbiosis-{name} {version()}\n"
    assert imported == []


@pytest.mark.parametrize("package", ["provider", "tenant_sdk", "security"])
def test_names_of_options_are_whole_in_a_narrow_terminal(package: str) -> None:
    """Of every command, at 80 columns."""
    program = f"""
import os, subprocess, sys, typer.main
from {package}.{"command_line.main" if package == "tenant_sdk" else "cli"} import app
from typer.testing import CliRunner

def show(command, words):
    for name, each in getattr(command, "commands", {{}}).items():
        show(each, [*words, name])
    text = CliRunner().invoke(app, [*words, "--help"], env={{"COLUMNS": "80"}}).output
    for parameter in command.params:
        for option in getattr(parameter, "opts", ()):
            name = option if option.startswith("-") else parameter.metavar or option.upper()
            assert name.replace("_", "-") in text.replace("_", "-"), (words, name, text)
    assert text.count("hub:NAME") == text.count("hub:NAME[@"), (words, text)  # not taken for markup

show(typer.main.get_command(app), [])
print("all")
"""
    imported, said = run(program, columns="80")
    assert said == "all\n"
    assert imported == []
