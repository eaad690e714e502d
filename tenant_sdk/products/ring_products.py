"""Products on the ring: fixed point, a mask, the provider's answer, the check, and floats again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from typing import NoReturn

import torch

from shared.errors import SymbiosisError, VerificationError
from shared.forks import ForkGuard
from shared.ring.rows import all_finite_below
from shared.wire.header import EXACT, Direction, Operation, RequestClass, member_indices
from shared.wire.protocol import RequestWidths
from tenant_sdk.connection.channel import copy_error
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.remote import LazyResult, RemoteExecutor, check_shapes
from tenant_sdk.products.answer_bits import AnswerBits
from tenant_sdk.products.masks import MaskGenerator
from tenant_sdk.products.modes import Privacy
from tenant_sdk.products.products import Products
from tenant_sdk.products.ring_group import RingGroup
from tenant_sdk.products.ring_requests import ExactRequest, HalfChecks, HalfRequest
from tenant_sdk.products.verification import transposed
from tenant_sdk.products.verifier import Verifier


class RingProducts(Products):
    """Products on a ring executor. The masks decide the privacy mode.

    Args:
        remote: the provider.
        masks: the masks that hide the rows.
        verifier: None: answers are not checked.
        scales: returns the scales of a group, [O], once they are known to be the right ones.
        unpredictable: groups whose requests come in an order that the last pass does not predict.
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

    @property
    def privacy(self) -> Privacy:
        """See Products."""
        return self._masks.privacy

    def verifying_everything(self) -> RingProducts:
        """See Products."""
        verifier = self._verifier.verifying_everything() if self._verifier else None
        return RingProducts(self._remote, self._masks, verifier, self._scales, self._unpredictable)

    def submit(
        self,
        group: int,
        direction: Direction,
        member_bits: int,
        rows: list[torch.Tensor],
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> LazyResult:
        """See Products.

        Raises:
            VerificationError: a wrong answer, now or earlier in this session.
        """
        self._fork_guard.check()  # in a forked child locks may be held for ever
        if self._failed is not None:
            raise copy_error(self._failed)
        key = ProductKey(group, direction, member_bits, self._answer_bits.choose(request_class))
        if key.product in self._exact_only:
            key = key.exact
        check_shapes(rows, self._row_widths(key))
        request, count = self._request(key), rows[0].shape[0]
        spent = 0.0

        def mask_piece(piece: slice) -> list[torch.Tensor]:
            nonlocal spent
            started = time.perf_counter()
            mask = self._masks.take(key, piece.stop - piece.start, request_class=request_class)
            masked = request.mask_rows([tensor[piece] for tensor in rows], piece.start, mask)
            spent += time.perf_counter() - started
            return [masked]

        pieces = self._remote.pieces(key, count)
        started = time.perf_counter()
        ready: list[list[torch.Tensor]] = []
        if len(pieces) > 1 and not all(
            all_finite_below(tensor, self._group(group).safe_size) for tensor in rows
        ):
            # All, or one that cannot be sent might follow others.
            ready = [mask_piece(piece) for piece in pieces]
        next_piece = (lambda _: ready.pop(0)) if ready else mask_piece
        sent = self._remote.submit_pieces(Operation.PRODUCT, key, pieces, next_piece, request_class)
        if group not in self._unpredictable:
            self._masks.record_request(key, count)

        def finish() -> list[torch.Tensor]:
            results = self._finish(request, count, sent, spent)
            if self._answer_bits.measures:
                self._record_answer(key, count, request_class, time.perf_counter() - started)
            return results

        return LazyResult(finish)

    def _record_answer(self, key: ProductKey, rows: int, request_class: RequestClass, seconds: float) -> None:
        size = rows * self._request_widths(key).answer_columns * key.answer_bits // 8
        self._answer_bits.record(
            request_class, size, seconds, is_over_network=self._remote.is_over_network(key.group)
        )

    def _request(self, key: ProductKey) -> ExactRequest:
        """Returns the next request of a kind, with what its answers are checked with."""
        ring = self._group(key.group)
        try:
            if key.answer_bits == EXACT:
                verifier = self._verifier
                return ExactRequest(
                    key, ring, verifier.fingerprint(key, self.integer_product) if verifier else None
                )
            checks = self._half_checks(key, self._verifier) if self._verifier else None
        except VerificationError as error:
            raise self._refuse_further(error) from None
        return HalfRequest(key, ring, self._masks.sources, checks, partial(self._exact_product, key))

    def _half_checks(self, key: ProductKey, verifier: Verifier) -> HalfChecks | None:
        shape, widths = self._remote.shapes[key.group], self._request_widths(key)
        forward, backward = self._remote.manifest.groups[key.group].bounds or (0, 0)
        half = verifier.half_fingerprint(
            key,
            self.integer_product,
            planes=shape.planes,
            width=widths.answer_columns // shape.planes,
            bound=backward if key.direction == Direction.FORWARD else forward,
            sources=self._masks.sources,
        )
        # In any case: executors see when a fingerprint is made.
        exact, repeats = verifier.exact_of_half(key, self.integer_product)
        return HalfChecks(half, exact, repeats) if half else None

    def _exact_product(self, key: ProductKey, request: torch.Tensor) -> torch.Tensor:
        return self._remote.submit(Operation.PRODUCT, key.exact, [request]).result()[0]

    def _finish(
        self, request: ExactRequest, count: int, sent: list[LazyResult], masking: float
    ) -> list[torch.Tensor]:
        """Take the effects off the answers and check them."""
        results = [torch.empty((count, width)) for width in self._answer_widths(request.key)]
        started, waiting = time.perf_counter(), 0.0
        try:
            while sent:
                if self._failed is not None:  # another product of this session
                    raise copy_error(self._failed)
                before = time.perf_counter()
                (answer,) = sent.pop(0).result()
                waiting += time.perf_counter() - before
                if not request.unmask(answer, results):
                    self._check_failed(request.key)
            masking += time.perf_counter() - started - waiting - request.seconds_waiting
            if not request.recheck():
                self._check_failed(request.key)
        except VerificationError:
            raise
        except BaseException as error:
            # What is owed must come: an executor that lies would withhold it.
            if request.recheck_pending and self._verifier is not None:
                missing = self._refuse_further(self._verifier.recheck_missing(request.key))
                if isinstance(error, SymbiosisError):
                    raise missing from error
            raise
        if request.suspect:  # often so of weights of low rank; each doubt tells of a row's lower bits
            self._exact_only.add(request.key.product)
        self._remote.stats.add(
            seconds_masking=masking,
            seconds_waiting_for_effects=request.seconds_waiting,
            verified_rows=count if request.verified else 0,
        )
        return results

    def _check_failed(self, key: ProductKey) -> NoReturn:
        if self._verifier is None:
            raise RuntimeError("an answer is wrong that no verifier checks")
        # At once: what fails later must not make this forgotten.
        raise self._refuse_further(self._verifier.error(key))

    def _request_widths(self, key: ProductKey) -> RequestWidths:
        return self._remote.shapes[key.group].widths(key.direction, key.member_bits)

    def _refuse_further(self, error: VerificationError) -> VerificationError:
        """Ask for nothing from now on, and keep a copy of the error, which holds no frames alive."""
        self._failed = copy_error(error)  # type: ignore[assignment]
        self._masks.close()
        return error

    def integer_product(self, key: ProductKey, rows: torch.Tensor) -> torch.Tensor:
        """Returns products of a fingerprint's integers, under a mask like any: int32 [n, C] to [n, 2 N]."""
        mask = self._masks.take(key, len(rows))
        request = mask.take_values().add_(rows)
        (answer,) = self._remote.submit(Operation.PRODUCT, key.exact, [request]).result()
        for part, effects in mask.effects():
            for effect in effects:
                answer[part].sub_(effect)
        return answer

    @property
    def rows_ahead(self) -> int:
        """See Products."""
        return self._masks.rows_ahead

    def fill(self, budget_bytes: int, timeout: float, chunk_rows: int = 0) -> None:
        """See Products."""
        self._masks.fill(budget_bytes, timeout, chunk_rows)

    def _row_widths(self, key: ProductKey) -> list[int]:
        """Widths of the tensors of rows, which are those of answers in the other direction."""
        return self._answer_widths(transposed(key))

    def _answer_widths(self, key: ProductKey) -> list[int]:
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
        """See Products."""
        self._masks.close()
