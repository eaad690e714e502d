"""Clients of a gateway take turns with the seats, adapters and prompts of a step."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shared.latency import Line
from tenant_sdk.gateway.fairness import (
    BESIDE,
    LATELY,
    LEAST_ROWS,
    Seen,
    Wanted,
    in_turn,
    resting,
    rows_of_step,
)


def several(client: str, count: int, first: int = 0, adapter: int = 0) -> list[Wanted]:
    return [Wanted(f"{client}{first + at}", client, adapter) for at in range(count)]


def test_the_client_with_the_fewest_begins() -> None:
    running = several("a", 3)
    waiting = [*several("a", 3, 3), *several("b", 4)]
    begin = in_turn(running, waiting, 32, 0, 2)
    assert begin == ["b0", "b1", "b2", "a3", "b3", "a4", "a5"]


def test_one_client_has_everything_when_it_is_the_only_one() -> None:
    assert in_turn([], several("a", 9), 4, 0, 1) == ["a0", "a1", "a2", "a3"]


def test_seats_stay_free_for_others() -> None:
    assert len(in_turn([], several("a", 32), 8, 0, 2)) == 6
    running = several("a", 6)
    assert in_turn(running, [*several("a", 9, 6), *several("b", 9)], 8, 0, 2) == ["b0", "b1"]


def test_places_for_adapters_stay_free_for_others() -> None:
    own = [Wanted(f"a{at}", "a", at + 1) for at in range(16)]
    begun = in_turn([], own, 64, 16, 2)
    assert len(begun) == 12
    running = own[:12]
    victim = Wanted("b0", "b", 99)
    # What goes on with an adapter that runs already takes no place, and cannot keep the other from one.
    assert in_turn(running, [*own[12:], own[0]._replace(name="more"), victim], 64, 16, 2) == ["b0", "more"]


def test_an_adapter_of_two_clients_has_one_place() -> None:
    running = [Wanted("a0", "a", 1)]
    assert in_turn(running, [Wanted("b0", "b", 1)], 8, 1, 2) == ["b0"]


def test_one_long_prompt_of_a_client_is_read_at_a_time() -> None:
    running = [Wanted("a0", "a", reading=True)]
    assert in_turn(running, [*several("a", 3, 1), *several("b", 2)], 32, 0, 2) == ["b0", "b1"]
    alone = in_turn(running, several("a", 3, 1), 32, 0, 2, several=False)
    assert alone == ["a1", "a2", "a3"]


def test_a_client_counts_for_a_while_after_its_last_sequence() -> None:
    seen = Seen()
    assert seen.count(["a", "b"], 0.0) == 2
    assert seen.count(["a"], 0.9 * LATELY) == 2
    assert seen.count(["a"], LATELY) == 1


def test_prompts_take_a_time_that_what_is_written_beside_them_sets() -> None:
    near, far = Line(0.018, 0.0005), Line(0.5, 0.0005)
    assert rows_of_step(near, 1, 512, beside=True) == 19
    assert near.seconds(19) <= BESIDE * near.seconds(1)
    assert rows_of_step(near, 22, 512, beside=True) == 50  # beside many sequences, more
    assert rows_of_step(near, 1, 512, beside=False) == 56  # the next client waits for one such step at most
    assert rows_of_step(near, 0, 512, beside=True) == 56  # nobody waits for a token
    assert rows_of_step(far, 1, 512, beside=True) == 501  # on a long way a step takes as long with many rows
    assert rows_of_step(Line(0.001, 0.01), 4, 512, beside=True) == 4 + LEAST_ROWS


def test_a_clients_sequences_are_sampled_a_few_at_a_time() -> None:
    running = [(f"a{at}", "a") for at in range(5)] + [("b0", "b")]
    assert resting(running, 2048) == set()
    assert resting(running, 1 << 16) == {"a2", "a3", "a4"}
    assert resting(running, 1 << 20) == {"a1", "a2", "a3", "a4"}


sequences = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.booleans()),
    max_size=20,
)


@given(sequences, sequences, st.integers(1, 12), st.integers(1, 6))
def test_what_begins_fits_and_somebody_always_does(
    running: list[tuple[str, int, bool]], waiting: list[tuple[str, int, bool]], seats: int, places: int
) -> None:
    run: list[Wanted] = []
    for at, (client, adapter, reading) in enumerate(running[:seats]):
        if (
            adapter in {0, *(each.adapter for each in run)}
            or len({each.adapter for each in run} - {0}) < places
        ):
            run.append(Wanted(f"r{at}", client, adapter, reading))
    wait = [Wanted(f"w{at}", client, adapter) for at, (client, adapter, _) in enumerate(waiting)]
    begin = in_turn(run, wait, seats, places, 3)
    found = {each.name: each for each in wait}
    assert len(set(begin)) == len(begin) <= max(0, seats - len(run))
    assert len({each.adapter for each in (*run, *(found[name] for name in begin))} - {0}) <= places
    if wait and not run:
        assert begin
    order = [found[name] for name in begin]
    for client in Counter(each.client for each in order):
        own = [int(each.name[1:]) for each in order if each.client == client and each.adapter == 0]
        assert own == sorted(own)


def test_steps_with_prompts_do_not_change_the_forecast_of_those_without() -> None:
    line = Line(0.02, 0.0005)
    for _ in range(100):
        line.observe(30, 0.08, fixed=False)
    assert line.fixed == 0.02
    assert abs(line.per_row - 0.002) < 1e-5  # so fewer rows fit into the same time
    line.observe(1, 0.05, fixed=True)
    assert line.fixed > 0.02
