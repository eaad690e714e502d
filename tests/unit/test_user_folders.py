"""Where caches and settings of a user are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.user_folders import cache_home, configuration_home, keep_compiled_code


@pytest.mark.parametrize(
    ("named", "cache", "configuration"),
    [
        (None, "/home/me/.cache", "/home/me/.config"),
        ("", "/home/me/.cache", "/home/me/.config"),
        ("/elsewhere", "/elsewhere", "/elsewhere"),
        ("here", "/home/me/.cache", "/home/me/.config"),
    ],
)
def test_a_relative_path_is_ignored(
    named: str | None, cache: str, configuration: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
        if named is not None:
            monkeypatch.setenv(variable, named)
    assert (cache_home(), configuration_home()) == (Path(cache), Path(configuration))


@pytest.mark.parametrize("package", ["provider", "tenant_sdk"])
def test_no_folder_of_compiled_code_has_a_name_that_others_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    program = f"import {package}, os; print(os.environ.get('TORCHINDUCTOR_CACHE_DIR'))"

    def folder() -> str:
        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout

    assert folder() == f"{tmp_path}/cache/symbiosis/compiled\n"
    assert not (tmp_path / "cache").exists()


def test_a_service_without_a_home_keeps_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(os, "access", lambda *_: False)
    keep_compiled_code()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
