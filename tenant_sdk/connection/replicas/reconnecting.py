"""A connection that is opened again when it breaks, to a replica of the executor that can be used.

A party's replicas serve the same and are one operator's. Their connections are used one after the other,
never two at once. While none can be used, they are waited for.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - see _stop_waiting, which must be registered later
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping

from shared.compat import before_threads_are_joined
from shared.errors import (
    ConfigurationError,
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
from tenant_sdk.connection.replicas.replica_set import ReplicaSet
from tenant_sdk.connection.stats import Stats

log = logging.getLogger(__name__)

TELL_SECONDS = 10.0  # between two warnings
# Of one request: it may be what the executor dies of, or that may break connections on purpose.
MOST_REPEATS = 20

OpenChannel = Callable[[], Channel]
FindReplicas = Callable[[], Mapping[str, OpenChannel]]
"""Of each replica that there is now its name, and what opens a channel to it."""


def single_replica(open_channel: OpenChannel, name: str = "") -> FindReplicas:
    """The replicas of a party that has one."""
    return lambda: {name: open_channel}


def went_away(error: SymbiosisError) -> bool:
    """Whether an executor may be back soon: it is gone, or silent, or has no room; it has not said no."""
    if isinstance(error, TlsError):
        return error.retry_after is not None  # else its certificate is not good
    return isinstance(error, ConnectionLost | RequestTimeout) or type(error) in (ConnectError, NobodyListens)


class _OtherPart(ModelMismatch):
    """An executor that serves a part, which is not the one that is looked for."""


class Lost:
    """How often one request was lost, and since when."""

    __slots__ = ("since", "times")

    def __init__(self) -> None:
        self.since, self.times = 0.0, 0


class ReconnectingConnection:
    """One open channel after the other to the same executor, or to replicas of it.

    Args:
        find: the replicas, asked for before each try.
        stats: to count in.
        patience: seconds to wait for an executor that went away; 0: not at all, and nothing is sent again.
        party: under which ``Stats.replicas`` has the replica in use.
        digest: refuse replicas whose manifest has another one; empty: any.
        group: pass over those that serve a part without this one; None: any part.

    Attributes:
        manifest: what the executor serves, and every replica of it.

    Raises:
        SymbiosisError: there is no first channel; of several replicas, none can be used.
    """

    def __init__(
        self,
        find: FindReplicas,
        stats: Stats,
        patience: float,
        party: str = "",
        digest: str = "",
        group: int | None = None,
    ) -> None:
        self.patience, self._stats, self._party, self._digest = patience, stats, party, digest
        self._group = group
        self._home = Home()
        self._chance = random.SystemRandom().random
        self._find, self._replicas = find, ReplicaSet(lambda: self._chance())
        self._closing = threading.Event()
        _connections.add(self)
        self._reconnecting = threading.Lock()  # whoever opens a channel holds it, and guards these:
        self._rounds = 0  # in which each replica was tried once, since the last answer
        self._tried: set[str] = set()  # in this round
        self._warned_of: set[str] = set()  # that they refuse
        self._gone_since = 0.0
        self._cause: SymbiosisError | None = None
        self._told: float | None = None  # that it is away: when
        found = None
        while found is None:
            found = self._try(None, None)
        self._rounds, self._cause = 0, None
        self._tried.clear()
        self._replica, self._channel, self.manifest = found
        self._note()

    @property
    def url(self) -> str:
        """Of the executor; of several replicas the one in use."""
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
            ModelMismatch: the executor, or every replica, serves something else now.
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
        if not (self._rounds and channel is self._channel) or channel.broken:
            return
        if not self._reconnecting.acquire(blocking=False):
            return  # somebody opens another channel: the next answer says it
        try:
            self._rounds, told, self._told, self._cause = 0, self._told, None, None
            self._tried.clear()
            self._replicas.answered(self._replica)
            if told is not None:
                log.warning("%s is back after %s", self.url, _duration(time.monotonic() - self._gone_since))
        finally:
            self._reconnecting.release()

    def keep_to(self, group: int) -> None:
        """From now on pass over those that serve a part without this one."""
        self._group = group

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

    def sleep(self, seconds: float) -> None:
        """As ``time.sleep``, but not for longer than the session lasts.

        Raises:
            ConnectionLost: it was closed.
        """
        if self._closing.wait(seconds):
            raise ConnectionLost("the session is closed")

    def _reopen(self, since: float, cause: SymbiosisError | None = None) -> None:
        """Replace a broken channel, waiting until ``patience`` seconds after ``since``."""
        with self._reconnecting:
            started = time.monotonic()
            if not self._rounds:
                self._gone_since = started
            self._cause = cause or self._cause
            if self._channel.broken:
                self._replicas.failed(self._replica, started, cause, at_once=not self._rounds)
            if not self.patience:
                self._tried.clear()
            try:
                while self._channel.broken and not self._closing.is_set():
                    found = self._try(since, self.manifest)
                    if found is not None:
                        self._use(found[0], found[1], cause)
            finally:
                self._stats.add(seconds_reconnecting=time.monotonic() - started)

    def _try(self, since: float | None, served: Manifest | None) -> tuple[str, Channel, Manifest] | None:
        """Open a channel to the next replica; None: it cannot be used, or all were tried and waited for.

        Args:
            since: where the waiting began; None: nobody is waited for.
            served: what it must serve; None: anything.

        Raises:
            SymbiosisError: none can be used, and none is waited for any longer; or one must not be.
        """
        find = self._find()
        self._replicas.update(find)
        name = self._replicas.choose(time.monotonic(), self._tried)
        if name is None:
            self._wait(since)
            self._tried.clear()
            return None
        if not self._tried:
            self._rounds += 1
        self._tried.add(name)
        started = time.monotonic()
        try:
            channel, manifest = self._open(name, find[name], served)
        except SymbiosisError as error:
            self._failed(name, error)
            return None
        now = time.monotonic()
        self._replicas.opened(name, now, now - started)
        return name, channel, manifest

    def _wait(self, since: float | None) -> None:
        """Before another round, in which every replica is tried once."""
        if not self._replicas.names:
            raise ConnectionLost("this party has no replicas any more")
        if since is None or not self.patience or self._replicas.refused:
            raise self._replicas.error()
        now, why = time.monotonic(), self._replicas.why()
        left = since + self.patience - now
        count = len(self._replicas.names)
        if left <= 0:
            who = f"all {count} replicas were" if count > 1 else f"{self.url} was"
            raise ConnectionLost(
                f"{who} tried again and again for {_duration(now - since)}: {why}; to wait longer, give "
                "patience=SECONDS"
            ) from self._cause
        if self._told is None or now - self._told > TELL_SECONDS:
            self._told = now
            who = f"all {count} replicas are" if count > 1 else f"{self.url} is"
            log.warning("%s away (%s); waiting up to %s", who, why, _duration(left))
        seconds = pause(self._rounds - 1, self._replicas.asked(now), self._chance())
        self.sleep(min(left, seconds))

    def _failed(self, name: str, error: SymbiosisError) -> None:
        """A replica cannot be used; another one may be."""
        away = went_away(error)
        if isinstance(error, ConfigurationError) and not isinstance(error, ModelMismatch):
            raise error  # it is no matter of one replica: such as two parties that are one operator
        if away:
            log.info("%s cannot be used: %s", name, error.message)
            self._cause = error
        elif len(self._replicas.names) > 1 and name not in self._warned_of and type(error) is not _OtherPart:
            self._warned_of.add(name)
            log.warning("%s is not used: %s", name, error.message)
        self._replicas.failed(name, time.monotonic(), error, refused=not away)

    def _open(
        self, name: str, open_channel: OpenChannel, served: Manifest | None
    ) -> tuple[Channel, Manifest]:
        channel = open_channel()
        try:
            manifest = _hello(channel)
            if self._digest and manifest.digest != self._digest:
                raise ModelMismatch(
                    f"{name} serves weights with digest {manifest.digest}, not {self._digest}"
                )
            if self._group is not None and not manifest.serves(self._group):
                raise _OtherPart(
                    f"{name} serves other layers than those that are wanted here, groups "
                    f"{_part(manifest)} of {len(manifest.groups)}; name all executors of the provider"
                )
            if served is not None and manifest != served:
                if name == self._replica:
                    raise ModelMismatch(f"{name} serves something else since it is back; open a new session")
                raise ModelMismatch(_difference(name, manifest, self._replica, served))
        except BaseException:
            channel.close()
            raise
        return channel, manifest

    def _use(self, name: str, channel: Channel, cause: SymbiosisError | None) -> None:
        """From now on, in the place of the broken one."""
        moved = name != self._replica
        if moved:
            why = f": {_what(cause)}" if cause is not None else ""
            log.info("moved from %s to %s%s", self._replica, name, why)
        else:
            log.info("connected again to %s", self.url)
        self._channel.close()
        self._replica, self._channel = name, channel
        self._stats.add(reconnections=1, moves=int(moved))
        self._note()
        if self._closing.is_set():  # meanwhile: whoever closed may have seen only the old channel
            channel.close()

    def _note(self) -> None:
        with self._stats.lock:
            if self._party:
                self._stats.replicas[self._party] = self._replica
            if self._channel.key_exchange:
                self._stats.key_exchange[self.url] = self._channel.key_exchange


_connections: weakref.WeakSet[ReconnectingConnection] = weakref.WeakSet()


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


def _part(manifest: Manifest) -> str:
    first, stop = manifest.part or (0, len(manifest.groups))
    return f"{first} to {stop - 1}"


def _difference(name: str, manifest: Manifest, other: str, served: Manifest) -> str:
    """How a replica's manifest is another than that with which the session began."""
    fields = [each for each in Manifest.__struct_fields__ if getattr(manifest, each) != getattr(served, each)]
    return (
        f"{name} serves something else than {other} (other {', '.join(fields)}); replicas of one party serve "
        "the same checkpoint with the same options: ask its operator"
    )


def _what(error: SymbiosisError) -> str:
    """What happened, without the advice behind the semicolon: it is being followed."""
    return error.message.partition(";")[0]


def _duration(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds:.{int(seconds < 10)}f} s"
