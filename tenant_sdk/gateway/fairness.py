"""Which waiting sequences may begin, so that one client's do not make those of others wait. No I/O, no clock.

FlexLLM fills what the latency of a step leaves (§6.2), and shares tokens among tenants (appendix C). Here the
clients of a gateway take turns with what a step has: seats, places for adapters, and rows for prompts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shared.latency import Line
from tenant_sdk.gateway.doorkeeper import Shares

# How many times as long a step may take for prompts: while others write, and else while others may come.
BESIDE, ALONE = 1.5, 2.5
LEAST_ROWS = 16  # of prompts, however long they take
SORTED = 1 << 17  # numbers that are sorted in a step for one client, while others have sequences
LATELY = 1.0  # seconds for which a client counts after its last sequence: its next one finds a short step


class Wanted(NamedTuple):
    """A sequence.

    Attributes:
        name: of the sequence.
        client: that it is for.
        adapter: a number; 0: none.
        reading: it has begun, and not all of its prompt is read.
    """

    name: str
    client: str
    adapter: int = 0
    reading: bool = False


def in_turn(
    running: Sequence[Wanted],
    waiting: Sequence[Wanted],
    seats: int,
    places: int,
    clients: int,
    *,
    several: bool = True,
) -> list[str]:
    """Names of the waiting sequences that may begin now, in order; the others wait for another step.

    The client that has the fewest sequences comes first. A part of all seats and places stays free for each
    client (``Shares``). If there are several clients, one long prompt of each is read at a time.

    Args:
        running: sequences that have begun, in the order in which they did.
        waiting: the others, in the order in which they came.
        seats: sequences that may run at once.
        places: different adapters that may run at once.
        clients: how many there may be.
        several: more than one client has had sequences lately.
    """
    held = Counter(each.client for each in running)
    seated, placed = Shares(seats, clients, dict(held)), Shares(places, clients)
    adapters = {0}
    for each in running:
        if each.adapter not in adapters:
            adapters.add(each.adapter)
            placed.taken[each.client] = placed.taken.get(each.client, 0) + 1
    queues: dict[str, deque[Wanted]] = {}
    for each in waiting:
        queues.setdefault(each.client, deque()).append(each)
    if several:
        for client in {each.client for each in running if each.reading}:
            queues.pop(client, None)
    begin = []
    while queues:
        client = min(
            queues, key=lambda client: held[client]
        )  # of those that have as many, the first that came
        each = queues[client].popleft()
        if not seated.take(client, 1):
            del queues[client]
            continue
        if each.adapter in adapters or placed.take(client, 1):
            adapters.add(each.adapter)
            begin.append(each.name)
            held[client] += 1
        else:
            seated.give_back(client, 1)
        if not queues[client]:
            del queues[client]
    return begin


def rows_of_step(line: Line, written: int, most: int, *, beside: bool) -> int:
    """How many rows a step may have while there are several clients.

    Args:
        line: how long steps take.
        written: rows of sequences whose prompt is read.
        most: rows of any step.
        beside: clients other than those whose prompts are read have sequences.
    """
    seconds = (BESIDE if beside and written else ALONE) * line.seconds(max(1, written))
    return min(most, max(line.rows(seconds), written + LEAST_ROWS))


def resting(sorting: Sequence[tuple[str, str]], vocabulary: int) -> set[str]:
    """Names of the sequences that wait for a later step: a client's are sampled a few at a time.

    Sampling sorts as many numbers for a sequence as there are tokens, which can take longer than the step.

    Args:
        sorting: name and client of each sequence that has them sorted; those that have waited longest first.
        vocabulary: how many tokens there are.
    """
    most, had, rest = max(1, SORTED // vocabulary), Counter[str](), set[str]()
    for name, client in sorting:
        had[client] += 1
        if had[client] > most:
            rest.add(name)
    return rest


class Seen:
    """Which clients have had sequences lately."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def count(self, clients: Iterable[str], now: float) -> int:
        """How many there are, with those that have sequences now.

        Args:
            clients: that have some.
            now: in seconds, of a clock that only goes on.
        """
        self._last |= dict.fromkeys(clients, now)
        self._last = {client: last for client, last in self._last.items() if now - last < LATELY}
        return len(self._last)
