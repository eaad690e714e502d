"""The demo, with very few and small steps: everything it promises to write, and what it says if it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GATEWAY = ROOT / ".venv-gateway" / "bin" / "python"
SMALL = ("--steps", "3", "--batch-size", "8", "--sequence-length", "64", "--new-tokens", "8")


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, ROOT / "examples" / "demo.py", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def test_the_demo_and_its_failure(tmp_path: Path) -> None:
    alone = [] if GATEWAY.exists() else ["--no-gateway"]
    well = start("--output", tmp_path / "well", *SMALL, *alone)
    fails = start(
        "--output", tmp_path / "fails", "--base-model", tmp_path / "no-model", "--no-gateway", *SMALL
    )

    out, _ = fails.communicate(timeout=300)
    assert fails.returncode == 1
    assert "the demo failed; the executors' last lines" in out
    assert "error: " in out
    assert "no-model" in out

    out, _ = well.communicate(timeout=300)
    assert well.returncode == 0, out
    assert "executors stopped by SIGTERM" in out
    for promise in (
        "every row by a mask of its own",
        "random seeds",
        "all of them right",
        "allow_same",
        "2 authorities (",
        "and 2 tokens",
    ):
        assert promise in out
    files = {path.name for path in (tmp_path / "well").iterdir()}
    logs = {"provider.log", "mask_source.log", *([] if alone else ["gateway.log"])}
    assert files == {"adapter", "loss.png", "summary.json", *logs}
    summary = json.loads((tmp_path / "well" / "summary.json").read_text())
    remote, local = summary["executor"], summary["local"]
    assert len(remote["losses"]) == len(local["losses"]) == 3
    # Fixed point of some 15 bits against float32; three steps of AdamW.
    assert summary["largest_loss_difference"] < 1e-3
    assert remote["perplexity_after"] < remote["perplexity_before"]
    assert summary["same_tokens"]
    assert summary["saved_adapter_gives_same_tokens"]
    assert len(remote["text_after"]) == 8
    assert summary["numerics"] == "ring"
    traffic, masking = summary["traffic"], summary["masking"]
    assert traffic["requests"] > 3 * 2 * 24
    saw, source = masking["provider_saw"], masking["mask_source_saw"]
    assert saw["rows"] == traffic["rows"] == masking["checked_rows"] + masking["rows_for_fingerprints"]
    assert masking["checked_rows"] > 3 * 2 * 24 * 64
    assert source["bytes"] == 32 * source["seeds"] == traffic["bytes_sent"] - saw["bytes"]
    assert traffic["effect_rows"] >= traffic["rows"]
    assert (tmp_path / "well" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "well" / "adapter" / "adapter_model.safetensors").is_file()

    if not alone:
        told = summary["gateway"]
        assert told["clients"] == 8
        assert told["same_for_all_clients"]
        assert summary["gateway_gives_same_tokens"]
        assert told["tokens"]["base_model"] == remote["text_before"]


def test_workers_give_the_same_adapter(tmp_path: Path) -> None:
    for name, more in (("one", ()), ("shared", ("--workers", "2"))):
        process = start("--output", tmp_path / name, "--no-gateway", *more, *SMALL)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, out
    one, other = (tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("one", "shared"))
    assert one.read_bytes() == other.read_bytes()
