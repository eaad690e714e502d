"""What is sent again, when and where to: the policies, and a connection that follows them; nothing sleeps."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from clocks import SimulatedClock
from hypothesis import example, given
from hypothesis import strategies as st

from shared.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectError,
    ConnectionLost,
    ConnectionRefused,
    ModelMismatch,
    RequestRefused,
    RequestTimeout,
    SymbiosisError,
    TlsError,
    VerificationError,
    WireError,
)
from shared.log_rate_limit import LogRateLimiter
from tenant_sdk.connection.replicas import reconnecting
from tenant_sdk.connection.replicas.backoff import MIN_BACKOFF
from tenant_sdk.connection.replicas.reconnecting import ConnectionOptions, ReconnectingConnection
from tenant_sdk.connection.replicas.replica_set import MAX_EJECTION
from tenant_sdk.connection.replicas.retrying import (
    MAX_REPEATS,
    MAX_WORKER_LOSSES,
    REMIND_SECONDS,
    Connect,
    GiveUp,
    Reconnect,
    ReconnectPolicy,
    RequestPolicy,
    Retry,
    Wait,
    may_come_back,
)

NAMES = ("wss://a", "wss://b", "wss://c")
URL, TIMEOUT = NAMES[0], 60.0
GONE = [
    ConnectionLost("it broke"),
    RequestTimeout("it is silent"),
    ConnectionLost("it leaves", retry_after=5.0),
]
AWAY = [
    ConnectionRefused("refused"),
    ConnectError("full", retry_after=2.0),
    TlsError("no room", retry_after=1.0),
]
NO = [AuthenticationError("the token"), TlsError("the certificate"), ModelMismatch("another model")]
FINAL = [VerificationError("wrong"), WireError("frame", "no", fatal=True), RequestRefused("internal", "no")]

seconds = st.floats(0, 30) | st.floats(0, 5000)
chances = st.floats(0, 1, exclude_max=True)
retry_limits = st.just(0.0) | st.floats(0, 1000)
put_off = st.builds(
    lambda code, asked: RequestRefused(code, "wait", retry_after=asked),
    st.sampled_from(["overloaded", "restarting", "unavailable"]),
    st.none() | st.floats(0, 100),
)
failures = st.lists(st.tuples(put_off | st.sampled_from(GONE) | st.sampled_from(FINAL), seconds), max_size=60)


@given(failures=failures, retry_seconds=retry_limits, chance=chances, closed=st.booleans())
def test_a_request_is_sent_again_only_for_what_passes_and_not_for_ever(
    failures: list[tuple[SymbiosisError, float]], retry_seconds: float, chance: float, closed: bool
) -> None:
    policy = RequestPolicy(retry_seconds, 0.0, lambda: chance, LogRateLimiter(REMIND_SECONDS))
    now, counts = 0.0, Counter[str]()
    began, first_lost = 0.0, None
    for error, later in failures:
        now += later
        step = policy.after_error(error, now, url=URL, timeout=TIMEOUT, closed=closed)
        if isinstance(step, GiveUp):
            assert step.error is error or type(step.error) is ConnectionLost
            return
        if isinstance(step, Reconnect):
            assert may_come_back(error)
            assert retry_seconds > 0
            assert not closed
            counts["lost"] += 1
            first_lost = now if first_lost is None else first_lost
            assert step.since == first_lost  # so that the seconds are counted from there
            began = now
            policy.reconnected(now)
            continue
        assert isinstance(error, RequestRefused)
        assert error.retry_after is not None
        assert step.at >= now + max(MIN_BACKOFF, error.retry_after)
        assert step.at < (retry_seconds if error.code == "restarting" else began + TIMEOUT)
        counts[error.code] += 1
        now = step.at
    assert counts["lost"] <= MAX_REPEATS
    assert counts["unavailable"] <= MAX_WORKER_LOSSES


@pytest.mark.parametrize("error", [*FINAL, *NO, ConfigurationError("one operator")], ids=repr)
def test_what_is_no_matter_of_time_is_never_sent_again(error: SymbiosisError) -> None:
    policy = RequestPolicy(1e6, 0.0, lambda: 0.0, LogRateLimiter(REMIND_SECONDS))
    assert policy.after_error(error, 0.0, url=URL, timeout=TIMEOUT) == GiveUp(error)


def test_a_request_that_breaks_every_connection_is_given_up() -> None:
    policy, (error, *_) = RequestPolicy(1e6, 0.0, lambda: 0.0, LogRateLimiter(REMIND_SECONDS)), GONE
    for _ in range(MAX_REPEATS):
        assert policy.after_error(error, 7.0, url=URL, timeout=TIMEOUT) == Reconnect(7.0)
    step = policy.after_error(error, 7.0, url=URL, timeout=TIMEOUT)
    assert isinstance(step, GiveUp)
    assert str(step.error).startswith(
        f"21 connections broke with the same request on them, the last one to {URL}: it"
    )


def test_what_ends_parts_of_an_executor_is_not_sent_for_ever() -> None:
    error = RequestRefused("unavailable", "no", retry_after=1.0)
    policy = RequestPolicy(1e6, 0.0, lambda: 0.0, LogRateLimiter(REMIND_SECONDS))
    steps = [policy.after_error(error, 0.0, url=URL, timeout=TIMEOUT) for _ in range(MAX_WORKER_LOSSES + 1)]
    assert all(isinstance(step, Retry) for step in steps[:-1])
    assert steps[-1] == GiveUp(error)


def test_a_restart_is_waited_for_from_the_first_time_on() -> None:
    """Whatever happened meanwhile; and the error names the option."""
    error = RequestRefused("restarting", "no", retry_after=10.0)
    policy = RequestPolicy(100.0, 0.0, lambda: 0.0, LogRateLimiter(REMIND_SECONDS))
    assert isinstance(policy.after_error(error, 80.0, url=URL, timeout=TIMEOUT), Retry)
    policy.reconnected(89.0)
    step = policy.after_error(error, 90.0, url=URL, timeout=TIMEOUT)
    assert isinstance(step, GiveUp)
    assert step.error.message == (
        f"{URL} is starting a worker again, and was not done after 90 s; to wait longer, give "
        "patience=SECONDS"
    )


def test_that_requests_wait_is_said_now_and_then() -> None:
    """However many of them."""
    reminder, said = LogRateLimiter(REMIND_SECONDS), list[float]()
    error = RequestRefused("overloaded", "wait", retry_after=1.0)
    for now in range(35):
        policy = RequestPolicy(0.0, now, lambda: 0.0, reminder)
        step = policy.after_error(error, now, url=URL, timeout=TIMEOUT)
        assert isinstance(step, Retry)
        if step.entry:
            assert (
                step.entry.text == f"{URL} is overloaded, or this tenant over its quota; waiting and going on"
            )
            said.append(now)
    assert said == [0, REMIND_SECONDS + 1, 2 * REMIND_SECONDS + 2, 3 * REMIND_SECONDS + 3]


# -- which replica ----------------------------------------------------------------------------------

tries = st.lists(st.tuples(st.sampled_from([*AWAY, *GONE, *NO]), st.floats(0, 20)), min_size=1, max_size=100)


def broken(retry_seconds: float, chance: float, names: Sequence[str], now: float) -> ReconnectPolicy:
    """The policy of a connection to the first replica, which has just broken."""
    policy = ReconnectPolicy(retry_seconds, lambda: chance)
    policy.next(names, now, None)
    policy.opened(names[0], names[0], now, 0.1)
    policy.reset()
    policy.connection_lost(now, GONE[0])
    return policy


@example(tries=[(AWAY[1], 0.0)], retry_seconds=1.0, chance=0.0, count=2)
@given(tries=tries, retry_seconds=retry_limits, chance=chances, count=st.integers(1, 3))
def test_replicas_are_tried_in_turn_until_the_time_for_retries_is_over(
    tries: list[tuple[SymbiosisError, float]], retry_seconds: float, chance: float, count: int
) -> None:
    names, began = NAMES[:count], 1000.0
    policy = broken(retry_seconds, chance, names, began)
    now, end, busy = began, began + retry_seconds, 0.0
    tried, said_no, not_before = set[str](), set[str](), dict.fromkeys(names, began)
    left = itertools.islice(itertools.cycle(tries), 100_000)
    while not isinstance(step := policy.next(names, now, began), GiveUp):
        if isinstance(step, Wait):
            assert tried
            assert now < step.until <= end + 1e-6
            now, tried = step.until, set()
            continue
        name = step.replica
        assert name not in tried
        # One that said no, or when to come again, is tried before only if there is nothing else to try.
        assert not_before[name] <= now or (not tried and min(not_before.values()) > now)
        error, took = next(left)
        now, busy = now + took, busy + took
        policy.replica_failed(name, now, error)
        tried.add(name)
        (said_no.discard if may_come_back(error) else said_no.add)(name)
        asked = error.retry_after or 0.0
        not_before[name] = now + (asked if may_come_back(error) else MAX_EJECTION)
    # When all want to be asked later than that, one is asked.
    assert tried == set(names) or (tried and all(not_before[name] > now for name in {*names} - tried))
    in_vain = "again and again" in step.error.message
    assert in_vain == (retry_seconds > 0 and len(said_no) < count)
    if in_vain:
        assert end <= now <= end + busy + 1e-6  # a try may take longer than that, a wait does not
        assert step.error.__cause__ is not None


@given(names=st.lists(st.sampled_from(NAMES), unique=True), chance=chances)
def test_only_replicas_that_there_are_now_are_tried(names: list[str], chance: float) -> None:
    policy = broken(60.0, chance, NAMES, 0.0)
    step = policy.next(names, 0.0, 0.0)
    if names:
        assert isinstance(step, Connect)
        assert step.replica in names
    else:
        assert isinstance(step, GiveUp)
        assert step.error.message == "this party has no replicas any more"


def test_that_none_can_be_used_is_said_and_that_one_is_back() -> None:
    policy, now, said = broken(60.0, 0.0, NAMES[:1], 0.0), 0.0, list[tuple[float, str]]()
    while now < 25.0:
        step = policy.next(NAMES[:1], now, 0.0)
        if isinstance(step, Connect):
            policy.replica_failed(step.replica, now, AWAY[0])
        elif isinstance(step, Wait):
            said += [(now, step.entry.text)] if step.entry else []
            now = step.until
    assert said[0][1] == f"{URL} is unavailable (refused); waiting up to 60 s"
    assert all(10 < later - sooner < 14 for (sooner, _), (later, _) in itertools.pairwise(said))
    policy.opened(URL, URL, now, 0.1)
    assert policy.reconnecting
    note = policy.answered(now)
    assert note
    assert note.text == f"{URL} is back after {now:.0f} s"
    assert not policy.reconnecting
    assert policy.answered(now) is None


# -- a connection that follows them -------------------------------------------------------------------

ANSWER = SimpleNamespace()
happenings = st.lists(
    st.none() | put_off | st.sampled_from([*GONE, *FINAL]), max_size=40
)  # of each time that a request is sent; None: an answer
openings = st.lists(st.none() | st.sampled_from([*AWAY, *NO]), max_size=20)  # None: a channel


class World:
    """Replicas whose channels and answers are drawn, and what was sent on each."""

    def __init__(self, happens: list[SymbiosisError | None], opens: list[SymbiosisError | None]) -> None:
        self.clock, self.sent, self.opened = SimulatedClock(), list[tuple[Any, bytes]](), list[Any]()
        self._happens, self._opens = iter(happens), iter([None, *opens])

    def find(self) -> dict[str, Callable[[], Any]]:
        return {name: lambda name=name: self.open(name) for name in NAMES}  # type: ignore[misc]

    def open(self, name: str) -> Any:
        if error := next(self._opens, None):
            raise error
        channel = SimpleNamespace(peer=name, key_exchange="", timeout=TIMEOUT, broken=False)
        channel.close = lambda: setattr(channel, "broken", True)
        channel.wait = lambda pending: self.wait(channel)
        self.opened.append(channel)
        return channel

    def wait(self, channel: Any) -> Any:
        error = next(self._happens, None)
        if error is None:
            return ANSWER
        channel.broken = not isinstance(error, RequestRefused)
        raise error


@given(happens=happenings, opens=openings, retry_seconds=retry_limits)
def test_whatever_happens_only_the_same_bytes_are_sent(
    happens: list[SymbiosisError | None], opens: list[SymbiosisError | None], retry_seconds: float
) -> None:
    """Each time on the only channel that is open; a request that has its answer is never sent again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconnecting, "_hello", lambda channel: "model")
        world = World(happens, opens)
        connection: Any = ReconnectingConnection(
            world.find, ConnectionOptions(retry_seconds=retry_seconds, clock=world.clock)
        )
        for request in (b"first", b"second"):
            before, waited = len(world.sent), len(world.clock.waited)

            def send(channel: Any, request: bytes = request) -> Any:
                assert not channel.broken
                assert [each for each in world.opened if not each.broken] == [channel]
                world.sent.append((channel, request))
                return object()

            try:
                assert connection.send(connection.channel, send)() is ANSWER
            except SymbiosisError:
                if connection.last_channel.broken and not retry_seconds:
                    break
            sent = world.sent[before:]
            assert {body for _, body in sent} <= {request}
            assert len(sent) <= 1 + MAX_REPEATS + len(world.clock.waited) - waited
        connection.close()
    assert all(channel.broken for channel in world.opened)


