"""One product on the ring: its rows are masked, and its answers are unmasked and checked.

Answers have all bits (``ExactRequest``) or the upper ones alone (``HalfRequest``). Each kind has its check.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from shared.errors import NonFiniteError
from shared.ring.rows import CHUNK_ELEMENTS, quantize_and_mask, unmask_and_dequantize, write_products
from shared.ring.upper_bits import subtract_upper_bits, take_upper_bits
from shared.wire.header import EXACT, Direction
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.half_checks import HalfFingerprint, expected_sums, wrong_rows
from tenant_sdk.products.masks import Mask
from tenant_sdk.products.ring_group import RingGroup
from tenant_sdk.products.verification import Fingerprint


class _Piece(NamedTuple):
    """Rows that are masked together, with one mask, from the first on."""

    first: int
    mask: Mask
    exponents: torch.Tensor
    expected: torch.Tensor | None  # by the exact check


class ExactRequest:
    """A product whose answers have all bits.

    Args:
        key: the kind of product.
        ring: the group's.
        fingerprint: None: the answers are not checked.
    """

    recheck_pending = False  # whether the answers count only once a second, exact request has confirmed them
    suspect = False  # whether an answer seemed wrong, although it may be right

    def __init__(self, key: ProductKey, ring: RingGroup, fingerprint: Fingerprint | None) -> None:
        self.key, self.seconds_waiting = key, 0.0  # for effects
        self._ring, self._fingerprint = ring, fingerprint
        self._masked: deque[_Piece] = deque()
        forward = key.direction == Direction.FORWARD
        # Forward, scales turn the answers into floats; backward, they go into the rows.
        self._row_scales = None if forward else ring.scales_of(key.member_bits)
        self._answer_scales = ring.scales_of(key.member_bits) if forward else None

    @property
    def verified(self) -> bool:
        """Whether the answers are checked."""
        return self._fingerprint is not None

    def mask_rows(self, rows: list[torch.Tensor], first: int, mask: Mask) -> torch.Tensor:
        """Add the next piece's rows to its mask.

        Args:
            rows: float32 [T, W] each, side by side one row.
            first: index of the piece's first row in the request.
            mask: of T rows.

        Returns:
            int32 [T, C], to be sent.

        Raises:
            NonFiniteError: rows that the ring cannot hold.
        """
        request = mask.take_values()
        self._masked.append(_Piece(first, mask, *self._add(rows, request)))
        return request

    def _add(
        self,
        rows: list[torch.Tensor],
        request: torch.Tensor,
        rounding_error: int = 0,
        integers: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``quantize_and_mask``. Rounding of answers adds at most ``rounding_error`` to a product."""
        added = quantize_and_mask(
            [tensor.contiguous() for tensor in rows],
            self._row_scales,
            self._ring.max_norm(self.key.direction, rounding_error),
            request,
            self._fingerprint.projection if self._fingerprint else None,
            integers,
        )
        if added is not None:
            return added
        if not all(tensor.isfinite().all() for tensor in rows):
            raise NonFiniteError(
                "the rows hold NaN or infinity; nothing was sent. Look for what diverged before this layer"
            )
        raise NonFiniteError(
            "the rows are too large for float32 once they are scaled; nothing was sent. Lower the "
            "learning rate or the loss scale"
        )

    def unmask(self, answer: torch.Tensor, results: list[torch.Tensor]) -> bool:
        """Write the next piece's results; False if its answer is wrong.

        Args:
            answer: as ``take_upper_bits`` makes it; changed.
            results: float32 [all rows, O] each, to write into.

        Raises:
            SymbiosisError: from a mask source.
        """
        piece = self._masked.popleft()
        for part, effects in self._effects(piece.mask):
            wrong = unmask_and_dequantize(
                answer[part],
                effects,
                piece.exponents[part],
                self._answer_scales,
                _rows_of(results, piece.first, part),
                self._fingerprint.challenge if self._fingerprint else None,
                None if piece.expected is None else piece.expected[part],
            )
            if wrong:
                return False
        return True

    def _effects(self, mask: Mask) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        effects = mask.effects()
        while True:
            started = time.perf_counter()
            effect = next(effects, None)
            self.seconds_waiting += time.perf_counter() - started
            if effect is None:
                return
            yield effect

    def recheck(self) -> bool:
        """Ask for answers again, with all bits, where that is necessary; False if one is wrong.

        Call it once all pieces are unmasked: a rechecked piece would tell a liar what the others must be.

        Raises:
            SymbiosisError: an exact answer did not come.
        """
        return True


