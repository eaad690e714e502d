"""Attaching and detaching: which layers are found by which name, what is refused, what is undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from conftest import RING, Executor, make_model, relative_error
from parity import add_lora, fixed_result, load_local, token_ids, virtual_layers
from torch import nn
from transformers import LlamaModel
from transformers.pytorch_utils import Conv1D

import tenant_sdk
from shared.errors import CheckpointError, ConfigurationError, ModelMismatch
from tenant_sdk.model.mixtures import is_close
from tenant_sdk.trust.attestation import linear_layers


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


def unchanged(model: nn.Module, expected: torch.Tensor) -> bool:
    """Whether the model still computes everything itself."""
    return not virtual_layers(model) and torch.equal(fixed_result(model, token_ids()), expected)


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "wrap", "name"),
    [
        ("llama", None, "layers.0.self_attn.q_proj"),
        ("llama", "lora", "layers.1.mlp.down_proj"),
        ("llama", "prompt", "layers.1.mlp.down_proj"),
        ("llama", None, "lm_head"),
        ("gpt2", None, "h.0.attn.c_attn"),
        ("gpt2", "lora", "h.1.mlp.c_proj"),
        ("opt", None, "decoder.layers.0.fc1"),
        ("bert", None, "encoder.layer.0.attention.self.query"),
        ("bert", "lora", "pooler.dense"),
    ],
)
def test_layers_go_by_their_name_below_the_base_model(architecture: str, wrap: str | None, name: str) -> None:
    model: nn.Module = make_model(architecture)
    if wrap == "lora":
        model = add_lora(model)
    elif wrap == "prompt":
        config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    layer = linear_layers(model)[name]
    assert isinstance(layer, (nn.Linear, Conv1D))
    assert not hasattr(layer, "base_layer")


def test_a_base_model_without_its_head(llama: Executor, folder: Path) -> None:
    model = LlamaModel.from_pretrained(folder).eval()
    expected = fixed_result(model, token_ids())
    with llama.connect() as session:
        session.attach(model)
        assert relative_error(fixed_result(model, token_ids()), expected) < 1e-5


# -- refusals -------------------------------------------------------------------------------------


def wrong_model(what: str) -> nn.Module:
    if what == "architecture":
        return make_model("gpt2")
    if what == "weights":
        return make_model("llama", seed=1)
    config = make_model("llama").config
    config.intermediate_size = 80
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("architecture", r"serves layers\.0\.self_attn\.q_proj, which this model does not have"),
        ("weights", r"layers\.0\.self_attn\.q_proj has other weights here"),
        ("shape", r"layers\.0\.mlp\.gate_proj has shape \[80, 64\] here and \[96, 64\]"),
    ],
)
@pytest.mark.parametrize("privacy", ["plain", "noise-bank"])
def test_another_model_is_refused_and_unchanged(
    what: str, message: str, privacy: str, llama: Executor
) -> None:
    model = wrong_model(what)
    expected = fixed_result(model, token_ids())
    with llama.connect(privacy=privacy) as session:
        with pytest.raises(ModelMismatch, match=message):
            session.attach(model)
        assert unchanged(model, expected)


def test_one_wrong_layer_is_noticed(llama: Executor, folder: Path) -> None:
    model = load_local(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.2)
    expected = fixed_result(model, token_ids())
    with llama.connect() as session:
        with pytest.raises(ModelMismatch, match=r"layers\.1\.mlp\.up_proj has other weights"):
            session.attach(model)
        assert unchanged(model, expected)


def test_answers_that_are_no_numbers_do_not_pass_the_probe() -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert is_close(good, good, 0.05)
    assert not is_close(bad, good, 0.05)
    assert not is_close(good, good * 1.2, 0.05)


@pytest.mark.parametrize("numerics", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_weights_pass_the_probe(
    numerics: str, dtype: torch.dtype, serve: Callable[..., Executor], folder: Path
) -> None:
    with serve(folder, numerics=numerics).connect(wire_dtype="bfloat16") as session:
        session.attach(load_local(folder, dtype=dtype))
        assert session.stats.requests == 14


def test_without_probe_nothing_is_sent(llama: Executor, folder: Path) -> None:
    with llama.connect() as session:
        session.attach(load_local(folder), probe=False)
        assert session.stats.requests == 0


def test_attaching_twice_is_refused(llama: Executor, folder: Path) -> None:
    with llama.connect() as session:
        model = session.attach(load_local(folder))
        with pytest.raises(ModelMismatch, match="attached already"):
            session.attach(model)


def test_the_digest_pins_the_weights(llama: Executor) -> None:
    with llama.connect() as session:
        digest = session.manifest.digest
    with llama.connect(digest=digest):
        pass
    with pytest.raises(ModelMismatch, match=f"digest {digest}, not 00"):
        llama.connect(digest="00")


def test_an_unserved_head_is_refused(llama: Executor, folder: Path) -> None:
    model = load_local(folder)
    expected = fixed_result(model, token_ids())
    with llama.connect() as session:
        with pytest.raises(ConfigurationError, match="does not serve the output head"):
            session.attach(model, offload_head=True)
        assert unchanged(model, expected)


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("exclude", [["o_proj"], ["layers.0.mlp.up_proj", "q_proj"]])
def test_excluded_layers_stay(exclude: list[str], llama: Executor, folder: Path) -> None:
    local = load_local(folder)
    with llama.connect() as session:
        model = session.attach(load_local(folder), exclude=exclude)
        names = virtual_layers(model)
        assert not any(name.endswith(tuple(exclude)) for name in names)
        left = [n for n in linear_layers(model) if n != "lm_head" and not n.endswith(tuple(exclude))]
        assert len(names) == len(left)
        got = fixed_result(model, token_ids())
    assert relative_error(got, fixed_result(local, token_ids())) < 1e-5


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("privacy", "numerics", "tolerance"),
    [("plain", "float32", 0.0), ("noise-bank", "float32", 1e-4), ("one-time", RING, 3e-4)],
)
def test_excluded_layers_of_a_model_from_the_executor(
    architecture: str,
    privacy: str,
    numerics: str,
    tolerance: float,
    serve: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
) -> None:
    """Their weights are the executor's products with unit rows, as exact as these are."""
    entry = "mlp.down_proj" if architecture == "llama" else "c_attn"
    local = load_local(checkpoint(architecture))
    executor = serve(checkpoint(architecture), numerics=numerics)
    sources = {"mask_sources": [f"local:{checkpoint(architecture)}"]} if privacy == "one-time" else {}
    with executor.connect(privacy=privacy, **sources) as session:
        model = session.load_model(progress=False, exclude=[entry])
        assert not any(name.endswith(entry) for name in virtual_layers(model))
        weights = dict(model.named_parameters())
        for name, expected in local.named_parameters():
            if name.endswith(f"{entry}.weight"):
                assert relative_error(weights[name].detach(), expected.detach()) <= tolerance
        got = fixed_result(model, token_ids())
    assert relative_error(got, fixed_result(local, token_ids())) < max(1e-5, 10 * tolerance)


