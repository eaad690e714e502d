"""The frozen weight of one group and its two products, in one numerics.

How weights are kept and multiplied is decided here; whoever calls only moves rows. Add another by
implementing GroupWeight and entering what makes it in ``provider.executor.loading.NUMERICS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

import torch

from provider.executor.stripes import OutputStripe
from provider.executor.tiles import TILE, tile_of
from shared.compat import onednn_products
from shared.ring.product import PlaneProducts
from shared.wire.header import Direction, member_indices

_READ_AHEAD_STEP = 1 << 16  # elements: about 20 microseconds of memory bandwidth


class GroupWeight(Protocol):
    """Products of one group. Members are a bit mask; all tensors lie on the weight's device."""

    def apply(
        self,
        direction: int,
        member_bits: int,
        tensors: list[torch.Tensor],
        into: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Multiply rows, of one request or many.

        Args:
            direction: a ``Direction``.
            member_bits: which members take part.
            tensors: of one dtype: [T, D] forward, backward one [T, O_m] for each member; on the ring
                always one.
            into: where the answer goes, if it is one tensor and this can write it there; rows may be further
                apart than they are long.

        Returns:
            Tensors of that dtype, the other way round: ``into`` itself, or fresh contiguous ones.
        """
        ...

    def striped(self, stripe: OutputStripe) -> Self:
        """A copy with a share of each member's outputs alone."""
        ...

    def read_ahead(self, stop: Callable[[], bool]) -> None:
        """Bring the weight nearer to the processor, in small steps, until done or ``stop()``."""
        ...


class FloatWeight:
    """Float weights in float32 or bfloat16.

    No bias, in either direction: what the paper calls the noise effect (Symbiosis §3.8) is this
    same product applied to a mask.

    On the CPU, products are oneDNN's: torch would take those of float32 from MKL, which takes up to twice as
    long on processors that are not Intel's (``docs/explanation/performance.md``).

    Args:
        weight: W of all members one above the other, [O, D].
        widths: O of each member.
    """

    def __init__(self, weight: torch.Tensor, widths: list[int]) -> None:
        self._weight, self._widths = weight, widths
        self._parts = weight.split(widths)
        self._all = (1 << len(widths)) - 1
        single = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._onednn = onednn_products() if single else None

    def apply(
        self,
        direction: int,
        member_bits: int,
        tensors: list[torch.Tensor],
        into: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """See GroupWeight. Rows in another dtype are rounded to the weight's, and answers back."""
        dtype, served = tensors[0].dtype, self._weight.dtype
        if dtype != served:
            rounded = self.apply(direction, member_bits, [tensor.to(served) for tensor in tensors])
            return [tensor.to(dtype) for tensor in rounded]
        rows = len(tensors[0])
        mm: Callable[..., torch.Tensor] = torch.mm
        addmm: Callable[..., torch.Tensor] = torch.addmm
        if self._onednn and rows:
            tensors = [_whole_tiles(tensor) for tensor in tensors]
            mm, addmm = self._onednn
        if direction == Direction.BACKWARD:
            first, *others = (self._parts[i] for i in member_indices(member_bits))
            gx = mm(tensors[0], first)
            for weight, tensor in zip(others, tensors[1:], strict=True):
                gx = addmm(gx, tensor, weight)
            return [gx[:rows]]
        if rows == 1 and member_bits == self._all:  # the tensors are the row: one product
            return list(mm(tensors[0], self._weight.T).split(self._widths, 1))
        return [mm(tensors[0], self._parts[i].T)[:rows] for i in member_indices(member_bits)]

    def striped(self, stripe: OutputStripe) -> FloatWeight:
        """See GroupWeight."""
        parts = [part[stripe.of(len(part))] for part in self._parts]
        return FloatWeight(torch.cat(parts), [len(part) for part in parts])

    def read_ahead(self, stop: Callable[[], bool]) -> None:
        """See GroupWeight."""
        _touch(self._weight, stop)


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
    """Integer weights: the same planes for both directions, products modulo 2^32 (``shared.ring``).

    Args:
        planes: int16 [1, O, D] or int8 [2, O, D], O of all members one above the other in each plane.
        widths: O of each member.
    """

    def __init__(self, planes: torch.Tensor, widths: list[int]) -> None:
        self._planes, self._widths = planes, widths
        self._products = PlaneProducts(planes, widths)

    def apply(
        self,
        direction: int,
        member_bits: int,
        tensors: list[torch.Tensor],
        into: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """See GroupWeight: int32 [T, columns], the answers of the planes side by side."""
        (rows,) = tensors
        width = self._planes.shape[2]
        if direction == Direction.FORWARD:
            width = sum(self._widths[i] for i in member_indices(member_bits))
        out = rows.new_empty((len(rows), len(self._planes) * width)) if into is None else into
        self._products.matmul(direction, member_bits, rows, out)
        return [out]

    def striped(self, stripe: OutputStripe) -> RingWeight:
        """See GroupWeight."""
        parts = [part[:, stripe.of(part.shape[1])] for part in self._planes.split(self._widths, 1)]
        return RingWeight(torch.cat(parts, 1), [part.shape[1] for part in parts])

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
