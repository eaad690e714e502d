"""Products on the ring: fixed point, a mask, the provider's answer, the check, and floats again.

Answers have all bits, or the upper ones alone (``shared.ring.upper_bits``); each kind has its check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple, NoReturn

import torch

from shared.errors import ModelMismatch, NonFiniteError, SymbiosisError, VerificationError
from shared.forks import ForkGuard
from shared.ring.fixed_point import LIMIT, Bounds, max_row_norm
from shared.ring.rows import (
    CHUNK_ELEMENTS,
    all_finite_below,
    quantize_and_mask,
    unmask_and_dequantize,
    write_products,
)
from shared.ring.upper_bits import subtract_upper_bits, take_upper_bits
from shared.wire.header import EXACT, Direction, Operation, RequestClass, member_indices
from shared.wire.messages import GroupInfo
from shared.wire.protocol import RequestWidths
from tenant_sdk.connection.channel import copy_error
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.remote import PendingProduct, RemoteExecutor, check_shapes
from tenant_sdk.products.answer_bits import AnswerBits
from tenant_sdk.products.half_checks import HalfFingerprint, expected_sums, wrong_rows
from tenant_sdk.products.masks import Mask, MaskGenerator
from tenant_sdk.products.verification import Fingerprint, transposed
from tenant_sdk.products.verifier import Verifier


class RingGroup:
    """What turns a group's floats into integers and back.

    Args:
        info: from the manifest, with its bounds.
        scales: float32 [O] of all members.

    Raises:
        ModelMismatch: scales or bounds that cannot be.
    """

    def __init__(self, info: GroupInfo, scales: torch.Tensor) -> None:
        if not scales.isfinite().all() or (scales < 0).any():
            raise ModelMismatch("the executor's scales hold NaN, infinity or negative numbers")
        widths = [member.outputs for member in info.members]
        if info.bounds is None:
            raise ModelMismatch("the executor gives no bounds for a group of the ring")
        limit = Bounds(*info.bounds)
        self._ends = {
            Direction.FORWARD: (limit.forward, info.inputs),
            Direction.BACKWARD: (limit.backward, sum(widths)),
        }
        self._norms: dict[tuple[Direction, int], float] = {}
        for direction in self._ends:
            self.max_norm(direction)
        # What is smaller than this in size can be scaled, whatever else is in its row.
        self.ordinary = 2.0**100 / max(1.0, float(scales.max()))
        self._scales = scales.split(widths)
        self._chosen: dict[int, torch.Tensor] = {}

    def max_norm(self, direction: Direction, units: int = 0) -> float:
        """Of rows, see ``max_row_norm``; what rounding may add to a product is ``units``.

        Raises:
            ModelMismatch: no row fits.
        """
        norm = self._norms.get((direction, units))
        if norm is None:
            try:
                norm = self._norms[direction, units] = max_row_norm(*self._ends[direction], LIMIT - units)
            except ValueError as error:
                raise ModelMismatch(f"the executor's bounds are impossible: {error}") from error
        return norm

    def scales_of(self, member_bits: int) -> torch.Tensor:
        """Of some members, one behind the other."""
        chosen = self._chosen.get(member_bits)
        if chosen is None:
            chosen = torch.cat([self._scales[i] for i in member_indices(member_bits)])
            self._chosen[member_bits] = chosen
        return chosen


class _Check(NamedTuple):
    """What a request is checked with; None: not at all.

    A half answer is checked with the fingerprint of half answers. If it seems wrong, or if ``repeats``, it is
    asked for again and checked with the exact one.
    """

    exact: Fingerprint | None
    half: HalfFingerprint | None = None
    repeats: bool = False


class _Piece(NamedTuple):
    """Rows of a request that are hidden together."""

    rows: slice
    mask: Mask
    exponents: torch.Tensor
    expected: torch.Tensor | None  # by the exact check
    sums: torch.Tensor | None  # expected by the check of half answers
    sent: torch.Tensor | None  # the request, for answers that may be asked for once more


class RingProducts:
    """Products on a ring executor; which privacy mode it is, is in the masks.

    Args:
        remote: the provider.
        masks: what hides the rows.
        verifier: None: answers are not checked.
        scales: of a group, [O], once they are known to be the right ones.
        unpredictable: groups that are asked for in no order that the last pass told.
        answers: ``exact``, ``half`` or ``auto``.
    """

    def __init__(
        self,
        remote: RemoteExecutor,
        masks: MaskGenerator,
        verifier: Verifier | None,
        scales: Callable[[int], torch.Tensor],
        unpredictable: Collection[int] = (),
        answers: str = "exact",
    ) -> None:
        self._answer_bits = AnswerBits(answers, remote.manifest.numerics)
        self._remote, self._masks, self._verifier, self._scales = remote, masks, verifier, scales
        self._unpredictable = unpredictable
        self._groups: dict[int, RingGroup] = {}
        self._exact_only = set[tuple[int, Direction, int]]()  # kinds of which a right answer seemed wrong
        self._failed: VerificationError | None = None
        self._fork_guard = ForkGuard()

    def verifying_everything(self) -> RingProducts:
        """The same executor and masks, with exact answers, of which all are checked if any are."""
        verifier = self._verifier.verifying_everything() if self._verifier else None
        return RingProducts(self._remote, self._masks, verifier, self._scales, self._unpredictable)

    def submit(
        self,
        group: int,
        direction: Direction,
        member_bits: int,
        rows: list[torch.Tensor],
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> PendingProduct:
        """See ``tenant_sdk.products.products.PrivacyMode``.

        Raises:
            VerificationError: a wrong answer, now or earlier in this session.
        """
        self._fork_guard.check()  # in a forked child locks may be held for ever
        if self._failed is not None:
            raise copy_error(self._failed)
        key = ProductKey(group, direction, member_bits, self._answer_bits.choose(request_class))
        if key.product in self._exact_only:
            key = key.exact
        check_shapes(rows, self._widths(transposed(key)))
        check, count = self._check(key), rows[0].shape[0]
        hidden: list[_Piece] = []
        spent = 0.0

        def hide_piece(piece: slice) -> list[torch.Tensor]:
            nonlocal spent
            started = time.perf_counter()
            mask = self._masks.take(key, piece.stop - piece.start, request_class=request_class)
            request = mask.numbers()
            hidden.append(
                self._quantize_and_mask(key, piece, [block[piece] for block in rows], mask, request, check)
            )
            spent += time.perf_counter() - started
            return [request]

        pieces = self._remote.pieces(key, count)
        started = time.perf_counter()
        ready: list[list[torch.Tensor]] = []
        if len(pieces) > 1 and not all(
            all_finite_below(block, self._group(group).ordinary) for block in rows
        ):
            ready = [
                hide_piece(piece) for piece in pieces
            ]  # all, or one that cannot be sent might follow others
        next_piece = (lambda _: ready.pop(0)) if ready else hide_piece
        sent = self._remote.submit_pieces(Operation.PRODUCT, key, pieces, next_piece, request_class)
        if group not in self._unpredictable:
            self._masks.note_request(key, count)

        def finish() -> list[torch.Tensor]:
            results = self._finish(key, hidden, sent, check, spent)
            if self._answer_bits.measures:
                self._note_answer(key, count, request_class, time.perf_counter() - started)
            return results

        return PendingProduct(finish)

    def _note_answer(self, key: ProductKey, rows: int, request_class: RequestClass, seconds: float) -> None:
        size = rows * self._plan(key).answer_columns * key.answer_bits // 8
        self._answer_bits.note(request_class, size, seconds, travels=self._remote.travels(key.group))

    def _quantize_and_mask(
        self,
        key: ProductKey,
        piece: slice,
        rows: list[torch.Tensor],
        mask: Mask,
        request: torch.Tensor,
        check: _Check,
    ) -> _Piece:
        """Add rows to their mask in place; with what the checks expect, see ``shared.ring.rows``."""
        ring, half = self._group(key.group), check.half
        integers = torch.empty(request.shape) if half else None
        units = max(1, self._masks.sources) << EXACT - key.answer_bits if key.answer_bits < EXACT else 0
        hidden = quantize_and_mask(
            [block.contiguous() for block in rows],
            None if key.direction == Direction.FORWARD else ring.scales_of(key.member_bits),
            ring.max_norm(key.direction, units),
            request,
            check.exact.factor if check.exact else None,
            integers,
        )
        if hidden is None and not all(block.isfinite().all() for block in rows):
            raise NonFiniteError(
                "the rows hold NaN or infinity; nothing was sent. Look for what diverged before this layer"
            )
        if hidden is None:
            raise NonFiniteError(
                "the rows are too large for float32 once they are scaled; nothing was sent. Lower the "
                "learning rate or the loss scale"
            )
        sums = expected_sums(half, integers) if half and integers is not None else None
        return _Piece(piece, mask, *hidden, sums, request if half else None)

    def _finish(
        self,
        key: ProductKey,
        pieces: list[_Piece],
        sent: list[PendingProduct],
        check: _Check,
        masking: float,
    ) -> list[torch.Tensor]:
        """Take the effects off the answers and check them."""
        count = pieces[-1].rows.stop
        results = [torch.empty((count, width)) for width in self._widths(key)]
        waiting, again, doubted = 0.0, list[tuple[_Piece, torch.Tensor]](), set[int]()
        repeated = False
        try:
            while pieces:
                if self._failed is not None:  # another product of this session
                    raise copy_error(self._failed)
                piece = pieces.pop(0)
                (answer,) = sent.pop(0).result()
                started = time.perf_counter()
                waited = self._unmask_and_check(key, piece, answer, results, check, doubted)
                waiting, masking = waiting + waited, masking + time.perf_counter() - started - waited
                if piece.rows.start in doubted or check.repeats:
                    again.append((piece, answer))
            # When all of it is there: a repeated piece would tell what the others must be.
            for piece, answer in again:
                repeated = True
                self._recheck_exact(key, piece, answer, check)
        except BaseException as error:
            # What is owed must come: an executor that lies would withhold it.
            if (
                (repeated or doubted)
                and not isinstance(error, VerificationError)
                and self._verifier is not None
            ):
                unconfirmed = self._refuse_further(self._verifier.unconfirmed(key))
                if isinstance(error, SymbiosisError):
                    raise unconfirmed from error
            raise
        if doubted:  # often so of weights of low rank; each doubt tells of a row's lower bits
            self._exact_only.add(key.product)
        self._remote.stats.add(
            seconds_masking=masking,
            seconds_waiting_for_effects=waiting,
            verified_rows=count if check.exact or check.half else 0,
        )
        return results

    def _unmask_and_check(
        self,
        key: ProductKey,
        piece: _Piece,
        answer: torch.Tensor,
        results: list[torch.Tensor],
        check: _Check,
        doubted: set[int],
    ) -> float:
        """Write a piece's results; the seconds that its effects were waited for.

        Args:
            doubted: gets the first row of the piece if a half answer seems wrong.

        Raises:
            VerificationError: an exact answer is wrong.
        """
        scales = (
            self._group(key.group).scales_of(key.member_bits) if key.direction == Direction.FORWARD else None
        )
        effects, first, waiting = piece.mask.effects(), piece.rows.start, 0.0
        while True:
            started = time.perf_counter()
            part, effect = next(effects, (None, []))
            waiting += time.perf_counter() - started
            if part is None:
                return waiting
            into = slice(first + part.start, first + part.stop)
            parts = [result[into] for result in results]
            if key.answer_bits < EXACT:
                if self._unmask_and_check_half(
                    key, answer[part], effect, piece, part, scales, parts, check.half
                ):
                    doubted.add(first)
            elif unmask_and_dequantize(
                answer[part],
                effect,
                piece.exponents[part],
                scales,
                parts,
                check.exact.challenge if check.exact else None,
                piece.expected[part] if piece.expected is not None else None,
            ):
                self._check_failed(key)

    @staticmethod
    def _unmask_and_check_half(
        key: ProductKey,
        answer: torch.Tensor,
        effects: list[torch.Tensor],
        piece: _Piece,
        part: slice,
        scales: torch.Tensor | None,
        blocks: list[torch.Tensor],
        fingerprint: HalfFingerprint | None,
    ) -> int:
        """See ``shared.ring.rows.unmask_and_dequantize``; how many rows are wrong."""
        exponents = piece.exponents[part] + 8 * (EXACT - key.answer_bits)
        sums = None if piece.sums is None else piece.sums[part]
        wrong = 0
        step = max(1, CHUNK_ELEMENTS // answer.shape[1])
        for first in range(0, len(answer), step):
            at = slice(first, first + step)
            products = subtract_upper_bits(answer[at], [effect[at] for effect in effects], key.answer_bits)
            if fingerprint is not None and sums is not None:
                wrong += wrong_rows(fingerprint, products, sums[at])
            write_products(products, exponents[at], scales, [block[at] for block in blocks])
        return wrong

    def _recheck_exact(self, key: ProductKey, piece: _Piece, answer: torch.Tensor, check: _Check) -> None:
        """Ask for a half answer and its effects once more, with all bits, and compare all that came.

        Raises:
            VerificationError: it is not what it was, or wrong.
        """
        if piece.sent is None or piece.expected is None or check.exact is None:
            return  # answers are not checked
        (whole,) = self._remote.submit(Operation.PRODUCT, key.exact, [piece.sent]).result()
        effects = piece.mask.exact_effects()
        same = torch.equal(take_upper_bits(whole, key.answer_bits), answer)
        for part, cut_effects in piece.mask.effects():
            for effect, again in zip(cut_effects, effects, strict=True):
                same = same and torch.equal(take_upper_bits(again[part], key.answer_bits), effect)
        for effect in effects:
            whole.sub_(effect)
        right = torch.equal((whole.long() * check.exact.challenge).sum(1), piece.expected)
        if not (same and right):
            self._check_failed(key)

    def _check_failed(self, key: ProductKey) -> NoReturn:
        if self._verifier is None:
            raise RuntimeError("an answer is wrong that no verifier checks")
        # At once: what fails later must not make this forgotten.
        raise self._refuse_further(self._verifier.error(key))

    def _check(self, key: ProductKey) -> _Check:
        """What to check the next request of a kind with."""
        if self._verifier is None:
            return _Check(None)
        try:
            if key.answer_bits == EXACT:
                return _Check(self._verifier.fingerprint(key, self.integer_product))
            shape, plan = self._remote.shapes[key.group], self._plan(key)
            forward, backward = self._remote.manifest.groups[key.group].bounds or (0, 0)
            half = self._verifier.half_fingerprint(
                key,
                self.integer_product,
                planes=shape.planes,
                width=plan.answer_columns // shape.planes,
                bound=backward if key.direction == Direction.FORWARD else forward,
                sources=self._masks.sources,
            )
            # In any case: executors see when a fingerprint is made.
            exact, repeats = self._verifier.exact_of_half(key, self.integer_product)
            return _Check(exact, half, repeats) if half else _Check(None)
        except VerificationError as error:
            raise self._refuse_further(error) from None

    def _plan(self, key: ProductKey) -> RequestWidths:
        return self._remote.shapes[key.group].plan(key.direction, key.member_bits)

    def _refuse_further(self, error: VerificationError) -> VerificationError:
        """From now on nothing is asked for; a copy is kept, which holds no frames alive."""
        self._failed = copy_error(error)  # type: ignore[assignment]
        self._masks.close()
        return error

    def integer_product(self, key: ProductKey, rows: torch.Tensor) -> torch.Tensor:
        """The products of a fingerprint's integers, under a mask like any: int32 [n, C] to [n, 2 N]."""
        mask = self._masks.take(key, len(rows))
        request = mask.numbers().add_(rows)
        (answer,) = self._remote.submit(Operation.PRODUCT, key.exact, [request]).result()
        for part, effects in mask.effects():
            for effect in effects:
                answer[part].sub_(effect)
        return answer

    @property
    def rows_ahead(self) -> int:
        """See PrivacyMode."""
        return self._masks.rows_ahead

    def _widths(self, key: ProductKey) -> list[int]:
        shape = self._remote.shapes[key.group]
        if key.direction == Direction.BACKWARD:
            return [shape.inputs]
        return [shape.outputs[i] for i in member_indices(key.member_bits)]

    def _group(self, group: int) -> RingGroup:
        ring_group = self._groups.get(group)
        if ring_group is None:
            ring_group = RingGroup(self._remote.manifest.groups[group], self._scales(group))
            self._groups[group] = ring_group
        return ring_group

    def close(self) -> None:
        """See PrivacyMode."""
        self._masks.close()
