"""Products on the ring: fixed point, a pad, the provider's answer, the check, and floats again."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shared.errors import ModelMismatch, NonFiniteError, VerificationError
from shared.header import Direction, Operation, member_indices
from shared.messages import GroupInfo
from shared.ring import Bounds, capacity, dequantize, exponents, quantize_rows
from tenant_sdk.forecast import Kind
from tenant_sdk.pads import Pads
from tenant_sdk.remote import RemoteExecutor
from tenant_sdk.verification import Verifier

CHUNK_ELEMENTS = 1 << 18  # of rows and answers at once, which then stay in the processor's cache


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
        limit = Bounds(*(info.bounds or (0, 0)))
        try:
            self.room = {
                Direction.FORWARD: capacity(limit.forward, info.inputs),
                Direction.BACKWARD: capacity(limit.backward, sum(widths)),
            }
        except ValueError as error:
            raise ModelMismatch(f"the executor's bounds are impossible: {error}") from error
        self.scales = list(scales.split(widths))


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
        """See ``tenant_sdk.privacy.Privacy``.

        Raises:
            VerificationError: a wrong answer, now or earlier in this session.
        """
        if self._failed is not None:
            raise self._failed.with_traceback(None)
        kind = Kind(group, direction, members)
        ring = self._group(group)
        chosen = [ring.scales[i] for i in member_indices(members)]
        forward = direction == Direction.FORWARD
        scales = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
        rows = len(blocks[0])
        plan = self._remote.shapes[group].plan(direction, members)
        step = max(1, CHUNK_ELEMENTS // max(plan.request_columns, plan.answer_columns))
        check = self._verifier.check(kind, self.integer_product) if self._verifier is not None else None
        pad = self._pads.take(kind, rows)
        request = pad.request()
        exponent = torch.empty(rows, dtype=torch.int32)
        masking, verifying = _Watch(), _Watch()
        for first in range(0, rows, step):
            with masking:
                part = slice(first, first + step)
                x = blocks[0][part] if len(blocks) == 1 else torch.cat([block[part] for block in blocks], 1)
                if not forward:
                    x = x * scales
                norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
                if not norms.isfinite().all():
                    raise NonFiniteError("the rows are too large for float32 once they are scaled")
                exponent[part] = exponents(norms, ring.room[direction])
                integers = quantize_rows(x, exponent[part])
                request[part] += integers
            if check is not None:
                with verifying:
                    check.rows(integers)
        (answer,) = self._remote.product(Operation.PRODUCT, group, direction, members, [request])
        del request
        waiting = _Watch()
        results = [torch.empty((rows, width)) for width in self._widths(kind)]
        half = plan.answer_columns // 2
        for first in range(0, rows, step):
            part = slice(first, first + step)
            integers = answer[part]
            with waiting:
                pad.wait(first, len(integers))
            with masking:
                pad.unmask(integers, first)
            if check is not None:
                with verifying:
                    self._verify(check.answers, integers)
            with masking:
                at = 0
                for result in results:
                    width = result.shape[1]
                    dequantize(
                        integers[:, at : at + width],
                        integers[:, half + at : half + at + width],
                        exponent[part],
                        scales[at : at + width] if forward else None,
                        result[part],
                    )
                    at += width
        self._remote.stats.add(
            seconds_masking=masking.seconds,
            seconds_verifying=verifying.seconds,
            seconds_waiting_for_effects=waiting.seconds,
            verified_rows=rows if check is not None else 0,
        )
        return results

    def integer_product(self, kind: Kind, rows: torch.Tensor) -> torch.Tensor:
        """The products of integers, under a pad like any others: int32 [n, C] to [n, 2 N]."""
        pad = self._pads.take(kind, len(rows))
        request = pad.request().add_(rows)
        (answer,) = self._remote.product(Operation.PRODUCT, *kind, [request])
        pad.unmask(answer, 0)
        return answer

    def _verify(self, answers: Callable[[torch.Tensor], None], integers: torch.Tensor) -> None:
        try:
            answers(integers)
        except VerificationError as error:
            self._failed = error
            raise

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


class _Watch:
    """Adds up the time spent inside."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started
