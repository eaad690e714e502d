"""The key of a product. No I/O, no clock."""

from __future__ import annotations

from typing import NamedTuple

from shared.wire.header import EXACT, Direction


class ProductKey(NamedTuple):
    """Identifies what a request asks for. Masks and effects of one key are interchangeable, row by row.

    Attributes:
        group: id in the manifest.
        direction: forward or backward.
        member_bits: bit mask of members.
        answer_bits: bits of each number of an answer on the ring, one of ``shared.wire.header.ANSWER_BITS``.
    """

    group: int
    direction: Direction
    member_bits: int
    answer_bits: int = EXACT

    @property
    def product(self) -> tuple[int, Direction, int]:
        """Group, direction and members."""
        return self[:3]

    @property
    def exact(self) -> ProductKey:
        """The same product with all bits."""
        return self._replace(answer_bits=EXACT)