def test_overload_is_waited_for_on_each_channel_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnecting, "_hello", lambda channel: "model")
    overloaded = RequestRefused("overloaded", "wait", retry_after=0.9 * TIMEOUT)
    world = World([overloaded, GONE[0], overloaded, None], [])
    connection: Any = ReconnectingConnection(
        world.find, ConnectionOptions(retry_seconds=600.0, clock=world.clock)
    )
    connection.policy.uniform = lambda: 0.0
    assert connection.answer(connection.channel, lambda channel: object()) is ANSWER
    assert world.clock.waited == [0.9 * TIMEOUT] * 2


@pytest.mark.parametrize(
    "error",
    [RequestRefused("internal", "no"), RequestRefused("restarting", "wait", retry_after=1.0)],
    ids=str,
)
def test_a_request_that_failed_keeps_nothing_in_memory(
    error: SymbiosisError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the collector: masked rows would stay until it comes."""
    monkeypatch.setattr(reconnecting, "_hello", lambda channel: "model")
    world = World([error], [])
    connection: Any = ReconnectingConnection(world.find, ConnectionOptions(clock=world.clock))

    class Rows:
        pass

    def fail() -> weakref.ref[Rows]:
        rows = Rows()
        with pytest.raises(SymbiosisError):
            connection.answer(connection.channel, lambda channel: rows)
        return weakref.ref(rows)

    gc.collect()
    gc.disable()
    try:
        kept = fail()
        error.__traceback__ = None  # the test's own
        assert kept() is None
    finally:
        gc.enable()
