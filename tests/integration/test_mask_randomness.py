"""The small tier of ``benchmarks/mask_randomness.py``: a MiB of each kind of rows, and the controls."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "mask_randomness.py"


def test_masked_rows_pass_and_controls_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """By chance it fails once in six million runs: each of 160 verdicts once in 10^9."""
    program = runpy.run_path(str(PROGRAM))
    failed = program["main"](["--mib", "1"])
    told = capsys.readouterr().out
    assert not failed, told
    assert "of 10" in told
