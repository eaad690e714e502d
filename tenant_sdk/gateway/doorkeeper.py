"""Who is let in, how many at once, and what clients are told when the provider fails. No I/O."""

from __future__ import annotations

import enum
import hmac
import json
import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from shared.errors import (
    ConnectError,
    ConnectionLost,
    ModelMismatch,
    RequestRefused,
    RequestTimeout,
    SymbiosisError,
    VerificationError,
    WireError,
)

RECENT = 32  # requests that an estimate goes by
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


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


class Failure(enum.StrEnum):
    """What can be wrong when a step fails."""

    AWAY = "away"  # the provider or a mask source; it may be back
    WRONG = "wrong"  # an answer, so the session asks for nothing more
    HERE = "here"

    @classmethod
    def of(cls, error: SymbiosisError) -> Failure:
        """The kind of an error that a session raised."""
        if isinstance(error, (VerificationError, ModelMismatch, WireError)):
            return cls.WRONG
        if isinstance(error, RequestRefused):
            return cls.AWAY if error.retry_after is not None else cls.HERE
        if isinstance(error, (ConnectionLost, ConnectError, RequestTimeout)):
            return cls.AWAY
        return cls.HERE


def told(failure: str, message: str, retry_after: int) -> Refusal:
    """What clients are told when a step failed.

    Args:
        failure: a ``Failure``.
        retry_after: seconds after which an executor that is away may be back.
    """
    if failure == Failure.WRONG:
        message += ". If an answer was wrong, this gateway asks for nothing more until it is started again"
        return Refusal(502, "provider_error", message)
    if failure == Failure.AWAY:
        return Refusal(503, "provider_unavailable", message, retry_after)
    return Refusal(500, "server_error", message or "the gateway failed; its log says why")


class Asked(msgspec.Struct):
    """Of a request's body, what is looked at in front."""

    model: Any = None
    prompt: Any = None
    n: int | None = None

    @property
    def sequences(self) -> int:
        """How many it is for at once: ``n`` answers to each prompt."""
        prompts = self.prompt if isinstance(self.prompt, list) else []
        count = len(prompts) if any(isinstance(each, (str, list)) for each in prompts) else 1
        return count * max(1, self.n or 1)


def asked(body: bytes) -> Asked | Refusal:
    """What a request is for; refused if it is not JSON to the letter, which others might read otherwise."""
    try:
        return msgspec.json.decode(body, type=Asked)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Refusal(400, "invalid_request_error", f"the body is not as it should be: {error}")


@dataclass
class Queue:
    """How many sequences are under way, and when to come back when there are too many.

    Args:
        most: under way at once, computed or waiting.
    """

    most: int
    under_way: int = 0
    requests: int = 0
    refused: int = 0
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def enter(self) -> Refusal | None:
        """A request, as of one sequence, or why not; who entered leaves."""
        return self._take(1, 1)

    def widen(self, count: int) -> Refusal | None:
        """It is of so many, or why not; it leaves all the same, with one."""
        if count > self.most:
            why = f"it asks for {count} sequences at once, and this gateway takes {self.most}; ask for less"
            return Refusal(400, "invalid_request_error", why)
        return self._take(count - 1, 0)

    def _take(self, count: int, requests: int) -> Refusal | None:
        if self.under_way + count <= self.most:
            self.under_way += count
            self.requests += requests
            return None
        self.refused += 1
        return Refusal(
            429,
            "overloaded",
            f"{self.under_way} sequences are under way or wait, of {self.most} that this gateway takes; "
            "try again",
            self.retry_after,
        )

    def leave(self, count: int, seconds: float) -> None:
        """Who entered with so many is done after so many seconds."""
        self.under_way -= count
        self.requests -= 1
        self._seconds.append(seconds)

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
class Door:
    """Who may come in.

    Args:
        keys: one of these must be given; none: whoever is on this machine, by a name of this machine.
    """

    keys: Collection[str] = field(default=(), repr=False)

    def refusal(self, headers: Sequence[tuple[bytes, bytes]]) -> Refusal | None:
        """None: come in."""
        found = {name.lower(): value.decode("latin-1") for name, value in headers}
        if not self.keys:
            # A page of elsewhere, whose name was pointed at this machine, could ask in its reader's name.
            name = _host(found.get(b"host", ""))
            # And such a page may send what it could not read the answer of.
            origin = found.get(b"origin", "")
            if name in LOOPBACK and (not origin or _host(origin.rpartition("//")[2]) in LOOPBACK):
                return None
            return Refusal(403, "forbidden", "without --api-key-env this gateway answers to localhost alone")
        scheme, _, given = found.get(b"authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in self.keys]
        if scheme.lower() == "bearer" and any(matches):
            return None
        return Refusal(401, "unauthorized", "give one of this gateway's API keys: Authorization: Bearer KEY")
