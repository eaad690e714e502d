"""Who gets how much of an executor, on a simulated clock."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from simulated import (
    DECODE,
    FINETUNING,
    FIXED,
    GROUPS,
    PER_ROW,
    PREFILL,
    Tenant,
    model,
    queued,
    simulate,
    tokens,
)

from provider.engine.scheduler import (
    PRODUCT_SECONDS,
    BatchKey,
    LatencyObjective,
    Opportunistic,
    QueuedRequest,
    effective_request_class,
)
from shared.wire.header import Direction


def largest_piece() -> float:
    """U of FlexLLM's lemma 1: the most virtual tokens that one piece costs."""
    rows = int((PRODUCT_SECONDS - FIXED) / PER_ROW)
    return rows / GROUPS


@pytest.mark.parametrize("seed", range(5))
def test_backlogged_tenants_get_the_same_within_the_bound_of_the_theorem(seed: int) -> None:
    """FlexLLM, theorem 1: |W_f - W_g| <= 2 U in any interval in which both wait all the time."""
    draw = random.Random(seed)
    tenants = [
        Tenant(
            f"tenant {i}",
            draw.choice([1, 8, 100, 1000, 3000]),
            draw.choice([DECODE, PREFILL, FINETUNING]),
            at_once=draw.choice([1, 2, 12]) + 1,  # so that one nearly always waits
        )
        for i in range(5)
    ]
    for tenant in tenants:
        tenant.what = effective_request_class(tenant.what, Direction.FORWARD, tenant.rows)
    simulate(Opportunistic(model()), tenants, 8.0)
    compared = 0
    for _ in range(200):
        begin, end = sorted((draw.uniform(0.1, 8.0), draw.uniform(0.1, 8.0)))
        waited = [t for t in tenants if not any(begin <= at <= end for at in t.rested)]
        got = [tokens(tenant, begin, end) for tenant in waited]
        assert max(got, default=0.0) - min(got, default=0.0) <= 2 * largest_piece()
        compared += len(waited) > 1
    assert compared > 100


def test_whoever_floods_gets_no_more_than_its_share() -> None:
    """One that has forty decodes in flight all the time, beside one that fine-tunes."""
    flood = Tenant("flood", 16, DECODE, at_once=40)
    tune = Tenant("tune", 512, FINETUNING, at_once=2)
    simulate(Opportunistic(model()), [flood, tune], 20.0)
    assert tokens(tune, 1.0, 20.0) >= 0.95 * tokens(flood, 1.0, 20.0)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_whoever_always_asks_for_the_first_group_does_not_starve_who_passes_through_all(rows: int) -> None:
    """Seven connections of one tenant, so that one always waits, and kinds that share no product."""

    @dataclass
    class Stubborn(Tenant):
        def next(self, now: float) -> QueuedRequest:
            self.group += 1
            key = BatchKey(0, Direction.FORWARD, 0b11, self.group % 7)
            return QueuedRequest(self.name, key, self.rows, DECODE, 1 / GROUPS, now)

    person = Tenant("person", 1, DECODE, think=0.0005)
    simulate(Opportunistic(model()), [person], 10.0)
    alone = len(person.replies)
    person = Tenant("person", 1, DECODE, think=0.0005)
    flood = Stubborn("flood", rows, DECODE, at_once=7)
    simulate(Opportunistic(model()), [person, flood], 10.0)
    # It is served as much as the flood: in requests, as often for one row, and for more rows more often.
    fair_share = alone / (1 + (FIXED + PER_ROW * rows) / (FIXED + PER_ROW))
    assert len(person.replies) > 0.4 * fair_share
    assert tokens(flood, 1.0, 10.0) <= 1.5 * rows * tokens(person, 1.0, 10.0)


def test_a_tenant_that_rested_saved_nothing_up() -> None:
    """And owes nothing: from its return on it gets half, not all that it did not use."""
    steady = Tenant("steady", 256, FINETUNING, at_once=2)
    late = Tenant("late", 256, FINETUNING, at_once=2, begins=10.0)
    simulate(Opportunistic(model()), [steady, late], 20.0)
    first, second = tokens(steady, 10.5, 15.0), tokens(late, 10.5, 15.0)
    assert abs(first - second) <= 2 * largest_piece()


def test_who_does_not_fit_is_passed_over() -> None:
    """A tenant that is too far ahead keeps nobody else out of a product."""
    policy = Opportunistic(model(), LatencyObjective(decode_seconds=0.04))
    policy.counters.started_waiting("greedy")
    policy.counters.charge("greedy", 1e6)
    policy.counters.stopped_waiting("greedy")
    policy.add(queued("modest", rows=1), 0.0)
    policy.counters._tokens["modest"] = 0.0
    policy.add(queued("greedy", rows=1), 0.0)
    policy.add(queued("other", rows=1), 0.0)
    policy.counters._tokens["other"] = 0.0
    batch = policy.next(1.0)
    assert isinstance(batch, list)
    assert {queued_rows.request.tenant for queued_rows in batch} == {"modest", "other"}
    assert isinstance(policy.next(1.0), list)
