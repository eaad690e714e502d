"""Checking that an answer is the product it must be, without computing it (Freivalds 1977).

For a secret random z, ``u . z = x . (W z)`` holds for the right u; a wrong u passes only if its error
is orthogonal to z. Here z is four vectors of int8 over both planes, so a wrong row passes with
probability at most 2^-32, whatever its error is: fix all entries of z but one where the error is
not zero, and at most one of that entry's 256 values fits. The check is on the unmasked integers, so
it covers the provider and the mask sources alike.

The integers are multiplied as float64, exactly: every partial sum stays below 2^53.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from shared.errors import VerificationError
from shared.header import SEED_BYTES, Direction, member_indices
from shared.masks import MaskStream
from shared.messages import GroupInfo
from shared.protocol import GroupShape
from shared.ring import PLANES
from tenant_sdk.channel import Entropy
from tenant_sdk.forecast import Kind

CHALLENGES = 4  # vectors of int8: an error passes one with probability 2^-8
_EXACT_COLUMNS = 1 << 14  # 2^31 * 2^7 * 2^14 = 2^52
_EXACT = 2.0**52

# Kind and int32 rows [n, C] to the integer products [n, 2 N].
IntegerProduct = Callable[[Kind, torch.Tensor], torch.Tensor]


class Fingerprint(NamedTuple):
    """Secret z and ``W z`` of one kind of product."""

    challenge: torch.Tensor  # float64 [2 N, 4], integers of int8
    factor: torch.Tensor  # float64 [C, 4], integers


class Fingerprints(Protocol):
    """Where fingerprints come from."""

    def get(self, kind: Kind, product: IntegerProduct) -> Fingerprint:
        """The fingerprint of a kind; ``product`` is the session's own, with its masks."""
        ...


def transposed(kind: Kind) -> Kind:
    """The product in the other direction, with which a fingerprint is made."""
    other = Direction.BACKWARD if kind.direction == Direction.FORWARD else Direction.FORWARD
    return Kind(kind.group, other, kind.members)


def draw_challenge(entropy: Entropy, width: int) -> torch.Tensor:
    """int8 values as int32 [4, 2, width]: four secret vectors over both planes."""
    words = MaskStream(entropy(SEED_BYTES)).draw(1, CHALLENGES * PLANES * width // 4 + 1)
    values = words.view(torch.int8).view(-1)[: CHALLENGES * PLANES * width]
    return values.view(CHALLENGES, PLANES, width).to(torch.int32)


def multiply_challenge(
    challenge: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """``W z``: int64 [4, C] from the challenge [4, 2, N] and the transposed product [n, N] -> [n, 2 C].

    Each plane's part of z wants that plane's product alone; the others are left.
    """
    rows = challenge.reshape(CHALLENGES * PLANES, -1).contiguous()
    answers = product(rows).long().view(CHALLENGES, PLANES, PLANES, -1)
    return answers[:, 0, 0] + answers[:, 1, 1]


def fingerprint(challenge: torch.Tensor, factor: torch.Tensor) -> Fingerprint:
    """Laid out for products: from [4, 2, N] and [4, C]."""
    return Fingerprint(
        challenge.reshape(CHALLENGES, -1).T.double().contiguous(), factor.T.double().contiguous()
    )


class LiveFingerprints:
    """Made when a kind is first asked for, through products of the session itself or of a checkpoint.

    Through the session, z travels under one-time masks like any row, so nobody who could use it
    learns it. What is checked then is that the executors go on multiplying with the weights that they
    multiplied z with, and that no one of them deviates alone; that these are the right weights, only
    fingerprints of the tenant's own checkpoint can show.

    Args:
        entropy: secret random bytes.
        product: None for the session's own.
    """

    def __init__(
        self, shapes: list[GroupShape], entropy: Entropy, product: IntegerProduct | None = None
    ) -> None:
        self._shapes, self._entropy, self._product = shapes, entropy, product
        self._made: dict[Kind, Fingerprint] = {}

    def get(self, kind: Kind, product: IntegerProduct) -> Fingerprint:
        """See Fingerprints."""
        made = self._made.get(kind)
        if made is None:
            plan = self._shapes[kind.group].plan(kind.direction, kind.members)
            challenge = draw_challenge(self._entropy, plan.answer_columns // PLANES)
            multiply = self._product or product
            factor = multiply_challenge(challenge, lambda rows: multiply(transposed(kind), rows))
            made = self._made.setdefault(kind, fingerprint(challenge, factor))
        return made


class Verifier:
    """Decides what to check, and checks it.

    Args:
        fingerprints: of the executors' weights.
        groups: for messages.
        rate: of requests, from 0 to 1; which ones is drawn secretly.
        entropy: secret random bytes.
        parties: who may have been wrong, for messages.
    """

    def __init__(
        self,
        fingerprints: Fingerprints,
        groups: tuple[GroupInfo, ...],
        *,
        rate: float,
        entropy: Entropy,
        parties: str,
    ) -> None:
        self._fingerprints, self._groups = fingerprints, groups
        self._threshold = round(rate * 2**32)
        self._entropy, self._parties = entropy, parties

    def check(self, kind: Kind, product: IntegerProduct) -> Check | None:
        """The check of one request, or None if it is not drawn."""
        if self._threshold < 1 << 32 and int.from_bytes(self._entropy(4)) >= self._threshold:
            return None
        return Check(self._fingerprints.get(kind, product), lambda: self._error(kind))

    def _error(self, kind: Kind) -> VerificationError:
        members = self._groups[kind.group].members
        names = ", ".join(members[i].name for i in member_indices(kind.members))
        return VerificationError(
            f"a wrong answer: the {kind.direction.name.lower()} product of group {kind.group} ({names}) is "
            f"not what the weights give. {self._parties} computed it. Nothing of it was used, and this "
            "session asks for nothing more. Go on from your last checkpoint in a new session, with other "
            "executors if you can, and tell the operators"
        )


class Check:
    """One request's rows and answers, chunk by chunk in the same order."""

    def __init__(self, print_: Fingerprint, error: Callable[[], VerificationError]) -> None:
        self._fingerprint, self._error = print_, error
        self._expected: list[torch.Tensor] = []
        self._at = 0

    def rows(self, rows: torch.Tensor) -> None:
        """The next rows as they are multiplied, before the mask: int32 [n, C]."""
        self._expected.append(rows.double() @ self._fingerprint.factor)

    def answers(self, answers: torch.Tensor) -> None:
        """The next answers without the masks' effects: int32 [n, 2 N].

        Raises:
            VerificationError: one is wrong.
        """
        expected = self._expected[self._at]
        self._at += 1
        challenge = self._fingerprint.challenge
        columns = answers.shape[1]
        if columns <= _EXACT_COLUMNS:
            right = torch.equal(answers.double() @ challenge, expected)
        else:
            total = torch.zeros(expected.shape, dtype=torch.int64)
            for at in range(0, columns, _EXACT_COLUMNS):
                part = slice(at, at + _EXACT_COLUMNS)
                total += (answers[:, part].double() @ challenge[part]).long()
            right = torch.equal(total, expected.long())
        if not right:
            raise self._error()
