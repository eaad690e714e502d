"""Products of groups whose weights are here: all that a lane needs of an executor."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

import torch

from provider.executor.loading import LoadedGroup, Numerics
from shared.devices import to_device, to_host
from shared.errors import WireError
from shared.ring.mask_stream import MaskStream
from shared.ring.rows import below
from shared.wire.header import DTYPE_NAMES, Header, Operation
from shared.wire.protocol import GroupShape, split_blocks


class GroupExecutor:
    """Computes products of some groups or all, and keeps no state of any tenant (Symbiosis §3.2).

    Args:
        groups: by their numbers in the manifest.
        numerics: in which they were loaded, a name in ``NUMERICS``.
        device: on which they were.

    Raises:
        ConfigurationError: unknown numerics.
    """

    def __init__(self, groups: Mapping[int, LoadedGroup], numerics: str, device: torch.device) -> None:
        self._wire_dtype = DTYPE_NAMES[Numerics.named(numerics).wire_dtypes[0]]
        self._device = device
        self._weights = {group: loaded.weight for group, loaded in groups.items()}
        self._shapes = {group: GroupShape.of(loaded.info, numerics) for group, loaded in groups.items()}
        self._order = sorted(groups)

    def blocks(self, header: Header, payload: torch.Tensor) -> list[torch.Tensor]:
        """The rows of an accepted request: [T, D] forward; backward one [T, O_m] for each member.

        On the ring there is one block in both directions. Seeds are expanded into their masks.

        Args:
            header: of one of PRODUCTS.
            payload: [T, columns], or a seed; not copied.

        Raises:
            WireError: ``non_finite``, for rows with NaN or infinity.
        """
        if header.operation == Operation.SEED_EFFECT:
            return [MaskStream(payload.numpy().tobytes()).draw(header.rows, header.columns)]
        if payload.is_floating_point() and not below(payload):
            raise WireError("non_finite", "the rows hold NaN or infinity; nothing was computed")
        return split_blocks(
            payload, self._shapes[header.group].plan(header.direction, header.members).request_widths
        )

    def compute(
        self, group: int, direction: int, members: int, blocks: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Products of blocks of any number of rows: see ``GroupWeight``.

        Args:
            group: one whose weight is here.
            direction: a ``Direction``.
            members: which members take part, a bit mask.
            blocks: on the CPU.

        Returns:
            Fresh blocks on the CPU.
        """
        weight = self._weights[group]
        if self._device.type == "cpu":  # no further call into torch: each queues for Python's lock
            return weight.apply(direction, members, blocks)
        return to_host(weight.apply(direction, members, to_device(blocks, self._device)))

    def zeros(self, group: int, direction: int, members: int, rows: int) -> list[torch.Tensor]:
        """Blocks of a request, to measure with."""
        widths = self._shapes[group].plan(direction, members).request_widths
        return [torch.zeros((rows, width), dtype=self._wire_dtype) for width in widths]

    def read_ahead(self, group: int, stop: Callable[[], bool]) -> None:
        """Bring a group's weight nearer to the processor, until ``stop()``.

        In place of one that is not here comes the next that is; past the last the first.
        """
        if self._device.type == "cpu":
            at = bisect_left(self._order, group) % len(self._order)
            self._weights[self._order[at]].read_ahead(stop)
