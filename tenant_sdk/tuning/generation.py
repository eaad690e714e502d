"""Text from prompts: the work of `symbiosis-tenant generate` and `chat`."""

from __future__ import annotations

import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextStreamer,
    set_seed,
)
from transformers.generation.streamers import BaseStreamer

from shared.errors import ConfigurationError, OptionText, counted
from tenant_sdk.sequences.positions import rope_stable_length
from tenant_sdk.sequences.text_cache import can_crop
from tenant_sdk.terminal import visible
from tenant_sdk.trust.attestation import base_model
from tenant_sdk.tuning.data import check_token_ids
from tenant_sdk.tuning.sampling import Sampling

# A stretch that is there at least so often, and fills at least so many tokens, is a loop.
_REPETITIONS, _REPEATED_TOKENS = 3, 32
_BATCH = 4  # prompts of many that are answered together


class _SafeStreamer(TextStreamer):
    """What a peer's tokenizer decodes is shown without control characters."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """See TextStreamer."""
        super().on_finalized_text(visible(text), stream_end=stream_end)


class _StopAtRepetition(StoppingCriteria):
    """Stops a text that goes round in circles; which tokens are chosen before that, it leaves alone."""

    def __init__(self, prompt: int) -> None:
        self._prompt, self.found = prompt, False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """See StoppingCriteria; ``[B]``."""
        found = [repeats_itself(row) for row in input_ids[:, self._prompt :].tolist()]
        self.found = any(found)
        return torch.tensor(found, device=input_ids.device)


class _StopWhenInterrupted(StoppingCriteria):
    """Stops a text that its reader has seen enough of."""

    def __init__(self, interrupted: Callable[[], bool]) -> None:
        self._asked, self.found = interrupted, False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """See StoppingCriteria; ``[B]``, of which there is one here."""
        self.found = self._asked()
        return torch.full((input_ids.shape[0],), self.found, device=input_ids.device)


class _RecordLengths(StoppingCriteria):
    """Other criteria together; remembers at which length each of several texts ended.

    ``generate`` goes on with a text that has ended until all have. It fills up with padding if the model has
    an end token, else with further text.
    """

    def __init__(self, criteria: StoppingCriteriaList, prompt: int) -> None:
        self._criteria, self._prompt = criteria, prompt
        self.by_row: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """See StoppingCriteria; ``[B]``."""
        ended: Any = self._criteria(input_ids, scores, **kwargs)
        for row in ended.nonzero().flatten().tolist():
            self.by_row.setdefault(row, input_ids.shape[1] - self._prompt)
        return ended  # type: ignore[no-any-return]


def repeats_itself(tokens: list[int]) -> bool:
    """Whether tokens end with the same stretch, of any length, three times over and 32 tokens in all."""
    for period in range(1, len(tokens) // _REPETITIONS + 1):
        if tokens[-1] != tokens[-1 - period]:  # as for most; the rest would take the square of the length
            continue
        of_it = max(_REPETITIONS, -(-_REPEATED_TOKENS // period)) * period
        if of_it <= len(tokens) and tokens[-of_it:-period] == tokens[period - of_it :]:
            return True
    return False


class Decoder(Protocol):
    """Another way for ``generate`` to write a text, such as a draft."""

    def streaming(self, streamer: BaseStreamer) -> Callable[..., Any]:
        """A function for ``custom_generate`` that passes tokens to a streamer."""


@dataclass(frozen=True)
class GenerationOutput:
    """The text, how many new tokens, in how many seconds, and why there are no more.

    ``raw``: with special tokens. ``ended``: the model ended it.
    """

    text: str
    raw: str
    tokens: int
    seconds: float
    end: OptionText
    ended: bool


def context_length(model: Any) -> int:
    """Tokens of prompt and answer together, at most, beside the virtual tokens of the model's adapter."""
    config = getattr(model, "active_peft_config", None)
    virtual = getattr(config, "num_virtual_tokens", None) or 0
    return (getattr(model.config, "max_position_embeddings", None) or sys.maxsize) - virtual


