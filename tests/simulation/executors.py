"""Provider and mask sources: the real executor above the socket.

Real are connections, sessions, protocol, quota, engine, scheduler, fairness and products. The rounds of the
loop are the real ones, and start as events. A lane multiplies at a later time, loses workers, and is
unavailable for a while.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from provider.engine.engine import Engine
from provider.engine.lanes import BatchResult, ProcessLane, RowRange
from provider.engine.latency import LatencyModel
from provider.engine.loop import READ, WRITE, Loop, LoopTask
from provider.engine.profiling import shapes_of
from provider.engine.scheduler import Batch, Opportunistic, Policy, QueuedRequest
from provider.observe.metrics import Metrics
from provider.serve.admission import Identity, Refused
from provider.serve.connection import ConnectionLimits, Connections
from provider.serve.websocket_connection import WebsocketConnection
from provider.session.quota import Quotas
from provider.session.tenant import Send, Service, TenantSession
from shared.errors import WireError
from shared.wire.header import Header, Operation
from simulation.kernel import Kernel
from simulation.model import Served
from simulation.network import Network, Socket

DRAIN_SECONDS = 10.0
# The bits that each party's lies change in an answer's last byte. Parties that tell the same lie collude, and
# nothing that a tenant without a checkpoint can check would show it.
LIES = {"provider": 0x40, "source0": 0x20, "source1": 0x10}


@dataclass
class Health:
    """How well executors do.

    Attributes:
        lose_worker: chance that a batch is lost with its worker.
        allocation: chance that an allocation fails.
        inline: products run in the loop's thread.
        product_seconds: of a batch, and of each row on top.
        away_seconds: for which a lane takes nothing after it lost a worker.
        lie: chance that an answer is another one.
    """

    lose_worker: float = 0.0
    allocation: float = 0.0
    inline: bool = True
    product_seconds: tuple[float, float] = (0.001, 0.0001)
    away_seconds: float = 3.0
    lie: float = 0.0


class EventLoop(Loop):
    """The executor's loop, whose rounds are events: one starts when something has happened."""

    def __init__(self, task: LoopTask, kernel: Kernel) -> None:
        super().__init__(task, lambda: kernel.now)
        super()._close_descriptors()  # nothing here has a descriptor
        self._kernel, self._sockets, self._events = kernel, dict[int, Socket](), dict[int, int]()
        self._due = float("inf")
        self.dead = False

    def adopt(self, socket: Socket) -> None:
        """From now on this loop may watch the socket."""
        self._sockets[socket.descriptor] = socket

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self._calls.append(callback)
        self._start_round(self._kernel.now)

    def close(self, last: Callable[[], None]) -> None:
        self.dead = True

    def register(self, descriptor: int, handler: Callable[[int], None], events: int = READ) -> None:
        self._handlers[descriptor] = handler
        self._sockets[descriptor].changed = partial(self._changed, descriptor)
        self.modify(descriptor, events)

    def modify(self, descriptor: int, events: int) -> None:
        self._events[descriptor] = events
        self._changed(descriptor)

    def unregister(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None) is not None:
            del self._events[descriptor]

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        super().call_later(seconds, callback)
        self._start_round(self._kernel.now + seconds)

    def _changed(self, descriptor: int) -> None:
        if self._what(descriptor):
            self._start_round(self._kernel.now)

    def _what(self, descriptor: int) -> int:
        return self._sockets[descriptor].ready & self._events.get(descriptor, 0) & (READ | WRITE)

    def _poll(self, wait: float | None) -> list[tuple[int, int]]:
        if wait is not None:
            self._start_round(self._kernel.now + wait)
        found = [(descriptor, self._what(descriptor)) for descriptor in list(self._handlers)]
        return [(descriptor, what) for descriptor, what in found if what]

    def _handle(self, ready: list[tuple[int, int]]) -> None:
        for descriptor, what in ready:
            handler = self._handlers.get(descriptor)
            if handler is not None:
                handler(what)

    def _start_round(self, when: float) -> None:
        if when < self._due and not self.dead:
            self._due = when
            self._kernel.at(when, partial(self._go, when))

    def _go(self, when: float) -> None:
        if when != self._due or self.dead:
            return  # an earlier one has done it
        self._due, now = float("inf"), self._kernel.now
        due = bool(self._calls) or bool(self._timers and self._timers[0][0] <= now)
        due = due or any(self._what(descriptor) for descriptor in self._handlers)
        self._round()
        if due:  # the task has not been asked since
            self._start_round(now)

    @staticmethod
    def _guarded(what: Callable[[], float | None]) -> float | None:
        return what()  # the kernel notes what is raised


