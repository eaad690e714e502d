"""What the SDK sends again after a refusal, and how it counts its pauses; nothing here sleeps.

``tests/unit/test_retrying.py`` has how long it waits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from channels import ask, channel_to
from clocks import SimulatedClock
from raw_peers import ERROR, Peer
from ring_sessions import ExecutorFactory, captured_requests, one_time, products, seeds

from shared.errors import RequestRefused
from shared.wire.header import Direction, Operation
from tenant_sdk.connection import channel as channel_module
from tenant_sdk.connection.replicas import reconnecting
from tenant_sdk.connection.replicas.reconnecting import (
    ConnectionOptions,
    ReconnectingConnection,
    single_replica,
)
from tenant_sdk.connection.stats import Stats

pytest_plugins = ("ring_fixtures",)


def test_a_negative_time_from_an_executor_is_none(tls_dir: Path) -> None:
    """For whoever sleeps for as long as an error says."""

    def script(peer: Peer) -> None:
        fields, _ = peer.receive()
        refusal = {"code": "overloaded", "message": "x", "retry_after": -1.0}
        peer.control(ERROR, refusal, fields.request_id)
        peer.at_end()

    with channel_to(tls_dir, script) as channel, pytest.raises(RequestRefused) as caught:
        ask(channel)
    assert caught.value.retry_after is None


class Refusing:
    """Of a channel what a connection sees: it refuses three times, then it answers."""

    timeout, peer, key_exchange, broken, sent = 60.0, "wss://executor", "", False, 0

    def ask(self, _: Any) -> Any:
        self.sent += 1
        return self

    def wait(self, pending: object) -> Any:
        if self.sent <= 3:
            raise RequestRefused("overloaded", "wait", retry_after=0.06)
        return self


def test_pauses_are_counted_and_then_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnecting, "_hello", lambda channel: "model")
    channel: Any = Refusing()
    clock, stats = SimulatedClock(), Stats()
    connection = ReconnectingConnection(
        single_replica(lambda: channel), ConnectionOptions(stats=stats, clock=clock)
    )
    connection.policy.uniform = lambda: 0.5
    assert connection.answer(channel, channel.ask) is channel
    assert clock.waited == pytest.approx([0.075, 0.125, 0.25])
    assert (stats.refusals, stats.seconds_throttled) == (3, pytest.approx(0.45))


def test_what_is_sent_again_is_the_same_bytes_to_the_same_executor(
    executors: ExecutorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masked rows and a source's seed; a mask that served them serves nothing else."""
    provider, source, _ = executors("llama")
    refused: set[bytes] = set()
    wait = channel_module.Channel.wait

    def first_refused(self: Any, pending: Any) -> Any:
        answer = wait(self, pending)
        if answer.header.operation == Operation.REPLY and self.peer not in refused and armed:
            refused.add(self.peer)
            raise RequestRefused("overloaded", "wait", retry_after=1e-9)
        return answer

    armed = False
    monkeypatch.setattr(channel_module.Channel, "wait", first_refused)
    with one_time(provider, source, mask_budget_mib=0.0) as session:
        rows = torch.randn((2, 64), generator=torch.Generator().manual_seed(0))
        expected = session.products.submit(0, Direction.FORWARD, 1, [rows]).result()[0]
        armed = True
        with captured_requests() as sent:
            got = session.products.submit(0, Direction.FORWARD, 1, [rows]).result()[0]
        assert session.stats.refusals == 2
    assert torch.equal(got, expected)
    for bodies, executor in ((products(sent), provider), (seeds(sent), source)):
        first, second = bodies
        assert first == second
        assert {message.url for message in sent if message.body == first} == {executor.url}
