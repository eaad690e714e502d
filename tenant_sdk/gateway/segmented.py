"""The product of many adapters at once on a CPU (Punica §4, SGMV): each adapter's rows lie together.

vLLM's own for the CPU copies an adapter's weights for every row, and takes rows without an adapter for rows
of the last one.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from shared.compat import GROUPED_BYTES, grouped_product, plain_grouped_product


class SegmentedLora(PunicaWrapperCPU):  # type: ignore[misc]
    """See vLLM's ``PunicaWrapperBase``; adapters on embeddings and head are refused before they come here."""

    _rows = torch.empty(0, dtype=torch.int64)  # of this step that have an adapter, by adapter
    _ends = torch.empty(0, dtype=torch.int32)  # where each adapter's rows end among these

    def update_metadata(self, mapping: Any, lora_index_to_id: list[int | None], *more: Any) -> None:
        """Sort the rows of the next step by adapter."""
        super().update_metadata(mapping, lora_index_to_id, *more)
        adapters = self.token_lora_indices  # -1: none
        none = int((adapters < 0).sum())
        self._rows = adapters.argsort(stable=True)[none:]
        self._ends = adapters[self._rows].bincount(minlength=len(lora_index_to_id)).cumsum(0).to(torch.int32)

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
        """Add ``scale * x_i A^T B^T`` of each row's adapter to the rows of ``y``.

        Args:
            y: [T, sum of slices], changed in place.
            x: [T, D].
            lora_a_stacked, lora_b_stacked: of each slice [adapters, 1, R, D] and [adapters, 1, O, R].
        """
        if not len(self._rows):
            return
        rows, start = x.view(-1, x.shape[-1])[self._rows], 0
        out, unit = y.view(-1, y.shape[-1]), GROUPED_BYTES // x.element_size()
        multiply = grouped_product(x.device, x.dtype)
        if any(width % unit for width in (*output_slices, x.shape[-1], lora_a_stacked[0].shape[-2])):
            multiply = plain_grouped_product
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            low = multiply(rows, a.squeeze(1).transpose(1, 2), self._ends)
            added = multiply(low, b.squeeze(1).transpose(1, 2), self._ends)
            out[:, start : start + width].index_add_(0, self._rows, added, alpha=scale)
            start += width

    def add_lora_embedding(self, *_: Any, **__: Any) -> None:
        """Nothing: no adapter here changes embeddings."""

    def add_lora_logits(self, *_: Any, **__: Any) -> None:
        """Nothing: no adapter here changes the head."""
