"""Answers to several prompts together: each is the answer to its prompt alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from commands import BASE_MODEL
from drafting import with_adapter
from test_long_generation import _PLAIN, ZOO
from transformers import AutoModelForCausalLM, AutoTokenizer

from tenant_sdk.tuning.adapters import METHODS
from tenant_sdk.tuning.data import prompt_tokens
from tenant_sdk.tuning.generation import answer_prompts, generate_answers
from tenant_sdk.tuning.sampling import Sampling

TOKENS = 16
LENGTHS = (7, 19, 19, 30, 12, 12)
_KINDS = {
    **ZOO,
    "minimax": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {**_PLAIN, "num_local_experts": 2, "head_dim": 16, "block_size": 16}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
}


class Numbers:
    """A tokenizer whose texts are ids."""

    eos_token_id = None

    def batch_decode(self, rows: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


def model_of(kind: str, kinds: Mapping[str, tuple[str, str, dict[str, Any]]] = _KINDS) -> Any:
    """A tiny model with weights of chance, which ends no text."""
    class_name, config_name, options = kinds[kind]
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(getattr(transformers, config_name)(**options)).eval()
    model.generation_config.eos_token_id = None  # it would end texts at any time
    return model


def check_together(model: Any) -> None:
    chance = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 128, (length,), generator=chance).tolist() for length in LENGTHS]
    sampling, tokenizer = Sampling(max_new_tokens=TOKENS), Numbers()
    alone = [next(generate_answers(model, tokenizer, [prompt], sampling)) for prompt in prompts]
    assert list(generate_answers(model, tokenizer, prompts, sampling)) == alone
    assert all(len(answer.split()) == TOKENS for answer in alone)


@pytest.mark.parametrize("kind", _KINDS)
def test_of_models(kind: str) -> None:
    check_together(model_of(kind))


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize("method", METHODS)
def test_of_adapters(method: str) -> None:
    """Virtual tokens stand before the padding, and PEFT counts the padding in positions."""
    check_together(with_adapter(model_of("llama"), method))


@pytest.mark.parametrize("ends", ["with a word as padding", "without an end token"])
def test_a_text_that_ends_before_others_stays_as_it_is(ends: str) -> None:
    """`generate` goes on with a text that has ended until all have."""
    model = AutoModelForCausalLM.from_pretrained(BASE_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    if ends == "without an end token":
        model.generation_config.eos_token_id = tokenizer.eos_token = None
    model.generation_config.pad_token_id = 40
    prompts = [prompt_tokens(tokenizer, text) for text in ("And in the beginning", "The king", "A dog")]
    sampling = Sampling(max_new_tokens=24, stop=(",",))
    alone = [next(answer_prompts(model, tokenizer, [each], sampling, no_options)) for each in prompts]
    assert list(answer_prompts(model, tokenizer, prompts, sampling, no_options)) == alone
    assert len({len(tokenizer(text).input_ids) for text in alone}) > 1


def test_padding_is_no_text_that_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    generate, masks = model.generate, list[torch.Tensor]()

    def watched(**options: Any) -> Any:
        masks.append(options["attention_mask"])
        return generate(**options)

    monkeypatch.setattr(model, "generate", watched)
    sampling = Sampling(max_new_tokens=4, repetition_penalty=1.5)
    assert len(list(generate_answers(model, Numbers(), [[3, 4], [5, 6, 7], [8, 9, 10]], sampling))) == 3
    assert [mask.shape[0] for mask in masks] == [1, 2]
    assert all(mask.all() for mask in masks)


def no_options(*_: int) -> dict[str, Any]:
    return {}
