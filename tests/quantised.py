"""Checkpoints as quantisers write them, made of tiny models by small encoders, and what they stand for.

An encoder takes a weight [O, I] and gives the tensors that are stored for it, by the ends of their names, and
the weight that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.quantizers.base import HfQuantizer

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
Encode = Callable[[torch.Tensor], Stored]
GROUP = 32  # inputs, or both axes of a block, that share a scale
_SHIFTS = torch.arange(8) * 4
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


# Earlier ones read these checkpoints by rules of another form, and are told to be replaced.
needs_rules = pytest.mark.skipif(
    not hasattr(HfQuantizer, "serialized_names"),
    reason=f"transformers {transformers.__version__} does not list the tensors of quantised checkpoints",
)


def words(numbers: torch.Tensor) -> torch.Tensor:
    """0 to 15, [N, 8 M], eight neighbours in an int32, the first lowest: [N, M]."""
    packed = (numbers.long().view(len(numbers), -1, 8) << _SHIFTS).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def fp8(weight: torch.Tensor) -> Stored:
    """Blocks of 32 by 32 with a float32 scale each."""
    outputs, inputs = weight.shape
    blocks = weight.float().view(outputs // GROUP, GROUP, inputs // GROUP, GROUP)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    numbers = (blocks / scale).to(torch.float8_e4m3fn)
    stored = {"weight": numbers.view(weight.shape), "weight_scale_inv": scale[:, 0, :, 0].contiguous()}
    return stored, (numbers.float() * scale).view(weight.shape)


def mxfp4(weight: torch.Tensor) -> Stored:
    """Experts [E, I, O], their inputs in groups of 32 with a power of two each."""
    groups = weight.float().mT.reshape(*weight.mT.shape[:2], -1, GROUP)
    exponent = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil().clamp(-127, 127)
    values = torch.cat([_E2M1, -_E2M1])
    codes = ((groups / exponent.exp2()).unsqueeze(-1) - values).abs().argmin(-1).to(torch.uint8)
    stored = {
        "_blocks": codes[..., ::2] | (codes[..., 1::2] << 4),
        "_scales": (exponent[..., 0] + 127).to(torch.uint8),
    }
    return stored, (values[codes.long()] * exponent.exp2()).flatten(2).mT.contiguous()


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers 0 to 15 [I, O], zeros [G, O], scales [G, O], and the weight [O, I] that they are."""
    groups = weight.float().T.reshape(-1, GROUP, len(weight))
    low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-6).half()
    zero = (-low / scale.float()).round().clamp(0, 15)
    numbers = (groups / scale.float() + zero).round().clamp(0, 15)
    stands_for = ((numbers - zero) * scale.float()).flatten(0, 1).T.contiguous()
    return numbers.flatten(0, 1), zero[:, 0], scale[:, 0], stands_for


def gptq(weight: torch.Tensor, *, offset: int = 1, shuffled: bool = False) -> Stored:
    """Eight inputs in a word; of zeros what ``offset`` leaves, as one number for eight."""
    order = torch.randperm(weight.shape[1]) if shuffled else torch.arange(weight.shape[1])
    numbers, zeros, scales, sorted_weight = _int4(weight[:, order])
    back = order.argsort()
    stored = {
        "qweight": words(numbers[back].T.contiguous()).T.contiguous(),
        "qzeros": words(zeros) - offset * 0x11111111,
        "scales": scales,
        "g_idx": (back // GROUP).to(torch.int32),
    }
    return stored, sorted_weight[:, back]


def awq(weight: torch.Tensor) -> Stored:
    """Eight outputs in a word: the even ones, then the odd ones."""

    def in_order(numbers: torch.Tensor) -> torch.Tensor:
        pairs = numbers.view(len(numbers), -1, 4, 2)
        return words(pairs.transpose(2, 3).reshape(numbers.shape))

    numbers, zeros, scales, stands_for = _int4(weight)
    return {"qweight": in_order(numbers), "qzeros": in_order(zeros), "scales": scales}, stands_for


def float_quantised(weight: torch.Tensor) -> Stored:
    """Of compressed-tensors: FP8 with a scale for each output."""
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    numbers = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def pack_quantised(weight: torch.Tensor) -> Stored:
    """Of compressed-tensors: 4-bit integers around 8, with a scale for each group of inputs."""
    groups = weight.float().view(len(weight), -1, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).clamp(min=1e-6)
    numbers = (groups / scale).round().clamp(-8, 7)
    stored = {
        "weight_packed": words((numbers + 8).view(weight.shape)),
        "weight_scale": scale[..., 0].contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, (numbers * scale).view(weight.shape)


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {**group, "input_activations": None, "output_activations": None}},
    }


# How each is said to have been quantised in ``config.json``.
SAID: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "float-quantized": _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "pack-quantized": _compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP
    ),
}
ENCODE: dict[str, Encode] = {
    "fp8": fp8,
    "mxfp4": mxfp4,
    "gptq": gptq,
    "gptq_v2": lambda weight: gptq(weight, offset=0, shuffled=True),
    "awq": awq,
    "float-quantized": float_quantised,
    "pack-quantized": pack_quantised,
}


def quantise(folder: Path, method: str) -> dict[str, torch.Tensor]:
    """Quantise a checkpoint in place; what its tensors stand for, by the names that they had."""
    tensors = load_file(folder / "model.safetensors")
    stored, dense = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        experts = tensor.dim() == 3 and name.endswith("_proj")
        layer = (
            tensor.dim() == 2 and name.endswith("proj.weight") and not any(n % GROUP for n in tensor.shape)
        )
        if experts if method == "mxfp4" else layer:
            parts, dense[name] = ENCODE[method](tensor)
            stem = name.removesuffix("weight")
            stored |= {stem + part: each.contiguous() for part, each in parts.items()}
        else:
            stored[name] = dense[name] = tensor
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": SAID[method]}))
    return dense
