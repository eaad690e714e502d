"""A draft head: it guesses the next tokens from the model's last hidden state.

The network is recurrent, as in ReDrafter (Cheng et al. 2024, "Recurrent Drafter for Fast Speculative
Decoding", section 3) and Hydra (Ankner et al. 2024, section 3). The state begins as the last hidden state of
a pass. Each step takes the embedding of the token before, and the model's own output head reads the next
token from the state. The network needs no keys and values, so a prompt costs it nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from shared.errors import ConfigurationError, OptionText
from tenant_sdk.drafts.repeats import WINDOW, Ids, repeated
from tenant_sdk.model.remote_weight import RemoteWeight

WIDENING = 2  # width of the hidden layer, in widths of the model
MAX_VOCABULARY = 8192  # that one draft can guess: each guess compares all of them


class DraftHead(nn.Module):
    """One step of the recurrence: a gated feed-forward layer beside the state.

    Args:
        width: of the model's hidden states.
        hidden: width of the layer between.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.width, self.hidden = width, hidden
        self.state_norm, self.token_norm, self.output_norm = (nn.RMSNorm(width, eps=1e-6) for _ in range(3))
        self.up = nn.Linear(2 * width, hidden, bias=False)
        self.gate = nn.Linear(2 * width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        nn.init.zeros_(self.down.weight)  # so it begins with the model's own next token

    def forward(self, state: Tensor, token: Tensor) -> Tensor:
        """The state after a token, from the one before and the token's embedding: ``[..., width]``."""
        both = torch.cat([self.state_norm(state), self.token_norm(token)], -1)
        change: Tensor = self.down(functional.silu(self.gate(both)) * self.up(both))
        return state + change

    def read(self, state: Tensor) -> Tensor:
        """The hidden state ``[..., width]`` that the model's output head shall read."""
        normed: Tensor = self.output_norm(state)
        return normed


class Vocabulary:
    """The model's embeddings, and its output head for those tokens that a draft may guess.

    Frequent tokens alone are guessed (FR-Spec, Zhao et al. 2025): the head is most of a draft's work.

    Args:
        embeddings: of ids.
        weight: of the head, ``[vocabulary, width]``.
        bias: ``[vocabulary]``, if any.
        tokens: int64 ``[S]``: ids that are guessed.
    """

    def __init__(
        self, embeddings: Callable[[Tensor], Tensor], weight: Tensor, bias: Tensor | None, tokens: Tensor
    ) -> None:
        self._embeddings, self._whole = embeddings, (weight, bias)
        self.tokens = tokens.to(weight.device)
        self._weight = weight[self.tokens].float()
        self._bias = None if bias is None else bias[self.tokens].float()

    @classmethod
    def of(cls, model: Any, tokens: Tensor) -> Vocabulary:
        """Of a transformers model.

        Raises:
            ConfigurationError: the executor computes the head, or the model has none.
        """
        return cls(model.get_input_embeddings(), *head_of(model), tokens)

    @property
    def device(self) -> torch.device:
        """Where the embeddings and the head are."""
        return self.tokens.device

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of any tokens, float32."""
        embedded: Tensor = self._embeddings(ids.to(self.device)).float()
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the tokens that are guessed: ``[..., S]`` float32, from ``[..., width]``."""
        return functional.linear(hidden, self._weight, self._bias)

    def likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token of those that are guessed, int64 ``[...]``, and its probability among them."""
        probability, at = self.logits(hidden).softmax(-1).max(-1)
        return self.tokens[at], probability

    def chosen(self, hidden: Tensor) -> Tensor:
        """Int64 ``[...]``: the model's own choice, of all its tokens."""
        weight, bias = self._whole
        return functional.linear(hidden.to(weight.dtype), weight, bias).argmax(-1)


class Guesser:
    """Guesses tokens: the draft's likeliest one, or the text's own repetition where this is right more often.

    Args:
        head: the network.
        vocabulary: of the model.
        repeats: by the number of newest tokens that stood before (``repeated``), how often the token behind
            them was the same again; empty: nothing is repeated.
    """

    def __init__(self, head: DraftHead, vocabulary: Vocabulary, repeats: Sequence[float] = ()) -> None:
        self.head, self.vocabulary, self.repeats = head, vocabulary, tuple(repeats)

    def __call__(self, state: Tensor, texts: Sequence[Ids], size: int) -> Tensor:
        """The next tokens of texts, int64 ``[B, size]``.

        Args:
            state: ``[B, width]``: the model's last hidden state before the newest token of each text.
            texts: their ids, int64 ``[T]`` each, with the newest one.
            size: how many tokens.
        """
        texts = [text[-WINDOW:] for text in texts]
        token = torch.tensor([int(text[-1]) for text in texts], device=self.vocabulary.device)
        state, guesses = state.float(), list[Tensor]()
        for _ in range(size):
            state = self.head(state, self.vocabulary.embed(token))
            token, probability = self.vocabulary.likeliest(self.head.read(state))
            if self.repeats:
                token = self._or_repeated(texts, token, probability)
            guesses.append(token)
        return torch.stack(guesses, 1) if guesses else token.new_empty(len(token), 0)

    def _or_repeated(self, texts: list[Ids], likeliest: Tensor, probability: Tensor) -> Tensor:
        """The better guess for each text, which then ends with it."""
        tokens = likeliest.tolist()
        for at, (text, sure) in enumerate(zip(texts, probability.tolist(), strict=True)):
            length, token = repeated(text)
            if length and self.repeats[length - 1] > sure:
                tokens[at] = token
            texts[at] = np.append(text, tokens[at])
        return torch.tensor(tokens, device=likeliest.device)


def backbones_of(model: Any) -> list[PreTrainedModel]:
    """Parts of a model that return the hidden states that its output head reads, the inner ones first.

    Raises:
        ConfigurationError: there is none.
    """
    parts = (model.get_decoder(), getattr(model, "model", None), model.base_model)
    found = [each for each in parts if isinstance(each, PreTrainedModel) and each is not model]
    if not found:
        raise ConfigurationError(
            f"{type(model).__name__} has no part that computes its last hidden states, as a draft needs it: "
            "leave out the draft"
        )
    return list(dict.fromkeys(found))


def head_of(model: Any) -> tuple[Tensor, Tensor | None]:
    """Weight ``[vocabulary, width]`` and bias of a model's output head.

    Raises:
        ConfigurationError: the executor computes it, or there is none.
    """
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None:
        raise ConfigurationError(
            f"{type(model).__name__} has no output head, from which a draft could be read"
        )
    if isinstance(weight, RemoteWeight):
        raise ConfigurationError(
            OptionText(
                "a draft needs the output head on this machine: leave out {offload_head}", offload_head=True
            )
        )
    return weight.detach(), getattr(head, "bias", None)
