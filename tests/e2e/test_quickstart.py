"""The examples run as they stand there, the tutorial's and those of TRL, against `serve --dev`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ENVIRONMENT, SECONDS
from conftest import RING
from developments import Development, development

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.py"
TUTORIAL = ROOT / "docs" / "tutorial" / "first-session.md"


def test_the_tutorial_shows_the_example_verbatim() -> None:
    _docstring, code = QUICKSTART.read_text().split('"""\n\n', 1)
    assert f"```python\n{code}```" in TUTORIAL.read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 25


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Development]]:
    """`serve --dev`, and its folder, in which the examples are."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "examples").symlink_to(ROOT / "examples")
    with development(folder, "--numerics", RING) as started:
        yield folder, started


def run(running: tuple[Path, Development], name: str, *arguments: str, **environment: str) -> str:
    """What an example prints, in that folder."""
    folder, _ = running
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments],
        cwd=folder,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_runs(running: tuple[Path, Development]) -> None:
    printed = run(running, QUICKSTART.name)
    assert "Plan:" in printed
    requests, rows, verified = (
        int(re.search(rf"\b{name}=(\d+)", printed)[1])  # type: ignore[index]
        for name in ("requests", "rows", "verified_rows")
    )
    assert requests > 10 * 24  # ten steps and a text
    assert 0 < rows - verified < rows / 100  # those unchecked made the fingerprints
    adapter = running[0] / "out" / "quickstart" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert (adapter / "adapter_model.safetensors").is_file()


def test_supervised_tuning_and_then_preferences(running: tuple[Path, Development]) -> None:
    """The examples of TRL, in fewer steps."""
    pytest.importorskip("trl", reason="trl is not installed")
    folder = running[0]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    for name, steps, said in (
        ("sft", "3", " Fields:"),
        ("dpo", "2", "margins of rewards: 0.000 at the start"),
        ("grpo", "2", "reward: "),
    ):
        printed = run(running, f"{name}.py", steps, **offline)
        assert said in printed
        assert re.search(r"verified_rows=[1-9]", printed)
        assert (folder / "out" / name / "adapter" / "adapter_model.safetensors").is_file()
