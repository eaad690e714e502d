"""The product of many adapters at once on a CPU (Punica §4, SGMV): each adapter's rows lie together.

vLLM's own for the CPU copies an adapter's weights for every row, and takes rows without an adapter for rows
of the last one. This one is made while the executor's answer is in flight.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from tenant_sdk.gateway.linear import RemoteLinearMethod, non_finite_rows
from tenant_sdk.tuning.segmented_lora import Segments


class _Made(NamedTuple):
    """Products that were made before they are asked for."""

    x: torch.Tensor
    products: list[torch.Tensor]


class SegmentedLora(PunicaWrapperCPU):  # type: ignore[misc]
    """See vLLM's ``PunicaWrapperBase``; adapters on embeddings and head are refused before they come here."""

    _segments = Segments(torch.empty(0, dtype=torch.int64), 0)
    _made: _Made | None = None

    def update_metadata(self, mapping: Any, lora_index_to_id: list[int | None], *more: Any) -> None:
        """Sort the rows of the next step by adapter."""
        super().update_metadata(mapping, lora_index_to_id, *more)
        self._segments, self._made = Segments(self.token_lora_indices, len(lora_index_to_id)), None

    def make(self, layer: BaseLayerWithLoRA, x: torch.Tensor) -> None:
        """Make now what the next ``add_lora_linear`` adds, which is for the same rows."""
        if self._segments.any:
            pairs = list(zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True))
            self._made = _Made(x, self._segments.products(x, pairs))

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """Add ``scale * x_i A^T B^T`` of each row's adapter to the rows of ``y``; see ``NonFiniteRows``.

        Args:
            y: [T, sum of slices], changed in place.
            x: [T, D].
            lora_a_stacked, lora_b_stacked: of each slice [adapters, 1, R, D] and [adapters, 1, O, R].
        """
        segments, made, self._made = self._segments, self._made, None
        if not segments.any:
            return
        if made is not None and made.x is x:
            products = made.products
        else:
            pairs = list(zip(lora_a_stacked, lora_b_stacked, strict=True))
            products = segments.products(x.view(-1, x.shape[-1]), pairs)
        out, start = y.view(-1, y.shape[-1]), 0
        for product, width in zip(products, output_slices, strict=True):
            into = out[:, start : start + width]
            if segments.rows is None:
                into.add_(product, alpha=scale)
            else:
                into.index_add_(0, segments.rows, product, alpha=scale)
            start += width
        if (kept := non_finite_rows.without(out)) is not out:
            out.copy_(kept)

    def add_lora_embedding(self, *_: Any, **__: Any) -> None:
        """Nothing: no adapter here changes embeddings."""

    def add_lora_logits(self, *_: Any, **__: Any) -> None:
        """Nothing: no adapter here changes the head."""


def multiply_meanwhile(model: nn.Module) -> None:
    """Have adapters' products made while the executor's are in flight."""
    for layer in model.modules():
        if isinstance(layer, BaseLayerWithLoRA):
            method = getattr(getattr(layer, "base_layer", None), "quant_method", None)
            if isinstance(method, RemoteLinearMethod):
                method.meanwhile = partial(_make, layer)


def _make(layer: BaseLayerWithLoRA, x: torch.Tensor) -> None:
    if x.ndim == 2:
        layer.punica_wrapper.make(layer, x)
