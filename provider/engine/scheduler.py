"""Which rows are multiplied next, and with whom: decisions without I/O, clock or tensors.

``next(now)`` takes rows of waiting requests out of the queue and returns them as one batch, or says
until when it would rather wait. ``provider.engine.engine`` asks, and does what it is told.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from provider.engine.fairness import MAX_CREDIT, VirtualTokenCounters
from provider.engine.latency import LatencyModel
from provider.executor.tiles import TILE, tile_of
from shared.wire.header import Direction, RequestClass

LOCKSTEP_SECONDS = 1.0  # a tenant that does not ask for so long is no longer active, in lockstep
ACTIVE_SECONDS = 0.25  # a tenant that asked this recently is expected to ask again
QUIET_SECONDS = 0.25  # after the last decode, fine-tuning need not make room for the next
# No product is longer while nobody decodes: whoever comes next must not wait for ever. Shorter ones, which
# take longer in all since each reads its weight again, are for when somebody else may wait for a token.
PRODUCT_SECONDS = 0.25
SHORT_PRODUCT_SECONDS = 0.05
# However short: a product had better take so many times as long as its weight's way from memory alone.
MIN_WEIGHT_LOADS = 4.0
INTERACTIVE_SECONDS = 2.0  # who waited for a token this recently may soon wait for the next
MIN_WAIT_SECONDS = 1e-4  # waking up again takes as long
# Requests of each tenant that a decision scans, decodes and others apart. Else a decision would take the
# longer the more requests one tenant has in flight, and all tenants wait while it is made. Of many tenants it
# scans fewer each, but one at least.
SCAN_LIMIT = 64
SCAN_LIMIT_TOTAL = 512


class BatchKey(NamedTuple):
    """What requests must have in common to share a product."""

    group: int
    direction: int
    member_bits: int
    dtype: int


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request on its way through the scheduler.

    Attributes:
        row_cost: virtual tokens of one row, see ``provider.engine.fairness``.
        session: the tenant's session; the requests of a token come one after the other.
        lane: the lane that has its group's weight.
        taken: rows that products have taken, [0, taken).
    """

    tenant: str
    key: BatchKey
    rows: int
    request_class: RequestClass
    row_cost: float
    arrived: float
    session: Hashable = 0
    lane: int = 0
    taken: int = 0

    @property
    def remaining(self) -> int:
        """Rows that no product has taken."""
        return self.rows - self.taken

    @property
    def decodes(self) -> bool:
        """Whether a person waits for a token."""
        return self.request_class == RequestClass.DECODE

    def take(self, rows: int) -> QueuedRows:
        """Takes the next rows, for a product."""
        self.taken += rows
        return QueuedRows(self, self.taken - rows, self.taken)


class QueuedRows(NamedTuple):
    """Rows [start, stop) of a request."""

    request: QueuedRequest
    start: int
    stop: int


Batch = list[QueuedRows]  # of one key


def rows_of(batch: Batch) -> int:
    """Returns how many rows a batch has."""
    return sum(stop - start for _, start, stop in batch)


def effective_request_class(declared: int, direction: int, rows: int) -> RequestClass:
    """Returns the class that a request gets: the declared one, as far as it is possible."""
    if declared == RequestClass.FINETUNING or direction == Direction.BACKWARD:
        return RequestClass.FINETUNING
    if declared == RequestClass.UNDECLARED:
        return RequestClass.DECODE if rows == 1 else RequestClass.PREFILL
    return RequestClass(declared)


class Policy(ABC):
    """Decides what is multiplied next. Not thread-safe: one caller at a time."""

    @abstractmethod
    def add(self, request: QueuedRequest, now: float) -> None:
        """Add a request that has arrived."""

    @abstractmethod
    def next(self, now: float, lane: int = 0) -> Batch | float | None:
        """Returns a batch for a lane; or when to ask again, at the latest; or None: nothing waits for it."""

    @abstractmethod
    def drop(self, request: QueuedRequest) -> None:
        """Forget a request, if it is here: a product of it failed."""

    def finished(self, batch: Batch, seconds: float, now: float) -> None:
        """Record that a batch was multiplied, in so many seconds, until now."""
        return  # by default there is nothing to do

    def session_ended(self, tenant: str, session: Hashable) -> None:
        """Forget a session of a tenant that has ended."""
        return  # by default there is nothing to do


