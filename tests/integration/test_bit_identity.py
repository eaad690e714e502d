"""Integers do not depend on the order of additions: answers are the same bit by bit, however they came.

In every privacy mode, with any number of mask sources, split over requests as the limits want it,
whatever else the executors do meanwhile. (``test_ring_parity`` compares the modes for every architecture.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import RING, Executor
from parity import add_lora, fixed_result, gradients, token_ids
from raw_peers import SECONDS
from ring_sessions import MASKINGS, ExecutorFactory, Executors, one_time, session_in
from torch import nn

import tenant_sdk
from shared.wire.header import Direction
from shared.wire.messages import Limits

pytest_plugins = ("ring_fixtures",)

ROWS = 37
Kinds = list[tuple[int, Direction, int, list[torch.Tensor]]]
Folder = Callable[[str], Path]


def requests(session: tenant_sdk.Session) -> Kinds:
    """Both directions of every group of the first block, of all members and of the last."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, info in enumerate(session.manifest.groups[:4]):
        widths = [member.outputs for member in info.members]
        everyone = (1 << len(widths)) - 1
        for members, outputs in ((everyone, widths), (1 << len(widths) - 1, widths[-1:])):
            for direction, columns in ((Direction.FORWARD, [info.inputs]), (Direction.BACKWARD, outputs)):
                tensors = [torch.randn((ROWS, width), generator=generator) for width in columns]
                found.append((number, direction, members, tensors))
    return found


def answers(session: tenant_sdk.Session) -> list[torch.Tensor]:
    return [
        torch.cat(session.groups[number].product(direction, members, tensors), 1)
        for number, direction, members, tensors in requests(session)
    ]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def expected(executors: ExecutorFactory) -> list[torch.Tensor]:
    """From the provider in the clear, whole requests."""
    with executors("llama")[0].connect() as session:
        return answers(session)


@pytest.fixture(scope="module")
def narrow(serve: Callable[..., Executor], checkpoint: Folder) -> Executors:
    """The same weights behind limits of their own: 16 KiB rows of 1.5 KiB, or few rows."""
    limits = (Limits(1 << 16, 1000), Limits(1 << 20, 5), Limits(1 << 20, 1))
    return tuple(serve(checkpoint("llama"), numerics=RING, limits=each) for each in limits)  # type: ignore[return-value]


@pytest.mark.parametrize("masking", MASKINGS)
def test_split_over_several_requests(
    masking: str, narrow: Executors, checkpoint: Folder, expected: list[torch.Tensor]
) -> None:
    with session_in(masking, narrow, checkpoint("llama")) as session:
        assert equal(answers(session), expected)
    with session_in(masking, narrow[::-1], checkpoint("llama")) as session:
        assert equal(answers(session), expected)
        assert session.stats.requests >= 16 * ROWS


def test_row_by_row(executors: ExecutorFactory, expected: list[torch.Tensor]) -> None:
    with one_time(*executors("llama")) as session:
        for (number, direction, members, tensors), whole in zip(requests(session), expected, strict=True):
            group = session.groups[number]
            for row in (0, 1, ROWS - 1):
                part = [tensor[row : row + 1] for tensor in tensors]
                assert torch.equal(torch.cat(group.product(direction, members, part), 1)[0], whole[row])


@pytest.mark.parametrize("masking", MASKINGS)
def test_beside_the_load_of_another_tenant(
    masking: str,
    executors: ExecutorFactory,
    checkpoint: Folder,
    expected: list[torch.Tensor],
    threads: ThreadPoolExecutor,
) -> None:
    """Who asks all executors for masked and clear products of other rows all the time."""
    parties, stop = executors("llama"), threading.Event()

    def load(model: nn.Module, seed: int) -> int:
        steps = 0
        while not stop.is_set():
            fixed_result(model, token_ids(3, 20, seed=seed + steps))
            steps += 1
        return steps

    with one_time(*parties) as masked, parties[1].connect() as clear:
        models = [session.load_model(progress=False) for session in (masked, clear)]
        others = [threads.submit(load, model, 100 * at) for at, model in enumerate(models)]
        try:
            with session_in(masking, parties, checkpoint("llama")) as session:
                for _ in range(3):
                    assert equal(answers(session), expected)
        finally:
            stop.set()
        assert all(other.result(SECONDS) > 0 for other in others)


def test_threads_of_one_session(
    executors: ExecutorFactory, expected: list[torch.Tensor], threads: ThreadPoolExecutor
) -> None:
    with one_time(*executors("llama")) as session:
        results = [threads.submit(answers, session) for _ in range(4)]
        assert all(equal(result.result(SECONDS), expected) for result in results)


def test_every_step_and_every_session_is_the_same(executors: ExecutorFactory) -> None:
    """Logits and gradients, with effects that were fetched ahead and effects that were not."""
    made = []
    for budget in (0.0, 64.0):
        with one_time(*executors("llama"), mask_budget_mib=budget) as session:
            model = session.load_model(progress=False)
            logits = [fixed_result(model, token_ids()) for _ in range(3)]
            adapted = add_lora(model)
            made.append((logits, [gradients(adapted, token_ids()) for _ in range(3)]))
    first_logits, first_gradients = made[0][0][0], made[0][1][0]
    for logits, steps in made:
        assert all(torch.equal(one, first_logits) for one in logits)
        for step in steps:
            assert all(torch.equal(step[name], first_gradients[name]) for name in first_gradients)
