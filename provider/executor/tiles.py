"""How many rows kernels multiply at once."""

from __future__ import annotations

TILE = 16  # rows that kernels multiply at once


def tile_of(rows: int) -> int:
    """Products of so many rows had better have a multiple of this."""
    return TILE if rows <= 16 * TILE else 4 * TILE
