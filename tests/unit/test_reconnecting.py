"""When a connection is opened again, how long that is waited for, and what is said of it; nothing sleeps."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from clocks import SimulatedClock

from shared.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectError,
    ConnectionLost,
    ModelMismatch,
    ProtocolVersionError,
    RequestRefused,
    RequestTimeout,
    SymbiosisError,
    TlsError,
    VerificationError,
    WireError,
)
from shared.log_rate_limit import LogRateLimiter
from tenant_sdk.connection.replicas import reconnecting
from tenant_sdk.connection.replicas.reconnecting import (
    ConnectionOptions,
    ReconnectingConnection,
    single_replica,
)
from tenant_sdk.connection.replicas.retrying import (
    REMIND_SECONDS,
    GiveUp,
    RequestPolicy,
    may_come_back,
)
from tenant_sdk.connection.stats import Stats

URL = "wss://executor"
REFUSED = ConnectError("cannot connect to executor: Connection refused; is the executor running?")
BROKE = ConnectionLost("the connection broke; open a new session")


class Channel:
    """Of a channel what a reconnecting connection sees."""

    peer, key_exchange = URL, ""

    def __init__(self, manifest: str = "model") -> None:
        self.manifest, self.broken = manifest, False

    def close(self) -> None:
        self.broken = True


class World:
    """An executor that is there or not, and time that passes when somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, retry_seconds: float) -> None:
        self.clock, self.tries = SimulatedClock(), 0
        self.away_until, self.error, self.manifest = 0.0, REFUSED, "model"
        self.stats = Stats()
        monkeypatch.setattr(reconnecting, "_hello", lambda channel: channel.manifest)
        self.connection: Any = ReconnectingConnection(
            single_replica(self.open, URL),  # type: ignore[arg-type]
            ConnectionOptions(stats=self.stats, retry_seconds=retry_seconds, clock=self.clock),
        )
        self.connection.policy.uniform = lambda: 0.0

    @property
    def now(self) -> float:
        return self.clock.time

    @property
    def waited(self) -> list[float]:
        return [round(seconds, 6) for seconds in self.clock.waited]

    def open(self) -> Channel:
        self.tries += 1
        if self.now < self.away_until:
            raise self.error
        return Channel(self.manifest)

    def lose(self, request: RequestPolicy | None = None, error: SymbiosisError = BROKE) -> Any:
        """The channel that a request is sent again on, after the last one broke."""
        self.connection.last_channel.broken = True
        closed = self.connection._closing.is_set()
        step = (request or self.request()).after_error(error, self.now, url=URL, timeout=60.0, closed=closed)
        if isinstance(step, GiveUp):
            raise step.error
        return self.connection._open_since(step.since, error)

    def request(self) -> RequestPolicy:
        policy = self.connection.policy
        return RequestPolicy(policy.retry_seconds, self.now, policy.uniform, LogRateLimiter(REMIND_SECONDS))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    return lambda retry_seconds=600.0: World(monkeypatch, retry_seconds)


def test_it_waits_says_so_and_goes_on(world: Callable[..., World], caplog: pytest.LogCaptureFixture) -> None:
    here = world()
    here.away_until = here.now + 60.0
    with caplog.at_level(logging.WARNING, "tenant_sdk"):
        channel = here.lose()
        assert not channel.broken
        assert caplog.records[0].message == (
            f"{URL} is unavailable (cannot connect to executor: Connection refused); waiting up to 10 minutes"
        )
        assert 5 <= len(caplog.records) <= 7  # in a minute, every ten seconds
        assert "back" not in caplog.text
        here.connection._answered(channel)
        here.connection._answered(channel)
    assert caplog.text.count("is back after") == 1
    assert caplog.records[-1].message == f"{URL} is back after {here.now - 1000:.0f} s"
    assert 60 <= here.now - 1000 < 65
    assert here.waited[:3] == [0.05, 0.1, 0.2]
    assert max(here.waited) <= 3.2
    assert (here.stats.reconnections, here.stats.seconds_reconnecting) == (1, here.now - 1000)


