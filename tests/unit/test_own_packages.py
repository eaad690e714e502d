"""The packages have common names: another project's of the same name is refused, in words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = "import sys; sys.path[:0] = sys.argv[1:]; import symbiosis_executor as programs; "


def run(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", COMMAND + code, *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["shared", "provider", "security"])
def test_a_package_of_another_project_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    program = {"security": "audit", "provider": "provider", "shared": "tenant"}[name]
    done = run(f"programs.{program}()", tmp_path, ROOT)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: the package `{name}` in {tmp_path / name / '__init__.py'} is not ")
    assert "environment of its own" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_import_says_so_too(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/__init__.py").write_text("")
    for package in ("tenant_sdk", "provider", "security"):
        done = run(f"import {package}", tmp_path, ROOT)
        assert done.stderr.splitlines()[-1].startswith("ImportError: the package `shared` in ")
