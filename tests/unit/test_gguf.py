"""GGUF files are served as the dense weights that transformers makes of them."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GPT2Tokenizer

import shared.gguf
import tenant_sdk
from provider import serve_in_process
from provider.executor.base import BaseExecutor
from shared.checkpoint import Checkpoint
from shared.errors import CheckpointError
from tenant_sdk.model.naming import find_base
from tenant_sdk.tuning.local_model import local_tokenizer, tokenizer_info_in

WIDTH, LAYERS, HEADS, INNER = 64, 2, 4, 96
_GEMMA = {"attention.sliding_window": 4096, "rope.freq_base": 1e6}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Llama, most of it in blocks of four bits, with a tokenizer of bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return written(tmp_path / "small.gguf")


def written(path: Path, wrong: str = "", tokenizer: str = "gpt2", **keys: Any) -> Path:
    """Args: wrong: what makes it one that cannot be served. keys: of its tokenizer."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    if wrong == "scaled":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    if wrong == "window":
        writer.add_sliding_window(16)
    if wrong == "scale":
        writer.add_logit_scale(0.5)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(2000 if wrong == "blocks" else LAYERS)
    writer.add_feed_forward_length(6_000_000 if wrong == "inner" else INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    more = ["x" * 2000] if wrong == "token" else []
    tokens = [*more, "<s>", "</s>", "<unk>", *map(chr, range(33, 127)), "Ġ", "Ċ", "ab"]
    if tokenizer == "llama":
        tokens[-3:] = ["▁", "▁a", "ab"]
        writer.add_token_scores([0.0] * (len(tokens) - 2) + [-0.1, -0.2])
    else:
        tokens += ["12", "ĠĠ"]
        writer.add_token_merges(["a b", "1 2", "Ġ Ġ"])
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([*[1] * len(more), 3, 3, 2, *[1] * (len(tokens) - len(more) - 3)])
    if tokenizer == "gpt2":
        keys = {"pre": "gpt-2"} | keys
    for key, value in keys.items():
        kind = {bool: writer.add_bool, int: writer.add_uint32}.get(type(value), writer.add_string)
        kind(f"tokenizer.ggml.{key}", value)
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
            if wrong != "missing" or (layer, name) != (1, "ffn_up"):
                add(f"blk.{layer}.{name}.weight", *shape)
    if wrong == "frequencies":
        add("rope_freqs.weight", 8)
    if wrong == "bias":
        add("blk.0.attn_q.bias", WIDTH)
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
    assert local_tokenizer(checkpoint.folder).chat_template


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


def let_go() -> None:
    """What the end of this process does."""
    while shared.gguf._kept:
        os.close(shared.gguf._kept.popitem()[1])


def test_what_other_versions_made_is_not_used(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier one may have made another model of a file that is refused today."""
    made = Checkpoint(file).folder.parent
    cache, digest = made.parent, made.name[:32]
    others = [digest, f"{digest}-7-5.0.0.dev0+x", f"{digest}-7", f"{'0' * 32}-7-5.0.0"]
    for name in others:
        (cache / name / "small").mkdir(parents=True, exist_ok=True)
        (cache / name / "small" / "config.json").write_text("{}")
    assert Checkpoint(file).folder.parent == made
    let_go()
    with monkeypatch.context() as patch:
        patch.setattr("shared.gguf.importlib.metadata.version", lambda _: "6.0")
        assert Checkpoint(file).folder.parent.name.endswith("-6.0")
    assert {each.name for each in cache.iterdir()} == {
        f"{digest}-{shared.gguf._CONVERTER}-6.0",
        *others[2:],
    }
    monkeypatch.setattr(shared.gguf, "_CONVERTER", 1000)
    assert Checkpoint(file).folder.parent.name.startswith(f"{digest}-1000-")


def test_another_version_leaves_what_is_read(file: Path) -> None:
    """A mask source reads each weight when it is needed."""
    program = (
        "import importlib.metadata as metadata, shared.gguf; from pathlib import Path; "
        "metadata.version = lambda _: '6.0'; shared.gguf._convert = lambda file, folder, *_: "
        "(folder.mkdir(), (folder / 'config.json').touch()); "
        f"print(shared.gguf.folder_of(Path({str(file)!r})))"
    )
    checkpoint = Checkpoint(file)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    other = Path(told.stdout.strip())
    assert other.parent.name.endswith("-6.0"), told.stderr
    assert checkpoint.read(checkpoint.names()[0]).numel()
    let_go()
    shared.gguf._remove_others(other.parent, other.parent.name[:32])
    assert [each.name for each in other.parent.parent.iterdir()] == [other.parent.name]


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
        ("x.gguf", b"GGUF" + b"\xff" * 100, "has a header that cannot be used"),
    ],
)
def test_what_is_refused(
    name: str, content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path / name)


def test_a_file_that_is_a_hole_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy would fill the disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with (tmp_path / "x.gguf").open("wb") as file:
        file.write(header())
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="is a hole"):
        Checkpoint(tmp_path / "x.gguf")
    assert not (tmp_path / "cache").exists()


def header(*keys: bytes, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, len(keys)) + b"".join(keys)


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return text("general.tags") + struct.pack("<IIQ", 9, kind, count) + values


def text(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(array(0, 1 << 21, b"\1" * 16)), "ends within its header"),
        (header(array(8, 1 << 21, bytes(64))), "ends within its header"),
        (header(array(0, 1 << 40)), "more than 4,194,304 values"),
        (header(*[array(0, 3 << 20, bytes(3 << 20))] * 2), "more than 4,194,304 values"),
        (header(array(9, 1, struct.pack("<IQ", 0, 0))), "a value has type 9"),
        (header(tensors=1 << 60), "more than 4,194,304 values"),
        (header(text("x") + struct.pack("<I", 8) + struct.pack("<Q", 1 << 60)), "ends within its header"),
        (header(tensors=1) + text("x") + struct.pack("<I", 1 << 20), "has 1048576 dimensions"),
        (header(tensors=1) + text("x") + struct.pack("<IQQIQ", 2, 1 << 32, 1 << 32, 0, 0), "beyond its end"),
        (header(tensors=1) + text("x") + struct.pack("<IQIQ", 1, 0, 0, 0), "a tensor has no element"),
        (header(version=1), "its version is 1"),
        (header(version=3 << 24), "it is big-endian"),
        (b"GGUF\3\0", "ends within its header"),
    ],
)
def test_a_header_that_says_more_than_the_file_holds(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gguf's reader would read nothing, as often as a length says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"header that cannot be used: .*{message}"):
        Checkpoint(tmp_path / "x.gguf")


def test_names_are_mapped_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would do it for each module, in the square of the number of blocks."""
    made = []

    def counted(*given: Any) -> Any:
        made.append(given)
        return before(*given)

    before = gguf.get_tensor_name_map
    monkeypatch.setattr(gguf, "get_tensor_name_map", counted)
    Checkpoint(file)
    assert len(made) == 1
    assert gguf.get_tensor_name_map is counted


def test_a_file_that_takes_too_long(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: Any) -> None:
        for _ in itertools.count():
            pass

    monkeypatch.setattr(shared.gguf, "_SECONDS", 0.0)
    monkeypatch.setattr(shared.gguf, "_convert", endless)
    with pytest.raises(CheckpointError, match=r"more than 0 s of a processor to read, and has [\d,]+ bytes"):
        Checkpoint(file)


def test_a_file_of_more_than_its_tensors_hold(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shared.recipes._FEW", 8)
        patch.setattr("shared.recipes._MODULES", 0)
        with pytest.raises(CheckpointError, match="many more layers than its 21 tensors hold"):
            Checkpoint(file)
    with monkeypatch.context() as patch:
        patch.setattr("shared.buffers.MAX_BUFFERS", 8)
        with pytest.raises(CheckpointError, match=r"small\.gguf describes tables of"):
            Checkpoint(file)
    assert Checkpoint(file).names()


def test_the_package_that_is_missing_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.gguf.importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install '\.\[gguf\]'"):
        Checkpoint(file)


def test_a_name_like_that_of_a_part(file: Path) -> None:
    whole = file.rename(file.with_name("model-of-0.5B.gguf"))
    assert Checkpoint(whole).folder.name == "model-of-0.5B"


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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("blocks", "says 2000 blocks of width 64, and has tensors of 2 blocks"),
        ("token", "has a token of 2,000 bytes; 1,024 are the most"),
        ("scaled", r"has llama\.rope\.scaling\.type, which transformers leaves out"),
        ("frequencies", r"has rope_freqs\.weight, which transformers leaves out"),
        ("missing", "would be made of random numbers"),
        ("bias", "has blk.0.attn_q.bias, which transformers leaves out"),
        ("window", r"has llama\.attention\.sliding_window = 16, and transformers makes 0 of it"),
        ("scale", r"has llama\.logit_scale, which transformers leaves out"),
        ("inner", r"says a model of 2,304,\d+,\d+ weights, and has 74,\d+: it is damaged"),
    ],
)
def test_a_file_of_another_model_than_transformers_makes(
    wrong: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(written(tmp_path / "wrong.gguf", wrong))


@pytest.mark.parametrize(
    ("model", "keys", "text", "tokens"),
    [
        ("gpt2", {"pre": "gpt-2"}, "12 ab  3", ["12", "Ġ", "ab", "Ġ", "Ġ", "3"]),
        ("gpt2", {"pre": "starcoder", "add_space_prefix": True}, "12 ab", ["1", "2", "Ġ", "ab"]),
        ("gpt2", {"pre": "smollm", "add_space_prefix": False}, "a  3", ["a", "ĠĠ", "3"]),
        ("gpt2", {"pre": "llama-bpe", "fim_pre_token_id": 2, "add_sep_token": False}, "12", ["<s>", "12"]),
        ("gpt2", {"pre": "tekken", "add_bos_token": False}, "a12", ["a", "1", "2"]),
        ("gpt2", {"pre": "tekken"}, "a", ["<s>", "a"]),
        ("gpt2", {"pre": "smaug-bpe"}, "12", ["12"]),
        ("gpt2", {"pre": ""}, "", r"has no tokenizer\.ggml\.pre, .* llama\.cpp of May 2024 or newer"),
        ("gpt2", {"pre": "default"}, "", r"has no tokenizer\.ggml\.pre"),
        ("gpt2", {"pre": "qwen2", "mask_token_id": 2}, "12", ["1", "2"]),
        ("gpt2", {"pre": "deepseek-coder"}, "", r"tokenizer\.ggml\.pre = deepseek-coder, which"),
        ("gpt2", {"pre": "nobody-knows-this"}, "", r"ggml\.pre = nobody"),
        ("gpt2", {"normalizer.lowercase": True}, "", r"ggml\.normalizer\.lowercase = True"),
        ("gpt2", {"add_sep_token": True}, "", r"ggml\.add_sep_token = True"),
        ("llama", {"pre": "default", "add_bos_token": False}, "ab a", ["▁a", "b", "▁a"]),
        ("llama", {"add_space_prefix": True, "add_bos_token": False}, "a", ["▁a"]),
        ("llama", {"add_space_prefix": False}, "", r"ggml\.add_space_prefix = False"),
        ("llama", {"remove_extra_whitespaces": True}, "", r"ggml\.remove_extra_whitespaces = True"),
        ("llama", {"pre": "qwen2"}, "", r"ggml\.pre = qwen2"),
    ],
)
def test_what_a_file_says_of_its_tokenizer(
    model: str, keys: dict[str, Any], text: str, tokens: list[str] | str, file: Path
) -> None:
    """It is obeyed, or the file refused."""
    written(file, tokenizer=model, **keys)
    if isinstance(tokens, str):
        with pytest.raises(CheckpointError, match=tokens):
            Checkpoint(file)
        return
    made = local_tokenizer(Checkpoint(file).folder)
    assert made.convert_ids_to_tokens(made(text)["input_ids"]) == tokens


@pytest.mark.parametrize(("pre", "tokens"), [("llama-bpe", ["zz"]), ("smaug-bpe", ["z", "z"])])
def test_a_word_that_is_a_token_and_no_merge(
    pre: str, tokens: list[str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
        before(writer, ["zz" if token == "~" else token for token in tokens])

    before = gguf.GGUFWriter.add_token_list
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_list", add)
    made = local_tokenizer(Checkpoint(written(file, pre=pre, add_bos_token=False)).folder)
    assert made.convert_ids_to_tokens(made("zz")["input_ids"]) == tokens


def test_a_gpt2_needs_no_name_of_how_text_is_split() -> None:
    """Its files are older than that key."""
    tokenizer = GPT2Tokenizer(vocab={"a": 0, "b": 1}, merges=[])
    for architecture in ("gpt2", "llama"):
        said = {"general.architecture": architecture, "tokenizer.ggml.model": "gpt2"}
        fields = {name: SimpleNamespace(contents=lambda value=value: value) for name, value in said.items()}
        with pytest.raises(CheckpointError) if architecture == "llama" else nullcontext():
            shared.gguf._check_tokenizer(SimpleNamespace(fields=fields), tokenizer, "x.gguf")


def test_all_tokens_that_end_an_answer(file: Path) -> None:
    written(file, eot_token_id=5, eom_token_id=1)
    assert tokenizer_info_in(Checkpoint(file).folder).ends == (1, 5)
    written(file, eot_token_id=2**32 - 1)
    assert tokenizer_info_in(Checkpoint(file).folder).ends == (1,)


@pytest.mark.parametrize(
    ("architecture", "said", "options", "message"),
    [
        ("starcoder2", {"rope.freq_base": 1e4}, {}, ""),
        ("starcoder2", {"rope.freq_base": 1e6}, {}, r"rope\.freq_base = 1000000\.0, .* makes 10000\.0"),
        ("phi3", {"attention.sliding_window": 2047}, {}, "transformers makes 0"),
        ("phi3", {"rope.dimension_count": 96}, {}, ""),
        ("phi3", {"rope.dimension_count": 72}, {}, "transformers makes 96"),
        ("stablelm", {"rope.dimension_count": 20}, {}, ""),
        ("stablelm", {}, {}, r"rope\.dimension_count = 80, .* makes 20"),
        ("mistral", {}, {}, r"sliding_window = 0, .* makes 4096"),
        ("qwen3", {"rope.freq_base": 1e6}, {"rope_theta": 1e6}, ""),
        ("llama", {"attention.head_count": 32, "attention.causal": True, "expert_count": 0}, {}, ""),
        ("llama", {"attention.head_count": [32, 16]}, {}, "makes 32"),
        ("llama", {"attention.causal": False}, {}, "causal = False"),
        ("lfm2", {"attention.layer_norm_rms_epsilon": 1e-6}, {"rms_norm_eps": 1e-6}, "makes 1e-05"),
        ("llama", {"rope.scaling.type": "none"}, {}, ""),
        ("llama", {"rope.scaling.factor": 2.0}, {}, r"llama\.rope\.scaling\.factor, which"),
        ("gemma2", {}, {}, ""),
        ("gemma3_text", {"attention.sliding_window": 4096, "rope.freq_base": 1e6}, {}, ""),
        ("gemma3_text", {**_GEMMA, "rope.freq_base_swa": 5e5}, {}, "= 500000.0"),
        ("gemma3_text", {"attention.sliding_window": 4096, "rope.freq_base": 1e5}, {}, "= 100000.0"),
        ("gemma2", {}, {"num_hidden_layers": 46, "hidden_size": 4608, "num_attention_heads": 32}, "= 144"),
        ("mamba", {"attention.head_count": 0, "attention.layer_norm_rms_epsilon": 1e-5}, {}, ""),
    ],
)
def test_what_a_configuration_says_otherwise_than_the_file(
    architecture: str, said: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    config = CONFIG_MAPPING[architecture](**options)
    given = {f"{architecture}.{key}": value for key, value in said.items()}
    if architecture == "lfm2":
        given["lfm2.rope.freq_base"] = 1e6
    fields = {
        name: SimpleNamespace(contents=lambda value=value: value)
        for name, value in {"general.architecture": architecture, **given}.items()
    }
    reader = SimpleNamespace(fields=fields, tensors=[])
    if not message:
        shared.gguf._check_same(reader, config, "x.gguf")
        return
    with pytest.raises(CheckpointError, match=message):
        shared.gguf._check_same(reader, config, "x.gguf")


def test_tensors_that_share_bytes(file: Path) -> None:
    """A small file of them would become as large a folder as anybody likes."""
    content = bytearray(file.read_bytes())
    for name in (b"ffn_gate", b"ffn_up", b"ffn_down"):
        # Behind the name: the number of dimensions, the dimensions, and a type.
        offset = content.index(b"blk.1." + name) + len(b"blk.1." + name + b".weight") + 4 + 2 * 8 + 4
        content[offset : offset + 8] = bytes(8)
    file.write_bytes(content[: -3 * WIDTH * INNER * 18 // 32])
    with pytest.raises(CheckpointError, match="tensors that share bytes"):
        Checkpoint(file)


def test_a_file_that_is_exchanged_while_it_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = file.read_bytes()
    expected = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).state_dict()
    (other := bytearray(honest))[-32:] = bytes(32)

    def exchanged(path: Path, *rest: Any, then: Callable[..., Any]) -> Any:
        done = then(path, *rest)
        file.write_bytes(other)
        return done

    with monkeypatch.context() as patch:
        patch.setattr("shared.gguf._digest", partial(exchanged, then=shared.gguf._digest))
        with pytest.raises(CheckpointError, match=r"small\.gguf was changed while it was read"):
            Checkpoint(file)
    file.write_bytes(honest)
    monkeypatch.setattr("shared.gguf._header", partial(exchanged, then=shared.gguf._header))
    checkpoint = Checkpoint(file)
    for name in checkpoint.names():
        assert torch.equal(checkpoint.read(name), expected[name]), name


def test_what_ended_conversions_left_is_removed(file: Path) -> None:
    made = Checkpoint(file).folder
    (left := made.parent / ".left").mkdir()
    (left / "model.safetensors").write_bytes(b"x")
    assert Checkpoint(file).folder == made
    assert sorted(each.name for each in made.parent.iterdir()) == [".lock", ".used", "small"]


def test_a_name_of_dots_alone(file: Path, tmp_path: Path) -> None:
    other = Checkpoint(file).folder
    dots = file.rename(tmp_path / "...gguf")
    with dots.open("ab") as opened:
        opened.write(b"\0")
    assert Checkpoint(dots).folder.name == "model"
    assert (other / "config.json").is_file()


def test_two_processes_make_one_folder(file: Path) -> None:
    """The provider and the mask source of a trial, at the same time."""
    program = (
        f"from shared.gguf import folder_of; from pathlib import Path; print(folder_of(Path({str(file)!r})))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    told = [each.communicate() for each in both]
    assert told[0][0] == told[1][0] != ""
    assert sum("making a checkpoint folder" in err for _, err in told) == 1


def test_an_adapters_base_is_the_folder_of_the_file(file: Path) -> None:
    """PEFT loads no such file."""
    with serve_in_process(file) as executor, tenant_sdk.connect(executor, privacy="plain") as session:
        named = Path(find_base(file, session.manifest).name)
        assert named == shared.gguf.folder_of(file)
        assert (named / "config.json").is_file()


def test_a_lock_is_no_link(file: Path, tmp_path: Path) -> None:
    """What it leads to would be emptied."""
    lock = shared.gguf.folder_of(file).parent / ".lock"
    victim = tmp_path / "victim"
    victim.write_text("kept")
    lock.unlink()
    lock.symlink_to(victim)
    with pytest.raises(CheckpointError, match="cannot make a checkpoint folder"):
        shared.gguf.folder_of(file)
    assert victim.read_text() == "kept"
