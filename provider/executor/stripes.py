"""A weight's outputs shared among several executors: who has which.

Forward each computes its columns of the answer. Backward each multiplies its columns of the rows, and the
answers add up, on the ring modulo 2^32 to the same bits for any number of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

_ROUND = 32  # outputs that kernels like to multiply together


class Stripe(msgspec.Struct, frozen=True):
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
        found, at = [], 0
        for width in tuple(widths) * times:
            part = self.of(width)
            found.append(slice(at + part.start, at + part.stop))
            at += width
        return found