class Unbatched(Policy):
    """No batching: multiplies every request by itself, in the order of arrival."""

    def __init__(self) -> None:
        self._queue: list[QueuedRequest] = []

    def add(self, request: QueuedRequest, now: float) -> None:
        """See Policy."""
        self._queue.append(request)

    def next(self, now: float, lane: int = 0) -> Batch | float | None:
        """See Policy."""
        request = next((request for request in self._queue if request.lane == lane), None)
        if request is None:
            return None
        self._queue.remove(request)
        return [request.take(request.rows)]

    def drop(self, request: QueuedRequest) -> None:
        """See Policy."""
        if request in self._queue:
            self._queue.remove(request)


class Lockstep(Unbatched):
    """Wait until every active tenant asks, then multiply all that share the oldest request's key.

    What batching costs without opportunism (Symbiosis §4.5): the slowest tenant sets the pace.
    """

    def __init__(self) -> None:
        super().__init__()
        self._recent_tenants = _RecentTenants(LOCKSTEP_SECONDS)

    def add(self, request: QueuedRequest, now: float) -> None:
        """See Policy."""
        super().add(request, now)
        self._recent_tenants.record(request.tenant, now)

    def next(self, now: float, lane: int = 0) -> Batch | float | None:
        """See Policy."""
        first = next((request for request in self._queue if request.lane == lane), None)
        if first is None:
            return None
        missing = self._recent_tenants.latest_of_others({request.tenant for request in self._queue}, now)
        if missing is not None:
            return missing + self._recent_tenants.seconds
        key = first.key
        batch = [request for request in self._queue if request.key == key]
        self._queue = [request for request in self._queue if request.key != key]
        return [request.take(request.rows) for request in batch]


@dataclass(frozen=True)
class LatencyObjective:
    """What the provider promises, and how long it lets requests wait for other requests.

    Attributes:
        decode_seconds: the executor's part of one token: waiting and products of all groups together.
        decode_rows: sequences that one tenant may decode at once; what it asks for beyond that waits like
            prompts do, whatever it is declared to be.
        wait_share: how long a request waits for others to join it, as a share of the time that its own
            product takes, so that larger ones wait longer (Symbiosis §3.7).
        wait_seconds: the most that any request waits for others.
    """

    decode_seconds: float = 0.1
    decode_rows: int = 256
    wait_share: float = 0.25
    wait_seconds: float = 0.005


