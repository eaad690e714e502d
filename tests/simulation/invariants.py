"""What must hold after every step and at the end of a run.

What parties learn is read from the bytes that they received, as an attacker would read them. No bookkeeping
of the tenant is believed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from provider.engine.fairness import MAX_CREDIT
from provider.engine.scheduler import Batch, QueuedRequest
from provider.session.quota import RESERVED_DIVISOR, Quota, Quotas
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
from shared.wire.header import HEADER_BYTES, Header, Operation, parse_header
from simulation.network import Connection
from simulation.tenants import Outcome

# Integers of rows are smaller than this; masks are uniform modulo 2^32. So a difference of two numbers under
# different masks is that small with probability 2^-6, and of eight numbers with 2^-48.
SMALL = 1 << 25
ENOUGH = 8


# -- masks ---------------------------------------------------------------------------------------


class Received(NamedTuple):
    """A message, or the beginning of one, that an executor received."""

    header: Header
    payload: bytes
    whole: bool


def messages(received: bytes) -> Iterator[Received]:
    """Messages in the bytes from a tenant, whose senders use one frame for each."""
    at = 0
    while at + 2 <= len(received):
        length, size = received[at + 1] & 0x7F, 2
        if length == 126:
            size = 4
        elif length == 127:
            size = 10
        start = at + size + 4
        if start > len(received):
            return
        if size > 2:
            length = int.from_bytes(received[at + 2 : at + size], "big")
        mask, body = received[start - 4 : start], received[start : start + length]
        opcode, at = received[at] & 0x0F, start + length
        if opcode != 2 or len(body) < HEADER_BYTES:
            continue
        plain = np.frombuffer(body, np.uint8) ^ np.resize(np.frombuffer(mask, np.uint8), len(body))
        data = plain.tobytes()
        yield Received(parse_header(data), data[HEADER_BYTES:], len(body) == length)


@dataclass
class _Rows:
    """Different rows of one width that providers received."""

    rows: dict[bytes, tuple[str, int, int, int]] = field(default_factory=dict)  # the product of each
    partial: set[bytes] = field(default_factory=set)


def mask_faults(connections: Iterable[Connection], party_of: dict[str, str], provider: str) -> list[str]:
    """Whether some party received what shows a row, or a mask, of which it must not know.

    Two different rows under one mask have a difference of small numbers, and a row without a mask is small.

    Args:
        party_of: by the name of an executor.
        provider: the party that gets rows.
    """
    faults: list[str] = []
    widths: dict[int, _Rows] = defaultdict(_Rows)
    seeds: dict[bytes, tuple[str, Header]] = {}
    for connection in connections:
        party = party_of[connection.executor]
        for message in messages(bytes(connection.received)):
            operation = message.header.operation
            if operation == Operation.SEED_EFFECT:
                if party == provider:
                    faults.append(f"{connection.name}: the provider received a seed")
                elif message.whole:
                    faults += _seed_faults(seeds, party, connection.tenant, message)
            elif operation in (Operation.PRODUCT, Operation.EFFECT):
                if party != provider:
                    faults.append(f"{connection.name}: a mask source received rows")
                faults += _collect(widths[message.header.columns], connection, message)
    for width, rows in widths.items():
        faults += _row_faults(width, rows)
    return faults


def _seed_faults(
    seeds: dict[bytes, tuple[str, Header]], party: str, tenant: str, message: Received
) -> list[str]:
    header = message.header._replace(request_id=0, request_class=0, answer_bits=0)
    known = seeds.setdefault(message.payload, (f"{party} of {tenant}", header))
    if known != (f"{party} of {tenant}", header):
        return [f"one seed was sent to {known[0]} and {party} of {tenant}, or for two masks"]
    return []


def _collect(rows: _Rows, connection: Connection, message: Received) -> list[str]:
    header, size = message.header, 4 * message.header.columns
    product = connection.tenant, header.group, header.direction, header.members
    whole = [message.payload[at : at + size] for at in range(0, len(message.payload), size)]
    if whole and len(whole[-1]) < size:
        rest = whole.pop()
        rows.partial.add(rest[: len(rest) & ~3])
    again = len(set(whole)) < len(whole) or any(
        rows.rows.setdefault(row, product) != product for row in whole
    )
    return [f"{connection.name}: one masked row is in two places"] if again else []


def _row_faults(width: int, rows: _Rows) -> list[str]:
    whole = np.frombuffer(b"".join(rows.rows), np.uint32).reshape(-1, width)
    faults = [f"a row of {width} numbers without a mask was sent"] if _small(whole).any() else []
    if len(whole) > 1:
        order = np.argsort(whole[:, 0], kind="stable")
        faults += _close_pairs(whole[order], width)
    for row in rows.partial:
        part = np.frombuffer(row, np.uint32)
        if len(part) < ENOUGH:
            continue
        beginnings = [np.frombuffer(each, np.uint32) for each in rows.partial if len(each) >= 4 * ENOUGH]
        for other in [*whole, *beginnings]:
            common = min(len(part), len(other))
            difference = part[:common] - other[:common]
            if difference.any() and _small(difference[None])[0]:
                faults.append(f"a part of a row of {width} numbers and another row have one mask")
                break
    return faults


def _close_pairs(whole: np.ndarray, width: int) -> list[str]:
    """Neighbours in the first number, which sorting has put side by side, round the ring."""
    count = len(whole)
    for shift in range(1, count):
        difference = np.roll(whole, -shift, 0) - whole
        near = (difference[:, 0] < SMALL) | (difference[:, 0] > np.uint32(2**32 - SMALL))
        if not near.any():
            break
        if _small(difference[near]).any():
            return [f"two different rows of {width} numbers have one mask"]
    return []


def _small(differences: np.ndarray) -> np.ndarray:
    if differences.shape[1] == 0:
        return np.zeros(len(differences), bool)
    return (np.abs(differences.astype(np.uint32).view(np.int32).astype(np.int64)) < SMALL).all(1)


# -- errors and time -----------------------------------------------------------------------------


@dataclass
class Allowed:
    """What may happen to requests in a run.

    Attributes:
        lost: connections break, or executors are unavailable.
        codes: with which executors may refuse.
        half: sessions take half answers.
        seconds: that a request may take.
        retry_seconds, timeout: before these, no request fails because an executor is unavailable or busy.
    """

    lost: bool
    codes: frozenset[str]
    half: bool
    seconds: float
    retry_seconds: float = 0.0
    timeout: float = 0.0


def outcome_fault(outcome: Outcome, allowed: Allowed, *, damaged: bool) -> str:
    """What is wrong with how a request ended; empty: nothing.

    Args:
        damaged: the tenant received a damaged byte.
    """
    what = f"{outcome.tenant}: {outcome.rows} rows of {outcome.key}"
    if outcome.wrong:
        return f"{what}: {outcome.wrong}"
    seconds = outcome.ended - outcome.began
    if seconds > allowed.seconds:
        return f"{what} took {seconds:.0f} s, and at most {allowed.seconds:.0f} are promised"
    fault = error_fault(outcome.error, allowed, damaged=damaged)
    if not fault and not damaged:
        fault = _too_early(outcome.error, seconds, allowed)
    return f"{what}: {fault}" if fault else ""


def _too_early(error: SymbiosisError | None, seconds: float, allowed: Allowed) -> str:
    """Whether a request failed that should have been repeated."""
    if isinstance(error, ConnectionLost | RequestTimeout | ConnectError):
        ended = "the session" in str(error) or "connections broke" in str(error)
        early = seconds < allowed.retry_seconds and not ended
    else:
        # Pauses double, and have up to a half on top: the last one ends after the timeout.
        early = isinstance(error, RequestRefused) and error.code == "overloaded"
        early = early and seconds < 0.3 * allowed.timeout
    return f"it failed after {seconds:.1f} s: {error}" if early else ""


def error_fault(error: SymbiosisError | None, allowed: Allowed, *, damaged: bool) -> str:
    """What is wrong with an error; empty: nothing, it was to be expected."""
    if error is None or (damaged and isinstance(error, SymbiosisError)):
        return ""
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, RequestRefused):
        return "" if error.code in allowed.codes else f"a refusal without a reason: {told}"
    if isinstance(error, VerificationError):
        owed = allowed.half and (allowed.lost or allowed.codes) and "could not be confirmed" in str(error)
        return "" if owed else f"nobody lied: {told}"
    if isinstance(error, WireError | ModelMismatch):
        return f"nobody broke the protocol: {told}"
    if isinstance(error, ConnectError | ConnectionLost | RequestTimeout):
        waits = "restarting" in allowed.codes and isinstance(error, ConnectionLost)
        return "" if allowed.lost or waits else f"nothing was lost: {told}"
    return f"an error that no document names here: {told}"


# -- memory --------------------------------------------------------------------------------------


class WatchedQuotas(Quotas):
    """An executor's quota, and what it admits: never more than the limit, or one request alone.

    Beyond that, each tenant may have one small request.

    Args:
        own, everyone: see ``Quotas``.
        faults: to add to.
    """

    def __init__(self, own: Quota, everyone: Quota, faults: list[str]) -> None:
        super().__init__(own, everyone)
        self._limit, self._faults, self._largest = everyone.bytes_in_flight, faults, 0

    def admit(self, tenant: str, rows: int, bytes_in_memory: int, received_bytes: int, now: float) -> None:
        super().admit(tenant, rows, bytes_in_memory, received_bytes, now)
        self._largest = max(self._largest, bytes_in_memory)
        holds = self.in_flight()[1]
        reserved = len(self._tenants) * self._limit // RESERVED_DIVISOR
        if self._limit and holds > max(self._limit, self._largest) + reserved:
            self._faults.append(f"an executor holds {holds} bytes, and its quota is {self._limit}")


# -- fairness ------------------------------------------------------------------------------------


class Fairness:
    """Counts who got how much while others waited, apart from the policy's own counters.

    While two tenants both wait, neither gets more than the other by more than twice the bound: MAX_CREDIT or
    the largest request, whatever costs more (``provider.engine.scheduler.Opportunistic``).
    """

    def __init__(self, faults: list[str]) -> None:
        self._faults = faults
        self._waiting: dict[str, dict[QueuedRequest, None]] = {}
        self._ahead: dict[tuple[str, str], float] = {}  # of pairs that both wait
        self._largest = MAX_CREDIT

    def added(self, request: QueuedRequest) -> None:
        """A request waits."""
        self._largest = max(self._largest, request.rows * request.row_cost)
        if request.tenant not in self._waiting:
            for other in self._waiting:
                self._ahead[request.tenant, other] = self._ahead[other, request.tenant] = 0.0
        self._waiting.setdefault(request.tenant, {})[request] = None

    def taken(self, batch: Batch) -> None:
        """Rows are multiplied."""
        for request, start, stop in batch:
            cost = (stop - start) * request.row_cost
            for one, other in self._ahead:
                if one == request.tenant:
                    self._ahead[one, other] += cost
                elif other == request.tenant:
                    self._ahead[one, other] -= cost
        for (one, other), tokens in self._ahead.items():
            if tokens > 2 * self._largest + MAX_CREDIT:
                self._faults.append(f"{one} got {tokens:.1f} tokens more than {other}, which waited")
                return
        for request, _, stop in batch:
            if stop == request.rows:
                self.dropped(request)

    def dropped(self, request: QueuedRequest) -> None:
        """A request does not wait any more."""
        waiting = self._waiting.get(request.tenant, {})
        waiting.pop(request, None)
        if not waiting and request.tenant in self._waiting:
            del self._waiting[request.tenant]
            for pair in [pair for pair in self._ahead if request.tenant in pair]:
                del self._ahead[pair]
