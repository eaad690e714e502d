"""Products and rows of random shapes in native code and in torch, for some time: `.ci/sanitizers`."""

from __future__ import annotations

import sys
import time
from random import Random
from unittest.mock import patch

import torch

from shared.ring import native
from shared.ring.rows import all_finite_below, quantize_and_mask, unmask_and_dequantize, write_products
from shared.ring.upper_bits import subtract_upper_bits, take_upper_bits

_LIMIT = 2**31 - 1


def _integers(random: Random, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    return torch.randint(-_LIMIT - 1, _LIMIT + 1, shape, generator=generator, dtype=torch.int32)


def _floats(random: Random, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    return torch.randn(shape, generator=generator) * 2.0 ** random.randint(-130, 100)


def _side(random: Random) -> int:
    return random.choice((1, 2, 3, random.randint(1, 40), random.randint(1, 150), random.randint(1, 700)))


def multiply(random: Random) -> None:
    """All kernels that this processor has. Weights lie by rows or columns; rows are parts of longer ones."""
    count, inner, columns = random.randint(1, 40), _side(random), _side(random)
    dtype, more = random.choice((torch.int8, torch.int16)), random.choice((0, 0, 1, 7))
    rows = _integers(random, count, inner + more)[:, :inner]
    weight = _integers(random, inner, columns).to(dtype)
    weight = random.choice((weight, weight.T.contiguous().T))
    expected = rows.long() @ weight.long()
    for number in native.KERNELS.values():
        out = torch.empty((count, columns + more), dtype=torch.int32)[:, :columns]
        native.multiply(number, rows, weight, out)
        assert torch.equal(out, expected.to(torch.int32)), (number, count, inner, columns, dtype)


def rows(random: Random) -> None:
    """Both ends of a product, in native code and in torch."""
    count, planes, sources = random.randint(1, 40), random.choice((1, 2)), random.randint(0, 3)
    widths = [_side(random) for _ in range(random.randint(1, 4))]
    columns = sum(widths)
    tensors = [_floats(random, count, width) for width in widths]
    scales, factor = (
        _floats(random, columns).abs(),
        _integers(random, columns).long() << random.randint(0, 31),
    )
    mask, both = _integers(random, count, columns), []
    answers = _integers(random, count, planes * columns)
    effects = [_integers(random, count, planes * columns) for _ in range(sources)]
    challenge = _integers(random, planes * columns)
    for library in (native.LIBRARY, None):
        with patch.object(native, "LIBRARY", library):
            requests, integers = mask.clone(), torch.zeros(count, columns)
            found = quantize_and_mask(tensors, scales, 1e6, requests, factor, integers)
            exponents = torch.zeros(count, dtype=torch.int32) if found is None else found[0]
            expected = None if found is None else found[1]
            out = [torch.zeros(count, width) for width in widths]
            left = answers.clone()
            asked = None if expected is None else challenge
            wrong = unmask_and_dequantize(left, effects, exponents, scales, out, asked, expected)
            made = [torch.zeros(count, width) for width in widths]
            write_products(left.float(), exponents, None, made)
            finite = all(all_finite_below(tensor) for tensor in tensors)
            both.append((requests if found else None, exponents, wrong, *out, *made, finite))
    for one, other in zip(*both, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other


def upper_bits(random: Random) -> None:
    """Upper bits of answers, in native code and in torch."""
    count, columns, more = random.randint(1, 40), _side(random), random.choice((0, 0, 5))
    for bits in (16, 24):
        numbers = [_integers(random, count, columns + more)[:, :columns] for _ in range(random.randint(1, 4))]
        both = []
        for library in (native.LIBRARY, None):
            with patch.object(native, "LIBRARY", library):
                taken = [take_upper_bits(each, bits) for each in numbers]
                both.append([*taken, subtract_upper_bits(taken[0], taken[1:], bits)])
        assert all(map(torch.equal, *both)), (count, columns, bits)


def main(seconds: float) -> None:
    """Print how many shapes were tried."""
    assert native.LIBRARY is not None
    random, end, count = Random(time.time_ns()), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for trial in (multiply, rows, upper_bits):
            trial(random)
        count += 1
    print(f"{count:,} random shapes each for products, rows and upper bits: no finding")


if __name__ == "__main__":
    main(float(sys.argv[1]))
