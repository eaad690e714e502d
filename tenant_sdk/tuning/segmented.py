"""LoRA for rows of several adapters at once: each row times the matrices of its own adapter.

What Punica (arXiv:2310.18547) §4 calls segmented gather matrix-vector multiplication, for segments of any
length and with gradients: torch's grouped product, which torch itself has for mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from shared.compat import GROUPED_BYTES, grouped_product, plain_grouped_product


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
    multiply, unit = grouped_product(x.device, x.dtype), GROUPED_BYTES // x.element_size()
    given = [(down, up) for down, up in zip(downs, ups, strict=True) if down is not None and up is not None]
    width, outputs = x.shape[1], given[0][1].shape[0]
    if width % unit or outputs % unit:
        multiply = plain_grouped_product
    # The ranks of all become that of the highest, by zeros that nothing comes out of. All at once: a step has
    # thousands of these matrices, and each operation on one would take longer than its values.
    ranks = tuple(0 if down is None else down.shape[0] for down in downs)
    rank = -(-max(ranks) // unit) * unit
    places = _places(ranks, rank, x.device)
    down = torch.cat([*(down for down, _ in given), x.new_zeros(1, width)]).index_select(0, places)
    up = torch.cat([*(up for _, up in given), x.new_zeros(outputs, 1)], 1).index_select(1, places)
    up = up * up.new_tensor(scales).repeat_interleave(rank)
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=x.device)
    hidden = multiply(x.contiguous(), down.unflatten(0, (-1, rank)).transpose(1, 2), ends)
    return multiply(hidden, up.unflatten(1, (-1, rank)).permute(1, 2, 0), ends)


@lru_cache(maxsize=256)
def _places(ranks: tuple[int, ...], rank: int, device: torch.device) -> Tensor:
    """Where, among the rows of matrices of these ranks and a row of zeros, those of rank ``rank`` are."""
    ends, zeros = accumulate(ranks), sum(ranks)
    rows = [[*range(end - own, end), *[zeros] * (rank - own)] for own, end in zip(ranks, ends, strict=True)]
    with torch.inference_mode(False):  # it will be used again where there are gradients
        return torch.tensor(rows, device=device).flatten()
