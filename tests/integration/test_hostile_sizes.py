"""Small files that would take much memory or time, and texts that would end the process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import Executor
from hostile_files import RULES, TEXT, changed, config_of, replace, sequence, template
from torch import nn
from transformers import GPTNeoConfig, GPTNeoForCausalLM, TrOCRConfig, TrOCRForCausalLM

from provider.catalog.probe import probe
from shared.buffers import tables_of
from shared.errors import CheckpointError, ModelMismatch, SymbiosisError, WireError
from shared.wire.messages import ParameterInfo, digest_of
from shared.wire.protocol import validate_manifest
from tenant_sdk.command_line.main import run
from tenant_sdk.model.configuration import model_configuration
from tenant_sdk.model.loading import _check_shapes
from tenant_sdk.model.tokenizer import build_tokenizer
from tenant_sdk.model.tokenizer_file import MAX_ENTRIES, safe_tokenizer
from tenant_sdk.tuning.local_model import attach_local_model

GLOBAL = [[["global"], 2]]  # of a GPT-Neo of two layers
BPE = json.loads(RULES)["model"]


# -- the tokenizer's vocabulary ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [
        {"model": {**BPE, "vocab": {**BPE["vocab"], "zz": (1 << 31) - 1}}},
        {"model": {**BPE, "vocab": {**BPE["vocab"], "zz": 1 << 17}}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0, "zz": 1 << 30}, "unk_token": "a"}},
        {"model": {"type": "WordPiece", "vocab": {"a": 0, "zz": 1 << 30}, "unk_token": "a"}},
        {"added_tokens": [{"id": 1 << 30, "content": "zz"}]},
        {
            "model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]], "byte_fallback": False},
            "added_tokens": [{"id": 1 << 30, "content": "zz"}],
        },
    ],
)
def test_ids_with_holes_between_them(parts: dict[str, Any]) -> None:
    """The library lists every id that has no token, two thousand million of them."""
    with pytest.raises(ModelMismatch, match="ids have holes"):
        build_tokenizer({"tokenizer.json": changed(**parts)})


def test_some_holes_are_in_use() -> None:
    """Vocabularies are padded, and special tokens put behind the padding."""
    size = len(BPE["vocab"])
    added = [{"id": 2 * size, "content": "<later>", "special": True}]
    assert build_tokenizer({"tokenizer.json": changed(added_tokens=added)})("<later>")["input_ids"]


# -- how many of anything ----------------------------------------------------------------------------

NFC = [{"type": "NFC"}] * 65
LONG_SPLIT = {"type": "Split", "pattern": {"Regex": "[a]+" * 500}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": sequence(*NFC)},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}] * 65}},
        {"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 65}},
        # Expressions are compiled, each into 5,000 times its size.
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [LONG_SPLIT] * 3}},
        {"post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}] * 65}},
        # Nothing is put around a text, many times.
        {"post_processor": template(("Sequence", "A"), *[("SpecialToken", "<s>")] * 100, tokens=0)},
        {"added_tokens": [{"id": i, "content": f"<{i}>"} for i in range(40_000)]},
        {"added_tokens": [{"id": i, "content": f"<{i:04000}>"} for i in range(300)]},
        # Each letter of each is a place in a tree.
        {
            "model": {
                "type": "Unigram",
                "unk_id": 0,
                "vocab": [[f"{i:04}" + "x" * 500, 0.0] for i in range(10_000)],
                "byte_fallback": False,
            }
        },
        {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]] * (MAX_ENTRIES + 1)}},
        {"model": {"type": "WordLevel", "vocab": {f"{i:x}": 0 for i in range(MAX_ENTRIES + 1)}}},
        {"model": {**BPE, "merges": ["a b"] * (MAX_ENTRIES + 1)}},
    ],
)
def test_more_of_something_than_any_tokenizer_has(parts: dict[str, Any]) -> None:
    """Seconds or minutes of loading, and gigabytes."""
    data = changed(**parts)
    with pytest.raises(ModelMismatch, match=r"tokenizer\.json is refused"):
        safe_tokenizer(data)


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("tokens", [[f"<{i}>" for i in range(10_001)], [f"<{i:04000}>" for i in range(300)]])
def test_special_tokens_of_the_options_are_counted(key: str, tokens: list[str]) -> None:
    """The library takes time with the square of their number."""
    options = json.dumps({key: tokens}).encode()
    with pytest.raises(ModelMismatch, match="special tokens"):
        build_tokenizer({"tokenizer.json": RULES, "tokenizer_config.json": options})


def test_large_tokenizers_in_use_are_within_the_limits() -> None:
    """A speech model's 28,672 special tokens; a vocabulary of words with common beginnings."""
    added = [{"id": 5000 + i, "content": f"<custom_token_{i}>", "special": True} for i in range(28_672)]
    vocabulary = [[f"{i:x}", -1.0] for i in range(50_000)]
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False}
    options = json.dumps({"additional_special_tokens": [f"<{i}>" for i in range(1000)]}).encode()
    files = {"tokenizer.json": changed(added_tokens=added, model=model), "tokenizer_config.json": options}
    assert len(build_tokenizer(files)) == 50_000 + 28_672 + 1000


