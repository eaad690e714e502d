"""How much a tenant, and all together, may have in flight and ask for in a second.

Pure accounting; the caller passes the time. What does not fit is refused with the time after which it
may, so that the executor's memory is bounded whatever tenants do.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from shared.errors import WireError

QUOTA_RETRY_SECONDS = 0.05  # when the quota is free again depends on answers that are in flight
RESERVED_DIVISOR = 128  # a tenant without anything in flight has this part of the bytes of all to itself


@dataclass(frozen=True)
class Quota:
    """What somebody may use; 0 stands for no limit.

    Attributes:
        bytes_in_flight: of requests and their answers, from a request's header to its answer's last byte.
        rows_in_flight: of the same.
        requests_per_second, bytes_per_second: bytes of requests; twice as much at once after a rest.
    """

    bytes_in_flight: int = 0
    rows_in_flight: int = 0
    requests_per_second: float = 0.0
    bytes_per_second: float = 0.0


@dataclass
class _Bucket:
    """A token bucket that holds two seconds' worth."""

    rate: float
    level: float = field(init=False)
    filled: float = 0.0

    def __post_init__(self) -> None:
        self.level = 2 * self.rate

    def seconds_until_available(self, amount: float, now: float) -> float:
        """Seconds until an amount is available; one larger than the bucket needs a full one."""
        if not self.rate:
            return 0.0
        self.level = min(2 * self.rate, self.level + (now - self.filled) * self.rate)
        self.filled = now
        return max(0.0, min(amount, 2 * self.rate) - self.level) / self.rate

    def charge(self, amount: float) -> None:
        if self.rate:
            self.level -= amount


class _Account:
    """What is used of one quota."""

    def __init__(self, quota: Quota, now: float) -> None:
        self.quota = quota
        self.bytes = self.rows = 0
        self.requests_bucket = _Bucket(quota.requests_per_second)
        self.bytes_bucket = _Bucket(quota.bytes_per_second)
        self.requests_bucket.filled = self.bytes_bucket.filled = now

    def seconds_until_available(
        self, rows: int, bytes_in_memory: int, received_bytes: int, now: float, *, reserved: bool = False
    ) -> float:
        """Seconds until a request may come in; 0: now.

        Args:
            reserved: it may come in even if others have in flight what there may be.
        """
        quota = self.quota
        # Whoever has nothing in flight gets one request of any size: the manifest's limits allow it.
        full = (
            self.bytes
            and not reserved
            and (
                (quota.bytes_in_flight and self.bytes + bytes_in_memory > quota.bytes_in_flight)
                or (quota.rows_in_flight and self.rows + rows > quota.rows_in_flight)
            )
        )
        return max(
            QUOTA_RETRY_SECONDS if full else 0.0,
            self.requests_bucket.seconds_until_available(1, now),
            self.bytes_bucket.seconds_until_available(received_bytes, now),
        )

    def charge(self, rows: int, bytes_in_memory: int, received_bytes: int) -> None:
        self.rows += rows
        self.bytes += bytes_in_memory
        self.requests_bucket.charge(1)
        self.bytes_bucket.charge(received_bytes)


class Quotas:
    """Admission of requests. Any thread may call.

    Args:
        tenant: of each tenant, by its name, over all its connections.
        everyone: of all together. Beyond its bytes and rows in flight, each tenant that has nothing in flight
            may have one small request: at most a 128th of the bytes.
    """

    def __init__(self, tenant: Quota | None = None, everyone: Quota | None = None) -> None:
        self._quota = tenant or Quota()
        self._lock = threading.Lock()
        self._all = _Account(everyone or Quota(), 0.0)
        self._tenants: dict[str, _Account] = {}

    def admit(self, tenant: str, rows: int, bytes_in_memory: int, received_bytes: int, now: float) -> None:
        """Count a request in, before anything is allocated for it.

        Args:
            rows: of the request.
            bytes_in_memory: bytes of its request and answer together.
            received_bytes: bytes of its request.
            now: seconds.

        Raises:
            WireError: ``overloaded``, with ``retry_after``.
        """
        with self._lock:
            charged = self._tenants.get(tenant)
            if charged is None:
                charged = self._tenants[tenant] = _Account(self._quota, now)
            # Else a few tenants that send slowly could keep all others out.
            small = bytes_in_memory * RESERVED_DIVISOR <= self._all.quota.bytes_in_flight
            for account, whose in ((charged, "your requests"), (self._all, "all requests together")):
                reserved = account is self._all and not charged.bytes and small
                seconds = account.seconds_until_available(
                    rows, bytes_in_memory, received_bytes, now, reserved=reserved
                )
                if seconds:
                    raise WireError(
                        "overloaded",
                        f"{whose} are over the executor's quota; repeat this one later",
                        retry_after=round(max(seconds, 0.001), 3),
                    )
            for account in (charged, self._all):
                account.charge(rows, bytes_in_memory, received_bytes)

    def release(self, tenant: str, rows: int, bytes_in_memory: int) -> None:
        """A request that was counted in is answered, or gone."""
        with self._lock:
            for account in (self._tenants[tenant], self._all):
                account.rows -= rows
                account.bytes -= bytes_in_memory

    def in_flight(self) -> tuple[int, int]:
        """Rows and bytes of all tenants."""
        with self._lock:
            return self._all.rows, self._all.bytes
