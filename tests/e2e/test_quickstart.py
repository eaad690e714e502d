"""The example of the README runs as it stands there, against `serve --dev`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from commands import ENVIRONMENT, SECONDS
from conftest import RING
from developments import development

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.py"


def test_the_readme_shows_the_example_verbatim() -> None:
    _docstring, code = QUICKSTART.read_text().split('"""\n\n', 1)
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 25


def test_the_example_runs(tmp_path: Path) -> None:
    """Beside `serve --dev`, in the same folder, with the variables that it printed."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with development(tmp_path, "--numerics", RING) as running:
        done = subprocess.run(
            [sys.executable, QUICKSTART],
            cwd=tmp_path,
            env={**ENVIRONMENT, **running.tokens},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    assert done.returncode == 0, done.stderr
    assert "Plan:" in done.stdout
    requests, rows, verified = (
        int(re.search(rf"\b{name}=(\d+)", done.stdout)[1])  # type: ignore[index]
        for name in ("requests", "rows", "verified_rows")
    )
    assert requests > 10 * 24  # ten steps and a text
    assert 0 < rows - verified < rows / 100  # those unchecked made the fingerprints
    adapter = tmp_path / "out" / "quickstart" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert (adapter / "adapter_model.safetensors").is_file()