# -- what ends the process ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        {"type": "Prepend", "prepend": ""},
        replace("", "z"),
        *(
            replace(pattern, "z", "Regex")
            for pattern in (
                "",
                "(?=insulin)",
                "x*",
                "x?",
                "x|",
                "|x",
                "^",
                "$",
                r"\b",
                "x{0,1}",
                "x{1,0}",
                "x+?",
            )
        ),
        *(
            replace(pattern, "z", "Regex")
            for pattern in (r"x\K", "(x)?", "[x]*", r"\x{41}?", "(?#x)", "[x", "x||y")
        ),
    ],
)
def test_rules_that_match_nothing(rule: dict[str, Any]) -> None:
    """The library would leave its arrays where a text matches, and panic past ``except Exception``."""
    with pytest.raises(ModelMismatch, match="match nothing"):
        build_tokenizer({"tokenizer.json": changed(normalizer=rule)})


@pytest.mark.parametrize(
    "pattern",
    [
        " {2,}",
        r"\s+",
        r"[\n\r\t ]+",
        r"\r\n|\r",
        r"^\s+",
        r"\p{Z}",
        "``|''",
        r"[^\]a]\.",
        ".",
        r"\$",
        "x{2,3}",
    ],
)
def test_patterns_that_match_something(pattern: str) -> None:
    rule = replace(pattern, "z", "Regex")
    normalizer = build_tokenizer({"tokenizer.json": changed(normalizer=rule)}).backend_tokenizer.normalizer
    for text in ("", "x", "xx", "  ", "\r\n\r", "``''", "b.]", "$$", f"é {TEXT}  "):
        assert normalizer.normalize_str(text) is not None


def test_a_panic_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """A pattern that gives up on a text: no ``Exception``, and nothing that can be told beforehand."""
    rule = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    tokenizer = build_tokenizer({"tokenizer.json": changed(pre_tokenizer=rule)})
    with pytest.raises(SystemExit) as caught:
        run(lambda: tokenizer("x" * 40))
    assert caught.value.code == 1
    assert "error: the tokenizer" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        run(_interrupted)


def _interrupted() -> None:
    raise KeyboardInterrupt


# -- how long an error is ----------------------------------------------------------------------------


def test_a_shape_has_few_axes(llama: Executor) -> None:
    _, manifest = config_of(llama)
    for axes, refused in ((8, False), (9, True), (1_000_000, True)):
        long = msgspec.structs.replace(manifest.parameters[0], shape=(1,) * axes)
        lied = msgspec.structs.replace(manifest, parameters=(long, *manifest.parameters[1:]))
        lied = msgspec.structs.replace(lied, digest=digest_of(lied))
        with pytest.raises(WireError, match="impossible type") if refused else nullcontext():
            validate_manifest(lied)


@pytest.mark.parametrize("kind", [SymbiosisError, ModelMismatch, partial(WireError, "code")])
def test_an_error_is_no_longer_than_a_page(kind: Callable[[str], SymbiosisError]) -> None:
    error = kind("begins " + "x\n" * 1_000_000)
    assert error.message.startswith("begins x x")
    assert error.message.endswith("...")
    assert len(error.message) == 2000
    assert len(str(error)) < 2100
    assert kind("x" * 2000).message == "x" * 2000


# -- models ------------------------------------------------------------------------------------------


def test_tables_that_are_no_buffers(llama: Executor) -> None:
    """Sines as an ordinary attribute: 4 GiB of them, when the model is built with memory."""
    _, manifest = config_of(llama)
    config = TrOCRConfig(
        vocab_size=16,
        d_model=64,
        decoder_layers=1,
        decoder_attention_heads=1,
        decoder_ffn_dim=16,
        use_learned_position_embeddings=False,
        max_position_embeddings=1 << 24,
    )
    with torch.device("meta"):
        state = TrOCRForCausalLM(config).state_dict()
    listed = tuple(ParameterInfo(name, tuple(each.shape), "float32", "") for name, each in state.items())
    trocr = msgspec.structs.replace(manifest, architecture="TrOCRForCausalLM", groups=(), parameters=listed)
    with pytest.raises(ModelMismatch, match=r"tables of 4\.0 GiB"):
        _check_shapes(trocr, config, None, (), offload_head=False)
    config.max_position_embeddings = 512
    _check_shapes(trocr, config, None, (), offload_head=False)
    model = nn.Linear(2, 2, device="meta")
    model.table = torch.empty(1000, device="meta")
    model.several = {
        "a": [model.table, model.weight, torch.empty(10, device="meta")],
        "b": (torch.empty(1, device="meta"),),
    }
    model.register_buffer("buffer", torch.empty(100, device="meta"))
    assert sorted(each.numel() for each in tables_of(model)) == [1, 10, 100, 1000]


