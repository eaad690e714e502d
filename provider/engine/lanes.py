"""Where products run: a lane is this process's processors, a device, or a worker elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch

from provider.engine.loop import Loop
from provider.executor.products import GroupExecutor
from shared.ring.upper_bits import take_upper_bits
from shared.wire.header import EXACT, Header


@dataclass(eq=False, slots=True)
class Request:
    """An accepted request; ``tensors`` are its rows, once a lane has made them from the payload."""

    header: Header
    payload: torch.Tensor
    tensors: list[torch.Tensor] | None = None


class RowRange(NamedTuple):
    """Rows [start, stop) of a request."""

    request: Request
    start: int
    stop: int


Answer = list[torch.Tensor] | Exception  # tensors of the rows' answer, with memory of their own


class BatchResult(NamedTuple):
    """The answers of a batch's row ranges, in order, and the processor time of the thread that made them."""

    answers: list[Answer]
    processor_seconds: float = 0.0


def answer_of(tensors: Sequence[torch.Tensor], answer_bits: int, *, unshared: bool) -> list[torch.Tensor]:
    """Returns a product's tensors as the answer sends them.

    Args:
        answer_bits: as in the request's header.
        unshared: no other request has rows in their memory. Else the answer is a copy: a view would
            hold others' answers for as long as its tenant does not read.
    """
    if 0 < answer_bits < EXACT:
        return [take_upper_bits(tensor, answer_bits) for tensor in tensors]
    return list(tensors) if unshared else [tensor.clone() for tensor in tensors]


class Lane(Protocol):
    """Multiplies batches, several at a time if it can; nothing above knows where.

    Attributes:
        inline: ``multiply`` may be called, and runs on this process's processors.
    """

    inline: bool

    @property
    def depth(self) -> int:
        """How many batches may be in flight, so that it need not wait for the next; 0: it is unavailable."""
        ...

    def start(self, batch: Sequence[RowRange]) -> Future[BatchResult]:
        """Multiply rows of one group, direction and members.

        The future raises only if the lane itself is at fault.
        """
        ...

    def multiply(self, batch: Sequence[RowRange]) -> BatchResult:
        """Multiply like ``start``, in this thread."""
        ...

    def attach(self, loop: Loop, changed: Callable[[], None]) -> None:
        """Take the loop in whose thread batches start; call ``changed`` there when ``depth`` has changed."""
        ...

    def close(self) -> None:
        """End batches that run, and take no more."""
        ...


class ProcessLane:
    """An executor in this process: one batch at a time, for each may use all processors.

    Args:
        executor: has the groups of this lane.
    """

    depth, inline = 1, True

    def __init__(self, executor: GroupExecutor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="products")
        self._thread.submit(int)  # now, while there are threads to be had

    def start(self, batch: Sequence[RowRange]) -> Future[BatchResult]:
        """See Lane."""
        return self._thread.submit(self.multiply, batch)

    def multiply(self, batch: Sequence[RowRange]) -> BatchResult:
        """See Lane."""
        began = time.thread_time()
        tensors, good, answers = [], [], list[Answer]()
        for rows in batch:
            try:
                tensors.append(self._tensors(rows))
                good.append(rows)
                answers.append([])
            except Exception as error:
                answers.append(error)
        products = iter(self._products(good, tensors))
        answers = [answer if isinstance(answer, Exception) else next(products) for answer in answers]
        return BatchResult(answers, time.thread_time() - began)

    def _tensors(self, rows: RowRange) -> list[torch.Tensor]:
        request = rows.request
        if request.tensors is None:
            request.tensors = self._executor.tensors(request.header, request.payload)
        if rows.stop - rows.start == request.header.rows:
            return request.tensors
        return [tensor[rows.start : rows.stop] for tensor in request.tensors]

    def _products(self, batch: list[RowRange], tensors: list[list[torch.Tensor]]) -> list[Answer]:
        """Multiply with few calls into torch: each releases Python's lock, for which others may queue."""
        if not batch:
            return []
        header = batch[0].request.header
        ends = list(accumulate((rows.stop - rows.start for rows in batch), initial=0))
        places = [slice(start, stop) for start, stop in pairwise(ends)]
        bits = [rows.request.header.answer_bits for rows in batch]

        def divided(out: list[torch.Tensor]) -> list[torch.Tensor]:
            own, answers = len(batch) == 1, list[torch.Tensor]()
            for place, answer_bits in zip(places, bits, strict=True):
                answers += answer_of(
                    [tensor[place] for tensor in out] if not own else out, answer_bits, unshared=own
                )
            return answers

        try:
            together = tensors[0] if len(batch) == 1 else [torch.cat(c) for c in zip(*tensors, strict=True)]
            out = self._executor.compute(header.group, header.direction, header.members, together, divided)
        except Exception as error:
            if len(batch) == 1:
                return [error]
            # Who of them asked for too much fails alone.
            return [self._products([rows], [own])[0] for rows, own in zip(batch, tensors, strict=True)]
        each = len(out) // len(batch)
        return [out[at : at + each] for at in range(0, len(out), each)]

    def attach(self, loop: Loop, changed: Callable[[], None]) -> None:
        """See Lane: it never changes."""

    def close(self) -> None:
        """See Lane."""
        self._thread.shutdown(wait=False, cancel_futures=True)
