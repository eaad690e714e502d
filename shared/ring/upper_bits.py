"""Answers of which only the upper bits travel, and the numbers that remain of them.

Truncation commutes with an additive mask but for one unit. With y = x W, the effect m of a mask and A = y + m
modulo 2^32, ``(A >> k) - (m >> k)`` is ``floor(y / 2^k)`` or one more, modulo 2^(32 - k). The lower bits of m
decide which. They are uniform, so this rounds y / 2^k stochastically and without bias:
``docs/explanation/numerics.md``.
"""

from __future__ import annotations

import torch

from shared.ring import native as ring_native
from shared.wire.header import EXACT, TRUNCATED_DTYPES


def take_upper_bits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the upper bits of integers, packed.

    Args:
        numbers: int32 [T, N], on any device, with neighbours side by side.
        bits: one of ``shared.wire.header.ANSWER_BITS``.

    Returns:
        For 16 bits int16 [T, N], for 24 uint8 [T, 3 N], little-endian. For 32 the numbers themselves.
    """
    if bits == EXACT:
        return numbers
    if numbers.device.type == "cpu" and ring_native.LIBRARY is not None:
        return ring_native.take_upper_bits(numbers, bits)
    if bits == 16:
        return (numbers >> 16).to(torch.int16)
    parts = numbers.contiguous().view(torch.uint8).view(*numbers.shape, 4)
    return parts[:, :, 1:].reshape(len(numbers), -1).contiguous()  # of a lone column it would be a view


def widen_upper_bits(upper: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns integers with these upper bits, int32 [T, N]; the others are 0."""
    if bits == EXACT:
        return upper
    if bits == 16:
        return upper.to(torch.int32) << 16
    rows, width = len(upper), upper.shape[1] // 3
    parts = torch.zeros((rows, width, 4), dtype=torch.uint8)
    parts[:, :, 1:] = upper.view(rows, width, 3)
    return parts.view(torch.int32).view(rows, width)


def subtract_upper_bits(answers: torch.Tensor, effects: list[torch.Tensor], bits: int) -> torch.Tensor:
    """Computes products from upper bits of answers and effects, in multiples of ``2^(32 - bits)``, unbiased.

    Each number is within one unit of the product, and within one more for each effect after the first.

    Args:
        answers: contiguous, from ``take_upper_bits``, on the CPU: of ``y + sum of effects``.
        effects: of each mask source, contiguous, from ``take_upper_bits``; none: the rows were not masked.
        bits: 16 or 24.

    Returns:
        float32 [T, N].

    Raises:
        ValueError: tensors of other dtypes or shapes.
    """
    for each in (answers, *effects):
        if each.shape != answers.shape or each.dtype != TRUNCATED_DTYPES[bits] or not each.is_contiguous():
            raise ValueError(f"contiguous {TRUNCATED_DTYPES[bits]} of one shape are wanted")
    # What is cut off is uniform, half a unit less 2^-33 of an answer and of each effect.
    unit = 1 << EXACT - bits
    offset = (1 - len(effects)) / 2 * (unit - 1) / unit
    if bits == 16 and ring_native.LIBRARY is not None:
        return ring_native.subtract_halves(answers, effects, offset)
    rest = widen_upper_bits(answers, bits)
    for effect in effects:
        rest = rest - widen_upper_bits(effect, bits)
    return (rest >> EXACT - bits).float().add_(offset)


def truncation_variance(sources: int) -> float:
    """Returns a variance that bounds what ``subtract_upper_bits`` adds to a number, in squared units.

    With one effect, a number p of [0, 1) becomes 0 or 1. The variance is at most 1/4, and by Hoeffding's
    lemma the error is sub-Gaussian with 1/4, whatever p is. Each further effect adds what is uniform on a
    unit, whose variance is 1/12.
    """
    return 1 / 4 + max(0, sources - 1) / 12
