"""A model whose frozen layers run on an executor computes what the local model computes.

Tolerances are relative L2 distances. float32: both sides multiply the same numbers, but may add in
another order; 1e-5 is a hundred roundings of 2^-24. noise-bank: the mask is as large as the
activations and is subtracted again, so a few bits are lost in every layer; 1e-4. bfloat16 keeps 8
bits, so one rounding is up to 2^-9 and a model of eight products a few of them; what a mask adds
doubles that. Gradients in bfloat16 are compared as one vector, because a ReLU whose input changes
its sign by rounding switches a whole gradient on or off.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, Executor, relative_error
from parity import (
    add_lora,
    bytes_held,
    fixed_result,
    gradients,
    load_local,
    result,
    token_ids,
    total_error,
    virtual_layers,
    worst_error,
)
from stored_models import build
from torch import nn

import tenant_sdk
from tenant_sdk.model.remote_weight import RemoteWeight

# Mixtral's experts are 3-D parameters, which need adapters of their own; see the end of this file.
LOADABLE = [name for name in ARCHITECTURES if name != "mixtral"]
ROUND_TRIPS = dict.fromkeys(LOADABLE, 4 * 2) | {"bert": 4 * 2 + 1}  # two blocks; BERT's pooler

Serve = Callable[..., Executor]
Folder = Callable[[str], Path]


class Expected:
    """What the local model gives, computed once for each architecture."""

    def __init__(self, folder: Path) -> None:
        self.result = fixed_result(load_local(folder), token_ids())
        self.gradients = gradients(add_lora(load_local(folder)), token_ids())


@pytest.fixture(scope="module")
def expected(checkpoint: Folder) -> Callable[[str], Expected]:
    made: dict[str, Expected] = {}

    def get(architecture: str) -> Expected:
        if architecture not in made:
            made[architecture] = Expected(checkpoint(architecture))
        return made[architecture]

    return get


@pytest.fixture(scope="module")
def executor(serve: Serve, checkpoint: Folder) -> Callable[..., Executor]:
    made: dict[tuple[str, str], Executor] = {}

    def get(architecture: str, numerics: str = "float32") -> Executor:
        key = architecture, numerics
        if key not in made:
            made[key] = serve(checkpoint(architecture), numerics=numerics)
        return made[key]

    return get


def remote_model(session: tenant_sdk.Session, folder: Path, way: str) -> nn.Module:
    """The executor's model, loaded from it alone or put in place of the tenant's own."""
    if way == "load":
        return session.load_model(progress=False)
    return session.attach(load_local(folder))


@pytest.mark.parametrize("way", ["load", "attach"])
@pytest.mark.parametrize(("privacy", "tolerance"), [("plain", 1e-5), ("noise-bank", 1e-4)])
@pytest.mark.parametrize("architecture", LOADABLE)
def test_float32_equals_local(
    architecture: str,
    privacy: str,
    tolerance: float,
    way: str,
    executor: Any,
    expected: Any,
    checkpoint: Folder,
) -> None:
    with executor(architecture).connect(privacy=privacy) as session:
        model = remote_model(session, checkpoint(architecture), way)
        before = session.stats.requests
        got = fixed_result(model, token_ids())
        assert session.stats.requests - before == ROUND_TRIPS[architecture]
        assert relative_error(got, expected(architecture).result) < tolerance
        trained = gradients(add_lora(model), token_ids())
    assert worst_error(trained, expected(architecture).gradients) < tolerance


@pytest.mark.parametrize(
    ("privacy", "numerics", "wire", "tolerance"),
    [
        # Rounded on the wire: 2^-9 on every input and output.
        ("plain", "float32", "bfloat16", 0.02),
        ("noise-bank", "float32", "bfloat16", 0.05),
        # Rounded weights as well, float32 on the wire.
        ("plain", "bfloat16", "float32", 0.02),
        ("noise-bank", "bfloat16", "float32", 0.05),
    ],
)
@pytest.mark.parametrize("architecture", LOADABLE)
def test_bfloat16_is_near_local(
    architecture: str,
    privacy: str,
    numerics: str,
    wire: str,
    tolerance: float,
    executor: Any,
    expected: Any,
) -> None:
    with executor(architecture, numerics).connect(privacy=privacy, wire_dtype=wire) as session:
        model = session.load_model(progress=False)
        error = relative_error(fixed_result(model, token_ids()), expected(architecture).result)
        trained = gradients(add_lora(model), token_ids())
    assert 1e-5 < error < tolerance  # below, nothing was rounded at all
    assert total_error(trained, expected(architecture).gradients) < 2 * tolerance


@pytest.mark.parametrize("architecture", LOADABLE)
def test_bfloat16_model_of_the_tenant(architecture: str, executor: Any, checkpoint: Folder) -> None:
    # Local and remote round at the same places, but a local layer adds its bias before rounding and a
    # remote one after it: one more rounding of 2^-9 a layer.
    local = load_local(checkpoint(architecture), dtype=torch.bfloat16)
    with executor(architecture, "bfloat16").connect(wire_dtype="bfloat16") as session:
        model = session.load_model(dtype=torch.bfloat16, progress=False)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        got = fixed_result(model, token_ids())
    assert got.dtype == torch.bfloat16
    assert relative_error(got.float(), fixed_result(local, token_ids()).float()) < 0.02


@pytest.mark.parametrize("architecture", LOADABLE)
def test_nothing_frozen_is_held(architecture: str, executor: Any) -> None:
    with executor(architecture).connect() as session:
        model = session.load_model(progress=False)
        virtual = virtual_layers(model)
        names = {member.name for group in session.manifest.groups for member in group.members}
        prefix = f"{session.manifest.base_prefix}." if session.manifest.base_prefix else ""
        assert {name.removeprefix(prefix) for name in virtual} == names
        for layer in virtual.values():
            assert isinstance(layer.weight, RemoteWeight)
            assert layer.weight.data_ptr() == 0
        persistent = [buffer for name, buffer in model.named_buffers() if name in model.state_dict()]
        assert bytes_held([*model.parameters(), *persistent]) == _announced(session)


def test_nothing_frozen_is_held_anywhere(executor: Any) -> None:
    """Nor does anything else that Python knows of: what has come is the tenant's parameters."""
    with executor("llama").connect() as session:
        gc.collect()
        before = _storages()
        model = session.load_model(progress=False)
        # The executor is in this process, and has let go of what it sent.
        session.executor.connection.channel.ping()
        gc.collect()
        come = sum(size for at, size in _storages().items() if at not in before)
        frozen = sum(layer.weight.numel() * 4 for layer in virtual_layers(model).values())
        # Rotary frequencies are computed here, and a few scalars.
        slack = 2 * sum(b.numel() * b.element_size() for b in model.buffers()) + 1024
        assert slack < frozen / 20
        assert _announced(session) <= come <= _announced(session) + slack


