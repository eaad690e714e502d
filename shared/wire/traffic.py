"""How many bytes a token takes on the network, from the shapes of a model's groups alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shared.wire.header import EXACT, Direction
from shared.wire.protocol import GroupShape

SPEEDS = (1, 10, 100)  # Gbit/s


class TokenBytes(NamedTuple):
    """Bytes of one token, without headers: from a tenant's machine, and to it."""

    up: float
    down: float

    def tokens_per_second(self, gigabits: float) -> float:
        """Returns the most tokens per second over a link of so many gigabits per second each way."""
        busier = max(self.up, self.down)
        return gigabits * 1e9 / 8 / busier if busier else math.inf

    def said(self) -> str:
        """Returns the bytes in words, such as ``1.2 MB up and 2.4 MB down``."""
        return f"{self.up / 1e6:,.3g} MB up and {self.down / 1e6:,.3g} MB down"


def token_bytes(
    shapes: Iterable[GroupShape],
    directions: Sequence[Direction],
    *,
    itemsize: int = 4,
    answer_bits: int = EXACT,
    sources: int = 0,
) -> TokenBytes:
    """Computes the bytes of one token that passes all these groups once in each direction.

    Args:
        shapes: the groups' shapes, in their numerics.
        directions: forward for decoding and prompts; both for training.
        itemsize: bytes of a number of the rows, and with float numerics of the answers.
        answer_bits: on the ring, of each number of an answer and of an effect.
        sources: mask sources whose effects come over the network. Their seeds, 32 bytes a request, are not
            counted.
    """
    up = down = 0.0
    for shape in shapes:
        for direction in directions:
            widths = shape.widths(direction, (1 << len(shape.outputs)) - 1)
            up += widths.request_columns * itemsize
            number = answer_bits / 8 if shape.planes else itemsize
            down += widths.answer_columns * number * (1 + sources if shape.planes else 1)
    return TokenBytes(up, down)
