"""Tenants, a network, an executor's loop and its lanes on a simulated clock; the policy is the real one.

Each tenant asks for one group after the other, as a model does, and for the next when it has the answer to
the last. A request passes the network up, the executor's one thread, a product that it may share with others,
that thread again and the network down. Each of these serves one after the other.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from provider.engine.scheduler import (
    Batch,
    BatchKey,
    Policy,
    QueuedRequest,
    QueuedRows,
    effective_request_class,
    rows_of,
)
from provider.planning.options import NetworkLink
from shared.wire.header import Direction, RequestClass


class Costs(NamedTuple):
    """What a request costs beside its product and the network.

    Attributes:
        request_seconds: of the executor's thread, receiving and answering together.
        byte_seconds: of that thread, for each byte of request and answer.
        tenant_seconds: of a tenant's machine, between an answer and the next request.
        tenant_byte_seconds: of that machine, for each byte of request and answer.
    """

    request_seconds: float
    byte_seconds: float
    tenant_seconds: float
    tenant_byte_seconds: float = 0.0


class Product(NamedTuple):
    """How long a product takes, of that how long its weight's way from memory, and how long before the lane
    can begin the next; the last is no longer than the first.
    """

    seconds: float
    reading: float
    busy: float


class Lanes(Protocol):
    """Where products run."""

    count: int
    depth: int  # batches that a lane is given, of which it multiplies one

    def of(self, group: int) -> int:
        """The lane of a group."""
        ...

    def product(self, group: int, direction: Direction, rows: int) -> Product:
        """Of so many rows, of any requests."""
        ...


class Step(NamedTuple):
    """A request of a pass: by all members of a group; bytes of one row on the network, up and down."""

    group: int
    direction: Direction
    member_bits: int
    up: float
    down: float


@dataclass
class Load:
    """Tenants that all do the same, again and again.

    Attributes:
        rows: of each request.
        steps: of a pass, in order.
        machines: how many processors tenants share; 0: each has one.
    """

    tenants: int
    rows: int
    what: RequestClass
    steps: Sequence[Step]
    machines: int = 0


@dataclass
class _Serial:
    """Serves one after the other, in the order in which it is asked."""

    free: float = 0.0
    busy: float = 0.0

    def take(self, now: float, seconds: float) -> float:
        """When it is done."""
        self.free = max(now, self.free) + seconds
        self.busy += seconds
        return self.free


@dataclass
class _Lane(_Serial):
    reading: float = 0.0
    in_flight: int = 0
    wakes: float = float("inf")


class CapacityForecast(NamedTuple):
    """What tenants got, and how busy what was in the time of it, 0 to 1.

    Attributes:
        passes_per_second: of all tenants together: tokens, or steps.
        pass_seconds: of one tenant's pass, on average.
        rows: in one product, on average.
        network_up, network_down, requests, products: busy shares; of lanes the busiest's.
        reading: of the busiest lane's time the share in which a weight came from memory.
    """

    passes_per_second: float
    pass_seconds: float
    rows: float
    network_up: float
    network_down: float
    requests: float
    products: float
    reading: float

    @property
    def limit(self) -> str:
        """What more of would help: what is busy nearly all the time, or else the ways back and forth."""
        shares = {
            "network up": self.network_up,
            "network down": self.network_down,
            "requests, which one thread receives and answers": self.requests,
            "memory bandwidth" if self.reading > 0.5 else "products": self.products,
        }
        name = max(shares, key=lambda each: shares[each])
        return name if shares[name] >= BUSY else "round trips, of which each waits for the one before"


BUSY = 0.75


@dataclass
class Simulation:
    """One executor and its tenants.

    Args:
        policy: who is next.
        lanes: where products run.
        link: to the tenants, all of whom share it, with a rate of its own in each direction.
        costs: of requests.
        load: what tenants do.
    """

    policy: Policy
    lanes: Lanes
    link: NetworkLink
    costs: Costs
    load: Load
    _events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin each tenant at another place of its pass."""
        self._order = itertools.count()
        self._up, self._down, self._loop = _Serial(), _Serial(), _Serial()
        self._lanes = [_Lane() for _ in range(self.lanes.count)]
        self._machines = [_Serial() for _ in range(self.load.machines or self.load.tenants)]
        self._remaining: dict[QueuedRequest, int] = {}  # rows without an answer
        self._at: dict[QueuedRequest, int] = {}  # its place in the pass
        self._answered = self._products = self._rows = 0
        steps = len(self.load.steps)
        for tenant in range(self.load.tenants):
            self._later(0.0, self._asks(tenant, tenant * steps // self.load.tenants))

    def run(self, passes: float = 2.0, warm_up: float = 1.0) -> CapacityForecast:
        """Until so many passes of each tenant on average, after some that do not count."""
        each = len(self.load.steps) * self.load.tenants
        began = self._until(int(each * warm_up))
        before = self._counted()
        ended = self._until(self._answered + max(1, int(each * passes)))
        change = [new - old for new, old in zip(self._counted(), before, strict=True)]
        answered, products, rows, up, down, loop, *lanes = change
        half = len(lanes) // 2
        busiest = max(range(half), key=lambda lane: lanes[lane])
        seconds = ended - began
        done = answered / len(self.load.steps)
        return CapacityForecast(
            passes_per_second=done / seconds,
            pass_seconds=self.load.tenants * seconds / done,
            rows=rows / max(1, products),
            network_up=up / seconds,
            network_down=down / seconds,
            requests=loop / seconds,
            products=lanes[busiest] / seconds,
            reading=lanes[half + busiest] / max(lanes[busiest], 1e-12),
        )

    def _counted(self) -> list[float]:
        lanes = [each.busy for each in self._lanes] + [each.reading for each in self._lanes]
        counts = [self._answered, self._products, self._rows]
        return [*counts, self._up.busy, self._down.busy, self._loop.busy, *lanes]

    def _until(self, answered: int) -> float:
        now = 0.0
        while self._answered < answered:
            now, _, event = heapq.heappop(self._events)
            event(now)
        return now

    def _later(self, at: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    def _asks(self, tenant: int, at: int) -> Callable[[float], None]:
        group, direction, member_bits, up, down = self.load.steps[at]
        size = self.load.rows * (up + down)
        thread = self.costs.request_seconds / 2 + self.costs.byte_seconds * size / 2

        tenant_seconds = self.costs.tenant_seconds + self.costs.tenant_byte_seconds * size
        what = effective_request_class(self.load.what, direction, self.load.rows)

        def made(now: float) -> None:
            self._later(self._machines[tenant % len(self._machines)].take(now, tenant_seconds), sent)

        def sent(now: float) -> None:
            arrival = self._up.take(now, self.load.rows * up / self.link.bytes_per_second)
            self._later(arrival + self.link.seconds, received)

        def received(now: float) -> None:
            self._later(self._loop.take(now, thread), ready)

        def ready(now: float) -> None:
            key = BatchKey(group, direction, member_bits, 1)
            cost, lane = 1 / len(self.load.steps), self.lanes.of(group)
            request = QueuedRequest(str(tenant), key, self.load.rows, what, cost, now, lane=lane)
            self._remaining[request], self._at[request] = self.load.rows, at
            self.policy.add(request, now)
            self._give(lane, now)

        return made

    def _answer(self, request: QueuedRequest, now: float) -> None:
        at = self._at.pop(request)
        del self._remaining[request]
        *_, up, down = self.load.steps[at]
        size = self.load.rows * (up + down)
        written = self._loop.take(now, self.costs.request_seconds / 2 + self.costs.byte_seconds * size / 2)

        def sent(now: float) -> None:
            arrival = self._down.take(now, self.load.rows * down / self.link.bytes_per_second)
            self._later(arrival + self.link.seconds, answered)

        def answered(now: float) -> None:
            self._answered += 1
            self._asks(int(request.tenant), (at + 1) % len(self.load.steps))(now)

        self._later(written, sent)

    def _give(self, number: int, now: float) -> None:
        """As many batches as the lane takes."""
        lane = self._lanes[number]
        while lane.in_flight < self.lanes.depth:
            decision = self.policy.next(now, number)
            if not isinstance(decision, list):
                if decision is not None and not now < lane.wakes <= decision:
                    lane.wakes = decision
                    self._later(decision, lambda now: self._give(number, now))
                return
            self._start(number, lane, decision, now)

    def _start(self, number: int, lane: _Lane, batch: Batch, now: float) -> None:
        key, rows = batch[0].request.key, rows_of(batch)
        product = self.lanes.product(key.group, Direction(key.direction), rows)
        began = max(now, lane.free)
        free = lane.take(now, product.busy)
        lane.reading += min(product.reading, product.busy)
        lane.in_flight += 1
        self._products += 1
        self._rows += rows

        def done(now: float) -> None:
            lane.in_flight -= 1
            self.policy.finished(batch, product.seconds, now)
            for queued_rows in batch:
                self._range_done(queued_rows, now)
            self._give(number, now)

        self._later(max(free, began + product.seconds), done)

    def _range_done(self, queued_rows: QueuedRows, now: float) -> None:
        self._remaining[queued_rows.request] -= queued_rows.stop - queued_rows.start
        if not self._remaining[queued_rows.request]:
            self._answer(queued_rows.request, now)
