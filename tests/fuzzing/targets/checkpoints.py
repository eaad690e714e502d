"""Files of models: checkpoints, GGUF files, configurations, tokenizers and fingerprints."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import gguf
import msgspec
import numpy as np
import torch
from cryptography.fernet import Fernet
from safetensors.torch import save

from fuzzing.oracle import SEPARATOR, Finding, Target, parts_of
from fuzzing.targets.files import folder, written
from fuzzing.targets.wire import manifest
from shared.checkpoint import Checkpoint
from shared.configuration import check_quantisation, quantisation_of, without_loading
from shared.encoded import UNREADABLE
from shared.errors import CheckpointError
from shared.gguf import _header
from shared.gguf_header import check_header
from shared.quantised import awq_weight, gptq_weight, quantizer_of
from tenant_sdk.model.configuration import generation_configuration, model_configuration
from tenant_sdk.model.tokenizer import build_tokenizer
from tenant_sdk.model.tokenizer_file import MAX_GROWTH
from tenant_sdk.products.fingerprints import StoredFingerprints

_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def checkpoint(data: bytes) -> None:
    """A folder whose index and weights anybody may have written: every tensor that it names is read."""
    index, weights = parts_of(data, 2)
    written("checkpoint/config.json", b"{}")
    written(f"checkpoint/{_WEIGHTS}", weights)
    if index:
        written(f"checkpoint/{_INDEX}", index)
    else:
        (folder() / "checkpoint" / _INDEX).unlink(missing_ok=True)
    found = Checkpoint(folder() / "checkpoint")
    with found.kept_open():
        for name in found.names():
            shape, dtype = found.layout(name)
            tensor = found.read(name)
            if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
                raise Finding("a tensor has another layout than was said")


def quantisation(data: bytes) -> None:
    """What a configuration says of quantisation: transformers' rules, or a refusal."""
    written("quantised/config.json", data)
    check_quantisation(folder() / "quantised")
    if said := quantisation_of(folder() / "quantised"):
        quantizer_of(said)


def quantised_tensors(data: bytes) -> None:
    """Tensors of any shapes that shall make a weight."""
    try:
        given = msgspec.json.decode(data, type=dict[str, list[int]])
    except UNREADABLE:
        return
    shapes = {name: [abs(side) % 65 for side in shape][:3] for name, shape in given.items()}
    (size, *_) = [*given.get("size", ()), -1]
    stored = {
        name: torch.zeros(shape, dtype=torch.float16 if name == "scales" else torch.int32)
        for name, shape in shapes.items()
    }
    if not {"qweight", "qzeros", "scales"} <= stored.keys():
        return  # transformers finds what belongs together
    made = gptq_weight(stored, 1, size) if "g_idx" in stored or size % 2 else awq_weight(stored, size)
    if made.shape[0] != shapes["scales"][1]:
        raise Finding("the weight has other outputs than there are scales")


def gguf_header(data: bytes) -> None:
    """The lengths in the header of a GGUF file."""
    check_header(written("x.gguf", data))


def gguf_reader(data: bytes) -> None:
    """The same with the library that reads the rest."""
    _header(written("x.gguf", data), "x.gguf")


def configuration(data: bytes) -> None:
    """A peer's ``config.json``; nothing is left in it that transformers would load."""
    try:
        without_loading(msgspec.json.decode(data, type=dict[str, Any]), "config.json")
    except UNREADABLE:
        pass
    model_configuration(data, manifest("float32"), {})


def generation(data: bytes) -> None:
    """A peer's ``generation_config.json``."""
    generation_configuration(data, None)


_TEXT = "Aé 世界\n 12 <s>x"


def tokenizer(data: bytes) -> None:
    """A peer's rules and options: what they make of a text is bounded."""
    rules, options = parts_of(data, 2)
    made = build_tokenizer({"tokenizer.json": rules, "tokenizer_config.json": options or b"{}"})
    try:
        ids = made(_TEXT)["input_ids"]
    except Exception as error:
        raise CheckpointError(f"the library refuses the text: {error}") from error  # and does not panic
    if len(ids) > MAX_GROWTH * len(_TEXT.encode()) + 64:
        raise Finding(f"a text of {len(_TEXT)} characters became {len(ids)} tokens")


