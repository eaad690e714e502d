"""Checking half answers, of which only the upper bits travelled: no equation holds exactly for them.

J secret vectors z_j of normal numbers, with f_j = W z_j, give J sums of every row, ``u . z_j - x . f_j /
2^k``. There u is the revealed product in units of 2^k. Each sum is ``e . z_j``, where e are the row's
errors. This is a normal number with the standard deviation |e|, whatever the errors look like. So the sum
of the J squares measures |e|. Errors of FACTOR times the bound of honest ones stay below a limit with a
probability below 2^-32: ``docs/explanation/numerics.md``. Honest rounding hardly ever exceeds it, and such
rows are asked for again with all bits, which shows that they are right.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from shared.ring.mask_stream import MaskStream
from shared.ring.upper_bits import truncation_variance
from shared.wire.header import EXACT, SEED_BYTES
from tenant_sdk.connection.channel import Entropy
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.normal import normal_of_uniform
from tenant_sdk.products.verification import IntegerProduct, transposed

CHALLENGES = 32  # J
FACTOR = 5.0
_DEVIATION = 256  # of the challenges, which are integers
_DOUBTS = 10 * math.log(2)  # by a bound, which is far from tight: fewer are asked for again


class HalfFingerprint(NamedTuple):
    """Secret normal numbers and their products with a weight, of one kind of product.

    Attributes:
        challenges: [P N, J], the planes one behind the other.
        projections: [C, J], W z_j in units of ``2^(32 - answer_bits)``.
        limit: of the sum of a row's J squares.
    """

    challenges: torch.Tensor
    projections: torch.Tensor
    limit: float


def draw_normal(entropy: Entropy, rows: int, columns: int, deviation: float) -> torch.Tensor:
    """Draws secret normal numbers, rounded: int32 [rows, columns]."""
    words = MaskStream(entropy(SEED_BYTES)).draw(2 * rows, columns).double()
    return torch.round(deviation * normal_of_uniform((words + 2**31 + 0.5) / 2**32)).to(torch.int32)


def limit_of(challenges: torch.Tensor, sources: int) -> float:
    """Returns what the sum of an honest row's J squares exceeds with a probability of at most 2^-10.

    If the rounding errors e of a row are independent, they are sub-Gaussian, and the tail bound for quadratic
    forms of Hsu, Kakade and Zhang (2012, Theorem 1) holds for ``|Z e|^2``. In a row that is longer than the
    request's they are not quite independent, and with a weight of low rank not at all.

    Args:
        challenges: Z, transposed: [N, J].
        sources: how many effects are subtracted.
    """
    columns = challenges.double()
    squares = torch.linalg.eigvalsh(columns.T @ columns)
    spread = 2 * math.sqrt(float(squares.square().sum()) * _DOUBTS) + 2 * float(squares.max()) * _DOUBTS
    return truncation_variance(sources) * (float(squares.sum()) + spread)


def make_half_fingerprint(
    key: ProductKey,
    product: IntegerProduct,
    *,
    planes: int,
    width: int,
    bound: int,
    sources: int,
    entropy: Entropy,
) -> HalfFingerprint:
    """Makes the fingerprint of one kind of product.

    Args:
        key: with the bits of its answers.
        product: exact integer products, checked, and hidden from those who could use the challenges.
        planes: P.
        width: N, columns of the answer in one plane.
        bound: largest squared norm of a column that a challenge is multiplied with.
        sources: how many effects are subtracted from an answer.
        entropy: secret random bytes.
    """
    # Eight standard deviations of such a product are below 2^31.
    deviation = min(_DEVIATION, max(1.0, 2**28 / math.sqrt(max(bound, 1))))
    drawn = draw_normal(entropy, CHALLENGES * planes, width, deviation)
    answers = product(transposed(key), drawn).view(CHALLENGES, planes, planes, -1)
    projections = answers.diagonal(dim1=1, dim2=2).sum(2)  # each plane's challenges times that plane
    # With few bits cut off, float32's own rounding would count.
    dtype = torch.float32 if key.answer_bits == 16 else torch.float64
    challenges = drawn.view(CHALLENGES, planes * width).T.to(dtype).contiguous()
    quantum = float(1 << EXACT - key.answer_bits)
    return HalfFingerprint(
        challenges, (projections.T.double() / quantum).to(dtype).contiguous(), limit_of(challenges, sources)
    )


def expected_sums(fingerprint: HalfFingerprint, integers: torch.Tensor) -> torch.Tensor:
    """Returns ``x . f_j`` for the integers of rows: float32 [T, C] to [T, J]."""
    with torch.autocast("cpu", enabled=False):  # a doubt is not to depend on the size of products
        return integers.to(fingerprint.projections.dtype) @ fingerprint.projections


def wrong_rows(fingerprint: HalfFingerprint, products: torch.Tensor, expected: torch.Tensor) -> int:
    """Returns how many rows of products [T, P N], in units, are further from right than rounding is."""
    with torch.autocast("cpu", enabled=False):
        sums = torch.addmm(expected, products.to(expected.dtype), fingerprint.challenges, beta=-1)
    return int((~(sums.square_().sum(1) <= fingerprint.limit)).sum())  # NaN is wrong, too
