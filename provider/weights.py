"""The frozen weight of one group and its two products, in one numerics.

A numerics decides how weights are kept and multiplied; everything else in the executor only moves
bytes. Add one by subclassing GroupWeight and entering it in NUMERICS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from shared.checkpoint import Checkpoint
from shared.header import Direction, member_indices
from shared.messages import GroupInfo


class GroupWeight(Protocol):
    """Products of one group. A block is a contiguous [T, columns] tensor; members are a bit mask."""

    def product(self, direction: Direction, members: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply one request and write its answer.

        Args:
            direction: forward or backward.
            members: which members take part.
            rows: flat, the request's payload: x [T, D] forward; backward the output gradients of
                the members, [T, O_m] one behind the other.
            out: flat, the answer's payload: the outputs [T, O_m] of the members one behind the
                other, or the input gradient [T, D] backward. Same dtype as ``rows``.
        """
        ...


class FloatWeight:
    """Float weights in float32 or bfloat16, W of all members one above the other: [O, D].

    No bias, in either direction: what the paper calls the noise effect (Symbiosis §3.8) is this
    same product applied to a mask.
    """

    def __init__(self, checkpoint: Checkpoint, info: GroupInfo, dtype: torch.dtype) -> None:
        self._widths = [m.outputs for m in info.members]
        self._inputs = info.inputs
        self._all = (1 << len(self._widths)) - 1
        self._weight = torch.empty((sum(self._widths), info.inputs), dtype=dtype)
        self._parts = list(self._weight.split(self._widths))
        for part, member in zip(self._parts, info.members, strict=True):
            part.copy_(checkpoint.member_weight(member))

    def product(self, direction: Direction, members: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See GroupWeight. Float requests in another dtype are rounded to the weight's and back."""
        given = out
        if rows.dtype != self._weight.dtype:
            rows = rows.to(self._weight.dtype)
            out = torch.empty(out.shape, dtype=self._weight.dtype)
        indices = member_indices(members)
        widths = [self._widths[i] for i in indices]
        if direction == Direction.FORWARD:
            x = rows.view(-1, self._inputs)
            if len(x) == 1 and members == self._all:  # one row: the blocks are the row, one product
                torch.mm(x, self._weight.T, out=out.view(1, -1))
            else:
                for i, block in zip(indices, _blocks(out, widths), strict=True):
                    torch.mm(x, self._parts[i].T, out=block)
        else:
            gx = out.view(-1, self._inputs)
            for at, (i, block) in enumerate(zip(indices, _blocks(rows, widths), strict=True)):
                if at == 0:
                    torch.mm(block, self._parts[i], out=gx)
                else:
                    gx.addmm_(block, self._parts[i])
        if given is not out:
            given.copy_(out)


def _blocks(flat: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:
    """Views [T, width] of blocks that lie one behind the other."""
    rows = flat.numel() // sum(widths)
    parts = flat.split([rows * width for width in widths])
    return [part.view(rows, width) for part, width in zip(parts, widths, strict=True)]


NUMERICS: dict[str, Callable[[Checkpoint, GroupInfo], GroupWeight]] = {
    "float32": lambda checkpoint, info: FloatWeight(checkpoint, info, torch.float32),
    "bfloat16": lambda checkpoint, info: FloatWeight(checkpoint, info, torch.bfloat16),
}
WIRE_DTYPES = ("float32", "bfloat16")
