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

_READ_AHEAD_STEP = 1 << 16  # elements: about 20 microseconds of memory bandwidth


class GroupWeight(Protocol):
    """Products of one group. A block is a contiguous [T, columns] tensor; members are a bit mask."""

    def product(self, direction: int, members: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply one request and write its answer.

        Args:
            direction: a ``Direction``.
            members: which members take part.
            rows: flat, the request's payload: x [T, D] forward; backward the output gradients of
                the members, [T, O_m] one behind the other.
            out: flat, the answer's payload: the outputs [T, O_m] of the members one behind the
                other, or the input gradient [T, D] backward. Same dtype as ``rows``.
        """
        ...

    def read_ahead(self, stop: Callable[[], bool]) -> None:
        """Bring the weight nearer to the processor, in small steps, until done or ``stop()``."""
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
        self._weight_t = self._weight.T
        self._parts = list(self._weight.split(self._widths))
        for part, member in zip(self._parts, info.members, strict=True):
            part.copy_(checkpoint.member_weight(member))

    def product(self, direction: int, members: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See GroupWeight. Float requests in another dtype are rounded to the weight's and back."""
        given = out
        if rows.dtype != self._weight.dtype:
            rows = rows.to(self._weight.dtype)
            out = torch.empty(out.shape, dtype=self._weight.dtype)
        if direction == Direction.FORWARD:
            x = rows.view(-1, self._inputs)
            if x.shape[0] == 1 and members == self._all:  # one row: the blocks are the row, one product
                torch.mm(x, self._weight_t, out=out.view(1, -1))
            else:
                for i, block in self._blocks(out, members):
                    torch.mm(x, self._parts[i].T, out=block)
        else:
            gx = out.view(-1, self._inputs)
            for at, (i, block) in enumerate(self._blocks(rows, members)):
                if at == 0:
                    torch.mm(block, self._parts[i], out=gx)
                else:
                    gx.addmm_(block, self._parts[i])
        if given is not out:
            given.copy_(out)

    def read_ahead(self, stop: Callable[[], bool]) -> None:
        """Touch every cache line once."""
        flat = self._weight.view(-1)
        line = 64 // flat.itemsize
        for at in range(0, flat.numel(), _READ_AHEAD_STEP):
            if stop():
                return
            flat[at : at + _READ_AHEAD_STEP : line].sum()

    def _blocks(self, flat: torch.Tensor, members: int) -> list[tuple[int, torch.Tensor]]:
        """Member indices and views [T, O_m] of their blocks, which lie one behind the other."""
        indices = member_indices(members)
        widths = [self._widths[i] for i in indices]
        rows = flat.numel() // sum(widths)
        parts = flat.split([rows * width for width in widths])
        return [(i, part.view(rows, -1)) for i, part in zip(indices, parts, strict=True)]


NUMERICS: dict[str, Callable[[Checkpoint, GroupInfo], GroupWeight]] = {
    "float32": lambda checkpoint, info: FloatWeight(checkpoint, info, torch.float32),
    "bfloat16": lambda checkpoint, info: FloatWeight(checkpoint, info, torch.bfloat16),
}
WIRE_DTYPES = ("float32", "bfloat16")
