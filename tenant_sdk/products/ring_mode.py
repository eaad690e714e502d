"""Products on the ring: fixed point, a pad, the provider's answer, the check, and floats again."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shared.errors import ModelMismatch, NonFiniteError, VerificationError
from shared.ring.fixed_point import Bounds, capacity
from shared.ring.rows import hide, reveal
from shared.wire.header import Direction, Operation, member_indices
from shared.wire.messages import GroupInfo
from tenant_sdk.connection.channel import again
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.products.forecast import Kind
from tenant_sdk.products.pads import Pads
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


class RingMode:
    """Privacy on a ring executor; which mode it is, is in the pads.

    Args:
        remote: the provider.
        pads: what hides the rows.
        verifier: None: answers are not checked.
        scales: of a group, [O], once they are known to be the right ones.
    """

    def __init__(
        self,
        remote: RemoteExecutor,
        pads: Pads,
        verifier: Verifier | None,
        scales: Callable[[int], torch.Tensor],
    ) -> None:
        self._remote, self._pads, self._verifier, self._scales = remote, pads, verifier, scales
        self._groups: dict[int, RingGroup] = {}
        self._failed: VerificationError | None = None

    def product(
        self, group: int, direction: Direction, members: int, blocks: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """See ``tenant_sdk.products.privacy.Privacy``.

        Raises:
            VerificationError: a wrong answer, now or earlier in this session.
        """
        if self._failed is not None:
            raise again(self._failed)
        kind = Kind(group, direction, members)
        ring = self._group(group)
        scales = ring.scales_of(members)
        forward = direction == Direction.FORWARD
        print_ = self._fingerprint(kind)
        rows = blocks[0].shape[0]
        started = time.perf_counter()
        pad = self._pads.take(kind, rows)
        request = pad.request()
        hidden = hide(
            [block.contiguous() for block in blocks],
            None if forward else scales,
            ring.room[direction],
            request,
            print_.factor if print_ else None,
        )
        if hidden is None:
            raise NonFiniteError(
                "the rows are too large for float32 once they are scaled; nothing was sent. Lower the "
                "learning rate or the loss scale"
            )
        exponents, expected = hidden
        masking = time.perf_counter() - started
        (answer,) = self._remote.product(Operation.PRODUCT, group, direction, members, [request])
        del request
        results = [torch.empty((rows, width)) for width in self._widths(kind)]
        waiting = 0.0
        parts = pad.effects()
        while True:
            started = time.perf_counter()
            part, effects = next(parts, (None, []))
            waited = time.perf_counter()
            waiting += waited - started
            if part is None:
                break
            wrong = reveal(
                answer[part],
                effects,
                exponents[part],
                scales if forward else None,
                [result[part] for result in results],
                print_.challenge if print_ else None,
                expected[part] if expected is not None else None,
            )
            if wrong and self._verifier is not None:
                # At once: what fails later must not make this forgotten.
                raise self._fail(self._verifier.error(kind))
            masking += time.perf_counter() - waited
        self._remote.stats.add(
            seconds_masking=masking,
            seconds_waiting_for_effects=waiting,
            verified_rows=rows if print_ else 0,
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
        self._pads.close()
        return error

    def integer_product(self, kind: Kind, rows: torch.Tensor) -> torch.Tensor:
        """The products of a fingerprint's integers, under a pad like any others: int32 [n, C] to [n, 2 N]."""
        pad = self._pads.take(kind, len(rows), once=True)
        request = pad.request().add_(rows)
        (answer,) = self._remote.product(Operation.PRODUCT, *kind, [request])
        for part, effects in pad.effects():
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
        """See Privacy."""
        self._pads.close()
