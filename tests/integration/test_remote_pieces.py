"""Large requests over TLS travel in pieces: the same bits, and one piece's failure is the product's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from channels import error_of
from conftest import RING, Executor
from intercepting_proxy import InterceptingProxy, Message
from lanes import HeldLane, service_on
from raw_peers import SECONDS, eventually, metric
from ring_sessions import MASKINGS, ExecutorFactory, captured_requests, one_time, products, session_in
from test_tampering import put
from transports import TRANSPORTS, Start

from provider.executor.base import BaseExecutor
from provider.session.quota import Quota, Quotas
from provider.session.tenant import Service
from shared.errors import ConnectionLost, NonFiniteError, VerificationError
from shared.ring.mask_stream import MaskStream
from shared.wire.header import Direction, Operation, RequestClass, member_indices
from tenant_sdk import Session
from tenant_sdk.connection import websocket_channel
from tenant_sdk.connection.channel import Channel
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.websocket_channel import WebsocketChannel
from tenant_sdk.products.mask_sources import ExecutorSource

pytest_plugins = ("ring_fixtures", "transport_fixtures")

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
ROWS = 100
PIECES = 7  # of 16 rows, and the last of 4
KEYS = [  # group 0 is q, k and v; group 3 has one member, whose width is another
    ProductKey(0, FORWARD, 0b111),
    ProductKey(0, FORWARD, 0b101),
    ProductKey(0, BACKWARD, 0b111),
    ProductKey(0, BACKWARD, 0b010),
    ProductKey(3, FORWARD, 1),
    ProductKey(3, BACKWARD, 1),
]
QKV = KEYS[0]

Cut = Callable[[bool], None]


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Cut:
    """From now on requests are cut into the smallest pieces, whatever carries them; or not at all."""

    def switch(on: bool) -> None:
        for channel in (Channel, WebsocketChannel):
            monkeypatch.setattr(channel, "piece_bytes", int(on))

    monkeypatch.setattr(websocket_channel, "is_over_network", lambda sock: True)  # though it is this machine
    switch(False)
    return switch


def test_on_one_machine_nothing_is_cut(executors: ExecutorFactory) -> None:
    with executors("llama")[0].connect() as session:
        assert session.executor.connection.channel.piece_bytes == 0


def floats(session: Session, key: ProductKey, seed: int = 0) -> list[torch.Tensor]:
    """Rows to ask for."""
    shape = session.executor.shapes[key.group]
    widths = [shape.inputs]
    if key.direction == BACKWARD:
        widths = [shape.outputs[i] for i in member_indices(key.member_bits)]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((ROWS, width), generator=generator) for width in widths]


def product(session: Session, key: ProductKey, seed: int = 0) -> list[torch.Tensor]:
    return session.products.submit(*key.product, floats(session, key, seed)).result()


def same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


@pytest.mark.parametrize(
    ("masking", "pad_rows"),
    [*((masking, 0) for masking in MASKINGS), *((masking, 32) for masking in MASKINGS[2:])],
)  # one-time masks alone hide rows of zeros
def test_pieces_give_what_a_whole_request_gives(
    masking: str,
    pad_rows: int,
    executors: ExecutorFactory,
    checkpoint: Callable[[str], Path],
    cut: Cut,
) -> None:
    with session_in(masking, executors("llama"), checkpoint("llama"), pad_rows=pad_rows) as session:
        for key in KEYS:
            cut(False)
            whole = product(session, key)
            before = session.stats
            cut(True)
            assert same(product(session, key), whole)
            after = session.stats
            assert after.requests - before.requests == (8 if pad_rows else PIECES)
            assert after.rows - before.rows == (128 if pad_rows else ROWS)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pieces_over_every_transport(
    transport: str, everywhere: Start, checkpoint: Callable[[str], Path], cut: Cut
) -> None:
    """Cut or not: the answers of the executor itself, and with masks those of a whole request over TLS."""
    folder = checkpoint("llama")
    here = everywhere(folder, numerics=RING)
    masked: dict[str, Any] = {"privacy": "one-time", "mask_sources": [f"local:{folder}"]}
    base = BaseExecutor(folder, numerics=RING)
    with here.connect("tls", **masked) as tls, here.connect(transport, **masked) as session:
        for key in KEYS:
            integers = MaskStream(bytes(32)).draw(ROWS, sum(b.shape[1] for b in floats(session, key)))
            cut(False)
            expected = product(tls, key)
            for on in (False, True):
                cut(on)
                before = session.stats.requests
                assert same(product(session, key), expected)
                assert session.stats.requests - before == (PIECES if on else 1)
                bare = session.executor.submit(Operation.PRODUCT, key, [integers])
                assert same(bare.result(), base.compute(*key.product, [integers]))


def test_pieces_are_sent_before_anybody_waits(
    serve: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
    cut: Cut,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(websocket_channel, "KEEPALIVE_SECONDS", 3600.0)  # pings would send them in the end
    executor = serve(checkpoint("llama"), numerics=RING)

    def answered() -> float:
        return metric(executor, "symbiosis_rows_total", operation="product", direction="forward")

    with executor.connect() as session:
        expected = product(session, QKV)
        eventually(lambda: answered() == ROWS)
        cut(True)
        pending = session.products.submit(*QKV.product, floats(session, QKV))
        eventually(lambda: answered() == 2 * ROWS)
        assert session.stats.rows == ROWS  # no answer has been read
        assert same(pending.result(), expected)


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("number", range(PIECES))
def test_a_wrong_answer_in_any_piece(
    number: int,
    direction: Direction,
    executors: ExecutorFactory,
    proxy: Callable[[Executor], InterceptingProxy],
    cut: Cut,
) -> None:
    provider, source, _ = executors("llama")
    middle = proxy(provider)
    key = ProductKey(0, direction, 0b111)
    with one_time(middle.executor, source, mask_budget_mib=0) as session:
        product(session, key)
        cut(True)
        product(session, key)  # which the proxy leaves as it is
        verified, passing = session.stats.verified_rows, count()

        def lie(message: Message, body: bytes) -> bytes:
            if next(passing) != number:
                return body
            return put((-1, -1), lambda value: value ^ 1)(message, body)

        middle.changes.append(lie)
        pending = session.products.submit(*key.product, floats(session, key))
        for _ in range(2):
            with pytest.raises(VerificationError):
                pending.result()
        assert session.stats.verified_rows == verified
        with pytest.raises(VerificationError):
            product(session, key)


@pytest.mark.parametrize("noticed", [False, True])
def test_a_connection_that_dies_between_two_pieces(
    noticed: bool,
    executors: ExecutorFactory,
    proxy: Callable[[Executor], InterceptingProxy],
    cut: Cut,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This product is lost, and nothing more of it is sent; the next goes over a new connection."""
    provider, source, _ = executors("llama")
    middle = proxy(provider)
    flush, flushes = Channel.flush, count(1)
    with captured_requests() as sent, one_time(middle.executor, source, mask_budget_mib=0) as session:
        rows = [torch.ones((ROWS, 64))]  # all the same, so that they differ by their masks alone
        expected = session.products.submit(*QKV.product, rows).result()
        first = session.executor.connection.channel

        def cut_off(self: Channel) -> None:
            flush(self)
            if self is first and next(flushes) == 3:
                middle.cut()
                if noticed:
                    first.close()

        cut(True)
        monkeypatch.setattr(Channel, "flush", cut_off)
        with pytest.raises(ConnectionLost):
            session.products.submit(*QKV.product, rows).result()
        assert same(session.products.submit(*QKV.product, rows).result(), expected)
        assert session.executor.connection.channel is not first
    hidden = [body[at : at + 256] for body in products(sent) for at in range(0, len(body), 256)]
    assert len(hidden) > 2 * ROWS
    assert len(set(hidden)) == len(hidden)