def sequence_length(asked: int, model: Any, virtual_tokens: int = 0) -> int:
    """How many tokens of an example fit into the model's context, at most ``asked``.

    Args:
        virtual_tokens: of an adapter that the model is yet to get.

    Raises:
        ConfigurationError: there is none.
    """
    available = context_length(model) - virtual_tokens
    if (length := min(asked, available)) < 2:
        positions = getattr(model.config, "max_position_embeddings", None) or asked
        raise ConfigurationError(
            "no room for text: the model takes {} positions, {} of them for virtual tokens, and "
            "{sequence_length}",
            *(positions, max(positions - available, 0)),
            sequence_length=asked,
        )
    return length


def check_prompt(
    model: Any, tokenizer: Any, tokens: Sequence[int], sampling: Sampling, name: str = "the prompt"
) -> None:
    """Refuse a prompt that the model cannot answer.

    Args:
        tokens: its ids.
        name: of the prompt, in errors.

    Raises:
        ConfigurationError: it is empty, has unknown tokens, or leaves no room in the context for an answer.
    """
    check_token_ids(tokenizer, tokens, model.get_input_embeddings().weight.shape[0], name)
    limit = context_length(model)
    if not tokens:
        raise ConfigurationError(f"{name} is empty")
    if len(tokens) + sampling.most_tokens > limit:
        remaining = limit - len(tokens)
        if remaining > 0:
            todo = OptionText("ask for at most {} with {max_new_tokens}", remaining)
        else:
            fewer = counted(1 - remaining, "token")
            todo = OptionText("shorten the prompt by at least {}, or more for a longer answer", fewer)
        raise ConfigurationError(
            "{} has {} tokens and the model's context {}: {}", name, len(tokens), limit, todo
        )


def stream(
    model: Any,
    tokenizer: Any,
    tokens: Sequence[int],
    sampling: Sampling,
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    interrupted: Callable[[], bool] = lambda: False,
    draft: Decoder | None = None,
) -> GenerationOutput:
    """Write the continuation of a prompt to standard output, each word as soon as it is whole.

    Args:
        tokens: ids of the prompt, as ``prompt_tokens`` or ``chat_prompt`` gives them.
        options: more arguments of ``model.generate``, such as ``generate_options`` makes.
        interrupted: asked after each token; True ends the text.
        draft: guesses tokens, several of which a pass of the model checks.

    Raises:
        ConfigurationError: the prompt is empty or, with what shall follow, longer than the model's context.
    """
    check_prompt(model, tokenizer, tokens, sampling)
    ids = torch.tensor([tokens], device=model.device)
    config = sampling.config(model, tokenizer)
    loop, enough = _StopAtRepetition(ids.shape[1]), _StopWhenInterrupted(interrupted)
    set_seed(sampling.seed)
    model.eval()
    streamer = _SafeStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    shown = {"streamer": streamer} if draft is None else {"custom_generate": draft.streaming(streamer)}
    started = time.perf_counter()
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        tokenizer=tokenizer if sampling.stop else None,
        stopping_criteria=StoppingCriteriaList([enough] if sampling.allow_loops else [enough, loop]),
        **shown,
        **options,
    )
    seconds, new = time.perf_counter() - started, out[0, ids.shape[1] :].tolist()
    ended = new[-1] in (config.eos_token_id or ())
    if ended:
        end = OptionText("the model ended its text")
    elif enough.found:
        end = OptionText("interrupted")
    elif loop.found:
        end = OptionText("the text repeated itself ({allow_loops} goes on)", allow_loops=True)
    elif len(new) == sampling.most_tokens:
        end = OptionText("{max_new_tokens}")
    else:
        end = OptionText("{stop}")
    text, raw = (tokenizer.decode(new, skip_special_tokens=skip) for skip in (True, False))
    return GenerationOutput(text, raw, len(new), seconds, end, ended)


