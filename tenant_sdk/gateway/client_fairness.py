"""Which sequences are admitted, so that one client's do not make those of others wait. No I/O, no clock.

FlexLLM fills what the latency of a step leaves (§6.2), and shares tokens among tenants (appendix C). Here the
clients of a gateway share what a step has: sequences, adapters, and rows for prompts.

These rules say what one client can take:

- ``connection_limits``: connections, with a key and without; times and sizes of headers; answers that are not
  read.
- ``http_frontend``: bodies that arrive; requests for adapters and metrics in flight. At a time, one small
  body is read, one text is tokenized, and one request is prepared for the engine (``client_locks``). The next
  one waits for as long as that took, up to ``MAX_PAUSE``, if other clients have sequences in flight. Then
  also each request waits for ``MIN_PAUSE`` behind the one before, whatever it asks for.
- ``parsing``: one large body at a time, for ``helper_process.SECONDS`` at most, in turn with other clients.
- ``admission``: sequences in flight (``SequenceLimit``).
- ``request_limits``, ``constraints``: the size of each field of a request, and of an answer.
- ``grammars``: time and memory for compiling a constraint; ``constraint_checks``: one at a time.
- ``structured``: compiled constraints that are kept, 64 in all; a further one replaces one of the client that
  has the most.
- ``tool_calls``: the part of an answer in which calls of tools are looked for, and how often.
- ``client_locks``: one at a time of the threads that tokenize, and of those that compile constraints.
- ``adapter_registry``: names of adapters; one change of them at a time.
- ``reservations``: a part of all that is counted, which stays free for the others.
- ``step_latency``: the time of a step.
- here: sequences, their adapters and their memory (``next_admissions``, ``next_preemptions``); of a step
  attention (``AttentionTimeDebt``), sampling (``paused_sampling``) and rows for prompts (``second_prompts``,
  ``rows_per_client``); time to apply constraints (``TimeBudget``, ``paused_constraints``), and texts that
  they have (``too_long``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tenant_sdk.gateway.reservations import Reservations
from tenant_sdk.gateway.step_latency import StepLatency

MAX_SORTED = 1 << 17  # numbers that are sorted in a step for one client, while others have sequences
RECENT_SECONDS = 1.0  # for which a client counts after its last sequence: its next one finds a short step


@dataclass
class TimeBudget:
    """Seconds of a processor that each client may use between steps: a token bucket for each.

    Args:
        burst: saved up at most, and had at the beginning.
        refill: more with every step.
    """

    burst: float
    refill: float
    _remaining: dict[str, float] = field(default_factory=dict)

    def step(self) -> None:
        """All sequences have gone on by one step."""
        self._remaining = {
            client: seconds + self.refill
            for client, seconds in self._remaining.items()
            if seconds + self.refill < self.burst
        }

    def spend(self, client: str, seconds: float) -> bool:
        """Whether a client had as much; it is taken all the same."""
        self._remaining[client] = self._remaining.get(client, self.burst) - seconds
        return self._remaining[client] >= 0

    def overdrawn(self) -> set[str]:
        """Clients that have used more than they had."""
        return {client for client, seconds in self._remaining.items() if seconds < 0}


def too_long(texts: Mapping[str, tuple[str, int]], each: int, together: int) -> set[str]:
    """Names of texts that go beyond what one may have, or what all of a client's may: the longest of these.

    Args:
        texts: client and size, by name.
        each: that one text may have.
        together: that all texts of a client may have.
    """
    names, sums = set[str](), Counter[str]()
    for name, (client, size) in sorted(texts.items(), key=lambda text: text[1][1]):
        sums[client] += size
        if size > each or sums[client] > together:
            names.add(name)
    return names


class SequenceInfo(NamedTuple):
    """A sequence.

    Attributes:
        name: of the sequence.
        client: that it is for.
        adapter: a number; 0: none.
        prefilling: it was admitted, and not all of its prompt is read.
        tokens: that its next row attends to.
        blocks: of keys and values that it has.
        blocks_needed: blocks that it needs for its next step, or to be admitted.
    """

    name: str
    client: str
    adapter: int = 0
    prefilling: bool = False
    tokens: int = 0
    blocks: int = 0
    blocks_needed: int = 0


class Memory(NamedTuple):
    """For keys and values; ``blocks``: all there are, ``free``: those that nobody has."""

    blocks: int
    free: int


def next_admissions(
    running: Sequence[SequenceInfo],
    waiting: Sequence[SequenceInfo],
    max_sequences: int,
    max_adapters: int,
    clients: int,
    *,
    contended: bool = True,
    memory: Memory | None = None,
) -> list[str]:
    """Names of the waiting sequences that are admitted now, in order; the others wait for another step.

    Clients that stay within their share of the memory come first, and of these the one that has the fewest
    sequences. (If one that exceeds its share came first, it would take what was freed for another one, and be
    preempted again in the next step.) A part of both counts stays free for each client (``Reservations``). If
    there are several clients, no sequence of a client is admitted while a prompt of it is read (but several
    may be in one step, see ``second_prompts``), and each stays within its client's equal share of the memory,
    or is the only one that the client has.

    Args:
        running: sequences that were admitted, in this order.
        waiting: the others, in the order in which they came.
        max_sequences: that one step computes.
        max_adapters: different ones that may run at once.
        clients: how many there may be.
        contended: more than one client has had sequences lately.
        memory: for keys and values; None: is not looked at.
    """
    counts = Counter(each.client for each in running)
    for_sequences = Reservations(max_sequences, clients, dict(counts))
    for_adapters = Reservations(max_adapters, clients)
    adapters = {0}
    for each in running:
        if each.adapter not in adapters:
            adapters.add(each.adapter)
            for_adapters.taken[each.client] = for_adapters.taken.get(each.client, 0) + 1
    queues: dict[str, deque[SequenceInfo]] = {}
    for each in waiting:
        queues.setdefault(each.client, deque()).append(each)
    if contended:
        for client in {each.client for each in running if each.prefilling}:
            queues.pop(client, None)
    used, share = _used(running), _share((*running, *waiting), memory)
    free = memory.free - sum(each.blocks_needed for each in running) if memory else 0

    def drop_unplaced(client: str) -> bool:
        """Pass over sequences whose adapter has no place; whether one is left."""
        queue = queues[client]
        while queue and queue[0].adapter not in adapters and not for_adapters.fits(client, 1):
            queue.popleft()
        return bool(queue)

    def exceeds(client: str) -> bool:
        return share is not None and used[client] + queues[client][0].blocks_needed > share

    admitted = []
    while queues := {client: queue for client, queue in queues.items() if drop_unplaced(client)}:
        # Of those that have as many, the first that came.
        client = min(queues, key=lambda client: (exceeds(client), counts[client]))
        too_much = exceeds(client) and counts[client] > 0
        each = queues[client].popleft()
        fits = share is None or each.blocks_needed <= free
        if too_much or not fits or not for_sequences.reserve(client, 1):
            del queues[client]
            continue
        if each.adapter not in adapters:
            for_adapters.reserve(client, 1)
            adapters.add(each.adapter)
        admitted.append(each.name)
        counts[client] += 1
        used[client] += each.blocks_needed
        free -= each.blocks_needed
    return admitted


def next_preemptions(
    running: Sequence[SequenceInfo],
    waiting: Sequence[SequenceInfo],
    memory: Memory,
    admissible: Collection[str],
) -> list[str]:
    """Names of the running sequences that are preempted for others' keys and values.

    Clients with more than an equal share give up their newest, if the running sequences could not go on
    otherwise, or a client's next sequence could not be admitted although it fits into its share. For a client
    whose only sequence exceeds its share, they give up none that is their only one: the two would preempt
    each other for ever.

    Args:
        running: sequences that were admitted, in the order in which they came.
        waiting: the others, likewise.
        memory: for keys and values.
        admissible: names of those that are admitted if there is memory (``next_admissions``). If memory were
            freed for another one, a preempted sequence would take it in the same step, again and again.
    """
    used, share = _used(running), _share((*running, *waiting), memory)
    if share is None:
        return []
    missing = sum(each.blocks_needed for each in running) - memory.free
    exceeding = 0  # missing beside, for those that exceed a share
    first_of = {each.client: each for each in reversed(waiting) if each.name in admissible}
    for client, first in first_of.items():
        if used[client] + first.blocks_needed <= share:
            missing += first.blocks_needed
        elif not used[client]:
            exceeding += first.blocks_needed
    counts = Counter(each.client for each in running)
    preempted = []
    for each in reversed(running):
        wanted = missing > 0 or (missing + exceeding > 0 and counts[each.client] > 1)
        if wanted and used[each.client] > share:
            preempted.append(each.name)
            counts[each.client] -= 1
            used[each.client] -= each.blocks + each.blocks_needed
            missing -= each.blocks + each.blocks_needed
    return preempted


def _used(running: Sequence[SequenceInfo]) -> Counter[str]:
    """Blocks of each client's sequences after their next step."""
    used = Counter[str]()
    for each in running:
        used[each.client] += each.blocks + each.blocks_needed
    return used


