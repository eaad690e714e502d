"""What an attack achieved, measured against what really happened and against chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from security.attacks.base import TokenGuess
from security.attacks.extraction import StolenAdapter
from security.statistics import Estimate, independent_hits, rate
from security.workload import Truth
from shared.header import Direction


@dataclass(frozen=True)
class Finding:
    """One cell of the report.

    ``success`` is in the attack's own metric; ``chance`` is what the same guesses would score if they had
    nothing to do with the truth. ``detail`` is for readers.
    """

    attack: str
    mode: str
    sees: str
    metric: str
    success: Estimate
    chance: float
    detail: str = ""

    @property
    def beats_chance(self) -> bool:
        """Whether the whole interval lies above chance."""
        return self.success.low > self.chance


SHUFFLES = 1000


class NothingToScore(ValueError):
    """The view holds nothing that this attack works on."""


def of_tokens(guess: torch.Tensor, truth: torch.Tensor, confidence: float) -> tuple[Estimate, float]:
    """Rate of right guesses, and of what independent ones would be."""
    known = truth >= 0
    guess, truth = guess[known], truth[known]
    if not len(guess):
        raise NothingToScore
    hits = int((guess == truth).sum())
    return rate(hits, len(guess), confidence), independent_hits(guess.numpy(), truth.numpy())


def of_guess(guess: TokenGuess, truth: Truth, confidence: float) -> tuple[Estimate, float]:
    """Of rows of the first group."""
    return of_tokens(guess.tokens, truth.first_tokens()[guess.rows], confidence)


def of_labels(
    guesses: list[torch.Tensor], truth: Truth, group: int, confidence: float
) -> tuple[Estimate, float]:
    """Of each row of the last layer's gradients; requests in the order in which they were sent."""
    pairs = [
        (guess, sent.labels)
        for guess, sent in zip(guesses, truth.of(group, Direction.BACKWARD), strict=True)
        if sent.labels is not None
    ]
    if not pairs:
        raise NothingToScore
    guess, labels = (torch.cat(list(side)) for side in zip(*pairs, strict=True))
    return of_tokens(guess, labels, confidence)


def of_spans(
    ranked: list[list[torch.Tensor]], truth: Truth, rows: int, confidence: float
) -> tuple[Estimate, float]:
    """How many of a part's n tokens are among the first n guesses; chance: among the guesses for another."""
    parts = [
        (guess, part.unique())
        for guesses, sent in zip(ranked, truth.of(0, Direction.BACKWARD), strict=True)
        if sent.tokens is not None
        for guess, part in zip(guesses, sent.tokens.split(rows), strict=True)
    ]
    if len(parts) < 2:
        raise NothingToScore
    places = [torch.empty_like(guess).scatter_(0, guess, torch.arange(len(guess))) for guess, _ in parts]
    hits = sum(
        int((place[there] < len(there)).sum()) for place, (_, there) in zip(places, parts, strict=True)
    )
    other = [
        float((place[there] < len(there)).float().mean())
        for i, place in enumerate(places)
        for j, (_, there) in enumerate(parts)
        if i != j
    ]
    return rate(hits, sum(len(there) for _, there in parts), confidence), float(np.mean(other))


def of_adapter(
    stolen: StolenAdapter, delta: torch.Tensor, confidence: float, rng: np.random.Generator
) -> tuple[Estimate, dict[str, float]]:
    """Cosine between the stolen and the real adapter; 0 by chance.

    Its interval is that of the same estimate against adapters with rows and columns in random order.
    Also the relative error, and the largest principal angle (degrees) between the column spaces.
    """
    if not stolen.tokens:
        raise NothingToScore
    size = float(stolen.delta.norm() * delta.norm()) or 1.0
    cosine = float((stolen.delta * delta).sum()) / size
    shuffled = []
    for _ in range(SHUFFLES):
        rows = torch.from_numpy(rng.permutation(delta.shape[0]))
        columns = torch.from_numpy(rng.permutation(delta.shape[1]))
        signs = torch.from_numpy(rng.choice(np.array([-1, 1], np.float32), delta.shape[0]))
        shuffled.append(abs(float(((stolen.delta * signs[:, None])[rows][:, columns] * delta).sum())) / size)
    # Beyond what was tried the largest stands for the quantile.
    width = float(np.quantile(shuffled, confidence))
    estimate = Estimate(cosine, max(-1.0, cosine - width), min(1.0, cosine + width), stolen.tokens)
    more = {"relative_error": float((stolen.delta - delta).norm() / delta.norm()), "rank": float(stolen.rank)}
    real = int(torch.linalg.matrix_rank(delta, rtol=1e-4))
    spaces = [torch.linalg.svd(m)[0][:, :rank] for m, rank in ((stolen.delta, stolen.rank), (delta, real))]
    cosines = torch.linalg.svdvals(spaces[0].T @ spaces[1]).clamp(max=1)
    return estimate, more | {"largest_angle": float(cosines.acos().rad2deg().max())}


def advantage(guesses: torch.Tensor, truth: torch.Tensor, confidence: float) -> Estimate:
    """Of a game with two outcomes: 0 by chance, 1 for an adversary that is always right."""
    right = rate(int((guesses == truth).sum()), len(truth), confidence)
    return Estimate(2 * right.value - 1, 2 * right.low - 1, 2 * right.high - 1, right.trials)


def plain(value: Any) -> Any:
    """Numbers and texts only, for JSON."""
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
