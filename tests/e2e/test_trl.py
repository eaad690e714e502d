"""The examples of TRL run as they stand there, in fewer steps, against `serve --dev`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ENVIRONMENT, SECONDS
from conftest import RING
from developments import Development, development

pytest.importorskip("trl", reason="trl is not installed")
ROOT = Path(__file__).parents[2]


def run(name: str, folder: Path, running: Development, steps: int) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, str(steps)],
        cwd=folder,
        env={**ENVIRONMENT, **running.tokens, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"verified_rows=[1-9]", done.stdout)
    return done.stdout


def test_supervised_tuning_and_then_preferences(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with development(tmp_path, "--numerics", RING) as running:
        assert " Fields:" in run("sft.py", tmp_path, running, 3)
        assert (tmp_path / "out" / "sft" / "adapter" / "adapter_model.safetensors").is_file()
        assert "margins of rewards: 0.000 at the start" in run("dpo.py", tmp_path, running, 2)
        assert (tmp_path / "out" / "dpo" / "adapter" / "adapter_model.safetensors").is_file()
