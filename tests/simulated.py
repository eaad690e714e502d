"""Tenants and an executor on a simulated clock, for tests of scheduling."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from provider.engine.latency import LatencyModel
from provider.engine.scheduler import Batch, BatchKey, Policy, QueuedRequest, rows_of
from shared.wire.header import Direction, RequestClass
from shared.wire.protocol import GroupShape

GROUPS = 8
SHAPES = [GroupShape(1000, (500, 500))] * GROUPS
# A product takes a millisecond, and every row 0.1 more.
FIXED, PER_ROW = 1e-3, 1e-4
DECODE, PREFILL, FINETUNING = RequestClass.DECODE, RequestClass.PREFILL, RequestClass.FINETUNING


def model() -> LatencyModel:
    """A latency model that knows how long products take."""
    made = LatencyModel(SHAPES)
    for direction in (Direction.FORWARD, Direction.BACKWARD):
        line = made.line(0, direction)
        line.fixed, line.per_row = FIXED, PER_ROW
    return made


def queued(
    tenant: str = "a", group: int = 0, rows: int = 1, what: RequestClass = DECODE, now: float = 0.0
) -> QueuedRequest:
    """A request of some rows; one row through all groups is one virtual token."""
    return QueuedRequest(tenant, BatchKey(group, Direction.FORWARD, 0b11, 1), rows, what, 1 / GROUPS, now)


@dataclass
class Tenant:
    """Asks for its groups one after the other, each when it has the answer to the last.

    Args:
        think: seconds between an answer and the next request.
        at_once: requests in flight at the same time, for one who floods.
    """

    name: str
    rows: int
    what: RequestClass
    think: float = 0.0
    at_once: int = 1
    begins: float = 0.0
    ends: float = float("inf")
    served: list[tuple[float, float]] = field(default_factory=list)  # time and virtual tokens
    replies: list[float] = field(default_factory=list)  # seconds of each
    waiting: int = 0  # requests of which rows are left
    rested: list[float] = field(default_factory=list)  # when none was
    group: int = 0

    def next(self, now: float) -> QueuedRequest:
        self.group = (self.group + 1) % GROUPS
        return queued(self.name, self.group, self.rows, self.what, now)


def simulate(policy: Policy, tenants: list[Tenant], seconds: float) -> list[tuple[float, Batch]]:
    """Run tenants against a policy; products take what the model says. Batches and when they began."""
    by_name = {tenant.name: tenant for tenant in tenants}
    asked = [t for t in tenants for _ in range(t.at_once)]
    arrivals = [(tenant.begins, i, tenant) for i, tenant in enumerate(asked)]
    heapq.heapify(arrivals)
    now, order = 0.0, len(arrivals)
    done: list[tuple[float, Batch]] = []
    left: dict[QueuedRequest, int] = {}
    while now < seconds:
        while arrivals and arrivals[0][0] <= now:
            at, _, tenant = heapq.heappop(arrivals)
            request = tenant.next(at)
            left[request] = request.rows
            tenant.waiting += 1
            policy.add(request, now)
        decision = policy.next(now)
        if not isinstance(decision, list):
            following = [arrivals[0][0]] if arrivals else []
            now = max(now, min([*following, *([decision] if decision is not None else [])], default=seconds))
            continue
        assert len({piece.request.key for piece in decision}) == 1
        done.append((now, decision))
        took = FIXED + PER_ROW * rows_of(decision)
        for request, start, stop in decision:
            tenant = by_name[request.tenant]
            tenant.served.append((now, (stop - start) * request.row_cost))
            if stop == request.rows:
                tenant.waiting -= 1
                if not tenant.waiting:
                    tenant.rested.append(now)
        now += took
        policy.finished(decision, took, now)
        for request, start, stop in decision:
            left[request] -= stop - start
            if not left[request]:
                del left[request]
                tenant = by_name[request.tenant]
                tenant.replies.append(now - request.arrived)
                if now < tenant.ends:
                    order += 1
                    heapq.heappush(arrivals, (now + tenant.think, order, tenant))
    return done


def tokens(tenant: Tenant, begin: float, end: float) -> float:
    """Virtual tokens that a tenant got in an interval."""
    return sum(amount for at, amount in tenant.served if begin <= at < end)
