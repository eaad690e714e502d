"""A draft's guesses for vLLM's sequences, through vLLM's ``custom_class`` for speculation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shared.errors import ConfigurationError
from tenant_sdk.drafts.card import read_card
from tenant_sdk.drafts.folder import check_fits, read_weights
from tenant_sdk.drafts.head import Vocabulary, guess
from tenant_sdk.gateway.connection import session_here

FOLDER = "draft"  # in vLLM's ``additional_config``


class Proposer:
    """Guesses the next tokens of each sequence from its last hidden state.

    The draft is that of the base model. Sequences of adapters have the same one: its guesses are less often
    right there, and no text depends on them.

    Args:
        config: vLLM's.
    """

    def __init__(self, config: Any) -> None:
        self._folder = Path(config.additional_config[FOLDER])
        self._guesses = config.speculative_config.num_speculative_tokens
        self._tokens = config.model_config.get_vocab_size()  # vLLM's head has more rows, to fill up a block
        self._hidden: torch.Tensor | None = None
        self._drafted: Mapping[str, Sequence[int]] = {}
        self._runner: Any = None

    def load_model(self, model: Any) -> None:
        """Read the draft, and from now on see what the head of vLLM's model reads.

        Raises:
            ConfigurationError: the draft is damaged, or the model's head is not where it is expected.
            ModelMismatch: it is a draft of another model.
        """
        card = read_card(self._folder)
        check_fits(card, self._folder, session_here().manifest, "")
        head = getattr(model, "lm_head", None)
        weight = getattr(head, "weight", None)
        if weight is None or not hasattr(model, "embed_input_ids"):
            raise ConfigurationError(f"drafts do not go with vLLM's {type(model).__name__}")
        self._head, tokens = read_weights(self._folder, card, self._tokens, weight.shape[1])
        bias = getattr(head, "bias", None)
        self._vocabulary = Vocabulary(model.embed_input_ids, weight.detach(), bias, tokens)
        self._compute = model.compute_logits
        model.compute_logits = self._logits

    def begin(self, runner: Any, drafted: Mapping[str, Sequence[int]]) -> None:
        """A step begins, in which so many guesses of each sequence are checked."""
        self._runner, self._drafted, self._hidden = runner, drafted, None

    def _logits(self, hidden: torch.Tensor, *more: Any) -> Any:
        if self._hidden is None:  # later calls of a step are for prompts' probabilities
            self._hidden = hidden
        return self._compute(hidden, *more)

    @torch.no_grad()
    def propose(self, sampled: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Guesses for each sequence; none for those that have no token of this step.

        Args:
            sampled: new tokens of each sequence: the right guesses, and one more.
        """
        names, rows, writing, first = self._runner.input_batch.req_ids, list[int](), list[int](), 0
        for at, tokens in enumerate(sampled):
            if tokens:
                rows.append(first + len(tokens) - 1)
                writing.append(at)
            first += 1 + len(self._drafted.get(names[at], ()))
        guesses = [list[int]() for _ in sampled]
        if not writing or self._hidden is None:
            return guesses
        newest = torch.tensor([sampled[at][-1] for at in writing], device=self._hidden.device)
        found = guess(self._head, self._vocabulary, self._hidden[rows], newest, self._guesses)
        for at, tokens in zip(writing, found.tolist(), strict=True):
            guesses[at] = tokens
        return guesses
