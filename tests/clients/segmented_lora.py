"""In the gateway's environment: adapters' products are made once, while an answer is in flight, and added."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch

from tenant_sdk.gateway import segmented
from tenant_sdk.gateway.segmented import SegmentedLora
from tenant_sdk.tuning.segmented_lora import Segments

made = 0


class Counted(Segments):
    """Counts what is made."""

    def products(self, x: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """See Segments."""
        global made
        made += 1
        return super().products(x, pairs)


def step(adapters: list[int]) -> SegmentedLora:
    """For rows with these adapters."""
    lora = SegmentedLora.__new__(SegmentedLora)
    lora._segments, lora._made = Counted(torch.tensor(adapters), 3), None
    return lora


torch.manual_seed(0)
a, b = (torch.randn(3, 1, 8, 16),) * 2, (torch.randn(3, 1, 24, 8), torch.randn(3, 1, 8, 8))
layer = SimpleNamespace(lora_a_stacked=a, lora_b_stacked=b)
for adapters in (
    [0, 1, 2, 1],
    [2, 2, 2, 2],
    [-1, 0, -1, 2],
    [0] * 12 + [1],
    [-1, -1],
):
    x, base = torch.randn(len(adapters), 16), torch.randn(len(adapters), 32)
    expected = base.clone()
    for row, adapter in enumerate(adapters):
        if adapter >= 0:
            both = [b[i][adapter, 0] @ (a[i][adapter, 0] @ x[row]) for i in range(2)]
            expected[row] += torch.cat(both)
    for meanwhile in (True, False):
        lora, y, made = step(adapters), base.clone(), 0
        lora_layer = SimpleNamespace(**vars(layer), punica_wrapper=lora)
        if meanwhile:
            segmented._make(lora_layer, x)
            assert made == (max(adapters) >= 0)
        lora.add_lora_linear(y, x, a, b, 1.0, (24, 8))
        assert made == (max(adapters) >= 0), "made twice"
        torch.testing.assert_close(y, expected)
        assert lora._made is None
    # What was made for other rows is not added.
    lora, y = step(adapters), base.clone()
    segmented._make(SimpleNamespace(**vars(layer), punica_wrapper=lora), x + 1)
    lora.add_lora_linear(y, x, a, b, 1.0, (24, 8))
    torch.testing.assert_close(y, expected)
print(json.dumps({"steps": 5}))