def answer_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    options: Callable[[int, int], Mapping[str, Any]],
) -> Iterator[str]:
    """Answers to many prompts, some of them together, as ``stream`` would write each.

    Args:
        options: gets the number of prompts of a batch, and of tokens of the longest with its answer; returns
            more arguments of ``model.generate``.

    Raises:
        ConfigurationError: see ``check_prompt``.
    """
    for number, tokens in enumerate(prompts, 1):
        check_prompt(model, tokenizer, tokens, sampling, f"prompt {number}")
    set_seed(sampling.seed)

    def more(count: int, length: int) -> Mapping[str, Any]:
        loop = [] if sampling.allow_loops else [_StopAtRepetition(length - sampling.most_tokens)]
        return {**options(count, length), "stopping_criteria": loop}

    return generate_answers(model, tokenizer, prompts, sampling, more)


def generate_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    options: Callable[[int, int], Mapping[str, Any]] = lambda *_: {},
) -> Iterator[str]:
    """Continuations of prompts, without special tokens; some prompts are answered together.

    Args:
        options: see ``answer_prompts``.
    """
    longest = max(map(len, prompts), default=0) + sampling.most_tokens
    # Some releases of transformers (5.19) count padding as text that is repeated.
    padded = sampling.repetition_penalty == 1 and ignores_padding(model, longest)
    for part in batched(prompts, padded=padded):
        more = options(len(part), max(map(len, part)) + sampling.most_tokens)
        ids = answer_ids(model, tokenizer, part, sampling, more)
        yield from (text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True))


def ignores_padding(model: Any, longest: int) -> bool:
    """Whether an answer is the same if padding stands before its prompt, beside texts of so many tokens.

    Virtual tokens stand before the padding, and PEFT counts it in positions; recurrent layers may compute it;
    models that are told no positions may count it; and positions may depend on the longest text.
    """
    adapter = getattr(model, "active_peft_config", None)
    base: Any = base_model(model)
    return not (
        (adapter is not None and adapter.is_prompt_learning)
        or getattr(base, "_is_stateful", False)
        or not can_crop(DynamicCache(config=base.config))
        or "position_ids" not in inspect.signature(base.forward).parameters
        or ((stable_length := rope_stable_length(base)) is not None and longest > stable_length)
    )


def batched(
    prompts: Sequence[Sequence[int]], *, padded: bool, size: int = _BATCH
) -> Iterator[Sequence[Sequence[int]]]:
    """Prompts that are answered together, in order; without padding, they have one length."""
    same = [prompts] if padded else [[*each] for _, each in itertools.groupby(prompts, key=len)]
    for each in same:
        for at in range(0, len(each), size):
            yield each[at : at + size]


@torch.no_grad()
def answer_ids(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[list[int]]:
    """Continuations of prompts, which are written at once: ids, up to the one with which a text ends.

    Args:
        prompts: of several lengths only if the model ignores padding.
        options: more arguments of ``model.generate``.
    """
    config = sampling.config(model, tokenizer)
    longest, padding = max(map(len, prompts)), config.pad_token_id or 0
    ids = torch.tensor([[padding] * (longest - len(each)) + [*each] for each in prompts], device=model.device)
    attended = torch.tensor(
        [[0] * (longest - len(each)) + [1] * len(each) for each in prompts], device=model.device
    )
    was_training = model.training
    model.eval()
    config.use_cache = True  # which packing switches off
    criteria = StoppingCriteriaList(options.get("stopping_criteria", ()))
    if config.eos_token_id:
        criteria.append(EosTokenCriteria(config.eos_token_id))
    if sampling.stop:
        criteria.append(StopStringCriteria(tokenizer, list(sampling.stop)))
        config.stop_strings = None
    lengths = _RecordLengths(criteria, longest)
    out = model.generate(
        input_ids=ids,
        attention_mask=attended,
        generation_config=config,
        **{**options, "stopping_criteria": StoppingCriteriaList([lengths])},
    )
    model.train(was_training)
    return [row[: lengths.by_row.get(at, len(row))] for at, row in enumerate(out[:, longest:].tolist())]
