"""Clients of a gateway take turns with the sequences, adapters and prompts of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.latency import LinearLatency
from tenant_sdk.gateway.client_fairness import (
    RECENT_SECONDS,
    AttentionTimeDebt,
    Memory,
    RecentClients,
    SequenceInfo,
    TimeBudget,
    next_admissions,
    next_preemptions,
    paused_constraints,
    paused_sampling,
    rows_per_client,
    second_prompts,
    too_long,
)
from tenant_sdk.gateway.reservations import eviction_victim
from tenant_sdk.gateway.step_latency import MIN_ROWS, STEP_FACTOR_BUSY, StepLatency


def several(client: str, count: int, first: int = 0, adapter: int = 0) -> list[SequenceInfo]:
    return [SequenceInfo(f"{client}{first + at}", client, adapter) for at in range(count)]


def test_the_client_with_the_fewest_begins() -> None:
    running = several("a", 3)
    waiting = [*several("a", 3, 3), *several("b", 4)]
    admitted = next_admissions(running, waiting, 32, 0, 2)
    assert admitted == ["b0", "b1", "b2", "a3", "b3", "a4", "a5"]


def test_one_client_has_everything_when_it_is_the_only_one() -> None:
    assert next_admissions([], several("a", 9), 4, 0, 1) == ["a0", "a1", "a2", "a3"]


def test_seats_stay_free_for_others() -> None:
    assert len(next_admissions([], several("a", 32), 8, 0, 2)) == 6
    running = several("a", 6)
    assert next_admissions(running, [*several("a", 9, 6), *several("b", 9)], 8, 0, 2) == ["b0", "b1"]


def test_slots_for_adapters_stay_free_for_others() -> None:
    own = [SequenceInfo(f"a{at}", "a", at + 1) for at in range(16)]
    admitted = next_admissions([], own, 64, 16, 2)
    assert len(admitted) == 12
    running = own[:12]
    victim = SequenceInfo("b0", "b", 99)
    # What goes on with an adapter that runs already takes no slot, and cannot keep the other from one.
    waiting = [*own[12:], own[0]._replace(name="more"), victim]
    assert next_admissions(running, waiting, 64, 16, 2) == ["b0", "more"]


def test_an_adapter_of_two_clients_has_one_place() -> None:
    running = [SequenceInfo("a0", "a", 1)]
    assert next_admissions(running, [SequenceInfo("b0", "b", 1)], 8, 1, 2) == ["b0"]


def test_one_long_prompt_of_a_client_is_read_at_a_time() -> None:
    running = [SequenceInfo("a0", "a", prefilling=True)]
    assert next_admissions(running, [*several("a", 3, 1), *several("b", 2)], 32, 0, 2) == ["b0", "b1"]
    alone = next_admissions(running, several("a", 3, 1), 32, 0, 2, contended=False)
    assert alone == ["a1", "a2", "a3"]


def test_a_second_prompt_of_a_client_waits_for_the_first() -> None:
    """Rows for prompts are shared by client, and vLLM gives them to each prompt that is read."""
    running = [
        SequenceInfo("a0", "a"),
        *(SequenceInfo(name, name[0], prefilling=True) for name in ("a1", "a2", "b0", "a3")),
    ]
    assert second_prompts(running) == {"a2", "a3"}


def test_rows_for_prompts_are_equal_by_client() -> None:
    running = [SequenceInfo("b0", "b"), *(SequenceInfo(name, "a", prefilling=True) for name in ("a0", "a1"))]
    assert rows_per_client(40, running, []) == 0  # one client's prompts have them all
    assert rows_per_client(40, running, ["a", "b", "b"]) == 20
    assert rows_per_client(40, running, ["b", "c"]) == 13
    assert rows_per_client(1, running, ["b", "c"]) == 1  # 0 would be all of them


def test_a_client_counts_for_a_while_after_its_last_sequence() -> None:
    seen = RecentClients()
    assert seen.count(["a", "b"], 0.0) == 2
    assert seen.count(["a"], 0.9 * RECENT_SECONDS) == 2
    assert seen.count(["a"], RECENT_SECONDS) == 1


def test_prompts_take_a_time_that_decoding_sequences_set() -> None:
    def rows(line: LinearLatency, decoding: int, busy: bool) -> int:
        steps = StepLatency(line, 1e-6)
        return steps.rows(decoding, 0, steps.max_seconds(decoding, busy=busy), 512)

    near, far = LinearLatency(0.018, 0.0005), LinearLatency(0.5, 0.0005)
    assert rows(near, 1, True) == 19
    assert near.seconds(19) <= STEP_FACTOR_BUSY * near.seconds(1)
    assert rows(near, 22, True) == 50  # beside many sequences, more
    assert rows(near, 1, False) == 56  # the next client waits for one such step at most
    assert rows(near, 0, True) == 56  # nobody waits for a token
    assert rows(far, 1, True) == 501  # on a long way a step takes as long with many rows
    assert rows(LinearLatency(0.001, 0.01), 4, True) == 4 + MIN_ROWS


@pytest.mark.parametrize(("tokens", "most"), [(2000, 2), (6000, 1), (100_000, 1), (10, 32)])
def test_long_sequences_take_turns_by_what_they_attend_to(tokens: int, most: int) -> None:
    """A plain client's steps take 1.5 times as long on average, and all long sequences get on."""
    steps, debt, got = StepLatency(LinearLatency(0.02, 0.0005), 3e-6), AttentionTimeDebt(), Counter[str]()
    long = [SequenceInfo(f"a{at}", "a", tokens=tokens) for at in range(min(31, most * 4))]
    plain, total, count = SequenceInfo("b0", "b", tokens=20), 0.0, 2000
    limit = steps.max_seconds(1 + len(long), 20, busy=True)
    for _ in range(count):
        spare = limit - steps.seconds(1 + len(long), 20)
        paused = debt.paused([*long, plain], steps, spare, clients=2, least_attending="b")
        ran = [each for each in long if each.name not in paused]
        assert "b0" not in paused
        assert len(ran) <= most
        got.update(each.name for each in ran)
        long = [each for each in long if each.name in paused] + ran
        total += steps.seconds(1 + len(ran), 20 + sum(each.tokens for each in ran))
    assert total / count <= limit
    assert len(got) == len(long)
    assert max(got.values()) - min(got.values()) <= 1


