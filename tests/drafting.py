"""Drafts for tests: one that guesses by chance, and one that knows the text."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import Tensor

from tenant_sdk.drafts.decoding import Draft
from tenant_sdk.drafts.head import DraftHead, Guesser, Vocabulary
from tenant_sdk.drafts.length import DraftLength
from tenant_sdk.tuning.adapters import METHODS, AdapterOptions


def guessing(model: Any, guesses: int = 4, **options: Any) -> Draft:
    """A draft whose guesses are seldom right."""
    return Draft(*_parts(model, guesses), **options)


def _parts(model: Any, guesses: int) -> tuple[Guesser, DraftLength]:
    width = model.get_input_embeddings().weight.shape[1]
    torch.manual_seed(0)
    head = DraftHead(width, width)
    torch.nn.init.normal_(head.down.weight)
    vocabulary = Vocabulary.of(model, torch.arange(model.get_output_embeddings().weight.shape[0]))
    return Guesser(head, vocabulary), DraftLength((0.5,) * guesses, guesses, guesses)


class Knowing(Draft):
    """A draft that knows the text ``[B, T]``; its first wrong guess is at another place in each pass.

    Args:
        begin: place of the first token that is guessed.
    """

    def __init__(self, model: Any, text: Tensor, begin: int, guesses: int = 4) -> None:
        super().__init__(*_parts(model, guesses))
        self._text, self._begin = text, begin

    def _guess(self, state: Tensor, ids: Tensor, size: int) -> Tensor:
        at = self._begin + self.tokens
        known = torch.nn.functional.pad(self._text, (0, size))[:, at : at + size].clone()
        wrong = self.passes % (size + 1)
        known[:, wrong : wrong + 1] ^= 1
        return known


def with_adapter(model: Any, method: str) -> Any:
    """A model with an adapter of a method, whose parameters are of chance."""
    torch.manual_seed(1)
    options = AdapterOptions(method, rank=2, virtual_tokens=3)
    adapted = peft.get_peft_model(model, METHODS[method].make(options)).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    return adapted