def gpt_neo(folder: Path) -> Path:
    """A checkpoint of 130 KB, whose causal masks have two bytes for each pair of 30,000 places."""
    sizes = {"hidden_size": 2, "num_layers": 2, "num_heads": 1, "intermediate_size": 2, "vocab_size": 70}
    config = GPTNeoConfig(**sizes, max_position_embeddings=64, attention_types=GLOBAL)
    model = GPTNeoForCausalLM(config)
    model.transformer.wpe = nn.Embedding(30_000, 2)
    model.config.max_position_embeddings = 30_000
    model.half().save_pretrained(folder)
    return folder


def test_tables_of_a_tenants_own_model(
    llama: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenant_sdk.tuning.local_model.AutoModelForCausalLM.from_pretrained", None)
    with llama.connect() as session, pytest.raises(CheckpointError, match=r"tables of 1\.7 GiB"):
        attach_local_model(session, str(gpt_neo(tmp_path)))


def test_weights_that_a_tenants_own_model_lacks(
    llama: Executor, tmp_path: Path, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would make random numbers of them."""
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "own"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 1 << 28}))
    monkeypatch.setattr("tenant_sdk.tuning.local_model.AutoModelForCausalLM.from_pretrained", None)
    with llama.connect() as session, pytest.raises(CheckpointError, match=r"a model of [\d,]{14,} weights"):
        attach_local_model(session, str(folder))


@pytest.mark.parametrize("places", [30, 30_000])
def test_tables_of_a_model_that_is_served(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not run without memory is built with it, unless its tables are too large."""
    config = GPTNeoConfig(
        hidden_size=2, num_layers=2, num_heads=1, max_position_embeddings=places, attention_types=GLOBAL
    )
    with torch.device("meta"):
        model = GPTNeoForCausalLM(config)
    built = []

    def with_values(model: Any) -> Any:
        built.append(model)
        return model

    monkeypatch.setattr("provider.catalog.probe._with_values", with_values)
    model.transformer.ln_f = None  # it stops
    probe(model, {"lm_head"})
    assert len(built) == (places == 30)


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "longformer", "attention_window": [8192]},
        {"model_type": "longformer", "attention_window": 2048},
        {"model_type": "led", "attention_window": [512, 2048]},
        {"model_type": "reformer", "local_attn_chunk_length": 4096},
        # A text is made as long as a multiple of both.
        {"model_type": "reformer", "local_attn_chunk_length": 1021, "lsh_attn_chunk_length": 1019},
        {"model_type": "reformer", "local_attn_chunk_length": 96},
        {"model_type": "big_bird", "block_size": 2048, "num_random_blocks": -3},
        {"model_type": "pegasus_x", "block_size": 2048},
        {"model_type": "cpmant", "prompt_length": 2048},
        {"model_type": "mamba2", "chunk_size": 2048},
        {"model_type": "gpt_neo", "window_size": 2048},
        {"model_type": "longt5", "local_radius": 2047},
        {"model_type": "mimi", "dilation_growth_rate": 2048},
    ],
)
def test_no_text_is_padded_to_any_length(raw: dict[str, Any], llama: Executor) -> None:
    _, manifest = config_of(llama)
    wide = msgspec.structs.replace(manifest.parameters[0], name="vocabulary", shape=(50_000, 8))
    large = msgspec.structs.replace(manifest, parameters=(*manifest.parameters, wide))
    with pytest.raises(ModelMismatch, match=r"configuration: .* is "):
        model_configuration(json.dumps(raw).encode(), large, {})


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "mistral", "sliding_window": 4096},
        {"model_type": "gemma2", "sliding_window": 4096, "max_position_embeddings": 1 << 20},
        {"model_type": "llama4_text", "attention_chunk_size": 8192},
        {"model_type": "xlstm", "max_inference_chunksize": 16384},
        {"model_type": "recurrent_gemma", "attention_window_size": 2048},
        {"model_type": "doge", "keep_window_size": 2048},
        {"model_type": "longformer", "attention_window": [32, 512, 1024]},
        {"model_type": "reformer", "local_attn_chunk_length": 64, "lsh_attn_chunk_length": 256},
        {"model_type": "big_bird", "block_size": 64},
        {"model_type": "modernbert", "local_attention": 128},
        {"model_type": "gpt_neo", "window_size": 256},
        {"model_type": "mamba2", "chunk_size": 256},
        {"model_type": "longt5", "local_radius": 127, "global_block_size": 16},
    ],
)
def test_windows_in_use_pass(raw: dict[str, Any], llama: Executor) -> None:
    """Also beside few and narrow layers, since most of these numbers only mask."""
    _, manifest = config_of(llama)
    config = model_configuration(json.dumps(raw).encode(), manifest, {})
    for key, value in raw.items():
        assert getattr(config, key) == value
