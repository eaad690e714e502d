"""The program that measures GPUs works, as far as that shows without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from commands import ROOT


def test_all_parts_run_on_the_cpu(tmp_path: Path) -> None:
    """All but CUDA itself: streams, graphs, pinned memory."""
    done = subprocess.run(
        [
            sys.executable,
            "benchmarks/gpu.py",
            "--device",
            "cpu",
            "--smoke",
            "--seconds=0.5",
            "--output",
            tmp_path,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert told["faults"] == {"int8": ""}
    for each in told["layers"]:
        assert all(seconds > 0 for seconds in each["seconds"].values())
        assert all(share > 0 for share in each["executor of bare"].values())
    assert {each["kernel"] for each in told["graphs"]} == {"bfloat16", "int8"}
    assert {(each["placement"], each["work"]) for each in told["tenants"]} == {
        ("two workers", "decode"),
        ("two workers", "tune"),
    }
    for each in told["tenants"]:
        assert each["rows a second"] > 0
        assert not each["errors"]