@cache
def _cipher() -> tuple[str, Fernet]:
    key = base64.urlsafe_b64encode(bytes(32)).decode()
    return key, Fernet(key)


def fingerprints(data: bytes) -> None:
    """A file of fingerprints, or a key. Only somebody who has the key can write what is in such a file."""
    key, cipher = _cipher()
    text = data[1:].decode(errors="surrogateescape")
    path = written("x.fingerprints", cipher.encrypt(b"x") if data[:1] == b"\1" else data[1:])
    path.chmod(0o600)
    StoredFingerprints(path, text if data[:1] == b"\1" else key).fit(manifest())


# -- seeds -----------------------------------------------------------------------------------------


def _checkpoints() -> list[bytes]:
    tensors = {"a.weight": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(1)}
    weights = save(tensors, {"format": "pt"})
    index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, _WEIGHTS)}).encode()
    return [SEPARATOR + weights, index + SEPARATOR + weights]


def _said() -> list[bytes]:
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    gptq = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "checkpoint_format": "gptq",
        "desc_act": True,
    }
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    found: list[Any] = [{"quantization_config": each} for each in (fp8, gptq, awq, mxfp4)]
    found += [{"text_config": found[1]}, {"quantization_config": {"load_in_4bit": True}}, {}]
    return [json.dumps(each).encode() for each in found]


def _int4() -> list[bytes]:
    gptq = {"qweight": [2, 16], "qzeros": [2, 2], "scales": [2, 16], "g_idx": [16], "size": [8]}
    awq = {"qweight": [16, 2], "qzeros": [2, 2], "scales": [2, 16], "size": [8]}
    return [json.dumps(each).encode() for each in (gptq, awq)]


@cache
def _ggufs() -> list[bytes]:
    path = folder() / "seed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(4)
    writer.add_block_count(1)
    writer.add_rope_freq_base(1e4)
    writer.add_array("x", [1, 2])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "a", "b"])
    writer.add_token_types([3, 1, 1])
    writer.add_bos_token_id(0)
    writer.add_tensor("token_embd.weight", np.ones((3, 4), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.ones((4, 4), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def named(name: bytes) -> bytes:
        return struct.pack("<Q", len(name)) + name

    name = named(b"x")
    array = struct.pack("<IIQ", 9, 8, 2) + name * 2
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + name + array + named(b"y") + struct.pack("<If", 6, 1.0)
    tensor = name + struct.pack("<IQQIQ", 2, 4, 1, 0, 0)
    return [path.read_bytes(), head + tensor + bytes(64)]


def _configurations() -> list[bytes]:
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4, "vocab_size": 5}
    llama |= {
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 4,
        "tie_word_embeddings": True,
    }
    llama |= {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "id2label": {"0": "a"},
        "auto_map": {"a": "b"},
    }
    gemma = {"model_type": "gemma3", "text_config": {"hidden_size": 4, "layer_types": ["full_attention"]}}
    sound = {"model_type": "wav2vec2", "conv_kernel": [3], "conv_stride": [2], "conv_dim": [4]}
    levit = {"model_type": "levit", "image_size": 32, "patch_size": 4}
    return [json.dumps(each).encode() for each in (llama, gemma, sound, levit)]


def _generations() -> list[bytes]:
    return [json.dumps({"eos_token_id": [1, 2], "bos_token_id": 0, "max_length": 20, "top_k": 5}).encode()]


def _tokenizers() -> list[bytes]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocabulary = {"<s>": 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    added = {"id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False}
    added |= {"normalized": False, "special": True}
    bpe = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
        "pre_tokenizer": level,
        "post_processor": template,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"]], "byte_fallback": False},
    }
    split = {"type": "Split", "pattern": {"Regex": "[ab]+"}, "behavior": "Isolated", "invert": False}
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "_"}
    scored = [[name, -1.0 * at] for at, name in enumerate(vocabulary)]
    table = (1024).to_bytes(4, "little") + bytes(1024) + b"x\0"
    charsmap = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    unigram = {
        "normalizer": replaced,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, {"type": "Digits", "individual_digits": True}],
        },
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": scored, "byte_fallback": False},
    }
    piece = {
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "post_processor": {"type": "BertProcessing", "sep": ["<s>", 0], "cls": ["<s>", 0]},
        "model": {
            "type": "WordPiece",
            "unk_token": "<s>",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocabulary,
        },
    }
    options = {"bos_token": "<s>", "model_max_length": 1e30, "padding_side": "left", "chat_template": "x"}
    rules = [*(bpe, unigram, piece, {**unigram, "normalizer": charsmap})]
    return [json.dumps(each).encode() + SEPARATOR + json.dumps(options).encode() for each in rules]


