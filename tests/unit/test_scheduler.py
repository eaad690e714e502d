"""Scheduling decisions with a simulated clock: no sockets, no tensors, no sleeping."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import (
    DECODE,
    FINETUNING,
    FIXED,
    GROUPS,
    PER_ROW,
    PREFILL,
    SHAPES,
    Tenant,
    model,
    queued,
    simulate,
    tokens,
)

from provider.engine.latency import LatencyModel
from provider.engine.scheduler import (
    INTERACTIVE_SECONDS,
    PRODUCT_SECONDS,
    QUIET_SECONDS,
    SCAN_LIMIT,
    SCAN_LIMIT_TOTAL,
    SHORT_PRODUCT_SECONDS,
    Batch,
    BatchKey,
    DecodeController,
    LatencyObjective,
    Lockstep,
    Opportunistic,
    Policy,
    QueuedRequest,
    Unbatched,
    effective_request_class,
    make_policy,
    rows_of,
)
from shared.latency import LinearLatency
from shared.wire.header import Direction, RequestClass
from shared.wire.protocol import GroupShape

# -- what a decision costs ----------------------------------------------------------------------


class Counting(LatencyModel):
    """Counts how often a decision asks what a product takes."""

    asked = 0

    def seconds(self, group: int, direction: int, members: int, rows: int) -> float:
        """See LatencyModel."""
        self.asked += 1
        return super().seconds(group, direction, members, rows)


@pytest.mark.parametrize("others", [0, 1])
def test_a_decision_takes_no_longer_because_one_tenant_has_more_in_flight(others: int) -> None:
    asked = []
    for count in (SCAN_LIMIT, 40 * SCAN_LIMIT):
        latency = Counting(SHAPES)
        policy = Opportunistic(latency)
        for at in range(count):
            policy.add(queued("flood", at % GROUPS, 1, FINETUNING, 0.0), 0.0)
        for at in range(others):
            policy.add(queued(f"bob {at}", 3, 1, FINETUNING, 0.0), 0.0)
        latency.asked = 0
        next_batch(policy, 1.0)
        asked.append(latency.asked)
    assert asked[0] == asked[1]


def test_a_decision_takes_no_longer_because_many_tenants_have_much_in_flight() -> None:
    asked = []
    for count in (SCAN_LIMIT_TOTAL // 64, SCAN_LIMIT):
        latency = Counting(SHAPES)
        policy = Opportunistic(latency)
        for tenant in range(64):
            for at in range(count):
                policy.add(queued(f"tenant {tenant}", at % GROUPS, 1, FINETUNING, 0.0), 0.0)
        latency.asked = 0
        next_batch(policy, 1.0)
        asked.append(latency.asked)
    assert asked[0] == asked[1]


def test_a_decode_is_seen_behind_much_else_of_its_tenant() -> None:
    policy = Opportunistic(model())
    for _ in range(10 * SCAN_LIMIT):
        policy.add(queued("a", 0, 8, FINETUNING), 0.0)
    policy.add(queued("a", 3, 1, DECODE), 0.0)
    assert next_batch(policy, 1.0)[0].request.decodes


def test_everything_of_a_long_queue_is_served() -> None:
    policy, count = Opportunistic(model()), 5 * SCAN_LIMIT
    for at in range(count):
        policy.add(queued("a", at % GROUPS, 1, FINETUNING), 0.0)
        policy.add(queued("b", at % GROUPS, 1, DECODE if at < 200 else PREFILL), 0.0)
    served = 0
    while (batch := policy.next(100.0)) is not None:
        assert isinstance(batch, list)
        served += len(batch)
    assert served == 2 * count
    assert not policy._queues


# -- who comes along -------------------------------------------------------------------------------


def test_requests_of_one_kind_share_a_product() -> None:
    policy = Opportunistic(model())
    asked = [queued(f"tenant {i}", group=i % 2, rows=1 + i) for i in range(6)]
    for request in asked:
        policy.add(request, 0.0)
    batches = [policy.next(1.0), policy.next(1.0)]
    assert all(isinstance(batch, list) for batch in batches)
    assert policy.next(1.0) is None
    found = [{each.request for each in batch} for batch in batches if isinstance(batch, list)]
    assert sorted(map(len, found)) == [3, 3]
    assert set.union(*found) == set(asked)


@pytest.mark.parametrize(
    "other", [BatchKey(0, 2, 3, 1), BatchKey(0, 1, 2, 1), BatchKey(0, 1, 3, 2), BatchKey(1, 1, 3, 1)], ids=str
)
def test_other_keys_do_not(other: BatchKey) -> None:
    policy = Opportunistic(model())
    policy.add(queued("a"), 0.0)
    request = queued("b")
    request.key = other
    policy.add(request, 0.0)
    assert [len(batch) for batch in (policy.next(9.0), policy.next(9.0)) if isinstance(batch, list)] == [1, 1]


def test_a_lone_tenant_never_waits() -> None:
    policy = Opportunistic(model())
    for now in range(10):
        policy.add(queued(rows=1 + 100 * now, now=now * 0.01), now * 0.01)
        assert isinstance(policy.next(now * 0.01), list)
        while policy.next(now * 0.01) is not None:
            pass


def test_larger_requests_wait_longer_for_others_but_never_longer_than_the_bound() -> None:
    def waits(rows: int, what: RequestClass) -> float:
        policy = Opportunistic(model(), LatencyObjective(wait_seconds=0.002))
        policy.add(queued("other"), 0.0)
        assert isinstance(policy.next(0.01), list)  # somebody else was here a moment ago
        policy.add(queued(rows=rows, what=what, now=0.01), 0.01)
        decision = policy.next(0.01)
        assert isinstance(decision, float)
        assert isinstance(policy.next(decision), list)
        return decision - 0.01

    assert waits(1, DECODE) < waits(8, DECODE) < waits(40, PREFILL) < waits(4000, FINETUNING)
    assert waits(4000, FINETUNING) == pytest.approx(0.002)


def test_nobody_waits_once_everybody_is_here() -> None:
    policy = Opportunistic(model())
    policy.add(queued("a"), 0.0)
    policy.add(queued("b", group=3), 0.0)
    assert isinstance(policy.next(0.0), list)


# -- latency ---------------------------------------------------------------------------------------


def test_a_large_request_is_divided_and_comes_back_whole() -> None:
    policy = Opportunistic(model())
    request = queued(rows=5000, what=FINETUNING)
    policy.add(request, 0.0)
    ranges = []
    while (batch := policy.next(0.0)) is not None:
        assert isinstance(batch, list)
        assert FIXED + PER_ROW * rows_of(batch) <= PRODUCT_SECONDS
        ranges += batch
    assert [each.start for each in ranges] == [
        0,
        *(each.stop for each in ranges),
    ][:-1]
    assert ranges[-1].stop == 5000
    assert all((each.stop - each.start) % 16 == 0 for each in ranges[:-1])


def next_batch(policy: Policy, now: float) -> Batch:
    """Of requests that have waited for other requests."""
    batch = policy.next(now + 0.01)
    assert isinstance(batch, list)
    return batch


def seconds_of(batch: Batch) -> float:
    return FIXED + PER_ROW * rows_of(batch)


@pytest.mark.parametrize("what", [PREFILL, FINETUNING])
@pytest.mark.parametrize("other", [PREFILL, DECODE])
def test_products_are_shorter_while_somebody_else_may_wait_for_a_token(
    what: RequestClass, other: RequestClass
) -> None:
    policy = Opportunistic(model())

    def seconds(now: float) -> float:
        """Of the next product of a large request."""
        request = queued("large", rows=5000, what=what, now=now)
        policy.add(request, now)
        batch = next_batch(policy, now)
        assert [each.request for each in batch] == [request]
        policy.drop(request)
        return seconds_of(batch)

    assert SHORT_PRODUCT_SECONDS < seconds(0.0) <= PRODUCT_SECONDS
    policy.add(queued("chat", rows=17 if other == PREFILL else 1, what=other, now=1.0), 1.0)
    next_batch(policy, 1.1)
    assert seconds(1.2 + QUIET_SECONDS) <= SHORT_PRODUCT_SECONDS
    assert seconds(1.2 + INTERACTIVE_SECONDS) > SHORT_PRODUCT_SECONDS


def test_no_product_is_so_short_that_reading_its_weight_is_most_of_it() -> None:
    """A weight that comes slowly from memory is not read again for every few rows."""
    slow = LatencyModel(SHAPES)
    for group in range(GROUPS):
        slow.set(group, Direction.FORWARD, LinearLatency(SHORT_PRODUCT_SECONDS / 2, 1e-3))
    policy = Opportunistic(slow)
    policy.add(queued("a", rows=5000, what=PREFILL), 0.0)
    policy.add(queued("b", rows=5000, what=PREFILL), 0.0)
    rows = rows_of(next_batch(policy, 0.0))
    assert (
        SHORT_PRODUCT_SECONDS < slow.seconds(0, Direction.FORWARD, 3, rows) <= 4 * SHORT_PRODUCT_SECONDS / 2
    )
    assert rows == 64


def test_a_prompt_that_has_begun_goes_on() -> None:
    """Some rows of each in turn would have all wait for the last."""
    policy = Opportunistic(model())
    prompts = [queued(name, rows=2000, what=PREFILL) for name in "abc"]
    for prompt in prompts:
        prompt.row_cost = 1e-3  # a whole one is no more than a tenant may be ahead of others
        policy.add(prompt, 0.0)
    order = []
    while (batch := policy.next(0.01)) is not None:
        assert isinstance(batch, list)
        order += [each.request for each in batch]
    assert [each for each, _ in groupby(order)] == prompts
    assert len(order) > 3


def test_who_still_waits_for_a_token_is_not_forgotten() -> None:
    """However long ago it asked: fine-tuning that comes along in its product is short, and so is the next."""
    policy = Opportunistic(model())
    policy.add(queued("tune", rows=100_000, what=FINETUNING), 0.0)
    policy.add(queued("chat", rows=17, what=PREFILL), 0.0)
    late = 2 * INTERACTIVE_SECONDS
    assert seconds_of(next_batch(policy, late)) <= SHORT_PRODUCT_SECONDS
    assert seconds_of(next_batch(policy, late)) <= SHORT_PRODUCT_SECONDS
    policy.add(queued("other", group=1, now=late), late)
    late += 2 * INTERACTIVE_SECONDS
    while [each.request.tenant for each in next_batch(policy, late)] != ["other"]:
        pass
    policy.finished([queued("other", group=1, now=late).take(1)], 1.0, late + 1.0)  # a long product
    assert seconds_of(next_batch(policy, late + 1.0)) < 0.02


def test_no_product_holds_up_a_decode_for_longer_than_its_part() -> None:
    """While somebody decodes, products of fine-tuning leave time for the next decode; a late token less."""
    policy = Opportunistic(model(), LatencyObjective(decode_seconds=0.04))  # 5 ms a request
    batches = simulate(
        policy,
        [
            Tenant("chat", 1, DECODE, think=0.002),
            Tenant("tune", 2048, FINETUNING),
        ],
        5.0,
    )
    chat_began = 0.01
    for at, batch in batches:
        if at > chat_began and any(each.request.tenant == "tune" for each in batch):
            assert FIXED + PER_ROW * rows_of(batch) <= DecodeController.MAX_FACTOR * 0.005 - FIXED


def test_decodes_meet_their_objective_beside_fine_tuning_which_keeps_the_rest() -> None:
    def run(chats: int) -> tuple[Opportunistic, list[Tenant], float]:
        policy = Opportunistic(model(), LatencyObjective(decode_seconds=0.08))  # 10 ms a request
        people = [Tenant(f"chat {i}", 1, DECODE, think=0.01) for i in range(chats)]
        tune = Tenant("tune", 2048, FINETUNING)
        simulate(policy, [*people, tune], 20.0)
        return policy, people, tokens(tune, 1.0, 20.0)

    policy, people, kept = run(4)
    _, _, alone = run(0)
    times = [sum(t.replies[i : i + GROUPS]) for t in people for i in range(0, len(t.replies), GROUPS)]
    assert sum(seconds <= 0.08 for seconds in times) / len(times) >= 0.95
    assert policy.tokens.met / (policy.tokens.met + policy.tokens.late) >= 0.95
    assert policy.tokens.met + policy.tokens.late == pytest.approx(len(times), rel=0.05)
    assert kept / alone > 0.6


def test_the_time_factor_follows_what_tokens_take() -> None:
    made = DecodeController(0.1)
    for group in [0, 1, 2, 3] * 20:  # twice as long as they may
        made.answered("a", group, 0.05)
    assert (made.met, made.late) == (0, 19)
    assert made.product_time_factor < 0.2
    for group in [0, 1, 2, 3] * 1000:  # in time: room again, but carefully
        made.answered("b", group, 0.01)
        assert made.product_time_factor < 1 or made.met > 100
    assert (made.met, made.late) == (999, 19)
    assert made.product_time_factor == DecodeController.MAX_FACTOR


def test_sessions_of_one_tenant_have_tokens_of_their_own() -> None:
    policy = Opportunistic(model(), LatencyObjective(decode_seconds=0.1))
    now = 0.0
    for group in [*range(GROUPS), 0]:
        for session in (1, 2):
            asked = queued("a", group, now=now)
            asked.session = session
            policy.add(asked, now)
        batch = policy.next(now)
        assert isinstance(batch, list)
        now += 0.05
        policy.finished(batch, 0.05, now)
    assert policy.tokens.counts == (0, 2)


def test_what_a_request_may_call_itself() -> None:
    assert effective_request_class(DECODE, Direction.FORWARD, 64) == DECODE
    assert effective_request_class(DECODE, Direction.BACKWARD, 1) == FINETUNING
    assert effective_request_class(FINETUNING, Direction.FORWARD, 1) == FINETUNING
    assert effective_request_class(RequestClass.UNDECLARED, Direction.FORWARD, 1) == DECODE
    assert effective_request_class(RequestClass.UNDECLARED, Direction.FORWARD, 2) == PREFILL
    assert effective_request_class(PREFILL, Direction.FORWARD, 1) == PREFILL


def test_a_tenant_decodes_as_many_sequences_at_once_as_it_may() -> None:
    """A gateway's 64 sequences are as urgent as one; what is beyond its budget waits like a prompt."""
    policy = Opportunistic(model(), LatencyObjective(decode_rows=100))
    asked = [queued("a", rows=rows, what=DECODE) for rows in (64, 36, 1)] + [
        queued("b", rows=64, what=DECODE)
    ]
    for request in asked:
        policy.add(request, 0.0)
    assert [request.request_class for request in asked] == [DECODE, DECODE, PREFILL, DECODE]
    while batch := policy.next(10.0):
        assert isinstance(batch, list)
    late = [queued("a", rows=100, what=DECODE), queued("a", rows=101, what=DECODE)]
    for request in late:  # whoever is not in the queue any more takes no room
        policy.add(request, 10.0)
        policy.drop(request)
        policy.drop(request)
    assert [request.request_class for request in late] == [DECODE, PREFILL]
    assert not policy._decoding


