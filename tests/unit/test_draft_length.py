"""How many tokens a draft guesses, from times and shares."""

from __future__ import annotations

import math

import pytest

from tenant_sdk.drafts.length import DraftLength, best_length, tokens_a_pass
from tenant_sdk.drafts.making import DraftReport, default_epochs

SHARES = (0.6, 0.4, 0.2, 0.1)


def chosen(seconds: dict[int, float], shares: tuple[float, ...] = SHARES) -> int:
    """What is chosen if passes of each size take so long."""
    length = DraftLength(shares, len(shares))
    for _ in range(20):
        if length.chosen is not None:
            return length.chosen
        length.observe(length.next, seconds[length.next])
    raise AssertionError("it chooses after a few passes")


@pytest.mark.parametrize(
    ("alone", "whole", "right"),
    [
        (1.0, 1.0, 4),  # far away: rows cost nothing beside the distance
        (1.0, 0.9, 4),  # noise
        (0.1, 0.12, 4),
        (0.1, 0.22, 2),
        (0.1, 0.5, 0),  # near a slow executor every guess costs as much as a pass
    ],
)
def test_the_number_follows_the_times(alone: float, whole: float, right: int) -> None:
    assert chosen({0: alone, 4: whole}) == right


def test_the_first_passes_do_not_count() -> None:
    """They meet code and memory that nothing has used yet."""
    length = DraftLength(SHARES, 4)
    seen = set[int]()
    while length.chosen is None:
        size = length.next
        length.observe(size, 1.0 if size in seen else 50.0 * (1 + size))
        seen.add(size)
    assert length.chosen == 4


def test_a_draft_that_is_never_right_makes_no_guess() -> None:
    assert chosen({0: 1.0, 2: 1.1}, (0.0, 0.0)) == 0


def test_a_fixed_number_is_kept() -> None:
    length = DraftLength(SHARES, 4, 3)
    length.observe(3, 100.0)
    assert length.next == length.chosen == 3


def test_passes_of_another_size_are_left() -> None:
    """At the end of a context there is room for fewer guesses."""
    length = DraftLength(SHARES, 4)
    for _ in range(10):
        length.observe(1, 0.0)
    assert length.chosen is None


def test_the_best_number_has_the_most_tokens_a_second() -> None:
    alone, each = 0.1, 0.02
    rates = [tokens_a_pass(SHARES[:size]) / (alone + size * each) for size in range(5)]
    assert best_length(SHARES, alone, each) == rates.index(max(rates))


def test_the_distance_from_which_it_pays() -> None:
    report = DraftReport(SHARES, tokens_a_pass(SHARES), 0.1, 0.46, 100)
    assert report.pays_from > 0
    # At that distance both ways write as many tokens a second.
    alone, whole = (
        each + report.requests * report.pays_from
        for each in (report.seconds_without_guesses, report.seconds_with_guesses)
    )
    assert report.tokens_a_pass / whole == pytest.approx(1 / alone)


@pytest.mark.parametrize(
    ("shares", "whole", "distance"),
    [
        (SHARES, 0.2, 0.0),
        ((0.0, 0.0), 0.2, math.inf),
        ((0.0, 0.0), 0.05, math.inf),  # by chance, the passes without guesses took longer
    ],
)
def test_a_draft_that_pays_here_or_nowhere(shares: tuple[float, ...], whole: float, distance: float) -> None:
    report = DraftReport(shares, tokens_a_pass(shares), 0.1, whole, 100)
    assert report.pays_from == distance
    assert report.faster <= report.tokens_a_pass


@pytest.mark.parametrize(("places", "epochs"), [(152, 200), (1000, 50), (5000, 40), (45_000, 9), (10**7, 1)])
def test_a_few_lines_are_learned_in_many_passes(places: int, epochs: int) -> None:
    assert default_epochs(places) == epochs
