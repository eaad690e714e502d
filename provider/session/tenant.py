"""One tenant's session, whatever carries it: requests in, answers out. No sockets here."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from provider.engine.batching import Batcher, Done, shapes_of
from provider.engine.latency import LatencyModel
from provider.engine.scheduler import Opportunistic
from provider.executor.base import BaseExecutor
from provider.observe.metrics import Metrics
from provider.observe.transcript import Transcript
from provider.session.answering import Send, Session
from provider.session.quota import Quotas
from shared.wire.header import PRODUCTS, Header, Operation
from shared.wire.messages import Fetch, decode
from shared.wire.websocket import tensor_bytes

log = logging.getLogger(__name__)


class Scheduler(Protocol):
    """Decides when a request's product runs and with which others."""

    def run(self, tenant: str, header: Header, blocks: list[torch.Tensor]) -> Done:
        """Block until the product is done; see ``provider.engine.batching.Batcher``."""
        ...

    def answered(self, header: Header, stop: Callable[[], bool]) -> None:
        """The answer is on its way; use the time until ``stop()``, when the tenant's next request is here."""
        ...


@dataclass(frozen=True)
class Service:
    """What all sessions of an executor share."""

    executor: BaseExecutor
    scheduler: Scheduler
    metrics: Metrics
    quotas: Quotas = field(default_factory=Quotas)
    transcript: Transcript | None = None

    @classmethod
    def of(cls, executor: BaseExecutor, transcript: Transcript | None = None) -> Service:
        """An executor with opportunistic batching, without quotas; what products take, it learns."""
        metrics = Metrics()
        policy = Opportunistic(LatencyModel(shapes_of(executor)))
        batcher = Batcher(executor, policy, on_batch=metrics.batch)
        return cls(executor, batcher, metrics, transcript=transcript)

    def open(self, tenant: str, send: Send, waiting: Callable[[], bool]) -> TenantSession:
        """A tenant's session."""
        return TenantSession(self, tenant, send, waiting)


class TenantSession(Session):
    """See Session.

    Args:
        service: of the executor.
        tenant: for quotas, fairness and the log.
        send: writes an answer; blocks until the carrier has taken it.
        waiting: whether the tenant's next request has arrived.
    """

    def __init__(self, service: Service, tenant: str, send: Send, waiting: Callable[[], bool]) -> None:
        super().__init__(tenant, service.executor.manifest, send)
        self._service, self._waiting = service, waiting
        # Admitted and not answered: request, its answer's header, bytes of both.
        self._held: deque[tuple[Header, Header, int]] = deque()
        self._number = service.transcript.opened(tenant) if service.transcript else 0

    def accept(self, header: Header) -> None:
        """See Session."""
        self._protocol.accept(header)
        if header.operation in PRODUCTS:
            answer = self._protocol.answer(header)
            received = payload = header.payload_bytes
            if header.operation == Operation.SEED_EFFECT:  # the mask is drawn here
                payload = header._replace(operation=Operation.PRODUCT).payload_bytes
            held = payload + answer.payload_bytes
            self._service.quotas.admit(self._tenant, header.rows, held, received, time.monotonic())
            self._held.append((header, answer, held))

    def close(self) -> None:
        """See Session."""
        while self._held:
            self._release()
        if self._service.transcript:
            self._service.transcript.closed(self._number)

    def _serve(self, header: Header, payload: torch.Tensor) -> None:
        if header.operation in PRODUCTS:
            self._product(header, payload)
            return
        service = self._service
        answer, read = service.executor.fetch(decode(tensor_bytes(payload), Fetch), header.request_id)
        size = answer.payload_bytes
        service.quotas.admit(self._tenant, 0, size, size, time.monotonic())
        try:
            self._send(answer, [read()])
        finally:
            service.quotas.release(self._tenant, 0, size)
        service.metrics.sent.inc(size)

    def _product(self, header: Header, payload: torch.Tensor) -> None:
        service = self._service
        if service.transcript:
            service.transcript.request(self._number, header, payload)
        request, answer, _ = self._held[0]
        if request is not header:
            raise RuntimeError("answered out of turn")
        done = service.scheduler.run(self._tenant, header, service.executor.blocks(header, payload))
        self._send(answer, done.blocks)
        try:  # the tenant goes on; a failure here is no second answer
            service.metrics.product(self._tenant, header, answer, done)
            if service.transcript:
                service.transcript.answered(self._number, done.reply_seconds)
            service.scheduler.answered(header, self._waiting)
        except Exception:
            log.exception("after a request of tenant %s", self._tenant)

    def _done(self, header: Header) -> None:
        # What was not admitted is not in here, whatever it calls itself.
        if self._held and self._held[0][0] is header:
            self._release()

    def _release(self) -> None:
        header, _, held = self._held.popleft()
        self._service.quotas.release(self._tenant, header.rows, held)

    def _count_refusal(self, code: str) -> None:
        self._service.metrics.refused.labels(code).inc()