# -- the other policies ----------------------------------------------------------------------------


def test_alone_is_first_come_first_served() -> None:
    policy = Unbatched()
    asked = [queued(f"tenant {i}", rows=i + 1) for i in range(5)]
    for request in asked:
        policy.add(request, 0.0)
    served = []
    while (batch := policy.next(0.0)) is not None:
        assert isinstance(batch, list)
        served.append([(each.request, each.start, each.stop) for each in batch])
    assert served == [[(request, 0, request.rows)] for request in asked]


def test_decoding_tenants_fall_in_step_and_none_is_left_behind() -> None:
    """Products of a few rows take as long as those of one, so tenants are better off in each other's."""
    people = [Tenant(f"chat {i}", 1, DECODE, think=0.003, begins=0.0013 * i) for i in range(16)]
    done = simulate(Opportunistic(model()), people, 10.0)
    rows = [rows_of(batch) for at, batch in done if at > 2.0]
    assert sum(rows) / len(rows) > 5
    replies = [len(tenant.replies) for tenant in people]
    assert max(replies) - min(replies) <= 2 * GROUPS


def test_lockstep_goes_at_the_pace_of_the_slowest() -> None:
    def tokens_of_fast(make: Callable[[], Policy]) -> float:
        fast = [Tenant(f"fast {i}", 1, DECODE, think=0.001) for i in range(3)]
        simulate(make(), [*fast, Tenant("slow", 1, DECODE, think=0.1)], 10.0)
        return tokens(fast[0], 0.0, 10.0)

    lockstep = tokens_of_fast(Lockstep)
    assert lockstep == pytest.approx(10.0 / 0.1 / GROUPS, rel=0.1)
    assert tokens_of_fast(lambda: Opportunistic(model())) > 10 * lockstep


