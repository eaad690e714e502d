"""A conversation with a model, of which each answer is written to standard output as it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shared.errors import ConfigurationError, Message
from tenant_sdk.tuning.data import chat_prompt
from tenant_sdk.tuning.generation import Written, context_of, stream
from tenant_sdk.tuning.sampling import Sampling

ANSWER = 1000  # tokens of an answer, unless another number is given


class Chat:
    """Messages, and the keys and values of their tokens, which are sent once.

    Args:
        sampling: an answer is also cut where the model's context ends.
        opening: messages before the user's first one, such as a system message.
        resumed: gets the ids of a prompt ``[1, T]``, the number of tokens with the answer, and what it
            returned for the last prompt; returns what ``generate`` gets. See ``LongContext.resumed``.

    Attributes:
        messages: of the conversation; an answer that was interrupted counts as far as it went.

    Raises:
        ConfigurationError: the tokenizer has no chat template, or it does not take the opening.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        sampling: Sampling,
        *,
        opening: Sequence[dict[str, str]] = (),
        resumed: Callable[[Tensor, int, dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        self._model, self._tokenizer, self._sampling = model, tokenizer, sampling
        self._opening, self._resumed = [*opening], resumed
        self.clear()
        chat_prompt(tokenizer, [*opening, {"role": "user", "content": "?"}])

    def clear(self) -> None:
        """Forget the conversation, all but its opening."""
        self.messages, self._options = [*self._opening], dict[str, Any]()

    def ask(self, text: str, interrupted: Callable[[], bool] = lambda: False) -> Written:
        """Have a user's message answered; it stays in the conversation if it was.

        Raises:
            ConfigurationError: the conversation does not fit into the model's context.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        tokens = chat_prompt(self._tokenizer, messages)
        room = context_of(self._model) - len(tokens)
        if room < 1:
            raise ConfigurationError(
                Message(
                    "the conversation has {} tokens, and the model's context {}: /clear begins a new one",
                    *(len(tokens), context_of(self._model)),
                )
            )
        most = min(self._sampling.max_new_tokens or ANSWER, room)
        sampling = replace(self._sampling, max_new_tokens=most)
        # If this fails, keys and values are of half a text, and of no more use.
        before, self._options = self._options, {}
        options = {}
        if self._resumed is not None:
            ids = torch.tensor([tokens], device=self._model.device)
            options = self._resumed(ids, len(tokens) + most, before)
        written = stream(
            self._model, self._tokenizer, tokens, sampling, options=options, interrupted=interrupted
        )
        self._options = options
        self.messages = [*messages, {"role": "assistant", "content": written.text}]
        return written
