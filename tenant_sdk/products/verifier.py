"""Decides which answers are checked, and by which challenges."""

from __future__ import annotations

from typing import Any

import torch

from shared.errors import VerificationError
from shared.wire.header import member_indices
from shared.wire.messages import GroupInfo
from tenant_sdk.connection.channel import Entropy
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.half_checks import HalfFingerprint, make_half_fingerprint
from tenant_sdk.products.verification import (
    Fingerprint,
    FingerprintRefuted,
    Fingerprints,
    IntegerProduct,
)


class Verifier:
    """Decides what to check, and checks it.

    Args:
        fingerprints: of the executors' weights.
        groups: the manifest's, for messages.
        rate: share of requests to check, more than 0 and at most 1; they are drawn secretly.
        repeat_rate: share of checked requests with half answers that are asked for again with all bits.
        trusted: exact products of weights that the tenant has; None: the session's are used, and checked.
        entropy: secret random bytes.
        parties: the parties that may have been wrong, for messages.
    """

    def __init__(
        self,
        fingerprints: Fingerprints,
        groups: tuple[GroupInfo, ...],
        *,
        rate: float,
        repeat_rate: float = 0.0,
        trusted: IntegerProduct | None = None,
        entropy: Entropy,
        parties: str,
    ) -> None:
        self._fingerprints, self._groups = fingerprints, groups
        self._rate, self._repeat_rate, self._trusted = rate, repeat_rate, trusted
        self._half: dict[ProductKey, HalfFingerprint] = {}
        self._entropy, self._parties = entropy, parties

    def verifying_everything(self) -> Verifier:
        """Returns a verifier like this one that checks every request."""
        return Verifier(
            self._fingerprints,
            self._groups,
            rate=1.0,
            trusted=self._trusted,
            entropy=self._entropy,
            parties=self._parties,
        )

    def fingerprint(self, key: ProductKey, product: IntegerProduct) -> Fingerprint | None:
        """Returns what to check the next request of a kind with, or None if it is not drawn.

        The fingerprint is made either way: executors see when one is, and what comes next.

        Raises:
            VerificationError: the fingerprint that the executors made is wrong.
        """
        known = self._made(key, product)
        return known if self._sampled(self._rate) else None

    def half_fingerprint(
        self, key: ProductKey, product: IntegerProduct, **shape: Any
    ) -> HalfFingerprint | None:
        """Returns what to check the next half answers of a kind with, or None if they are not drawn.

        Args:
            key: with the bits of its answers.
            product: the session's own exact products.
            shape: see ``make_half_fingerprint``.

        Raises:
            VerificationError: a product that it is made of is wrong.
        """
        fingerprint = self._half.get(key)
        if fingerprint is None:

            def checked(key: ProductKey, rows: torch.Tensor) -> torch.Tensor:
                return self._checked(key, rows, product)

            fingerprint = make_half_fingerprint(key, self._trusted or checked, entropy=self._entropy, **shape)
            fingerprint = self._half.setdefault(key, fingerprint)
        return fingerprint if self._sampled(self._rate) else None

    def exact_of_half(self, key: ProductKey, product: IntegerProduct) -> tuple[Fingerprint, bool]:
        """Returns the fingerprint of an exact answer, and whether to ask for one in any case.

        Raises:
            VerificationError: see ``fingerprint``.
        """
        return self._made(key.exact, product), self._sampled(self._repeat_rate)

    def _checked(self, key: ProductKey, rows: torch.Tensor, product: IntegerProduct) -> torch.Tensor:
        fingerprint, answers = self._made(key, product), product(key, rows)
        if not fingerprint.holds(answers, fingerprint.expected(rows)):
            raise self.error(key)
        return answers

    def _made(self, key: ProductKey, product: IntegerProduct) -> Fingerprint:
        try:
            return self._fingerprints.get(key, product)
        except FingerprintRefuted:
            raise self.error(key) from None

    def _sampled(self, rate: float) -> bool:
        """Draws secretly: True with this probability."""
        return rate >= 1 or (rate > 0 and int.from_bytes(self._entropy(4)) < max(1, round(rate * 2**32)))

    def error(self, key: ProductKey) -> VerificationError:
        """Returns the error for a wrong answer to a request of this kind."""
        return VerificationError(
            f"a wrong answer: {self._product(key)} is not what the weights give. {self._parties} computed "
            "it. Nothing of it was used, and this session asks for nothing more. Go on from your last "
            "checkpoint in a new session, with other executors if you can, and tell the operators"
        )

    def recheck_missing(self, key: ProductKey) -> VerificationError:
        """Returns the error for a half answer whose recheck, with all bits, did not come."""
        return VerificationError(
            f"an answer could not be confirmed: {self._product(key)} was asked for again with all bits, and "
            f"did not come. {self._parties} computed it. This is an outage, or hides a wrong answer. "
            "Nothing of it was used, and this session asks for nothing more. Go on from your last checkpoint "
            "in a new session; if this happens often, take other executors"
        )

    def _product(self, key: ProductKey) -> str:
        members = self._groups[key.group].members
        names = ", ".join(members[i].name for i in member_indices(key.member_bits))
        return f"the {key.direction.name.lower()} product of group {key.group} ({names})"
