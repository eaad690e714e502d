"""Savings of a tenant that keeps layers itself: by memory, distance and network. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from provider.planning.capacity import COSTS, PlacedLanes
from shared.kept_groups import Candidate, choose_groups
from shared.wire.header import EXACT, Direction
from shared.wire.protocol import GroupShape
from shared.wire.traffic import token_bytes

SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)  # of the weights
ROUND_TRIPS = (1e-4, 1e-3, 1e-2, 5e-2)  # seconds
GIGABITS = (1, 10)
KEPT_ITEM_BYTES = 4  # float32
# A guess for an ordinary machine: a product of one row takes as long as reading the weights.
TENANT_BYTES_PER_SECOND = 1e10


class KeptForecast(NamedTuple):
    """Of a tenant that keeps some groups.

    Attributes:
        gigabits: of the network, each way.
        size: bytes of the weights that it keeps.
        tokens: that the frozen layers take in a second of decoding, for each of ``ROUND_TRIPS``.
        requests: of a token, for each of these.
        tuning_bytes: of a token of training, up and down, forward and backward, with effects.
    """

    gigabits: float
    size: int
    tokens: list[float]
    requests: list[int]
    tuning_bytes: float


def kept_forecasts(
    lanes: PlacedLanes,
    shapes: Sequence[GroupShape],
    groups: Sequence[int],
    *,
    itemsize: int,
    answer_bits: int = EXACT,
    sources: int = 0,
) -> list[KeptForecast]:
    """A lone tenant with budgets of ``SHARES`` of the weights, by network.

    Groups are chosen for decoding, as a session does. The tenant's other layers are left out.

    Args:
        lanes: where products run, and how long they take.
        shapes: of all groups, in their numerics.
        groups: that every row passes.
        itemsize: bytes of one number on the network.
        answer_bits: that the tenant asks for.
        sources: mask sources whose effects it downloads.
    """

    def moved(at: int, directions: Sequence[Direction]) -> float:
        kind = {"itemsize": itemsize, "answer_bits": answer_bits, "sources": sources}
        return sum(token_bytes([shapes[at]], directions, **kind))

    sizes = [KEPT_ITEM_BYTES * shapes[at].inputs * sum(shapes[at].outputs) for at in groups]
    local = [size / TENANT_BYTES_PER_SECOND for size in sizes]
    forward = [moved(at, (Direction.FORWARD,)) for at in groups]
    both = [moved(at, (Direction.FORWARD, Direction.BACKWARD)) for at in groups]
    software = COSTS.request_seconds + COSTS.tenant_seconds
    per_byte = COSTS.byte_seconds + COSTS.tenant_byte_seconds
    forecasts = []
    for gigabits in GIGABITS:
        each = 8 / (gigabits * 1e9) + per_byte
        near = [
            software + each * size + lanes.product(at, Direction.FORWARD, 1).seconds
            for at, size in zip(groups, forward, strict=True)
        ]
        for share in SHARES:
            budget, tokens, requests, tuning = int(share * sum(sizes)), [], [], 0.0
            for round_trip in ROUND_TRIPS:
                remote = [seconds + round_trip for seconds in near]
                savings = [a - b for a, b in zip(remote, local, strict=True)]
                chosen = set(choose_groups(list(map(Candidate, sizes, savings)), budget))
                places = range(len(sizes))
                tokens.append(1 / sum(local[at] if at in chosen else remote[at] for at in places))
                requests.append(len(sizes) - len(chosen))
                tuning = sum(both[at] for at in places if at not in chosen)
            forecasts.append(KeptForecast(gigabits, budget, tokens, requests, tuning))
    return forecasts