def _announced(session: tenant_sdk.Session) -> int:
    """Bytes of the parameters that the manifest has for tenants."""
    return sum(torch.Size(info.shape).numel() * 4 for info in session.manifest.parameters)


def _storages() -> dict[int, int]:
    """Bytes by address of every tensor's memory."""
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta}


@pytest.mark.parametrize("architecture", LOADABLE)
def test_computed_buffers_equal_those_of_a_fresh_model(architecture: str, executor: Any) -> None:
    with executor(architecture).connect() as session:
        model = session.load_model(progress=False)
    fresh = type(model)(model.config)
    buffers = dict(model.named_buffers())
    for name, buffer in fresh.named_buffers():
        assert not buffers[name].is_meta
        assert torch.equal(buffers[name], buffer), name
    assert buffers.keys() == dict(fresh.named_buffers()).keys()
    # Rotary embeddings also remember their first frequencies outside any buffer.
    for name, module in fresh.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(model.get_submodule(name), attribute), value), (name, attribute)
    if architecture in ("llama", "qwen2", "qwen3", "gemma", "gemma2"):
        assert any(name.endswith("inv_freq") for name in buffers)


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "gpt_bigcode", "opt", "bert"])
def test_biases_are_added_here(architecture: str, executor: Any, checkpoint: Folder) -> None:
    local = dict(load_local(checkpoint(architecture)).named_modules())
    with executor(architecture).connect() as session:
        virtual = virtual_layers(session.load_model(progress=False))
        biased = {name: layer for name, layer in virtual.items() if layer.bias is not None}
        assert biased
        name, layer = next(iter(biased.items()))
        inputs = local[name].nx if hasattr(local[name], "nx") else local[name].in_features
        with torch.no_grad():
            # The executor's answer to zeros is zero: it knows no bias.
            assert torch.equal(layer(torch.zeros(3, inputs)), layer.bias.expand(3, -1))
    for name, layer in biased.items():
        assert bool((layer.bias != 0).all())  # the tiny models have random biases
        assert torch.equal(layer.bias, local[name].bias), name