@pytest.mark.parametrize("limit", [7, 16, 33])
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_effects_in_other_parts_than_pieces(
    direction: Direction,
    limit: int,
    executors: ExecutorFactory,
    cut: Cut,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = ProductKey(0, direction, 0b111)
    with one_time(*executors("llama"), mask_budget_mib=0) as session:
        expected = product(session, key)
        cut(True)
        monkeypatch.setattr(ExecutorSource, "max_rows", lambda *_: limit)
        before = session.stats.effect_requests
        assert same(product(session, key), expected)
        sizes = [piece.stop - piece.start for piece in session.executor.pieces(key, ROWS)]
        assert session.stats.effect_requests - before == 2 * sum(-(-size // limit) for size in sizes)


def test_effects_from_a_store_that_was_used_in_part(executors: ExecutorFactory, cut: Cut) -> None:
    with one_time(*executors("llama"), mask_budget_mib=0) as session:
        expected = product(session, QKV)
        masks = session.products._masks  # type: ignore[attr-defined]
        with masks._changed:
            for rows in (23, 1, 40, 39):
                masks._request_effects(QKV, rows, RequestClass.FINETUNING)
        session.products.submit(*QKV.product, [torch.ones((3, 64))]).result()
        cut(True)
        before = session.stats.requests
        assert same(product(session, QKV), expected)
        assert session.stats.requests - before == PIECES
        assert not masks._store.stock[QKV]


def test_threads_that_send_pieces_at_once(
    executors: ExecutorFactory, cut: Cut, threads: ThreadPoolExecutor
) -> None:
    provider, source, _ = executors("llama")
    with one_time(provider, source, mask_budget_mib=0) as session:
        expected = {key: product(session, key) for key in KEYS}
        cut(True)
        together = threading.Barrier(2)

        def ask(keys: list[ProductKey]) -> None:
            for key in keys:
                together.wait(SECONDS)
                assert same(product(session, key), expected[key])

        for future in [threads.submit(ask, keys) for keys in (KEYS, KEYS[::-1])]:
            assert error_of(future) is None


def test_pieces_over_the_quota_are_sent_again_as_they_were(
    everywhere: Start, checkpoint: Callable[[str], Path], cut: Cut
) -> None:
    """Each of them alone: with the same mask, and no other."""
    lanes: list[HeldLane] = []

    def narrow(base: BaseExecutor) -> Service:
        service, lane = service_on(base, HeldLane, quotas=Quotas(Quota(rows_in_flight=1)))
        lanes.append(lane)
        return service

    folder = checkpoint("llama")
    here = everywhere(folder, service=narrow, numerics=RING)
    (lane,) = lanes
    with here.connect("tls", privacy="one-time", mask_sources=[f"local:{folder}"]) as session:
        cut(True)
        with captured_requests() as sent:
            pending = session.products.submit(*QKV.product, floats(session, QKV))
            eventually(lambda: here.metric("symbiosis_refused_total", code="overloaded") == PIECES - 1)
            lane.go.set()
            got = pending.result()
        assert session.stats.refusals >= PIECES - 1
        assert session.stats.requests == PIECES
        bodies = products(sent)
        assert len(bodies) == PIECES + session.stats.refusals
        assert len(set(bodies)) == PIECES
        cut(False)
        assert same(got, product(session, QKV))


def test_nothing_is_sent_of_rows_that_the_ring_cannot_hold(executors: ExecutorFactory, cut: Cut) -> None:
    with executors("llama")[0].connect() as session:
        product(session, QKV)
        cut(True)
        rows = floats(session, QKV)
        rows[0][-1, 0] = torch.inf
        with captured_requests() as sent, pytest.raises(NonFiniteError):
            session.products.submit(*QKV.product, rows)
        assert not sent


def test_rows_of_unusual_size_are_cut_like_others(executors: ExecutorFactory, cut: Cut) -> None:
    """They are hidden before anything is sent, because they might have been too large."""
    with one_time(*executors("llama")[:2], mask_budget_mib=0) as session:
        rows = floats(session, QKV)
        rows[0][-1, 0] = 1e31
        expected = session.products.submit(*QKV.product, rows).result()
        cut(True)
        before = session.stats
        assert same(session.products.submit(*QKV.product, rows).result(), expected)
        assert session.stats.requests - before.requests == PIECES
        assert session.stats.verified_rows - before.verified_rows == ROWS