def test_a_connection_that_opens_at_once_is_no_news(
    world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    here = world()
    with caplog.at_level(logging.WARNING, "tenant_sdk"):
        here.connection._answered(here.lose())
    assert (caplog.text, here.waited, here.stats.reconnections) == ("", [], 1)


def test_retries_end(world: Callable[..., World]) -> None:
    here = world(90.0)
    here.away_until = here.now + 1e6
    with pytest.raises(ConnectionLost, match="again for 90 s: cannot connect to executor:") as e:
        here.lose()
    assert here.now == 1090.0
    assert isinstance(e.value.__cause__, ConnectError)
    with pytest.raises(ConnectionLost):  # who asks again waits again
        here.connection.channel  # noqa: B018
    assert 1170.0 <= here.now <= 1190.0


def test_a_request_is_not_tried_for_longer_though_connections_open(world: Callable[..., World]) -> None:
    """And the pauses grow until something is answered."""
    here = world(10.0)
    request = here.request()

    def lose_for_ever() -> None:
        while True:
            here.lose(request)

    with pytest.raises(ConnectionLost, match="again and again for 10 s: the connection broke"):
        lose_for_ever()
    assert here.waited[:4] == [0.05, 0.1, 0.2, 0.4]
    assert here.now == 1010.0


def test_an_answer_on_an_old_channel_says_nothing_about_the_new_one(world: Callable[..., World]) -> None:
    here = world()
    old = here.connection.last_channel
    here.lose()
    here.connection._answered(old)
    here.lose()
    assert here.waited == [0.05]


def test_what_an_executor_asks_for_is_waited(world: Callable[..., World]) -> None:
    here = world(20.0)
    here.away_until, here.error = here.now + 10.0, ConnectError("no room", retry_after=8.0)
    here.lose()
    assert here.waited == [8.0, 8.0]
    here.away_until, here.error = here.now + 15.0, ConnectError("no room", retry_after=1e9)
    here.connection._answered(here.connection.channel)
    here.lose()  # one that asks for years is tried once more before retries end
    assert here.waited[2:] == [20.0]


FINAL = [
    AuthenticationError("no"),
    ProtocolVersionError("no"),
    TlsError("the certificate was refused"),
    ModelMismatch("no"),
    ConfigurationError("the same operator"),
    WireError("manifest", "no", fatal=True),
    RequestRefused("internal", "no"),
    VerificationError("wrong"),
]


@pytest.mark.parametrize("error", FINAL, ids=lambda error: type(error).__name__)
def test_what_is_never_tried_again(error: SymbiosisError, world: Callable[..., World]) -> None:
    assert not may_come_back(error)
    here = world()
    with pytest.raises(type(error)):
        here.lose(error=error)
    assert here.tries == 1
    here.away_until, here.error = here.now + 5.0, error  # type: ignore[assignment]
    with pytest.raises(type(error)):
        here.lose()
    assert (here.tries, here.waited) == (2, [])


@pytest.mark.parametrize(
    "error", [REFUSED, BROKE, RequestTimeout("silent"), TlsError("no session", retry_after=5.0)]
)
def test_what_may_pass(error: SymbiosisError, world: Callable[..., World]) -> None:
    assert may_come_back(error)
    here = world()
    here.away_until, here.error = here.now + 5.0, error  # type: ignore[assignment]
    assert not here.lose().broken


def test_something_else_that_is_back(world: Callable[..., World]) -> None:
    here = world()
    here.manifest = "another model"
    with pytest.raises(ModelMismatch, match="serves something else since it is back"):
        here.lose()
    assert here.waited == []


def test_without_retries_nothing_is_waited_for(world: Callable[..., World]) -> None:
    here = world(0.0)
    with pytest.raises(ConnectionLost, match="the connection broke"):
        here.lose()
    here.away_until = here.now + 1.0
    for _ in range(3):
        with pytest.raises(ConnectError, match="is the executor running"):
            here.connection.channel  # noqa: B018
    here.away_until = 0.0
    assert not here.connection.channel.broken
    assert here.waited == []


def test_closing_ends_the_wait(world: Callable[..., World]) -> None:
    here = world()
    here.away_until = here.now + 1e6
    here.clock.while_waiting = lambda: len(here.waited) == 6 and here.connection.close()
    with pytest.raises(ConnectionLost, match="the session is closed"):
        here.lose()
    assert len(here.waited) == 6
    with pytest.raises(ConnectionLost, match="the connection broke"):  # and nobody begins to wait
        here.lose()


def test_closing_ends_a_pause(world: Callable[..., World]) -> None:
    here = world()
    here.connection._wait(here.now + 2.0)
    assert here.waited == [2.0]
    here.connection.close()
    with pytest.raises(ConnectionLost, match="the session is closed"):
        here.connection._wait(1e6)


UNCLOSED = """
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from shared.errors import ConnectionRefused
from tenant_sdk.connection.replicas import reconnecting

reconnecting._hello = lambda channel: "model"
channels = [SimpleNamespace(peer="wss://executor", key_exchange="", broken=False)]
tried = threading.Event()

def open_channel():
    if channels:
        return channels.pop()
    tried.set()
    raise ConnectionRefused("it is gone")

connection = reconnecting.ReconnectingConnection(
    reconnecting.single_replica(open_channel), reconnecting.ConnectionOptions(retry_seconds=1e6)
)
connection.last_channel.broken = True
ThreadPoolExecutor(1).submit(lambda: connection.channel)
tried.wait()
print("end")
"""


def test_a_program_that_closes_nothing_ends_while_a_pool_waits() -> None:
    """As the pools of mask sources do, whose threads Python joins."""
    done = subprocess.run([sys.executable, "-c", UNCLOSED], capture_output=True, timeout=800, check=True)
    assert done.stdout == b"end\n"
