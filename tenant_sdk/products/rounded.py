"""Checking rounded answers, of which only the upper bits travelled: no equation holds exactly for them.

J secret vectors z_j of signs, with f_j = W z_j, give J sums of every row, ``u . z_j - x . f_j / 2^k``, where u
is the revealed product in units of 2^k. If the answer is right, each is a sum of the row's rounding errors with
random signs, and the sum of the J squares exceeds a limit with a probability below 2^-40. If the row's errors
are longer than some times what honest rounding makes them, the sum exceeds the limit but for a probability of
2^-32: ``docs/explanation/numerics.md`` has the proof and the factor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from shared.ring.mask_stream import MaskStream
from shared.ring.upper_bits import cut_share
from shared.wire.header import EXACT, SEED_BYTES
from tenant_sdk.connection.channel import Entropy
from tenant_sdk.products.forecast import ProductKey
from tenant_sdk.products.verification import IntegerProduct, transposed

CHALLENGES = 64  # J
_REFUSES = 41 * math.log(2)  # honest rows: half of 2^-40, the other half is left for float32's rounding


class RoundedFingerprint(NamedTuple):
    """Secret signs and their products with a weight, of one kind of product.

    Attributes:
        challenges: [P N, J] of -1 and 1, the planes one behind the other.
        factors: [C, J], W z_j in units of ``2^(32 - answer_bits)``.
        limit: of the sum of a row's J squares.
    """

    challenges: torch.Tensor
    factors: torch.Tensor
    limit: float


def draw_signs(entropy: Entropy, rows: int, columns: int) -> torch.Tensor:
    """Secret random signs: int32 [rows, columns]."""
    words = MaskStream(entropy(SEED_BYTES)).draw(rows, -(-columns // 32))
    bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, count=columns)
    return torch.from_numpy(bits).to(torch.int32) * 2 - 1


def limit_of(challenges: torch.Tensor, sources: int) -> float:
    """What the sum of an honest row's J squares exceeds with a probability of at most 2^-41.

    The rounding errors e of a row are sub-Gaussian, so the tail bound for quadratic forms of Hsu, Kakade and
    Zhang (2012, Theorem 1) holds for ``|Z e|^2``.

    Args:
        challenges: Z, transposed: [N, J].
        sources: how many effects are subtracted.
    """
    columns = challenges.double()
    squares = torch.linalg.eigvalsh(columns.T @ columns)
    spread = 2 * math.sqrt(float(squares.square().sum()) * _REFUSES) + 2 * float(squares.max()) * _REFUSES
    return cut_share(sources) * (float(squares.sum()) + spread)


def make_rounded_fingerprint(
    key: ProductKey, product: IntegerProduct, *, planes: int, width: int, sources: int, entropy: Entropy
) -> RoundedFingerprint:
    """The fingerprint of one kind.

    Args:
        key: with the bits of its answers.
        product: exact integer products, checked, and hidden from those who could use the challenges.
        planes: P.
        width: N, columns of the answer in one plane.
        sources: how many effects are subtracted from an answer.
        entropy: secret random bytes.
    """
    signs = draw_signs(entropy, CHALLENGES * planes, width)  # of each plane
    answers = product(transposed(key), signs).view(CHALLENGES, planes, planes, -1)
    factors = answers.diagonal(dim1=1, dim2=2).sum(2)  # each plane's signs times that plane
    # With few bits cut off, float32's own rounding would count.
    dtype = torch.float32 if key.answer_bits == 16 else torch.float64
    challenges = signs.view(CHALLENGES, planes * width).T.to(dtype).contiguous()
    unit = float(1 << EXACT - key.answer_bits)
    return RoundedFingerprint(
        challenges, (factors.T.double() / unit).to(dtype).contiguous(), limit_of(challenges, sources)
    )


def expected_sums(fingerprint: RoundedFingerprint, integers: torch.Tensor) -> torch.Tensor:
    """``x . f_j`` of the integers of rows: float32 [T, C] to [T, J]."""
    return integers.to(fingerprint.factors.dtype) @ fingerprint.factors


def wrong_rows(fingerprint: RoundedFingerprint, products: torch.Tensor, expected: torch.Tensor) -> int:
    """How many rows of products [T, P N], in units, are further from right than rounding is."""
    sums = torch.addmm(expected, products.to(expected.dtype), fingerprint.challenges, beta=-1)
    return int((sums.square_().sum(1) > fingerprint.limit).sum())
