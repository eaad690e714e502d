"""The key of interchangeable masks and effects. No I/O, no clock."""

from __future__ import annotations

from typing import NamedTuple

from shared.wire.header import EXACT, Direction


class ProductKey(NamedTuple):
    """Requests whose masks and effects are interchangeable, row by row."""

    group: int
    direction: Direction
    member_bits: int
    answer_bits: int = EXACT  # of answers and effects

    @property
    def product(self) -> tuple[int, Direction, int]:
        """Group, direction and members."""
        return self[:3]

    @property
    def exact(self) -> ProductKey:
        """The same product with all bits."""
        return self._replace(answer_bits=EXACT)