def test_prompts_get_what_attention_leaves() -> None:
    steps = StepLatency(LinearLatency(0.02, 0.0005), 1e-6)
    most = steps.max_seconds(2, 100, busy=True)
    assert steps.rows(2, 100, most, 512) == 23
    assert steps.rows(2, 10_000, most, 512) == 2 + MIN_ROWS


def test_attention_takes_the_blame_for_long_sequences() -> None:
    steps = StepLatency(LinearLatency(0.02, 0.0005), 1e-6)
    for _ in range(100):
        steps.observe(8, 48_000, 0.024 + 48_000 * 3e-6, prompts=False)
    assert abs(steps.per_token - 3e-6) < 1e-8
    assert steps.line == LinearLatency(0.02, 0.0005)
    steps.observe(1, 100, 0.03, prompts=False)
    assert steps.line.fixed > 0.02
    steps.observe(40, 48_000, 0.3, prompts=True)
    assert steps.line.per_row > 0.0005


def test_a_client_begins_within_its_share_of_the_memory() -> None:
    running = [SequenceInfo(f"a{at}", "a", blocks=9, blocks_needed=1) for at in range(4)]
    waiting = [
        *(SequenceInfo(f"a{at}", "a", blocks_needed=10) for at in range(4, 9)),
        SequenceInfo("b0", "b", blocks_needed=30),
    ]
    # Of 100 blocks each of two has 50.
    assert next_admissions(running, waiting, 32, 0, 2, memory=Memory(100, 64)) == ["b0", "a4"]
    assert next_admissions(running, waiting, 32, 0, 2, memory=Memory(100, 33)) == ["a4"]
    alone = [each for each in waiting if each.client == "a"]
    assert len(next_admissions(running, alone, 32, 0, 2, memory=Memory(100, 64))) == 5  # vLLM says what fits
    large = [SequenceInfo("b0", "b", blocks_needed=60), SequenceInfo("b1", "b", blocks_needed=1)]
    assert next_admissions(running, large, 32, 0, 2, memory=Memory(100, 64)) == ["b0"]


def preempted(
    running: Sequence[SequenceInfo], waiting: Sequence[SequenceInfo], memory: Memory, places: int = 99
) -> list[str]:
    """As in a step with so many slots for sequences, for three clients, without adapters."""
    return next_preemptions(
        running, waiting, memory, next_admissions(running, waiting, places, 0, 3, contended=True)
    )