class HalfChecks(NamedTuple):
    """The fingerprints that half answers are checked with.

    Attributes:
        half: checks each answer.
        exact: checks an answer that is asked for again, with all bits.
        repeats: whether answers are asked for again even if they seem right.
    """

    half: HalfFingerprint
    exact: Fingerprint
    repeats: bool


class _Unmasked(NamedTuple):
    """What is compared with an exact answer."""

    request: torch.Tensor
    answer: torch.Tensor
    mask: Mask
    expected: torch.Tensor | None


class HalfRequest(ExactRequest):
    """A product of whose answers the upper bits alone travel.

    An answer that seems wrong is asked for again with all bits, which decides.

    Args:
        key: the kind of product.
        ring: the group's.
        sources: how many effects are subtracted from an answer.
        checks: None: the answers are not checked.
        exact_product: returns all bits of the answer to a request's integers, int32 [T, C].
    """

    def __init__(
        self,
        key: ProductKey,
        ring: RingGroup,
        sources: int,
        checks: HalfChecks | None,
        exact_product: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(key, ring, checks.exact if checks else None)
        self._rounding_error = max(1, sources) << EXACT - key.answer_bits
        self._checks, self._exact_product = checks, exact_product
        self._sums: deque[tuple[torch.Tensor, torch.Tensor]] = deque()  # requests, and what the check expects
        self._to_recheck: list[_Unmasked] = []

    def mask_rows(self, rows: list[torch.Tensor], first: int, mask: Mask) -> torch.Tensor:
        """See ExactRequest."""
        request = mask.take_values()
        integers = torch.empty(request.shape) if self._checks else None
        self._masked.append(_Piece(first, mask, *self._add(rows, request, self._rounding_error, integers)))
        if self._checks and integers is not None:
            self._sums.append((request, expected_sums(self._checks.half, integers)))
        return request

    def unmask(self, answer: torch.Tensor, results: list[torch.Tensor]) -> bool:
        """See ExactRequest; an answer that seems wrong waits for ``recheck``."""
        piece, suspect = self._masked.popleft(), False
        request, sums = self._sums.popleft() if self._checks else (answer, None)
        exponents = piece.exponents + 8 * (EXACT - self.key.answer_bits)
        step = max(1, CHUNK_ELEMENTS // answer.shape[1])
        for part, effects in self._effects(piece.mask):
            for start in range(part.start, part.stop, step):
                rows = slice(start, min(start + step, part.stop))
                truncated_effects = [effect[start - part.start :][:step] for effect in effects]
                products = subtract_upper_bits(answer[rows], truncated_effects, self.key.answer_bits)
                if self._checks and sums is not None and wrong_rows(self._checks.half, products, sums[rows]):
                    # At once: the next effects may not come.
                    suspect = self.suspect = self.recheck_pending = True
                write_products(
                    products, exponents[rows], self._answer_scales, _rows_of(results, piece.first, rows)
                )
        if self._checks and (suspect or self._checks.repeats):
            self._to_recheck.append(_Unmasked(request, answer, piece.mask, piece.expected))
        return True

    def recheck(self) -> bool:
        """See ExactRequest."""
        while self._to_recheck:
            self.recheck_pending = True
            if not self._recheck_holds(self._to_recheck.pop(0)):
                return False
        return True

    def _recheck_holds(self, unmasked: _Unmasked) -> bool:
        """Ask for an answer and its effects again, with all bits, and compare all that came."""
        whole = self._exact_product(unmasked.request)
        effects, bits = unmasked.mask.exact_effects(), self.key.answer_bits
        same = torch.equal(take_upper_bits(whole, bits), unmasked.answer)
        for part, truncated_effects in unmasked.mask.effects():
            for effect, again in zip(truncated_effects, effects, strict=True):
                same = same and torch.equal(take_upper_bits(again[part], bits), effect)
        for effect in effects:
            whole.sub_(effect)
        if self._checks is None or unmasked.expected is None:
            raise RuntimeError("an answer is rechecked that nothing checks")
        return same and self._checks.exact.holds(whole, unmasked.expected)


def _rows_of(results: list[torch.Tensor], first: int, part: slice) -> list[torch.Tensor]:
    return [result[first + part.start : first + part.stop] for result in results]
