"""What tenants have in flight is counted until it is gone, and nothing of it is left behind."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import HeldLane, service_on
from raw_peers import eventually

from provider.engine.engine import Engine
from provider.executor.base import BaseExecutor
from provider.observe.metrics import Metrics
from provider.session.quota import Quota, Quotas
from provider.session.tenant import Service, TenantSession
from shared.errors import WireError
from shared.wire.frames import MessageReader, encode_message
from shared.wire.header import DTYPE_CODES, Direction, Header, Operation
from shared.wire.incoming import Incoming
from shared.wire.messages import Fetch, encode


def test_files_and_parameters_count_as_well(checkpoint: Callable[[str], Path]) -> None:
    """A reply that nobody reads is held, and who asks for many takes turns."""
    base = BaseExecutor(checkpoint("llama"), numerics="float32")
    size = base.manifest.files[0].size
    quotas = Quotas(Quota(bytes_in_flight=size + 1))

    service = Service(base, Engine.of(base), Metrics(), quotas)
    sent: queue.Queue[Header] = queue.Queue()
    unsent: list[Callable[[], None]] = []

    def send(answer: Header, tensors: Any, on_sent: Callable[[], None]) -> None:
        unsent.append(on_sent)
        sent.put(answer)

    session, other = (TenantSession(service, "alice", send) for _ in range(2))
    hello = b'{"client":"x"}'

    def message(operation: Operation, body: bytes, request_id: int) -> Incoming:
        head = Header(operation, request_id=request_id, rows=1, columns=len(body))
        return Incoming(head, torch.frombuffer(bytearray(body), dtype=torch.uint8))

    def request(request_id: int) -> Incoming:
        body = encode(Fetch("file", base.manifest.files[0].name, 0, size))
        return message(Operation.FETCH, body, request_id)

    def answers(session: TenantSession, asked: Incoming) -> Header:
        service.engine.loop.call_soon_threadsafe(lambda: session.answer(asked))
        return sent.get(timeout=800)

    for each in (session, other):
        assert answers(each, message(Operation.HELLO, hello, 1)).operation == Operation.WELCOME
    assert answers(session, request(2)).operation == Operation.REPLY
    assert quotas.in_flight() == (0, size)  # it is not sent yet
    assert answers(other, request(9)).operation == Operation.ERROR
    for on_sent in unsent:
        on_sent()
    assert quotas.in_flight() == (0, 0)
    assert answers(other, request(10)).operation == Operation.REPLY
    service.close()


def test_who_leaves_gives_back_what_it_had(checkpoint: Callable[[str], Path]) -> None:
    """At once what nobody works on, the rest when it is back: memory is held until then."""
    base, quotas = (
        BaseExecutor(checkpoint("llama"), numerics="float32"),
        Quotas(Quota(bytes_in_flight=1 << 30)),
    )
    service, lane = service_on(base, HeldLane, quotas=quotas)
    width, size = base.manifest.groups[0].inputs, base.manifest.files[0].size
    gone = TenantSession(service, "alice", lambda *_: None)

    def accepted(header: Header, payload: torch.Tensor) -> Incoming:
        return Incoming(Header(*header), payload, admitted=gone.accept(header))  # whichever object it is

    def product() -> Incoming:
        header = Header(Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.float32], 0, 7, 3, width, 1)
        return accepted(header, torch.ones(3, width))

    body = encode(Fetch("file", base.manifest.files[0].name, 0, size))
    fetch = Header(Operation.FETCH, request_id=8, rows=1, columns=len(body))
    hello = b'{"client":"x"}'
    greeting = Header(Operation.HELLO, rows=1, columns=len(hello))
    first = accepted(greeting, torch.frombuffer(bytearray(hello), dtype=torch.uint8))
    in_flight, queued, arriving = product(), product(), product()
    one = quotas.in_flight()[1] // 3

    for each in (first, in_flight):
        service.engine.loop.call_soon_threadsafe(lambda each=each: gone.answer(each))  # type: ignore[misc]
    assert lane.busy.wait(800)
    service.engine.loop.call_soon_threadsafe(lambda: gone.answer(queued))
    service.engine.loop.call_soon_threadsafe(gone.close)
    for late in (arriving, Incoming(fetch, torch.frombuffer(bytearray(body), dtype=torch.uint8))):
        service.engine.loop.call_soon_threadsafe(lambda late=late: gone.answer(late))  # type: ignore[misc]
    eventually(lambda: quotas.in_flight() == (3, one))
    lane.go.set()
    eventually(lambda: quotas.in_flight() == (0, 0))
    assert service.engine.waiting == 0
    service.close()


def asked_and_left(service: Service) -> weakref.ref[TenantSession]:
    """A session that asked for many downloads, and has ended."""
    session = TenantSession(service, "alice", lambda *_: None)
    file = service.executor.manifest.files[0]
    body = encode(Fetch("file", file.name, 0, file.size))

    def ask() -> None:
        for at in range(16):
            head = Header(Operation.FETCH, request_id=at, rows=1, columns=len(body))
            session.answer(Incoming(head, torch.frombuffer(bytearray(body), dtype=torch.uint8)))

    service.engine.loop.call_soon_threadsafe(ask)
    eventually(lambda: service.quotas.in_flight() == (0, 16 * file.size))
    service.engine.loop.call_soon_threadsafe(session.close)
    eventually(lambda: service.quotas.in_flight() == (0, 0))
    return weakref.ref(session)


def test_downloads_of_a_tenant_that_has_left_are_not_read(checkpoint: Callable[[str], Path]) -> None:
    """It could ask and hang up, again and again, faster than anything is read."""
    base, quotas = (
        BaseExecutor(checkpoint("llama"), numerics="float32"),
        Quotas(Quota(bytes_in_flight=1 << 30)),
    )
    service = Service(base, Engine.of(base), Metrics(), quotas)
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go.wait(800)

    service.downloads.submit_for("bob", hold)
    assert begun.wait(800)
    gone = asked_and_left(service)
    assert not service.downloads._waiting
    gc.disable()  # nothing is left for the collector either, which would stop the loop
    try:
        eventually(lambda: gone() is None)
    finally:
        gc.enable()
        go.set()
    service.close()


def test_an_answer_that_was_sent_is_not_kept(checkpoint: Callable[[str], Path]) -> None:
    """What is counted of it later needs no more than its times: no quota knows of it any more."""
    base = BaseExecutor(checkpoint("llama"), numerics="float32")
    service = Service.of(base)
    deferred: list[Callable[[], None]] = []
    service.engine.defer = deferred.append  # type: ignore[method-assign]
    sent: queue.Queue[list[weakref.ref[torch.Tensor]]] = queue.Queue()

    def send(answer: Header, tensors: Any, on_sent: Callable[[], None]) -> None:
        on_sent()
        if answer.operation == Operation.REPLY:
            sent.put([weakref.ref(each) for each in tensors])

    session = TenantSession(service, "alice", send)
    width = base.manifest.groups[0].inputs
    head = Header(Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.float32], 0, 7, 3, width, 1)
    session._protocol.hello_received = True

    def ask() -> None:
        session.answer(Incoming(head, torch.ones(3, width), admitted=session.accept(head)))

    service.engine.loop.call_soon_threadsafe(ask)
    tensors = sent.get(timeout=800)
    assert tensors
    eventually(lambda: any("answered" in repr(each) for each in deferred))
    eventually(lambda: all(each() is None for each in tensors))
    service.close()


def test_a_refused_request_leaves_nothing_for_the_garbage_collector(
    checkpoint: Callable[[str], Path],
) -> None:
    """Who sends many of them would have it stop the executor's loop, again and again."""

    def refuse(header: Header) -> None:
        raise WireError("unknown_group", "there is no such group")

    reader = MessageReader(refuse, masked=False, max_message_bytes=1000)
    service = Service.of(BaseExecutor(checkpoint("llama"), numerics="float32"))
    answered: list[Header] = []
    session = TenantSession(service, "alice", lambda header, *_: answered.append(header))
    head = Header(Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.float32], 0, 7, 1, 4, 1)
    message = b"".join(bytes(each) for each in encode_message(head, [torch.ones(1, 4)]))
    gc.disable()
    try:
        for end in (len(message), 20):  # whole, and in two parts
            left = list[Any]()
            for part in (message[:end], message[end:]):
                if not part:
                    continue
                reader.get_buffer()[: len(part)] = part
                for event in reader.received(len(part)):
                    assert isinstance(event, Incoming)
                    assert event.error is not None
                    left.append(weakref.ref(event.error))
                    session.answer(event)
                    del event
            assert len(left) == 1
            assert left[0]() is None
    finally:
        gc.enable()
    assert [header.operation for header in answered] == [Operation.ERROR] * 2
    service.close()


def test_a_request_that_the_engine_cannot_take_is_over(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the session would read nothing more after some of them."""
    service = Service.of(BaseExecutor(checkpoint("llama"), numerics="float32"))
    answered: list[Header] = []
    session = TenantSession(service, "alice", lambda header, *_: answered.append(header))
    width = service.executor.manifest.groups[0].inputs
    head = Header(Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.float32], 0, 7, 3, width, 1)
    session._protocol.hello_received = True

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(service.engine, "submit", no_thread)
    session.answer(Incoming(head, torch.ones(3, width), admitted=session.accept(head)))
    assert [header.operation for header in answered] == [Operation.ERROR]
    assert session.in_flight == 0
    assert service.quotas.in_flight() == (0, 0)
    service.close()
