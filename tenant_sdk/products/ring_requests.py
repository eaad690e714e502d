"""One product on the ring: its rows hidden, and its answers revealed and checked.

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
    """Rows that are hidden together, with one mask, from the first on."""

    first: int
    mask: Mask
    exponents: torch.Tensor
    expected: torch.Tensor | None  # by the exact check


class ExactRequest:
    """A product whose answers have all bits.

    Args:
        key: of the product.
        ring: the group's.
        fingerprint: None: the answers are not checked.
    """

    owes_confirmation = False  # whether an answer counts only once its confirmation is here
    doubted = False  # whether an answer seemed wrong, although it may be right

    def __init__(self, key: ProductKey, ring: RingGroup, fingerprint: Fingerprint | None) -> None:
        self.key, self.seconds_waiting = key, 0.0  # for effects
        self._ring, self._fingerprint = ring, fingerprint
        self._hidden: deque[_Piece] = deque()
        forward = key.direction == Direction.FORWARD
        # Forward, scales turn the answers into floats; backward, they go into the rows.
        self._row_scales = None if forward else ring.scales_of(key.member_bits)
        self._answer_scales = ring.scales_of(key.member_bits) if forward else None

    @property
    def verified(self) -> bool:
        """Whether the answers are checked."""
        return self._fingerprint is not None

    def hide(self, rows: list[torch.Tensor], first: int, mask: Mask) -> torch.Tensor:
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
        request = mask.numbers()
        self._hidden.append(_Piece(first, mask, *self._add(rows, request)))
        return request

    def _add(
        self,
        rows: list[torch.Tensor],
        request: torch.Tensor,
        units: int = 0,
        integers: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``shared.ring.rows.quantize_and_mask``; ``units`` is what rounding may add to a product."""
        hidden = quantize_and_mask(
            [block.contiguous() for block in rows],
            self._row_scales,
            self._ring.max_norm(self.key.direction, units),
            request,
            self._fingerprint.factor if self._fingerprint else None,
            integers,
        )
        if hidden is not None:
            return hidden
        if not all(block.isfinite().all() for block in rows):
            raise NonFiniteError(
                "the rows hold NaN or infinity; nothing was sent. Look for what diverged before this layer"
            )
        raise NonFiniteError(
            "the rows are too large for float32 once they are scaled; nothing was sent. Lower the "
            "learning rate or the loss scale"
        )

    def reveal(self, answer: torch.Tensor, results: list[torch.Tensor]) -> bool:
        """Write the next piece's results; False if its answer is wrong.

        Args:
            answer: as ``take_upper_bits`` makes it; changed.
            results: float32 [all rows, O] each, to write into.

        Raises:
            SymbiosisError: from a mask source.
        """
        piece = self._hidden.popleft()
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

    def confirm(self) -> bool:
        """Have answers confirmed where that is necessary; False if one is wrong.

        Call it once all pieces are revealed: a confirmed piece would tell a liar what the others must be.

        Raises:
            SymbiosisError: the confirmation did not come.
        """
        return True


class HalfChecks(NamedTuple):
    """What half answers are checked with.

    Attributes:
        half: each answer.
        exact: an answer that is asked for again, with all bits.
        repeats: whether answers are asked for again even if they seem right.
    """

    half: HalfFingerprint
    exact: Fingerprint
    repeats: bool


class _Revealed(NamedTuple):
    """What is compared with a confirmation."""

    request: torch.Tensor
    answer: torch.Tensor
    mask: Mask
    expected: torch.Tensor | None


class HalfRequest(ExactRequest):
    """A product of whose answers the upper bits alone travel.

    An answer that seems wrong is asked for again with all bits, which decides.

    Args:
        key: of the product.
        ring: the group's.
        sources: how many effects are subtracted from an answer.
        checks: None: the answers are not checked.
        exact_product: of a request's integers, int32 [T, C]: all bits of its answer.
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
        self._units = max(1, sources) << EXACT - key.answer_bits
        self._checks, self._exact_product = checks, exact_product
        self._sums: deque[tuple[torch.Tensor, torch.Tensor]] = deque()  # requests, and what the check expects
        self._unconfirmed: list[_Revealed] = []

    def hide(self, rows: list[torch.Tensor], first: int, mask: Mask) -> torch.Tensor:
        """See ExactRequest."""
        request = mask.numbers()
        integers = torch.empty(request.shape) if self._checks else None
        self._hidden.append(_Piece(first, mask, *self._add(rows, request, self._units, integers)))
        if self._checks and integers is not None:
            self._sums.append((request, expected_sums(self._checks.half, integers)))
        return request

    def reveal(self, answer: torch.Tensor, results: list[torch.Tensor]) -> bool:
        """See ExactRequest; an answer that seems wrong waits for ``confirm``."""
        piece, doubted = self._hidden.popleft(), False
        request, sums = self._sums.popleft() if self._checks else (answer, None)
        exponents = piece.exponents + 8 * (EXACT - self.key.answer_bits)
        step = max(1, CHUNK_ELEMENTS // answer.shape[1])
        for part, effects in self._effects(piece.mask):
            for start in range(part.start, part.stop, step):
                rows = slice(start, min(start + step, part.stop))
                cut_effects = [effect[start - part.start :][:step] for effect in effects]
                products = subtract_upper_bits(answer[rows], cut_effects, self.key.answer_bits)
                if self._checks and sums is not None and wrong_rows(self._checks.half, products, sums[rows]):
                    # At once: the next effects may not come.
                    doubted = self.doubted = self.owes_confirmation = True
                write_products(
                    products, exponents[rows], self._answer_scales, _rows_of(results, piece.first, rows)
                )
        if self._checks and (doubted or self._checks.repeats):
            self._unconfirmed.append(_Revealed(request, answer, piece.mask, piece.expected))
        return True

    def confirm(self) -> bool:
        """See ExactRequest."""
        while self._unconfirmed:
            self.owes_confirmation = True
            if not self._is_confirmed(self._unconfirmed.pop(0)):
                return False
        return True

    def _is_confirmed(self, revealed: _Revealed) -> bool:
        """Ask for an answer and its effects again, with all bits, and compare all that came."""
        whole = self._exact_product(revealed.request)
        effects, bits = revealed.mask.exact_effects(), self.key.answer_bits
        same = torch.equal(take_upper_bits(whole, bits), revealed.answer)
        for part, cut_effects in revealed.mask.effects():
            for effect, again in zip(cut_effects, effects, strict=True):
                same = same and torch.equal(take_upper_bits(again[part], bits), effect)
        for effect in effects:
            whole.sub_(effect)
        if self._checks is None or revealed.expected is None:
            raise RuntimeError("an answer is confirmed that nothing checks")
        sums = (whole.long() * self._checks.exact.challenge).sum(1)
        return same and torch.equal(sums, revealed.expected)


def _rows_of(results: list[torch.Tensor], first: int, part: slice) -> list[torch.Tensor]:
    return [result[first + part.start : first + part.stop] for result in results]
