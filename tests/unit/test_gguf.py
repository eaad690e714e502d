"""GGUF files are served as the dense weights that transformers makes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import shared.gguf
from provider.executor.base import BaseExecutor
from shared.checkpoint import Checkpoint
from shared.errors import CheckpointError
from tenant_sdk.tuning.own import own_tokenizer

WIDTH, LAYERS, HEADS, INNER = 64, 2, 4, 96


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Llama, most of it in blocks of four bits, with a tokenizer of bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, random = tmp_path / "small.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens = ["<s>", "</s>", "<unk>", *map(chr, range(33, 127)), "Ġ", "Ċ", "ab"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 2, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")

    def add(name: str, *shape: int) -> None:
        values = random.normal(0, 0.1, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            kind = gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), WIDTH)
    add("output_norm.weight", WIDTH)
    add("output.weight", len(tokens), WIDTH)
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (WIDTH,),
            "ffn_norm": (WIDTH,),
            "attn_q": (WIDTH, WIDTH),
            "attn_k": (WIDTH // 2, WIDTH),
            "attn_v": (WIDTH // 2, WIDTH),
            "attn_output": (WIDTH, WIDTH),
            "ffn_gate": (INNER, WIDTH),
            "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER),
        }.items():
            add(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_is_what_transformers_makes_of_it(file: Path) -> None:
    base = BaseExecutor(file, numerics="float32")
    expected = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).state_dict()
    checkpoint = Checkpoint(file)
    assert base.catalog.manifest.model == "small"
    assert base.catalog.manifest.architecture == "LlamaForCausalLM"
    for name in checkpoint.names():
        assert torch.equal(checkpoint.read(name), expected[name]), name
    assert checkpoint.holds(base.catalog.manifest)  # as a tenant or a mask source would look
    assert own_tokenizer(checkpoint.folder).chat_template


def test_it_is_made_once_and_of_this_content(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Checkpoint(file).folder
    with monkeypatch.context() as patch:
        patch.setattr(shared.gguf, "_convert", None)
        assert Checkpoint(file).folder == made
        (moved := file.parent / "elsewhere").mkdir()
        assert Checkpoint(shutil.copy(file, moved)).folder == made
    with file.open("ab") as opened:
        opened.write(b"\0")
    assert Checkpoint(file).folder != made


def test_what_was_left_by_an_end_in_the_middle_is_made_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Checkpoint(file).folder
    (made / "config.json").unlink()
    assert Checkpoint(file).folder == made
    assert (made / "config.json").is_file()


def test_what_lies_beside_it_does_not_count(file: Path) -> None:
    for name in ("adapter_config.json", "config.json", "tokenizer_config.json"):
        (file.parent / name).write_text('{"peft_type": "LORA", "model_type": "gpt2"}')
    assert BaseExecutor(file, numerics="float32").catalog.manifest.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.gguf", b"PK\3\4", "is no GGUF file"),
        ("x-00001-of-00002.gguf", b"GGUF", "llama-gguf-split --merge"),
        ("x.gguf", b"GGUF" + b"\xff" * 100, "cannot read"),
    ],
)
def test_what_is_refused(
    name: str, content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path / name)


def test_the_package_that_is_missing_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.gguf.importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install '\.\[gguf\]'"):
        Checkpoint(file)


@pytest.mark.parametrize("said", [{"quant_method": "gguf"}, {"quant_method": "bitsandbytes"}, {"bits": 4}])
def test_a_configuration_that_was_left_over_does_not_count(
    said: dict[str, Any], tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    """Whoever made dense weights of quantised ones and wrote them often left it."""
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    plain = BaseExecutor(folder, numerics="float32").catalog.manifest
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    assert BaseExecutor(folder, numerics="float32").catalog.manifest.weights == plain.weights