class SimulatedLane(ProcessLane):
    """Multiplies as the executor's own process does, and loses workers as others do."""

    def __init__(self, kernel: Kernel, products: Any, health: Health) -> None:
        self._kernel, self._executor, self._health = kernel, products, health
        self._unavailable, self._changed = False, lambda: None
        self.inline = health.inline

    @property
    def depth(self) -> int:  # type: ignore[override]
        return 0 if self._unavailable else 1

    def attach(self, loop: Loop, changed: Callable[[], None]) -> None:
        self._changed = changed

    def start(self, batch: Sequence[RowRange]) -> Future[BatchResult]:
        future: Future[BatchResult] = Future()
        fixed, per_row = self._health.product_seconds
        seconds = fixed + per_row * sum(rows.stop - rows.start for rows in batch)
        if self._kernel.random.random() < self._health.lose_worker:
            self._kernel.note("a worker is lost")
            self._kernel.after(seconds, partial(self._lose, batch, future))
        else:
            self._kernel.after(seconds, lambda: future.set_result(self.multiply(batch)))
        return future

    def multiply(self, batch: Sequence[RowRange]) -> BatchResult:
        if self._kernel.random.random() < self._health.allocation:
            self._kernel.note("a product gets no memory")
            return BatchResult([MemoryError() for _ in batch])
        return super().multiply(batch)

    def _lose(self, batch: Sequence[RowRange], future: Future[BatchResult]) -> None:
        lost = "the worker that had this request ended; ask again"
        self._unavailable = True
        future.set_result(BatchResult([WireError("unavailable", lost, retry_after=1.0) for _ in batch]))
        self._changed()
        self._kernel.after(self._kernel.random.uniform(0, self._health.away_seconds), self._back)

    def _back(self) -> None:
        self._unavailable = False
        self._changed()

    def close(self) -> None:
        """Nothing is to be ended."""


class SimulatedEngine(Engine):
    """An engine on the kernel's clock, with a loop of the kernel."""

    def __init__(
        self, kernel: Kernel, lane: SimulatedLane, policy: WatchedPolicy, latency: LatencyModel
    ) -> None:
        self._kernel = kernel
        super().__init__([lane], policy, latency, clock=lambda: kernel.now)

    def _make_loop(self) -> Loop:
        return EventLoop(self, self._kernel)


class WatchedPolicy(Policy):
    """A policy whose decisions are looked at; see ``invariants.Fairness``."""

    def __init__(self, policy: Policy, watch: Any) -> None:
        self._policy, self._watch = policy, watch

    def add(self, request: QueuedRequest, now: float) -> None:
        self._policy.add(request, now)
        self._watch.added(request)

    def next(self, now: float, lane: int = 0) -> Batch | float | None:
        decision = self._policy.next(now, lane)
        if isinstance(decision, list):
            self._watch.taken(decision)
        return decision

    def drop(self, request: QueuedRequest) -> None:
        self._policy.drop(request)
        self._watch.dropped(request)

    def finished(self, batch: Batch, seconds: float, now: float) -> None:
        self._policy.finished(batch, seconds, now)

    def session_ended(self, tenant: str, session: Any) -> None:
        self._policy.session_ended(tenant, session)


class InOrder(dict[Any, None]):
    """A set in the order of insertion: that of objects is another in every run."""

    def add(self, each: Any) -> None:
        self[each] = None

    def discard(self, each: Any) -> None:
        self.pop(each, None)


@cache
def metrics() -> Metrics:
    """Of all executors: making them takes longer than a run, and nothing depends on them."""
    return Metrics()


