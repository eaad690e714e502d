"""What clients of a gateway share: how much is taken, and whose makes room. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reservations:
    """What clients share, of which a part stays free for each of the others.

    Args:
        capacity: taken at once.
        clients: how many there may be.
    """

    capacity: int
    clients: int = 1
    taken: dict[str, int] = field(default_factory=dict)

    @classmethod
    def per_client_minimum(cls, capacity: int, clients: int) -> Reservations:
        """Returns reservations of at least two for each client, so that one stays free for each."""
        return cls(max(capacity, 2 * clients), clients)

    @property
    def reserved(self) -> int:
        """What stays free for each client, until it takes it: one at least, if there is one for each."""
        if self.clients == 1 or self.capacity < self.clients:
            return 0
        return max(1, self.capacity // (2 * self.clients))

    @property
    def largest(self) -> int:
        """The most that one client can have."""
        return self.capacity - self.reserved * (self.clients - 1)

    @property
    def total(self) -> int:
        """Taken by all."""
        return sum(self.taken.values())

    def fits(self, client: str, count: int) -> bool:
        """Whether a client could reserve as many."""
        others = [min(self.reserved, amount) for other, amount in self.taken.items() if other != client]
        kept = self.reserved * (self.clients - 1) - sum(others)
        return self.total + count + kept <= self.capacity

    def reserve(self, client: str, count: int) -> bool:
        """Reserve for a client, until ``release``. Returns whether it could."""
        if not self.fits(client, count):
            return False
        self.taken[client] = self.taken.get(client, 0) + count
        return True

    def release(self, client: str, count: int) -> None:
        """What ``reserve`` reserved."""
        self.taken[client] -= count


def eviction_victim(entries: Collection[tuple[str, Any]]) -> tuple[str, Any]:
    """Which of kept things makes room for another, by client: the oldest of the client that has the most.

    Args:
        entries: clients, each with a thing of its own; the oldest first, and not empty.
    """
    counts = Counter(client for client, _ in entries)
    largest = max(counts.values())
    return next(each for each in entries if counts[each[0]] == largest)
