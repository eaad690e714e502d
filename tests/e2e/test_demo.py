"""The demo, with the small model and very few steps: what it promises to write, and to say if it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GATEWAY = ROOT / ".venv-gateway" / "bin" / "python"
SMALL = ("--small", "--steps", "3", "--held-out", "4")


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, ROOT / "examples" / "demo.py", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def test_its_failure(tmp_path: Path) -> None:
    fails = start("--output", tmp_path / "fails", "--model", tmp_path / "no-model", "--no-gateway", *SMALL)
    out, _ = fails.communicate(timeout=800)
    assert fails.returncode == 1
    assert "the demo failed; the executors' last lines" in out
    assert "error: " in out
    assert "no-model" in out


def test_the_demo(tmp_path: Path) -> None:
    keeps_its_promises(tmp_path, "--no-gateway")


def test_the_demo_with_a_gateway(tmp_path: Path) -> None:
    if not GATEWAY.exists():
        pytest.skip("there is no .venv-gateway: make gateway")
    keeps_its_promises(tmp_path)


def keeps_its_promises(tmp_path: Path, *alone: str) -> None:
    well = start("--output", tmp_path / "well", *SMALL, *alone)
    out, _ = well.communicate(timeout=800)
    assert well.returncode == 0, out
    assert "executors stopped by SIGTERM" in out
    for promise in (
        "every row by a mask of its own",
        "random seeds",
        "all of them right",
        "allow_same",
        "2 authorities (",
        "and 2 tokens",
        "held-out message",
        "adapter, plain PEFT",
        "4 of 4 answers of the saved adapter are the same in plain",
    ):
        assert promise in out
    files = {path.name for path in (tmp_path / "well").iterdir()}
    logs = {"provider.log", "mask_source.log", *([] if alone else ["gateway.log"])}
    assert files == {"adapter", "loss.png", "summary.json", *logs}
    summary = json.loads((tmp_path / "well" / "summary.json").read_text())
    training = summary["training"]
    assert len(summary["losses"]) == training["steps"] == 3
    assert training["perplexity_after"] < training["perplexity_before"]
    assert len(summary["answers"]) == 4
    assert summary["same_in_plain_transformers"] == 4
    assert summary["numerics"] == "ring"
    traffic, masking = summary["traffic"], summary["masking"]
    assert traffic["requests"] > 3 * 2 * 24
    saw, source = masking["provider_saw"], masking["mask_source_saw"]
    assert saw["rows"] == traffic["rows"] == masking["checked_rows"] + masking["rows_for_fingerprints"]
    assert source["bytes"] == 32 * source["seeds"] == traffic["bytes_sent"] - saw["bytes"]
    assert traffic["effect_rows"] >= traffic["rows"]
    assert (tmp_path / "well" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "well" / "adapter" / "adapter_model.safetensors").is_file()

    if not alone:
        told = summary["gateway"]
        assert told["clients"] == 8
        assert told["same_for_all_clients"]
        assert told["text"]["clinic"]


def test_workers_give_the_same_adapter(tmp_path: Path) -> None:
    for name, more in (("one", ()), ("shared", ("--workers", "2"))):
        process = start("--output", tmp_path / name, "--no-gateway", *more, *SMALL)
        out, _ = process.communicate(timeout=800)
        assert process.returncode == 0, out
    one, other = (tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("one", "shared"))
    assert one.read_bytes() == other.read_bytes()
