"""Tensors of a model that are no parameters, and the memory of a model before it is loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shared.errors import CheckpointError

MAX_BUFFERS = 1 << 30  # bytes of what a model computes when it is built: rotary tables, causal masks
_MAX_WEIGHTS = 8  # for each byte of a checkpoint


def tables_of(model: nn.Module) -> list[torch.Tensor]:
    """The tensors of a model that are no parameters, once each: buffers, attributes, and what is in these."""
    tables: dict[int, torch.Tensor] = {}

    def look(value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            tables[id(value)] = value
        elif isinstance(value, dict | list | tuple) and depth < 3:
            for each in value.values() if isinstance(value, dict) else value:
                look(each, depth + 1)

    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_modules"):
                look(value, 0)
    listed = set(map(id, model.parameters()))
    return [each for key, each in tables.items() if key not in listed]


def buffer_bytes(model: nn.Module) -> int:
    """Bytes of ``tables_of``. What transformers computes them from is of the same size."""
    return sum(each.numel() * each.element_size() for each in tables_of(model))


def check_loading(model: nn.Module, size: int, called: str) -> None:
    """Refuse to load a model that is much larger than its files.

    transformers makes what a checkpoint lacks of random numbers, and tables as a configuration says, before
    it compares anything.

    Args:
        model: built on the meta device.
        size: of the checkpoint's files, in bytes.
        called: the checkpoint.

    Raises:
        CheckpointError: it has more than ``MAX_BUFFERS`` of tables, or too many weights for the files.
    """
    if (computed := buffer_bytes(model)) > MAX_BUFFERS:
        raise CheckpointError(
            f"{called} describes tables of {computed / 2**30:.1f} GiB, such as causal masks; the "
            f"limit is {MAX_BUFFERS / 2**30:.0f} GiB"
        )
    weights = sum(each.numel() for each in model.parameters())
    if weights > _MAX_WEIGHTS * size:
        raise CheckpointError(f"{called} describes a model of {weights:,} weights, and has {size:,} bytes")
