"""The paper's masking: a bank of noise whose effect is known beforehand (Symbiosis §3.8).

What it is worth: little. If the executor computes the effects, as the paper has it, it has seen
every mask and can subtract each. If somebody else does, a mask that serves twice still shows the
difference of the two rows. Kept for fidelity and as the subject of the audit; SECURITY.md says more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shared.forks import ForkGuard, register_for_fork
from shared.wire.header import Direction, Operation, RequestClass, member_indices
from tenant_sdk.connection.channel import Entropy
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.remote import LazyResult, RemoteExecutor
from tenant_sdk.products.bank_options import NoiseBankOptions
from tenant_sdk.products.mask_sources import MaskSource
from tenant_sdk.products.modes import Privacy
from tenant_sdk.products.normal import normal_of_uniform
from tenant_sdk.products.products import Products
from tenant_sdk.products.rotating_banks import RotatingBanks


@dataclass
class _Bank:
    """K standard normal masks of one group and direction, and their effects.

    ``masks`` holds one tensor forward, one for each member backward; ``effects`` always one for each
    member, so that any selection of members can be served.
    """

    masks: list[torch.Tensor]
    effects: list[torch.Tensor]


class NoiseBank(Products):
    """Privacy mode ``noise-bank``.

    A row x is sent as ``x + a n_k`` with k drawn secretly for every row, and ``a (n_k W)`` is
    subtracted from the answer. The scale a is a power of two near ``scale`` times the larger of the
    row's and the mean root mean square, so that multiplying by it is exact and quiet rows hide
    among loud ones.

    Args:
        remote: the executor that gets the masked rows.
        source: computes the effects.
        options: size and life of a bank.
        entropy: secret random bytes.
        clock: seconds, monotonic.
    """

    privacy = Privacy.NOISE_BANK

    def __init__(
        self,
        remote: RemoteExecutor,
        source: MaskSource,
        options: NoiseBankOptions,
        *,
        entropy: Entropy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._remote, self._source, self._options = remote, source, options
        self._entropy = entropy
        self._banks = RotatingBanks(self._make, options, clock)
        self._fork_guard = ForkGuard()
        register_for_fork(self)

    def submit(
        self,
        group: int,
        direction: Direction,
        member_bits: int,
        rows: list[torch.Tensor],
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> LazyResult:
        """See Products.

        Raises:
            ConnectionLost: this is a forked child.
        """
        self._fork_guard.check()
        bank = self._banks.take((group, direction), len(rows[0]))
        started = time.perf_counter()
        choice, silent = self._choose(rows)
        indices = member_indices(member_bits)
        if direction == Direction.FORWARD:
            masks, effects = bank.masks, [bank.effects[i] for i in indices]
        else:
            masks = [bank.masks[i] for i in indices]
            effects = [torch.stack([bank.effects[i] for i in indices]).sum(0)]
        masked = [torch.addmm(tensor, choice, mask) for tensor, mask in zip(rows, masks, strict=True)]
        spent = time.perf_counter() - started
        key = ProductKey(group, direction, member_bits)
        pending = self._remote.submit(Operation.PRODUCT, key, masked, request_class)

        def finish() -> list[torch.Tensor]:
            results = pending.result()
            started = time.perf_counter()
            for result, effect in zip(results, effects, strict=True):
                result.addmm_(choice, effect, alpha=-1)
                if silent is not None:
                    # Nothing times a weight is nothing, not what rounding left of the mask: an optimizer
                    # that divides by the gradient's size would make a step of it.
                    result[silent] = 0.0
            self._remote.stats.add(seconds_masking=spent + time.perf_counter() - started)
            return results

        return LazyResult(finish)

    def _choose(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Chooses the mask of each row, and finds the rows of zeros.

        Returns:
            [T, K]: in each row one entry, the power of two a, in a secretly drawn column.
            [T] bool, or None if no row is zero.
        """
        rows = tensors[0].shape[0]
        norm = self._norms(tensors, torch.float32)
        if not 1e-15 < norm.max() < np.inf:  # squares of such numbers leave float32
            norm = self._norms(tensors, torch.float64)
        width = sum(tensor.shape[1] for tensor in tensors)
        loud = np.maximum(norm, norm.mean()) * (self._options.scale / width**0.5)
        choice = np.zeros((rows, self._options.masks), np.float32)
        picked = np.frombuffer(self._entropy(rows), np.uint8) & (self._options.masks - 1)
        choice[np.arange(rows), picked] = np.ldexp(np.float32(1), np.frexp(loud)[1])
        silent = norm == 0
        return torch.from_numpy(choice), torch.from_numpy(silent) if silent.any() else None

    @staticmethod
    def _norms(tensors: list[torch.Tensor], dtype: torch.dtype) -> Any:
        """Returns the L2 norm [T] of each row over all tensors."""
        norms = [torch.linalg.vector_norm(tensor, dim=1, dtype=dtype).numpy() for tensor in tensors]
        return norms[0] if len(norms) == 1 else np.linalg.norm(norms, axis=0)

    def _make(self, key: tuple[int, Direction]) -> _Bank:
        group, direction = key
        shape = self._remote.shapes[group]
        count = len(shape.outputs)
        if direction == Direction.FORWARD:
            masks = [self._normal(shape.inputs)]
            effects = self._source.effect(ProductKey(group, direction, (1 << count) - 1), masks)
        else:
            masks = [self._normal(width) for width in shape.outputs]
            effects = [
                self._source.effect(ProductKey(group, direction, 1 << i), [masks[i]])[0] for i in range(count)
            ]
        return _Bank(masks, effects)

    def _normal(self, width: int) -> torch.Tensor:
        """Draws [K, width] standard normal numbers of secret random bytes."""
        rows = 2 * self._options.masks
        words = np.frombuffer(self._entropy(4 * rows * width), np.uint32).reshape(rows, width)
        return normal_of_uniform(torch.from_numpy((words + 0.5) / 2**32)).float()

    def forked(self) -> None:
        """See ``shared.forks``."""
        self._banks.forget()

    def close(self) -> None:
        """Stop fetching and forget the masks; in a forked child, nothing."""
        if self._fork_guard.in_child:
            return
        self._banks.close()
        self._source.close()
