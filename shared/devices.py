"""Rows between processor and accelerator: through pinned memory where that can be, waiting once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


def to_device(
    tensors: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Copies of tensors that are on the CPU, of their own dtype or another.

    On a GPU they are there once what is queued behind them on its current stream runs.
    """
    cuda = device.type == "cuda"
    staged = [tensor.pin_memory() for tensor in tensors] if cuda else tensors
    return [tensor.to(device, dtype or tensor.dtype, non_blocking=cuda) for tensor in staged]


def to_host(tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Copies on the CPU of tensors that are on one device, when all that they are computed from is done."""
    if tensors[0].device.type != "cuda":
        return [tensor.to("cpu", dtype or tensor.dtype, copy=True) for tensor in tensors]
    sources = [tensor.to(dtype or tensor.dtype) for tensor in tensors]
    out = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in sources]
    for each, tensor in zip(out, sources, strict=True):
        each.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return out


def pin(memory: np.ndarray[Any, np.dtype[np.uint8]], device: torch.device) -> None:
    """Have a GPU copy from and to this memory directly, for as long as it is there; for the CPU, nothing.

    Args:
        memory: of which all that is copied is a view.
        device: that copies.
    """
    if device.type != "cuda" or not memory.size:
        return
    at = memory.ctypes.data
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(at, memory.size, 0)) == 0:  # else it is copied in two steps
            weakref.finalize(memory, runtime.cudaHostUnregister, at)


class Pipeline:
    """One GPU: copies to it, products and copies from it, each in order on a stream of its own.

    So rows of the next batch travel while the last is multiplied, and nothing waits but who reads answers.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._upload, self._products, self._back = (torch.cuda.Stream(device) for _ in range(3))

    def begin(
        self,
        tensors: Sequence[torch.Tensor],
        product: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
        places: Sequence[torch.Tensor],
    ) -> Callable[[], None]:
        """Queue a product of tensors of the CPU, the answers to go to places there.

        Args:
            tensors: unchanged until the answers are there.
            product: of the same tensors on the device; queues, and does not wait.
            places: for each tensor of the answer.

        Returns:
            Waits until the answers are there.
        """
        with torch.cuda.stream(self._upload):
            on_device = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
        self._products.wait_stream(self._upload)
        with torch.cuda.stream(self._products):
            answers = product(on_device)
        self._back.wait_stream(self._products)
        with torch.cuda.stream(self._back):
            for place, answer in zip(places, answers, strict=True):
                place.copy_(answer, non_blocking=True)
            done: torch.cuda.Event = self._back.record_event()
        for tensor in on_device:
            tensor.record_stream(self._products)
        for answer in answers:
            answer.record_stream(self._back)
        return lambda: done.synchronize()
