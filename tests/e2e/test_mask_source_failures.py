"""Providers and mask sources that are slow, stall or die, and sessions that go on afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RING, Executor
from intercepting_proxy import InterceptingProxy
from parity import add_lora, fixed_result, gradients, loss_of, token_ids
from raw_peers import SECONDS, eventually
from ring_sessions import (
    ExecutorFactory,
    assert_no_block_repeats,
    captured_requests,
    one_time,
    products,
    seeds,
)
from torch import nn

from shared.errors import ConnectError, ConnectionLost, RequestTimeout
from shared.wire.header import Direction, Operation
from tenant_sdk.connection.channel import Channel
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.connection.replicas.reconnecting import single_replica

pytest_plugins = ("ring_fixtures",)

Proxy = Callable[[Executor], InterceptingProxy]
GONE = (ConnectionLost, ConnectError)  # in the middle of a request, or when the next one connects again


def second_block(model: nn.Module) -> nn.Module:
    """Where a step is half done, in either direction."""
    return model.get_submodule("base_model.model.model.layers.1")


def assert_a_stopped_process_is_a_timeout(provider: Executor, source: Executor) -> None:
    """Its machine still answers, so connections open and nothing comes; later it goes on as before."""
    assert source.process is not None
    with one_time(provider, source, mask_budget_mib=0, timeout=15.0) as session:
        model = session.load_model(progress=False)
        expected = fixed_result(model, token_ids())
        source.process.send_signal(signal.SIGSTOP)
        with pytest.raises(RequestTimeout):
            fixed_result(model, token_ids())
        with pytest.raises((RequestTimeout, ConnectError)):
            fixed_result(model, token_ids())
        source.process.send_signal(signal.SIGCONT)
        assert torch.equal(fixed_result(model, token_ids()), expected)


def test_a_session_goes_on_after_its_executors_were_killed(
    serve_process: Callable[..., Executor],
    executors: ExecutorFactory,
    checkpoint: Callable[[str], Path],
) -> None:
    """One process is the mask source of one session and the provider of another. It is killed when both
    are in the middle of a step, and started again on its port; both do the step again, under new masks."""
    folder, lasting = checkpoint("llama"), executors("llama")[0]
    victim = serve_process(folder, "--numerics", RING)
    assert_a_stopped_process_is_a_timeout(lasting, victim)
    options = {"mask_budget_mib": 0, "timeout": 20.0}
    with (
        captured_requests() as sent,
        one_time(lasting, victim, **options) as one,
        one_time(victim, lasting, **options) as other,
    ):
        models = [add_lora(session.load_model(progress=False)) for session in (one, other)]
        before = [gradients(model, token_ids()) for model in models]

        def kill(*_: Any) -> None:
            assert victim.process is not None
            victim.process.send_signal(signal.SIGKILL)
            victim.process.wait()

        def fail(model: nn.Module, meanwhile: Callable[..., None]) -> None:
            hook = second_block(model).register_forward_pre_hook(meanwhile)
            with pytest.raises(GONE):  # and not that of the timeout
                fixed_result(model, token_ids())
            hook.remove()

        fail(models[0], lambda *_: fail(models[1], kill))
        for model in models:  # it stays an error, and none of those that wait for ever
            with pytest.raises(ConnectError, match="is the executor running"):
                fixed_result(model, token_ids())
        port = victim.url.rpartition(":")[2]
        serve_process(folder, "--numerics", RING, "--port", port)
        for model, gradient in zip(models, before, strict=True):
            again = gradients(model, token_ids())
            assert all(torch.equal(again[name], gradient[name]) for name in gradient)
    assert_no_block_repeats(products(sent) + seeds(sent))


@pytest.mark.parametrize("budget", [0.0, 64.0])
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
@pytest.mark.parametrize("who", ["provider", "source"])
def test_a_connection_that_is_cut_in_the_middle_of_a_step(
    who: str, direction: Direction, budget: float, executors: ExecutorFactory, proxy: Proxy
) -> None:
    """The step fails, or does not need what was lost, because effects were there; the next one goes on."""
    parties = list(executors("llama")[:2])
    middle = proxy(parties[who == "source"])
    parties[who == "source"] = middle.executor
    with captured_requests() as sent, one_time(*parties, mask_budget_mib=budget) as session:
        model = add_lora(session.load_model(progress=False))
        expected = gradients(model, token_ids())
        for _ in range(2):
            if direction == Direction.FORWARD:
                hook: Any = second_block(model).register_forward_pre_hook(lambda *_: middle.cut())
            else:
                hook = second_block(model).register_full_backward_pre_hook(lambda *_: middle.cut())
            model.zero_grad()
            failed: Exception | None = None
            try:
                loss_of(model, token_ids()).backward()
            except GONE as error:
                failed = error
            hook.remove()
            if failed is None:
                assert (who, budget) == ("source", 64.0)
            else:
                assert middle.executor.url.removeprefix("wss://") in str(failed)
            try:
                again = gradients(model, token_ids())
            except GONE:  # only now was anything asked for over the connection that is gone
                assert failed is None
                again = gradients(model, token_ids())
            assert all(torch.equal(again[name], expected[name]) for name in expected)
    assert_no_block_repeats(products(sent) + seeds(sent))


# -- slow -----------------------------------------------------------------------------------------


def test_a_slow_source_is_waited_for(
    executors: ExecutorFactory, proxy: Proxy, threads: ThreadPoolExecutor
) -> None:
    provider, source, _ = executors("llama")
    behind, before = proxy(source), proxy(provider)
    with one_time(before.executor, behind.executor, mask_budget_mib=0, timeout=SECONDS) as session:
        model = session.load_model(progress=False)
        expected = fixed_result(model, token_ids())
        behind.gate.clear()
        before.product_requested.clear()
        result = threads.submit(fixed_result, model, token_ids())
        assert before.product_requested.wait(SECONDS)  # the provider is asked meanwhile
        assert behind.product_requested.wait(SECONDS)
        assert not result.done()
        behind.gate.set()
        assert torch.equal(result.result(SECONDS), expected)
        assert session.stats.seconds_waiting_for_effects > 0


@pytest.mark.parametrize("budget", [0.0, 64.0])
def test_a_source_that_stalls_is_a_timeout_that_names_it(
    budget: float, executors: ExecutorFactory, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if orders for later are in front of what is needed now."""
    timeouts = list[str]()
    no_progress = Channel._no_progress

    def counted(channel: Channel) -> RequestTimeout:
        timeouts.append(channel.peer)
        return no_progress(channel)

    monkeypatch.setattr(Channel, "_no_progress", counted)
    provider, source, _ = executors("llama")
    middle = proxy(source)
    with one_time(provider, middle.executor, mask_budget_mib=budget, timeout=15.0) as session:
        model = session.load_model(progress=False)
        fixed_result(model, token_ids())
        middle.gate.clear()

        def go_on() -> None:
            for seed in range(50):
                fixed_result(model, token_ids(3, 30, seed=seed))

        with pytest.raises(RequestTimeout, match="made no progress") as caught:
            go_on()
        assert middle.executor.url in str(caught.value)
        # One of what was in flight, and one of what is needed.
        assert timeouts in ([middle.executor.url], [middle.executor.url] * 2)
        middle.gate.set()