def test_who_has_more_than_its_share_makes_room() -> None:
    running = [SequenceInfo(f"a{at}", "a", blocks=10) for at in range(9)]
    waiting = [
        SequenceInfo("a9", "a", blocks_needed=10),
        SequenceInfo("b0", "b", blocks_needed=30),
        SequenceInfo("b1", "b", blocks_needed=30),
    ]
    assert preempted(running, waiting, Memory(100, 10)) == ["a8", "a7"]
    assert preempted(running, waiting[:1], Memory(100, 10)) == []
    # What runs already goes on first.
    prefilling = SequenceInfo("b", "b", prefilling=True, blocks=5, blocks_needed=25)
    assert preempted([*running, prefilling], waiting, Memory(100, 5)) == ["a8", "a7"]
    within = [*running[:5], SequenceInfo("b", "b", blocks=50, blocks_needed=1)]
    assert preempted(within, [], Memory(100, 0)) == ["b"]  # it alone has more than its share
    large = [SequenceInfo("b0", "b", blocks_needed=60)]
    assert preempted(running, large, Memory(100, 10)) == ["a8", "a7", "a6", "a5"]


def test_nothing_is_preempted_for_what_could_not_begin() -> None:
    """The preempted sequence would take what it gave in the same step, and be preempted again in the next."""
    large = SequenceInfo("large", "h", blocks=60, blocks_needed=1)
    short = [SequenceInfo(f"v{at}", "v", blocks=2) for at in range(8)]
    waiting = [SequenceInfo("v8", "v", blocks_needed=30)]
    assert preempted([*short, large], waiting, Memory(100, 24)) == ["large"]
    assert preempted([*short, large], waiting, Memory(100, 24), places=10) == []  # v has all that it can have
    adapted = [SequenceInfo("v8", "v", 7, blocks_needed=30)]
    assert preempted([*short, large], adapted, Memory(100, 24)) == []  # no slot for another adapter
    assert next_preemptions([*short, large], waiting, Memory(100, 24), ()) == []  # its constraint waits


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.integers(0, 2)), max_size=20),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=10),
    st.integers(0, 20),
)
@example([("a", 1, 1)], [("b", 2)], 0)
def test_what_runs_never_lacks_memory_beside_others(
    run: list[tuple[str, int, int]], wait: list[tuple[str, int]], free: int
) -> None:
    """So vLLM takes none from whoever happens to be last."""
    running = [
        SequenceInfo(f"r{at}", *each[:1], blocks=each[1], blocks_needed=each[2])
        for at, each in enumerate(run)
    ]
    waiting = [SequenceInfo(f"w{at}", client, blocks_needed=more) for at, (client, more) in enumerate(wait)]
    memory = Memory(sum(each.blocks for each in running) + free, free)
    given = preempted(running, waiting, memory)
    left = [each for each in running if each.name not in given]
    memory = Memory(memory.blocks, free + sum(each.blocks for each in running if each.name in given))
    if len({each.client for each in (*running, *waiting)}) > 1:
        assert sum(each.blocks_needed for each in left) <= memory.free
        waiting += [
            each._replace(blocks=0, blocks_needed=each.blocks + each.blocks_needed)
            for each in running
            if each.name in given
        ]
        admitted = next_admissions(left, waiting, 99, 0, 3, memory=memory, contended=False)
        new = [each for each in waiting if each.name in admitted]
        assert sum(each.blocks_needed for each in (*left, *new)) <= memory.free


@dataclass
class Generation:
    """A sequence of a simulated gateway, whose text takes a block with every token."""

    name: str
    client: str
    prompt: int
    answer: int
    tokens: int = 0
    blocks: int = 0
    running: bool = False
    preemptions: int = 0

    @property
    def info(self) -> SequenceInfo:
        needed = self.prompt + self.tokens + 1 - self.blocks
        return SequenceInfo(self.name, self.client, blocks=self.blocks, blocks_needed=needed)

    def preempt(self) -> None:
        """The next time, all of its text is read again."""
        self.running, self.blocks, self.preemptions = False, 0, self.preemptions + 1


READ = 4  # blocks of a prompt in a step


