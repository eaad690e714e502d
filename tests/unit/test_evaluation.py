"""Whether a model's loss is that of the tokens that come next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import BASE_MODEL
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.errors import ConfigurationError
from tenant_sdk.tuning.adapters import METHODS, AdapterOptions, add_adapter, find_method
from tenant_sdk.tuning.evaluation import perplexity
from tenant_sdk.tuning.generation import context_length
from tenant_sdk.tuning.warm_up import warm_up

SMALL = {"vocab_size": 64, "max_position_embeddings": 32, "pad_token_id": 0}
IDS = [5, 9, 7, 30, 31, 8, 11]
EXAMPLE = {"input_ids": IDS, "labels": [-100, -100, *IDS[2:]]}


def model(name: str, **sizes: Any) -> Any:
    """A small model with random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config)


LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
BART = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}
MIXTRAL = LLAMA | {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}


@pytest.mark.parametrize(
    ("name", "sizes", "right"),
    [("Llama", LLAMA, True), ("Mixtral", MIXTRAL, True), ("Bart", BART, False), ("Pegasus", BART, False)],
)
@pytest.mark.parametrize("adapter", [None, LoraConfig, PromptTuningConfig])
def test_a_loss_is_that_of_the_next_tokens(
    name: str, sizes: dict[str, Any], right: bool, adapter: Any
) -> None:
    causal = model(name, **sizes)
    if adapter is not None:
        more = {"num_virtual_tokens": 4} if adapter is PromptTuningConfig else {"target_modules": ["q_proj"]}
        causal = get_peft_model(causal, adapter(task_type="CAUSAL_LM", **more))
    for measure in (lambda: warm_up(causal, [EXAMPLE]), lambda: perplexity(causal, [EXAMPLE], 1)):
        if right:
            measure()
            continue
        with pytest.raises(ConfigurationError, match=rf"^{name}ForCausalLM compares each prediction"):
            measure()


# PEFT calls the newest transformers so.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("method", METHODS)
def test_a_methods_own_terms_are_no_loss_of_tokens(method: str, tmp_path: Path) -> None:
    """A trained model: its loss is far from that of the tokens themselves, and AdaLoRA adds 2 to it."""
    base = AutoModelForCausalLM.from_pretrained(BASE_MODEL)
    words = AutoTokenizer.from_pretrained(BASE_MODEL)
    ids = words("And in the morning he went down to the sea, and found the ship.")["input_ids"]
    examples = [{"input_ids": ids, "labels": list(ids)}]
    expected = perplexity(base, examples, 1)
    options = AdapterOptions(method, rank=16, virtual_tokens=4, steps=10)
    adapted = add_adapter(base, options)
    assert any(warm_up(adapted, examples).values())
    with adapted.disable_adapter():
        assert perplexity(adapted, examples, 1) == pytest.approx(expected, rel=1e-4)
    measured = perplexity(adapted, examples, 1)
    if not find_method(method).prompt_like:
        assert measured == pytest.approx(expected, rel=1e-3)  # a new adapter changes nothing
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE_MODEL), tmp_path)
    assert perplexity(loaded, examples, 1) == pytest.approx(measured, rel=1e-4)


def test_virtual_tokens_take_room_in_the_context() -> None:
    causal = model("Llama", **LLAMA)
    assert context_length(causal) == 32
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    assert context_length(get_peft_model(causal, config)) == 28
