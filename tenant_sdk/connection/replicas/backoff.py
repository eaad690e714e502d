"""How long to wait before a refused request is sent again, or before all replicas are tried once more."""

from __future__ import annotations

MIN_BACKOFF = 0.05  # seconds; an executor that asks for less gets no stream of uploads
MAX_BACKOFF = 3.2  # seconds; beyond, only what the executor asks for
JITTER = 0.5  # at most so much of a pause on top, so that tenants refused together do not come back together


def retry_delay(attempt: int, requested: float, uniform: float) -> float:
    """Returns the seconds to wait: what the executor asks for, or a time that doubles, and a random part.

    Args:
        attempt: pauses before this one, for the same request or the same connection.
        requested: what executors ask for, in seconds; finite and not negative.
        uniform: drawn uniformly from [0, 1), by the caller.
    """
    doubled = min(MAX_BACKOFF, MIN_BACKOFF * 2.0 ** min(attempt, 60))
    return max(requested, doubled) * (1 + JITTER * uniform)
