"""An attack on mixtures of experts: which text a prompt is, by how many rows each expert gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch


@dataclass(frozen=True)
class RoutingView:
    """What a provider counts, and what it computes itself.

    ``seen`` [N, E]: rows that each expert of each projection got for each prompt. ``known`` [C, E]: the same
    of the texts that a prompt may be, as the provider's own model sends them, padded as its tenant pads them.
    """

    seen: np.ndarray
    known: np.ndarray


class Routing:
    """Take of the texts that a prompt may be the one whose tokens go to the same experts."""

    name: ClassVar[str] = "routing"
    goal: ClassVar[str] = "which of some known texts of one length a prompt is"
    sees: ClassVar[str] = "how many rows each expert gets, prompt by prompt"
    metric: ClassVar[str] = "prompts recognised"
    source: ClassVar[str] = "experts as a channel: Yona et al., arXiv 2410.22884; here the provider counts"

    def attack(self, view: RoutingView, rng: np.random.Generator) -> torch.Tensor:
        """For each prompt the nearest text, one of the nearest by chance: int64 [N]."""
        away = np.abs(view.seen[:, None] - view.known[None]).sum(2)
        nearest = away == away.min(1, keepdims=True)
        return torch.from_numpy((nearest * rng.random(nearest.shape)).argmax(1))
