"""The frozen weight of one group and its two products, in one numerics.

A numerics decides how weights are kept and multiplied; everything else in the executor only moves
bytes. Add one by implementing GroupWeight and entering it in NUMERICS.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch

from provider.executor.tiles import TILE, tile_of
from shared.checkpoint import Checkpoint
from shared.ring.fixed_point import bounds
from shared.ring.product import PlaneProducts, group_planes
from shared.wire.header import PLANES, Direction, member_indices
from shared.wire.messages import GroupInfo
from shared.wire.protocol import RING

_READ_AHEAD_STEP = 1 << 16  # elements: about 20 microseconds of memory bandwidth


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

    On the CPU, products are oneDNN's: torch would take those of float32 from MKL, which takes up to twice as
    long on processors that are not Intel's (``docs/performance.md``).
    """

    def __init__(
        self, checkpoint: Checkpoint, info: GroupInfo, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._widths = [m.outputs for m in info.members]
        self._all = (1 << len(self._widths)) - 1
        self._onednn = device.type == "cpu" and dtype == torch.float32 and _has_onednn()
        self._weight = torch.empty((sum(self._widths), info.inputs), dtype=dtype, device=device)
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
        multiply: Callable[..., torch.Tensor] = torch.mm
        multiply_add: Callable[..., torch.Tensor] = torch.addmm
        if self._onednn and rows:
            blocks = [_whole_tiles(block) for block in blocks]
            multiply, multiply_add = _onednn_multiply, _onednn_multiply_add
        if direction == Direction.BACKWARD:
            first, *others = (self._parts[i] for i in member_indices(members))
            gx = multiply(blocks[0], first)
            for weight, block in zip(others, blocks[1:], strict=True):
                gx = multiply_add(gx, block, weight)
            return [gx[:rows]]
        if rows == 1 and members == self._all:  # the blocks are the row: one product
            return list(multiply(blocks[0], self._weight.T).split(self._widths, 1))
        return [multiply(blocks[0], self._parts[i].T)[:rows] for i in member_indices(members)]

    def read_ahead(self, stop: Callable[[], bool]) -> None:
        """See GroupWeight."""
        _touch(self._weight, stop)


# What torch's compiler calls for a linear layer; it has no public name.


def _has_onednn() -> bool:
    """Whether there is oneDNN, and MKL that torch would use instead of it."""
    backends = torch.backends
    there = backends.mkl.is_available() and backends.mkldnn.is_available()
    return there and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _onednn_multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    torch.get_num_threads()  # sets what was chosen for this thread too, which oneDNN would not ask for
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight.T, None, "none", [], "")
    return out


def _onednn_multiply_add(total: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, total, weight.T, None, "add")
    return out


def _whole_tiles(rows: torch.Tensor) -> torch.Tensor:
    """The same with rows of zeros below, so that few numbers of rows occur.

    oneDNN compiles code for every shape that it meets, in a millisecond, and keeps half a megabyte of it;
    for how many, ``provider.cli`` sets.
    """
    count = len(rows)
    if count <= 8:
        whole = 1 << (count - 1).bit_length()
    else:
        tile = TILE // 2 if count <= 4 * TILE else tile_of(count)
        whole = -(-count // tile) * tile
    return rows if count == whole else torch.nn.functional.pad(rows, (0, 0, 0, whole - count))


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
