"""Tenants' connections over any transport: how one is served and ends, and how many there may be."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from provider.engine.loop import Loop
from provider.observe.metrics import Metrics
from provider.serve.admission import Identity, Refused, identify
from provider.serve.tokens import TokenFile
from provider.session.tenant import TenantSession
from shared.errors import ConfigurationError, WireError
from shared.log_rate_limit import LogRateLimiter

log = logging.getLogger(__name__)

REMIND_SECONDS = 60.0  # between lines of the log that report the same
FAILURES = 60  # of one kind of handshake that are logged in that time
_LEVELS = {"internal": logging.ERROR} | dict.fromkeys(("full", "tenant_full", "overloaded"), logging.WARNING)
AGES = 0.02  # of the greatest age: how often ages are looked at
JITTER = (0.9, 1.1)  # of a connection's greatest age: those that began together do not all move at once


class Stage(IntEnum):
    """How far a connection is in its life: it only goes forward, and may leave out stages."""

    OPEN = 0  # requests are read and answered
    DRAINING = 1  # what has arrived is still read
    HALF_CLOSED = 2  # all of that has been read, and some of it is not answered yet
    CLOSING = 3  # no request is handled any more; the tenant is being notified
    LINGERING = 4  # the tenant was notified, and its own end is awaited
    ENDED = 5  # everything is given back


# Python 3.11 takes longer to find a member in its class than to compare it.
OPEN, DRAINING, HALF_CLOSED, CLOSING, LINGERING, ENDED = Stage


class Connection(ABC):
    """One tenant's connection, after its handshake. All but the constructor is for the loop's thread.

    Attributes:
        tenant: whose connection it is.
        token: SHA-256 of the token that let it in.
        drain_at: time of the loop at which it is drained.
    """

    _session: TenantSession
    _stage: Stage = OPEN

    def __init__(self, tenant: str, token: str, peer: str) -> None:
        self.tenant, self.token = tenant, token
        self._log_fields = {"tenant": tenant, "peer": peer}  # for the log
        self.drain_at = math.inf

    def start(self, loop: Loop, ended: Callable[[], None]) -> None:
        """Serve the connection in the loop until it has ended, and then call ``ended``."""
        self._loop, self._on_end = loop, ended

    @abstractmethod
    def drain(self) -> None:
        """Answer what has arrived, read no more, then say that this executor goes away."""

    def revoke(self) -> None:
        """End the session, whatever is in flight: its token is valid no more."""
        message = "the token of this session was removed or has expired; ask the provider for a new one"
        self._guarded(self._revoke, WireError("unauthorized", message, fatal=True))

    def _revoke(self, error: WireError) -> None:
        if self._stage < CLOSING:
            extra = self._log_fields | {"reason": "revoked"}
            log.warning("tenant %s is shut out: its token is valid no more", self.tenant, extra=extra)
            self._session.refuse(0, error)
            self._refused(error)

    def _advance(self, stage: Stage) -> None:
        """Go forward to a stage; nothing else sets it."""
        if stage < self._stage:
            raise AssertionError(f"from {self._stage!r} back to {stage!r}")
        self._stage = stage

    @abstractmethod
    def _refused(self, error: WireError) -> None:
        """End the connection after a fatal error: notify the tenant, and wait for its end."""

    @abstractmethod
    def _release(self) -> None:
        """Give everything back."""

    def _guarded(self, handle: Callable[..., None], *args: object) -> None:
        """Handle what is ready, and end if the tenant left, died or broke the protocol."""
        try:
            if self._stage < ENDED:
                handle(*args)
        except WireError as error:
            if self._session.logged:
                log.warning("tenant %s broke the protocol: %s", self.tenant, error, extra=self._log_fields)
            self._session.refuse(0, error)
            self._refused(error)
        except (OSError, EOFError) as error:
            self._broke(error)
        except Exception:
            log.exception("the connection of tenant %s failed", self.tenant, extra=self._log_fields)
            self._end()

    def _broke(self, error: BaseException) -> None:
        if self._stage < CLOSING:  # a peer that has ended need not wait for our close frame
            reason = type(error).__name__
            extra = self._log_fields | {"reason": reason}
            if self._session.logged:
                log.info("tenant %s: connection ended: %s", self.tenant, reason, extra=extra)
        self._end()

    def _end(self) -> None:
        if self._stage < ENDED:
            self._advance(ENDED)
            self._release()
            self._on_end()
            del self._on_end  # it keeps this connection, which would wait for the garbage collector


class ConnectionLimits(NamedTuple):
    """Limits of an executor's connections, over all transports together.

    Attributes:
        total: how many connections there may be, with those whose handshake is in progress; further ones
            are closed at once.
        per_tenant: how many connections one tenant may have; further ones are turned away.
        seconds: the age at which a connection is drained, so that its tenant comes again, perhaps to
            another replica; 0: never.
    """

    total: int = 256
    per_tenant: int = 64
    seconds: float = 0.0


DEFAULT_LIMITS = ConnectionLimits()


class Connections:
    """Counts the connections of an executor, limits and ends them."""

    def __init__(self, metrics: Metrics, loop: Loop, limits: ConnectionLimits) -> None:
        self.metrics, self.loop, self._limits = metrics, loop, limits
        self._chance = random.SystemRandom().uniform
        self._reserved = 0
        self._reserved_for: Counter[str] = Counter()  # by tenant
        self._open: set[Connection] = set()
        self._changed = threading.Condition()
        self._refusals: dict[tuple[str, str], LogRateLimiter] = {}  # by reason and tenant
        self._unchecked = LogRateLimiter(REMIND_SECONDS)
        self._age_timer_set = False
        self._draining = False

    def reserve(self) -> None:
        """Reserve a slot for another connection until ``start`` or ``release``.

        Raises:
            Refused: there is none.
        """
        with self._changed:
            if self._reserved + len(self._open) >= self._limits.total:
                why = f"{self._limits.total} connections are open, which is the limit"
                raise Refused("full", "as many sessions as the executor allows", why)
            self._reserved += 1

    def release(self) -> None:
        """Give the slot back: there will be no connection."""
        with self._changed:
            self._reserved -= 1
            self._changed.notify_all()

    def admit(self, token: str | None, tokens: TokenFile, reservation: ExitStack) -> Identity:
        """Returns whom a token lets in, with a slot until ``start`` or ``reservation``'s end.

        Raises:
            Refused: it lets nobody in, or the tenant has as many connections as it may.
        """
        identity = identify(token, tokens)
        self.reserve_for(identity.tenant)
        reservation.callback(self.release_for, identity.tenant)
        return identity

    def reserve_for(self, tenant: str) -> None:
        """Reserve a slot for another connection of a tenant, as ``reserve`` does."""
        with self._changed:
            count = sum(each.tenant == tenant for each in self._open) + self._reserved_for[tenant]
            if count >= self._limits.per_tenant:
                why = f"{tenant} has {self._limits.per_tenant} connections, which is the limit"
                raise Refused("tenant_full", "this tenant has too many sessions", why, tenant)
            self._reserved_for[tenant] += 1

    def release_for(self, tenant: str) -> None:
        """Give the tenant's slot back: there will be no connection."""
        with self._changed:
            self._reserved_for[tenant] -= 1
            self._reserved_for += Counter()  # forgets tenants without any

    def refused(self, error: Refused, peer: str) -> None:
        """Count a peer that got no session, and log why, unless that was logged often enough lately."""
        reason, tenant = error.reason, error.tenant
        self.metrics.handshake_failed(reason)
        times = 1 if reason in ("full", "tenant_full") else FAILURES  # strangers decide how many there are
        limiter = self._refusals.setdefault((reason, tenant), LogRateLimiter(REMIND_SECONDS, times))
        if limiter.due(time.monotonic()):
            why = f" ({error.why})" if error.why else ""
            who = {"peer": peer, "reason": reason} | ({"tenant": tenant} if tenant else {})
            level, more = _LEVELS.get(reason, logging.INFO), limiter.more()
            log.log(level, "no session for %s: %s%s%s", peer, reason, why, more, extra=who)

    def start(self, connection: Connection) -> None:
        """Serve a connection from now on, in the slot that was reserved for it; in the loop's thread."""
        if self._limits.seconds:
            connection.drain_at = self.loop.now + self._limits.seconds * self._chance(*JITTER)
        with self._changed:  # at once: a tenant's connection must not count twice
            self._reserved -= 1
            self._open.add(connection)
            self.release_for(connection.tenant)
        self.metrics.connected(1)
        # It reads at once, so it may end here: nothing else may keep it than what ``_ended`` takes it from.
        connection.start(self.loop, partial(self._ended, connection))
        if self._draining:
            connection.drain()
        elif self._limits.seconds and not self._age_timer_set:
            self._age_timer_set = True
            self.loop.call_later_weak(self._limits.seconds * AGES, self._drain_old)

    def _drain_old(self) -> None:
        """Drain old connections; one timer serves all."""
        with self._changed:
            connections = list(self._open)
        self._age_timer_set = bool(connections)
        if self._age_timer_set:  # first, so that it goes on if a connection fails
            self.loop.call_later_weak(self._limits.seconds * AGES, self._drain_old)
        for connection in connections:
            if connection.drain_at <= self.loop.now:
                connection.drain_at = math.inf
                connection.drain()

    def _ended(self, connection: Connection) -> None:
        self.metrics.connected(-1)
        with self._changed:
            self._open.discard(connection)
            self._changed.notify_all()

    def end_revoked(self, tokens: TokenFile) -> None:
        """Shut those out whose token is valid no more; from any thread, which waits for the file."""
        with self._changed:
            connections = list(self._open)  # before the file is read: who comes later may have a later token
        try:
            valid = tokens.valid_tokens() if connections else set()
        except ConfigurationError as error:
            if self._unchecked.due(time.monotonic()):
                log.error("cannot check the tokens of open sessions: %s", error)
            return
        for connection in connections:
            if (connection.tenant, connection.token) not in valid:
                self.loop.call_soon_threadsafe(connection.revoke)

    @property
    def draining(self) -> bool:
        """Whether ``begin_drain`` was called."""
        return self._draining

    def begin_drain(self) -> None:
        """Let every connection, also those to come, answer what has arrived; from any thread, at once."""
        self._draining = True
        self.loop.call_soon_threadsafe(self._drain_open)

    def drain(self, seconds: float) -> bool:
        """Call ``begin_drain``, and wait. Returns whether all connections ended in time."""
        self.begin_drain()
        with self._changed:
            return self._changed.wait_for(lambda: not (self._open or self._reserved), seconds)

    def _drain_open(self) -> None:
        with self._changed:
            connections = list(self._open)
        for connection in connections:
            connection.drain()
