"""A batch as it crosses to a worker: the request, and the places of its rows and answers in memory.

Rows of all requests lie one behind the other, as they are multiplied: writing them there is the copy that
puts a batch together, and answers are computed where they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch

from provider.engine.lanes import RowRange
from shared.ring.mask_stream import MaskStream
from shared.transport.colocated import SharedMemory, aligned
from shared.wire.header import DTYPES, SEED_BYTES, Operation
from shared.wire.protocol import RequestWidths, split_tensors


class RequestRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one request: so many; of a seed from ``start`` on of the ``of`` rows that it stands for."""

    rows: int
    start: int = 0
    of: int = 0

    @classmethod
    def of_range(cls, rows: RowRange) -> RequestRows:
        """Of a request, these."""
        count = rows.stop - rows.start
        return cls(count, rows.start, rows.request.header.rows) if is_seed(rows) else cls(count)


class WorkerBatch(msgspec.Struct, frozen=True, array_like=True):
    """Rows of requests of one group, direction, members and dtype; seeds are behind the others.

    Attributes:
        memory: number of the segment where rows and answers are.
        group, direction, members, dtype: as in a header.
    """

    memory: int
    group: int
    direction: int
    members: int
    dtype: int
    requests: list[RequestRows]


def is_seed(rows: RowRange) -> bool:
    """Whether a request is a seed, which crosses in place of its rows."""
    return rows.request.header.operation == Operation.SEED_EFFECT


class BatchLayout:
    """Where a batch's seeds, rows and answers are.

    Args:
        requests: of the batch.
        dtype: their code.
        widths: of requests and answers.
        terms: how many answers are written, which add up; 1: none is added.

    Attributes:
        terms: of answers.
        sent: bytes that have to be there before the batch is multiplied.
        first: where answers begin.
        size: bytes of all.
    """

    def __init__(
        self, requests: Sequence[RequestRows], dtype: int, widths: RequestWidths, terms: int = 1
    ) -> None:
        self._request_rows, self._widths, self._dtype, self.terms = requests, widths, DTYPES[dtype], terms
        self._seeds = [number for number, request in enumerate(requests) if request.of]
        self._rows, item = sum(request.rows for request in requests), self._dtype.itemsize
        sent_rows = self._rows - sum(requests[number].rows for number in self._seeds)
        at = len(self._seeds) * aligned(SEED_BYTES)
        self.sent = at
        self._requests, self._answers = [], []
        for width in widths.request_widths:
            self._requests.append((at, width))
            self.sent = at + sent_rows * width * item
            at += aligned(self._rows * width * item)
        self.first = at
        for _ in range(terms):
            places = []
            for width in widths.answer_widths:
                places.append((at, width))
                at += aligned(self._rows * width * item)
            self._answers.append(places)
        self.size = at

    def ranges(self) -> list[slice]:
        """The rows of each request."""
        slices, at = [], 0
        for request in self._request_rows:
            slices.append(slice(at, at + request.rows))
            at += request.rows
        return slices

    def write(self, memory: SharedMemory, batch: Sequence[RowRange]) -> None:
        """Copy the rows of requests, or their seeds, to where they shall be."""
        seeds, item = iter(range(len(self._seeds))), self._dtype.itemsize
        for rows, place in zip(batch, self.ranges(), strict=True):
            payload = rows.request.payload
            if is_seed(rows):
                memory.write(next(seeds) * aligned(SEED_BYTES), [payload])
                continue
            tensors = split_tensors(payload, self._widths.request_widths)
            for (at, width), tensor in zip(self._requests, tensors, strict=True):
                memory.put(at + place.start * width * item, tensor[rows.start : rows.stop])

    def requests(self, memory: SharedMemory) -> list[torch.Tensor]:
        """The rows of all requests, [T, width] for each tensor; those of seeds are not there yet."""
        return self._views(memory, self._requests)

    def seeded(self, memory: SharedMemory) -> Iterator[tuple[slice, torch.Tensor]]:
        """The rows that seeds stand for, and where they go."""
        ranges, width = self.ranges(), self._widths.request_widths[0]
        for place, number in enumerate(self._seeds):
            seed = memory.tensor(place * aligned(SEED_BYTES), torch.uint8, (1, SEED_BYTES))
            request = self._request_rows[number]
            stream = MaskStream(seed.numpy().tobytes(), 4 * request.start * width)
            yield ranges[number], stream.draw(request.rows, width)

    def answers(self, memory: SharedMemory, term: int = 0) -> list[torch.Tensor]:
        """Of all requests, [T, width] for each tensor."""
        return self._views(memory, self._answers[term])

    def _views(self, memory: SharedMemory, places: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        return [memory.tensor(at, self._dtype, (self._rows, width)) for at, width in places]
