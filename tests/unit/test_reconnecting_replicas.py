"""A connection that is opened again, with several replicas: which is used, what is said; nothing sleeps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from clocks import SimulatedClock

from shared.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectError,
    ConnectionLost,
    ConnectionRefused,
    ModelMismatch,
    SymbiosisError,
)
from shared.log_rate_limit import LogRateLimiter
from shared.wire.messages import Limits, Manifest
from tenant_sdk.connection.handshake import upgrade
from tenant_sdk.connection.replicas import addresses, reconnecting
from tenant_sdk.connection.replicas.addresses import RESOLVE_SECONDS, Resolver
from tenant_sdk.connection.replicas.reconnecting import ConnectionOptions, ReconnectingConnection
from tenant_sdk.connection.replicas.retrying import MAX_REPEATS, REMIND_SECONDS, GiveUp, RequestPolicy
from tenant_sdk.connection.stats import Stats

A, B, C = "wss://a:1", "wss://b:1", "wss://c:1"
REFUSED = ConnectionRefused("cannot connect: Connection refused; is the executor running?")
LEAVING = ConnectionLost("it closed the connection: it is shutting down", retry_after=5.0)
MANIFEST = Manifest("s", "m", "a", "p", "w", "digest", "ring", (), Limits(1, 1), (), (), (), ())
OTHER = Manifest("s", "m", "a", "p", "x", "another", "ring", (), Limits(1, 1), (), (), (), ())


class World:
    """Replicas that are there or not, and time that passes when somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.clock, self.tries = SimulatedClock(), list[str]()
        self.down: dict[str, SymbiosisError] = {}
        self.until: dict[str, float] = {}  # when who is down is back
        self.manifests = dict.fromkeys(names, MANIFEST)
        self.stats = Stats()
        monkeypatch.setattr(reconnecting, "_hello", lambda channel: self.manifests[channel.peer])

    def connect(self, retry_seconds: float = 600.0) -> Any:
        made: Any = ReconnectingConnection(
            self.find,
            ConnectionOptions(stats=self.stats, retry_seconds=retry_seconds, party="them", clock=self.clock),
        )
        made.policy.uniform = lambda: 0.0
        return made

    def find(self) -> dict[str, Callable[[], Any]]:
        return {name: lambda name=name: self.open(name) for name in self.manifests}  # type: ignore[misc]

    def open(self, name: str) -> Any:
        self.tries.append(name)
        self.clock.time += 0.01
        if name in self.down and self.now < self.until.get(name, 1e9):
            raise self.down[name]
        channel = SimpleNamespace(peer=name, key_exchange="", broken=False)
        channel.close = lambda: setattr(channel, "broken", True)
        return channel

    @property
    def now(self) -> float:
        return self.clock.time


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    return lambda *names: World(monkeypatch, *names)


def lose(connection: Any, error: SymbiosisError = LEAVING, request: RequestPolicy | None = None) -> Any:
    """The channel that a request is sent again on, after the last one broke."""
    connection.last_channel.broken = True
    now, policy = connection._clock.now(), connection.policy
    request = request or RequestPolicy(
        policy.retry_seconds, now, policy.uniform, LogRateLimiter(REMIND_SECONDS)
    )
    step = request.after_error(error, now, url=connection.url, timeout=60.0)
    if isinstance(step, GiveUp):
        raise step.error
    return connection._open_since(step.since, error)


