"""The interface of an attack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch

from security.views.adversaries import View

V = TypeVar("V", contravariant=True)


class Attack(Protocol[V]):
    """One attack. It gets a view, and nothing that its adversary would not have."""

    name: ClassVar[str]
    goal: ClassVar[str]
    sees: ClassVar[str]
    metric: ClassVar[str]
    source: ClassVar[str]

    def attack(self, view: V, rng: np.random.Generator) -> Any:
        """What the adversary concludes."""
        ...


@dataclass(frozen=True)
class TokenGuess:
    """What tokens rows of the first group stand for.

    ``rows`` [M] index ``View.first``; ``tokens`` [M] are the guesses; ``estimates`` [M, D] what the attack
    holds for the rows without their masks, up to a scale of each; ``match`` [M] the cosine between a row and
    the guessed token's input, both as the attack compared them.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    estimates: torch.Tensor
    match: torch.Tensor

    @classmethod
    def nearest(cls, rows: torch.Tensor, estimates: torch.Tensor, table: torch.Tensor) -> TokenGuess:
        """For each estimate [M, D] the token in the direction of whose entry [V, D] it points most."""
        tokens = nearest(estimates, table)
        return cls(rows, tokens, estimates, cosine(estimates, table[tokens]))


def everything(view: View) -> torch.Tensor:
    """The indices of all rows of the first group."""
    return torch.arange(len(view.first))


def unit(rows: torch.Tensor) -> torch.Tensor:
    """Rows divided by their lengths, since a ring's rows come without their scales."""
    lengths: torch.Tensor = rows.norm(dim=-1, keepdim=True)
    return rows / lengths.clamp_min(1e-30)


def cosine(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Of each row [N, D] with the other one in its place: [N]."""
    return torch.cosine_similarity(rows, others, dim=-1, eps=1e-30)


def nearest(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """For each row the entry of a table in whose direction it points most: [N] int64."""
    directions = unit(table).T.contiguous()
    return torch.cat([(part @ directions).argmax(1) for part in rows.split(2048)] or [torch.empty(0).long()])
