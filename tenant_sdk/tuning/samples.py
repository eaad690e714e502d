"""Answers to held-out prompts, by the base and by the adapter, for people to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tenant_sdk.tuning.conversations import IGNORE_INDEX, Example
from tenant_sdk.tuning.generation import context_length, generate_answers
from tenant_sdk.tuning.options import MAX_ANSWER_TOKENS
from tenant_sdk.tuning.sampling import Sampling

_LONGEST = 1024  # tokens of a prompt


@dataclass(frozen=True)
class Sample:
    """A held-out prompt, the answer in the data, and those of base and adapter (None: not known)."""

    prompt: str
    expected: str
    base: str | None
    adapted: str | None


def right(samples: Sequence[Sample], answer: Callable[[Sample], str | None]) -> int | None:
    """How many answers are those of the data; None: an answer is not known."""
    answers = [answer(each) for each in samples]
    if None in answers:
        return None
    return sum(said == each.expected for said, each in zip(answers, samples, strict=True))


def sample_prompts(
    examples: Sequence[Example],
    max_prompts: int | None,
    context: int = _LONGEST,
    max_tokens: int = MAX_ANSWER_TOKENS,
) -> list[tuple[list[int], list[int]]]:
    """Ids of prompts and of their answers, of the first examples that have a short one and fit a context.

    Args:
        max_prompts: None: all.
        max_tokens: of an answer.
    """
    pairs: list[tuple[list[int], list[int]]] = []
    for example in examples:
        if len(pairs) == max_prompts:
            break
        labels = example["labels"]
        begin = next((at for at, label in enumerate(labels) if label != IGNORE_INDEX), 0)
        end = next((at for at in range(begin, len(labels)) if labels[at] == IGNORE_INDEX), len(labels))
        if 0 < begin <= min(_LONGEST, context - max_tokens - 1) and end - begin <= max_tokens:
            pairs.append((example["input_ids"][:begin], example["input_ids"][begin:end]))
    return pairs


@contextmanager
def base_alone(model: Any) -> Iterator[bool]:
    """Around work of the base model alone. False: an adapter's biases stay when it is switched off."""
    if not hasattr(model, "peft_config"):
        yield True
    elif getattr(model.active_peft_config, "bias", "none") != "none":
        yield False
    else:
        with model.disable_adapter():
            yield True


def compare(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    max_prompts: int | None,
    max_tokens: int = MAX_ANSWER_TOKENS,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[Sample]:
    """Have the base and the adapter of a model answer the first held-out prompts with short answers.

    Args:
        model: a PEFT model, or a base model without adapter.
        max_prompts: None: all.
        max_tokens: of a short answer.
        progress: called with the number of answers that are written, and of all.
    """
    adapted = hasattr(model, "peft_config")
    pairs = sample_prompts(examples, max_prompts, context_length(model), max_tokens)
    if not pairs:
        return []
    prompts, expected = zip(*pairs, strict=True)
    sampling = Sampling(max_new_tokens=max(map(len, expected)) + 1)
    unknown: list[str | None] = [None] * len(prompts)

    def answers(before: int) -> list[str | None]:
        found: list[str | None] = []
        for text in generate_answers(model, tokenizer, prompts, sampling):
            found.append(text)
            progress(before + len(found), len(prompts) * (1 + adapted))
        return found

    its = answers(0) if adapted else unknown
    with base_alone(model) as alone:
        base = answers(len(prompts) * adapted) if alone else unknown
    texts = (
        [text.strip() for text in tokenizer.batch_decode([*ids], skip_special_tokens=True)]
        for ids in (prompts, expected)
    )
    return [Sample(*row) for row in zip(*texts, base, its, strict=True)]