def test_it_moves_at_once_and_says_nothing(
    world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    here = world(A, B)
    connection = here.connect()
    first = connection.url
    assert here.stats.replicas == {"them": first}
    with caplog.at_level(logging.INFO, "tenant_sdk"):
        channel = lose(connection)
        connection._answered(channel)
    second = ({A, B} - {first}).pop()
    assert channel.peer == second
    assert here.tries == [first, second]
    assert (here.stats.moves, here.stats.reconnections, here.stats.replicas) == (1, 1, {"them": second})
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert caplog.records[0].message.startswith(f"moved from {first} to {second}: ")
    for _ in range(5):
        here.clock.time += 6.0
        connection._answered(lose(connection))
    assert here.stats.moves == 6
    assert here.now < 1100  # nobody waited


def test_the_first_connection_goes_to_whoever_is_there(world: Callable[..., World]) -> None:
    here = world(A, B, C)
    here.down = {A: REFUSED, C: REFUSED}
    assert here.connect(0.0).url == B
    here.down[B] = ConnectError("full", retry_after=2.0)
    with pytest.raises(ConnectError, match="none of 3 replicas can be used: ") as e:
        here.connect()
    for name in (A, B, C):
        assert name in e.value.message
    assert "full" in e.value.message
    assert len(here.tries) <= 6  # each once


def test_all_are_away_and_one_is_back(world: Callable[..., World], caplog: pytest.LogCaptureFixture) -> None:
    here = world(A, B)
    connection = here.connect()
    here.down = {A: REFUSED, B: REFUSED}
    here.until = {B: here.now + 30.0}
    with caplog.at_level(logging.WARNING, "tenant_sdk"):
        connection._answered(lose(connection))
    assert connection.url == B
    assert caplog.records[0].message.startswith("all 2 replicas are unavailable (wss://a:1: cannot connect: ")
    assert caplog.records[-1].message.startswith(f"{B} is back after 3")
    assert here.tries.count(A) > 3
    here.until = {}
    with pytest.raises(ConnectionLost, match="all 2 replicas were tried again and again for 10 minutes"):
        lose(connection)


def test_another_manifest_is_refused_and_named(
    world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    here = world(A)
    connection = here.connect()
    here.manifests |= {B: OTHER, C: MANIFEST}
    with caplog.at_level(logging.WARNING, "tenant_sdk"):
        here.down = {A: REFUSED, C: REFUSED}
        here.until = {C: here.now + 20.0}
        lose(connection)
    assert connection.url == C
    (told,) = [record.message for record in caplog.records if "is not used" in record.message]
    assert told == (
        f"{B} is not used: {B} serves something else than {A} (other weights, digest); replicas of one party "
        "serve the same checkpoint with the same options: ask its operator"
    )
    assert here.tries.count(B) <= 2  # not again and again
    here.manifests = dict.fromkeys(here.manifests, OTHER)
    here.down.clear()
    with pytest.raises(ModelMismatch, match=r"none of 3 replicas can be used: .*wss://b:1: serves something"):
        lose(connection)


def test_one_that_refuses_the_token_is_not_the_end(world: Callable[..., World]) -> None:
    here = world(A, B)
    here.down = {A: AuthenticationError("it refused the token")}
    connection = here.connect()
    assert connection.url == B
    here.down[B] = AuthenticationError("it refused the token")
    with pytest.raises(AuthenticationError, match="none of 2 replicas"):
        lose(connection)
    assert here.now < 1001  # without waiting


def test_one_operator_in_two_places_ends_it_at_once(world: Callable[..., World]) -> None:
    """Whichever other replica there is."""
    here = world(A, B)
    connection = here.connect()
    here.down = dict.fromkeys((A, B), ConfigurationError("have the same certificate key"))
    with pytest.raises(ConfigurationError, match="have the same certificate key"):
        lose(connection)
    assert len(here.tries) == 2


def test_without_retries_each_is_tried_once(world: Callable[..., World]) -> None:
    here = world(A, B)
    connection = here.connect(0.0)
    here.down = {A: REFUSED, B: REFUSED}
    for _ in range(3):
        here.tries.clear()
        connection.last_channel.broken = True
        with pytest.raises(ConnectionRefused, match="none of 2 replicas can be used"):
            connection.channel  # noqa: B018
        assert sorted(here.tries) == [A, B]
    assert here.now < 1001


def test_a_request_that_breaks_every_replica_is_not_sent_for_ever(world: Callable[..., World]) -> None:
    here = world(A, B)
    connection = here.connect(1e6)
    request = RequestPolicy(1e6, here.now, lambda: 0.0, LogRateLimiter(REMIND_SECONDS))
    broke = ConnectionLost("the connection broke")
    for _ in range(MAX_REPEATS):
        lose(connection, broke, request)
    with pytest.raises(ConnectionLost, match="21 connections broke with the same request"):
        lose(connection, broke, request)
    assert here.now - 1000 > 10.0  # and the pauses grow


def test_a_channel_that_another_thread_has_replaced_says_nothing_about_its_replica(
    world: Callable[..., World],
) -> None:
    here = world(A, B)
    connection = here.connect()
    new = lose(connection)
    connection._reopen(here.now, LEAVING)  # of a request that was on the old channel
    assert connection.last_channel is new
    assert connection.policy._replicas.choose(here.now) == new.peer  # only the other one is left alone


def test_new_replicas_are_found(world: Callable[..., World]) -> None:
    here = world(A)
    connection = here.connect()
    here.manifests = {B: MANIFEST}
    assert lose(connection).peer == B
    here.manifests = {}
    with pytest.raises(ConnectionLost, match="no replicas"):
        lose(connection)


def test_a_name_is_looked_up_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, found = SimulatedClock(), [["10.0.0.1", "10.0.0.2"], ["10.0.0.3", "10.0.0.4"]]
    monkeypatch.setattr(addresses, "addresses_of", lambda url: found.pop(0))
    resolver = Resolver(["wss://name:1"], clock)
    for seconds, expected in ((0.0, "10.0.0.1"), (RESOLVE_SECONDS, "10.0.0.1"), (0.1, "10.0.0.3")):
        clock.time += seconds
        assert resolver.resolve()[0].ip == expected


def test_a_handshake_that_goes_on_and_on() -> None:
    """Each byte comes in time, and all together do not."""
    clock, sent = SimulatedClock(), list[bytes]()

    def receive(_: int) -> bytes:
        clock.time += 1.0
        return b"H"

    sock: Any = SimpleNamespace(gettimeout=lambda: 20.0, sendall=sent.append, recv=receive)
    with pytest.raises(ConnectError, match="took too long"):
        upgrade(sock, "wss://name:1", "token", clock)
    assert sent
    assert clock.time == 1021.0
