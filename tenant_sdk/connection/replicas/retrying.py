"""Rules for a request that fails: decisions without I/O, clock or random numbers of their own.

A ``RequestPolicy``, of one request, decides whether the same bytes are sent again, when, and where.
A ``ReconnectPolicy``, of one connection, decides which replica is tried next, and until when to wait before.
``tenant_sdk.connection.replicas.reconnecting`` reports events and the time, and follows the instructions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from shared.errors import (
    ConfigurationError,
    ConnectError,
    ConnectionLost,
    ConnectionRefused,
    Metavar,
    ModelMismatch,
    OptionText,
    RequestRefused,
    RequestTimeout,
    SymbiosisError,
    TlsError,
)
from shared.log_rate_limit import LogRateLimiter
from tenant_sdk.connection.replicas.backoff import retry_delay
from tenant_sdk.connection.replicas.replica_set import ReplicaSet, what_happened

REMIND_SECONDS = 10.0  # between two warnings
# Of one request: it may be what the executor dies of, or that may break connections on purpose.
MAX_REPEATS = 20
MAX_WORKER_LOSSES = 5  # workers of an executor with one request on them: it may be what they die of

# Why an executor puts a request off, in the words of its log entry.
_REASONS = {
    "overloaded": "is overloaded, or this tenant over its quota",
    "unavailable": "lost a worker with this request on it",
    "restarting": "is starting a worker again",
}


class LogEntry(NamedTuple):
    """An entry for the log; ``level`` is one of ``logging``."""

    level: int
    text: str


class Retry(NamedTuple):
    """Instruction: wait until ``at``, and send the same bytes on the same channel."""

    at: float
    entry: LogEntry | None = None


class Reconnect(NamedTuple):
    """Instruction: send the same bytes on an open channel. A new one is waited for from ``since`` on."""

    since: float


class Connect(NamedTuple):
    """Instruction: open a channel to this replica."""

    replica: str


class Wait(NamedTuple):
    """Instruction: wait until this time, and ask for the next instruction."""

    until: float
    entry: LogEntry | None = None


class GiveUp(NamedTuple):
    """Instruction: raise this error."""

    error: SymbiosisError


class OtherPart(ModelMismatch):
    """An executor that serves another part than the one that is looked for."""


def may_come_back(error: SymbiosisError) -> bool:
    """Returns whether an executor may be back soon: it is gone, silent or full, but has not said no."""
    if isinstance(error, TlsError):
        return error.retry_after is not None  # else its certificate is not good
    return isinstance(error, ConnectionLost | RequestTimeout) or type(error) in (
        ConnectError,
        ConnectionRefused,
    )


def concerns_all(error: SymbiosisError) -> bool:
    """Returns whether an error concerns all replicas, such as two parties that are one operator."""
    return isinstance(error, ConfigurationError) and not isinstance(error, ModelMismatch)


class RequestPolicy:
    """Decides whether one request is sent again, with the same bytes as before.

    Args:
        retry_seconds: how long to wait for an executor that becomes unavailable; 0: not at all.
        now: when its answer is first waited for, in seconds of any clock that does not go back.
        uniform: draws from [0, 1), uniformly.
        reminder: limits the warnings about all requests to the same executor.
    """

    def __init__(
        self, retry_seconds: float, now: float, uniform: Callable[[], float], reminder: LogRateLimiter
    ) -> None:
        self._retry_seconds, self._uniform, self._reminder = retry_seconds, uniform, reminder
        self._asked = now
        self._began, self._refusals = now, 0  # on this channel
        self._worker_losses = 0  # with this request on them
        self._lost_since: float | None = None
        self._lost = 0  # times

    def after_error(
        self, error: SymbiosisError, now: float, *, url: str, timeout: float, closed: bool = False
    ) -> Retry | Reconnect | GiveUp:
        """Decides what to do after an error.

        Args:
            error: the error of this request, or of the channel that it was sent on.
            now: seconds.
            url: the executor's.
            timeout: seconds for which an overloaded executor is asked again.
            closed: the session is closed: no executor is waited for.
        """
        if isinstance(error, RequestRefused):
            return self._refused(error, now, url, timeout)
        if closed or self._retry_seconds <= 0 or not may_come_back(error):
            return GiveUp(error)
        if self._lost_since is None:
            self._lost_since = now
        self._lost += 1
        if self._lost > MAX_REPEATS:
            return GiveUp(
                ConnectionLost(
                    f"{self._lost} connections broke with the same request on them, the last one to {url}: "
                    f"{what_happened(error)}. Executors may be unable to answer it; tell their operator"
                )
            )
        return Reconnect(self._lost_since)

    def reconnected(self, now: float) -> None:
        """Record that the request is sent on another channel: earlier refusals do not count."""
        self._began, self._refusals = now, 0

    def _refused(self, error: RequestRefused, now: float, url: str, timeout: float) -> Retry | GiveUp:
        reason = _REASONS.get(error.code)
        if reason is None or error.retry_after is None:
            return GiveUp(error)
        self._worker_losses += error.code == "unavailable"
        if self._worker_losses > MAX_WORKER_LOSSES:
            return GiveUp(error)
        at = now + retry_delay(self._refusals, error.retry_after, self._uniform())
        if error.code == "restarting":
            if at >= self._asked + self._retry_seconds:
                return GiveUp(
                    ConnectionLost(
                        OptionText(
                            "{} {}, and was not done after {:.0f} s; to wait longer, give {patience}",
                            *(url, reason, now - self._asked),
                            patience=Metavar("SECONDS"),
                        )
                    )
                )
        elif at >= self._began + timeout:
            return GiveUp(error)
        self._refusals += 1
        due = self._reminder.due(now)
        return Retry(at, LogEntry(logging.WARNING, f"{url} {reason}; waiting and going on") if due else None)


class ReconnectPolicy:
    """Decides, for one connection, which replica is tried next, and how long to wait before.

    One thread at a time may call it.

    All times are seconds of one clock that does not go back.

    Args:
        retry_seconds: how long to wait for an executor that becomes unavailable; 0: not at all.
        uniform: draws from [0, 1), uniformly.

    Attributes:
        replica: the name of the one in use.
        url: the URL of its executor.
        reconnecting: whether channels were opened since the last answer.
        reminder: limits the warnings that no replica can be used.
    """

    def __init__(self, retry_seconds: float, uniform: Callable[[], float]) -> None:
        self.retry_seconds, self.uniform = retry_seconds, uniform
        self.replica = self.url = ""
        self.reminder = LogRateLimiter(REMIND_SECONDS)
        self._replicas = ReplicaSet(lambda: self.uniform())
        self._rounds = 0  # in which each replica was tried once, since the last answer
        self._tried: set[str] = set()  # in this round
        self._warned_of: set[str] = set()  # that they refuse
        self._unavailable_since = 0.0
        self._cause: SymbiosisError | None = None

    @property
    def reconnecting(self) -> bool:
        """Whether channels were opened since the last answer."""
        return self._rounds > 0

    def connection_lost(self, now: float, error: SymbiosisError | None = None) -> None:
        """Record that the channel in use broke; ``error``: the error of a request on it, None: not known."""
        if not self._rounds:
            self._unavailable_since = now
        self._cause = error or self._cause
        self._replicas.eject(self.replica, now, error, at_once=not self._rounds)
        if not self.retry_seconds:
            self._tried.clear()

    def next(self, names: Iterable[str], now: float, since: float | None) -> Connect | Wait | GiveUp:
        """Decides what to do while there is no open channel.

        Args:
            names: the names of all replicas that there are now.
            now: seconds.
            since: where the waiting began; None: no replica is waited for.
        """
        self._replicas.update(names)
        name = self._replicas.choose(now, self._tried)
        if name is None:
            return self._wait(now, since)
        if not self._tried:
            self._rounds += 1
        self._tried.add(name)
        return Connect(name)

    def _wait(self, now: float, since: float | None) -> Wait | GiveUp:
        """Decides whether to wait for another round, in which every replica is tried once."""
        count = len(self._replicas.names)
        if not count:
            return GiveUp(ConnectionLost("this party has no replicas any more"))
        if since is None or not self.retry_seconds or self._replicas.refused:
            return GiveUp(self._replicas.error())
        remaining, why = since + self.retry_seconds - now, self._replicas.why()
        if remaining <= 0:
            who = f"all {count} replicas were" if count > 1 else f"{self.url} was"
            error = ConnectionLost(
                OptionText(
                    "{} tried again and again for {}: {}; to wait longer, give {patience}",
                    *(who, duration(now - since), why),
                    patience=Metavar("SECONDS"),
                )
            )
            error.__cause__ = self._cause
            return GiveUp(error)
        entry = None
        if self.reminder.due(now):
            who = f"all {count} replicas are" if count > 1 else f"{self.url} is"
            entry = LogEntry(
                logging.WARNING, f"{who} unavailable ({why}); waiting up to {duration(remaining)}"
            )
        seconds = retry_delay(self._rounds - 1, self._replicas.requested_wait(now), self.uniform())
        self._tried.clear()
        return Wait(now + min(remaining, seconds), entry)

    def replica_failed(self, name: str, now: float, error: SymbiosisError) -> LogEntry | None:
        """Record that a replica cannot be used. Returns what to log."""
        unavailable, entry = may_come_back(error), None
        if unavailable:
            entry = LogEntry(logging.INFO, f"{name} cannot be used: {error.message}")
            self._cause = error
        elif (
            len(self._replicas.names) > 1 and name not in self._warned_of and not isinstance(error, OtherPart)
        ):
            self._warned_of.add(name)
            entry = LogEntry(logging.WARNING, f"{name} is not used: {error.message}")
        self._replicas.eject(name, now, error, refused=not unavailable)
        return entry

    def opened(self, name: str, url: str, now: float, seconds: float) -> None:
        """Record the replica of the channel in use, and how many seconds connecting and greeting took."""
        self._replicas.opened(name, now, seconds)
        self.replica, self.url = name, url

    def reset(self) -> None:
        """Forget what failed: an executor has answered, or the first channel is open."""
        self._rounds, self._cause, self.reminder.logged_at = 0, None, None
        self._tried.clear()

    def answered(self, now: float) -> LogEntry | None:
        """Record an answer: the executor is back, if it was unavailable. Returns what to log."""
        entry = None
        if self.reminder.logged_at is not None:
            entry = LogEntry(
                logging.WARNING, f"{self.url} is back after {duration(now - self._unavailable_since)}"
            )
        self.reset()
        self._replicas.answered(self.replica)
        return entry


def duration(seconds: float) -> str:
    """Returns seconds as text for people."""
    if seconds >= 120:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds:.{int(seconds < 10)}f} s"
