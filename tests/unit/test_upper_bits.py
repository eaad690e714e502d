"""Upper bits of answers: packing, and rounding without bias."""

from __future__ import annotations

import itertools

import pytest
import torch

from shared.ring import native
from shared.ring.upper_bits import subtract_upper_bits, take_upper_bits, truncation_variance, widen_upper_bits
from shared.wire.header import ANSWER_BITS, EXACT, TRUNCATED_DTYPES


def numbers(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(-(2**31), 2**31, (rows, columns), generator=generator, dtype=torch.int32)
    made.view(-1)[: min(3, made.numel())] = torch.tensor([-(2**31), 2**31 - 1, -1], dtype=torch.int32)[
        : made.numel()
    ]
    return made


@pytest.mark.parametrize("bits", ANSWER_BITS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 64), (70, 1000)])
def test_what_is_cut_is_the_upper_bits(
    bits: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In native code and in torch, of whole tensors and of columns of wider ones."""
    wide = numbers(shape[0], shape[1] + 5)
    for given in (numbers(*shape), wide[:, 2 : 2 + shape[1]]):
        packed = [take_upper_bits(given, bits)]
        with monkeypatch.context() as patch:
            patch.setattr(native, "LIBRARY", None)
            packed.append(take_upper_bits(given, bits))
        assert torch.equal(*packed)
        assert packed[0].nbytes == given.numel() * bits // 8
        assert torch.equal(widen_upper_bits(packed[0], bits), given >> EXACT - bits << EXACT - bits)


@pytest.mark.parametrize("bits", [16, 24])
@pytest.mark.parametrize("sources", [0, 1, 2, 3])
def test_native_code_and_torch_agree(bits: int, sources: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = [take_upper_bits(numbers(9, 33, seed), bits) for seed in range(sources + 1)]
    found = [subtract_upper_bits(packed[0], packed[1:], bits)]
    with monkeypatch.context() as patch:
        patch.setattr(native, "LIBRARY", None)
        found.append(subtract_upper_bits(packed[0], packed[1:], bits))
    assert torch.equal(*found)


def test_rounding_has_no_bias_for_any_residue() -> None:
    """All residues of the product, and all of the mask, modulo 2^16: the mean is the product, exactly."""
    low = torch.arange(1 << 16)
    for residue in [*range(64), *range(64, 1 << 16, 997), (1 << 16) - 1]:
        carried = (low + residue >> 16).sum()
        assert carried == residue


@pytest.mark.parametrize("sources", [0, 1, 2, 3])
def test_the_mean_is_the_product_and_errors_are_bounded(sources: int) -> None:
    """On a ring of 2^8 of which 4 bits travel: every product, and every value of the masks' low bits."""
    unit, ring = 1 << 4, 1 << 8
    for y in range(-ring // 2 + 2 * unit, ring // 2 - 4 * unit, 7):
        errors = []
        for masks in itertools.product(range(unit), repeat=sources):
            answer = (y + sum(masks)) % ring
            rest = (answer // unit - sum(mask // unit for mask in masks)) % (ring // unit)
            signed = rest - ring // unit if rest >= ring // unit // 2 else rest
            errors.append(signed + (1 - sources) / 2 * (unit - 1) / unit - y / unit)
        mean = sum(errors) / len(errors)
        assert max(map(abs, errors)) <= max(1, (sources + 1) / 2)
        if sources:
            assert abs(mean) < 1e-12
            assert sum(e * e for e in errors) / len(errors) <= truncation_variance(sources) + 1e-12


@pytest.mark.parametrize("bits", [16, 24])
def test_products_up_to_the_limit_do_not_wrap(bits: int) -> None:
    unit = 1 << EXACT - bits
    extreme = torch.tensor([[2**31 - 1 - unit, -(2**31) + unit, 0, unit, -unit, 1, -1]])
    for seed in range(50):
        mask = numbers(1, 7, seed)
        answer = (extreme + mask.long()).to(torch.int32)
        found = subtract_upper_bits(take_upper_bits(answer, bits), [take_upper_bits(mask, bits)], bits)
        assert ((found.double() - extreme.double() / unit).abs() < 1).all()


def test_wrong_tensors_are_refused() -> None:
    good = torch.zeros((2, 6), dtype=TRUNCATED_DTYPES[16])
    for answers, effects in ((good, [good[:1]]), (good.int(), []), (good.T, []), (good, [good.int()])):
        with pytest.raises(ValueError, match="contiguous"):
            subtract_upper_bits(answers, effects, 16)


@pytest.mark.parametrize("bits", [16, 24])
def test_a_lone_column_lies_side_by_side_without_native_code(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is sent."""
    monkeypatch.setattr("shared.ring.native.LIBRARY", None)
    taken = take_upper_bits(torch.arange(3, dtype=torch.int32).view(3, 1) << 16, bits)
    assert taken.is_contiguous()
    assert (subtract_upper_bits(taken, [taken], bits) == 0).all()