def test_lockstep_does_not_wait_for_whoever_left() -> None:
    policy = Lockstep()
    policy.add(queued("gone"), 0.0)
    assert isinstance(policy.next(0.0), list)
    policy.add(queued("here", now=0.5), 0.5)
    assert policy.next(0.5) == pytest.approx(1.0)
    assert isinstance(policy.next(1.01), list)


# -- whatever happens ------------------------------------------------------------------------------

REQUESTS = st.tuples(
    st.integers(0, 4),  # tenant
    st.integers(0, 2),  # group
    st.sampled_from([1, 2, 17, 300, 5000]),
    st.sampled_from([DECODE, PREFILL, FINETUNING]),
    st.sampled_from([0.0, 0.0001, 0.01, 2.0]),  # seconds since the one before
    st.booleans(),  # ask for a decision in between
)


@given(st.lists(REQUESTS, max_size=40), st.sampled_from(["opportunistic", "none", "lockstep"]))
def test_every_row_is_served_once_and_the_queue_ends_empty(
    requests: list[tuple[int, int, int, RequestClass, float, bool]], name: str
) -> None:
    policy, now = make_policy(name, model(), LatencyObjective()), 0.0
    rows: dict[QueuedRequest, int] = defaultdict(int)
    asked = []

    def serve() -> Iterator[None]:
        nonlocal now
        while (decision := policy.next(now)) is not None:
            if isinstance(decision, float):
                assert decision > now  # or the executor would spin
                now = decision
                yield
                continue
            assert len({each.request.key for each in decision}) == 1
            for request, start, stop in decision:
                assert rows[request] == start < stop <= request.rows
                rows[request] = stop
            policy.finished(decision, FIXED, now)
            yield

    for tenant, group, count, what, pause, between in requests:
        now += pause
        request = queued(f"tenant {tenant}", group, count, effective_request_class(what, 1, count), now)
        asked.append(request)
        policy.add(request, now)
        if between:
            next(serve(), None)
    for _ in serve():
        pass
    assert rows == {request: request.rows for request in asked}


