"""What the tests of parity share: inputs, losses, gradients, adapters, and how far two results are apart."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from conftest import relative_error
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tenant_sdk.model.remote_weight import RemoteWeight
from tenant_sdk.model.virtual import VirtConv1D, VirtLinear

VOCABULARY = 128  # of the tiny models


def token_ids(rows: int = 2, columns: int = 9, seed: int = 0) -> torch.Tensor:
    """[rows, columns] token ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, columns), generator=generator)


def load_local(folder: Path, **options: Any) -> PreTrainedModel:
    """The checkpoint's own class around its weights, computed here."""
    (name,) = AutoConfig.from_pretrained(folder).architectures
    return getattr(transformers, name).from_pretrained(folder, **options).eval()


def result(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits, or the last hidden states of a model without a head."""
    return model(input_ids=ids)[0]


def fixed_result(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The same without a graph."""
    with torch.no_grad():
        return result(model, ids)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """A scalar that depends on every position of the result."""
    out = result(model, ids).float()
    weights = torch.linspace(-1.0, 1.0, out.shape[-1], device=out.device)
    return (out.log_softmax(-1) * weights).sum(-1).mean()


def add_lora(model: nn.Module, **options: Any) -> peft.PeftModel:
    """LoRA of rank 4 on every linear layer but the head; random values, the same at every call."""
    torch.manual_seed(7)
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | options
    options["fan_in_fan_out"] = any(isinstance(module, Conv1D) for module in model.modules())
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def gradients(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient of the loss for every parameter that is trained."""
    model.zero_grad()
    loss_of(model, ids).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst_error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative L2 distance of two tensors of the same name.

    A tensor that is next to nothing beside the others is measured against a thousandth of the
    largest: a gradient of 1e-12 is rounding error on either side.
    """
    assert got.keys() == expected.keys()
    floor = 1e-3 * max(float(tensor.norm()) for tensor in expected.values())
    assert floor > 0
    return max(
        float((got[name] - tensor).norm()) / max(float(tensor.norm()), floor)
        for name, tensor in expected.items()
    )


def total_error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative L2 distance of all tensors taken as one vector."""
    assert got.keys() == expected.keys()
    names = sorted(expected)
    return relative_error(
        torch.cat([got[name].flatten() for name in names]),
        torch.cat([expected[name].flatten() for name in names]),
    )


def virtual_layers(model: nn.Module) -> dict[str, VirtLinear | VirtConv1D]:
    """The layers that an executor computes."""
    return {n: m for n, m in model.named_modules() if isinstance(m, (VirtLinear, VirtConv1D))}


def bytes_held(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors that have values here; a tied tensor counts once."""
    kept = {id(p): p for p in parameters if not isinstance(p, RemoteWeight)}
    return sum(p.numel() * p.element_size() for p in kept.values())
