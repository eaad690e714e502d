"""Masks that hide rows on the ring, and the effects that undo them: the interface, and no masks at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shared.forks import ForkGuard
from shared.wire.header import RequestClass
from shared.wire.protocol import GroupShape
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.modes import Privacy


class Mask(Protocol):
    """The mask of one request and the effect that undoes it, for the process that took them.

    All methods raise ConnectionLost in a forked child.
    """

    def take_values(self) -> torch.Tensor:
        """Hands out the mask's numbers, int32 [T, C], once. Rows are added to them in place."""
        ...

    def effects(self) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        """Yields slices of the answer's rows with what to subtract from them.

        These are rows of each source, packed as answers are.

        Waits for what is not there yet.

        Raises:
            SymbiosisError: what a mask source failed with.
        """
        ...

    def exact_effects(self) -> list[torch.Tensor]:
        """Returns the effects of all rows again, with all bits: int32 [T, P N] of each source.

        Raises:
            SymbiosisError: see ``effects``.
        """
        ...


class MaskGenerator(ABC):
    """Where masks come from: one implementation for each privacy mode.

    In a forked child there are none: ``take`` raises ConnectionLost, and ``close`` does nothing.
    """

    privacy: Privacy

    @abstractmethod
    def take(
        self,
        key: ProductKey,
        rows: int,
        *,
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> Mask:
        """Returns the mask of a request, or of a piece of one.

        Args:
            request_class: the request's; an effect that has to be asked for now is as urgent.
        """

    def record_request(self, key: ProductKey, rows: int) -> None:
        """Record that a request of so many rows had its masks; others like it will come."""
        return  # by default there is nothing to do

    @property
    def rows_ahead(self) -> int:
        """Rows of masks, of all kinds, whose effects are in store or in flight; 0: none are fetched ahead."""
        return 0

    def fill(self, budget_bytes: int, timeout: float, chunk_rows: int = 0) -> None:
        """Fetch ahead what a budget allows, wait until it is there, and fetch no more: for measurements.

        Args:
            chunk_rows: the largest number of rows to request at once; 0: as many as by default.
        """
        return  # by default nothing is fetched ahead

    @property
    @abstractmethod
    def sources(self) -> int:
        """How many effects are subtracted from an answer."""

    def close(self) -> None:
        """Stop background work and forget all masks."""
        return  # by default there is nothing to do


class NoMasks(MaskGenerator):
    """Privacy mode ``plain``: the mask is zero."""

    privacy, sources = Privacy.PLAIN, 0

    def __init__(self, shapes: list[GroupShape]) -> None:
        self._shapes, self._fork_guard = shapes, ForkGuard()

    def take(
        self,
        key: ProductKey,
        rows: int,
        *,
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> Mask:
        """See MaskGenerator."""
        self._fork_guard.check()
        widths = self._shapes[key.group].widths(key.direction, key.member_bits)
        return _NoMask(torch.zeros((rows, widths.request_columns), dtype=torch.int32))


@dataclass(frozen=True)
class _NoMask:
    zeros: torch.Tensor
    fork_guard: ForkGuard = field(default_factory=ForkGuard)

    def take_values(self) -> torch.Tensor:
        self.fork_guard.check()
        return self.zeros

    def effects(self) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        self.fork_guard.check()
        yield slice(0, len(self.zeros)), []

    def exact_effects(self) -> list[torch.Tensor]:
        self.fork_guard.check()
        return []
