"""How activations are hidden from the executor: the seam between virtual layers and the connection."""

from __future__ import annotations

from typing import Protocol

import torch

from shared.header import Direction, Operation
from tenant_sdk.remote import RemoteExecutor


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
