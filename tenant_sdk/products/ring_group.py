"""Scales and bounds of one group on the ring, from its executor's manifest."""

from __future__ import annotations

import torch

from shared.errors import ModelMismatch
from shared.ring.fixed_point import LIMIT, Bounds, max_row_norm
from shared.wire.header import Direction, member_indices
from shared.wire.messages import GroupInfo


class RingGroup:
    """Has the numbers that turn a group's floats into integers and back.

    Args:
        info: the group's entry in the manifest, with its bounds.
        scales: float32 [O] of all members.

    Raises:
        ModelMismatch: scales or bounds that cannot be.
    """

    def __init__(self, info: GroupInfo, scales: torch.Tensor) -> None:
        if not scales.isfinite().all() or (scales < 0).any():
            raise ModelMismatch("the executor's scales hold NaN, infinity or negative numbers")
        widths = [member.outputs for member in info.members]
        if info.bounds is None:
            raise ModelMismatch("the executor gives no bounds for a group of the ring")
        limit = Bounds(*info.bounds)
        self._ends = {
            Direction.FORWARD: (limit.forward, info.inputs),
            Direction.BACKWARD: (limit.backward, sum(widths)),
        }
        self._norms: dict[tuple[Direction, int], float] = {}
        for direction in self._ends:
            self.max_norm(direction)
        # What is smaller than this in size can be scaled, whatever else is in its row.
        self.safe_size = 2.0**100 / max(1.0, float(scales.max()))
        self._scales = scales.split(widths)
        self._chosen: dict[int, torch.Tensor] = {}

    def max_norm(self, direction: Direction, rounding_error: int = 0) -> float:
        """Returns the largest norm of rows, see ``max_row_norm``.

        Args:
            rounding_error: the largest number that rounding adds to a product.

        Raises:
            ModelMismatch: no row fits.
        """
        norm = self._norms.get((direction, rounding_error))
        if norm is None:
            try:
                norm = max_row_norm(*self._ends[direction], LIMIT - rounding_error)
            except ValueError as error:
                raise ModelMismatch(f"the executor's bounds are impossible: {error}") from error
            self._norms[direction, rounding_error] = norm
        return norm

    def scales_of(self, member_bits: int) -> torch.Tensor:
        """Returns the scales of some members, one behind the other."""
        chosen = self._chosen.get(member_bits)
        if chosen is None:
            chosen = torch.cat([self._scales[i] for i in member_indices(member_bits)])
            self._chosen[member_bits] = chosen
        return chosen
