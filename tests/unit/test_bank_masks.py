"""Banks of masks on the ring: how long each serves."""

from __future__ import annotations

import torch
from memory_sources import KEYS, SHAPES, Entropy, product

from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.bank_masks import BankMasks
from tenant_sdk.products.bank_options import NoiseBankOptions


class Source:
    """A MaskSource that counts the banks of each kind."""

    def __init__(self) -> None:
        self.made = list[ProductKey]()

    def effect(self, key: ProductKey, masks: list[torch.Tensor]) -> list[torch.Tensor]:
        self.made.append(key)
        return [product(key, masks[0])]

    def close(self) -> None:
        """Nothing is open."""


def test_a_bank_is_replaced_after_rows_or_seconds() -> None:
    now, source = [0.0], Source()
    options = NoiseBankOptions(masks=4, rotate_rows=6, rotate_seconds=10.0)
    banks = BankMasks(SHAPES, source, options, Entropy(), clock=lambda: now[0])
    one, other = KEYS[0], KEYS[2]
    for key, rows, seconds, made in [
        (one, 4, 0.0, [one]),
        (one, 3, 0.0, [one]),  # its seventh row is the last
        (other, 1, 0.0, [one, other]),
        (one, 1, 0.0, [one, other, one]),
        (one, 1, 10.0, [one, other, one]),
        (one, 1, 10.1, [one, other, one, one]),
        (other, 1, 10.1, [one, other, one, one, other]),
    ]:
        now[0] = seconds
        mask = banks.take(key, rows)
        assert source.made == made
        numbers = mask.numbers()
        ((part, (effect,)),) = mask.effects()
        assert part == slice(0, rows)
        assert torch.equal(effect, product(key, numbers))