def _share(sequences: Sequence[SequenceInfo], memory: Memory | None) -> int | None:
    """Blocks of one client; None: it is alone."""
    clients = {each.client for each in sequences}
    return memory.blocks // len(clients) if memory and len(clients) > 1 else None


@dataclass
class AttentionTimeDebt:
    """What clients owe for steps that took longer because of what their sequences attend to."""

    owed: dict[str, float] = field(default_factory=dict)

    def paused(
        self,
        runnable: Sequence[SequenceInfo],
        latency: StepLatency,
        seconds: float,
        *,
        clients: int,
        least_attending: str | None,
    ) -> set[str]:
        """Names of the sequences that wait for a later step; a client that owes nothing has one in this.

        Args:
            runnable: sequences that could go on; those that have waited longest first.
            latency: how long steps take.
            seconds: beyond that of rows and of the client ``least_attending``, for all others together.
            clients: how many there are.
            least_attending: the client whose sequences attend to the fewest tokens, which never wait.
        """
        share, paused = seconds / clients, set[str]()
        self.owed = {client: owed - share for client, owed in self.owed.items() if owed > share}
        for each in runnable:
            takes, owed = latency.per_token * each.tokens, self.owed.get(each.client, 0.0)
            if each.client == least_attending:
                continue
            if owed and owed + takes > share:
                paused.add(each.name)
            else:
                self.owed[each.client] = owed + takes
        return paused


