"""Quotas: what may be in flight, how much in a second; with times that are handed in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provider.session.quota import Quota, Quotas
from shared.errors import WireError


def refused(quotas: Quotas, tenant: str, now: float = 0.0, *, rows: int = 1, size: int = 100) -> float | None:
    """Seconds to wait, or None if it was admitted."""
    try:
        quotas.admit(tenant, rows, size, size, now)
    except WireError as error:
        refusal = error
    else:
        return None
    assert (refusal.code, refusal.fatal) == ("overloaded", False)
    assert refusal.retry_after is not None
    assert refusal.retry_after > 0
    return refusal.retry_after


def test_nothing_is_limited_unless_told() -> None:
    quotas = Quotas()
    assert all(refused(quotas, "a", size=1 << 40) is None for _ in range(1000))


def test_bytes_in_flight_of_one_tenant_are_not_another_s() -> None:
    quotas = Quotas(Quota(bytes_in_flight=250))
    assert refused(quotas, "a") is None
    assert refused(quotas, "a") is None
    assert refused(quotas, "a") is not None
    assert refused(quotas, "b") is None
    quotas.release("a", 1, 100)
    assert refused(quotas, "a") is None


def test_bytes_in_flight_of_all() -> None:
    quotas = Quotas(everyone=Quota(bytes_in_flight=250))
    assert [refused(quotas, tenant) is None for tenant in "abc"] == [True, True, False]
    quotas.release("a", 1, 100)
    assert refused(quotas, "c") is None


def test_a_few_tenants_cannot_keep_others_out() -> None:
    """Whoever has nothing in flight gets a small request in, even if the others hold all there is."""
    quotas = Quotas(everyone=Quota(bytes_in_flight=1280, rows_in_flight=2))
    assert refused(quotas, "a", size=1280) is None
    assert refused(quotas, "b", size=11) is not None
    assert refused(quotas, "b", size=10) is None
    assert refused(quotas, "b", size=10) is not None  # it has something in flight now
    assert refused(quotas, "c", size=10) is None
    quotas.release("b", 1, 10)
    assert refused(quotas, "b", size=10) is None


def test_small_requests_keep_to_the_rates_of_all() -> None:
    quotas = Quotas(everyone=Quota(bytes_in_flight=12_800, requests_per_second=1))
    assert [refused(quotas, tenant, size=10) is None for tenant in "abc"] == [True, True, False]


def test_a_refused_request_uses_nothing_up() -> None:
    """Neither of the tenant's account nor of the common one, whichever was full."""
    quotas = Quotas(Quota(bytes_in_flight=150), Quota(bytes_in_flight=250))
    for tenant in ("a", "a", "b", "c", "c"):
        refused(quotas, tenant)
    assert quotas.in_flight() == (2, 200)
    for tenant in ("a", "b"):
        quotas.release(tenant, 1, 100)
    assert quotas.in_flight() == (0, 0)


def test_rows_in_flight() -> None:
    quotas = Quotas(Quota(rows_in_flight=10))
    assert refused(quotas, "a", rows=8) is None
    assert refused(quotas, "a", rows=3) is not None
    assert refused(quotas, "a", rows=2) is None


def test_one_request_alone_may_have_any_size() -> None:
    """The manifest's limits allow it; else it could never be sent."""
    quotas = Quotas(Quota(bytes_in_flight=10, rows_in_flight=1), Quota(bytes_in_flight=10))
    assert refused(quotas, "a", rows=5) is None
    assert refused(quotas, "a") is not None


def test_requests_in_a_second() -> None:
    quotas = Quotas(Quota(requests_per_second=10))
    assert [refused(quotas, "a") is None for _ in range(21)] == [True] * 20 + [False]  # two seconds' worth
    wait = refused(quotas, "a")
    assert wait == pytest.approx(0.1, abs=0.001)
    assert refused(quotas, "a", 0.11) is None
    assert refused(quotas, "a", 0.12) is not None
    assert sum(refused(quotas, "a", 100.0) is None for _ in range(100)) == 20


def test_bytes_in_a_second() -> None:
    quotas = Quotas(Quota(bytes_per_second=1000))
    assert refused(quotas, "a", size=2000) is None
    assert refused(quotas, "a", size=500) == pytest.approx(0.5)
    assert refused(quotas, "a", 0.5, size=500) is None
    # Larger than the bucket: it needs a full one, and leaves a debt.
    assert refused(quotas, "b", size=10_000) is None
    assert refused(quotas, "b", 1.0, size=1) == pytest.approx(7.001, abs=0.01)


STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(1, 1000), st.floats(0, 2)), max_size=60
)


@given(STEPS, st.data())
def test_what_is_in_flight_never_exceeds_its_limit_and_returns_to_nothing(
    steps: list[tuple[str, int, int, float]], data: st.DataObject
) -> None:
    limit = Quota(bytes_in_flight=2000, rows_in_flight=80, requests_per_second=20, bytes_per_second=5000)
    quotas = Quotas(limit, Quota(bytes_in_flight=4000))
    in_flight: list[tuple[str, int, int]] = []
    now = 0.0
    for tenant, rows, size, pause in steps:
        now += pause
        if refused(quotas, tenant, now, rows=rows, size=size) is None:
            in_flight.append((tenant, rows, size))
        for whose in "abc":
            mine = [(r, s) for t, r, s in in_flight if t == whose]
            assert len(mine) <= 1 or sum(s for _, s in mine) <= 2000
            assert len(mine) <= 1 or sum(r for r, _ in mine) <= 80
        while in_flight and data.draw(st.booleans()):
            quotas.release(*in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1))))
        assert quotas.in_flight() == (sum(r for _, r, _ in in_flight), sum(s for _, _, s in in_flight))
    for each in in_flight:
        quotas.release(*each)
    assert quotas.in_flight() == (0, 0)
