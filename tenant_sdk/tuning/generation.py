"""Text from a prompt, token by token: what `symbiosis-tenant generate` does."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import TextStreamer, set_seed

from shared.errors import ConfigurationError
from tenant_sdk.tuning.sampling import Sampling


class _Terminal(TextStreamer):
    """What a peer's tokenizer decodes is shown without control characters."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """See TextStreamer."""
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        super().on_finalized_text(shown, stream_end=stream_end)


def stream(model: Any, tokenizer: Any, prompt: str, sampling: Sampling) -> tuple[int, float]:
    """Write the continuation of a prompt to standard output, each word as soon as it is whole.

    Returns:
        Number of new tokens, seconds.

    Raises:
        ConfigurationError: the prompt is empty or, with what shall follow, longer than the model's context.
    """
    ids = torch.tensor([tokenizer(prompt, verbose=False)["input_ids"]], device=model.device)
    config = sampling.config(model)
    limit = getattr(model.config, "max_position_embeddings", None)
    if ids.shape[1] == 0:
        raise ConfigurationError("the prompt is empty")
    if limit is not None and ids.shape[1] + sampling.max_new_tokens > limit:
        raise ConfigurationError(
            f"the prompt has {ids.shape[1]} tokens and the model's context {limit}: ask for at most "
            f"{max(0, limit - ids.shape[1])} with --max-new-tokens"
        )
    set_seed(sampling.seed)
    model.eval()
    started = time.perf_counter()
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        streamer=_Terminal(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    return out.shape[1] - ids.shape[1], time.perf_counter() - started
