"""A connection that is opened again when it breaks, to a replica of the executor that can be used.

A party's replicas serve the same and are one operator's. Their connections are used one after the other,
never two at once. While none can be used, they are waited for. This module does the I/O alone;
``tenant_sdk.connection.replicas.retrying`` decides what is sent again, and which replica is next, and when.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - see _stop_waiting, which must be registered later
import logging
import random
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shared.compat import before_threads_are_joined
from shared.errors import ConnectionLost, ModelMismatch, SymbiosisError
from shared.forks import ForkGuard
from shared.log_rate_limit import LogRateLimiter
from shared.wire.header import Header, Operation
from shared.wire.incoming import Incoming
from shared.wire.messages import Hello, Manifest, decode, encode
from shared.wire.protocol import validate_manifest
from tenant_sdk.connection.channel import Channel, ResponseFuture, control_payload
from tenant_sdk.connection.clock import CLOCK, Clock
from tenant_sdk.connection.replicas.replica_set import what_happened
from tenant_sdk.connection.replicas.retrying import (
    REMIND_SECONDS,
    GiveUp,
    LogEntry,
    OtherPart,
    ReconnectPolicy,
    RequestPolicy,
    Retry,
    Wait,
    concerns_all,
    may_come_back,
)
from tenant_sdk.connection.stats import Stats

log = logging.getLogger(__name__)

SendRequest = Callable[[Channel], ResponseFuture]
"""Sends one request. Each call sends the same bytes."""
OpenChannel = Callable[[], Channel]
FindReplicas = Callable[[], Mapping[str, OpenChannel]]
"""Returns the name of each replica that there is now, and what opens a channel to it."""


def single_replica(open_channel: OpenChannel, name: str = "") -> FindReplicas:
    """Returns the replicas of a party that has one."""
    return lambda: {name: open_channel}


@dataclass(frozen=True)
class ConnectionOptions:
    """Options of the connections to a party.

    Attributes:
        stats: to count in; a session with two executors has one.
        retry_seconds: how long to wait for an executor that becomes unavailable. 0: not at all: a request in
            flight fails, and the next one tries once to connect again.
        party: the key under which ``Stats.replicas`` has the replica in use.
        digest: refuse replicas whose manifest has another one; empty: any.
        clock: how time passes.
    """

    stats: Stats = field(default_factory=Stats)
    retry_seconds: float = 0.0
    party: str = ""
    digest: str = ""
    clock: Clock = CLOCK


class ReconnectingConnection:
    """Has one open channel after the other to the same executor, or to replicas of it.

    A request that is lost because the executor became unavailable is sent again when it is back, or to
    another one: the same bytes. So is a request that an executor refused because it is overloaded, has lost
    a worker or restarts. Nothing else is repeated.

    Args:
        find: the replicas, asked for before each try.
        options: see ``ConnectionOptions``.
        group: pass over replicas that serve a part without this one; None: any part.

    Attributes:
        manifest: what the executor serves, and every replica of it.
        policy: decides what is tried next.

    Raises:
        SymbiosisError: there is no first channel; of several replicas, none can be used.
    """

    def __init__(self, find: FindReplicas, options: ConnectionOptions, group: int | None = None) -> None:
        self._find, self._stats, self._clock = find, options.stats, options.clock
        self._party, self._digest, self._group = options.party, options.digest, group
        self._fork_guard = ForkGuard()
        self._closing = threading.Event()
        _connections.add(self)
        self._reminder = LogRateLimiter(REMIND_SECONDS)  # that requests are put off
        self._reconnecting = threading.Lock()  # the thread that opens a channel holds it; it guards these:
        self.policy = ReconnectPolicy(options.retry_seconds, random.SystemRandom().random)
        found = None
        while found is None:
            found = self._try(None, None)
        self.policy.reset()
        self._channel, self.manifest = found
        self._record_replica()

    @property
    def url(self) -> str:
        """The executor's URL; of several replicas the one in use."""
        return self._channel.peer

    @property
    def last_channel(self) -> Channel:
        """The last channel, broken or not."""
        return self._channel

    @property
    def channel(self) -> Channel:
        """The open channel; a new one if the last one broke, which may have to be waited for.

        Raises:
            ConnectError: it cannot be opened, and is not waited for.
            ModelMismatch: the executor, or every replica, serves something else now.
            ConnectionLost: the executor was unavailable for longer than is waited for; or this is a forked
                child, which opens none in its parent's name.
        """
        self._fork_guard.check()
        if self._channel.broken and not self._closing.is_set():
            self._reopen(self._clock.now())
        return self._channel

    def send(self, channel: Channel, send: SendRequest) -> Callable[[], Incoming]:
        """Send a request. Returns a function that waits for its answer, see ``answer``."""
        first: ResponseFuture | None = None
        try:
            first = send(channel)
        except SymbiosisError as error:
            if not (self.policy.retry_seconds and may_come_back(error)):
                raise
        return lambda: self.answer(channel, send, first)

    def answer(self, channel: Channel, send: SendRequest, first: ResponseFuture | None = None) -> Incoming:
        """Waits for an answer. Sends the request again if the executor is overloaded or unavailable.

        Args:
            channel: the channel of the first try.
            send: sends the request.
            first: the future of the first try, if it is in flight.

        Raises:
            RequestRefused: for anything else, or overloaded for longer than the timeout.
            ConnectionLost: the part of it that was asked was unavailable for longer than is waited for, or
                the request broke too many connections.
            SymbiosisError: see ``channel``.
        """
        clock = self._clock
        retry = RequestPolicy(
            self.policy.retry_seconds, clock.now(), lambda: self.policy.uniform(), self._reminder
        )
        pending = first
        while True:
            try:
                answer = channel.wait(pending or send(channel))
                self._answered(channel)
                return answer
            except SymbiosisError as error:
                pending, now = None, clock.now()
                step = retry.after_error(
                    error, now, url=self.url, timeout=channel.timeout, closed=self._closing.is_set()
                )
                try:
                    if isinstance(step, Retry):
                        self._log_entry(step.entry)
                        self._wait(step.at)
                        self._stats.add(refusals=1, seconds_throttled=step.at - now)
                    elif isinstance(step, GiveUp):
                        if step.error is error:
                            raise
                        raise step.error from error
                    else:
                        channel = self._open_since(step.since, error)
                        retry.reconnected(clock.now())
                finally:
                    del step  # whose error holds this frame: no cycle that keeps rows in memory

    def pin_to_part(self, group: int) -> None:
        """From now on pass over replicas that serve a part without this group."""
        self._group = group

    def close(self) -> None:
        """Close the connection for good, and end all waiting. Does nothing in a forked child."""
        if self._fork_guard.in_child:
            return
        self._closing.set()
        self._channel.close()

    def stop_waiting(self) -> None:
        """Wait for no executor any longer, but go on with an open channel. Does nothing in a forked child."""
        if not self._fork_guard.in_child:
            self._closing.set()

    def _wait(self, until: float) -> None:
        """Wait until a time, but not for longer than the session lasts.

        Raises:
            ConnectionLost: the session was closed.
        """
        if self._clock.wait(until, self._closing):
            raise ConnectionLost("the session is closed")

    def _log_entry(self, entry: LogEntry | None) -> None:
        if entry is not None:
            log.log(entry.level, "%s", entry.text)

    def _answered(self, channel: Channel) -> None:
        """Record that the executor has answered a request: if it was unavailable, it is back."""
        if not (self.policy.reconnecting and channel is self._channel) or channel.broken:
            return
        if not self._reconnecting.acquire(blocking=False):
            return  # another thread opens another channel: the next answer reports it
        try:
            self._log_entry(self.policy.answered(self._clock.now()))
        finally:
            self._reconnecting.release()

    def _open_since(self, since: float, cause: SymbiosisError) -> Channel:
        """Returns an open channel, a new one if the last one broke; see ``_reopen``."""
        self._fork_guard.check()
        if self._channel.broken:
            self._reopen(since, cause)
        return self._channel

    def _reopen(self, since: float, cause: SymbiosisError | None = None) -> None:
        """Replace a broken channel, waiting until ``retry_seconds`` after ``since``."""
        with self._reconnecting:
            started = self._clock.now()
            if self._channel.broken:  # else another thread has replaced it
                self.policy.connection_lost(started, cause)
            try:
                while self._channel.broken and not self._closing.is_set():
                    before = self.policy.replica
                    found = self._try(since, self.manifest)
                    if found is not None:
                        self._use(found[0], before, cause)
            finally:
                self._stats.add(seconds_reconnecting=self._clock.now() - started)

    def _try(self, since: float | None, served: Manifest | None) -> tuple[Channel, Manifest] | None:
        """Open a channel to the next replica; None: it cannot be used, or all were tried and waited for.

        Args:
            since: where the waiting began; None: nobody is waited for.
            served: what it must serve; None: anything.

        Raises:
            SymbiosisError: none can be used, and none is waited for any longer; or one must not be.
        """
        find, started = self._find(), self._clock.now()
        step = self.policy.next(find, started, since)
        try:
            if isinstance(step, GiveUp):
                raise step.error
            if isinstance(step, Wait):
                self._log_entry(step.entry)
                self._wait(step.until)
                return None
            name = step.replica
        finally:
            del step  # see ``answer``
        try:
            channel, manifest = self._open(name, find[name], served)
        except SymbiosisError as error:
            if concerns_all(error):
                raise
            self._log_entry(self.policy.replica_failed(name, self._clock.now(), error))
            return None
        now = self._clock.now()
        self.policy.opened(name, channel.peer, now, now - started)
        return channel, manifest

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
                raise OtherPart(
                    f"{name} serves other layers than those that are wanted here, groups "
                    f"{_part(manifest)} of {len(manifest.groups)}; name all executors of the provider"
                )
            if served is not None and manifest != served:
                if name == self.policy.replica:
                    raise ModelMismatch(f"{name} serves something else since it is back; open a new session")
                raise ModelMismatch(_difference(name, manifest, self.policy.replica, served))
        except BaseException:
            channel.close()
            raise
        return channel, manifest

    def _use(self, channel: Channel, before: str, cause: SymbiosisError | None) -> None:
        """Replace the broken channel, which led to the replica ``before``."""
        moved = self.policy.replica != before
        if moved:
            why = f": {what_happened(cause)}" if cause is not None else ""
            log.info("moved from %s to %s%s", before, self.policy.replica, why)
        else:
            log.info("connected again to %s", channel.peer)
        self._channel.close()
        self._channel = channel
        self._stats.add(reconnections=1, moves=int(moved))
        self._record_replica()
        if self._closing.is_set():  # meanwhile: the thread that closed may have seen only the old channel
            channel.close()

    def _record_replica(self) -> None:
        with self._stats.lock:
            if self._party:
                self._stats.replicas[self._party] = self.policy.replica
            if self._channel.key_exchange:
                self._stats.key_exchange[self.url] = self._channel.key_exchange


_connections: weakref.WeakSet[ReconnectingConnection] = weakref.WeakSet()


def _stop_waiting() -> None:
    """End all waiting when a program ends that closed no session: Python joins the pools' threads."""
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
    """Returns the message about a replica whose manifest differs from that of the session's start."""
    fields = [each for each in Manifest.__struct_fields__ if getattr(manifest, each) != getattr(served, each)]
    return (
        f"{name} serves something else than {other} (other {', '.join(fields)}); replicas of one party serve "
        "the same checkpoint with the same options: ask its operator"
    )
