"""Which layers are served, in which groups, for every architecture; and models that cannot be served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Executor, relative_error
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tenant_sdk
from provider.catalog.discovery import discover
from shared.checkpoint import Checkpoint
from shared.errors import CheckpointError, ConfigurationError

# The groups of one block, as sets of the last parts of names.
BLOCKS = {
    "llama": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}],
    "qwen3": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}],
    "gemma2": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}],
    "gpt2": [{"c_attn"}, {"c_proj"}, {"c_fc"}, {"c_proj"}],
    "gpt_bigcode": [{"c_attn"}, {"c_proj"}, {"c_fc"}, {"c_proj"}],
    "opt": [{"q_proj", "k_proj", "v_proj"}, {"out_proj"}, {"fc1"}, {"fc2"}],
    "bert": [{"query", "key", "value"}, {"dense"}, {"dense"}, {"dense"}],
    # Then four experts of two projections, each alone.
    "mixtral": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, *({str(at)} for at in (*range(4), *range(4)))],
}


@pytest.mark.parametrize("architecture", BLOCKS)
def test_groups_are_the_layers_that_receive_the_same_tensor(
    architecture: str, checkpoint: Callable[[str], Path]
) -> None:
    found = discover(Checkpoint(checkpoint(architecture)))
    block = BLOCKS[architecture]
    groups = [{m.name.rpartition(".")[2] for m in group.members} for group in found.groups]
    assert groups[: 2 * len(block)] == 2 * block
    assert not any(group.head for group in found.groups)


@pytest.mark.parametrize("architecture", BLOCKS)
def test_every_stored_tensor_is_served_or_a_tenants(
    architecture: str, checkpoint: Callable[[str], Path]
) -> None:
    source = Checkpoint(checkpoint(architecture))
    found = discover(source)
    # Experts are both: tenants choose.
    members = [member for group in found.groups for member in group.members]
    served = {member.tensor for member in members if member.expert is None}
    sources = [source.stored.source(parameter.name) for parameter in found.parameters]
    held = {key for each in sources if each for key in each.keys}
    assert not served & held
    assert set(source.names()) == served | held
    assert not found.unavailable
    assert not source.stored.unused


def test_conv1d_weights_are_known_to_be_transposed(checkpoint: Callable[[str], Path]) -> None:
    found = discover(Checkpoint(checkpoint("gpt2")))
    fused = found.groups[0]
    assert fused.inputs == 64
    assert (fused.members[0].outputs, fused.members[0].transposed) == (192, True)


def test_tied_embeddings_are_sent_once(checkpoint: Callable[[str], Path]) -> None:
    found = discover(Checkpoint(checkpoint("gemma")))
    assert [p.name for p in found.parameters if p.shape == (128, 64)] == ["model.embed_tokens.weight"]


def test_a_model_without_linear_layers_is_refused(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    (tmp_path / "config.json").write_text((checkpoint("llama") / "config.json").read_text())
    weights = load_file(checkpoint("llama") / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "proj" not in k}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no weight for"):
        discover(Checkpoint(tmp_path))


def test_an_unknown_architecture_is_named(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["SomethingElse"]}))
    (tmp_path / "model.safetensors").write_bytes((checkpoint("llama") / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="SomethingElse"):
        discover(Checkpoint(tmp_path))


def test_weights_of_another_size_than_the_configuration_says_are_refused(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    (tmp_path / "model.safetensors").write_bytes((checkpoint("llama") / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="shape"):
        discover(Checkpoint(tmp_path))


def test_a_model_without_tokenizer_is_served_and_says_so(llama: Executor) -> None:
    with llama.connect() as session, pytest.raises(ConfigurationError, match=r"without tokenizer\.json"):
        session.load_tokenizer()


@pytest.mark.parametrize("architecture", ["llama", "gemma"])  # own head, head tied to the embeddings
def test_the_output_head_can_be_served_too(
    architecture: str, serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    executor = serve(checkpoint(architecture), serve_head=True)
    local = AutoModelForCausalLM.from_pretrained(checkpoint(architecture))
    ids = torch.arange(12).view(1, 12)
    with executor.connect() as session, torch.no_grad():
        offloaded = session.load_model(offload_head=True, progress=False)
        kept = session.load_model(progress=False)
        expected = local(ids).logits
        # The same float32 products in another order.
        assert relative_error(offloaded(ids).logits, expected) < 1e-5
        assert relative_error(kept(ids).logits, expected) < 1e-5


def test_offloading_a_head_that_is_not_served_says_what_to_do(llama: Executor) -> None:
    with llama.connect() as session, pytest.raises(tenant_sdk.ConfigurationError, match="--serve-head"):
        session.load_model(offload_head=True)
