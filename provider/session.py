"""One tenant's session, whatever carries it: requests in, answers out. No sockets here."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from provider.batching import Batcher, Done, shapes_of
from provider.executor import BaseExecutor
from provider.latency import LatencyModel
from provider.metrics import Metrics
from provider.quota import Quotas
from provider.scheduler import Opportunistic
from provider.transcript import Transcript
from shared.errors import SymbiosisError, WireError
from shared.header import PRODUCTS, Header, Operation
from shared.messages import ErrorInfo, Fetch, Hello, decode, encode
from shared.protocol import ExecutorProtocol
from shared.websocket import Incoming, new_payload

log = logging.getLogger(__name__)

Send = Callable[[Header, "list[torch.Tensor] | bytes"], None]


class Session(Protocol):
    """What a connection needs of one; here it is ``TenantSession``, in a front door it is relayed."""

    def accept(self, header: Header) -> None:
        """Check a request's header; nothing has been allocated yet.

        Raises:
            WireError: what is wrong.
        """
        ...

    def allocate(self, header: Header) -> torch.Tensor:
        """Where the payload of an accepted request goes."""
        ...

    def answer(self, message: Incoming) -> None:
        """Answer one complete message, which may be an error.

        Raises:
            OSError, EOFError: the carrier broke.
        """
        ...

    def refuse(self, request_id: int, error: SymbiosisError) -> None:
        """Answer with an error; request id 0 is for the whole session.

        Raises:
            OSError: the carrier broke.
        """
        ...

    def close(self) -> None:
        """The tenant left, or its carrier broke."""
        ...


class Scheduler(Protocol):
    """Decides when a request's product runs and with which others."""

    def run(self, tenant: str, header: Header, blocks: list[torch.Tensor]) -> Done:
        """Block until the product is done; see ``provider.batching.Batcher``."""
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


class TenantSession:
    """Answers one tenant's requests, one at a time.

    Args:
        service: of the executor.
        tenant: for quotas, fairness and the log.
        send: writes an answer; blocks until the carrier has taken it.
        waiting: whether the tenant's next request has arrived.
    """

    def __init__(self, service: Service, tenant: str, send: Send, waiting: Callable[[], bool]) -> None:
        self._service, self._tenant, self._send, self._waiting = service, tenant, send, waiting
        self._protocol = ExecutorProtocol(service.executor.manifest)
        # Admitted and not answered: request, its answer's header, bytes of both.
        self._held: deque[tuple[Header, Header, int]] = deque()
        self._number = service.transcript.opened(tenant) if service.transcript else 0

    def accept(self, header: Header) -> None:
        """Check a request's header; nothing has been allocated yet.

        Raises:
            WireError: what is wrong, or ``overloaded``.
        """
        self._protocol.accept(header)
        if header.operation in PRODUCTS:
            answer = self._protocol.answer(header)
            received = payload = header.payload_bytes
            if header.operation == Operation.SEED_EFFECT:  # the mask is drawn here
                payload = header._replace(operation=Operation.PRODUCT).payload_bytes
            held = payload + answer.payload_bytes
            self._service.quotas.admit(self._tenant, header.rows, held, received, time.monotonic())
            self._held.append((header, answer, held))

    def answer(self, message: Incoming) -> None:
        """Answer one complete message, which may be an error.

        Raises:
            OSError: the carrier broke.
        """
        header = message.header
        try:
            if message.error is not None:
                raise message.error
            if message.payload is None:
                raise WireError("payload_length", "the message has no payload")
            if header.operation in PRODUCTS:
                self._product(header, message.payload)
                return
            data = message.payload.numpy().data.cast("B") if message.payload.numel() else b""
            if header.operation == Operation.HELLO:
                hello = decode(data, Hello)
                log.info("tenant %s connected with %.40r", self._tenant, hello.client)
                manifest = encode(self._service.executor.manifest)
                welcome = Operation.WELCOME
                self._send(
                    Header(welcome, request_id=header.request_id, rows=1, columns=len(manifest)), manifest
                )
            else:
                answer, tensor = self._service.executor.fetch(decode(data, Fetch), header.request_id)
                self._service.metrics.sent.inc(answer.payload_bytes)
                self._send(answer, [tensor])
        except WireError as error:
            self.refuse(header.request_id, error)
        except OSError:
            raise  # the connection, not the request
        except Exception:
            # One request's failure is that request's alone; the peer learns nothing of its cause.
            log.exception("request of tenant %s failed", self._tenant)
            self.refuse(
                header.request_id, WireError("internal", "the executor failed on this request; report it")
            )
        finally:
            # What was not admitted is not in here, whatever it calls itself.
            if self._held and self._held[0][0] is header:
                self._release()

    def refuse(self, request_id: int, error: SymbiosisError) -> None:
        """Answer with an error; request id 0 is for the whole session.

        Raises:
            OSError: the carrier broke.
        """
        self._service.metrics.refused.labels(error.code).inc()
        data = encode(ErrorInfo(error.code, error.message, error.retry_after))
        self._send(Header(Operation.ERROR, request_id=request_id, rows=1, columns=len(data)), data)

    def close(self) -> None:
        """The tenant left, or its carrier broke, perhaps in the middle of a message."""
        while self._held:
            self._release()
        if self._service.transcript:
            self._service.transcript.closed(self._number)

    allocate = staticmethod(new_payload)

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

    def _release(self) -> None:
        header, _, held = self._held.popleft()
        self._service.quotas.release(self._tenant, header.rows, held)