class Opportunistic(Policy):
    """Decode first, then the least served tenant; requests that share the weight come along.

    Batches without padding or lockstep (Symbiosis §3.7); limits on rows that nobody waits for, set
    by a latency model (FlexLLM §6.2); virtual token counters (FlexLLM, appendix C). Among tenants that
    wait, none gets further ahead of the least served than the largest product or MAX_CREDIT tokens cost,
    whatever it declares: FlexLLM's lemma 1 with that cost as the bound.

    Of decodes those in the first groups go first. They catch up with the ones further on, and from
    there on go through the groups with them, in the same products: tenants fall in step where there is
    more to do than time, and none waits for another that does not ask.

    Of prompts one that has begun goes on: a few rows of each in turn would have all wait for the last, and
    then all ask for the next group at once.

    Args:
        latency: how long products take.
        objective: see there.
    """

    def __init__(self, latency: LatencyModel, objective: LatencyObjective | None = None) -> None:
        self._latency, self._objective = latency, objective or LatencyObjective()
        self.tokens = DecodeController(self._objective.decode_seconds)
        # A token passes all groups: each request has its part of the time.
        self._request_seconds = self._objective.decode_seconds / max(1, len(latency.shapes))
        # By lane, tenant and whether they decode, in the order of arrival.
        self._queues: dict[tuple[int, str, bool], dict[QueuedRequest, None]] = {}
        self._decoding: Counter[str] = Counter()  # rows of decodes in the queue, by tenant
        self._recent_tenants = _RecentTenants(ACTIVE_SECONDS)
        self._last_decode = -math.inf
        self._recent_interactive = _RecentTenants(INTERACTIVE_SECONDS)
        self.counters = VirtualTokenCounters()

    def add(self, request: QueuedRequest, now: float) -> None:
        """See Policy."""
        if request.decodes:
            if self._decoding[request.tenant] + request.rows > self._objective.decode_rows:
                request.request_class = RequestClass.PREFILL
            else:
                self._decoding[request.tenant] += request.rows
        self.counters.started_waiting(request.tenant)
        self._queues.setdefault(_queue_of(request), {})[request] = None
        self._recent_tenants.record(request.tenant, now)

    def next(self, now: float, lane: int = 0) -> Batch | float | None:
        """See Policy."""
        queues = [queue.keys() for key, queue in self._queues.items() if key[0] == lane]
        each = max(1, min(SCAN_LIMIT, SCAN_LIMIT_TOTAL // max(1, len(queues))))
        waiting = [request for queue in queues for request in islice(queue, each)]
        if not waiting:
            return None
        for request in waiting:
            self._record_activity(request, now)
        uncontended = (
            self._recent_tenants.latest_of_others({tenant for _, tenant, _ in self._queues}, now) is None
        )
        if (
            uncontended and len(waiting) == 1 and len(self._queues) == 1
        ):  # nobody to be fair to, no time to lose
            return [self._take(waiting[0], self._most_rows(waiting[0], now))]
        row_limits: dict[tuple[str, BatchKey], int] = {}  # the same for many
        for request in waiting:
            if not request.decodes and (request.tenant, request.key) not in row_limits:
                row_limits[request.tenant, request.key] = self._row_limit(request, now)
        costs = {
            request: min(request.remaining, row_limits.get((request.tenant, request.key), request.remaining))
            * request.row_cost
            for request in waiting
        }
        # Nobody who is further ahead than this is multiplied before the least served has caught up.
        limit = min(self.counters.of(request.tenant) for request in waiting) + max(
            MAX_CREDIT, *costs.values()
        )
        eligible = [
            request for request in waiting if self.counters.of(request.tenant) + costs[request] <= limit
        ]
        ready_at = {request: now if uncontended else self._ready_at(request) for request in eligible}
        candidates = [request for request in eligible if ready_at[request] <= now]
        if not candidates:
            return min(ready_at.values())
        first = min(candidates, key=self._precedence)
        batchable = [request for request in eligible if request.key == first.key]
        return self._batch(first, batchable, limit, row_limits)

    def drop(self, request: QueuedRequest) -> None:
        """See Policy."""
        key = _queue_of(request)
        queue = self._queues.get(key, {})
        if request in queue:
            del queue[request]
            if not queue:
                del self._queues[key]
            self.counters.stopped_waiting(request.tenant)
            if request.decodes:
                self._decoding[request.tenant] -= request.rows
                if not self._decoding[request.tenant]:
                    del self._decoding[request.tenant]

    def finished(self, batch: Batch, seconds: float, now: float) -> None:
        """See Policy."""
        group, direction, member_bits, _ = batch[0].request.key
        self._latency.observe(group, direction, member_bits, rows_of(batch), seconds)
        for request, _, stop in batch:
            self._record_activity(request, now)
            if request.decodes and stop == request.rows:
                self.tokens.answered((request.tenant, request.session), group, now - request.arrived)

    def session_ended(self, tenant: str, session: Hashable) -> None:
        """See Policy."""
        self.tokens.session_ended((tenant, session))

    def _precedence(self, request: QueuedRequest) -> tuple[bool, int, bool, float, int, float]:
        group = request.key.group if request.decodes else 0
        goes_on = request.taken > 0 and request.request_class == RequestClass.PREFILL
        served = self.counters.of(request.tenant)
        return (not request.decodes, group, not goes_on, served, request.request_class, request.arrived)

    def _ready_at(self, request: QueuedRequest) -> float:
        """Returns when a request has waited long enough for others; one that has begun waits no more."""
        if request.taken:
            return request.arrived
        group, direction, member_bits, _ = request.key
        wait = self._objective.wait_share * self._latency.seconds(group, direction, member_bits, request.rows)
        wait = min(wait, self._objective.wait_seconds)
        return request.arrived + (wait if wait > MIN_WAIT_SECONDS else 0.0)

    def _record_activity(self, request: QueuedRequest, now: float) -> None:
        """Record that a person waits, or waited just now, for the token of this request, if it is for one."""
        if request.decodes:
            self._last_decode = now
        if request.request_class != RequestClass.FINETUNING:
            self._recent_interactive.record(request.tenant, now)

    def _row_limit(self, request: QueuedRequest, now: float) -> int:
        """Returns the most rows of a product that this request, no decode, may be part of."""
        group, direction, member_bits, _ = request.key
        others = self._recent_interactive.latest_of_others({request.tenant}, now)
        seconds = PRODUCT_SECONDS
        if others is not None:
            weight_load_seconds = self._latency.seconds(group, direction, member_bits, 0)
            seconds = min(seconds, max(SHORT_PRODUCT_SECONDS, MIN_WEIGHT_LOADS * weight_load_seconds))
        if now - self._last_decode <= QUIET_SECONDS:
            seconds_of_decode = self._latency.seconds(group, Direction.FORWARD, member_bits, 1)
            seconds = min(
                seconds, self.tokens.product_time_factor * self._request_seconds - seconds_of_decode
            )
        rows = self._latency.rows(group, direction, member_bits, seconds)
        return max(TILE, rows - rows % tile_of(rows))

    def _most_rows(self, request: QueuedRequest, now: float) -> int:
        """Returns how many rows of a request one product can have."""
        return request.remaining if request.decodes else min(request.remaining, self._row_limit(request, now))

    def _batch(
        self,
        first: QueuedRequest,
        batchable: list[QueuedRequest],
        limit: float,
        row_limits: dict[tuple[str, BatchKey], int],
    ) -> Batch:
        """Makes a batch of the first, all decodes of its key, and as many other rows as the limit leaves."""
        batch: Batch = []
        for request in sorted(
            batchable, key=lambda request: (request is not first, *self._precedence(request))
        ):
            rows = (
                request.remaining
                if request.decodes
                else min(request.remaining, row_limits[request.tenant, request.key] - rows_of(batch))
            )
            cost = rows * request.row_cost
            if rows <= 0 or (request is not first and self.counters.of(request.tenant) + cost > limit):
                continue  # passed over, not waited for
            batch.append(self._take(request, rows))
        return batch

    def _take(self, request: QueuedRequest, rows: int) -> QueuedRows:
        self.counters.charge(request.tenant, rows * request.row_cost)
        queued_rows = request.take(rows)
        if not request.remaining:
            self.drop(request)
        return queued_rows


def _queue_of(request: QueuedRequest) -> tuple[int, str, bool]:
    return request.lane, request.tenant, request.decodes


class DecodeController:
    """Counts decoded tokens that met the objective, and adapts the time of products to it.

    A token's requests pass the groups in order, so a session's next token begins where the groups begin
    again. Two controllers follow what tokens take, since no model tells how often a decode finds others at
    work. ``product_time_factor`` grows while tokens take less than a target, and shrinks while they take
    more. The target is such a share of the objective that LATE of the tokens are late, for they differ.

    Attributes:
        met, late: counts.
        product_time_factor: factor of the time that a product nobody waits for may take.
    """

    LATE = 0.02
    STEP, TARGET_STEP = 0.05, 0.3
    MIN_TARGET, MAX_TARGET = 0.1, 0.8
    MIN_FACTOR, MAX_FACTOR = 0.1, 2.0

    def __init__(self, objective: float) -> None:
        self._objective = objective
        self._progress: dict[Hashable, tuple[int, float]] = {}  # last group, seconds so far
        self._target_share = self.MAX_TARGET  # of the objective
        self.met = self.late = 0
        self.product_time_factor = 1.0

    @property
    def counts(self) -> tuple[int, int]:
        """How many tokens met the objective, and how many were late."""
        return self.met, self.late

    def session_ended(self, session: Hashable) -> None:
        """Forget a session that has ended."""
        self._progress.pop(session, None)

    def answered(self, session: Hashable, group: int, seconds: float) -> None:
        """Record that a decode of a session has its answer."""
        last, spent = self._progress.get(session, (-1, 0.0))
        if group <= last:
            late = spent > self._objective
            self.late += late
            self.met += not late
            target_share = self._target_share * math.exp(self.TARGET_STEP * (self.LATE - late))
            self._target_share = min(self.MAX_TARGET, max(self.MIN_TARGET, target_share))
            spent = max(spent, self._objective / 8)  # what is no token must not count for many
            factor = self.product_time_factor * (self._target_share * self._objective / spent) ** self.STEP
            self.product_time_factor = min(self.MAX_FACTOR, max(self.MIN_FACTOR, factor))
            spent = 0.0
        self._progress[session] = (group, spent + seconds)


class _RecentTenants:
    """Remembers the tenants that asked within the last ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._last: dict[str, float] = {}  # the latest at the end

    def record(self, tenant: str, now: float) -> None:
        self._last.pop(tenant, None)
        self._last[tenant] = now

    def latest_of_others(self, tenants: set[str], now: float) -> float | None:
        """Returns when an active tenant other than these asked last; None: there is none."""
        for tenant, at in reversed(self._last.items()):
            if at + self.seconds <= now:  # as callers add, so that they do not come back too early
                return None
            if tenant not in tenants:
                return at
        return None


# By their names in ``ServeConfig.batching``.
POLICIES: dict[str, Callable[[LatencyModel, LatencyObjective], Policy]] = {
    "opportunistic": Opportunistic,
    "none": lambda *_: Unbatched(),
    "lockstep": lambda *_: Lockstep(),
}


def make_policy(name: str, latency: LatencyModel, objective: LatencyObjective) -> Policy:
    """Returns a policy by its name in POLICIES."""
    return POLICIES[name](latency, objective)