def paused_sampling(needs_sorting: Sequence[tuple[str, str]], vocabulary: int) -> set[str]:
    """Names of the sequences that wait for a later step: a client's are sampled a few at a time.

    Sampling sorts as many numbers for a sequence as there are tokens, which can take longer than the step.

    Args:
        needs_sorting: name and client of each sequence that has them sorted, the longest waiting first.
        vocabulary: how many tokens there are.
    """
    at_once, had, paused = max(1, MAX_SORTED // vocabulary), Counter[str](), set[str]()
    for name, client in needs_sorting:
        had[client] += 1
        if had[client] > at_once:
            paused.add(name)
    return paused


def paused_constraints(constrained: Iterable[tuple[str, str, bool]], overdrawn: Collection[str]) -> set[str]:
    """Names of sequences with a constraint that wait for a later step.

    What a constraint allows first may take long to compute, and is not known before. So of a client one new
    sequence goes on in a step, and none goes on while the client has used more than its ``TimeBudget``.

    Args:
        constrained: name and client of each, and whether nothing was computed for it yet; those that have
            waited longest first.
        overdrawn: clients that have used more.
    """
    started, paused = set[str](), set[str]()
    for name, client, fresh in constrained:
        if client in overdrawn or (fresh and client in started):
            paused.add(name)
        elif fresh:
            started.add(client)
    return paused


def second_prompts(running: Sequence[SequenceInfo]) -> set[str]:
    """Names of running sequences that pause while another prompt of their client is read.

    ``next_admissions`` admits several of a client in one step. Of those that are not read at its end, all
    but one pause.

    Args:
        running: sequences that were admitted, in the order in which prompts came.
    """
    clients, paused = set[str](), set[str]()
    for each in running:
        if each.prefilling and each.client in clients:
            paused.add(each.name)
        elif each.prefilling:
            clients.add(each.client)
    return paused


class RecentClients:
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
        self._last = {client: last for client, last in self._last.items() if now - last < RECENT_SECONDS}
        return len(self._last)


def rows_per_client(rows: int, running: Sequence[SequenceInfo], admitted: Iterable[str]) -> int:
    """Rows that the prompt of each client has in a step, as many for each; 0: one client has all.

    Args:
        rows: for prompts.
        running: sequences that were admitted before.
        admitted: clients of those that are admitted in this step.
    """
    clients = {each.client for each in running if each.prefilling}.union(admitted)
    return max(1, rows // len(clients)) if len(clients) > 1 else 0
