"""Executors and mask sources whose products run on a GPU, as processes, and tenants whose model is on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Executor, executor_processes, relative_error
from parity import add_lora, fixed_result, gradients, load_local, token_ids, worst_error
from ring_sessions import one_time
from torch import nn

import tenant_sdk

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

PLACEMENTS = {
    "executor": ["--device", "cuda:0"],
    "worker": ["--devices", "cuda:0"],
    "two workers": ["--devices", "cuda:0,cuda:0"],
    "stripes": ["--devices", "cuda:0,cuda:0", "--stripes", "2"],
    "worker on the processors": ["--devices", "cuda:0,cpu"],
}
Start = Callable[..., Executor]


@pytest.fixture(scope="module")
def start(
    tls_dir: Path, token_file: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    with executor_processes(tls_dir, token_file, tmp_path_factory.mktemp("cuda")) as starter:
        yield starter


@pytest.fixture(scope="module")
def source(start: Start, checkpoint: Callable[[str], Path]) -> Callable[[str, str], Executor]:
    """A mask source of a tiny model with its products on the GPU: ``source("llama", "ring")``."""
    made: dict[tuple[str, str], Executor] = {}

    def get(architecture: str, numerics: str) -> Executor:
        if (architecture, numerics) not in made:
            made[architecture, numerics] = start(
                checkpoint(architecture), "--numerics", numerics, "--device", "cuda:0"
            )
        return made[architecture, numerics]

    return get


def adapted(model: nn.Module) -> nn.Module:
    return add_lora(model, target_modules=["q_proj", "v_proj", "o_proj"])


def results(session: tenant_sdk.Session, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Logits, and gradients of an adapter, with the model's own parts on a device."""
    model = adapted(session.load_model(progress=False)).to(device)
    ids = token_ids(3, 20).to(device)
    found = {"logits": fixed_result(model, ids), **gradients(model, ids)}
    return {name: tensor.cpu() for name, tensor in found.items()}


@pytest.mark.parametrize("numerics", ["ring", "ring-fine"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_a_tenant_has_the_bits_of_the_processors(
    architecture: str,
    placement: str,
    numerics: str,
    start: Start,
    source: Callable[[str, str], Executor],
    serve: Start,
    checkpoint: Callable[[str], Path],
) -> None:
    folder = checkpoint(architecture)
    with serve(folder, numerics=numerics).connect(experts="routed") as session:
        expected = results(session)
    executor = start(folder, "--numerics", numerics, *PLACEMENTS[placement])
    with one_time(executor, source(architecture, numerics), experts="routed") as session:
        got = results(session)
        assert session.stats.verified_rows > 0  # others made the check vectors
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_half_answers(
    placement: str, start: Start, source: Callable[[str, str], Executor], checkpoint: Callable[[str], Path]
) -> None:
    """As tests/integration/test_half_answers.py has it of the processors."""
    executor, found = start(checkpoint("llama"), "--numerics", "ring", *PLACEMENTS[placement]), {}
    for answers in ("exact", "half"):
        with one_time(executor, source("llama", "ring"), answers=answers) as session:
            found[answers] = results(session)
    assert 0 < worst_error(found["half"], found["exact"]) < 2e-2


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("numerics", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_floats(
    numerics: str, tolerance: float, placement: str, start: Start, checkpoint: Callable[[str], Path]
) -> None:
    """Sums in another order, of bfloat16 with 8 bits."""
    local = adapted(load_local(checkpoint("llama")))
    expected = {"logits": fixed_result(local, token_ids(3, 20)), **gradients(local, token_ids(3, 20))}
    executor = start(checkpoint("llama"), "--numerics", numerics, *PLACEMENTS[placement])
    with executor.connect() as session:
        assert worst_error(results(session), expected) < tolerance


def test_shards_that_are_gathered(start: Start, checkpoint: Callable[[str], Path]) -> None:
    """`--fsdp` over NCCL, which takes one process on each GPU."""
    count = str(torch.cuda.device_count())
    options = ["--numerics", "float32", "--device", "cuda", "--workers", count, "--fsdp"]
    with start(checkpoint("llama"), *options).connect() as session:
        got = fixed_result(session.load_model(progress=False), token_ids())
    assert relative_error(got, fixed_result(load_local(checkpoint("llama")), token_ids())) < 1e-4


@pytest.mark.parametrize("answers", ["exact", "half"])
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_a_tenant_with_a_gpu(
    architecture: str,
    answers: str,
    start: Start,
    source: Callable[[str, str], Executor],
    checkpoint: Callable[[str], Path],
) -> None:
    """The tenant's attention, adapters and cache are on the GPU; its floats are added in another order."""
    executor = start(checkpoint(architecture), "--numerics", "ring", "--device", "cuda:0")
    local = load_local(checkpoint(architecture))
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    with one_time(executor, source(architecture, "ring"), answers=answers, experts="routed") as session:
        here, there = results(session), results(session, "cuda")
        assert worst_error(there, here) < (1e-3 if answers == "exact" else 2e-2)
        model = session.load_model(progress=False).to("cuda")
        if answers == "exact":
            for cache in ("dynamic", "offloaded"):
                text = model.generate(
                    input_ids=token_ids(2, 5).cuda(), cache_implementation=cache, **options
                ).cpu()
                assert torch.equal(text, local.generate(input_ids=token_ids(2, 5), **options)), cache


def test_many_steps_of_training(
    start: Start, source: Callable[[str, str], Executor], checkpoint: Callable[[str], Path]
) -> None:
    """An optimizer's steps follow those of the local model, whose losses fall."""
    ids, losses = token_ids(4, 24).cuda(), dict[str, list[float]]()
    executor = start(checkpoint("llama"), "--numerics", "ring", "--devices", "cuda:0")
    with one_time(executor, source("llama", "ring")) as session:
        models = {"local": load_local(checkpoint("llama")), "remote": session.load_model(progress=False)}
        for name, each in models.items():
            model = add_lora(each, init_lora_weights=True).to("cuda").train()
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            losses[name] = []
            for _ in range(20):
                loss = model(input_ids=ids, labels=ids).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[name].append(float(loss.detach()))
    assert losses["local"][-1] < losses["local"][0] - 0.2
    # Rounding of 1e-4 a layer, over 20 steps of a large learning rate.
    torch.testing.assert_close(losses["remote"], losses["local"], rtol=2e-2, atol=0)
