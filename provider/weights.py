"""The frozen weight of one group and its two products, in one numerics.

A numerics decides how weights are kept and multiplied; everything else in the executor only moves
bytes. Add one by implementing GroupWeight and entering it in NUMERICS.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch

from shared import ring_native
from shared.checkpoint import Checkpoint
from shared.header import Direction, member_indices
from shared.messages import GroupInfo
from shared.protocol import RING
from shared.ring import PLANES, bounds
from shared.ring_product import PlaneProducts, group_planes

_READ_AHEAD_STEP = 1 << 16  # elements: about 20 microseconds of memory bandwidth
FEW_ROWS = 16  # of a float product, see FloatWeight


class GroupWeight(Protocol):
    """Products of one group. Members are a bit mask; all tensors lie on the executor's device."""

    def product(self, direction: int, members: int, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
        """Multiply rows, of one request or many.

        Args:
            direction: a ``Direction``.
            members: which members take part.
            blocks: of one dtype: [T, D] forward, backward one [T, O_m] for each member; on the ring
                always one.

        Returns:
            Fresh contiguous blocks of that dtype, the other way round.
        """
        ...

    def read_ahead(self, stop: Callable[[], bool]) -> None:
        """Bring the weight nearer to the processor, in small steps, until done or ``stop()``."""
        ...


class FloatWeight:
    """Float weights in float32 or bfloat16, W of all members one above the other: [O, D].

    No bias, in either direction: what the paper calls the noise effect (Symbiosis §3.8) is this
    same product applied to a mask.

    Few rows go forward through native code, which reads the weight once and as fast as memory gives it;
    the libraries below torch take up to three times as long (``docs/performance.md``).
    """

    def __init__(
        self, checkpoint: Checkpoint, info: GroupInfo, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._widths = [m.outputs for m in info.members]
        self._inputs = info.inputs
        self._all = (1 << len(self._widths)) - 1
        self._weight = torch.empty((sum(self._widths), info.inputs), dtype=dtype, device=device)
        native = ring_native.LIBRARY is not None
        self._few = native and dtype == torch.float32 and device.type == "cpu"
        self._parts = list(self._weight.split(self._widths))
        for part, member in zip(self._parts, info.members, strict=True):
            part.copy_(checkpoint.member_weight(member))

    def product(self, direction: int, members: int, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
        """See GroupWeight. Rows in another dtype are rounded to the weight's, and answers back."""
        given, served = blocks[0].dtype, self._weight.dtype
        if given != served:
            return [
                block.to(given)
                for block in self.product(direction, members, [block.to(served) for block in blocks])
            ]
        rows = len(blocks[0])
        if direction == Direction.FORWARD:
            x = blocks[0]
            if 0 < rows <= FEW_ROWS and self._few:
                return self._product_of_few(x, members)
            out = [torch.mm(x, self._parts[i].T) for i in member_indices(members)]
        else:
            gx = blocks[0].new_empty((rows, self._inputs))
            for at, (i, block) in enumerate(zip(member_indices(members), blocks, strict=True)):
                if at == 0:
                    torch.mm(block, self._parts[i], out=gx)
                else:
                    gx.addmm_(block, self._parts[i])
            out = [gx]
        return out

    def _product_of_few(self, rows: torch.Tensor, members: int) -> list[torch.Tensor]:
        if len(rows) == 1 and members == self._all:  # the blocks are the row: one product
            parts, out = [self._weight], [rows.new_empty((1, len(self._weight)))]
        else:
            parts = [self._parts[i] for i in member_indices(members)]
            out = [rows.new_empty((len(rows), len(part))) for part in parts]
        rows = rows.contiguous()
        for part, answer in zip(parts, out, strict=True):
            ring_native.multiply_floats(rows, part, answer)
        return out if parts[0] is not self._weight else list(out[0].split(self._widths, 1))

    def read_ahead(self, stop: Callable[[], bool]) -> None:
        """See GroupWeight."""
        _touch(self._weight, stop)


class RingWeight:
    """Integer weights: two int8 planes for both directions, products modulo 2^32 (``shared.ring``).

    Attributes:
        scales: float32 [O] of all members, which tenants need and executors do not.
        bounds: for the manifest.
    """

    def __init__(self, checkpoint: Checkpoint, info: GroupInfo, device: torch.device) -> None:
        planes, self.scales = group_planes(checkpoint, info)
        self.bounds = bounds(planes)
        self._widths = [m.outputs for m in info.members]
        self._planes = planes.to(device)
        self._products = PlaneProducts(self._planes, self._widths)
        self._inputs = info.inputs

    def product(self, direction: int, members: int, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
        """See GroupWeight: int32 [T, columns], the answers of the planes side by side."""
        (rows,) = blocks
        width = sum(self._widths[i] for i in member_indices(members))
        width = width if direction == Direction.FORWARD else self._inputs
        out = rows.new_empty((len(rows), PLANES * width))
        self._products.product(direction, members, rows, out)
        return [out]

    def read_ahead(self, stop: Callable[[], bool]) -> None:
        """See GroupWeight."""
        _touch(self._planes, stop)


def _touch(weight: torch.Tensor, stop: Callable[[], bool]) -> None:
    """Read every cache line once."""
    flat = weight.view(-1)
    line = 64 // flat.itemsize
    for at in range(0, flat.numel(), _READ_AHEAD_STEP):
        if stop():
            return
        flat[at : at + _READ_AHEAD_STEP : line].sum()


class Numerics(NamedTuple):
    """How a group's weight is made, and the element types of its rows on the wire."""

    weight: Callable[[Checkpoint, GroupInfo, torch.device], GroupWeight]
    wire_dtypes: tuple[str, ...]


_FLOATS = ("float32", "bfloat16")
NUMERICS: dict[str, Numerics] = {
    "float32": Numerics(partial(FloatWeight, dtype=torch.float32), _FLOATS),
    "bfloat16": Numerics(partial(FloatWeight, dtype=torch.bfloat16), _FLOATS),
    RING: Numerics(RingWeight, ("int32",)),
}