@given(st.lists(REQUESTS, max_size=20), st.data())
def test_a_request_that_failed_is_forgotten(
    requests: list[tuple[int, int, int, RequestClass, float, bool]], data: st.DataObject
) -> None:
    policy = Opportunistic(model())
    asked = [
        queued(f"tenant {t}", group, count, effective_request_class(what, 1, count))
        for t, group, count, what, _, _ in requests
    ]
    for request in asked:
        policy.add(request, 0.0)
    failed = data.draw(st.sets(st.sampled_from(asked))) if asked else set()
    for request in failed:
        policy.drop(request)
        policy.drop(request)
    served = set()
    while (batch := policy.next(10.0)) is not None:
        assert isinstance(batch, list)
        served |= {each.request for each in batch}
    assert served == set(asked) - failed


# -- the latency model -----------------------------------------------------------------------------


def test_a_forecast_learns_from_products() -> None:
    """Whatever it begins with, it comes near the truth, for few rows and for many."""
    made, draw = LatencyModel(SHAPES), random.Random(1)
    for _ in range(400):
        rows = draw.choice([1, 2, 200, 500])
        made.observe(3, Direction.FORWARD, 0b11, rows, (FIXED + PER_ROW * rows) * draw.uniform(0.9, 1.1))
    for rows in (1, 8, 100, 500):
        assert made.seconds(5, Direction.FORWARD, 0b11, rows) == pytest.approx(
            FIXED + PER_ROW * rows, rel=0.25
        )
    assert made.rows(0, Direction.FORWARD, 0b11, FIXED + PER_ROW * 100) == pytest.approx(100, rel=0.25)


def test_one_interrupted_product_does_not_mislead_it() -> None:
    made = model()
    made.observe(0, Direction.FORWARD, 0b11, 1, 30.0)
    assert made.seconds(0, Direction.FORWARD, 0b11, 1) < 1.5 * FIXED


def test_members_take_their_part_of_the_time() -> None:
    made = LatencyModel([GroupShape(100, (300, 100))])
    assert made.seconds(0, 1, 0b10, 50) == pytest.approx(made.seconds(0, 1, 0b11, 50) / 4)
    assert made.rows(0, 1, 0b10, 1.0) > made.rows(0, 1, 0b11, 1.0)
