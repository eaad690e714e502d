"""Executors that break connections, restart or come back as something else, and sessions that go on."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from channels import error_of
from clocks import only_closing_ends_waits
from conftest import Executor
from forking import in_child, refused
from intercepting_proxy import InterceptingProxy, Message
from parity import add_lora, fixed_result, gradients, token_ids
from raw_peers import SECONDS, eventually
from ring_sessions import (
    MASKINGS,
    ExecutorFactory,
    Sent,
    assert_no_block_repeats,
    captured_requests,
    one_time,
    session_in,
)
from transports import Start
from websockets.exceptions import ConnectionClosedError

import provider
import tenant_sdk
from provider.serve.colocated import ColocatedServer
from provider.serve.tokens import TokenFile
from shared.errors import AuthenticationError, ConnectionLost, ModelMismatch, VerificationError
from shared.wire.header import Direction, Operation
from tenant_sdk.connection import channel as channel_module
from tenant_sdk.connection import websocket_channel
from tenant_sdk.connection.replicas import retrying
from tenant_sdk.connection.replicas.retrying import MAX_REPEATS
from tenant_sdk.connection.websocket_channel import WebsocketChannel
from tenant_sdk.model.remote_weight import RemoteWeight

pytest_plugins = ("ring_fixtures", "transport_fixtures")

Proxy = Callable[[Executor], InterceptingProxy]
QKV = (0, Direction.FORWARD, 0b111)
MASKED = (Operation.PRODUCT, Operation.SEED_EFFECT)


class Breaking:
    """Of a proxy's changes one that ends the connection in place of every so many-th answer."""

    def __init__(self, every: int) -> None:
        self.every, self.answers, self.broken = every, 0, 0

    def __call__(self, request: Message, body: bytes) -> bytes:
        self.answers += 1
        if self.answers % self.every == 0:
            self.broken += 1
            raise ConnectionClosedError(None, None)
        return body


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses take no time."""
    monkeypatch.setattr(retrying, "retry_delay", lambda *_: 0.0)


def rows_of(count: int = 3) -> list[torch.Tensor]:
    return [torch.randn((count, 64), generator=torch.Generator().manual_seed(0))]


def product(session: tenant_sdk.Session, count: int = 3) -> list[torch.Tensor]:
    return session.products.submit(*QKV, rows_of(count)).result()


def assert_only_copies_repeat(sent: list[Sent]) -> int:
    """Rows and seeds are sent again as they were, to whom they were sent; how often.

    No 16 bytes of them, as AES makes them, are ever in another message.
    """
    bodies = Counter((message.url, message.body) for message in sent if message.operation in MASKED)
    assert_no_block_repeats(body for _, body in bodies)
    return sum(bodies.values()) - len(bodies)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("masking", MASKINGS)
def test_gradients_are_bitwise_those_of_an_undisturbed_session(
    masking: str, executors: ExecutorFactory, checkpoint: Callable[[str], Path], proxy: Proxy
) -> None:
    """In every privacy mode, whoever breaks connections."""
    parties = executors("llama")
    with session_in(masking, parties, checkpoint("llama")) as session:
        expected = gradients(add_lora(session.load_model(progress=False)), token_ids())
    middlemen = [proxy(party) for party in parties]
    for middle, every in zip(middlemen, (3, 4, 5), strict=True):
        middle.changes.append(Breaking(every))
    shaky: Any = tuple(middle.executor for middle in middlemen)
    options = {"patience": 60.0, "mask_budget_mib": 0.0}
    with captured_requests() as sent, session_in(masking, shaky, checkpoint("llama"), **options) as session:
        got = gradients(add_lora(session.load_model(progress=False)), token_ids())
        stats = session.stats
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    broken = sum(middle.changes[0].broken for middle in middlemen)  # type: ignore[attr-defined]
    assert broken > 5
    assert stats.reconnections == broken
    assert stats.seconds_reconnecting > 0
    if masking in ("one source", "two sources", "local"):
        assert assert_only_copies_repeat(sent) >= broken


@pytest.mark.usefixtures("at_once")
def test_who_breaks_connections_on_purpose_gets_copies_and_not_for_ever(
    executors: ExecutorFactory, proxy: Proxy
) -> None:
    """The same bytes each time, whatever they hide; then the session gives up, and a new product is new."""
    provider, source, _ = executors("llama")
    middle = proxy(provider)
    with one_time(middle.executor, source, patience=600.0) as session:
        expected = product(session)
        middle.keep = True
        middle.changes.append(Breaking(1))
        with pytest.raises(ConnectionLost, match="with the same request"):
            product(session)
        assert len(middle.requests) == 1 + MAX_REPEATS
        assert len({request.body for request in middle.requests}) == 1
        assert all(map(torch.equal, gone_through(session, middle), expected))
        assert len({request.body for request in middle.requests}) == 2


def gone_through(session: tenant_sdk.Session, middle: InterceptingProxy) -> list[torch.Tensor]:
    middle.changes.clear()
    return product(session)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("kind", ["whole", "pieces"])
def test_a_wrong_answer_is_never_asked_for_again(
    kind: str, executors: ExecutorFactory, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if an earlier attempt at the same piece was lost."""
    provider, source, _ = executors("llama")
    middle = proxy(provider)
    monkeypatch.setattr(websocket_channel, "is_over_network", lambda sock: True)
    with one_time(middle.executor, source, patience=600.0) as session:
        product(session)
        monkeypatch.setattr(WebsocketChannel, "piece_bytes", int(kind == "pieces"))
        middle.keep, answers = True, Counter[str]()

        def lie(request: Message, body: bytes) -> bytes:
            answers["all"] += 1
            if answers["all"] in (1, 3) and kind == "pieces":
                raise ConnectionClosedError(None, None)
            return bytes([body[0] ^ 1]) + body[1:]

        middle.changes.append(lie)
        with pytest.raises(VerificationError):
            product(session, 40)
        asked = len(middle.requests)
        assert asked == (1 if kind == "whole" else 2)
        with pytest.raises(VerificationError):
            product(session)
        assert len(middle.requests) == asked


