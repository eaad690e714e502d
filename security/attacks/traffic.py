"""Attacks on the traffic: information in numbers of rows, directions, groups, sizes and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from security.recordings.transcript import RecordedRequest
from shared.wire.header import HEADER_BYTES, Direction, Operation

FRAME_BYTES = 14  # of a masked websocket frame's header, 65,536 bytes and more; TLS adds 22 a record


# Fingerprints are made with products in the other direction, of numbers of rows that are known.
FINGERPRINT_ROWS = (4, 8, 40)


@dataclass(frozen=True)
class NetworkView:
    """A network observer: of each message from the tenant its time (seconds) and size (bytes)."""

    times: np.ndarray
    sizes: np.ndarray
    sees = "network observer"


def network_view(requests: list[RecordedRequest]) -> NetworkView:
    """Times and sizes of a transcript's messages, which TLS does not hide."""
    sizes = [request.header.payload_bytes + HEADER_BYTES + FRAME_BYTES for request in requests]
    return NetworkView(np.array([r.arrived for r in requests]), np.array(sizes))


@dataclass(frozen=True)
class InferredTraffic:
    """What the traffic of a session says.

    ``prompts`` and ``generated``: for each prompt its rows and how many tokens followed it; ``training``
    whether gradients were asked for; ``lowest`` the group at which they end, below which there is no
    adapter.
    """

    prompts: list[int]
    generated: list[int]
    training: bool
    lowest: int | None


class TrafficAnalysis:
    """Read lengths and the kind of work off the headers."""

    name: ClassVar[str] = "traffic analysis, provider"
    goal: ClassVar[str] = "prompt and answer lengths, training or inference, where adapters are"
    sees: ClassVar[str] = "headers of requests: group, direction, rows, time"
    metric: ClassVar[str] = "prompts whose length is read exactly"
    source: ClassVar[str] = "Weiss et al., arXiv 2403.09751, for token lengths"

    def attack(self, view: list[RecordedRequest], rng: np.random.Generator) -> InferredTraffic:
        """See Attack; rows of the first group tell forward passes apart."""
        first = [
            request.header.rows
            for request in view
            if (request.header.operation, request.header.group) == (Operation.PRODUCT, 0)
            and request.header.direction == Direction.FORWARD
        ]
        least = min(first, default=1)  # a decode step; more than 1 where rows are padded
        prompts: list[int] = []
        generated: list[int] = []
        for rows in first:
            if rows > least or not prompts:
                prompts.append(rows)
                generated.append(0)
            else:
                generated[-1] += 1
        backward = [
            request.header.group
            for request in view
            if request.header.direction == Direction.BACKWARD
            and request.header.operation == Operation.PRODUCT
            and request.header.rows not in FINGERPRINT_ROWS
        ]
        return InferredTraffic(prompts, generated, bool(backward), min(backward, default=None))


class TrafficAnalysisOutside:
    """The same from sizes alone: the period of the sizes shows passes, their height the rows.

    Args:
        row_bytes: of the first group's inputs, known from the public model.
        groups: requests of one forward pass.
    """

    name: ClassVar[str] = "traffic analysis, network"
    goal: ClassVar[str] = "prompt lengths"
    sees: ClassVar[str] = "sizes and times of TLS records"
    metric: ClassVar[str] = "prompts whose length is read exactly"
    source: ClassVar[str] = "Weiss et al., arXiv 2403.09751"

    def __init__(self, row_bytes: int, groups: int) -> None:
        self.row_bytes, self.groups = row_bytes, groups

    def attack(self, view: NetworkView, rng: np.random.Generator) -> list[int]:
        """Rows of each prompt, if passes follow one another without gradients."""
        starts = view.sizes[:: self.groups] - HEADER_BYTES - FRAME_BYTES
        rows = starts // self.row_bytes
        return [int(count) for count in rows if count > rows.min(initial=1 << 31)]
