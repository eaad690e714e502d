"""One tenant's session over any transport: requests in, answers out as they complete. No sockets here."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from provider.catalog.catalog import Catalog
from provider.engine.engine import Completion, Engine
from provider.executor.base import BaseExecutor
from provider.observe.metrics import Metrics
from provider.observe.transcript import TranscriptWriter
from provider.session.quota import Quotas
from shared.errors import SymbiosisError, WireError
from shared.fair_threads import FairThreads
from shared.log_rate_limit import LogRateLimiter
from shared.wire.header import PRODUCTS, Header, Operation, RequestClass
from shared.wire.incoming import Incoming, new_payload, tensor_bytes
from shared.wire.messages import ErrorInfo, Fetch, Hello, Manifest, decode, encode
from shared.wire.protocol import ExecutorProtocol

log = logging.getLogger(__name__)

LOG_SECONDS, LOGGED_SESSIONS = 60.0, 100
_IDENTITIES = itertools.count()

Send = Callable[[Header, "list[torch.Tensor] | bytes", Callable[[], None]], None]
"""Writes an answer; calls back once it is sent, and need not be kept."""


class ServedModel(Protocol):
    """What is served, as tenants see it; ``provider.executor.base.BaseExecutor``, or workers together."""

    @property
    def catalog(self) -> Catalog:
        """What tenants download."""
        ...

    @property
    def manifest(self) -> Manifest:
        """The catalog's."""
        ...


@dataclass(frozen=True)
class Service:
    """What all sessions of an executor share."""

    executor: ServedModel
    engine: Engine
    metrics: Metrics
    quotas: Quotas = field(default_factory=Quotas)
    transcript: TranscriptWriter | None = None
    # Parameters and files are read here, one after the other: the loop's thread waits for no disk. A row of
    # a quantised expert costs what the whole expert does: a tenant that asks for many waits for them alone.
    downloads: FairThreads = field(default_factory=partial(FairThreads, 1, "downloads"))
    # By tenant: the log has two lines of so many sessions, not of those that a tenant opens beyond that.
    log_limits: defaultdict[str, LogRateLimiter] = field(
        default_factory=lambda: defaultdict(lambda: LogRateLimiter(LOG_SECONDS, LOGGED_SESSIONS))
    )

    @functools.cached_property
    def welcome(self) -> bytes:
        """The manifest as it is sent; that of a large mixture takes milliseconds to encode."""
        return encode(self.executor.manifest)

    @classmethod
    def of(cls, executor: BaseExecutor, transcript: TranscriptWriter | None = None) -> Service:
        """An executor with opportunistic batching, without quotas; what products take, it learns."""
        metrics = Metrics()
        return cls(executor, Engine.of(executor, on_batch=metrics.batch), metrics, transcript=transcript)

    def open(self, tenant: str, send: Send, peer: str = "") -> TenantSession:
        """A tenant's session."""
        return TenantSession(self, tenant, send, peer)

    def close(self) -> None:
        """End the engine; nobody may have a session."""
        self.engine.close()
        self.downloads.shutdown(wait=False, cancel_futures=True)


@dataclass(eq=False, slots=True)
class _AdmittedRequest:
    """A request that the quota has admitted, until its answer is sent."""

    header: Header
    answer: Header
    rows: int  # in the quota
    bytes_in_memory: int  # of request and answer