def _fingerprints() -> list[bytes]:
    key, cipher = _cipher()
    return [b"\0" + cipher.encrypt(each) for each in (b"x", save({"x": torch.ones(1)}))] + [
        b"\1" + key.encode()
    ]


_SAFETENSORS = (
    b'"dtype":"F32"',
    b'"BF16"',
    b'"F4"',
    b'"F8_E4M3"',
    b'"I64"',
    b"data_offsets",
    b"[0,4]",
    b"__metadata__",
)
_MODELS = (
    b"model_type",
    b"text_config",
    b"rope_parameters",
    b"layer_types",
    b"head_dim",
    b"quantization_config",
)
_MODELS += (
    b"qwen3",
    b"gpt2",
    b"mixtral",
    b"deepseek_v3",
    b"t5",
    b"bert",
    b"mamba",
    b"clip",
    b"dtype",
    b"bfloat16",
)
_RULES = (
    b"Prepend",
    b"prepend",
    b"NFKD",
    b"Metaspace",
    b"prepend_scheme",
    b"always",
    b"Strip",
    b"start",
    b"FixedLength",
)
_RULES += (
    b"length",
    b"WordLevel",
    b"CTC",
    b"BPEDecoder",
    b"unk_token",
    b"continuing_subword_prefix",
    b"fuse_unk",
)
_RULES += (b"Punctuation", b"UnicodeScripts", b"Removed", b"MergedWithNext", b"Contiguous", b"ids", b"tokens")
_METHODS = (
    b"quant_method",
    b"fp8",
    b"mxfp4",
    b"compressed-tensors",
    b"gptq",
    b"awq",
    b"weight_block_size",
    b"bits",
)
TARGETS: Sequence[Target] = (
    Target(
        *("checkpoint", checkpoint, _checkpoints, ("shared/checkpoint.py", "shared/stored.py")),
        words=_SAFETENSORS,
        divided=True,
    ),
    Target(
        *("quantisation", quantisation, _said, ("shared/configuration.py", "shared/quantised.py")),
        words=_METHODS,
    ),
    Target("quantised_tensors", quantised_tensors, _int4, ("shared/quantised.py",)),
    Target("gguf_header", gguf_header, _ggufs, ("shared/gguf_header.py",), (ValueError, OSError)),
    Target("gguf_reader", gguf_reader, _ggufs, ("shared/gguf.py",), (CheckpointError,)),
    Target(
        *("configuration", configuration, _configurations),
        ("tenant_sdk/model/configuration.py", "shared/configuration.py"),
        words=_MODELS,
    ),
    Target("generation", generation, _generations, ("tenant_sdk/model/configuration.py",)),
    Target(
        *("tokenizer", tokenizer, _tokenizers),
        ("tenant_sdk/model/tokenizer_file.py", "tenant_sdk/model/tokenizer.py"),
        words=_RULES,
        divided=True,
    ),
    Target(
        *("fingerprints", fingerprints, _fingerprints, ("tenant_sdk/products/fingerprints.py",)),
    ),
)
