"""Virtual token counters: each tenant's share of the executor (FlexLLM, appendix C, algorithm 4).

A tenant's counter grows with the rows that are multiplied for it: a row through all groups costs one token.
Of the tenants that wait, the one with the smallest counter is next. A tenant that comes back after a rest is
lifted to the smallest counter of those that wait (if none do, to that of the last tenant that did), less
MAX_CREDIT: it saves up no more credit than that, and owes none. Counters are changed before a product.
"""

from __future__ import annotations

# Virtual tokens that a tenant may be ahead of another that waits, if no request costs more: enough for
# those who decode to fall in step, and no more than a second's worth or so. As much credit outlasts a rest:
# who asks for one group after the other rests between any two requests, and would otherwise be further
# behind with each.
MAX_CREDIT = 8.0


class VirtualTokenCounters:
    """Counts virtual tokens of each tenant, and its waiting requests."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._last_stopped = 0.0  # the counter of the tenant that stopped waiting last

    def of(self, tenant: str) -> float:
        """Returns the virtual tokens that a tenant got, and was lifted by."""
        return self._tokens.get(tenant, 0.0)

    def started_waiting(self, tenant: str) -> None:
        """Record that a request of the tenant begins to wait."""
        if tenant not in self._waiting:
            others = self.least() if self._waiting else self._last_stopped
            self._tokens[tenant] = max(self.of(tenant), others - MAX_CREDIT)
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1

    def stopped_waiting(self, tenant: str) -> None:
        """Record that a request of the tenant waits no longer."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._last_stopped = self.of(tenant)

    def charge(self, tenant: str, tokens: float) -> None:
        """Charge the tenant for rows that are about to be multiplied."""
        self._tokens[tenant] = self.of(tenant) + tokens

    def least(self) -> float:
        """Returns the smallest counter of the tenants that wait; one at least must wait."""
        return min(self._tokens[tenant] for tenant in self._waiting)
