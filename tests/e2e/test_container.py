"""The image: what is in it, who it runs as, and what is sent to its build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE, IGNORED = ROOT / "Containerfile", ROOT / ".containerignore"
# pip puts it beside the interpreter.
HADOLINT = shutil.which(
    "hadolint", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
)


def stages() -> list[str]:
    """Each stage's instructions, a line each, without comments."""
    text = re.sub(r"(?m)^\s*#.*\n", "", FILE.read_text()).replace("\\\n", " ")
    return re.split(r"(?m)^FROM ", text)[1:]


def instruction(stage: str, name: str) -> list[str]:
    return re.findall(rf"(?m)^{name} +(.*)$", stage)


def test_the_image_runs_as_nobody_and_has_a_compiler_only_for_a_gpu(tmp_path: Path) -> None:
    build, final = stages()
    assert "gcc" in build
    (install,) = instruction(final, "RUN")  # nothing else: all comes from the first stage
    assert instruction(final, "ARG") == ["EXTRAS="]
    for name in ("apt-get", "rm"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$0 $*"\n')
        (tmp_path / name).chmod(0o755)
    for extras, compiler in (("", False), ("[ray]", False), ("[gpu]", True), ("[ray,gpu]", True)):
        environment = {"EXTRAS": extras, "PATH": str(tmp_path)}
        done = subprocess.run(
            ["/bin/sh", "-c", install], env=environment, capture_output=True, text=True, check=True
        )
        assert ("gcc" in done.stdout) == compiler, extras
    assert instruction(final, "COPY") == ["--from=build /opt/symbiosis /opt/symbiosis"]
    (user,) = instruction(final, "USER")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    compose = (ROOT / "deploy" / "compose.yaml").read_text()
    assert f'user: "{user}"' in compose
    assert instruction(final, "STOPSIGNAL") == ["SIGTERM"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (entry,) = instruction(final, "ENTRYPOINT")
    assert entry.strip('["]') in project["scripts"]


def test_the_base_is_a_python_that_the_project_takes() -> None:
    (base,) = re.findall(r"(?m)^ARG BASE=python:(\d+\.\d+)-slim-\w+$", FILE.read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least = project["requires-python"].removeprefix(">=")
    assert [int(part) for part in base.split(".")] >= [int(part) for part in least.split(".")]


def test_what_is_built_is_all_that_is_sent() -> None:
    """Certificates, tokens and history that lie in the folder are in no layer."""
    assert (ROOT / ".dockerignore").read_text() == IGNORED.read_text()
    lines = [line for line in IGNORED.read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    sent = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in sent)
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {each.rstrip("*") for each in setup["tool"]["setuptools"]["packages"]["find"]["include"]}
    modules = {f"{each}.py" for each in setup["tool"]["setuptools"]["py-modules"]}
    needed = {setup["project"]["readme"], *setup["project"]["license-files"]}
    assert sent == packages | needed | {
        "constraints.txt",
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        *modules,
    }


def test_no_secret_is_an_argument_or_a_variable() -> None:
    assert not re.search(r"(?im)^(ARG|ENV).*(token|secret|password|key)", FILE.read_text())


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (pip install -e '.[deploy]')")
def test_hadolint_finds_nothing_to_say() -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, FILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
