"""Long contexts in processes of their own: what is in their memory, and what is left of a killed one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

# Serves itself a tiny model, fills the cache, and generates; what it is to do is in its arguments.
SCRIPT = """
import sys, time
from pathlib import Path
import torch, transformers
import tenant_sdk
from provider import serve_in_process
from shared.compat import cache_name

folder, layers, place, tokens, what = Path(sys.argv[1]), *sys.argv[2:]
layers, tokens = int(layers), int(tokens)
torch.manual_seed(0)
torch.set_num_threads(1)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
    num_key_value_heads=4, head_dim=32, max_position_embeddings=40000, eos_token_id=None, bos_token_id=None,
)
transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
(folder / "spilled").mkdir()

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

class Told:
    def put(self, ids):
        if what == "wait" and ids.dim() == 1 and ids.numel() == 1:  # the first new token
            print(options[cache_name()].layers[0].keys[0, 0, 1].numpy().tobytes().hex(), flush=True)
            time.sleep(600)
    def end(self): pass

with tenant_sdk.connect(serve_in_process(folder / "model", numerics="float32"), privacy="plain") as session:
    model = session.load_model(progress=False)
    where = {"kv_folder": folder / "spilled"} if place == "disk" else {}
    options = session.generate_options(model, kv=place, memory_gib=0.1, **where)
    ids = torch.randint(0, 64, (1, tokens + 1), generator=torch.Generator().manual_seed(1))
    model.generate(ids[:, :600], max_new_tokens=2, do_sample=False)  # what the libraries need is there
    if what == "fill":
        random = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for at in range(0, tokens, 4096):
                for layer in options[cache_name()].layers:
                    layer.update(*torch.randn(2, 1, 4, 4096, 32, generator=random))
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    options |= {"attention_mask": torch.ones_like(ids), "streamer": Told()}
    out = model.generate(ids, max_new_tokens=4, do_sample=False, **options)
    print(before, peak(), *out[0, -4:].tolist())
"""


def script(folder: Path, *arguments: object) -> list[str]:
    folder.mkdir()
    return [sys.executable, "-c", SCRIPT, str(folder), *map(str, arguments)]


def generated(folder: Path, *arguments: object) -> tuple[float, float, Sequence[str]]:
    """MiB before and at most, and the tokens."""
    done = subprocess.run(script(folder, *arguments), capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    before, most, *tokens = done.stdout.split()
    return float(before), float(most), tokens


def test_two_layers_are_in_memory(tmp_path: Path) -> None:
    """16,384 tokens, 20 layers of 16 MiB: two of them are in memory, with host all."""
    disk = generated(tmp_path / "disk", 20, "disk", 16_384, "fill")
    host = generated(tmp_path / "host", 20, "host", 16_384, "fill")
    assert disk[2] == host[2]
    assert host[1] - disk[1] > 8 * 16  # both have some 60 MiB of chance
    assert disk[1] - disk[0] < 3 * 16
    assert not list((tmp_path / "disk" / "spilled").iterdir())


def test_64k_tokens_of_context(tmp_path: Path) -> None:
    found = [generated(tmp_path / place, 2, place, 65_536, "fill") for place in ("disk", "host")]
    assert found[0][2] == found[1][2]


def test_a_prompt_is_read_in_chunks(tmp_path: Path) -> None:
    """8,192 tokens in the 0.1 GiB that were given; keys and values are 8 MiB a layer."""
    before, most, _ = generated(tmp_path / "disk", 2, "disk", 8_192, "read")
    assert most - before < 102 + 4 * 8


def test_a_killed_process_leaves_nothing_that_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    process = subprocess.Popen(
        script(folder, 2, "disk", 2000, "wait"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            pytest.fail(process.communicate()[1].decode())
        key = bytes.fromhex(line.decode())
        assert len(key) == 32 * 4
        at = Path(f"/proc/{process.pid}/fd")
        found = [each for each in at.iterdir() if os.readlink(each).startswith(str(folder / "spilled"))]
        (stored,) = (each.read_bytes() for each in found)
        assert len(stored) > 2 * 2 * 1536 * 4 * 32 * 4  # layers, keys and values, tokens, heads
        for part in (key[:32], key[-32:], bytes(32)):
            assert part not in stored
        control = tmp_path / "control"
        control.write_bytes(stored + key)
        assert key[:32] in control.read_bytes()
        assert not list((folder / "spilled").iterdir())
    finally:
        process.kill()
        process.communicate()
    assert not list((folder / "spilled").iterdir())
    assert not at.exists()
