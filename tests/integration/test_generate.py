"""``generate`` is unmodified and gives the tokens that a local model gives, with every way of decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Executor
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

# float32 products differ in the last bits between a product of one row and of many, on either side;
# random tiny models have no two candidates that close, so tokens must be equal, not similar.
PROMPTS = torch.tensor([[5, 9, 17, 33, 65, 2 + 90, 77, 21]])
PADDED = {
    "input_ids": torch.tensor([[0, 0, 0, 5, 9, 17, 33, 65], [11, 12, 13, 14, 15, 16, 17, 18]]),
    "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8]),
}
GENERATE_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "no cache": {"use_cache": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "beams": {"num_beams": 3},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "repetition penalty": {"repetition_penalty": 1.3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "dynamic cache": {"cache_implementation": "dynamic"},
}


@pytest.fixture(scope="module")
def pair(
    llama: Executor, checkpoint: Callable[[str], Path]
) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """The remote and the local model."""
    with llama.connect() as session:
        local = AutoModelForCausalLM.from_pretrained(checkpoint("llama")).eval()
        yield session.load_model(progress=False), local


def tokens(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    torch.manual_seed(7)  # sampling draws from torch's generator
    options = {"do_sample": False, "max_new_tokens": 16, "min_new_tokens": 16, **options}
    return model.generate(**inputs, **options)


@pytest.mark.parametrize("way", GENERATE_OPTIONS)
def test_tokens_equal_local(way: str, pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    inputs = {"input_ids": PROMPTS, "attention_mask": torch.ones_like(PROMPTS)}
    remote, local = (tokens(model, inputs, **GENERATE_OPTIONS[way]) for model in pair)
    assert remote.shape[1] == PROMPTS.shape[1] + 16
    assert torch.equal(remote, local)


@pytest.mark.parametrize("way", ["greedy", "beams", "sampling"])
def test_a_batch_with_left_padding(way: str, pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    remote, local = (tokens(model, PADDED, **GENERATE_OPTIONS[way]) for model in pair)
    assert torch.equal(remote, local)


def test_a_prompt_that_fills_the_context(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    ids = torch.arange(112).view(1, 112) % 128
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(*(tokens(model, inputs) for model in pair))


def test_noise_bank_gives_the_same_tokens(llama: Executor, checkpoint: Callable[[str], Path]) -> None:
    local = AutoModelForCausalLM.from_pretrained(checkpoint("llama")).eval()
    with llama.connect(privacy="noise-bank") as session:
        remote = session.load_model(progress=False)
        assert torch.equal(tokens(remote, PADDED), tokens(local, PADDED))
        assert session.stats.effect_requests > 0


def test_adapters_switch_on_and_off(llama: Executor, checkpoint: Callable[[str], Path]) -> None:
    local = AutoModelForCausalLM.from_pretrained(checkpoint("llama")).eval()
    with llama.connect() as session:
        models = []
        for model in (session.load_model(progress=False), local):
            torch.manual_seed(3)
            config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
            models.append(get_peft_model(model, config).eval())
        with_adapter = [tokens(model, PADDED) for model in models]
        assert torch.equal(*with_adapter)
        for model in models:
            model.disable_adapter_layers()
        without = [tokens(model, PADDED) for model in models]
        assert torch.equal(*without)
        assert not torch.equal(without[0], with_adapter[0])


def test_a_step_costs_four_round_trips_a_block(
    pair: tuple[PreTrainedModel, PreTrainedModel], llama: Executor
) -> None:
    with llama.connect() as session:
        model = session.load_model(progress=False)
        tokens(model, PADDED, max_new_tokens=1, min_new_tokens=1)
        before = session.stats
        tokens(model, PADDED, max_new_tokens=5, min_new_tokens=5)
        after = session.stats
    # 2 blocks, 4 groups each, prefill and 4 more steps.
    assert after.requests - before.requests == 2 * 4 * 5
    assert after.rows - before.rows == 2 * 4 * (16 + 4 * 2)
