"""An executor for tenants of the same process, without sockets, certificates or tokens.

::

    with provider.serve_in_process("examples/base_model") as endpoint:
        session = tenant_sdk.connect(endpoint, privacy="plain")

Everything but the transport is as behind a port: headers, checks on both sides, batching, metrics. There is
nobody to hide anything from in one process: it is for tests and notebooks.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from provider.executor.base import BaseExecutor
from provider.serve.admission import Refused, identify
from provider.serve.tokens import TokenFile
from provider.session.tenant import Service, TenantSession
from shared.errors import ConnectError, WireError
from shared.transport.endpoint import OnAnswer
from shared.transport.refusal import session_refused
from shared.wire.header import Header
from shared.wire.incoming import check_header

POLL_SECONDS = 0.5  # between checks whether an answer can still come


class InprocessExecutor:
    """A ``shared.transport.endpoint.Endpoint``.

    Args:
        service: of the executor.
        tokens: ask for one of these tokens; None: for none.
        owned: nobody else has the service: it ends with this endpoint.

    Attributes:
        url: what to call it in messages.
    """

    def __init__(self, service: Service, tokens: TokenFile | None = None, *, owned: bool = False) -> None:
        self.service, self._tokens = service, tokens
        self.url = f"inprocess:{service.executor.manifest.model}"
        self.closed = False
        self._lock, self._sessions = threading.Lock(), 0
        self._end: Callable[[], object] = _nothing
        if owned:
            # The loop's thread has the weights. It also ends if nobody can use this endpoint any more.
            self._end = end = weakref.finalize(self, service.close)
            end.atexit = False

    def open(self, token: str, on_answer: OnAnswer) -> InprocessSession:
        """See ``shared.transport.endpoint.Endpoint``."""
        try:
            tenant = identify(token, self._tokens).tenant if self._tokens is not None else "inprocess"
        except Refused as refused:
            raise session_refused(self.url, refused.info) from refused
        with self._lock:  # so that ``close`` cannot end the service in between
            if self.closed:
                raise ConnectError(f"cannot connect to {self.url}: it is closed")
            session = InprocessSession(self, tenant, on_answer)
            self._sessions += 1
        return session

    def close(self) -> None:
        """Serve no further request. The executor's threads end with its last session."""
        with self._lock:
            self.closed, unused = True, self._sessions == 0
        if unused:
            self._end()

    def session_closed(self) -> None:
        """One of the sessions is closed."""
        with self._lock:
            self._sessions -= 1
            unused = self.closed and self._sessions == 0
        if unused:
            self._end()

    def __enter__(self) -> InprocessExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class InprocessSession:
    """A ``shared.transport.endpoint.EndpointSession``."""

    def __init__(self, executor: InprocessExecutor, tenant: str, on_answer: OnAnswer) -> None:
        self._executor, self._on_answer = executor, on_answer
        self._session = TenantSession(executor.service, tenant, self._send)
        self._answers: queue.SimpleQueue[tuple[bytes, torch.Tensor]] = queue.SimpleQueue()
        self._open = True
        executor.service.metrics.connections.inc()

    def request(self, header: bytes, payload: torch.Tensor) -> None:
        """See ``shared.transport.endpoint.EndpointSession``."""
        if self._executor.closed or not self._open:
            raise BrokenPipeError(f"{self._executor.url} is closed")
        call_soon = self._executor.service.engine.loop.call_soon_threadsafe
        try:
            message = check_header(header, self._session.accept, payload.nbytes)
        except WireError as error:
            call_soon(partial(self._session.refuse, 0, error))
            self._on_answer(*self._next_answer())
            raise BrokenPipeError(error.code) from error
        if message.error is None:
            head = message.header
            message.payload = payload.view(-1).view(head.payload_dtype).view(head.payload_shape)
        call_soon(partial(self._session.answer, message))
        self._on_answer(*self._next_answer())

    def _next_answer(self) -> tuple[bytes, torch.Tensor]:
        while True:
            try:
                return self._answers.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if self._executor.service.engine.loop.closed:
                    raise BrokenPipeError(f"{self._executor.url} is closed") from None

    def close(self) -> None:
        """See ``shared.transport.endpoint.EndpointSession``."""
        if self._open:
            self._open = False
            self._executor.service.metrics.connections.dec()
            self._executor.service.engine.loop.call_soon_threadsafe(self._session.close)
            self._executor.session_closed()

    def _send(self, header: Header, tensors: list[torch.Tensor] | bytes, on_sent: Callable[[], None]) -> None:
        if isinstance(tensors, bytes):
            payload = torch.frombuffer(bytearray(tensors), dtype=torch.uint8)
        else:  # copies, also of a single tensor: it may be the executor's own, such as a parameter
            payload = torch.cat([tensor.reshape(-1) for tensor in tensors])
        on_sent()
        self._answers.put((header.pack(), payload.view(header.payload_shape)))


def serve_in_process(
    model_dir: str | Path, *, numerics: str = "ring", tokens: TokenFile | None = None, **options: Any
) -> InprocessExecutor:
    """Load a checkpoint and serve it to this process.

    Args:
        model_dir: Folder of a checkpoint with safetensors, or a model on a hub (``hub:NAME[@REVISION]``).
        numerics: Numerics of products: ``ring``, ``ring-fine``, ``float32`` or ``bfloat16``.
        tokens: File with tokens, of which each tenant must give one. Default: tenants need no token.
        options: Other arguments of ``BaseExecutor``.

    Returns:
        The executor. ``tenant_sdk.connect`` takes it in place of a URL, as a provider or a mask source. It is
        a context manager.

    Raises:
        ConfigurationError: See ``BaseExecutor``.
    """
    service = Service.of(BaseExecutor(model_dir, numerics=numerics, **options))
    return InprocessExecutor(service, tokens, owned=True)


def _nothing() -> None:
    pass