def test_excluding_what_is_not_served(llama: Executor) -> None:
    with llama.connect() as session, pytest.raises(ConfigurationError, match=r"exclude='q_prooj' fits no"):
        session.load_model(progress=False, exclude=["q_prooj"])


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])  # a head of its own, a tied one
def test_the_head_can_be_attached_too(
    architecture: str, serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    local = load_local(checkpoint(architecture))
    with serve(checkpoint(architecture), serve_head=True).connect() as session:
        model = session.attach(load_local(checkpoint(architecture)), offload_head=True)
        assert "lm_head" in virtual_layers(model)
        assert relative_error(fixed_result(model, token_ids()), fixed_result(local, token_ids())) < 1e-5
        session.detach(model, checkpoint(architecture))
    assert unchanged(model, fixed_result(local, token_ids()))


# -- detaching ------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2", "bert"])
def test_detach_restores_the_model(
    architecture: str, serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    local = load_local(checkpoint(architecture))
    model = load_local(checkpoint(architecture))
    with serve(checkpoint(architecture)).connect() as session:
        session.detach(session.attach(model))  # from the folder that the model was loaded from
    assert [(n, type(m)) for n, m in model.named_modules()] == [
        (n, type(m)) for n, m in local.named_modules()
    ]
    assert unchanged(model, fixed_result(local, token_ids()))
    state = local.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_detach_a_model_that_came_from_the_executor(llama: Executor, folder: Path) -> None:
    with llama.connect() as session:
        model = session.load_model(progress=False)
        with pytest.raises(CheckpointError, match="checkpoint=FOLDER"):
            session.detach(model)
        session.detach(model, folder)
    assert unchanged(model, fixed_result(load_local(folder), token_ids()))


def test_detach_keeps_dtype_and_mode(llama: Executor, folder: Path) -> None:
    with llama.connect() as session:
        model = session.attach(load_local(folder, dtype=torch.bfloat16)).train()
        session.detach(model, folder)
    layer = model.model.layers[0].self_attn.q_proj
    assert (layer.weight.dtype, layer.training) == (torch.bfloat16, True)
    expected = load_local(folder, dtype=torch.bfloat16).model.layers[0].self_attn.q_proj
    assert torch.equal(layer.weight, expected.weight)


@pytest.mark.parametrize("wrong", ["seed", "architecture", "missing"])
def test_detach_from_another_checkpoint_is_refused(
    wrong: str, llama: Executor, folder: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    if wrong == "seed":
        make_model("llama", seed=1).save_pretrained(tmp_path)
    source = checkpoint("gpt2") if wrong == "architecture" else tmp_path
    error = CheckpointError if wrong == "missing" else ModelMismatch
    with llama.connect() as session:
        model = session.attach(load_local(folder))
        before = fixed_result(model, token_ids())
        with pytest.raises(error):
            session.detach(model, source)
        assert len(virtual_layers(model)) == 14
        assert torch.equal(fixed_result(model, token_ids()), before)


def test_attach_again_after_detach(llama: Executor, folder: Path) -> None:
    local = load_local(folder)
    model: nn.Module = load_local(folder)
    for _ in range(2):
        with llama.connect() as session:
            session.attach(model)
            assert relative_error(fixed_result(model, token_ids()), fixed_result(local, token_ids())) < 1e-5
            session.detach(model)


def test_a_model_moves_to_a_new_session(llama: Executor, folder: Path) -> None:
    """After a lost connection: detach with the manifest of the new session, attach, go on."""
    adapted = add_lora(load_local(folder))
    expected = fixed_result(adapted, token_ids())
    with llama.connect() as first:
        first.attach(adapted)
    with pytest.raises(tenant_sdk.ConnectionLost):
        fixed_result(adapted, token_ids())
    with llama.connect() as second:
        second.detach(adapted, folder)
        second.attach(adapted)
        assert relative_error(fixed_result(adapted, token_ids()), expected) < 1e-5


@pytest.mark.parametrize(
    ("entry", "count"),
    [
        ("o_proj", 2),
        ("self_attn", 8),
        ("layers.1", 7),
        ("mlp.up_proj", 2),
        ("model.layers.0.self_attn.q_proj", 1),  # as the whole model calls it
        ("layers.0.self_attn.q_proj", 1),
    ],
)
def test_layers_to_exclude(entry: str, count: int, llama: Executor) -> None:
    with llama.connect() as session:
        model = session.load_model(exclude=[entry], progress=False)
        local = [layer for layer in linear_layers(model).values() if type(layer) is nn.Linear]
        assert len(local) == count + 1  # the head
        with pytest.raises(ConfigurationError, match=r"fits no served layer.*end with q_proj, k_proj"):
            session.load_model(exclude=["proj"], progress=False)
