"""Attacks on output gradients: the tokens that the model was to predict, and the tokens of a batch."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from security.attacks.base import unit
from security.views.adversaries import ObservedRequest, View
from security.views.public_model import PublicModel
from shared.wire.header import Direction


def _unscaled(seen: ObservedRequest, public: PublicModel) -> torch.Tensor:
    """Gradients; on the ring they were multiplied by the scales of the layers."""
    if seen.raw.dtype != torch.int32:
        return seen.rows
    return seen.rows / public.scales(seen.group).clamp_min(1e-30)


class LabelRecovery:
    """The gradient that enters the last layer points away from the output vector of the label."""

    name: ClassVar[str] = "label recovery"
    goal: ClassVar[str] = "the tokens that fine-tuning teaches"
    sees: ClassVar[str] = "rows of the last layer's backward products"
    metric: ClassVar[str] = "labels right (top 1)"
    source: ClassVar[str] = "Zhao et al., iDLG, arXiv 2001.02610; Wainakh et al., arXiv 2106.14265"

    @staticmethod
    def group(public: PublicModel) -> int:
        """The last layer's."""
        return public.group_of(f"layers.{public.model.config.num_hidden_layers - 1}.mlp.down_proj")

    def attack(self, view: View, rng: np.random.Generator) -> list[torch.Tensor]:
        """For each backward request of the last layer, the guessed label of each row."""
        public = view.public
        last = self.group(public)
        # d loss / d logits is p - y. Taken back through the head by least squares, the label's
        # coordinate is the most negative.
        head = public.model.get_output_embeddings().weight * public.parameter("norm.weight")
        back = head @ torch.linalg.inv((head.T @ head).double()).float()
        return [
            torch.cat([(part @ back.T).argmin(1) for part in _unscaled(seen, public).split(2048)])
            for seen in view.of(last, Direction.BACKWARD)
        ]


class SpanCheck:
    """Tokens of a batch lie in the row span of the first layer's weight gradient.

    The provider holds both factors of that gradient, the layer's inputs and its output gradients, so it
    can make the gradient of any part of a batch.
    """

    name: ClassVar[str] = "gradient span check"
    goal: ClassVar[str] = "which tokens were in a batch"
    sees: ClassVar[str] = "rows of the first layer's products, both directions"
    metric: ClassVar[str] = "tokens of the batch among as many guesses"
    source: ClassVar[str] = "Petrov et al., DAGER, arXiv 2405.15586"
    ROWS = 32  # of one request at a time, fewer than the layer has inputs

    def attack(self, view: View, rng: np.random.Generator) -> list[list[torch.Tensor]]:
        """For each backward request of the first group and each part of its rows: tokens, likeliest first.

        Empty for a request that no forward one of as many rows came before.
        """
        table = unit(view.public.first_inputs)
        ranked: list[list[torch.Tensor]] = []
        last: dict[
            int, ObservedRequest
        ] = {}  # by rows: making fingerprints may come between the two directions
        for seen in view.requests:
            if seen.group != 0:
                continue
            if seen.forward:
                last[seen.count] = seen
            elif seen.count not in last:
                ranked.append([])
            else:
                parts = zip(
                    unit(_unscaled(seen, view.public)).split(self.ROWS),
                    unit(last[seen.count].rows).split(self.ROWS),
                    strict=True,
                )
                ranked.append([self._rank(gradients, inputs, table) for gradients, inputs in parts])
        return ranked

    @staticmethod
    def _rank(gradients: torch.Tensor, inputs: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        _, sizes, right = torch.linalg.svd((gradients.T @ inputs).double(), full_matrices=False)
        span = right[: int((sizes > 1e-5 * sizes[0]).sum())].float()
        inside: torch.Tensor = (table @ span.T).square().sum(1)
        return inside.argsort(descending=True)
