"""What transformers leaves out of a GGUF file: tensors and tokens; and what it fetches."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from test_gguf import WIDTH, written

import shared.gguf
from shared.checkpoint import Checkpoint
from shared.compat import without_ggml_kernels
from shared.errors import CheckpointError
from tenant_sdk.tuning.local_model import tokenizer_info_in


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test writes its file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "small.gguf"


def test_tensors_that_transformers_leaves_out(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale beside a tensor of four bits, say: without it, the weights are thousands of times as large."""
    add = gguf.GGUFWriter.add_tensor

    def put(self: Any, name: str, values: Any, **options: Any) -> None:
        add(self, name, values, **options)
        if name == "output_norm.weight":
            add(self, extra, np.ones(WIDTH, np.float32))

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", put)
    for extra in (
        "blk.0.ffn_gate.scale",
        "blk.0.anything",
        "blk.0.attn_sinks",
        "blk.1.attn_output_norm.weight",
    ):
        with pytest.raises(CheckpointError, match=rf"{extra}, which transformers leaves out"):
            Checkpoint(written(file))
    extra = "blk.0.attn_output.input_scale"  # for those who multiply numbers of four bits
    assert Checkpoint(written(file)).names()


@pytest.mark.parametrize(
    ("names", "right"),
    [
        (("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"), True),
        (("ffn_gate_up_exps.weight", "ffn_down_exps.weight"), True),
        (("ffn_gate_exps.weight", "ffn_down_exps.weight"), False),
        (("ffn_down_exps.weight",), False),
        (
            ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight", "ffn_down_exps.scale"),
            False,
        ),
        (("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight", "ffn_down_exps.bias"), False),
    ],
)
def test_experts_of_a_block_are_whole(names: tuple[str, ...], *, right: bool) -> None:
    """transformers puts zeros where one of their weights is missing."""
    reader = SimpleNamespace(tensors=[SimpleNamespace(name=f"blk.0.{name}") for name in names])
    known = {"blk.0.ffn_gate_exps", "blk.0.ffn_up_exps", "blk.0.ffn_down_exps", "blk.0.ffn_gate_up_exps"}
    with nullcontext() if right else pytest.raises(CheckpointError):
        shared.gguf._check_tensors(reader, known, "file")


def test_architectures_whose_tensors_are_not_listed() -> None:
    """By endings alone, as for those that transformers reads in a newer way."""
    tensors = [SimpleNamespace(name=f"blk.0.{name}") for name in ("a.weight", "a.bias", "a.input_scale")]
    shared.gguf._check_tensors(SimpleNamespace(tensors=tensors), None, "file")
    with pytest.raises(CheckpointError, match=r"blk\.0\.a\.scale"):
        shared.gguf._check_tensors(
            SimpleNamespace(tensors=[SimpleNamespace(name="blk.0.a.scale")]), None, "file"
        )


def test_tokens_that_are_taken_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers leaves out those with a space, or with letters beyond Latin-1."""
    more = [("   ", 4), ("<\uff5cUser\uff5c>", 3), ("<|two words|>", 3), ("→", 4), ("<t>", 4)]
    lists, kinds, size, add = (
        getattr(gguf.GGUFWriter, f"add_{name}")
        for name in ("token_list", "token_types", "vocab_size", "tensor")
    )
    patch = partial(monkeypatch.setattr, gguf.GGUFWriter)
    all_tokens: list[str] = []

    def put_tokens(self: Any, tokens: list[str]) -> None:
        all_tokens[:] = [*tokens, *(text for text, _ in more)]
        lists(self, all_tokens)

    patch("add_token_list", put_tokens)
    patch("add_token_types", lambda self, types: kinds(self, [*types, *(kind for _, kind in more)]))
    patch("add_vocab_size", lambda self, count: size(self, count + len(more)))

    def put(self: Any, name: str, values: Any, **options: Any) -> None:
        if name in ("token_embd.weight", "output.weight"):
            values = np.concatenate([values, values[: len(more)]])
        add(self, name, values, **options)

    patch("add_tensor", put)
    checkpoint = Checkpoint(written(file))
    tokenizer = tokenizer_info_in(checkpoint.folder).tokenizer
    for text, kind in more:
        ids = tokenizer(f"a{text}b", add_special_tokens=False)["input_ids"]
        assert ids.count(all_tokens.index(text)) == 1, text
        assert (text in tokenizer.decode(ids, skip_special_tokens=True)) == (kind == 4)


def test_no_compiled_code_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks a hub for it, if the package ``kernels`` is there, also without remote code."""
    kernels = pytest.importorskip("transformers.integrations.gguf.kernels")
    asked: list[object] = []
    monkeypatch.setattr(kernels, "_gguf_kernel", None)
    monkeypatch.setattr(kernels, "kernelize_ggml_layers", asked.append)
    with without_ggml_kernels():
        assert kernels.get_gguf_kernel() is False
        kernels.kernelize_ggml_layers(None)
    assert not asked
    assert kernels._gguf_kernel is None
    kernels.kernelize_ggml_layers(None)
    assert asked == [None]
