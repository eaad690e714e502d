"""The example of the README runs as it stands there, against an executor in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from conftest import RING, Executor

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.py"


def test_the_readme_shows_the_example_verbatim() -> None:
    _docstring, code = QUICKSTART.read_text().split('"""\n\n', 1)
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 25


def test_the_example_runs(tmp_path: Path, serve_process: Callable[..., Executor]) -> None:
    executor = serve_process(ROOT / "examples" / "base_model", "--numerics", RING)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {
        **os.environ,
        "SYMBIOSIS_URL": executor.url,
        "SYMBIOSIS_CA": str(executor.ca),
        "SYMBIOSIS_TOKEN": executor.token,
        # A second executor would be on the same machine, which the example refuses.
        "SYMBIOSIS_MASK_SOURCE": f"local:{ROOT / 'examples' / 'base_model'}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, QUICKSTART],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert "Plan:" in done.stdout
    requests, rows, verified = (
        int(re.search(rf"\b{name}=(\d+)", done.stdout)[1])  # type: ignore[index]
        for name in ("requests", "rows", "verified_rows")
    )
    assert requests > 10 * 24  # ten steps and a text, and every answer was checked
    assert rows == verified
    adapter = tmp_path / "out" / "quickstart" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert (adapter / "adapter_model.safetensors").is_file()
