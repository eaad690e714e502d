"""A weight's outputs shared among several executors, and the part of each.

With stripes, forward each computes its columns of the answer. Backward each multiplies its columns of the
rows, and the answers add up, on the ring modulo 2^32 to the same bits for any number of them.

With shards that are gathered, each has the whole weight for the time of a product, and multiplies its part of
the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

_ROUND = 32  # outputs that kernels like to multiply together


class OutputStripe(msgspec.Struct, frozen=True):
    """The ``index``-th of ``count`` shares of each layer's outputs."""

    index: int
    count: int

    def of(self, width: int) -> slice:
        """Its part of a layer's outputs: as many as the others', but for what rounding leaves to the last."""
        step = width // self.count
        step -= step % _ROUND if step >= _ROUND else 0
        start = step * self.index
        return slice(start, width if self.index == self.count - 1 else start + step)

    def columns(self, widths: Sequence[int], times: int = 1) -> list[slice]:
        """Its columns of rows in which layers of these widths lie side by side, and that so many times."""
        slices, at = [], 0
        for width in tuple(widths) * times:
            part = self.of(width)
            slices.append(slice(at + part.start, at + part.stop))
            at += width
        return slices


class Gathering(msgspec.Struct, frozen=True):
    """The ``index``-th of ``count`` processes that hold a shard of each weight, as PyTorch's FSDP does.

    Attributes:
        store: a file through which they find each other; each time they are started another one.
    """

    index: int
    count: int
    store: str

    def shard(self, outputs: int) -> slice:
        """Its part of a weight's outputs: FSDP's, the last ones may have fewer or none."""
        step = -(-outputs // self.count)
        start = min(self.index * step, outputs)
        return slice(start, min(start + step, outputs))

    def rows(self, total: int) -> slice:
        """Its rows of a batch: as many as the others, but for one."""
        return slice(total * self.index // self.count, total * (self.index + 1) // self.count)


ALONE = Gathering(0, 1, "")  # with whom nothing is gathered: all rows are its own