class Executor:
    """A machine with an executor, which ends and starts again.

    Args:
        party: whose it is; replicas of one party are one operator's.
        quotas: makes those of a process.
        watch: makes what looks at the policy's decisions.

    Attributes:
        up: whether somebody listens.
        service: of the process that runs, or ran last.
    """

    def __init__(
        self,
        name: str,
        party: str,
        *,
        kernel: Kernel,
        network: Network,
        served: Served,
        quotas: Callable[[], Quotas],
        health: Health,
        watch: Callable[[], Any],
    ) -> None:
        self.name, self.party = name, party
        self.kernel, self.network, self.served = kernel, network, served
        self.quotas, self.health, self._watch = quotas, health, watch
        self.up = False
        self.start()

    def start(self) -> None:
        """A new process."""
        if self.up:
            return
        kernel, latency = self.kernel, LatencyModel(shapes_of(self.served.manifest.groups))
        policy = WatchedPolicy(Opportunistic(latency), self._watch())
        lane = SimulatedLane(kernel, self.served.products, self.health)
        engine = SimulatedEngine(kernel, lane, policy, latency)
        self.service = Service(self.served, engine, metrics(), self.quotas())
        self.connections = Connections(metrics(), engine.loop, ConnectionLimits(per_tenant=8))
        self.connections._open = InOrder()  # type: ignore[assignment]
        self.up = True
        kernel.note(f"{self.name} starts")

    @property
    def loop(self) -> EventLoop:
        """Of the process."""
        loop = self.service.engine.loop
        assert isinstance(loop, EventLoop)
        return loop

    def kill(self) -> None:
        """The process ends at once, with all that it had."""
        if self.up:
            self.kernel.note(f"{self.name} is killed")
            self.up, self.loop.dead = False, True
            self.network.cut_all(self.name)

    def restart(self, seconds: float) -> None:
        """Kill it, and start it after some time."""
        self.kill()
        self.kernel.after(seconds, self.start)

    def drain(self, seconds: float) -> None:
        """End it as a supervisor does: it answers what has arrived, and starts again after some time."""
        if self.up and not self.connections.draining:
            self.kernel.note(f"{self.name} drains")
            self.connections.begin_drain()
            self.kernel.after(DRAIN_SECONDS, partial(self.restart, seconds))

    def accept(self, socket: Socket, tenant: str) -> bool:
        """Let a tenant in, whose handshake has come; whether there is room."""
        with ExitStack() as reservation:
            try:
                self.connections.reserve()
                reservation.callback(self.connections.release)
                self.connections.reserve_for(tenant)
            except Refused:
                return False
            reservation.pop_all()
        limits = self.served.manifest.limits
        self.loop.adopt(socket)
        connection = WebsocketConnection(
            socket,  # type: ignore[arg-type]
            Identity(tenant, "token"),
            "192.0.2.2",
            self._open,
            limits.max_message_bytes,
            limits.max_in_flight,
        )
        self.loop.call_soon_threadsafe(partial(self.connections.start, connection))
        return True

    def _open(self, tenant: str, send: Send, peer: str) -> TenantSession:
        return self.service.open(tenant, partial(self._lie, tenant, send), peer)

    def _lie(
        self, tenant: str, send: Send, header: Header, tensors: Any, on_sent: Callable[[], None]
    ) -> None:
        """Send an answer, or another one in its place."""
        draw = self.kernel.random
        if header.operation == Operation.REPLY and draw.random() < self.health.lie:
            kind = draw.choice(("id", "shape", "number"))
            self.kernel.note(f"{self.name} lies to {tenant}: {kind}")
            self.network.damaged.add(tenant)
            if kind == "id":
                header = header._replace(request_id=max(1, header.request_id + draw.choice((-1, 1))))
            elif kind == "shape":
                header = header._replace(rows=header.columns, columns=header.rows)
            else:
                tensors = [tensor.clone() for tensor in tensors]
                tensors[0].view(torch.uint8).view(-1)[-1] ^= LIES[self.party]
        send(header, tensors, on_sent)


def allocate(kernel: Kernel, health: Health, header: Header) -> torch.Tensor:
    """Memory for a payload, which may not be there."""
    if kernel.random.random() < health.allocation:
        kernel.note("a payload gets no memory")
        raise MemoryError(errno.ENOMEM)
    return torch.empty(header.payload_shape, dtype=header.payload_dtype)
