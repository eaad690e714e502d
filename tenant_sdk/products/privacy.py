"""How activations are hidden from the executor: the seam between virtual layers and the connection."""

from __future__ import annotations

from typing import Protocol

import torch

from shared.wire.header import Direction, Operation
from tenant_sdk.connection.remote import RemoteExecutor


class Privacy(Protocol):
    """One privacy mode: computes a product of a group without showing the executor more than it must."""

    def product(
        self, group: int, direction: Direction, members: int, blocks: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The product of finite float32 blocks; shapes as in ``RemoteExecutor.product``."""
        ...

    def close(self) -> None:
        """Stop background work."""
        ...


class Plain:
    """No mask: the executor sees every activation. The baseline for speed, no protection at all."""

    def __init__(self, remote: RemoteExecutor) -> None:
        self._remote = remote

    def product(
        self, group: int, direction: Direction, members: int, blocks: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """See Privacy."""
        return self._remote.product(Operation.PRODUCT, group, direction, members, blocks)

    def close(self) -> None:
        """See Privacy."""


class PaddedRows:
    """Another mode, with rows of zeros added until their number is a power of two.

    Args:
        inner: what hides and sends them.
        least: the smallest number of rows sent.
    """

    def __init__(self, inner: Privacy, least: int) -> None:
        self._inner, self._least = inner, least

    def product(
        self, group: int, direction: Direction, members: int, blocks: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """See Privacy."""
        rows = blocks[0].shape[0]
        more = (1 << (max(rows, self._least) - 1).bit_length()) - rows
        sent = [torch.nn.functional.pad(block, (0, 0, 0, more)) for block in blocks]
        return [result[:rows] for result in self._inner.product(group, direction, members, sent)]

    def close(self) -> None:
        """See Privacy."""
        self._inner.close()


def padded(privacy: Privacy, pad_rows: int) -> Privacy:
    """A mode that hides row numbers too, if ``pad_rows`` is not 0; see ``connect``."""
    return PaddedRows(privacy, pad_rows) if pad_rows else privacy