class TenantSession:
    """Answers one tenant's requests: what a connection needs to know of it.

    Requests may be in flight together, up to the manifest's ``max_in_flight``; answers go out as they
    complete. All but ``accept`` and ``allocate`` belong to the loop's thread.

    Args:
        service: of the executor.
        tenant: for quotas, fairness and the log.
        send: see ``Send``.
        peer: where it comes from, for the log; empty: nowhere.

    Attributes:
        logged: lines about it go to the log; a tenant opens as many sessions as it likes.
    """

    def __init__(self, service: Service, tenant: str, send: Send, peer: str = "") -> None:
        self._service, self._tenant, self._send = service, tenant, send
        self._log_fields = {"tenant": tenant, "peer": peer} if peer else {"tenant": tenant}  # for the log
        self._protocol = ExecutorProtocol(service.executor.manifest)
        self._admitted: set[_AdmittedRequest] = set()
        self._identity = next(_IDENTITIES)  # an ``id`` would be used again
        self._number = service.transcript.opened(tenant) if service.transcript else 0
        self._closed, self._began, self._answered = False, time.monotonic(), 0
        self.logged = service.log_limits[tenant].due(self._began)
        self._in_flight: set[_AdmittedRequest] = set()  # of those admitted, without an answer
        self._reads: set[Future[torch.Tensor]] = set()  # that wait for a thread, or run

    @property
    def in_flight(self) -> int:
        """Requests without an answer."""
        return len(self._in_flight)

    def accept(self, header: Header) -> _AdmittedRequest | None:
        """Check a request's header; nothing has been allocated yet.

        Returns:
            What its message has as ``Incoming.admitted``, without which ``answer`` does not know it again.

        Raises:
            WireError: what is wrong, or ``overloaded``.
        """
        self._protocol.accept(header)
        if header.operation in PRODUCTS:
            answer = self._protocol.answer(header)
            received = payload = header.payload_bytes
            if header.operation == Operation.SEED_EFFECT:  # the mask is drawn here
                payload = header._replace(operation=Operation.PRODUCT).payload_bytes
            resident = payload + answer.payload_bytes
            return self._admit(_AdmittedRequest(header, answer, header.rows, resident), received)
        return None

    def _admit(self, request: _AdmittedRequest, received_bytes: int) -> _AdmittedRequest:
        rows, size = request.rows, request.bytes_in_memory
        self._service.quotas.admit(self._tenant, rows, size, received_bytes, time.monotonic())
        self._admitted.add(request)
        return request

    def allocate(self, header: Header) -> torch.Tensor:
        """Where the payload of an accepted request goes."""
        return new_payload(header)

    def answer(self, message: Incoming) -> None:
        """Answer one complete message, which may be an error, now or later.

        Raises:
            OSError, EOFError: the transport broke.
            WireError: fatal.
        """
        header = message.header
        if self._closed:
            self._release(message.admitted)
            return
        try:
            if message.error is not None:
                # Not raised: its traceback would have it and the message keep each other.
                self._failed(header, message.admitted, message.error)
            elif message.payload is None:
                error = WireError("payload_length", "the message has no payload")
                self._failed(header, message.admitted, error)
            elif header.operation == Operation.HELLO:
                self._welcome(header, decode(tensor_bytes(message.payload), Hello))
            elif header.operation in PRODUCTS:
                self._submit(message.admitted, message.payload)
            else:
                self._fetch(message, message.payload)
        except (OSError, EOFError):
            raise  # the connection, not the request
        except Exception as error:
            self._failed(header, message.admitted, error)

    def refuse(self, request_id: int, error: SymbiosisError) -> None:
        """Answer with an error; request id 0 is for the whole session."""
        self._service.metrics.refused.labels(error.code).inc()
        data = encode(ErrorInfo(error.code, error.message, error.retry_after))
        header = Header(Operation.ERROR, request_id=request_id, rows=1, columns=len(data))
        self._send(header, data, _nothing)

    def close(self) -> None:
        """The tenant left, or its transport broke, perhaps in the middle of a message."""
        lasted, count = round(time.monotonic() - self._began, 3), self._answered
        extra = self._log_fields | {"seconds": lasted, "requests": count}
        if self.logged:
            log.info(
                "tenant %s left after %.0f s, %d products answered", self._tenant, lasted, count, extra=extra
            )
        self._closed = True
        for request in self._admitted - self._in_flight:
            self._release(request)  # the others hold memory until they are back
        self._service.engine.session_ended(self._tenant, self._identity)
        for read in [*self._reads]:  # nobody waits for them any more
            read.cancel()
        self._send = _ignore  # the connection is over, and this may be needed for what is in flight
        if self._service.transcript:
            self._service.transcript.closed(self._number)

    # -- kinds of requests -----------------------------------------------------------------------

    def _welcome(self, header: Header, hello: Hello) -> None:
        if self.logged:
            log.info("tenant %s connected with %.40r", self._tenant, hello.client, extra=self._log_fields)
        welcome = self._service.welcome
        answer = Header(Operation.WELCOME, request_id=header.request_id, rows=1, columns=len(welcome))
        self._send(answer, welcome, _nothing)

    def _submit(self, request: _AdmittedRequest, payload: torch.Tensor) -> None:
        service, header = self._service, request.header
        if service.transcript:
            service.transcript.request(self._number, header, payload)
        self._in_flight.add(request)
        done = partial(self._on_product_done, request)
        service.engine.submit(self._tenant, self._identity, header, payload, done)

    def _on_product_done(self, request: _AdmittedRequest, done: Completion | Exception) -> None:
        if isinstance(done, Exception):
            self._on_done(request, [], done)
            return
        if not self._on_done(request, done.tensors):
            return
        service, header, answer = self._service, request.header, request.answer
        self._answered += 1
        if service.transcript:
            service.transcript.answered(self._number, header.request_id, done.reply_seconds)
        times = done._replace(tensors=[])  # the answer is sent, and counted against no quota any more
        service.engine.defer(partial(service.metrics.answered, self._tenant, header, answer, times))

    def _fetch(self, message: Incoming, payload: torch.Tensor) -> None:
        service, header = self._service, message.header
        answer, read = service.executor.catalog.fetch(decode(tensor_bytes(payload), Fetch), header.request_id)
        size = answer.payload_bytes
        request = message.admitted = self._admit(_AdmittedRequest(header, answer, 0, size), size)
        self._in_flight.add(request)
        loop = service.engine.loop
        future = service.downloads.submit_for(self._tenant, read)
        self._reads.add(future)
        future.add_done_callback(
            lambda future: loop.call_soon_threadsafe(partial(self._read, request, future))
        )

    def _read(self, request: _AdmittedRequest, future: Future[torch.Tensor]) -> None:
        self._reads.discard(future)
        error = ConnectionResetError("the session has ended") if future.cancelled() else future.exception()
        if self._on_done(request, [] if error else [future.result()], error):
            self._service.metrics.downloaded(self._tenant, request.header, request.answer)

    def _on_done(
        self, request: _AdmittedRequest, tensors: list[torch.Tensor], error: BaseException | None = None
    ) -> bool:
        """A request in flight is back: answer it, or report why not. Whether it has an answer."""
        self._in_flight.discard(request)
        if self._closed:
            self._release(request)
            return False
        if error is not None:
            self._failed(request.header, request, error)
            return False
        try:
            self._send(request.answer, tensors, partial(self._release, request))
        except Exception as failure:  # such as a place for the answer that is none
            self._failed(request.header, request, failure)
            return False
        return True

    def _failed(self, header: Header, request: _AdmittedRequest | None, error: BaseException) -> None:
        """One request's failure is that request's alone; the peer learns nothing of its cause."""
        self._release(request)
        if not isinstance(error, WireError):
            of = self._log_fields | {"request_class": RequestClass(header.request_class).name.lower()}
            log.error("request of tenant %s failed", self._tenant, exc_info=error, extra=of)
            error = WireError("internal", "the executor failed on this request; report it")
        if error.fatal:
            raise error
        self.refuse(header.request_id, error)

    def _release(self, request: _AdmittedRequest | None) -> None:
        """A request is answered, or never will be; once, or it was never admitted."""
        if request in self._admitted:
            self._admitted.discard(request)
            self._in_flight.discard(request)  # if the engine could not take it
            self._service.quotas.release(self._tenant, request.rows, request.bytes_in_memory)


def _nothing() -> None:
    pass


def _ignore(header: Header, tensors: list[torch.Tensor] | bytes, on_sent: Callable[[], None]) -> None:
    """Answer nobody."""
    on_sent()
