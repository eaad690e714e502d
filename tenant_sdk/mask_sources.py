"""Who computes the effect of a mask: an executor, or the tenant from a checkpoint of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from shared.checkpoint import Checkpoint
from shared.errors import ModelMismatch
from shared.header import DTYPE_NAMES, Direction, Operation, member_indices
from shared.messages import Manifest
from tenant_sdk.remote import RemoteExecutor


class MaskSource(Protocol):
    """Computes bias-free products of masks; shapes as in ``RemoteExecutor.product``."""

    def effect(
        self, group: int, direction: Direction, members: int, masks: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The product of float32 masks."""
        ...

    def close(self) -> None:
        """Release the source."""
        ...


class ExecutorSource:
    """An executor, over its bias-free endpoint. It sees every mask.

    Args:
        remote: the provider itself (the paper's scheme), or another executor of the same weights.
        owned: whether closing the source closes the connection.
    """

    def __init__(self, remote: RemoteExecutor, *, owned: bool) -> None:
        self._remote = remote
        self._owned = owned

    def effect(
        self, group: int, direction: Direction, members: int, masks: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """See MaskSource."""
        return self._remote.product(Operation.EFFECT, group, direction, members, masks)

    def close(self) -> None:
        """See MaskSource."""
        if self._owned:
            self._remote.close()


class LocalSource:
    """The tenant's own checkpoint: nobody else sees a mask. Each weight is read when it is needed.

    Args:
        folder: the checkpoint that the executor serves.
        manifest: the executor's.

    Raises:
        CheckpointError: the folder cannot be read.
        ModelMismatch: it holds other weights than the executor serves.
    """

    def __init__(self, folder: str | Path, manifest: Manifest) -> None:
        self._checkpoint = Checkpoint(folder)
        self._groups = manifest.groups
        # The executor multiplies with weights rounded to its numerics, so the effect must too.
        self._served_dtype = DTYPE_NAMES.get(manifest.numerics, torch.float32)
        if not self._checkpoint.holds(manifest.groups, manifest.digest):
            raise ModelMismatch(
                f"the checkpoint {folder} does not hold the weights that the executor serves "
                f"({manifest.model}, digest {manifest.digest[:16]})"
            )

    def effect(
        self, group: int, direction: Direction, members: int, masks: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """See MaskSource."""
        weights = [
            self._checkpoint.member_weight(self._groups[group].members[i]).to(self._served_dtype).float()
            for i in member_indices(members)
        ]
        if direction == Direction.FORWARD:
            return [masks[0] @ weight.T for weight in weights]
        total = masks[0] @ weights[0]
        for mask, weight in zip(masks[1:], weights[1:], strict=True):
            total += mask @ weight
        return [total]

    def close(self) -> None:
        """See MaskSource."""
