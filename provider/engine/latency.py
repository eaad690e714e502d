"""How long a product will take: a line for each shape and direction, corrected by every product.

The function f of FlexLLM §6.2, from which limits on fine-tuning rows follow. A product of few rows
takes as long as its weight takes to arrive from memory; every further row adds its multiplications.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.latency import LinearLatency
from shared.wire.header import member_indices
from shared.wire.protocol import GroupShape

# Guesses for a shape that was never measured, of an ordinary processor.
GUESSED_BYTES_PER_SECOND = 1e10
GUESSED_PRODUCTS_PER_SECOND = 2.5e10


class LatencyModel:
    """Forecasts the seconds of products by group, direction, members and rows.

    Groups of equal shape share a line.

    Args:
        shapes: the shapes of all groups, in the manifest's order.
    """

    def __init__(self, shapes: Sequence[GroupShape]) -> None:
        self.shapes = list(shapes)
        self._lines: dict[tuple[GroupShape, int], LinearLatency] = {}

    def line(self, group: int, direction: int) -> LinearLatency:
        """Returns the line of a group and direction."""
        shape = self.shapes[group]
        if (shape, direction) not in self._lines:
            self._lines[shape, direction] = LinearLatency(
                4 * shape.size / GUESSED_BYTES_PER_SECOND, shape.size / GUESSED_PRODUCTS_PER_SECOND
            )
        return self._lines[shape, direction]

    def set(self, group: int, direction: int, line: LinearLatency) -> None:
        """Set the forecast of a group's shape and direction."""
        self._lines[self.shapes[group], direction] = line

    def share(self, group: int, member_bits: int) -> float:
        """Returns these members' share of their group's weight."""
        outputs = self.shapes[group].outputs
        if member_bits == (1 << len(outputs)) - 1:
            return 1.0
        return sum(outputs[i] for i in member_indices(member_bits)) / sum(outputs)

    def seconds(self, group: int, direction: int, member_bits: int, rows: int) -> float:
        """Returns the forecast for one product."""
        return self.line(group, direction).seconds(rows) * self.share(group, member_bits)

    def rows(self, group: int, direction: int, member_bits: int, seconds: float) -> int:
        """Returns how many rows can be multiplied within some seconds; may be 0 or less."""
        return self.line(group, direction).rows(seconds / self.share(group, member_bits))

    def observe(self, group: int, direction: int, member_bits: int, rows: int, seconds: float) -> None:
        """Correct the forecast by a product that took some seconds."""
        self.line(group, direction).observe(rows, seconds / self.share(group, member_bits))
