"""The loss of a long sequence by chunks of tokens: its logits never exist as a whole.

A chunk's gradient is made at once, so that its logits can go: each chunk is one product of the head each way,
if that is at the executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tenant_sdk.sequences.stack import Stack

CHUNK_BYTES = 64 << 20  # of a chunk's logits in float32; a few times as much is needed for a moment
MIN_CHUNK = 64  # tokens


def chunk_tokens(vocabulary: int) -> int:
    """How many tokens a chunk has."""
    return max(MIN_CHUNK, CHUNK_BYTES // (4 * vocabulary))


@dataclass
class Loss:
    """A loss as it is summed up, with its gradients where they are wanted.

    Gradients are those of the sum over tokens, not of the mean: divided by many items they would be nothing
    in float16, before a ``GradScaler``'s factor comes.

    Attributes:
        items: by how much the sum over tokens is divided.
        parameters: of what is behind the layers; gradients are added up beside them.
        sum: of what was added.
    """

    stack: Stack
    items: torch.Tensor | int | float
    parameters: Sequence[nn.Parameter]
    wanted: bool
    sum: torch.Tensor | float = 0.0

    def __post_init__(self) -> None:
        """No gradient yet."""
        self.gradients: list[torch.Tensor | None] = [None] * len(self.parameters)

    @property
    def mean(self) -> torch.Tensor:
        """The loss of all tokens that were added."""
        return torch.as_tensor(self.sum / self.items)

    def add(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        """Add the loss of the last layer's outputs [B, T, D] to labels [B, T], -100 where there is none.

        Returns:
            The gradient [B, T, D] of their sum, if that is wanted.
        """
        tokens = chunk_tokens(self.stack.model.config.get_text_config().vocab_size)
        rows, aims = hidden.detach().reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        gradient = torch.empty_like(rows) if self.wanted else None
        for at in range(0, len(rows), tokens):
            with torch.set_grad_enabled(self.wanted):
                chunk = rows[at : at + tokens].requires_grad_(self.wanted)
                loss = self._of(chunk, aims[at : at + tokens])
            if gradient is not None:
                of_chunk, *others = torch.autograd.grad(loss, [chunk, *self.parameters], allow_unused=True)
                gradient[at : at + tokens] = of_chunk
                self.gradients = add_up(self.gradients, others)
            self.sum = self.sum + loss.detach()
        return None if gradient is None else gradient.view(hidden.shape)

    def _of(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """As transformers' loss of a causal language model, of [T, D] and [T] that are shifted already."""
        logits = self.stack.logits(rows[None])[0].float()
        return nn.functional.cross_entropy(logits, labels.to(logits.device), reduction="sum")


def add_up(
    sums: Sequence[torch.Tensor | None], more: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Gradients plus gradients, of which any may not be there."""
    return [a if b is None else b if a is None else a + b for a, b in zip(sums, more, strict=True)]


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Labels [B, T] of the next tokens, for each token; the last has none."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def loss_divisor(labels: torch.Tensor, count: Any) -> torch.Tensor | int | float:
    """By how much a sum over tokens is divided: what the training loop says, or how many are learned."""
    if count is None:
        return (labels != -100).sum()
    return count.to(labels.device) if isinstance(count, torch.Tensor) else count


class ChunkedLoss(torch.autograd.Function):
    """The loss of the last layer's outputs, whose gradient is there as soon as it is."""

    @staticmethod
    def forward(
        ctx: Any,
        stack: Stack,
        labels: torch.Tensor,
        items: torch.Tensor | int | float,
        hidden: torch.Tensor,
        *parameters: nn.Parameter,
    ) -> torch.Tensor:
        """See ``Loss``; labels [B, T] are shifted."""
        loss = Loss(stack, items, parameters, wanted=True)
        ctx.gradients, ctx.items = [loss.add(hidden, labels), *loss.gradients], items
        return loss.mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients that are there, times the loss's own."""
        scale = gradient / ctx.items
        gradients = [None if each is None else each * scale for each in ctx.gradients]
        return None, None, None, *gradients
