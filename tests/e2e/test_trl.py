"""The examples of TRL run as they stand there, in fewer steps, against an executor of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import RING, Executor

pytest.importorskip("trl", reason="trl is not installed")
ROOT = Path(__file__).parents[2]


def run(name: str, folder: Path, executor: Executor, steps: int) -> str:
    environment = {
        **os.environ,
        "SYMBIOSIS_URL": executor.url,
        "SYMBIOSIS_CA": str(executor.ca),
        "SYMBIOSIS_TOKEN": executor.token,
        "SYMBIOSIS_MASK_SOURCE": f"local:{ROOT / 'examples' / 'base_model'}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
    }
    command = [sys.executable, ROOT / "examples" / name, str(steps)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"verified_rows=[1-9]", done.stdout)
    return done.stdout


def test_supervised_tuning_and_then_preferences(
    tmp_path: Path, serve_process: Callable[..., Executor]
) -> None:
    executor = serve_process(ROOT / "examples" / "base_model", "--numerics", RING)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert " Fields:" in run("sft.py", tmp_path, executor, 3)
    assert (tmp_path / "out" / "sft" / "adapter" / "adapter_model.safetensors").is_file()
    assert "margins of rewards: 0.000 at the start" in run("dpo.py", tmp_path, executor, 2)
    assert (tmp_path / "out" / "dpo" / "adapter" / "adapter_model.safetensors").is_file()
