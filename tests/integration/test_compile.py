"""``torch.compile``: one graph, in which virtual layers ask as they do without it.

Tolerance: what is compiled adds in another order, and rounds there as float32 does, 1e-5 after a few layers
and steps. On the ring that decides between two neighbouring integers here and there: 1e-4.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import RING, Executor, relative_error
from parity import add_lora, fixed_result, token_ids
from ring_sessions import one_time
from test_experts import TABLE as MIXTURES
from torch import nn

from shared.errors import RemoteWeightUnavailable, SymbiosisError

# Dynamo looks at an attribute that tells those who use it wrongly.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")
TOLERANCE = {"float32": 1e-5, RING: 1e-4}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was compiled for one test is not used by another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, **options: Any) -> Callable[..., Any]:
    """Without a backend's code, which takes long to make; ``fullgraph``: an error where Dynamo gives up."""
    return torch.compile(model, **{"backend": "aot_eager", "fullgraph": True} | options)


def losses(model: nn.Module, call: Callable[..., Any]) -> list[float]:
    """Of three steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for seed in range(3):
        ids = token_ids(seed=seed)
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("numerics", "backend"),
    [
        ("float32", "aot_eager"),
        (RING, "aot_eager"),
        pytest.param(
            RING, "inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="there is no compiler")
        ),
    ],
)
def test_training_is_what_it_is_without(
    numerics: str, backend: str, serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    """For the same requests too, forward and backward: of all members together, and none to make a graph."""
    executor = serve(checkpoint("llama"), numerics=numerics)
    found = []
    for call in (lambda model: model, lambda model: compiled(model, backend=backend)):
        with executor.connect() as session:
            model = add_lora(session.load_model(progress=False)).train()
            values = losses(model, call(model))
            stats = session.stats
            found.append((values, stats.requests, stats.bytes_sent, stats.bytes_received))
    (plain, *asked), (mine, *also_asked) = found
    assert relative_error(torch.tensor(mine), torch.tensor(plain)) < TOLERANCE[numerics]
    assert also_asked == asked


@pytest.mark.parametrize("architecture", ["gpt2", "bert", "qwen2"])
def test_other_layers_and_lengths(
    architecture: str, serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    """With biases, and with tokens in numbers that were not seen when the graph was made."""
    with serve(checkpoint(architecture)).connect() as session:
        model = session.load_model(progress=False).eval()
        call = compiled(model, dynamic=True)
        for columns in (9, 5, 12):
            ids = token_ids(columns=columns)
            with torch.no_grad():
                mine = call(input_ids=ids)[0]
            assert relative_error(mine, fixed_result(model, ids)) < TOLERANCE["float32"]


def test_the_compiler_does_not_look_at_masks(serve: Callable[..., Executor], tmp_path: Path) -> None:
    """Experts that get equally many rows are multiplied by a product of torch's own, which it follows."""
    class_name, config_name, options = MIXTURES["llama4"]
    getattr(transformers, class_name)(getattr(transformers, config_name)(**options)).save_pretrained(tmp_path)
    pair = serve(tmp_path, numerics=RING), serve(tmp_path, numerics=RING)
    with one_time(*pair, experts="padded", verify="off") as session:
        model = session.load_model(progress=False)
        call, ids = compiled(model, fullgraph=False, backend="eager"), token_ids()
        expected = fixed_result(model, ids)
        for _ in range(3):
            with torch.no_grad():
                assert relative_error(call(input_ids=ids).logits, expected) < 1e-3


def test_errors_are_those_of_the_model_as_it_is(llama: Executor) -> None:
    with llama.connect() as session:
        model = session.load_model(progress=False).eval()
        call = compiled(model)
        with torch.no_grad():
            call(input_ids=token_ids())
    with pytest.raises(SymbiosisError), torch.no_grad():
        call(input_ids=token_ids())


def test_a_layer_that_is_to_be_trained_in_full_is_told(llama: Executor) -> None:
    with llama.connect() as session:
        model = session.load_model(progress=False)
        model.model.layers[0].mlp.down_proj.weight.requires_grad_(True)
        with pytest.raises(RemoteWeightUnavailable, match="down_proj is to be trained in full"):
            compiled(model, fullgraph=False)(input_ids=token_ids())
