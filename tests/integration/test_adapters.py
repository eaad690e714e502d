"""The methods of the command line: each trains on virtual layers, is saved and loaded, or says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Executor
from peft import LoraConfig
from transformers import MambaConfig, MambaForCausalLM

import tenant_sdk
from shared.errors import ConfigurationError, ModelMismatch
from tenant_sdk.tuning.adapters import METHODS, AdapterOptions, add_adapter, find_method, other_ranks_text
from tenant_sdk.tuning.folders import load_adapter


@pytest.fixture(scope="module")
def sessions(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> Iterator[Callable[[str], tenant_sdk.Session]]:
    opened: dict[str, tenant_sdk.Session] = {}

    def of(architecture: str) -> tenant_sdk.Session:
        if architecture not in opened:
            opened[architecture] = serve(checkpoint(architecture)).connect()
        return opened[architecture]

    yield of
    for session in opened.values():
        session.close()


# LoHa and LoKr know no Conv1D, which GPT-2 is made of.
PAIRS = [(a, m) for a in ("llama", "gpt2", "opt", "qwen3", "gemma2") for m in METHODS]


@pytest.mark.parametrize(("architecture", "method"), PAIRS)
def test_trains_and_survives_its_folder(
    architecture: str, method: str, sessions: Callable[[str], tenant_sdk.Session], tmp_path: Path
) -> None:
    session = sessions(architecture)
    options = AdapterOptions(method, rank=3, virtual_tokens=4, steps=5)
    torch.manual_seed(0)
    if architecture == "gpt2" and method in ("loha", "lokr"):
        with pytest.raises(ConfigurationError, match=f"{method} does not fit GPT2LMHeadModel"):
            add_adapter(session.load_model(progress=False), options)
        return
    model = add_adapter(session.load_model(progress=False), options)
    ids = torch.randint(3, 128, (2, 9))
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    loaded = load_adapter(session.load_model(progress=False), tmp_path, session)
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        # Same arithmetic, same executor: only the order of rows in a product may differ.
        torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_the_default_adapts_every_layer_but_the_head(
    sessions: Callable[[str], tenant_sdk.Session],
) -> None:
    model = add_adapter(sessions("llama").load_model(progress=False), AdapterOptions())
    assert {name.rpartition(".")[2] for name in model.peft_config["default"].target_modules} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


def test_chosen_layers(sessions: Callable[[str], tenant_sdk.Session]) -> None:
    model = sessions("llama").load_model(progress=False)
    for options, message in (
        (
            AdapterOptions(targets=("no_such_layer",)),
            "LlamaForCausalLM with target_modules='no_such_layer'; .* down_proj,gate_proj,k_proj,o_proj,",
        ),
        (
            AdapterOptions(targets=("all-linear", "lm_head")),
            "target_modules='all-linear' means all linear layers",
        ),
        (AdapterOptions("ia3", targets=("q_proj",)), "chooses its layers itself"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            add_adapter(model, options)
    for method in ("lora", "vera", "lokr"):
        model = sessions("llama").load_model(progress=False)
        with pytest.raises(ConfigurationError, match="target_modules='zz_proj': Llama"):
            add_adapter(model, AdapterOptions(method, targets=("q_proj", "zz_proj", "1.mlp.up_proj")))
    model = add_adapter(sessions("llama").load_model(progress=False), AdapterOptions(targets=("q_proj",)))
    assert model.peft_config["default"].target_modules == {"q_proj"}


def test_layers_that_peft_does_not_adapt(serve: Callable[..., Executor], tmp_path: Path) -> None:
    """Of Mamba; one layer's weight the model reads itself, past any adapter."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "state_size": 8}
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(tmp_path)
    with serve(tmp_path).connect() as session:
        with pytest.raises(
            ConfigurationError, match=r"with target_modules='all-linear'; .*: in_proj,x_proj$"
        ) as caught:
            add_adapter(session.load_model(progress=False), AdapterOptions())
        assert "not found" not in str(caught.value)  # as PEFT says
        add_adapter(session.load_model(progress=False), AdapterOptions(targets=("in_proj", "x_proj")))


def test_experts_are_adapted_without_a_warning_and_their_rank_is_told(
    sessions: Callable[[str], tenant_sdk.Session], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Two layers of a Mixtral's experts are one parameter, which PEFT gives twice the rank."""
    session = sessions("mixtral")
    model = add_adapter(session.load_model(progress=False), AdapterOptions(rank=3))
    assert other_ranks_text(model) == "; rank 6 in gate_up_proj, which is two layers in one"
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    load_adapter(session.load_model(progress=False), tmp_path, session)
    assert not recwarn.list
    with pytest.raises(ConfigurationError, match="target_modules='zz_proj': Mixtral"):
        add_adapter(
            session.load_model(progress=False), AdapterOptions(targets=("w1", "w3", "q_proj", "zz_proj"))
        )
    for method in ("lora", "adalora", "ia3"):
        model = add_adapter(sessions("llama").load_model(progress=False), AdapterOptions(method))
        assert other_ranks_text(model) == ""


def test_ranks_that_came_with_an_adapter_are_told_as_they_are() -> None:
    patterns = {"layers.0.q_proj": 4, "layers.1.q_proj": 4, "k_proj": 2, "experts.gate_up_proj": 6}
    adapted = SimpleNamespace(peft_config={"default": LoraConfig(rank_pattern=patterns)})
    assert other_ranks_text(adapted) == (
        "; rank 4 in q_proj; rank 2 in k_proj; rank 6 in gate_up_proj, which is two layers in one"
    )


@pytest.mark.parametrize("name", ["dora", "PiSSA", "olora"])
def test_methods_that_read_base_weights(name: str) -> None:
    with pytest.raises(ConfigurationError, match="reads the base weights"):
        find_method(name)


def test_folders_without_a_fitting_adapter(
    sessions: Callable[[str], tenant_sdk.Session], tmp_path: Path
) -> None:
    gpt2, llama = sessions("gpt2"), sessions("llama")
    model = add_adapter(gpt2.load_model(progress=False), AdapterOptions(rank=2))
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(ModelMismatch, match="made for another base model"):
        load_adapter(llama.load_model(progress=False), tmp_path, llama)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"half of it")
    with pytest.raises(ConfigurationError, match="cannot read"):
        load_adapter(gpt2.load_model(progress=False), tmp_path, gpt2)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"no adapter_model\.safetensors"):
        load_adapter(gpt2.load_model(progress=False), tmp_path, gpt2)
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        load_adapter(gpt2.load_model(progress=False), tmp_path / "nowhere", gpt2)
