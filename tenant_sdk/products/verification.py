"""Checking that an answer is the product it must be, without computing it (Freivalds 1977).

For a secret random z, ``u . z = x . (W z)`` holds for the right u, the answers of all planes one behind the
other. z is one vector of uniform int32, and the sums are taken modulo 2^64. A wrong answer that is not
noticed has an error d with
``d . z = 0`` modulo 2^64. Its entries are under 2^32 in size; take one that is not zero, 2^k times an odd
number with k < 32, and fix all other entries of z: that entry of z is then determined modulo 2^(64 - k),
so at most one of its 2^32 values fits. Hence a wrong row passes with probability at most 2^-32. The
check is on the unmasked integers, so it covers the provider and the mask sources alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from shared.ring.mask_stream import MaskStream
from shared.wire.header import SEED_BYTES, Direction
from shared.wire.protocol import GroupShape
from tenant_sdk.connection.channel import Entropy
from tenant_sdk.connection.keys import ProductKey

_DIGITS = 4
TRIAL_ROWS = 40  # a falsified fingerprint passes with probability 2^-40

# Kind and int32 rows [n, C] to the integer products [n, P N].
IntegerProduct = Callable[[ProductKey, torch.Tensor], torch.Tensor]


class FingerprintRefuted(Exception):
    """A fingerprint and the products that it is for do not fit each other."""


class Fingerprint(NamedTuple):
    """Secret z and ``W z`` of one kind of product."""

    challenge: torch.Tensor  # int32 [P N], the planes one behind the other
    projection: torch.Tensor  # int64 [C], modulo 2^64

    def expected(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns ``x . (W z)`` of rows, int32 [n, C], modulo 2^64: int64 [n]."""
        return (rows.long() * self.projection).sum(1)

    def holds(self, answers: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether exact answers, int32 [n, P N], are the products whose ``x . (W z)`` are ``expected``."""
        return torch.equal((answers.long() * self.challenge).sum(1), expected)


class Fingerprints(Protocol):
    """Where fingerprints come from."""

    def get(self, key: ProductKey, product: IntegerProduct) -> Fingerprint:
        """Returns the fingerprint of a kind; ``product`` is the session's own, with its masks."""
        ...


def transposed(key: ProductKey) -> ProductKey:
    """Returns the product in the other direction, with which a fingerprint is made."""
    other = Direction.BACKWARD if key.direction == Direction.FORWARD else Direction.FORWARD
    return ProductKey(key.group, other, key.member_bits)


def draw_challenge(entropy: Entropy, planes: int, width: int) -> torch.Tensor:
    """Draws a secret z: uniform int32 [planes, width]."""
    return MaskStream(entropy(SEED_BYTES)).draw(planes, width)


def multiply_challenge(
    challenge: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Computes ``W z`` modulo 2^64: int64 [C] from z [P, N] and the transposed product, [n, N] to [n, P C].

    That product is modulo 2^32, so z is multiplied digit by digit, in base 256. The digits are random, so a
    sum is near 2^7 times the norm of a column, which is far below 2^31. A plane's part of z needs that
    plane's product alone; the others are left out.
    """
    rest, digits = challenge.long(), []
    for _ in range(_DIGITS - 1):
        digit = (rest + 128 & 255) - 128
        digits.append(digit)
        rest = rest - digit >> 8
    rows = torch.stack([*digits, rest]).to(torch.int32)  # the last may be 128
    planes = len(challenge)
    answers = product(rows.view(_DIGITS * planes, -1)).long().view(_DIGITS, planes, planes, -1)
    parts = answers.diagonal(dim1=1, dim2=2).sum(2)
    return sum((parts[i] << 8 * i for i in range(_DIGITS)), torch.zeros_like(parts[0]))


class LiveFingerprints:
    """Makes the fingerprint of a kind at its first request, with the session's products or a checkpoint's.

    Through the session, z travels under one-time masks like any row, so nobody who could use it
    learns it. What is checked then is that the executors go on multiplying with the weights that they
    multiplied z with, and that no one of them deviates alone; that these are the right weights, only
    fingerprints of the tenant's own checkpoint can show.

    Args:
        entropy: secret random bytes.
        product: computes the products; None for the session's own.
    """

    def __init__(
        self, shapes: list[GroupShape], entropy: Entropy, product: IntegerProduct | None = None
    ) -> None:
        self._shapes, self._entropy, self._product = shapes, entropy, product
        self._made: dict[ProductKey, Fingerprint] = {}

    def get(self, key: ProductKey, product: IntegerProduct) -> Fingerprint:
        """See Fingerprints."""
        fingerprint = self._made.get(key)
        if fingerprint is None:
            shape = self._shapes[key.group]
            widths = shape.widths(key.direction, key.member_bits)
            challenge = draw_challenge(self._entropy, shape.planes, widths.answer_columns // shape.planes)
            multiply = self._product or product
            projection = multiply_challenge(challenge, lambda rows: multiply(transposed(key), rows))
            fingerprint = Fingerprint(challenge.view(-1), projection)
            if self._product is None:
                self._try(key, fingerprint, widths.request_columns, multiply)
            fingerprint = self._made.setdefault(key, fingerprint)
        return fingerprint

    def _try(self, key: ProductKey, fingerprint: Fingerprint, columns: int, multiply: IntegerProduct) -> None:
        """Check random rows before any of the tenant's.

        A fingerprint that one executor falsified would fit some rows of the tenant's and not others, and
        so tell that executor about them. It does not fit these: every row finds every falsification with
        probability 1/2 or more, also one of 2^63, which rows of even numbers do not show.
        """
        rows = MaskStream(self._entropy(SEED_BYTES)).draw(TRIAL_ROWS, columns) >> 24
        if not fingerprint.holds(multiply(key, rows), fingerprint.expected(rows)):
            raise FingerprintRefuted
