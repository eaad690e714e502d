"""Sources of the effects of masks: an executor, or the tenant from a checkpoint of its own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Protocol

import torch

from shared.errors import ModelMismatch
from shared.ring.fixed_point import bounds
from shared.ring.mask_stream import MaskStream
from shared.ring.product import PlaneProducts, group_planes
from shared.ring.upper_bits import take_upper_bits
from shared.wire.header import DTYPE_NAMES, RINGS, Direction, Operation, RequestClass, member_indices
from shared.wire.messages import Manifest
from shared.wire.protocol import GroupShape, RequestWidths
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.trust.attestation import trusted_checkpoint


class MaskSource(Protocol):
    """Computes bias-free products of masks; shapes as in ``RemoteExecutor.submit``."""

    def effect(self, key: ProductKey, masks: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the products of masks, float32 or, on a ring, int32."""
        ...

    def close(self) -> None:
        """Release the source."""
        ...


class SeedSource(Protocol):
    """Computes the effects of masks that it expands from seeds; ring numerics."""

    def seed_effect(
        self, key: ProductKey, rows: int, seed: bytes, request_class: RequestClass
    ) -> torch.Tensor:
        """See ``RemoteExecutor.seed_effect``."""
        ...

    def max_rows(self, key: ProductKey) -> int:
        """Returns how many rows one call may ask for."""
        ...

    def close(self) -> None:
        """Release the source."""
        ...


class ExecutorSource:
    """An executor that multiplies masks without a bias. It sees every mask, or the seed of it.

    Args:
        remote: the provider itself (the paper's scheme), or another executor of the same weights.
        owned: whether closing the source closes the connection.
    """

    def __init__(self, remote: RemoteExecutor, *, owned: bool) -> None:
        self._remote = remote
        self._owned = owned

    def effect(self, key: ProductKey, masks: list[torch.Tensor]) -> list[torch.Tensor]:
        """See MaskSource."""
        return self._remote.submit(Operation.EFFECT, key, masks).result()

    def seed_effect(
        self, key: ProductKey, rows: int, seed: bytes, request_class: RequestClass
    ) -> torch.Tensor:
        """See SeedSource."""
        return self._remote.seed_effect(key, rows, seed, request_class)

    def max_rows(self, key: ProductKey) -> int:
        """See SeedSource."""
        return self._remote.max_rows(key)

    def close(self) -> None:
        """See MaskSource."""
        if self._owned:
            self._remote.close()


class OwnCheckpoint:
    """The tenant's own checkpoint of the model that an executor serves.

    Args:
        folder: the checkpoint's.
        manifest: the executor's.

    Raises:
        CheckpointError: the folder cannot be read.
        ModelMismatch: it holds other weights, parameters or files than the executor lists.
    """

    def __init__(self, folder: str | Path, manifest: Manifest) -> None:
        self._checkpoint, self._groups = trusted_checkpoint(folder, manifest), manifest.groups

    def weights(self, group: int) -> list[torch.Tensor]:
        """Returns the weights of a group's members as the checkpoint has them: [O, D] float32 each."""
        return [self._checkpoint.member_weight(member).float() for member in self._groups[group].members]


class LocalSource(OwnCheckpoint):
    """The tenant's own checkpoint: nobody else sees a mask. Each weight is read when it is needed.

    Args and Raises: see OwnCheckpoint.
    """

    def __init__(self, folder: str | Path, manifest: Manifest) -> None:
        super().__init__(folder, manifest)
        # The executor multiplies with weights rounded to its numerics, so the effect must too.
        self._served_dtype = DTYPE_NAMES.get(manifest.numerics, torch.float32)

    def effect(self, key: ProductKey, masks: list[torch.Tensor]) -> list[torch.Tensor]:
        """See MaskSource."""
        weights = [
            self._checkpoint.member_weight(self._groups[key.group].members[i]).to(self._served_dtype).float()
            for i in member_indices(key.member_bits)
        ]
        if key.direction == Direction.FORWARD:
            return [masks[0] @ weight.T for weight in weights]
        total = masks[0] @ weights[0]
        for mask, weight in zip(masks[1:], weights[1:], strict=True):
            total += mask @ weight
        return [total]

    def close(self) -> None:
        """See MaskSource."""


class LocalRing(OwnCheckpoint):
    """The tenant's own checkpoint as integers: two bytes a weight stay in memory once used.

    Args and Raises: see OwnCheckpoint.
    """

    def __init__(self, folder: str | Path, manifest: Manifest) -> None:
        super().__init__(folder, manifest)
        self._numerics = manifest.numerics
        self._made: dict[int, tuple[PlaneProducts, torch.Tensor]] = {}
        self._lock = threading.Lock()

    def seed_effect(
        self, key: ProductKey, rows: int, seed: bytes, request_class: RequestClass
    ) -> torch.Tensor:
        """See SeedSource."""
        mask = MaskStream(seed).draw(rows, self._request_widths(key).request_columns)
        return take_upper_bits(self.effect(key, [mask])[0], key.answer_bits)

    def effect(self, key: ProductKey, masks: list[torch.Tensor]) -> list[torch.Tensor]:
        """See MaskSource."""
        out = torch.empty((len(masks[0]), self._request_widths(key).answer_columns), dtype=torch.int32)
        self._of(key.group)[0].matmul(key.direction, key.member_bits, masks[0], out)
        return [out]

    def _request_widths(self, key: ProductKey) -> RequestWidths:
        return GroupShape.of(self._groups[key.group], self._numerics).widths(key.direction, key.member_bits)

    def scales(self, group: int) -> torch.Tensor:
        """Returns the scales of all members of a group: float32 [O]."""
        return self._of(group)[1]

    def _of(self, group: int) -> tuple[PlaneProducts, torch.Tensor]:
        with self._lock:
            if group not in self._made:
                info = self._groups[group]
                planes, scales = group_planes(self._checkpoint, info, RINGS[self._numerics])
                if bounds(planes) != info.bounds:
                    raise ModelMismatch(
                        f"the executor claims other bounds for group {group} ({info.members[0].name}) than "
                        "its weights have, so that products overflow or lose digits"
                    )
                self._made[group] = PlaneProducts(planes, [m.outputs for m in info.members]), scales
            return self._made[group]

    def max_rows(self, key: ProductKey) -> int:
        """See SeedSource: as many as one product may sensibly have."""
        return 1 << 16

    def close(self) -> None:
        """See MaskSource."""
        self._made.clear()
