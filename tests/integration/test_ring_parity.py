"""A model on a ring executor computes what the local float32 model computes, in every privacy mode.

Tolerance, relative L2: a layer as narrow as these is off by 1e-4 and less (``docs/explanation/numerics.md``),
in either direction; on the fine ring by about 3e-5. A model of two blocks has eight such products one behind
the other, and as many back. Residual connections carry most of the result past them, so 3e-4 is enough for
logits, and 1e-3 for all gradients taken as one vector. A single gradient may be a small difference of large
numbers: 3e-3. A third of each on the fine ring.

Against each other the modes are exact: a mask modulo 2^32 cancels without a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import ARCHITECTURES, RING, relative_error
from parity import add_lora, fixed_result, gradients, load_local, token_ids, total_error, worst_error
from ring_sessions import MASKINGS, ExecutorFactory, one_time, session_in
from torch import nn

from shared.wire.header import Direction

pytest_plugins = ("ring_fixtures",)

LOGITS, GRADIENTS, ONE_GRADIENT = {"ring": (3e-4, 1e-3, 3e-3), "ring-fine": (1e-4, 4e-4, 1e-3)}[RING]
ONE_LAYER = {"ring": 2e-4, "ring-fine": 1e-5}[RING]  # between two sizes of one row

Adapt = Callable[[nn.Module], nn.Module]
Results = tuple[torch.Tensor, dict[str, torch.Tensor]]
Folder = Callable[[str], Path]


def results(model: nn.Module, adapt: Adapt = add_lora) -> Results:
    """Logits, then gradients of an adapter."""
    return fixed_result(model, token_ids()), gradients(adapt(model), token_ids())


def lora_for(architecture: str) -> Adapt:
    """On every layer; a mixture's experts are one parameter each, which PEFT treats in its own way."""
    only = {"target_modules": ["q_proj", "v_proj", "o_proj"]} if architecture == "mixtral" else {}
    return lambda model: add_lora(model, **only)


def remote_results(architecture: str, masking: str, trios: ExecutorFactory, folder: Path) -> Results:
    adapt = lora_for(architecture)
    with session_in(masking, trios(architecture), folder, experts="routed") as session:
        return results(session.load_model(progress=False), adapt)


@pytest.fixture(scope="module")
def known(executors: ExecutorFactory, checkpoint: Folder) -> Callable[[str], tuple[Results, Results]]:
    """What the local model gives, and what ``plain`` gives: computed once for each architecture."""
    made: dict[str, tuple[Results, Results]] = {}

    def get(architecture: str) -> tuple[Results, Results]:
        if architecture not in made:
            folder = checkpoint(architecture)
            made[architecture] = (
                results(load_local(folder), lora_for(architecture)),
                remote_results(architecture, "plain", executors, folder),
            )
        return made[architecture]

    return get


def assert_equal(got: Results, expected: Results) -> None:
    """Bit by bit."""
    assert torch.equal(got[0], expected[0])
    assert got[1].keys() == expected[1].keys()
    for name, gradient in got[1].items():
        assert torch.equal(gradient, expected[1][name]), name


def assert_near(got: Results, expected: Results) -> None:
    """Within the tolerances above."""
    assert relative_error(got[0], expected[0]) < LOGITS
    assert total_error(got[1], expected[1]) < GRADIENTS
    assert worst_error(got[1], expected[1]) < ONE_GRADIENT


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plain_is_near_local(architecture: str, known: Any) -> None:
    local, plain = known(architecture)
    assert_near(plain, local)


@pytest.mark.parametrize("masking", MASKINGS[1:])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_other_mode_is_plain_bit_by_bit(
    architecture: str, masking: str, executors: ExecutorFactory, checkpoint: Folder, known: Any
) -> None:
    _, plain = known(architecture)
    assert_equal(remote_results(architecture, masking, executors, checkpoint(architecture)), plain)


def ia3(model: nn.Module) -> nn.Module:
    """Scales the input of one member of a group of two and of two members of one of three."""
    torch.manual_seed(3)
    names = ["q_proj", "k_proj", "up_proj"]
    config = peft.IA3Config(target_modules=names, feedforward_modules=names, init_ia3_weights=False)
    return peft.get_peft_model(model, config)


ADAPTERS: dict[str, Adapt] = {
    "lora on some layers": lambda model: add_lora(model, target_modules=["q_proj", "v_proj", "down_proj"]),
    "lora on one member of a group": lambda model: add_lora(model, target_modules=["up_proj"]),
    "lora on one block": lambda model: add_lora(model, layers_to_transform=[1], target_modules=["k_proj"]),
    "ia3": ia3,
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_that_ask_for_some_members(
    adapter: str, executors: ExecutorFactory, checkpoint: Folder
) -> None:
    """Requests of some members of a group, in either direction; twice, because grouping is learned."""
    folder = checkpoint("llama")
    expected = results(load_local(folder), ADAPTERS[adapter])
    made = []
    for masking in ("plain", "two sources"):
        with session_in(masking, executors("llama"), folder) as session:
            model = session.load_model(progress=False)
            first = fixed_result(model, token_ids())
            model = ADAPTERS[adapter](model)
            gradients(model, token_ids(seed=1))
            made.append((first, gradients(model, token_ids())))
        assert_near(made[-1], expected)
    assert_equal(*made)


def test_rows_that_are_zero_huge_or_tiny(executors: ExecutorFactory, checkpoint: Folder) -> None:
    """Every row has an exponent of its own; a row of zeros gives zeros."""
    provider, source, _ = executors("llama")
    rows = torch.randn((6, 64), generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([1.0, 0.0, 1e30, 1e-30, 1e4, 3e-38])
    with one_time(provider, source) as session:
        group = session.groups[0]
        got = torch.cat(group.plain_product(Direction.FORWARD, 0b111, (rows * sizes[:, None],)), 1)
        alone = torch.cat(group.plain_product(Direction.FORWARD, 0b111, (rows[4:5] * sizes[4],)), 1)
    with provider.connect() as session:
        expected = torch.cat(session.groups[0].plain_product(Direction.FORWARD, 0b111, (rows,)), 1)
    assert not got[1].any()
    assert torch.equal(got[4], alone[0])  # a row does not depend on those beside it
    for i in (0, 2, 3, 4):
        assert relative_error(got[i].double() / sizes[i].double(), expected[i].double()) < ONE_LAYER
    # Subnormal numbers have few bits; nothing is lost beyond those.
    assert relative_error(got[5].double() / sizes[5].double(), expected[5].double()) < 1e-3