def test_head_only_models_of_another_class(executor: Any, checkpoint: Folder) -> None:
    """A classifier around the executor's base model: its new head starts as transformers starts it."""
    from transformers import AutoModelForSequenceClassification

    with executor("llama").connect() as session:
        torch.manual_seed(5)
        model = session.load_model(
            model_class=AutoModelForSequenceClassification, num_labels=3, progress=False
        )
        assert type(model).__name__ == "LlamaForSequenceClassification"
        assert model.score.weight.requires_grad
        assert 0.01 < float(model.score.weight.detach().std()) < 0.03  # initializer_range is 0.02
        local = AutoModelForSequenceClassification.from_pretrained(checkpoint("llama"), num_labels=3).eval()
        with torch.no_grad():
            local.score.weight.copy_(model.score.weight)
        ids = token_ids()
        assert relative_error(fixed_result(model, ids), fixed_result(local, ids)) < 1e-5


@pytest.mark.parametrize("way", ["load", "attach"])
@pytest.mark.parametrize(("privacy", "tolerance"), [("plain", 1e-5), ("noise-bank", 1e-4)])
def test_mixtral(
    privacy: str,
    tolerance: float,
    way: str,
    executor: Any,
    checkpoint: Folder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its experts, three tensors each, are merged by the executor; a tenant may hold them."""
    ids = token_ids()
    local = load_local(checkpoint("mixtral"))
    with executor("mixtral").connect(privacy=privacy, experts="local") as session:
        assert not session.manifest.unavailable
        with caplog.at_level(logging.WARNING, logger="tenant_sdk"):
            model = remote_model(session, checkpoint("mixtral"), way)
        experts = {name for name, parameter in model.named_parameters() if parameter.dim() == 3}
        assert len(experts) == 4  # two in each block
        assert "the weights of experts stay in this machine's memory" in caplog.text
        assert relative_error(fixed_result(model, ids), fixed_result(local, ids)) < tolerance
        options = {"target_modules": ["q_proj", "v_proj", "o_proj"]}
        trained = gradients(add_lora(model, **options), ids)
    assert worst_error(trained, gradients(add_lora(local, **options), ids)) < tolerance


def test_inference_mode(executor: Any, checkpoint: Folder) -> None:
    """Its tensors count no versions, which grouping has to do without."""
    ids = token_ids()
    local = load_local(checkpoint("llama"))
    with executor("llama").connect() as session, torch.inference_mode():
        model = session.load_model(progress=False)
        before = session.stats.requests
        assert relative_error(result(model, ids), result(local, ids)) < 1e-5
        assert session.stats.requests - before == ROUND_TRIPS["llama"]


_STATES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "state_size": 8}


@pytest.mark.parametrize("kind", ["Mamba", "FalconMamba"])
def test_a_model_that_reads_its_own_weights(
    kind: str, serve: Callable[..., Executor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One layer's weight is multiplied with by the model itself, so it stays with the tenant, who is told."""
    local = build(f"{kind}ForCausalLM", f"{kind}Config", _STATES, tmp_path)
    inputs, executor = {"input_ids": token_ids()}, serve(tmp_path)
    assert "tenants keep 2 layers, such as backbone.layers.0.mixer.dt_proj" in caplog.text
    with executor.connect() as session, torch.no_grad():
        served = {member.name for group in session.manifest.groups for member in group.members}
        assert not any("dt_proj" in name for name in served)
        expected = local(**inputs)[0]
        for get in (lambda: session.load_model(progress=False), lambda: session.attach(local)):
            caplog.clear()
            model = get()
            assert "no product can stand for 2 linear layers" in caplog.text
            assert "layers.0.mixer.dt_proj, layers.1.mixer.dt_proj" in caplog.text
            assert not any("dt_proj" in name for name in virtual_layers(model))
            assert relative_error(model(**inputs)[0], expected) < 1e-5
