"""Products on the ring: fixed point, a mask, the provider's answer, the check, and floats again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from shared.errors import ModelMismatch, NonFiniteError, VerificationError
from shared.forks import ForkGuard
from shared.ring.fixed_point import Bounds, capacity
from shared.ring.rows import all_finite_below, hide, reveal
from shared.wire.header import Direction, Operation, RequestClass, member_indices
from shared.wire.messages import GroupInfo
from tenant_sdk.connection.channel import copy_error
from tenant_sdk.connection.remote import PendingProduct, RemoteExecutor, check_shapes
from tenant_sdk.products.forecast import ProductKey
from tenant_sdk.products.masks import Mask, Masks
from tenant_sdk.products.verification import Fingerprint, Verifier, transposed


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
        try:
            self.max_norm = {
                Direction.FORWARD: capacity(limit.forward, info.inputs),
                Direction.BACKWARD: capacity(limit.backward, sum(widths)),
            }
        except ValueError as error:
            raise ModelMismatch(f"the executor's bounds are impossible: {error}") from error
        # What is smaller than this in size can be scaled, whatever else is in its row.
        self.ordinary = 2.0**100 / max(1.0, float(scales.max()))
        self._scales = scales.split(widths)
        self._chosen: dict[int, torch.Tensor] = {}

    def scales_of(self, members: int) -> torch.Tensor:
        """Of some members, one behind the other."""
        chosen = self._chosen.get(members)
        if chosen is None:
            chosen = torch.cat([self._scales[i] for i in member_indices(members)])
            self._chosen[members] = chosen
        return chosen


class _Piece(NamedTuple):
    """Rows of a request that are hidden together."""

    rows: slice
    mask: Mask
    exponents: torch.Tensor
    expected: torch.Tensor | None  # by the check


class RingProducts:
    """Products on a ring executor; which privacy mode it is, is in the masks.

    Args:
        remote: the provider.
        masks: what hides the rows.
        verifier: None: answers are not checked.
        scales: of a group, [O], once they are known to be the right ones.
        unforeseen: groups that are asked for in no order that the last pass told.
    """

    def __init__(
        self,
        remote: RemoteExecutor,
        masks: Masks,
        verifier: Verifier | None,
        scales: Callable[[int], torch.Tensor],
        unforeseen: Collection[int] = (),
    ) -> None:
        self._remote, self._masks, self._verifier, self._scales = remote, masks, verifier, scales
        self._unforeseen = unforeseen
        self._groups: dict[int, RingGroup] = {}
        self._failed: VerificationError | None = None
        self._fork_guard = ForkGuard()

    def submit(
        self,
        group: int,
        direction: Direction,
        members: int,
        rows: list[torch.Tensor],
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> PendingProduct:
        """See ``tenant_sdk.products.products.Products``.

        Raises:
            VerificationError: a wrong answer, now or earlier in this session.
        """
        self._fork_guard.check()  # in a forked child locks may be held for ever
        if self._failed is not None:
            raise copy_error(self._failed)
        key = ProductKey(group, direction, members)
        check_shapes(rows, self._widths(transposed(key)))
        fingerprint, count = self._fingerprint(key), rows[0].shape[0]
        hidden: list[_Piece] = []
        spent = 0.0

        def hide_piece(piece: slice) -> list[torch.Tensor]:
            nonlocal spent
            started = time.perf_counter()
            mask = self._masks.take(key, piece.stop - piece.start, request_class=request_class)
            request = mask.request()
            exponents, expected = self._hide(key, [block[piece] for block in rows], request, fingerprint)
            hidden.append(_Piece(piece, mask, exponents, expected))
            spent += time.perf_counter() - started
            return [request]

        cut = self._remote.pieces(*key, count)
        ready: list[list[torch.Tensor]] = []
        if len(cut) > 1 and not all(all_finite_below(block, self._group(group).ordinary) for block in rows):
            ready = [
                hide_piece(piece) for piece in cut
            ]  # all, or one that cannot be sent might follow others
        next_piece = (lambda _: ready.pop(0)) if ready else hide_piece
        sent = self._remote.submit_pieces(Operation.PRODUCT, *key, cut, next_piece, request_class)
        if group not in self._unforeseen:
            self._masks.note_request(key, count)
        return PendingProduct(lambda: self._finish(key, hidden, sent, fingerprint, spent))

    def _hide(
        self,
        key: ProductKey,
        rows: list[torch.Tensor],
        request: torch.Tensor,
        fingerprint: Fingerprint | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add rows to their mask in place; exponents and what the check expects, see ``shared.ring.rows``."""
        ring = self._group(key.group)
        hidden = hide(
            [block.contiguous() for block in rows],
            None if key.direction == Direction.FORWARD else ring.scales_of(key.members),
            ring.max_norm[key.direction],
            request,
            fingerprint.factor if fingerprint else None,
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
        return hidden

    def _finish(
        self,
        key: ProductKey,
        pieces: list[_Piece],
        sent: list[PendingProduct],
        fingerprint: Fingerprint | None,
        masking: float,
    ) -> list[torch.Tensor]:
        """Take the effects off the answers and check them."""
        scales = self._group(key.group).scales_of(key.members)
        count = pieces[-1].rows.stop
        results = [torch.empty((count, width)) for width in self._widths(key)]
        waiting = 0.0
        while pieces:
            if self._failed is not None:  # another product of this session
                raise copy_error(self._failed)
            piece = pieces.pop(0)
            (answer,) = sent.pop(0).result()
            effects, first = piece.mask.effects(), piece.rows.start
            while True:
                started = time.perf_counter()
                part, there = next(effects, (None, []))
                waited = time.perf_counter()
                waiting += waited - started
                if part is None:
                    break
                into = slice(first + part.start, first + part.stop)
                wrong = reveal(
                    answer[part],
                    there,
                    piece.exponents[part],
                    scales if key.direction == Direction.FORWARD else None,
                    [result[into] for result in results],
                    fingerprint.challenge if fingerprint else None,
                    piece.expected[part] if piece.expected is not None else None,
                )
                if wrong and self._verifier is not None:
                    # At once: what fails later must not make this forgotten.
                    raise self._fail(self._verifier.error(key))
                masking += time.perf_counter() - waited
        self._remote.stats.add(
            seconds_masking=masking,
            seconds_waiting_for_effects=waiting,
            verified_rows=count if fingerprint else 0,
        )
        return results

    def _fingerprint(self, key: ProductKey) -> Fingerprint | None:
        if self._verifier is None:
            return None
        try:
            return self._verifier.fingerprint(key, self.integer_product)
        except VerificationError as error:
            raise self._fail(error) from None

    def _fail(self, error: VerificationError) -> VerificationError:
        """From now on nothing is asked for; a copy is kept, which holds no frames alive."""
        self._failed = copy_error(error)  # type: ignore[assignment]
        self._masks.close()
        return error

    def integer_product(self, key: ProductKey, rows: torch.Tensor) -> torch.Tensor:
        """The products of a fingerprint's integers, under a mask like any: int32 [n, C] to [n, 2 N]."""
        mask = self._masks.take(key, len(rows))
        request = mask.request().add_(rows)
        (answer,) = self._remote.submit(Operation.PRODUCT, *key, [request]).result()
        for part, effects in mask.effects():
            for effect in effects:
                answer[part].sub_(effect)
        return answer

    @property
    def rows_ahead(self) -> int:
        """See Products."""
        return self._masks.rows_ahead

    def _widths(self, key: ProductKey) -> list[int]:
        shape = self._remote.shapes[key.group]
        if key.direction == Direction.BACKWARD:
            return [shape.inputs]
        return [shape.outputs[i] for i in member_indices(key.members)]

    def _group(self, group: int) -> RingGroup:
        made = self._groups.get(group)
        if made is None:
            made = RingGroup(self._remote.manifest.groups[group], self._scales(group))
            self._groups[group] = made
        return made

    def close(self) -> None:
        """See Products."""
        self._masks.close()
