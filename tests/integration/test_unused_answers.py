"""Which bytes of an answer may be wrong without an error: those that nobody uses, and no others.

Fingerprints are made with the digits of a challenge for each plane, and every row of the executors' answers
holds both planes; of each row one is used. Effects that were fetched ahead are used by a later request,
or by none.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RING, Executor
from intercepting_proxy import InterceptingProxy, Message
from parity import add_lora, fixed_result, gradients, token_ids
from raw_peers import SECONDS
from ring_sessions import ExecutorFactory, Executors, one_time
from torch import nn

import tenant_sdk
from shared.errors import VerificationError
from shared.wire.header import RINGS

pytest_plugins = ("ring_fixtures",)

Proxy = Callable[[Executor], InterceptingProxy]
PLANES = RINGS[RING]
FINGERPRINT_ROWS = 4 * PLANES  # a digit of each plane's challenge


def used(message: Message, body: bytes) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Of an answer's integers, [rows, columns], those that something depends on."""
    rows = message.fields.rows
    columns = len(body) // 4 // rows
    if rows != FINGERPRINT_ROWS:
        return np.ones((rows, columns), bool)
    plane_of_column = np.arange(columns) // (columns // PLANES)
    return np.arange(rows)[:, None] % PLANES == plane_of_column


class OneByte:
    """Flips bits of one byte in one of the answers, among the integers that are used."""

    def __init__(self, number: int, seed: int) -> None:
        self._left, self._draw = number, random.Random(seed)

    def __call__(self, message: Message, body: bytes) -> bytes:
        self._left -= 1
        if self._left != -1:
            return body
        places = np.flatnonzero(used(message, body))
        at = 4 * int(self._draw.choice(places)) + self._draw.randrange(4)
        changed = bytearray(body)
        changed[at] ^= self._draw.randrange(1, 256)
        return bytes(changed)


def session_of(
    middle: InterceptingProxy, who: str, executors: Executors, **options: Any
) -> tuple[tenant_sdk.Session, nn.Module]:
    parties = list(executors[:2])
    parties[who == "source"] = middle.executor
    session = one_time(*parties, **({"mask_budget_mib": 0} | options))
    return session, add_lora(session.load_model(progress=False))


@pytest.mark.parametrize("who", ["provider", "source"])
def test_every_byte_that_is_used_is_checked(who: str, executors: ExecutorFactory, proxy: Proxy) -> None:
    """In answers of a training step: of fingerprints, of their trials, and of the model's own."""
    parties = executors("llama")
    middle = proxy(parties[who == "source"])
    answers: list[Message] = []

    def note(message: Message, body: bytes) -> bytes:
        answers.append(message)
        return body

    middle.changes.append(note)
    session, model = session_of(middle, who, parties)
    with session:
        gradients(model, token_ids())
    assert {message.fields.rows for message in answers} == {FINGERPRINT_ROWS, 40, 18}
    kinds: dict[tuple[int, int], list[int]] = {}
    for number, message in enumerate(answers):
        kinds.setdefault((message.fields.rows, message.fields.direction), []).append(number)
    assert len(kinds) == 3 * 2
    draw = random.Random(0)
    for number in [number for numbers in kinds.values() for number in draw.sample(numbers, 2)]:
        middle.changes[:] = [OneByte(number, seed=number)]
        session, model = session_of(middle, who, parties)
        with session, pytest.raises(VerificationError):
            gradients(model, token_ids())


@pytest.mark.parametrize("who", ["provider", "source"])
@pytest.mark.skipif(PLANES < 2, reason="there is no other plane")
def test_the_other_plane_of_a_fingerprint_is_used_by_nobody(
    who: str, executors: ExecutorFactory, proxy: Proxy
) -> None:
    """All of it wrong: no error, and the same result and gradients, bit for bit."""
    parties = executors("llama")
    middle = proxy(parties[who == "source"])
    noise = np.random.default_rng(0)
    changed = 0

    def change(message: Message, body: bytes) -> bytes:
        nonlocal changed
        numbers = np.frombuffer(bytearray(body), np.int32).reshape(message.fields.rows, -1)
        unused = ~used(message, body)
        numbers[unused] = noise.integers(-(2**31), 2**31, int(unused.sum()))
        changed += int(unused.sum())
        return numbers.tobytes()

    results = []
    for changes in ([], [change]):
        middle.changes[:] = changes
        session, model = session_of(middle, who, parties)
        with session:
            results.append({"": fixed_result(model, token_ids()), **gradients(model, token_ids())})
    assert changed
    honest, got = results
    assert all(torch.equal(got[name], tensor) for name, tensor in honest.items())


def test_an_effect_fetched_ahead_is_checked_when_it_is_used(executors: ExecutorFactory, proxy: Proxy) -> None:
    """And not before: what no request comes to need is thrown away unseen."""
    parties = executors("llama")
    middle = proxy(parties[1])
    session, model = session_of(middle, "source", parties)
    with session:
        honest = fixed_result(model, token_ids())
        assert torch.equal(fixed_result(model, token_ids()), honest)
        changed = []

        def change(message: Message, body: bytes) -> bytes:
            changed.append(message)
            return bytes([body[0] ^ 1]) + body[1:]

        middle.changes.append(change)
        session.products.fill(1 << 24, SECONDS)
        middle.changes.clear()
        assert changed
        with pytest.raises(VerificationError):
            fixed_result(model, token_ids())
