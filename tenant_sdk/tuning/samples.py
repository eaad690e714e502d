"""Answers to held-out prompts, by the base and by the adapter, for people to compare after a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tenant_sdk.terminal import visible
from tenant_sdk.tuning.conversations import IGNORE_INDEX, Example
from tenant_sdk.tuning.generation import context_of
from tenant_sdk.tuning.sampling import Sampling

MAX_ANSWER_TOKENS = 64  # tokens of an answer that is compared
_LONGEST, _AT_ONCE = 1024, 4  # tokens of a prompt, and prompts in memory


@dataclass(frozen=True)
class Sample:
    """A held-out prompt, the answer in the data, and those of the base (None: not known) and the adapter."""

    prompt: str
    expected: str
    base: str | None
    adapted: str


def sample_prompts(
    examples: Sequence[Example], max_prompts: int, context: int = _LONGEST
) -> list[tuple[list[int], list[int]]]:
    """Ids of prompts and of their answers, of the first examples that have a short one and fit a context."""
    pairs = []
    for example in examples:
        labels = example["labels"]
        begin = next((at for at, label in enumerate(labels) if label != IGNORE_INDEX), 0)
        end = next((at for at in range(begin, len(labels)) if labels[at] == IGNORE_INDEX), len(labels))
        if 0 < begin <= min(_LONGEST, context - MAX_ANSWER_TOKENS - 1) and end - begin <= MAX_ANSWER_TOKENS:
            pairs.append((example["input_ids"][:begin], example["input_ids"][begin:end]))
        if len(pairs) == max_prompts:
            break
    return pairs


def generate_answers(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[str]:
    """Greedy continuations of prompts, of at most so many tokens, without special tokens."""
    parts = [prompts[at : at + _AT_ONCE] for at in range(0, len(prompts), _AT_ONCE)]
    answers = [ids for part in parts for ids in answer_ids(model, tokenizer, part, max_tokens)]
    return [text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]


@torch.no_grad()
def answer_ids(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Greedy continuations of prompts, which are written at once: ids, up to the one that ends a text."""
    config = Sampling(max_new_tokens=max_tokens).config(model, tokenizer)
    longest, padding = max(map(len, prompts)), config.pad_token_id or 0
    ids = torch.tensor([[padding] * (longest - len(each)) + [*each] for each in prompts], device=model.device)
    attended = torch.tensor(
        [[0] * (longest - len(each)) + [1] * len(each) for each in prompts], device=model.device
    )
    was_training = model.training
    model.eval()
    config.use_cache = True  # which packing switches off
    out = model.generate(input_ids=ids, attention_mask=attended, generation_config=config)
    model.train(was_training)
    ends = set(config.eos_token_id or ())
    return [_up_to(row, ends) for row in out[:, longest:].tolist()]


def _up_to(ids: list[int], ends: set[int]) -> list[int]:
    """Ids up to the first end, which stays."""
    return ids[: next((at + 1 for at, each in enumerate(ids) if each in ends), len(ids))]


def compare(model: Any, tokenizer: Any, examples: Sequence[Example], max_prompts: int) -> list[Sample]:
    """Have the base and the adapter of a PEFT model answer the first held-out prompts with short answers."""
    virtual = getattr(model.active_peft_config, "num_virtual_tokens", None) or 0
    pairs = sample_prompts(examples, max_prompts, context_of(model) - virtual)
    if not pairs:
        return []
    prompts, expected = zip(*pairs, strict=True)
    length = max(map(len, expected)) + 1
    adapted = generate_answers(model, tokenizer, prompts, length)
    base: list[str] | list[None] = [None] * len(prompts)
    # An adapter that is disabled leaves its biases in place.
    if getattr(model.active_peft_config, "bias", "none") == "none":
        with model.disable_adapter():
            base = [visible(text) for text in generate_answers(model, tokenizer, prompts, length)]
    texts = (
        [text.strip() for text in tokenizer.batch_decode([*ids], skip_special_tokens=True)]
        for ids in (prompts, expected)
    )
    rows = zip(*texts, adapted, base, strict=True)
    return [
        Sample(visible(prompt), visible(answer), its, visible(said)) for prompt, answer, said, its in rows
    ]
