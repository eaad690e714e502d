"""The kernel for GPUs in Triton's interpreter, which needs none: the same integers as everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

PROGRAM = """
import torch
from shared.ring import triton_kernel as module
from shared.ring.product import KERNELS, is_exact

triton_kernel = KERNELS["triton"]
assert is_exact(triton_kernel)
module._DIGITS = 1 << 13  # so that a weight is in several parts
generator = torch.Generator().manual_seed(0)
SIZES = ((1, 1, 1), (17, 65, 3), (5, 2100, 3), (40, 2100, 3), (70, 64, 130), (520, 65, 140))
for count, inner, columns in SIZES:
    for dtype, most in ((torch.int16, 32639), (torch.int8, 127)):
        for turned in (False, True):
            rows = torch.randint(-2**31, 2**31, (count, inner), generator=generator, dtype=torch.int32)
            shape = (columns, inner) if turned else (inner, columns)
            weight = torch.randint(-most, most + 1, shape, generator=generator, dtype=dtype)
            weight = weight.T if turned else weight
            around = torch.full((count, columns + 5), 77, dtype=torch.int32)
            expected = (rows.long() @ weight.long()).to(torch.int32)
            triton_kernel(rows, weight, around[:, 2:-3])
            assert torch.equal(around[:, 2:-3], expected)
            assert (around[:, :2] == 77).all() and (around[:, -3:] == 77).all()
            # Members' parts of wider rows and of a group's weight.
            wide, high = torch.cat([rows, rows], 1)[:, inner:], torch.cat([weight, weight])[inner:]
            triton_kernel(wide, high, around[:, 2:-3])
            assert torch.equal(around[:, 2:-3], expected)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_gpus_kernel_gives_the_same_integers() -> None:
    """In a process of its own: how Triton runs is decided when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
