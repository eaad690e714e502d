"""Products on the ring: fixed point, a mask, the provider's answer, the check, and floats again."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shared.errors import ModelMismatch, NonFiniteError, VerificationError
from shared.forks import Home
from shared.ring.fixed_point import Bounds, capacity
from shared.ring.rows import hide, reveal
from shared.wire.header import Direction, Operation, RequestClass, member_indices
from shared.wire.messages import GroupInfo
from tenant_sdk.connection.channel import again
from tenant_sdk.connection.remote import PendingProduct, RemoteExecutor
from tenant_sdk.products.forecast import Kind
from tenant_sdk.products.masks import Mask, Masks
from tenant_sdk.products.verification import Fingerprint, Verifier


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
            self.room = {
                Direction.FORWARD: capacity(limit.forward, info.inputs),
                Direction.BACKWARD: capacity(limit.backward, sum(widths)),
            }
        except ValueError as error:
            raise ModelMismatch(f"the executor's bounds are impossible: {error}") from error
        self._scales = scales.split(widths)
        self._chosen: dict[int, torch.Tensor] = {}

    def scales_of(self, members: int) -> torch.Tensor:
        """Of some members, one behind the other."""
        chosen = self._chosen.get(members)
        if chosen is None:
            chosen = torch.cat([self._scales[i] for i in member_indices(members)])
            self._chosen[members] = chosen
        return chosen


# Rows, their exponents, what the check expects of them, and their product.
_Piece = tuple[slice, torch.Tensor, torch.Tensor | None, PendingProduct]


class RingProducts:
    """Products on a ring executor; which privacy mode it is, is in the masks.

    Args:
        remote: the provider.
        masks: what hides the rows.
        verifier: None: answers are not checked.
        scales: of a group, [O], once they are known to be the right ones.
    """

    def __init__(
        self,
        remote: RemoteExecutor,
        masks: Masks,
        verifier: Verifier | None,
        scales: Callable[[int], torch.Tensor],
    ) -> None:
        self._remote, self._masks, self._verifier, self._scales = remote, masks, verifier, scales
        self._groups: dict[int, RingGroup] = {}
        self._failed: VerificationError | None = None
        self._home = Home()

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
        self._home.check()  # in a forked child locks may be held for ever
        if self._failed is not None:
            raise again(self._failed)
        kind = Kind(group, direction, members)
        print_ = self._fingerprint(kind)
        started = time.perf_counter()
        mask = self._masks.take(kind, rows[0].shape[0], request_class=request_class)
        cut = self._remote.pieces(*kind, rows[0].shape[0])
        request = mask.request()
        spent = time.perf_counter() - started
        pieces = []
        for piece in cut:
            started = time.perf_counter()
            hidden = self._hide(kind, [block[piece] for block in rows], request[piece], print_)
            spent += time.perf_counter() - started
            pending = self._remote.submit(Operation.PRODUCT, *kind, [request[piece]], request_class)
            pieces.append((piece, *hidden, pending))
            if len(cut) > 1:
                self._remote.push()  # while the next one is hidden
        del request
        return PendingProduct(lambda: self._finish(kind, mask, pieces, print_, spent))

    def _hide(
        self, kind: Kind, rows: list[torch.Tensor], request: torch.Tensor, print_: Fingerprint | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add rows to their mask in place; exponents and what the check expects, see ``shared.ring.rows``."""
        ring = self._group(kind.group)
        hidden = hide(
            [block.contiguous() for block in rows],
            None if kind.direction == Direction.FORWARD else ring.scales_of(kind.members),
            ring.room[kind.direction],
            request,
            print_.factor if print_ else None,
        )
        if hidden is None:
            raise NonFiniteError(
                "the rows are too large for float32 once they are scaled; nothing was sent. Lower the "
                "learning rate or the loss scale"
            )
        return hidden

    def _finish(
        self, kind: Kind, mask: Mask, pieces: list[_Piece], print_: Fingerprint | None, masking: float
    ) -> list[torch.Tensor]:
        """Take the effects off the answers and check them."""
        scales = self._group(kind.group).scales_of(kind.members)
        count = pieces[-1][0].stop
        results = [torch.empty((count, width)) for width in self._widths(kind)]
        waiting = 0.0
        for piece, exponents, expected, pending in pieces:
            (answer,) = pending.result()
            effects = mask.effects(piece)
            while True:
                started = time.perf_counter()
                part, there = next(effects, (None, []))
                waited = time.perf_counter()
                waiting += waited - started
                if part is None:
                    break
                within = slice(part.start - piece.start, part.stop - piece.start)
                wrong = reveal(
                    answer[within],
                    there,
                    exponents[within],
                    scales if kind.direction == Direction.FORWARD else None,
                    [result[part] for result in results],
                    print_.challenge if print_ else None,
                    expected[within] if expected is not None else None,
                )
                if wrong and self._verifier is not None:
                    # At once: what fails later must not make this forgotten.
                    raise self._fail(self._verifier.error(kind))
                masking += time.perf_counter() - waited
        self._remote.stats.add(
            seconds_masking=masking,
            seconds_waiting_for_effects=waiting,
            verified_rows=count if print_ else 0,
        )
        return results

    def _fingerprint(self, kind: Kind) -> Fingerprint | None:
        if self._verifier is None:
            return None
        try:
            return self._verifier.fingerprint(kind, self.integer_product)
        except VerificationError as error:
            raise self._fail(error) from None

    def _fail(self, error: VerificationError) -> VerificationError:
        """From now on nothing is asked for; a copy is kept, which holds no frames alive."""
        self._failed = again(error)  # type: ignore[assignment]
        self._masks.close()
        return error

    def integer_product(self, kind: Kind, rows: torch.Tensor) -> torch.Tensor:
        """The products of a fingerprint's integers, under a mask like any: int32 [n, C] to [n, 2 N]."""
        mask = self._masks.take(kind, len(rows), once=True)
        request = mask.request().add_(rows)
        (answer,) = self._remote.submit(Operation.PRODUCT, *kind, [request]).result()
        for part, effects in mask.effects(slice(0, len(rows))):
            for effect in effects:
                answer[part].sub_(effect)
        return answer

    def _widths(self, kind: Kind) -> list[int]:
        shape = self._remote.shapes[kind.group]
        if kind.direction == Direction.BACKWARD:
            return [shape.inputs]
        return [shape.outputs[i] for i in member_indices(kind.members)]

    def _group(self, group: int) -> RingGroup:
        made = self._groups.get(group)
        if made is None:
            made = RingGroup(self._remote.manifest.groups[group], self._scales(group))
            self._groups[group] = made
        return made

    def close(self) -> None:
        """See Products."""
        self._masks.close()
