"""Quantised checkpoints: the dense weights that they stand for, and those that are refused."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quantised import SAID, needs_rules, quantise
from safetensors.torch import load_file, save_file
from stored_models import TABLE, build
from transformers.quantizers.base import HfQuantizer

from provider.catalog.discovery import discover
from provider.executor import memory_check
from provider.executor.base import BaseExecutor
from shared import compat
from shared.checkpoint import Checkpoint
from shared.errors import CheckpointError, ConfigurationError
from shared.quantised import awq_weight, gptq_weight

pytestmark = needs_rules
COMPRESSED = ("float-quantized", "pack-quantized")
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="pip install '.[quantised]'"
)
METHODS = [
    pytest.param(each, marks=[needs_package] if each in COMPRESSED else [])
    for each in SAID
    if each != "mxfp4"
]
CASES = [
    *[
        pytest.param(*each.values, name, marks=each.marks)
        for each in METHODS
        for name in ("mistral", "qwen3_moe")
    ],
    pytest.param("fp8", "deepseek_v3"),
    pytest.param("mxfp4", "gpt_oss"),
]


@pytest.fixture
def quantised(tmp_path: Path) -> Callable[[str, str], tuple[Path, Path]]:
    """The folders of a tiny model in bfloat16: quantised, and of the weights that this stands for."""

    def get(method: str, architecture: str) -> tuple[Path, Path]:
        folder, dense = tmp_path / method, tmp_path / f"{method}-dense"
        for each in (folder, dense):
            model = build(*TABLE[architecture], each)
            model.to(torch.bfloat16).save_pretrained(each)
        save_file(quantise(folder, method), dense / "model.safetensors", {"format": "pt"})
        return folder, dense

    return get


def says(folder: Path, **changes: Any) -> Path:
    """Change what a configuration says of quantisation."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**config["quantization_config"], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, **options)
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


@pytest.mark.parametrize(("method", "architecture"), CASES)
def test_weights_are_those_that_were_stored(
    method: str, architecture: str, quantised: Callable[[str, str], tuple[Path, Path]]
) -> None:
    folder, dense = quantised(method, architecture)
    stored, made = Checkpoint(folder).stored, 0
    for name, expected in loaded(dense).items():
        weight, source = stored.read(name), stored.source(name)
        assert torch.equal(weight.float(), expected), name
        assert stored.describe(name) == (tuple(expected.shape), weight.dtype), name
        assert source is not None
        # What was not quantised is used as it is.
        assert weight.dtype == (torch.float32 if source.converted and "experts" not in name else weight.dtype)
        made += source.converted
        if expected.dim() == 3:
            assert torch.equal(stored.read(name, expert=3).float(), expected[3]), name
    assert made >= 4
    assert not stored.unused
    assert stored.largest_conversion > 0


@pytest.mark.parametrize(
    ("method", "architecture"),
    [
        ("fp8", "qwen3_moe"),
        ("mxfp4", "gpt_oss"),
        *[pytest.param(c, "mistral", marks=needs_package) for c in COMPRESSED],
    ],
)
def test_weights_are_those_that_transformers_makes(
    method: str, architecture: str, quantised: Callable[[str, str], tuple[Path, Path]]
) -> None:
    folder, _ = quantised(method, architecture)
    stored = Checkpoint(folder).stored
    for name, expected in loaded(says(folder, dequantize=True)).items():
        assert torch.equal(stored.read(name).float(), expected), name


def test_the_digest_is_of_what_is_served(quantised: Callable[[str, str], tuple[Path, Path]]) -> None:
    """Of float32 weights, whatever they were made of; which is not what another format gives."""
    digests = set()
    for method in ("fp8", "gptq", "awq"):
        folder, dense = quantised(method, "mistral")
        checkpoint = Checkpoint(folder)
        groups = discover(checkpoint).groups
        assert all(member.made for group in groups for member in group.members)
        total, weights = hashlib.sha256(), load_file(dense / "model.safetensors")
        for name in sorted(member.tensor for group in groups for member in group.members):
            total.update(f"{name}|torch.float32|{tuple(weights[name].shape)}|".encode())
            total.update(weights[name].contiguous().numpy().tobytes())
        assert checkpoint.weights_digest(groups) == total.hexdigest()
        digests.add(total.hexdigest())
    assert len(digests) == 2  # the encoders of the second and the third round alike


