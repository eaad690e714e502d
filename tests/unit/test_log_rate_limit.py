"""How often what lasts is said."""

from __future__ import annotations

from shared.log_rate_limit import LogRateLimiter


def test_once_in_some_seconds() -> None:
    limiter = LogRateLimiter(60.0)
    assert [limiter.due(now) for now in (5.0, 6.0, 65.0, 65.1, 66.0)] == [True, False, False, True, False]


def test_what_was_left_out_is_told_with_the_next() -> None:
    limiter = LogRateLimiter(60.0, times=2)
    assert [limiter.due(1.0) for _ in range(5)] == [True, True, False, False, False]
    assert limiter.due(62.0)
    assert limiter.more() == " (3 more since the last line)"
    assert limiter.due(62.0)
    assert limiter.more() == ""
