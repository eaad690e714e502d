"""Which groups a tenant keeps within a budget of memory. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_UNITS = 1 << 14  # into which a budget is divided


class Candidate(NamedTuple):
    """A group that could be kept.

    Attributes:
        size: bytes of its weights.
        saving: what keeping it saves for a token, such as seconds or bytes; may be negative.
    """

    size: int
    saving: float


def choose_groups(groups: Sequence[Candidate], budget: int) -> list[int]:
    """Which groups save most within a budget: a knapsack problem, by dynamic programming.

    The result fits into the budget. It is the best one if the sizes have a common divisor of at least a
    16,384th of the budget, as those of a model usually have; else sizes are rounded up to that.

    Args:
        groups: all that may be kept.
        budget: bytes.

    Returns:
        Their places, ascending. Of equal groups the first are taken.
    """
    unit = max(math.gcd(*(group.size for group in groups)), -(-budget // _UNITS))
    if unit <= 0:
        return []
    capacity = budget // unit
    best = np.zeros(capacity + 1)  # saved within so many units
    uses = np.zeros((len(groups), capacity + 1), dtype=bool)
    for at in reversed(range(len(groups))):
        units = -(-groups[at].size // unit)
        if groups[at].saving <= 0 or units > capacity:
            continue
        with_it = best[: capacity + 1 - units] + groups[at].saving
        # As good is better: this group comes before those that were looked at.
        uses[at, units:] = with_it >= best[units:] - 1e-15
        best[units:] = np.maximum(best[units:], with_it)
    chosen, left = [], capacity
    for at, group in enumerate(groups):
        if uses[at, left]:
            chosen.append(at)
            left -= -(-group.size // unit)
    return chosen