def test_blocks_of_fp8_need_not_be_whole(quantised: Callable[[str, str], tuple[Path, Path]]) -> None:
    """The last ones of a weight are often smaller, and have a scale of their own."""
    folder, dense = quantised("fp8", "mistral")
    says(folder, weight_block_size=[24, 20])  # of 96 and 64 outputs, 64 inputs
    tensors, expected = (load_file(each / "model.safetensors") for each in (folder, dense))
    for name in [each for each in tensors if each.endswith("_scale_inv")]:
        weight = tensors[name.removesuffix("_scale_inv")].float()
        scales = torch.rand(-(-weight.shape[0] // 24), -(-weight.shape[1] // 20))
        spread = scales.repeat_interleave(24, 0).repeat_interleave(20, 1)[
            : weight.shape[0], : weight.shape[1]
        ]
        tensors[name], expected[name.removesuffix("_scale_inv")] = scales, weight * spread
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    stored = Checkpoint(folder).stored
    for name, weight in expected.items():
        assert torch.equal(stored.read(name), weight), name
        assert stored.describe(name) == (tuple(weight.shape), weight.dtype)


# -- 4-bit integers, by hand -----------------------------------------------------------------------


def test_a_word_of_gptq() -> None:
    """Eight inputs of eight outputs, one group: (q - z) s."""
    numbers = torch.arange(64).view(8, 8) % 16  # [I, O]
    words = [sum(int(numbers[i, o]) << 4 * i for i in range(8)) for o in range(8)]
    zeros = 0x87654321  # 1 of the first output, to 8 of the last; less by one: 0x76543210
    stored = {
        "qweight": torch.tensor([words]).to(torch.int32),
        "qzeros": torch.tensor([[zeros - 0x11111111]]).to(torch.int32),
        "scales": torch.full((1, 8), 0.5, dtype=torch.float16),
        "g_idx": torch.zeros(8, dtype=torch.int32),
    }
    expected = (numbers - torch.arange(1, 9)).T * 0.5
    assert torch.equal(gptq_weight(stored, 1), expected)
    del stored["g_idx"]
    assert torch.equal(gptq_weight(stored, 1), expected)
    stored["qzeros"] = torch.tensor([[zeros - 2**32]]).to(torch.int32)
    assert torch.equal(gptq_weight(stored, 0), expected)


def test_zeros_of_gptq_that_are_zero() -> None:
    """Less by one they borrow from the next; what is added to all eight at once gives it back."""
    stored = {
        "qweight": torch.zeros((1, 8), dtype=torch.int32),
        "qzeros": torch.tensor([[0x00000020 - 0x11111111]]).to(torch.int32),
        "scales": torch.ones(1, 8),
    }
    zeros = torch.tensor([0, 2, 0, 0, 0, 0, 0, 0])
    assert torch.equal(gptq_weight(stored, 1), -zeros.float()[:, None].expand(8, 8))


def test_a_word_of_awq() -> None:
    """Outputs 0, 2, 4, 6, 1, 3, 5, 7, from the lowest bits."""
    word = 0x75316420  # each number is that of its output
    stored = {
        "qweight": torch.tensor([[word]] * 2).to(torch.int32),
        "qzeros": torch.zeros((1, 1), dtype=torch.int32),
        "scales": torch.ones(1, 8),
    }
    assert torch.equal(awq_weight(stored), torch.arange(8.0)[:, None].expand(8, 2))


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [
        ("scales", (8,), None),
        ("scales", (2, 1), None),
        ("scales", (0, 8), None),
        ("scales", (3, 8), None),
        ("qzeros", (1, 1), None),
        ("qzeros", (2, 2), None),
        ("g_idx", (4,), None),
        ("scales", (2, 8), 4),
        ("scales", (2, 8), -1),
    ],
)
@pytest.mark.parametrize("unpack", [partial(gptq_weight, offset=1), awq_weight])
def test_tensors_that_do_not_fit_are_not_spread_out(
    unpack: Callable[..., torch.Tensor], name: str, shape: tuple[int, ...], size: int | None
) -> None:
    """16 inputs of 8 outputs in groups of 8, but for one tensor, or for what is said of the groups."""
    words = (16, 1) if unpack is awq_weight else (2, 8)
    stored = {
        "qweight": torch.zeros(words, dtype=torch.int32),
        "qzeros": torch.zeros((2, 1), dtype=torch.int32),
        "scales": torch.ones(2, 8),
    }
    assert unpack(stored, size=8).shape == (8, 16)
    stored[name] = torch.zeros(shape, dtype=torch.int32)
    with pytest.raises(CheckpointError, match="make no weight"):
        unpack(stored, size=size)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, which is not served"),
        ({"load_in_8bit": True, "quant_method": None}, "bitsandbytes, which is not served"),
        ({"quant_method": "hqq"}, "hqq, which is not served; .* fp8, mxfp4"),
        ({"quant_method": "torchao"}, "torchao, which is not served"),
        ({"quant_method": "nvfp4"}, "nvfp4, which is not served"),
        ({"quant_method": None}, "no known method, which is not served"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits"),
        ({"quant_method": "gptq", "bits": 2}, "gptq with 2 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, "format gemv"),
        ({"quant_method": "awq", "bits": 8}, "awq with 8 bits"),
        ({"quant_method": "awq", "zero_point": False}, "awq with 4 bits"),
        ({"quant_method": "fp8", "weight_block_size": "x"}, "quantization_config cannot be used"),
    ],
)
def test_other_methods_are_refused_by_name(
    said: dict[str, Any], message: str, quantised: Callable[[str, str], tuple[Path, Path]]
) -> None:
    folder, _ = quantised("awq", "mistral")
    with pytest.raises(CheckpointError, match=message):
        BaseExecutor(says(folder, **said), numerics="float32")


def test_a_package_that_is_missing_is_named(
    quantised: Callable[[str, str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = quantised("float-quantized", "mistral")
    monkeypatch.setattr("shared.quantised.importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install '\.\[quantised\]'"):
        BaseExecutor(folder, numerics="float32")


def test_without_rules_nothing_is_dequantised(
    quantised: Callable[[str, str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = quantised("fp8", "mistral")
    monkeypatch.setattr(compat, "conversions", lambda: None)
    with pytest.raises(CheckpointError, match="only other versions of transformers"):
        BaseExecutor(folder, numerics="float32")


def test_an_older_transformers_is_told(
    quantised: Callable[[str, str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = quantised("gptq", "mistral")
    monkeypatch.delattr(HfQuantizer, "serialized_names")
    with pytest.raises(CheckpointError, match=r"quantised by gptq, whose tensors .* install the newest"):
        BaseExecutor(folder, numerics="float32")


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        # Of a layer that is used, what nobody knows; numbers without scales; scales of another layer.
        ("awq", {f"{Q_PROJ}.smooth": torch.ones(64)}, "smooth, and transformers does not say"),
        ("awq", {"model.layers.0.mlp.act.scales": torch.ones(96)}, r"act\.scales, and transformers"),
        ("fp8", {f"{Q_PROJ}.weight_scale_inv": torch.ones(3, 2)}, r"scales \[3, 2\] are not of blocks"),
        ("fp8", {f"{Q_PROJ}.weight_scale_inv": None}, r"q_proj\.weight as .*float8\w+ without its scales"),
        ("gptq", {f"{Q_PROJ}.qzeros": None}, r"q_proj\.weight cannot be made of"),
        ("gptq", {f"{Q_PROJ}.scales": torch.ones(2, 32)}, r"q_proj\.weight cannot be made of"),
        # As 2-bit numbers would be.
        ("gptq", {f"{Q_PROJ}.qweight": torch.zeros(4, 64, dtype=torch.int32)}, "cannot be made of|has shape"),
    ],
)
def test_layers_that_hold_something_else_are_refused(
    method: str,
    change: dict[str, torch.Tensor | None],
    message: str,
    quantised: Callable[[str, str], tuple[Path, Path]],
) -> None:
    folder, _ = quantised(method, "mistral")
    tensors = {**load_file(folder / "model.safetensors"), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        BaseExecutor(folder, numerics="float32")


def test_what_weights_do_not_depend_on_is_no_matter(
    quantised: Callable[[str, str], tuple[Path, Path]],
) -> None:
    """Scales of activations and caches, zeros as biases, layers for training alone."""
    folder, _ = quantised("fp8", "mistral")
    more = {f"{Q_PROJ}.bias": torch.zeros(64), "model.layers.0.self_attn.k_proj.k_scale": torch.ones(1)}
    more |= {"model.layers.9.mlp.up_proj.weight_scale_inv": torch.ones(1, 1)}
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | more, folder / "model.safetensors", {"format": "pt"})
    assert set(Checkpoint(folder).stored.unused) == set(more)
    BaseExecutor(folder, numerics="float32")


def test_a_conversion_that_does_not_fit_is_refused_first(
    quantised: Callable[[str, str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = quantised("fp8", "mistral")
    needed = memory_check.BASE_BYTES + Checkpoint(folder).stored.largest_conversion
    monkeypatch.setattr(memory_check, "available_memory", lambda: (needed - 1, "this test"))
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("something was read"))
    with pytest.raises(ConfigurationError, match=r"not enough memory to load fp8.*\(this test\)"):
        BaseExecutor(folder, numerics="float32")
