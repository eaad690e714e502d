"""A connection that lasts: opened again when it breaks, and waited for while the executor is away."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - see _stop_waiting, which must be registered later
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable

from shared.compat import before_threads_are_joined
from shared.errors import (
    ConnectError,
    ConnectionLost,
    ModelMismatch,
    NobodyListens,
    RequestTimeout,
    SymbiosisError,
    TlsError,
)
from shared.forks import Home
from shared.wire.header import Header, Operation
from shared.wire.messages import Hello, Manifest, decode, encode
from shared.wire.protocol import validate_manifest
from tenant_sdk.connection.backoff import pause
from tenant_sdk.connection.channel import Channel, control_payload
from tenant_sdk.connection.stats import Stats

log = logging.getLogger(__name__)

TELL_SECONDS = 10.0  # between two warnings
# Of one request: it may be what the executor dies of, or that may break connections on purpose.
MOST_REPEATS = 20


def went_away(error: SymbiosisError) -> bool:
    """Whether an executor may be back soon: it is gone, or silent, or has no room; it has not said no."""
    if isinstance(error, TlsError):
        return error.retry_after is not None  # else its certificate is not good
    return isinstance(error, ConnectionLost | RequestTimeout) or type(error) in (ConnectError, NobodyListens)


class Lost:
    """How often one request was lost, and since when."""

    __slots__ = ("since", "times")

    def __init__(self) -> None:
        self.since, self.times = 0.0, 0


class LastingConnection:
    """One open channel after the other to the same executor.

    Args:
        open_channel: opens one.
        stats: to count in.
        patience: seconds to wait for an executor that went away; 0: not at all, and nothing is sent again.

    Attributes:
        manifest: what the executor serves.

    Raises:
        ConnectError: there is no first channel.
        WireError: the manifest is not valid.
    """

    def __init__(self, open_channel: Callable[[], Channel], stats: Stats, patience: float) -> None:
        self.patience, self._stats = patience, stats
        self._home = Home()
        self._chance = random.SystemRandom().random
        self._open_channel = open_channel
        self._closing = threading.Event()
        _connections.add(self)
        self._reconnecting = threading.Lock()  # whoever opens a channel holds it, and guards these three:
        self._tries = 0  # since the last answer
        self._gone_since = 0.0
        self._cause: SymbiosisError | None = None
        self._told: float | None = None  # that it is away: when
        self._channel = open_channel()
        try:
            self.manifest = _hello(self._channel)
        except BaseException:
            self._channel.close()
            raise
        self._note_key_exchange()

    @property
    def url(self) -> str:
        """Of the executor."""
        return self._channel.peer

    @property
    def latest(self) -> Channel:
        """The last channel, broken or not."""
        return self._channel

    @property
    def channel(self) -> Channel:
        """The open channel; a new one if the last one broke, which may have to be waited for.

        Raises:
            ConnectError: it cannot be opened, and is not waited for.
            ModelMismatch: the executor serves something else now.
            ConnectionLost: the executor was away for longer than is waited for; or this is a forked child,
                which opens none in its parent's name.
        """
        self._home.check()
        if self._channel.broken and not self._closing.is_set():
            self._reopen(time.monotonic())
        return self._channel

    def waits_after(self, error: SymbiosisError) -> bool:
        """Whether a request that failed so can be sent again."""
        return self.patience > 0 and not self._closing.is_set() and went_away(error)

    def after(self, error: SymbiosisError, lost: Lost) -> Channel:
        """A channel on which a request can be sent again.

        Args:
            error: what the request failed with, after which this ``waits_after``.
            lost: what the request has been through, which is written down here.

        Raises:
            SymbiosisError: see ``channel``, or the request was lost too often or too long ago.
        """
        self._home.check()
        now = time.monotonic()
        lost.since, lost.times = lost.since or now, lost.times + 1
        if lost.times > MOST_REPEATS:
            raise ConnectionLost(
                f"{self.url} broke {lost.times} connections with the same request on them, the last one so: "
                f"{_what(error)}. It may be this request that it cannot answer; tell its operator"
            ) from error
        if self._channel.broken:
            self._reopen(lost.since, error)
        return self._channel

    def answered(self, channel: Channel) -> None:
        """The executor has answered a request: if it was away, it is back."""
        if self._tries and channel is self._channel:
            self._tries, told, self._told, self._cause = 0, self._told, None, None
            if told is not None:
                log.warning("%s is back after %s", self.url, _duration(time.monotonic() - self._gone_since))

    def close(self) -> None:
        """End it; it is not opened again, and nobody waits any longer. In a forked child, nothing."""
        if self._home.left:
            return
        self._closing.set()
        self._channel.close()

    def stop_waiting(self) -> None:
        """Wait for nobody any longer, but go on with an open channel. In a forked child, nothing."""
        if not self._home.left:
            self._closing.set()

    def _reopen(self, since: float, cause: SymbiosisError | None = None) -> None:
        """Replace a broken channel, waiting until ``patience`` seconds after ``since``."""
        with self._reconnecting:
            started = time.monotonic()
            if not self._tries:
                self._gone_since = started
            self._cause = cause or self._cause
            try:
                while self._channel.broken and not self._closing.is_set():
                    self._wait(since)
                    self._try()
            finally:
                self._stats.add(seconds_reconnecting=time.monotonic() - started)

    def _wait(self, since: float) -> None:
        """Before another try; not before the first one."""
        if not self._tries or self._cause is None:
            return
        now = time.monotonic()
        left = since + self.patience - now
        if left <= 0:
            raise ConnectionLost(
                f"{self.url} was tried again and again for {_duration(now - since)}: "
                f"{_what(self._cause)}; to wait longer, give patience=SECONDS"
            ) from self._cause
        if self._told is None or now - self._told > TELL_SECONDS:
            self._told = now
            log.warning("%s is away (%s); waiting up to %s", self.url, _what(self._cause), _duration(left))
        seconds = pause(self._tries - 1, self._cause.retry_after or 0.0, self._chance())
        if self._closing.wait(min(left, seconds)):
            raise ConnectionLost("the session is closed")

    def _try(self) -> None:
        if self.patience:
            self._tries += 1
        try:
            channel = self._open()
        except SymbiosisError as error:
            if not self.patience or not went_away(error):
                raise
            self._cause = error
            return
        log.info("connected again to %s", self.url)
        self._channel.close()
        self._channel = channel
        self._stats.add(reconnections=1)
        self._note_key_exchange()
        if self._closing.is_set():  # meanwhile: whoever closed may have seen only the old channel
            channel.close()

    def _open(self) -> Channel:
        channel = self._open_channel()
        try:
            if _hello(channel) != self.manifest:
                raise ModelMismatch(f"{self.url} serves something else since it is back; open a new session")
        except BaseException:
            channel.close()
            raise
        return channel

    def _note_key_exchange(self) -> None:
        if self._channel.key_exchange:
            with self._stats.lock:
                self._stats.key_exchange[self.url] = self._channel.key_exchange


_connections: weakref.WeakSet[LastingConnection] = weakref.WeakSet()


def _stop_waiting() -> None:
    """At the end of a program that closed no session: pools' threads, which Python joins, would wait on."""
    for connection in list(_connections):
        connection.stop_waiting()


before_threads_are_joined(_stop_waiting)  # of pools, which have registered theirs already


def _hello(channel: Channel) -> Manifest:
    hello = encode(Hello(client="symbiosis/1"))
    answer = channel.wait(
        channel.submit(
            lambda protocol: protocol.control(Operation.HELLO, len(hello), Header(Operation.WELCOME, rows=1)),
            hello,
        )
    )
    manifest = decode(control_payload(answer), Manifest)
    validate_manifest(manifest)
    return manifest


def _what(error: SymbiosisError) -> str:
    """What happened, without the advice behind the semicolon: it is being followed."""
    return error.message.partition(";")[0]


def _duration(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds:.{int(seconds < 10)}f} s"
