"""What a provider can see of one-time masked rows: uniform bytes, whatever the rows are.

Requests are taken where they leave the tenant for TLS. The bytes come from the operating system's
entropy, as they must, so a test of them fails by chance now and then. Every statistic is held to six
standard deviations (of the normal distribution, or what is as seldom of the chi-square distribution): one
in 10^9 each. There are fewer than 1,600 of them here, so one run of this file in 600,000 fails by chance,
while a byte value that occurs by a seventh too often among 2.56 million would be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Executor
from intercepting_proxy import InterceptingProxy
from parity import add_lora, gradients, token_ids
from ring_sessions import ExecutorFactory, captured_requests, one_time, products, seeds

from shared.errors import NonFiniteError
from shared.wire.header import Direction, Operation

pytest_plugins = ("ring_fixtures",)

ROWS, WIDTH = 40_000, 64  # of int32: 10.24 million bytes
SIGMAS = 6.0


def chi_square_limit() -> float:
    """What chi-square (255) exceeds as seldom as a normal variable SIGMAS (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * 255)
    return 255 * (1 - spread + SIGMAS * spread**0.5) ** 3


def chi_squares(data: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of each column of bytes against the uniform distribution."""
    counts = np.stack([np.bincount(column, minlength=256) for column in np.ascontiguousarray(data.T)])
    expected = len(data) / 256
    return ((counts - expected) ** 2 / expected).sum(1)


def activations(kind: str) -> torch.Tensor:
    if kind == "zero":
        return torch.zeros((ROWS, WIDTH))
    if kind == "equal":
        return torch.full((ROWS, WIDTH), 1.25)
    # As a model has them: few directions, some channels far larger than others, rows that repeat.
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((100, 8), generator=generator) @ torch.randn((8, WIDTH), generator=generator)
    rows[:, 3] *= 100
    return rows[torch.randint(100, (ROWS,), generator=generator)]


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
@pytest.mark.parametrize("kind", ["zero", "equal", "like a model's"])
def test_every_byte_is_uniform(kind: str, direction: Direction, executors: ExecutorFactory) -> None:
    """The 4 bytes of integers over 2.56 million each, and the 256 bytes of rows over 40,000."""
    provider, source, _ = executors("llama")
    rows = activations(kind)
    with captured_requests() as sent, one_time(provider, source, verify="off", mask_budget_mib=0) as session:
        layer = session.groups[1]  # attention's output: 64 to 64
        (got,) = layer.product(direction, 1, [rows])
    assert len(got) == ROWS
    body = b"".join(products(sent))
    assert len(body) == 4 * ROWS * WIDTH >= 10_000_000
    data = np.frombuffer(body, np.uint8)
    assert chi_squares(data.reshape(-1, 4)).max() < chi_square_limit()
    assert chi_squares(data.reshape(ROWS, -1)).max() < chi_square_limit()
    # The test is worth something: the same rows in the clear are far from it.
    if kind != "zero" and direction == Direction.FORWARD:
        with captured_requests() as sent, provider.connect() as session:
            session.groups[1].product(direction, 1, [rows[:1000]])
        clear = np.frombuffer(products(sent)[0], np.uint8)
        assert chi_squares(clear.reshape(-1, 4)).min() > 2 * chi_square_limit()


def bits(one: bytes, other: bytes) -> float:
    """How many standard deviations the number of bits in which they differ is away from a half."""
    different = np.frombuffer(one, np.uint8) ^ np.frombuffer(other, np.uint8)
    count = 8 * len(different)
    return abs(float(np.bitwise_count(different).sum()) - count / 2) / (count / 4) ** 0.5


def test_the_same_rows_twice_have_nothing_in_common(executors: ExecutorFactory) -> None:
    """Nor do different rows differ otherwise than the same ones: there is no telling."""
    provider, source, _ = executors("llama")
    rows, other = activations("like a model's"), activations("equal")
    with captured_requests() as sent, one_time(provider, source, verify="off") as session:
        for each in (rows, rows, other):
            session.groups[1].product(Direction.FORWARD, 1, [each])
    pieces = products(sent)
    third = len(pieces) // 3
    bodies = [b"".join(pieces[at : at + third]) for at in range(0, len(pieces), third)]
    integers = [np.frombuffer(body, np.uint32) for body in bodies]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert bits(bodies[a], bodies[b]) < SIGMAS
        # The difference modulo 2^32 would show a mask that served twice.
        difference = (integers[a] - integers[b]).tobytes()
        assert bits(difference, bytes(len(difference))) < SIGMAS


def test_gradients_and_activations_of_a_step_are_uniform(executors: ExecutorFactory) -> None:
    """All that a provider gets in training steps, fingerprints' challenges included."""
    provider, source, other = executors("llama")
    with captured_requests() as sent, one_time(provider, source, other) as session:
        model = add_lora(session.load_model(progress=False))
        for seed in range(6):
            gradients(model, token_ids(8, 32, seed=seed))
    for direction in (Direction.FORWARD, Direction.BACKWARD):
        data = b"".join(m.body for m in sent if m.operation == Operation.PRODUCT and m.direction == direction)
        assert len(data) > 1_000_000
        assert chi_squares(np.frombuffer(data, np.uint8).reshape(-1, 4)).max() < chi_square_limit()
        assert bits(data, bytes(len(data))) < SIGMAS


def test_who_gets_what(executors: ExecutorFactory) -> None:
    """The provider gets no seed, a mask source nothing but seeds, and each its own."""
    provider, *sources = executors("llama")
    with captured_requests() as sent, one_time(provider, *sources) as session:
        gradients(add_lora(session.load_model(progress=False)), token_ids())
    masks = (Operation.PRODUCT, Operation.EFFECT, Operation.SEED_EFFECT)
    got = {url: {m.operation for m in sent if m.url == url and m.operation in masks} for url, *_ in sent}
    assert got.pop(provider.url) == {Operation.PRODUCT}
    assert got == {source.url: {Operation.SEED_EFFECT} for source in sources}
    by_source = [{m.body for m in sent if m.url == source.url} for source in sources]
    assert not set(seeds(sent)) & by_source[0] & by_source[1]
    assert all(len(seed) == 32 for seed in seeds(sent))


def test_nothing_that_overflows_once_it_is_scaled_is_sent(
    executors: ExecutorFactory, proxy: Callable[[Executor], InterceptingProxy]
) -> None:
    """Gradients are multiplied by the scales first, which are as large as the weights are."""
    parties = []
    for executor in executors("llama")[:2]:
        middle = proxy(executor)
        middle.scales = lambda _, body: (np.frombuffer(body, np.float32) * np.float32(1e12)).tobytes()
        parties.append(middle.executor)
    with one_time(*parties) as session:
        group = session.groups[1]
        group.product(Direction.BACKWARD, 1, [torch.ones((2, WIDTH))])
        with captured_requests() as sent, pytest.raises(NonFiniteError, match=r"too large.*nothing was sent"):
            group.product(Direction.BACKWARD, 1, [torch.full((2, WIDTH), 3e38)])
        assert not products(sent)
