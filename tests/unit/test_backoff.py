"""How long to wait before a request is sent again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import peer_seconds
from tenant_sdk.connection.replicas.backoff import MAX_BACKOFF, MIN_BACKOFF, retry_delay

CHANCE = st.floats(0, 1, exclude_max=True)


@given(attempt=st.integers(0, 10_000), requested=st.floats(0, 1e6), chance=CHANCE)
def test_a_pause_is_never_shorter_than_asked_or_than_the_floor(
    attempt: int, requested: float, chance: float
) -> None:
    least = max(requested, MIN_BACKOFF)
    assert least <= retry_delay(attempt, requested, chance) <= 1.5 * max(requested, MAX_BACKOFF)
    assert retry_delay(attempt, requested, chance) <= retry_delay(attempt + 1, requested, chance)
    assert retry_delay(attempt, requested, 0.0) <= retry_delay(attempt, requested, chance)


def test_pauses_double_up_to_a_limit() -> None:
    assert [retry_delay(attempt, 1e-9, 0.0) for attempt in range(4)] == [0.05, 0.1, 0.2, 0.4]
    assert retry_delay(10_000, 0.0, 0.0) == MAX_BACKOFF
    assert retry_delay(0, 1.0, 0.5) == pytest.approx(1.25)


@pytest.mark.parametrize("nonsense", [-1.0, -1e-300, math.nan, math.inf, -math.inf, None])
def test_seconds_that_cannot_be_are_none(nonsense: float | None) -> None:
    assert peer_seconds(nonsense) is None


@pytest.mark.parametrize(("seconds", "waited"), [(0.0, 0.0), (1e-9, 1e-9), (3.0, 3.0), (1e308, 3600.0)])
def test_seconds_that_can_be(seconds: float, waited: float) -> None:
    assert peer_seconds(seconds) == waited