@pytest.mark.usefixtures("at_once")
def test_pieces_of_which_some_are_lost(
    executors: ExecutorFactory, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, source, _ = executors("llama")
    middle = proxy(provider)
    monkeypatch.setattr(websocket_channel, "is_over_network", lambda sock: True)
    monkeypatch.setattr(WebsocketChannel, "piece_bytes", 0)
    options = {"patience": 60.0, "mask_budget_mib": 0.0}
    with captured_requests() as sent, one_time(middle.executor, source, **options) as session:
        expected = product(session, 200)
        monkeypatch.setattr(WebsocketChannel, "piece_bytes", 1)
        breaking = Breaking(3)
        middle.changes.append(breaking)
        for _ in range(3):
            assert all(map(torch.equal, product(session, 200), expected))
        assert session.stats.reconnections == breaking.broken >= 9
        assert session.stats.verified_rows == 800
    assert assert_only_copies_repeat(sent) >= breaking.broken


@pytest.mark.usefixtures("at_once")
def test_threads_that_share_a_session(
    executors: ExecutorFactory, proxy: Proxy, threads: ThreadPoolExecutor
) -> None:
    """All of them lose what is in flight, one of them connects again, and all go on."""
    provider, source, _ = executors("llama")
    middle, behind = proxy(provider), proxy(source)
    with captured_requests() as sent, one_time(middle.executor, behind.executor, patience=60.0) as session:
        expected = product(session)
        middle.changes.append(Breaking(17))
        behind.changes.append(Breaking(7))

        def work() -> bool:
            return all(all(map(torch.equal, product(session), expected)) for _ in range(30))

        assert all(future.result(SECONDS) for future in [threads.submit(work) for _ in range(4)])
        assert session.stats.reconnections >= 120 // 17
    assert assert_only_copies_repeat(sent) > 0


@pytest.mark.usefixtures("at_once")
def test_downloads_go_on(
    serve: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files and parameters, whose pieces come over several connections."""
    monkeypatch.setattr("tenant_sdk.connection.remote.FETCH_BYTES", 1 << 12)
    executor = serve(checkpoint("llama"))
    with executor.connect() as session:
        expected = session.load_model(progress=False)
    asked = Counter[str]()
    fetch = channel_module.Channel.submit

    def cut_now_and_then(self: Any, header_of: Any, tensors: Any) -> Any:
        asked["all"] += 1
        if asked["all"] % 7 == 0:
            self.close()
        return fetch(self, header_of, tensors)

    with executor.connect(patience=60.0) as session:
        monkeypatch.setattr(channel_module.Channel, "submit", cut_now_and_then)
        model = session.load_model(progress=False)
        assert session.stats.reconnections >= 5
    for name, parameter in expected.named_parameters():
        assert isinstance(parameter, RemoteWeight) or torch.equal(parameter, model.get_parameter(name))


def test_what_is_back_with_another_model_ends_it(
    executors: ExecutorFactory, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = only_closing_ends_waits(monkeypatch)
    provider, source, _ = executors("llama")
    for which in range(2):
        parties = [provider, source]
        middle = proxy(parties[which])
        parties[which] = middle.executor
        with one_time(*parties, patience=600.0, mask_budget_mib=0) as session:
            product(session)
            middle.upstream = executors("qwen2")[0]
            middle.cut()
            with pytest.raises(ModelMismatch, match="serves something else since it is back"):
                product(session)
    assert not waited


def test_a_token_that_is_no_longer_good_ends_it(
    tls_dir: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    from provider.executor.base import BaseExecutor
    from provider.serve.server import Server, server_context
    from provider.session.tenant import Service

    tokens = TokenFile(tmp_path / "tokens.json")
    base, token = BaseExecutor(checkpoint("llama"), numerics="float32"), tokens.add("me")
    server = Server(Service.of(base), context=server_context(tls_dir), tokens=tokens, port=0)
    with Executor(server.url, token, tls_dir / "ca.pem").connect(patience=600.0) as session:
        product(session)
        tokens.remove("me")
        session.executor.connection.channel.close()
        with pytest.raises(AuthenticationError):
            product(session)
    server.drain(SECONDS)


def test_closing_from_another_thread_ends_the_wait(
    executors: ExecutorFactory,
    proxy: Proxy,
    threads: ThreadPoolExecutor,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a thread that wants a product, and of those that ask a mask source."""
    only_closing_ends_waits(monkeypatch)
    provider, source, _ = executors("llama")
    middle, behind = proxy(provider), proxy(source)
    with (
        caplog.at_level(logging.WARNING, "tenant_sdk"),
        one_time(middle.executor, behind.executor, patience=600.0, mask_budget_mib=0) as session,
    ):
        product(session)
        for each in (middle, behind):
            each.cut()
            each.close()
        waiting = [threads.submit(product, session) for _ in range(2)]
        eventually(lambda: caplog.text.count("is unavailable") >= 1)
        assert not any(future.done() for future in waiting)
    for future in waiting:
        assert isinstance(error_of(future), ConnectionLost)
    assert "waiting up to 10 minutes" in caplog.text


def test_a_child_waits_for_nobody(executors: ExecutorFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = only_closing_ends_waits(monkeypatch)
    provider, source, _ = executors("llama")
    with one_time(provider, source, patience=600.0) as session:
        expected = product(session)
        channel = session.executor.connection.channel
        channel._break(ConnectionLost("broken for the test"))

        def tried() -> None:
            refused(lambda: product(session), lambda: session.executor.connection.channel)
            assert not waited

        in_child(tried)
        assert all(map(torch.equal, product(session), expected))


def test_an_executor_of_this_machine_that_restarts(
    everywhere: Start, checkpoint: Callable[[str], Path], threads: ThreadPoolExecutor
) -> None:
    one = everywhere(checkpoint("llama"))
    with one.connect("colocated", patience=60.0) as session:
        expected = product(session)
        one.end()
        waiting = threads.submit(product, session)
        eventually(lambda: session.executor.connection.policy.reminder.logged_at is not None)
        assert not waiting.done()
        again = everywhere(checkpoint("llama"))
        local = ColocatedServer(
            again.service,
            tokens=one.inprocess._tokens,  # type: ignore[arg-type]
            directory=one.directory,
            connections=again.server.connections,
            memory_bytes=1 << 30,
        )
        try:
            assert all(map(torch.equal, waiting.result(SECONDS), expected))
        finally:
            session.close()
            local.close()


def test_an_executor_of_this_process_is_not_waited_for(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = only_closing_ends_waits(monkeypatch)
    with provider.serve_in_process(checkpoint("llama")) as endpoint:
        session = tenant_sdk.connect(endpoint, privacy="plain", patience=600.0)
        fixed_result(session.load_model(progress=False), token_ids())
    with pytest.raises(ConnectionLost):
        product(session)
    assert not waited
    session.close()
