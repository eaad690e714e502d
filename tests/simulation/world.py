"""Draws a world and its faults from a seed, runs it, and looks whether everything holds."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from provider.session.quota import Quota
from shared.errors import ModelMismatch, SymbiosisError
from simulation.executors import Executor, Health, allocate
from simulation.invariants import (
    Allowed,
    Fairness,
    WatchedQuotas,
    error_fault,
    mask_faults,
    outcome_fault,
)
from simulation.kernel import Kernel
from simulation.model import model
from simulation.network import ALL, Network, NetworkConditions
from simulation.substitutes import substituted
from simulation.tenants import KEYS, Options, Outcome, Tenant
from tenant_sdk.products.ring_products import RingProducts

FAULT_SECONDS = 6.0  # after the beginning, in which faults happen
RUN_SECONDS = 3600.0  # after which a run has not ended
CALM_AFTER = 25.0  # seconds of good weather, after which every executor is there again
MAX_STEPS = 400_000
CALM_SECONDS = 12.0  # of a request, with all that it needs first, if nothing goes wrong
FAULTS = (
    "cuts", "damage", "refused", "silent", "restarts", "drains", "deaths", "overload", "workers", "memory",
    "jumps", "flood", "lies",
)  # fmt: skip
LOSING = {
    "cuts",
    "refused",
    "silent",
    "restarts",
    "drains",
    "deaths",
    "memory",
    "jumps",
    "damage",
    "workers",
    "lies",
    "flood",
}


@dataclass
class Result:
    """Of a run.

    Attributes:
        faults: what does not hold; empty: everything does.
        digest: of all that happened.
    """

    seed: int
    kinds: frozenset[str]
    faults: list[str]
    digest: int
    steps: int
    seconds: float
    outcomes: list[Outcome] = field(default_factory=list)


class World:
    """Parties and the faults that they meet.

    Args:
        seed: decides everything.
        trace: told what happens, line by line.
        kinds: of faults, out of FAULTS; default: the seed decides.
    """

    def __init__(
        self,
        seed: int,
        trace: Callable[[str], None] | None = None,
        kinds: frozenset[str] | None = None,
    ) -> None:
        self.seed, self.kernel = seed, Kernel(seed, trace)
        draw = self.kernel.random
        share = draw.choice((0.0, 0.15, 0.4))  # some runs have few kinds of faults, and some have many
        drawn = frozenset(kind for kind in FAULTS if draw.random() < share)
        self.kinds = drawn if kinds is None else kinds
        self.faults: list[str] = []
        self.health, self.network = Health(), Network(self.kernel, NetworkConditions())
        self.good_since, self.jumped = math.inf, 0.0
        self.inject_faults()

    def inject_faults(self) -> None:
        """Faults that happen by chance."""
        draw, kinds = self.kernel.random, self.kinds
        has = lambda kind, most: draw.uniform(0, most) if kind in kinds else 0.0  # noqa: E731
        slow = draw.choice((0.001, 0.005, 0.05))
        self.network.conditions = NetworkConditions(
            delay=(slow / 5, slow),
            cut=has("cuts", 0.8),
            cut_bytes=draw.choice((300.0, 2000.0, 8000.0)),
            damage=has("damage", 0.05),
            refuse=has("refused", 0.5),
            silent=has("silent", 0.3),
            pieces=draw.choice((0.0, 0.3, 0.9)),
        )
        self.health.lose_worker = has("workers", 0.2)
        self.health.allocation = has("memory", 0.1)
        self.health.lie = has("lies", 0.1)
        self.health.inline = draw.random() < 0.5 and "workers" not in kinds
        self.health.product_seconds = draw.choice(((0.001, 0.0001), (0.02, 0.001)))
        if "flood" in kinds:
            self.health.inline, self.health.product_seconds = False, (0.05, 0.002)

    def stop_faults(self) -> None:
        """No more faults, and every executor is there."""
        self.network.conditions = NetworkConditions(delay=self.network.conditions.delay)
        self.health.lose_worker = self.health.allocation = self.health.lie = 0.0
        for executor in self.executors:
            if not executor.connections.draining:
                executor.start()
        for connection in self.network.connections:
            for end in connection.ends:
                end.cut_after = ALL
        self.good_since = self.kernel.now
        self.kernel.note("the weather is good")

    # -- building --------------------------------------------------------------------------------

    def build(self) -> None:
        """Make the parties."""
        draw, numerics = self.kernel.random, self.kernel.random.choice(("ring", "ring-fine"))
        parties = ["provider", *(f"source{i}" for i in range(draw.choice((1, 1, 2))))]
        everyone = draw.choice((2_000, 20_000)) if "overload" in self.kinds else 0
        own = draw.choice((0, 10_000)) if "overload" in self.kinds else 0
        rate = draw.choice((0.0, 40.0)) if "overload" in self.kinds else 0.0
        self.executors = [
            Executor(
                f"{party}-{replica}",
                party,
                kernel=self.kernel,
                network=self.network,
                served=model(numerics).served,
                quotas=lambda: WatchedQuotas(Quota(own, 0, rate, 0.0), Quota(everyone), self.faults),
                health=self.health,
                watch=lambda: Fairness(self.faults),
            )
            for party in parties
            for replica in range(draw.choice((1, 1, 2, 3)))
        ]
        lists = [[each for each in self.executors if each.party == party] for party in parties]
        self.tenants = [
            Tenant(
                f"tenant{number}",
                self.kernel,
                self.network,
                model(numerics),
                numerics,
                lists,
                self._options(),
                requests=draw.choice((1, 3, 6)),
                keys=draw.sample(KEYS, draw.choice((1, 2, 3))),
            )
            for number in range(draw.choice((1, 1, 2, 3)) if "flood" not in self.kinds else 3)
        ]

    def _options(self) -> Options:
        draw = self.kernel.random
        return Options(
            timeout=draw.choice((2.0, 5.0)),
            retry_seconds=draw.choice((0.0, 20.0, 60.0)),
            opening=2.0,
            answers=draw.choice(("exact", "exact", "half")),
            # Every answer is checked where one may be wrong.
            verify_rate=1.0 if self.kinds & {"damage", "lies"} else draw.choice((1.0, 0.3)),
            repeat_rate=draw.choice((0.05, 0.5)),
            mask_budget=draw.choice((0, 1 << 14, 1 << 18)),
            chunk_rows=draw.choice((4, 16)),
            piece_bytes=draw.choice((512, 2048, 1 << 20)),
        )

    def plan(self) -> None:
        """Faults that happen at a time."""
        draw, kernel = self.kernel.random, self.kernel

        def sometimes(kind: str, what: Callable[[], object]) -> None:
            for _ in range(draw.randrange(1, 4) if kind in self.kinds else 0):
                kernel.after(draw.uniform(0, FAULT_SECONDS), what)

        sometimes("restarts", lambda: draw.choice(self.executors).restart(draw.choice((0.01, 1.0, 10.0))))
        sometimes("drains", lambda: draw.choice(self.executors).drain(draw.choice((0.01, 3.0))))
        sometimes("deaths", lambda: self._die(draw.choice(self.tenants)))
        sometimes("jumps", self._jump)

    def _jump(self) -> None:
        """The machine slept."""
        seconds = self.kernel.random.choice((1.0, 8.0, 100.0))
        self.kernel.now += seconds
        self.jumped += seconds
        self.kernel.note("the clock jumps")

    def _die(self, tenant: Tenant) -> None:
        if tenant in self.busy:
            tenant.die()
            self.kernel.spawn(partial(self._live, tenant), tenant.name, tenant.owner)

    # -- running ---------------------------------------------------------------------------------

    def run(self) -> Result:
        """Run it; what does not hold is in the result."""
        with substituted(self.kernel, self.network, partial(allocate, self.kernel, self.health)):
            self.kernel.run(self._main)
        return Result(
            self.seed,
            self.kinds,
            self.faults + self.kernel.failures,
            self.kernel.digest,
            self.kernel.steps,
            self.kernel.now,
            [outcome for tenant in self.tenants for outcome in tenant.outcomes],
        )

    def _main(self) -> None:
        kernel = self.kernel
        self.build()
        self.busy = dict.fromkeys(self.tenants)
        began = kernel.now
        self.plan()
        kernel.at(began + FAULT_SECONDS, self.stop_faults)
        for tenant in self.tenants:
            kernel.spawn(partial(self._live, tenant), tenant.name, tenant.owner)
        self._main_task = kernel.current
        self._wait(began)
        party_of = {each.name: each.party for each in self.executors}
        self.faults += mask_faults(self.network.connections, party_of, "provider")

    def _wait(self, began: float) -> None:
        """Until all tenants are done; then look whether everything is well."""
        kernel = self.kernel
        while self.busy and kernel.now < began + RUN_SECONDS and kernel.steps < MAX_STEPS:
            kernel.wait(kernel.now + 30.0)  # or until the last tenant is done
            if self.faults or kernel.failures:
                return
        if self.busy:
            names = ", ".join(each.name for each in self.busy)
            where = [place for tenant in self.busy for place in kernel.where(tenant.owner)]
            self.faults.append(f"{names} still waits after {kernel.now - began:.0f} s, {kernel.steps} steps")
            self.faults += where
            return
        kernel.sleep(200.0)  # for what was lost without a word, and for executors that end
        self._check_end()

    def _live(self, tenant: Tenant) -> None:
        """A tenant's process: its requests, and one more in good weather, which must be answered."""
        kernel, draw = self.kernel, self.kernel.random
        products = self._connect(tenant)
        tasks = draw.choice((1, 1, 1, 2, 3))
        if "flood" in self.kinds and tenant is self.tenants[0]:
            tasks = 6
        in_flight = dict.fromkeys(range(tasks))

        def work(number: int) -> None:
            tenant.work(products, tenant.requests)
            in_flight.pop(number)

        for number in range(1, tasks):
            kernel.spawn(partial(work, number), f"{tenant.name}/{number}")
        work(0)
        while in_flight:
            kernel.sleep(0.5)
        while kernel.now < self.good_since + CALM_AFTER:
            kernel.sleep(1.0)
        self._last(tenant, products)
        self.busy.pop(tenant)
        if not self.busy:
            kernel.wake(self._main_task)

    def _connect(self, tenant: Tenant) -> RingProducts:
        while True:
            try:
                return tenant.connect()
            except SymbiosisError as error:
                self.kernel.note(f"{tenant.name} cannot open a session: {type(error).__name__}")
                damaged = tenant.name in self.network.damaged
                if fault := error_fault(error, self._allowed(tenant), damaged=damaged):
                    self.faults.append(f"{tenant.name}: {fault}")
                if self.kernel.now > self.good_since + 200:
                    self.faults.append(f"{tenant.name} cannot open a session in good weather: {error!r}")
                    raise
            self.kernel.sleep(1.0)

    def _last(self, tenant: Tenant, products: RingProducts) -> None:
        if products._failed is not None:
            tenant.close(products)
            products = self._connect(tenant)
        # Without retries, each broken connection fails a request.
        tries = 2 if tenant.options.retry_seconds else 4 + 2 * len(self.executors)
        if "overload" in self.kinds:  # others may use up the quota for longer than the timeout
            tries += 20
        for _ in range(tries):
            outcome = tenant.ask(products, *tenant._drawn())()
            if outcome.error is None:
                break
            self.kernel.sleep(5.0)
            # A session that began with a lie about what is served fits no honest replica.
            if products._failed is not None or isinstance(outcome.error, ModelMismatch):
                tenant.close(products)
                products = self._connect(tenant)
        else:
            self.faults.append(f"{tenant.name} gets no answer in good weather: {outcome.error!r}")
        tenant.close(products)

    # -- looking ---------------------------------------------------------------------------------

    def _allowed(self, tenant: Tenant) -> Allowed:
        options, kinds = tenant.options, self.kinds
        codes = set()
        if "overload" in kinds:
            codes |= {"overloaded"}
        if "workers" in kinds:
            codes |= {"unavailable", "restarting"}
        if "memory" in kinds:
            codes |= {"internal"}
        # First products need scales, and others for the fingerprint, some after the other; each may wait.
        seconds = 4 * (22 * (2 * options.timeout + options.opening) + options.retry_seconds) + self.jumped
        if not kinds:
            seconds = CALM_SECONDS
        return Allowed(
            bool(kinds & LOSING),
            frozenset(codes),
            options.answers == "half",
            seconds,
            # An effect that was asked for ahead has waited before the request did.
            retry_seconds=0.0 if options.mask_budget else options.retry_seconds,
            timeout=0.0 if options.mask_budget else options.timeout,
        )

    def _check_end(self) -> None:
        for executor in self.executors:
            held = executor.service.quotas.in_flight()
            if executor.up and held != (0, 0):
                self.faults.append(f"{executor.name} still holds {held[0]} rows and {held[1]} bytes")
            if executor.up and executor.service.engine.waiting:
                self.faults.append(f"{executor.name} still has {executor.service.engine.waiting} requests")
            if executor.up and executor.connections._open:
                self.faults.append(f"{executor.name} still has {len(executor.connections._open)} connections")
        for tenant in self.tenants:
            damaged, allowed = tenant.name in self.network.damaged, self._allowed(tenant)
            faults = [outcome_fault(outcome, allowed, damaged=damaged) for outcome in tenant.outcomes]
            options = tenant.options
            most = options.retry_seconds + 3 * options.timeout + options.opening + self.jumped
            slow = max(tenant.waits, default=0.0)
            if slow > most:
                faults.append(
                    f"{tenant.name} waited {slow:.1f} s for one request, and {most:.1f} s are promised"
                )
            self.faults += [fault for fault in faults if fault]


def simulate(
    seed: int, trace: Callable[[str], None] | None = None, kinds: frozenset[str] | None = None
) -> Result:
    """Run a world."""
    before = logging.root.manager.disable
    if trace is None:
        logging.disable(logging.CRITICAL)
    try:
        return World(seed, trace, kinds).run()
    finally:
        logging.disable(before)


def simulate_all(seeds: range) -> list[Result]:
    """Simulate some seeds; without outcomes, which take long to send to another process."""
    results = [simulate(seed) for seed in seeds]
    for result in results:
        result.outcomes.clear()
    return results
