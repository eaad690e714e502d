"""Banks of masks: how long each serves, and who waits for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from memory_sources import KEYS, SHAPES, Entropy, product

from shared.errors import ConnectionLost
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.bank_masks import BankMasks
from tenant_sdk.products.bank_options import NoiseBankOptions
from tenant_sdk.products.rotating_banks import RotatingBanks


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
        (one, 3, 0.0, [one, one]),  # its seventh row; the next bank is fetched meanwhile
        (other, 1, 0.0, [one, one, other]),
        (one, 6, 0.0, [one, one, other]),
        (one, 1, 10.1, [one, one, other, one]),
        (one, 1, 10.1, [one, one, other, one]),
        (other, 1, 10.0, [one, one, other, one]),
        (other, 1, 10.1, [one, one, other, one, other]),
    ]:
        now[0] = seconds
        mask = banks.take(key, rows)
        for serving in banks._banks._serving.values():
            if serving.next is not None:
                serving.next.result(800)
        assert source.made == made
        numbers = mask.take_values()
        ((part, (effect,)),) = mask.effects()
        assert part == slice(0, rows)
        assert torch.equal(effect, product(key, numbers))


def test_a_bank_that_is_on_its_way_delays_no_other() -> None:
    """Threads ask for their first banks together: one waits for the source, and the others do not."""
    asked, go = threading.Event(), threading.Event()

    def make(key: str) -> list[str]:
        if key == "slow":
            asked.set()
            assert go.wait(800)
        return [key]

    banks = RotatingBanks(make, NoiseBankOptions(), clock=lambda: 0.0)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(banks.take, "slow", 1)
        assert asked.wait(800)
        second = threads.submit(banks.take, "slow", 1)
        assert banks.take("quick", 1) == ["quick"]
        go.set()
        assert first.result(800) is second.result(800)
    banks.close()


def test_a_first_bank_that_fails_is_tried_again() -> None:
    tries: list[str] = []

    def make(key: str) -> str:
        tries.append(key)
        if len(tries) == 1:
            raise ConnectionError("away")
        return key

    banks = RotatingBanks(make, NoiseBankOptions(), clock=lambda: 0.0)
    with pytest.raises(ConnectionError, match="away"):
        banks.take("one", 1)
    assert banks.take("one", 1) == "one"
    banks.close()


def test_closed_banks_say_so() -> None:
    banks = RotatingBanks(str, NoiseBankOptions(), clock=lambda: 0.0)
    banks.close()
    with pytest.raises(ConnectionLost, match="the session is closed"):
        banks.take("one", 1)