def unfinished(generations: list[Generation], blocks: int, steps: int) -> list[Generation]:
    """Sequences that have not ended after so many steps."""
    for _ in range(steps):
        going = [each for each in generations if each.tokens < each.answer]

        def free() -> int:
            return blocks - sum(each.blocks for each in generations)

        def infos(*, running: bool, of: list[Generation] = going) -> list[SequenceInfo]:
            return [each.info for each in of if each.running == running]

        given_up = preempted(infos(running=True), infos(running=False), Memory(blocks, free()))
        for each in going:
            if each.name in given_up:
                each.preempt()
        running, waiting, memory = infos(running=True), infos(running=False), Memory(blocks, free())
        admitted = next_admissions(running, waiting, 32, 16, 3, memory=memory)
        for each in going:
            each.running |= each.name in admitted
            if not each.running:
                continue
            more = min(READ, each.info.blocks_needed)
            for last in reversed(going):  # vLLM preempts the last one, whoever's it is
                if free() < more and last is not each:
                    last.preempt()
            if free() >= more:
                each.blocks += more
                if not each.info.blocks_needed:
                    each.tokens += 1
            if each.tokens == each.answer:
                each.preempt()
    return [each for each in generations if each.tokens < each.answer]


@pytest.mark.parametrize(
    ("blocks", "prompts"), [(7, (3, 3)), (100, (59, 44)), (100, (54, 54)), (100, (39, 29, 31))]
)
def test_sequences_of_clients_do_not_preempt_each_other_for_ever(
    blocks: int, prompts: tuple[int, ...]
) -> None:
    """One of two may exceed its share, or both."""
    for order in (1, -1):
        clients = list(zip("abc", prompts, strict=False))[::order]
        assert not unfinished([Generation(name, name, prompt, 3) for name, prompt in clients], blocks, 100)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 30), st.integers(0, 5), st.booleans()
        ),
        max_size=12,
    ),
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(1, 60)), min_size=1, max_size=8
    ),
    st.integers(0, 40),
    st.integers(3, 16),
    st.integers(3, 8),
)
@example(
    [("a", 1, 1, 0, False), ("a", 2, 1, 0, False), ("b", 0, 60, 0, False)],
    [("a", 3, 49), ("a", 0, 46)],
    38,
    16,
    4,
)  # the adapter of the first that waits has no place, and it does not fit
def test_nothing_is_admitted_again_in_the_step_that_preempts_it(
    running: list[tuple[str, int, int, int, bool]],
    waiting: list[tuple[str, int, int]],
    free: int,
    max_sequences: int,
    max_adapters: int,
) -> None:
    run = [
        SequenceInfo(f"r{at}", client, adapter, prefilling, 0, blocks, needed)
        for at, (client, adapter, blocks, needed, prefilling) in enumerate(running)
    ]
    wait = [
        SequenceInfo(f"w{at}", client, adapter, blocks_needed=needed)
        for at, (client, adapter, needed) in enumerate(waiting)
    ]
    free += sum(each.blocks_needed for each in run)  # else those that run need memory
    memory = Memory(sum(each.blocks for each in run) + free, free)
    limits = (max_sequences, max_adapters, 3)
    names = next_preemptions(run, wait, memory, next_admissions(run, wait, *limits))
    given_up = [each for each in run if each.name in names]
    again = [
        each._replace(prefilling=False, blocks=0, blocks_needed=each.blocks + each.blocks_needed)
        for each in given_up
    ]
    memory = memory._replace(free=free + sum(each.blocks for each in given_up))
    rest = [each for each in run if each.name not in names]
    assert not set(names) & set(next_admissions(rest, [*again, *wait], *limits, memory=memory))


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 15), st.integers(1, 5)), min_size=1, max_size=8
    ),
    st.integers(20, 40),
)
def test_every_sequence_ends(sequences: list[tuple[str, int, int]], blocks: int) -> None:
    """That fits into the memory alone."""
    generations = [Generation(f"{at}", *each) for at, each in enumerate(sequences)]
    assert not unfinished(generations, blocks, 40 * len(sequences))


def test_a_clients_sequences_are_sampled_a_few_at_a_time() -> None:
    running = [(f"a{at}", "a") for at in range(5)] + [("b0", "b")]
    assert paused_sampling(running, 2048) == set()
    assert paused_sampling(running, 1 << 16) == {"a2", "a3", "a4"}
    assert paused_sampling(running, 1 << 20) == {"a1", "a2", "a3", "a4"}


sequences = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.booleans()),
    max_size=20,
)


