"""LoRA for rows of several adapters at once: each row times the matrices of its own adapter.

What Punica (arXiv:2310.18547) §4 calls segmented gather matrix-vector multiplication, for segments of any
length and with gradients: torch's product of batches where segments are as long as each other, or nearly, and
else that of groups, which torch itself has for mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from shared.compat import GROUPED_BYTES, grouped_product

PADDING = 4  # rows, for each that counts, up to which a batched product is faster than a grouped one
Pair = tuple[Tensor, Tensor]  # A [adapters, 1, R, D] and B [adapters, 1, O, R]


def segmented_lora(
    x: Tensor,
    counts: Sequence[int],
    downs: Sequence[Tensor | None],
    ups: Sequence[Tensor | None],
    scales: Sequence[float],
) -> Tensor:
    """``s_g x_g A_g^T B_g^T`` for the rows x_g of each segment g.

    Segments do not see each other: a row of the result and the gradients of A_g and B_g are made of rows of
    segment g alone.

    Args:
        x: [T, D], the segments one after the other.
        counts: rows of each segment, T in sum; 0 is possible.
        downs: A_g [R_g, D] of x's dtype, ranks may differ; None: the rows of this segment have no adapter,
            and their result is 0.
        ups: B_g [O, R_g], None where ``downs`` has it; at least one is there.
        scales: s_g.

    Returns:
        [T, O], x's dtype.
    """
    unit = GROUPED_BYTES // x.element_size()
    pairs = [(down, up) for down, up in zip(downs, ups, strict=True) if down is not None and up is not None]
    width, outputs = x.shape[1], pairs[0][1].shape[0]
    # The ranks of all become that of the highest, by zeros that nothing comes out of. All at once: a step has
    # thousands of these matrices, and each operation on one would take longer than its values.
    ranks = tuple(0 if down is None else down.shape[0] for down in downs)
    rank = -(-max(ranks) // unit) * unit
    places = _places(ranks, rank, x.device)
    down = torch.cat([*(down for down, _ in pairs), x.new_zeros(1, width)]).index_select(0, places)
    up = torch.cat([*(up for _, up in pairs), x.new_zeros(outputs, 1)], 1).index_select(1, places)
    up = up * up.new_tensor(scales).repeat_interleave(rank)
    a, b = down.unflatten(0, (-1, rank)).transpose(1, 2), up.unflatten(1, (-1, rank)).permute(1, 2, 0)
    if len(set(counts)) == 1:
        return torch.bmm(torch.bmm(x.reshape(len(counts), counts[0], width), a), b).flatten(0, 1)
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=x.device)
    return grouped_product(grouped_product(x.contiguous(), a, ends), b, ends)


@lru_cache(maxsize=256)
def _places(ranks: tuple[int, ...], rank: int, device: torch.device) -> Tensor:
    """Where, among the rows of matrices of these ranks and a row of zeros, those of rank ``rank`` are."""
    ends, zeros = accumulate(ranks), sum(ranks)
    rows = [[*range(end - own, end), *[zeros] * (rank - own)] for own, end in zip(ranks, ends, strict=True)]
    with torch.inference_mode(False):  # it will be used again where there are gradients
        return torch.tensor(rows, device=device).flatten()


class Segments:
    """The rows of a step, by adapter.

    Args:
        adapters: int64 [T], each row's place among the adapters in memory; -1: it has none.
        count: of these places.

    Attributes:
        any: whether a row has an adapter.
        rows: which ``products`` are of, in their order; None: all, as they are.
    """

    def __init__(self, adapters: Tensor, count: int) -> None:
        adapted = (adapters >= 0).nonzero().squeeze(1)
        self.any = len(adapted) > 0
        if not self.any:
            return
        of_rows = adapters[adapted]
        counts = of_rows.bincount(minlength=count)
        ends, self._largest = counts.cumsum(0), int(counts.max())
        self._only = int(of_rows[0]) if self._largest == len(adapted) else None
        self._padded = count * self._largest <= PADDING * len(adapted)
        self.rows: Tensor | None = None if len(adapted) == len(adapters) else adapted
        order = of_rows.argsort(stable=True)
        if self._padded:
            # Where each row is if all adapters have as many, and which row is where; any, where none is.
            sorted_places = torch.arange(len(adapted)) - (ends - counts)[of_rows[order]]
            self._places = torch.empty_like(adapted)
            self._places[order] = sorted_places + of_rows[order] * self._largest
            self._sources = torch.zeros(count * self._largest, dtype=torch.int64)
            self._sources[self._places] = adapted
        elif self._only is None:
            self.rows, self._ends = adapted[order], ends.to(torch.int32)

    def products(self, x: Tensor, pairs: list[Pair]) -> list[Tensor]:
        """``x_i A^T B^T`` of each row's adapter, [len(rows), O] for each pair."""
        rows = x if self.rows is None else x[self.rows]
        if self._only is not None:
            return [rows @ a[self._only, 0].T @ b[self._only, 0].T for a, b in pairs]
        if self._padded:
            rows = x[self._sources].view(-1, self._largest, x.shape[-1])
            return [
                torch.bmm(torch.bmm(rows, _transposed(a)), _transposed(b)).flatten(0, 1)[self._places]
                for a, b in pairs
            ]
        return [
            grouped_product(grouped_product(rows, _transposed(a), self._ends), _transposed(b), self._ends)
            for a, b in pairs
        ]


def _transposed(stacked: Tensor) -> Tensor:
    return stacked.squeeze(1).transpose(1, 2)
