"""Quantised checkpoints: the formats that can be served, and dense weights made of their tensors.

For FP8 with scales of blocks, MXFP4 and compressed-tensors rules and arithmetic are transformers' own. 4-bit
integers of GPTQ and AWQ are unpacked here, and transformers' rules find what belongs together. All
weights are made in float32. Other methods are refused: a weight that is not exactly what others make of the
same checkpoint would be another model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from shared.configuration import SERVED, served_method
from shared.errors import CheckpointError

_BITS = torch.arange(8, dtype=torch.int32) * 4  # of the eight numbers in a word, lowest first
# AWQ's kernel takes two words apart at a time: the k-th number of a word is this column.
_AWQ_ORDER = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
# Weights do not depend on how activations and caches are quantised, of which an executor has none; and some
# write zeros as biases of layers that have none.
_UNUSED = ("input_scale", "output_scale", "activation_scale", "k_scale", "v_scale", "q_scale", "bias")


def quantizer_of(said: Mapping[str, Any]) -> Any:
    """transformers' rules that have a checkpoint dequantised while it is read.

    Args:
        said: its ``quantization_config``.

    Raises:
        CheckpointError: this method is not served, or not so, or needs a package that is not installed.
    """
    method = served_method(said)
    if not hasattr(HfQuantizer, "serialized_names"):
        raise CheckpointError(
            f"the checkpoint was quantised by {method}, whose tensors transformers "
            f"{transformers.__version__} does not list; install the newest one, or serve a checkpoint that "
            "was not quantised"
        )
    if method in ("gptq", "awq"):
        return _Int4({"gptq": _gptq, "awq": _awq}[method](said))
    if method == "compressed-tensors" and importlib.util.find_spec("compressed_tensors") is None:
        raise CheckpointError(
            "the checkpoint was quantised by compressed-tensors, which needs the package of that name: "
            "pip install '.[quantised]' in a checkout of this project"
        )
    try:
        quantizer = AutoHfQuantizer.from_config({**said, "dequantize": True}, pre_quantized=True)
        quantizer.validate_environment()
    except Exception as error:  # each refuses nonsense in a way of its own
        raise CheckpointError(
            f"the checkpoint's quantization_config cannot be used: {error!r:.300}"
        ) from error
    if method == "fp8":
        quantizer.get_load_operations = lambda: {"dequantize": _BlocksDequantize}
    return quantizer


def check_complete(unused: Iterable[str], used: Iterable[str]) -> None:
    """Refuse a checkpoint whose layers have more than what they are made of.

    Args:
        unused: tensors that nothing is made of.
        used: those that something is made of.

    Raises:
        CheckpointError: one of the first is beside one of the second.
    """
    layers = {name.rpartition(".")[0] for name in used}
    for name in unused:
        layer, _, what = name.rpartition(".")
        if name.endswith("act.scales") or (layer in layers and not what.endswith(_UNUSED)):
            raise CheckpointError(
                f"the checkpoint holds {name}, and transformers does not say what its layer's weight is with "
                f"it; serve one that was not quantised, or in the usual format of {SERVED}"
            )


Unpack = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


def _gptq(said: Mapping[str, Any]) -> Unpack:
    form, bits = said.get("checkpoint_format") or said.get("format") or "gptq", said.get("bits")
    if bits != 4 or form not in ("gptq", "gptq_v2") or said.get("pack_dtype", "int32") != "int32":
        raise CheckpointError(
            f"the checkpoint was quantised by gptq with {bits} bits in the format {form}; with 4 bits in the "
            "formats gptq or gptq_v2 it could be served"
        )
    return partial(gptq_weight, offset=0 if form == "gptq_v2" else 1, size=said.get("group_size"))


def _awq(said: Mapping[str, Any]) -> Unpack:
    form, bits = str(said.get("version") or said.get("format") or "gemm").lower(), said.get("bits")
    if bits != 4 or form != "gemm" or not said.get("zero_point", True):
        raise CheckpointError(
            f"the checkpoint was quantised by awq with {bits} bits in the format {form}; with 4 bits and "
            "zero points in the format gemm it could be served"
        )
    return partial(awq_weight, size=said.get("group_size"))


def gptq_weight(stored: Mapping[str, torch.Tensor], offset: int, size: int | None = None) -> torch.Tensor:
    """A weight W [O, I] of 4-bit integers, float32.

    Args:
        stored: ``qweight`` int32 [I / 8, O], eight rows in a word; ``qzeros`` int32 [G, O / 8], eight
            columns; ``scales`` [G, O]; ``g_idx`` [I], to which group a row belongs, or none: in order.
        offset: what is stored of each zero is less by this.
        size: inputs of a group, as the checkpoint says; -1: all; None: it does not say.

    Raises:
        CheckpointError: they have other shapes.
    """
    _check_int4(stored, 8, 1, size)
    numbers = _rows(stored["qweight"])
    zeros = _columns(stored["qzeros"] + offset * 0x11111111)  # of all eight, as one number
    groups = stored.get("g_idx")
    if groups is None:
        groups = torch.arange(len(numbers), device=numbers.device) // (len(numbers) // len(zeros))
    groups = groups.long()
    return ((numbers - zeros[groups]) * stored["scales"].float()[groups]).T


def awq_weight(stored: Mapping[str, torch.Tensor], size: int | None = None) -> torch.Tensor:
    """A weight W [O, I] of 4-bit integers, float32.

    Args:
        stored: ``qweight`` int32 [I, O / 8] and ``qzeros`` int32 [G, O / 8], eight columns in a word, in an
            order of their own; ``scales`` [G, O].
        size: see ``gptq_weight``.

    Raises:
        CheckpointError: they have other shapes.
    """
    _check_int4(stored, 1, 8, size)
    numbers, zeros = (_in_order(_columns(stored[name])) for name in ("qweight", "qzeros"))
    each = len(numbers) // len(zeros)
    scales = stored["scales"].float().repeat_interleave(each, 0)
    return ((numbers - zeros.repeat_interleave(each, 0)) * scales).T


def _check_int4(stored: Mapping[str, torch.Tensor], rows: int, columns: int, size: int | None) -> None:
    """Refuse tensors that do not fit, which could be broadcast; a word has so many rows or columns."""
    shapes = {
        name: tuple(stored[name].shape) for name in ("qweight", "qzeros", "scales", "g_idx") if name in stored
    }
    if all(len(shape) == 2 for name, shape in shapes.items() if name != "g_idx"):
        inputs, outputs = shapes["qweight"][0] * rows, shapes["qweight"][1] * columns
        groups = shapes["scales"][0]
        expected = {"qzeros": (groups, outputs // 8), "scales": (groups, outputs), "g_idx": (inputs,)}
        known = size is None or groups == (1 if size == -1 else -(-inputs // max(1, size)))
        even = "g_idx" in shapes or (groups and inputs % groups == 0)
        if known and even and all(shape == expected.get(name, shape) for name, shape in shapes.items()):
            return
    raise CheckpointError(f"4-bit tensors of shapes {shapes} with groups of {size} inputs make no weight")


def _rows(packed: torch.Tensor) -> torch.Tensor:
    """Numbers 0 to 15, int32 [8 N, M], of words [N, M]."""
    return ((packed[:, None] >> _BITS.to(packed.device).view(1, 8, 1)) & 15).flatten(0, 1)


def _columns(packed: torch.Tensor) -> torch.Tensor:
    """Numbers 0 to 15, int32 [N, 8 M], of words [N, M]."""
    return _rows(packed.T).T


def _in_order(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.reshape(len(numbers), -1, 8)[:, :, _AWQ_ORDER.argsort()].flatten(1)


class _BlocksDequantize(Fp8Dequantize):
    """transformers' own step, which wants blocks that are whole: the last ones of a weight may be smaller.

    It takes numbers that have no scales for the weight itself, which would be another model.
    """

    def convert(self, input_dict: dict[str, Any], *args: Any, **where: Any) -> Any:
        """See Fp8Dequantize."""
        for name, each in input_dict.items():
            dtype = (each[0] if isinstance(each, list) else each).dtype
            scaled = f"{name}_scale_inv" in input_dict or name.endswith("_scale_inv")
            if dtype.itemsize == 1 and not scaled and not name.endswith("activation_scale"):
                what = where.get("full_layer_name") or name
                raise CheckpointError(
                    f"the checkpoint holds {what} as {dtype} without its scales; serve a complete one"
                )
        return super().convert(input_dict, *args, **where)

    def _dequantize_one(
        self, quantized: torch.Tensor, scales: torch.Tensor, output_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        block = self.hf_quantizer.quantization_config.weight_block_size
        if quantized.dtype != torch.float8_e4m3fn or scales.dim() < 2 or not block:
            return super()._dequantize_one(quantized, scales, output_dtype)
        rows, columns = quantized.shape[-2:]
        more = (scales.shape[-2] * block[0] - rows, scales.shape[-1] * block[1] - columns)
        if not (0 <= more[0] < block[0] and 0 <= more[1] < block[1]):
            raise CheckpointError(
                f"scales {list(scales.shape)} are not of blocks {list(block)} of a weight {[rows, columns]}"
            )
        whole = nn.functional.pad(quantized.float(), (0, more[1], 0, more[0]))
        return super()._dequantize_one(whole, scales, output_dtype)[..., :rows, :columns]


class _Dequantize(ConversionOps):
    """A step of transformers' conversions: what is stored of each layer becomes its weight."""

    def __init__(self, quantizer: _Int4) -> None:
        self._unpack = quantizer.unpack

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **where: Any
    ) -> dict[str, Any]:
        """Of one layer, under the names of its tensors, or of experts, lists under patterns of names."""
        if "weight" in input_dict or "qweight" in input_dict:
            one = {name: each[0] if isinstance(each, list) else each for name, each in input_dict.items()}
            name = where["full_layer_name"]
            if "weight" in one:
                return {name: one["weight"]}
            weight, layer = self._unpack(one), where["model"].get_submodule(name.rpartition(".")[0])
            return {name: weight.T if isinstance(layer, Conv1D) else weight}
        weights = {name: each for name, each in input_dict.items() if name.endswith(".weight")}
        for name in (each for each in input_dict if each.endswith(".qweight")):
            stem = name.removesuffix("qweight")
            parts = [each.removeprefix(stem) for each in input_dict if each.startswith(stem)]
            layers = zip(*(input_dict[stem + part] for part in parts), strict=True)
            weights[f"{stem}weight"] = [self._unpack(dict(zip(parts, each, strict=True))) for each in layers]
        return weights


class _Dequantised(QuantizationConfigMixin):
    dequantize = True


class _Int4(HfQuantizer):
    """transformers' rules for layers whose weights are four tensors each.

    Its base class finds where experts are merged, and has them unpacked before.
    """

    is_trainable = False
    serialized_names = {"weight": ["weight", "qweight", "qzeros", "scales", "g_idx"]}  # noqa: RUF012 - its form

    def __init__(self, unpack: Unpack) -> None:
        super().__init__(_Dequantised(quant_method="int4"), pre_quantized=True)  # type: ignore[arg-type]
        self.unpack = unpack

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        """The step."""
        return {"dequantize": _Dequantize}

    def is_serializable(self) -> bool:
        """It only reads."""
        return False
