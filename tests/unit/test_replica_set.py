"""Which replica is connected to: the policy alone, with a clock and chances of the test's own."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shared.errors import AuthenticationError, ConnectError, ConnectionLost, ConnectionRefused, TlsError
from tenant_sdk.connection.replicas.replica_set import (
    FIRST_EJECTION,
    MAX_EJECTION,
    STALE_SECONDS,
    ReplicaSet,
)

GONE = ConnectionLost("the connection broke; open a new session")


def replicas(*names: str, seed: int = 0) -> ReplicaSet:
    made = ReplicaSet(random.Random(seed).random)
    made.update(names)
    return made


def drawn(policy: ReplicaSet, now: float, times: int = 3000) -> Counter[str | None]:
    return Counter(policy.choose(now) for _ in range(times))


def test_the_unknown_are_tried_first_and_all_alike() -> None:
    policy = replicas("a", "b", "c", "d")
    policy.opened("a", 0.0, 1e-6)  # however quick it is
    shares = drawn(policy, 1.0)
    assert shares.keys() == {"b", "c", "d"}
    assert all(900 < count < 1100 for count in shares.values())


def test_the_quicker_of_two() -> None:
    """Of four, the quickest is in half of all pairs, and the slowest never wins."""
    policy = replicas("a", "b", "c", "d")
    for seconds, name in enumerate("abcd", 1):
        policy.opened(name, 0.0, seconds)
    shares = drawn(policy, 1.0, 6000)
    assert "d" not in shares
    for name, share in (("a", 3 / 6), ("b", 2 / 6), ("c", 1 / 6)):
        assert abs(shares[name] - 6000 * share) < 150


def test_figures_move_and_grow_old() -> None:
    policy = replicas("a", "b")
    policy.opened("a", 0.0, 1.0)
    policy.opened("b", 0.0, 2.0)
    assert drawn(policy, 1.0).keys() == {"a"}
    for at in range(1, 8):  # once slow is not slow for ever, nor quick
        policy.opened("a", at, 10.0)
    assert drawn(policy, 9.0).keys() == {"b"}
    policy.opened("b", STALE_SECONDS + 1.0, 2.0)
    assert drawn(policy, STALE_SECONDS + 8.0).keys() == {"a"}  # nobody knows any more
    policy.opened("a", STALE_SECONDS + 8.0, 1.0)  # which counts alone
    assert drawn(policy, STALE_SECONDS + 9.0).keys() == {"a"}


def test_who_fails_is_ejected_for_longer_each_time_until_it_answers() -> None:
    policy, now, lasted = replicas("a", "b"), 0.0, list[float]()
    for name in ("a", "b"):
        policy.opened(name, now, 1.0)
    for _ in range(8):
        policy.eject("a", now, GONE)
        began = now
        while drawn(policy, now, 50).keys() == {"b"}:
            now += 0.5
        lasted.append(now - began)
        policy.opened("a", now, 0.1)  # that a connection opens is no sign of health
    assert lasted == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert (lasted[0], lasted[-1]) == (FIRST_EJECTION, MAX_EJECTION)
    policy.answered("a")
    policy.eject("a", now, GONE)
    assert policy.choose(now + FIRST_EJECTION) == "a"


def test_if_all_are_ejected_the_one_that_is_soonest_free() -> None:
    policy = replicas("a", "b", "c")
    policy.eject("a", 0.0, GONE, refused=True)
    policy.eject("b", 0.0, GONE)
    policy.eject("c", 0.1, GONE)
    assert drawn(policy, 0.2, 20).keys() == {"b"}
    assert policy.choose(0.2, {"b"}) == "c"
    assert policy.choose(0.2, {"b", "c"}) is None  # it would say no again
    assert policy.choose(MAX_EJECTION, {"b", "c"}) == "a"
    assert policy.choose(MAX_EJECTION, {"a", "b", "c"}) is None


def test_who_asks_for_time_gets_it_if_another_can_be_tried() -> None:
    full = ConnectError("no room", retry_after=8.0)
    policy = replicas("a", "b")
    policy.eject("a", 0.0, full)
    policy.eject("b", 0.0, GONE)
    assert policy.choose(1.0, {"b"}) is None  # a has said when
    assert policy.choose(7.9, {"b"}) is None
    assert policy.choose(8.0, {"b"}) == "a"
    assert policy.requested_wait(1.0) == 0.0
    policy.eject("b", 1.0, ConnectError("no room", retry_after=4.0))
    assert policy.requested_wait(2.0) == 3.0
    alone = replicas("a")
    alone.eject("a", 0.0, full)
    assert alone.choose(0.1) == "a"  # there is nobody else


def test_who_leaves_is_forgotten_and_who_stays_is_not() -> None:
    policy = replicas("a", "b")
    policy.opened("a", 0.0, 1.0)
    policy.opened("b", 0.0, 2.0)
    policy.update(["b", "c"])
    assert policy.names == ["b", "c"]
    assert policy.choose(1.0) == "c"
    policy.eject("a", 1.0, GONE)  # its end may be noticed later
    policy.opened("a", 1.0, 1.0)
    policy.answered("a")
    assert policy.names == ["b", "c"]
    policy.update([])
    assert policy.choose(1.0) is None


def test_why_none_can_be_used() -> None:
    policy = replicas("wss://a", "wss://b")
    policy.eject("wss://a", 0.0, ConnectionRefused("cannot connect to a:1: Connection refused; does it run?"))
    policy.eject("wss://b", 0.0, None)
    assert policy.why() == (
        "wss://a: cannot connect to a:1: Connection refused, wss://b: its connection broke"
    )
    assert not policy.refused
    assert policy.error().message == f"none of 2 replicas can be used: {policy.why()}"
    policy.eject("wss://b", 0.0, ConnectionRefused("wss://b: gone"))
    assert policy.why().endswith("refused, wss://b: gone")  # its name once
    assert isinstance(policy.error(), ConnectionRefused)
    for name in policy.names:
        policy.eject(name, 0.0, AuthenticationError("no"), refused=True)
    assert policy.refused
    assert isinstance(policy.error(), AuthenticationError)
    policy.eject("wss://b", 0.0, TlsError("no"), refused=True)
    assert type(policy.error()) is ConnectError
    alone = replicas("a")
    alone.eject("a", 0.0, GONE)
    assert (alone.error(), alone.why()) == (GONE, "the connection broke")


@pytest.mark.parametrize("seed", range(5))
def test_load_spreads_over_all(seed: int) -> None:
    """Tenants that know nothing share the replicas evenly."""
    shares = Counter(replicas("a", "b", "c", seed=seed * 1000 + each).choose(0.0) for each in range(300))
    assert min(shares.values()) > 60
