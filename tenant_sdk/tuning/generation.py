"""Text from a prompt, token by token: what `symbiosis-tenant generate` does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer, set_seed

from shared.errors import ConfigurationError, Message
from tenant_sdk.terminal import visible
from tenant_sdk.tuning.data import chat_prompt, check_embedded, prompt_tokens
from tenant_sdk.tuning.sampling import Sampling

# A stretch that is there at least so often, and fills at least so many tokens, is a loop.
_TIMES, _LOOP_TOKENS = 3, 32


class _Terminal(TextStreamer):
    """What a peer's tokenizer decodes is shown without control characters."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """See TextStreamer."""
        super().on_finalized_text(visible(text), stream_end=stream_end)


class _Loop(StoppingCriteria):
    """Stops a text that goes round in circles; which tokens are chosen before that, it leaves alone."""

    def __init__(self, prompt: int) -> None:
        self._prompt, self.found = prompt, False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """See StoppingCriteria; ``[B]``, of which there is one here."""
        self.found = in_a_loop(input_ids[0, self._prompt :].tolist())
        return torch.full((input_ids.shape[0],), self.found, device=input_ids.device)


def in_a_loop(tokens: list[int]) -> bool:
    """Whether tokens end with the same stretch, of any length, three times over and 32 tokens in all."""
    for period in range(1, len(tokens) // _TIMES + 1):
        of_it = max(_TIMES, -(-_LOOP_TOKENS // period)) * period
        if of_it <= len(tokens) and tokens[-of_it:-period] == tokens[period - of_it :]:
            return True
    return False


@dataclass(frozen=True)
class Written:
    """How many new tokens, in how many seconds, and why there are no more."""

    tokens: int
    seconds: float
    end: Message


def stream(
    model: Any,
    tokenizer: Any,
    prompt: str,
    sampling: Sampling,
    *,
    chat: bool = False,
    fitting: Callable[[int], dict[str, Any]] | None = None,
) -> Written:
    """Write the continuation of a prompt to standard output, each word as soon as it is whole.

    Args:
        chat: the prompt is a user's message; put it and what begins an answer into the chat template.
        fitting: what else ``generate`` gets for a context of so many tokens, such as ``generate_options``.

    Raises:
        ConfigurationError: the prompt is empty or, with what shall follow, longer than the model's context;
            or there is no chat template.
    """
    tokens = chat_prompt(tokenizer, prompt) if chat else prompt_tokens(tokenizer, prompt)
    check_embedded(tokenizer, tokens, model.get_input_embeddings().weight.shape[0], "the prompt")
    ids = torch.tensor([tokens], device=model.device)
    config = sampling.config(model, tokenizer)
    limit = getattr(model.config, "max_position_embeddings", None)
    if ids.shape[1] == 0:
        raise ConfigurationError("the prompt is empty")
    if limit is not None and ids.shape[1] + sampling.max_new_tokens > limit:
        remaining = limit - ids.shape[1]
        if remaining > 0:
            todo = Message("ask for at most {} with {max_new_tokens}", remaining)
        else:
            fewer = f"{1 - remaining} token{'s'[: remaining != 0]}"
            todo = Message("shorten the prompt by at least {}, or more for a longer answer", fewer)
        raise ConfigurationError(
            "the prompt has {} tokens and the model's context {}: {}", ids.shape[1], limit, todo
        )
    loop = _Loop(ids.shape[1])
    more = fitting(ids.shape[1] + sampling.max_new_tokens) if fitting is not None else {}
    set_seed(sampling.seed)
    model.eval()
    started = time.perf_counter()
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        tokenizer=tokenizer if sampling.stop else None,
        stopping_criteria=StoppingCriteriaList([] if sampling.allow_loops else [loop]),
        streamer=_Terminal(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **more,
    )
    seconds, new = time.perf_counter() - started, out[0, ids.shape[1] :].tolist()
    if new[-1] in (config.eos_token_id or ()):
        end = Message("the model ended its text")
    elif loop.found:
        end = Message("the text repeated itself ({allow_loops} goes on)", allow_loops=True)
    elif len(new) == sampling.max_new_tokens:
        end = Message("{max_new_tokens}")
    else:
        end = Message("{stop}")
    return Written(len(new), seconds, end)
