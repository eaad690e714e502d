"""Rows between processor and accelerator: through pinned memory where that can be, waiting once."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(
    blocks: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Copies of blocks that are on the CPU, of their own dtype or another.

    On a GPU they are there once what is queued behind them on its current stream runs.
    """
    cuda = device.type == "cuda"
    staged = [block.pin_memory() for block in blocks] if cuda else blocks
    return [block.to(device, dtype or block.dtype, non_blocking=cuda) for block in staged]


def to_host(blocks: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Copies on the CPU of blocks that are on one device, when all that they are computed from is done."""
    if blocks[0].device.type != "cuda":
        return [block.to("cpu", dtype or block.dtype, copy=True) for block in blocks]
    there = [block.to(dtype or block.dtype) for block in blocks]
    out = [torch.empty(block.shape, dtype=block.dtype, pin_memory=True) for block in there]
    for each, block in zip(out, there, strict=True):
        each.copy_(block, non_blocking=True)
    torch.cuda.current_stream(blocks[0].device).synchronize()
    return out
