"""Products that are submitted: what may be asked for, and what several in flight at once owe each other."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Executor
from intercepting_proxy import InterceptingProxy
from parity import add_lora, gradients, token_ids
from raw_peers import eventually, metric
from ring_sessions import MASKINGS, ExecutorFactory, captured_requests, one_time, session_in
from test_tampering import put

from shared.errors import ConnectionLost, RequestRefused, VerificationError
from shared.wire.header import Direction, RequestClass
from tenant_sdk.connection import channel as channels

pytest_plugins = ("ring_fixtures",)

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
WRONG: dict[str, tuple[Direction, int, list[tuple[int, ...]]]] = {
    "too narrow": (FORWARD, 0b111, [(2, 63)]),
    "two tensors": (FORWARD, 0b111, [(2, 64), (2, 64)]),
    "no tensor": (FORWARD, 0b111, []),
    "no rows": (FORWARD, 0b111, [(0, 64)]),
    "three axes": (FORWARD, 0b111, [(1, 2, 64)]),
    "a tensor too few": (BACKWARD, 0b111, [(2, 64), (2, 32)]),
    "tensors of different rows": (BACKWARD, 0b111, [(2, 64), (3, 32), (2, 32)]),
    "tensors of others": (BACKWARD, 0b101, [(2, 32), (2, 64)]),
}


@pytest.mark.parametrize("masking", MASKINGS)
def test_rows_of_other_shapes_are_refused_before_anything_is_sent(
    masking: str, executors: ExecutorFactory, checkpoint: Callable[[str], Path]
) -> None:
    """Or the executor would take the next request's bytes for theirs."""
    x = torch.ones((2, 64))
    with session_in(masking, executors("llama"), checkpoint("llama"), mask_budget_mib=0) as session:
        expected = session.products.submit(0, FORWARD, 0b111, [x]).result()
        session.products.submit(0, BACKWARD, 0b111, [x, x[:, :32], x[:, :32]]).result()
        session.products.submit(0, BACKWARD, 0b101, [x, x[:, :32]]).result()
        with captured_requests() as sent:
            for direction, members, shapes in WRONG.values():
                with pytest.raises(ValueError, match="widths"):
                    session.products.submit(0, direction, members, [torch.ones(shape) for shape in shapes])
        assert not sent
        for got, right in zip(
            session.products.submit(0, FORWARD, 0b111, [x]).result(), expected, strict=True
        ):
            torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-3)


def test_after_a_wrong_answer_nothing_that_was_in_flight_is_used(
    executors: ExecutorFactory, proxy: Callable[[Executor], InterceptingProxy]
) -> None:
    provider, source, _ = executors("llama")
    middle = proxy(provider)
    with one_time(middle.executor, source) as session:
        rows = torch.ones((3, 64))
        session.products.submit(0, FORWARD, 1, [rows]).result()
        middle.changes.append(put((0, 0), lambda value: value + 1))
        first = session.products.submit(0, FORWARD, 1, [rows])
        with pytest.raises(VerificationError):
            first.result()
        middle.changes.clear()
        with pytest.raises(VerificationError):
            first.result()  # the same again
        with pytest.raises(VerificationError):
            session.products.submit(0, FORWARD, 1, [rows])


def test_products_in_flight_when_another_is_found_wrong(
    executors: ExecutorFactory, proxy: Callable[[Executor], InterceptingProxy]
) -> None:
    provider, source, _ = executors("llama")
    middle = proxy(provider)
    with one_time(middle.executor, source) as session:
        rows = torch.ones((3, 64))
        session.products.submit(0, FORWARD, 1, [rows]).result()
        wrong = [True]
        lie = put((0, 0), lambda value: value + 1)
        middle.changes.append(lambda message, body: lie(message, body) if wrong and wrong.pop() else body)
        first, second = (session.products.submit(0, FORWARD, 1, [rows]) for _ in range(2))
        with pytest.raises(VerificationError):
            first.result()
        with pytest.raises(VerificationError):
            second.result()


def test_interrupted_while_it_sends(llama: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is interrupted leaves nobody waiting for ever."""
    rows = torch.ones((1, 64))
    with llama.connect() as session:
        expected = session.products.submit(0, FORWARD, 1, [rows]).result()
        with monkeypatch.context() as patch:
            push, interrupt = channels.Channel._guarded, [True]

            def interrupted(self: Any, lead: Any) -> None:
                if interrupt and interrupt.pop():
                    raise KeyboardInterrupt
                push(self, lead)

            patch.setattr(channels.Channel, "_guarded", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.products.submit(0, FORWARD, 1, [rows])
            # The other request's row may be in the same batch, which changes the last bits.
            again = session.products.submit(0, FORWARD, 1, [rows]).result()
            torch.testing.assert_close(again[0], expected[0])


@pytest.mark.parametrize("broken", [False, True])
def test_an_error_keeps_no_rows_in_memory(llama: Executor, broken: bool) -> None:
    """Neither in a cycle nor in the channel that it broke."""
    with llama.connect() as session:
        session.products.submit(0, FORWARD, 1, [torch.ones((1, 64))]).result()
        gone: list[Any] = []

        def fail() -> None:
            rows = torch.full((2, 64), torch.nan)  # the executor refuses them
            gone.append(weakref.ref(rows))
            pending = session.products.submit(0, FORWARD, 1, [rows])
            if broken:
                session.executor.connection.channel.close()
            pending.result()

        gc.collect()
        gc.disable()
        try:
            with pytest.raises((RequestRefused, ConnectionLost)) as caught:
                fail()
            del caught
            assert gone[0]() is None
        finally:
            gc.enable()


def test_training_is_never_taken_for_a_prompt(executors: ExecutorFactory) -> None:
    """Also below the first adapter, where nothing needs a gradient."""
    provider = executors("llama")[0]
    name = "symbiosis_reply_seconds_count"

    def served() -> dict[str, float]:
        return {c.name: metric(provider, name, request_class=c.name.lower()) for c in RequestClass if c}

    with provider.connect() as session:
        model: Any = session.load_model(progress=False)
        tuned = add_lora(model)
        before = served()
        gradients(tuned, token_ids())
        eventually(lambda: served()["FINETUNING"] - before["FINETUNING"] == session.stats.requests)
        assert all(served()[c] == before[c] for c in ("DECODE", "PREFILL"))
        with torch.no_grad():
            tuned(token_ids(1, 40))
        eventually(lambda: served()["PREFILL"] > before["PREFILL"])
        with torch.no_grad():
            tuned(token_ids(8, 1))
        eventually(lambda: served()["DECODE"] > before["DECODE"])
