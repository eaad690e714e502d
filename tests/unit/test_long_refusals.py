"""Long tuning: what is refused, said, and let go."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import LLAMA_LIKE, make_model
from parity import add_lora, token_ids, worst_error
from test_windows import CLOSE, LENGTH, batch, step, windows
from torch import nn
from transformers import PreTrainedModel

import tenant_sdk
from shared.errors import ConfigurationError, StorageError
from tenant_sdk.sequences.planning import MemoryPlan, StorageTier
from tenant_sdk.sequences.stack import CannotSplit


def refused(model: nn.Module, why: str) -> None:
    own = dict(vars(model))
    with pytest.raises(CannotSplit, match=why):
        windows(model, 4)
    assert dict(vars(model)).keys() == own.keys()
    assert not any("forward" in vars(module) for module in model.modules())


def causal(name: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**LLAMA_LIKE | options)
    )
    return model


def test_an_encoder_is_refused() -> None:
    refused(make_model("bert"), "is no decoder with one list of layers")


def test_attention_to_both_sides_is_refused() -> None:
    refused(causal("Llama", is_causal=False), "gives another loss")


@pytest.mark.parametrize("name", ["Mamba", "Jamba", "Lfm2"])
def test_a_recurrent_state_is_refused(name: str) -> None:
    model = causal(name, full_attn_idxs=[1]) if name == "Lfm2" else causal(name)
    refused(model, name)
    with suppress(CannotSplit):  # nor is it another error where no window is wanted
        tenant_sdk.long_tuning(model, LENGTH).close()


def test_a_choice_of_all_tokens_is_refused() -> None:
    refused(causal("Doge"), "attends to selected tokens")


def test_positions_by_length_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    refused(causal("Llama", rope_parameters=rope), "positions of .* depend on the length")


def test_a_loss_of_its_own_is_refused() -> None:
    model = causal("Mixtral", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=5.0)
    refused(model, "cannot be cut into windows")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"attention_mask": None, "position_ids": torch.arange(25).repeat(2, 2)}, "packed sequences"),
        ({"attention_mask": torch.ones(2, 1, LENGTH, LENGTH)}, "and mark padding"),
        ({"token_type_ids": torch.zeros(2, LENGTH)}, "token_type_ids cannot be cut"),
        ({"output_hidden_states": True}, "output_hidden_states=True"),
        ({"attention_mask": torch.ones(2, LENGTH).triu()}, "padding on the left.*eager"),
    ],
)
def test_batches_that_are_refused(more: dict[str, Any], why: str) -> None:
    model = add_lora(make_model("llama")).eval()
    model.set_attn_implementation("eager")
    windows(model, 16)
    with pytest.raises(ConfigurationError, match=why):
        model(**batch(**more))


def test_options_that_cannot_be() -> None:
    for options in ({"max_length": 1}, {"max_length": 8, "batch_size": 0}, {"max_length": 8, "window": 0}):
        with pytest.raises(ConfigurationError, match="no room for text"):
            tenant_sdk.long_tuning(make_model("llama"), **options)
    with pytest.raises(ConfigurationError, match="memory_gib=0"):
        tenant_sdk.long_tuning(make_model("llama"), 8, memory_gib=0)


def test_folders_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        windows(make_model("llama"), 16, folder=tmp_path / "nowhere")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    windows(make_model("llama"), 16).use(MemoryPlan(chunked_loss=True, window=16, answers=StorageTier.DISK))


def test_what_is_free_is_a_guess(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("tenant_sdk.sequences.measuring.free_memory", lambda: 0)
    model = add_lora(make_model("llama"))
    tenant_sdk.long_tuning(model, LENGTH)
    assert "by estimate; 0.0 GiB are free" in caplog.text
    with pytest.raises(ConfigurationError, match="that this process has already"):
        tenant_sdk.long_tuning(model, LENGTH, memory_gib=0.001)


def test_a_model_that_is_not_closed_goes_with_its_file() -> None:
    model = add_lora(make_model("llama")).eval()
    tuning = windows(model, 16)
    tuning.use(MemoryPlan(chunked_loss=True, window=16, answers=StorageTier.DISK, states=StorageTier.DISK))
    _, expected = step(model, **batch())
    copied = copy.deepcopy(model)
    assert tuning._spill is not None
    file, gone = tuning._spill.close, weakref.ref(model.base_model.model)
    del model, tuning
    assert worst_error(step(copied, **batch())[1], expected) < CLOSE
    with pytest.raises(CannotSplit, match="before you copy"):
        windows(copied, 16)
    del copied
    gc.collect()
    assert gone() is None
    assert not file.alive


def test_what_passes_by_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = add_lora(make_model("llama")).eval()
    windows(model, 16)
    step(model, **batch())
    with torch.no_grad():
        model(input_ids=batch()["input_ids"])
    assert not caplog.text
    for _ in range(2):
        model(input_ids=batch()["input_ids"]).logits.sum().backward()
    assert caplog.text.count("was not made as planned") == 1
    ids = token_ids(1, LENGTH + 1)
    step(model, input_ids=ids, labels=ids)
    assert f"longer than the {LENGTH} tokens" in caplog.text
    with pytest.raises(ConfigurationError, match="TRL's trainers"):
        model(**batch(fused_lm_head=True))


def test_losses_and_noise_of_its_own_are_refused() -> None:
    model = add_lora(make_model("llama")).train()
    tuning = windows(model, 16)
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    with pytest.raises(ConfigurationError, match="NEFTune"):
        model(**batch())
    tuning.use(MemoryPlan(chunked_loss=True))
    assert step(model, **batch())[1]
    with pytest.raises(ConfigurationError, match="output_router_logits"):
        model(**batch(output_router_logits=True))
    model.base_model.model.loss_function = lambda **_: torch.zeros(())
    with pytest.raises(ConfigurationError, match="has its own loss_function"):
        model(**batch())