@given(sequences, sequences, st.integers(1, 12), st.integers(1, 6))
def test_what_begins_fits_and_somebody_always_does(
    running: list[tuple[str, int, bool]],
    waiting: list[tuple[str, int, bool]],
    max_sequences: int,
    max_adapters: int,
) -> None:
    run: list[SequenceInfo] = []
    for at, (client, adapter, prefilling) in enumerate(running[:max_sequences]):
        if (
            adapter in {0, *(each.adapter for each in run)}
            or len({each.adapter for each in run} - {0}) < max_adapters
        ):
            run.append(SequenceInfo(f"r{at}", client, adapter, prefilling))
    wait = [SequenceInfo(f"w{at}", client, adapter) for at, (client, adapter, _) in enumerate(waiting)]
    admitted = next_admissions(run, wait, max_sequences, max_adapters, 3)
    found = {each.name: each for each in wait}
    assert len(set(admitted)) == len(admitted) <= max(0, max_sequences - len(run))
    assert len({each.adapter for each in (*run, *(found[name] for name in admitted))} - {0}) <= max_adapters
    if wait and not run:
        assert admitted
    order = [found[name] for name in admitted]
    for client in Counter(each.client for each in order):
        own = [int(each.name[1:]) for each in order if each.client == client and each.adapter == 0]
        assert own == sorted(own)


def test_the_longest_texts_of_a_client_end() -> None:
    texts = {"a": ("one", 10), "b": ("one", 40), "c": ("one", 30), "d": ("other", 40), "e": ("other", 51)}
    assert too_long(texts, 50, 100) == {"e"}
    assert too_long(texts, 60, 100) == set()
    assert too_long(texts, 60, 90) == {"e"}
    assert too_long(texts, 60, 79) == {"b", "e"}
    assert too_long(texts, 60, 39) == {"b", "c", "d", "e"}


def test_steps_with_prompts_do_not_change_the_forecast_of_those_without() -> None:
    line = LinearLatency(0.02, 0.0005)
    for _ in range(100):
        line.observe(30, 0.08, fixed=False)
    assert line.fixed == 0.02
    assert abs(line.per_row - 0.002) < 1e-5  # so fewer rows fit into the same time
    line.observe(1, 0.05, fixed=True)
    assert line.fixed > 0.02


def test_a_kept_thing_of_the_client_that_has_the_most_makes_room() -> None:
    assert eviction_victim([("b", 0), ("a", 1), ("a", 2), ("b", 3), ("a", 4)]) == ("a", 1)
    assert eviction_victim([("b", 0), ("a", 1)]) == ("b", 0)


@given(st.integers(1, 200), st.integers(1, 20))
def test_a_client_that_asks_for_much_leaves_others_what_they_keep(asked: int, most: int) -> None:
    kept = {("other", 0): None}
    for thing in range(asked):
        kept[("busy", thing)] = None
        if len(kept) > 1 + most:
            del kept[eviction_victim(kept)]
    assert ("other", 0) in kept


def test_of_a_client_one_constraint_begins_in_a_step() -> None:
    """What is allowed first may take long to compute, and nobody knows before."""
    fresh = [(f"{client}{at}", client, True) for at in range(3) for client in "ab"]
    assert paused_constraints(fresh, ()) == {"a1", "b1", "a2", "b2"}
    started = [("a0", "a", False), ("a1", "a", False)]
    assert paused_constraints([*started, *fresh[2:]], ()) == {"a2", "b2"}
    assert paused_constraints([*started, *fresh], {"a"}) == {"a0", "a1", "a2", "b1", "b2"}
    assert paused_constraints([], {"a"}) == set()


def test_a_client_that_used_more_than_it_had_waits() -> None:
    time_budget = TimeBudget(0.2, 0.01)
    assert time_budget.spend("a", 0.15)
    assert time_budget.overdrawn() == set()
    assert not time_budget.spend("a", 0.1)
    assert time_budget.overdrawn() == {"a"}
    for _ in range(4):
        time_budget.step()
        assert time_budget.overdrawn() == {"a"}
    for _ in range(2):
        time_budget.step()
    assert time_budget.overdrawn() == set()


def test_a_sequence_above_its_share_is_preempted_once_for_each_that_is_admitted() -> None:
    """It took the memory that was freed for another client's, and was preempted again in each step."""
    long, large = Generation("long", "h", 20, 15), Generation("large", "v", 58, 6)
    short = [Generation(f"short{number}", "h", 12, 2) for number in range(3)]
    assert not unfinished([long, large, *short], 100, 200)
    assert large.preemptions <= 1 + len(short)
