"""Masks on the ring that serve again: privacy mode ``noise-bank``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from shared.forks import ForkGuard, register_for_fork
from shared.ring.mask_stream import MaskStream
from shared.ring.upper_bits import take_upper_bits
from shared.wire.header import SEED_BYTES, RequestClass
from shared.wire.protocol import GroupShape
from tenant_sdk.connection.channel import Entropy
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.bank_options import NoiseBankOptions
from tenant_sdk.products.mask_sources import MaskSource
from tenant_sdk.products.masks import Mask, MaskGenerator
from tenant_sdk.products.modes import Privacy
from tenant_sdk.products.rotating_banks import RotatingBanks


@dataclass
class _Bank:
    masks: torch.Tensor = field(repr=False)
    effects: torch.Tensor = field(repr=False)


class BankMasks(MaskGenerator):
    """Privacy mode ``noise-bank`` on the ring: K uniform masks for each kind, one picked secretly a row.

    The same weakness as with floats: a mask that serves twice shows the difference of two rows, and
    whoever computed the effects knows every mask (``tenant_sdk.products.noise_bank``). The options'
    ``scale`` has no meaning here: a uniform mask has no size.
    """

    privacy, sources = Privacy.NOISE_BANK, 1

    def __init__(
        self,
        shapes: list[GroupShape],
        source: MaskSource,
        options: NoiseBankOptions,
        entropy: Entropy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shapes, self._source = shapes, source
        self._options, self._entropy = options, entropy
        self._banks = RotatingBanks(self._make, options, clock)
        self._fork_guard = ForkGuard()
        register_for_fork(self)

    def take(
        self,
        key: ProductKey,
        rows: int,
        *,
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> Mask:
        """See MaskGenerator."""
        self._fork_guard.check()
        bank = self._banks.take(key, rows)
        drawn = np.frombuffer(self._entropy(rows), np.uint8).astype(np.int64)
        picked = torch.from_numpy(drawn & (self._options.masks - 1))
        return _BankMask(bank.masks[picked], bank.effects, picked, key.answer_bits)

    def _make(self, key: ProductKey) -> _Bank:
        widths = self._shapes[key.group].widths(key.direction, key.member_bits)
        masks = MaskStream(self._entropy(SEED_BYTES)).draw(self._options.masks, widths.request_columns)
        (effects,) = self._source.effect(key.exact, [masks])
        return _Bank(masks, effects)

    def forked(self) -> None:
        """See ``shared.forks``."""
        self._banks.forget()

    def close(self) -> None:
        """See MaskGenerator."""
        if self._fork_guard.in_child:
            return
        self._banks.close()
        self._source.close()


@dataclass(frozen=True)
class _BankMask:
    masks: torch.Tensor = field(repr=False)
    bank: torch.Tensor = field(repr=False)  # effects
    picked: torch.Tensor = field(repr=False)
    answer_bits: int
    fork_guard: ForkGuard = field(default_factory=ForkGuard)

    def take_values(self) -> torch.Tensor:
        self.fork_guard.check()
        return self.masks  # a copy: indexing made it

    def effects(self) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        self.fork_guard.check()
        yield slice(0, len(self.picked)), [take_upper_bits(self.bank[self.picked], self.answer_bits)]

    def exact_effects(self) -> list[torch.Tensor]:
        self.fork_guard.check()
        return [self.bank[self.picked]]
