"""Products of float weights: against torch's, for every number of rows, with oneDNN and without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from provider.catalog.discovery import discover
from provider.executor.loading import NUMERICS
from provider.executor.weights import FloatWeight, _whole_tiles
from shared.checkpoint import Checkpoint
from shared.compat import onednn_products
from shared.wire.header import Direction, member_indices

MODEL = Path(__file__).resolve().parents[2] / "examples" / "base_model"


@pytest.fixture(params=[True, False], ids=["oneDNN", "torch"])
def weight(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FloatWeight:
    if not request.param:
        monkeypatch.setattr("provider.executor.weights.onednn_products", lambda: None)
    elif onednn_products() is None:
        pytest.skip("torch has no oneDNN")
    return float_weight("float32")


def float_weight(numerics: str) -> FloatWeight:
    """Of a group whose members are wider than its input: a transposed weight would not go through."""
    checkpoint = Checkpoint(MODEL)
    info = discover(checkpoint, serve_head=False).groups[2]
    assert info.inputs != info.members[0].outputs
    weight = NUMERICS[numerics].load(checkpoint, info, torch.device("cpu")).weight
    assert isinstance(weight, FloatWeight)
    return weight


def exact(
    weight: FloatWeight, direction: Direction, members: int, tensors: list[torch.Tensor]
) -> torch.Tensor:
    """In float64, tensors side by side."""
    parts = [weight._parts[i].double() for i in member_indices(members)]
    if direction == Direction.FORWARD:
        return torch.cat([tensors[0].double() @ part.T for part in parts], 1)
    return sum(tensor.double() @ part for tensor, part in zip(tensors, parts, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("members", [0b11, 0b01, 0b10])
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
def test_products_are_torchs(weight: FloatWeight, direction: Direction, members: int) -> None:
    """Within 1e-5 of sums of which most are below 1: the order of additions differs."""
    generator = torch.Generator().manual_seed(0)
    outputs = [weight._widths[i] for i in member_indices(members)]
    asked, answered = [weight._weight.shape[1]], outputs
    if direction == Direction.BACKWARD:
        asked, answered = answered, asked
    for rows in (0, 1, 2, 3, 8, 9, 65, 257):
        tensors = [torch.randn(rows, width, generator=generator) for width in asked]
        kept = [tensor.clone() for tensor in tensors]
        out = weight.apply(direction, members, tensors)
        assert [tuple(tensor.shape) for tensor in out] == [(rows, width) for width in answered]
        assert all(tensor.is_contiguous() for tensor in out)
        torch.testing.assert_close(
            torch.cat(out, 1), exact(weight, direction, members, tensors).float(), rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(tensors, kept, rtol=0, atol=0)


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
def test_a_bfloat16_weight_takes_and_gives_either(direction: Direction) -> None:
    """Within what rounding rows, weight and answer to 8 bits can make: 2^-8 of the sums, twice."""
    weight = float_weight("bfloat16")
    width = weight._weight.shape[1] if direction == Direction.FORWARD else weight._widths[0]
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(1))
    for given in (x, x.bfloat16()):
        (out,) = weight.apply(direction, 0b01, [given])
        assert out.dtype == given.dtype
        wanted = exact(weight, direction, 0b01, [x.bfloat16()])
        torch.testing.assert_close(out.double(), wanted, rtol=2**-7, atol=2**-7 * wanted.abs().max().item())


def test_few_numbers_of_rows_occur() -> None:
    """oneDNN keeps code for each; and little is multiplied in vain."""
    x = torch.ones(4096, 1)
    met = set()
    for rows in range(1, 4097):
        whole = len(_whole_tiles(x[:rows]))
        met.add(whole)
        assert rows <= whole <= max(1.34 * rows, rows + 7)
        assert _whole_tiles(x[:rows]).sum() == rows  # zeros below
    assert len(met) <= 90


@pytest.mark.skipif(onednn_products() is None, reason="torch has no oneDNN")
def test_a_thread_of_its_own_takes_no_more_processors_than_were_chosen() -> None:
    """As with ``--threads 1``: oneDNN does not ask torch, whose choice holds for the thread that made it."""
    script = """
import os, threading, torch
from shared.compat import onednn_products
torch.set_num_threads(1)
multiply, _ = onednn_products()
rows, weight = torch.ones(4, 768), torch.ones(768, 4096)
def run():
    before = len(os.listdir("/proc/self/task"))
    multiply(rows, weight)
    print(len(os.listdir("/proc/self/task")) - before)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=800
    )
    assert told.stdout == "0\n"
