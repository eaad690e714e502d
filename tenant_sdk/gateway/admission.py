"""Admission of clients, their number at once, and their error when the provider fails. No I/O."""

from __future__ import annotations

import enum
import hmac
import json
import math
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shared.errors import ModelMismatch, RequestRefused, SymbiosisError, VerificationError, WireError
from shared.hosts import LOOPBACK, in_url
from tenant_sdk.connection.replicas.retrying import may_come_back
from tenant_sdk.gateway.reservations import Reservations

MAX_ADAPTERS = 1024  # names, of all clients
RESTART_SECONDS = 10  # in which a gateway that is shut down may be back
_HERE = frozenset(map(in_url, LOOPBACK))
RECENT = 32  # requests that an estimate goes by


class Refusal(NamedTuple):
    """An answer instead of the one that was asked for; ``retry_after`` in seconds, 0: none is given."""

    status: int
    kind: str
    message: str
    retry_after: int = 0

    def body(self) -> dict[str, Any]:
        """In the form of OpenAI's interface."""
        return {"error": {"message": self.message, "type": self.kind, "param": None, "code": self.status}}

    def encoded(self) -> bytes:
        """``body`` as JSON."""
        return json.dumps(self.body()).encode()


class StepFailure(enum.StrEnum):
    """What can be wrong when a step fails."""

    UNAVAILABLE = "away"  # the provider or a mask source; it may be back
    WRONG_ANSWER = "wrong"  # an answer, so the session asks for nothing more
    INTERNAL = "here"

    @classmethod
    def of(cls, error: Exception) -> StepFailure:
        """The kind of an error that a session raised, or vLLM."""
        if isinstance(error, (VerificationError, ModelMismatch, WireError)):
            return cls.WRONG_ANSWER
        if isinstance(error, RequestRefused):
            return cls.UNAVAILABLE if error.retry_after is not None else cls.INTERNAL
        return cls.UNAVAILABLE if isinstance(error, SymbiosisError) and may_come_back(error) else cls.INTERNAL


def shutting_down() -> Refusal:
    """The refusal for clients when the gateway ends."""
    return Refusal(503, "overloaded", "the gateway is shutting down", RESTART_SECONDS)


def failure_refusal(failure: str, message: str, retry_after: int) -> Refusal:
    """The refusal for clients when a step failed.

    Args:
        failure: a ``StepFailure``.
        retry_after: seconds after which an unavailable executor may be back.
    """
    if failure == StepFailure.WRONG_ANSWER:
        message += ". If an answer was wrong, this gateway asks for nothing more until it is started again"
        return Refusal(502, "provider_error", message)
    if failure == StepFailure.UNAVAILABLE:
        return Refusal(503, "provider_unavailable", message, retry_after)
    return Refusal(500, "server_error", message or "the gateway failed; its log says why")


@dataclass
class UnauthenticatedConnections:
    """Connections that have shown no key yet: the one that has been here longest makes room for another.

    Args:
        limit: at once.
    """

    limit: int
    waiting: dict[object, None] = field(default_factory=dict)  # in the order in which they came

    def arrive(self, connection: object) -> object | None:
        """One more; the connection that is to be closed for it, if there is one."""
        self.waiting[connection] = None
        if len(self.waiting) <= self.limit:
            return None
        first = next(iter(self.waiting))
        del self.waiting[first]
        return first

    def leave(self, connection: object) -> None:
        """It showed a key, or is closed."""
        self.waiting.pop(connection, None)


@dataclass
class SequenceLimit:
    """How many sequences are in flight, and when to come back when there are too many.

    Args:
        limit: in flight at once, computed or waiting.
        clients: that share them.

    Attributes:
        period: a number that its owner raises now and then.
    """

    limit: int
    clients: int = 1
    requests: int = 0
    refused: int = 0
    period: int = 0
    # Requests in flight, by the period in which they entered.
    _periods: Counter[int] = field(default_factory=Counter)
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __post_init__(self) -> None:
        """Nobody is there yet."""
        self._shares = Reservations(self.limit, self.clients)

    @property
    def in_flight(self) -> int:
        """Sequences of all clients."""
        return self._shares.total

    def others_in_flight(self, client: str) -> bool:
        """Whether another client than this has sequences in flight."""
        return any(count > 0 and name != client for name, count in self._shares.taken.items())

    def enter(self, client: str, count: int) -> Refusal | None:
        """A client's request for so many sequences, or why not; who entered leaves."""
        if count > (largest := self._shares.largest):
            why = f"it asks for {count} sequences at once, and this gateway takes {largest}; ask for less"
            return Refusal(400, "invalid_request_error", why)
        if self._shares.reserve(client, count):
            self.requests += 1
            self._periods[self.period] += 1
            return None
        self.refused += 1
        mine = self._shares.taken.get(client, 0)
        return Refusal(
            429,
            "overloaded",
            f"{self.in_flight} sequences are in flight or wait, {mine} of them with your key; this gateway "
            f"takes {self.limit}, and {largest} with one key; try again",
            self.retry_after,
        )

    def leave(self, client: str, count: int, seconds: float, period: int = 0) -> None:
        """A client that entered with so many, in a period, is done after so many seconds."""
        self._shares.release(client, count)
        self.requests -= 1
        self._seconds.append(seconds)
        self._periods[period] -= 1
        if not self._periods[period]:
            del self._periods[period]

    @property
    def oldest_period(self) -> int:
        """That in which the first of the requests in flight entered; the present one if there is none."""
        return min(self._periods, default=self.period)

    @property
    def retry_after(self) -> int:
        """Seconds until somebody is likely to leave: what one takes, divided by how many there are."""
        if not self._seconds:
            return 1
        mean = sum(self._seconds) / len(self._seconds)
        return max(1, math.ceil(mean / max(1, self.requests)))


def _host(name: str) -> str:
    """Without the port."""
    return name if name.endswith("]") else name.rpartition(":")[0] or name


@dataclass(frozen=True)
class Authenticator:
    """Who may come in.

    Args:
        keys: one of these must be given; none: whoever is on this machine, by a name of this machine.
    """

    keys: Collection[str] = field(default=(), repr=False)

    @property
    def clients(self) -> int:
        """How many there may be: those who have the same key are one."""
        return max(1, len(self.keys))

    def admit(self, headers: Sequence[tuple[bytes, bytes]]) -> str | Refusal:
        """Which client this is, or why it does not come in."""
        fields = {name.lower(): value.decode("latin-1") for name, value in headers}
        if not self.keys:
            # A page of elsewhere, whose name was pointed at this machine, could ask in its reader's name.
            name = _host(fields.get(b"host", ""))
            # And such a page may send what it could not read the answer of.
            origin = fields.get(b"origin", "")
            if name in _HERE and (not origin or _host(origin.rpartition("//")[2]) in _HERE):
                return ""
            return Refusal(403, "forbidden", "without API keys this gateway answers to localhost alone")
        scheme, _, credential = fields.get(b"authorization", "").partition(" ")
        matches = [hmac.compare_digest(credential.strip().encode(), key.encode()) for key in self.keys]
        if scheme.lower() == "bearer" and any(matches):
            return str(matches.index(True))
        return Refusal(401, "unauthorized", "give one of this gateway's API keys: Authorization: Bearer KEY")