# -- the end --------------------------------------------------------------------------------------


def test_closing_while_effects_are_in_flight(
    executors: ExecutorFactory, proxy: Proxy, threads: ThreadPoolExecutor
) -> None:
    """Whoever waits gets an error, close() returns, and soon no thread of the session is left."""
    provider, source, _ = executors("llama")
    middle = proxy(source)
    with one_time(provider, middle.executor, timeout=SECONDS) as session:
        model = session.load_model(progress=False)
        for _ in range(3):
            fixed_result(model, token_ids(1, 1))
        middle.gate.clear()
        waiting = threads.submit(fixed_result, model, token_ids(4, 100))
        eventually(lambda: middle.held > 0)
        threads.submit(session.close).result(SECONDS)
    with pytest.raises(ConnectionLost):
        waiting.result(SECONDS)
    # close() does not wait for them: one may be opening a connection, which the other side can make slow.
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("symbiosis-mask-source")])
    with pytest.raises(ConnectionLost, match="closed"):
        fixed_result(model, token_ids())


def test_closing_while_a_connection_is_opened_again(
    executors: ExecutorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would ever close the new one."""
    with executors("llama")[0].connect() as session:
        remote: RemoteExecutor = session.executor
        opened: list[Channel] = []
        ((name, open_channel),) = remote.connection._find().items()

        def open_slowly() -> Channel:
            opened.append(open_channel())
            threads.submit(remote.close).result(SECONDS)
            return opened[0]

        monkeypatch.setattr(remote.connection, "_find", single_replica(open_slowly, name))
        remote.connection.channel.close()
        with ThreadPoolExecutor(1) as threads, pytest.raises(ConnectionLost):
            remote.submit(
                Operation.PRODUCT, ProductKey(0, Direction.FORWARD, 1), [torch.ones((1, 64))]
            ).result()
    assert opened[0].broken
