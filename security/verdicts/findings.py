"""The results of an attack, measured against the real events and against chance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from security.attacks.base import TokenGuess
from security.attacks.extraction import AdapterExtraction, StolenAdapter
from security.attacks.masking import DistinguishingGame
from security.recordings.workload import GroundTruth
from security.verdicts.statistics import Estimate, blind_hits, detectable, missing, power_at, rate, visible
from shared.wire.header import Direction


@dataclass(frozen=True)
class Finding:
    """The result of one attack in one mode: a cell of the report.

    Attributes:
        success: Score of the attack in its own metric, with its interval.
        chance: Score that the same guesses would have without any relation to the truth. None: there are no
            guesses.
        detail: Text for readers.
        resolution: Minimum distance of an observed score above chance, so that its interval lies above
            chance.
        below: The same distance below chance. None: no score lies so far below chance.
        detectable: Minimum true advantage over chance that the attack finds with probability POWER.
        power: Probability that the attack finds a true advantage of the size that the plan requires.

    ``resolution``, ``below``, ``detectable`` and ``power`` are None if success is not compared with chance.
    """

    attack: str
    mode: str
    sees: str
    metric: str
    success: Estimate
    chance: float | None
    detail: str = ""
    resolution: float | None = None
    detectable: float | None = None
    power: float | None = None
    below: float | None = None

    @property
    def beats_chance(self) -> bool:
        """Whether the whole interval is above chance."""
        return self.chance is not None and self.success.low > self.chance

    @property
    def off_chance(self) -> bool:
        """Whether chance is outside of the interval.

        A score below chance is information as well. An adversary that always chooses wrongly between two
        inputs can take the other input, and the negative of an adapter gives the adapter.
        """
        return self.beats_chance or (self.chance is not None and self.success.high < self.chance)

    @property
    def distance(self) -> float:
        """The distance from chance to the interval; negative if chance is inside, nan without chance."""
        if self.chance is None:
            return math.nan
        return max(self.success.low - self.chance, self.chance - self.success.high)

    @property
    def is_rate(self) -> bool:
        """Whether success is a fraction of the trials, not a cosine or a game's advantage."""
        return self.attack not in (AdapterExtraction.name, DistinguishingGame.name)

    @property
    def hits(self) -> int | None:
        """The number of successful trials; None for a cosine."""
        if self.attack == AdapterExtraction.name:
            return None
        rate = self.success.value if self.is_rate else (self.success.value + 1) / 2
        return round(rate * self.success.trials)

    def spell(self, value: float) -> str:
        """Returns a number as text in the attack's metric: a share of the trials, cosine or advantage."""
        return percent(value) if self.is_rate else f"{round(value, 4) + 0.0:.4f}"  # and no -0

    @property
    def measured(self) -> str:
        """Success, its interval and chance, as text."""
        success = self.success
        interval = f"interval {self.spell(success.low)} to {self.spell(success.high)}"
        beside = interval if self.chance is None else f"{interval}; chance {self.spell(self.chance)}"
        if self.hits is None:
            return f"cosine {self.spell(success.value)} ({beside}) from {success.trials:,} rows"
        counted = f"{self.hits:,} of {success.trials:,}"
        if self.is_rate:
            return f"{counted}, {self.spell(success.value)} ({beside})"
        return f"{counted} right, advantage {self.spell(success.value)} ({beside})"


@dataclass(frozen=True)
class HostileFinding:
    """An active attack by the provider: where it should fail, and where its defence is off.

    ``sentence`` says what was tried and what came out, for readers. ``same`` is whether all that the provider
    observed was the same in every trial, so that no guess can rest on it; None where that is not expected.
    """

    attack: str
    defence: str
    sentence: str
    defended: Finding
    control: Finding
    same: bool | None = None


def percent(value: float) -> str:
    """Returns a share as text, with more digits where it is small."""
    return f"{100 * value:.2f} %" if abs(value) >= 0.01 or value == 0 else f"{100 * value:.4f} %"


def finding_of(
    attack: Any,
    mode: str,
    sees: str,
    success: Estimate,
    chance: float | None,
    detail: str = "",
    /,
    **able: float | None,
) -> Finding:
    """Makes the finding of an attack, in its own metric; ``able``: what ``able`` returns."""
    return Finding(attack.name, mode, sees, attack.metric, success, chance, detail, **able)


def able(
    chance: float, trials: int, confidence: float, wanted: float, scale: int = 1
) -> dict[str, float | None]:
    """Computes what an attack can show: ``resolution``, ``below``, ``detectable`` and ``power`` of a Finding.

    Args:
        chance: the rate of guesses by chance.
        trials: how many guesses.
        confidence: the confidence of an interval.
        wanted: the true advantage whose power is asked for.
        scale: the metric's scale, divided by that of rates.
    """
    below = missing(chance, trials, confidence)
    return {
        "resolution": scale * visible(chance, trials, confidence),
        "below": None if below is None else scale * below,
        "detectable": scale * detectable(chance, trials, confidence),
        "power": power_at(wanted / scale, chance, trials, confidence),
    }


class NothingToScore(ValueError):
    """The view holds nothing that this attack works on."""


def of_tokens(
    guess: torch.Tensor, truth: torch.Tensor, blind: torch.Tensor, confidence: float
) -> tuple[Estimate, float]:
    """Scores guesses of tokens: the rate of right ones, and of ``blind`` ones, made without the rows."""
    known = truth >= 0
    guess, truth = guess[known], truth[known]
    if not len(guess):
        raise NothingToScore
    hits = int((guess == truth).sum())
    return rate(hits, len(guess), confidence), blind_hits(blind.numpy(), truth.numpy())


def of_guess(
    guess: TokenGuess, truth: GroundTruth, blind: torch.Tensor, confidence: float
) -> tuple[Estimate, float]:
    """Scores guesses of the tokens of the first group's rows; see ``of_tokens``."""
    return of_tokens(guess.tokens, truth.first_tokens()[guess.rows], blind, confidence)


def of_labels(
    guesses: list[torch.Tensor], truth: GroundTruth, group: int, blind: torch.Tensor, confidence: float
) -> tuple[Estimate, float]:
    """Scores guesses of the labels of the last layer's gradients; requests in the order of sending."""
    pairs = [
        (guess, sent.labels)
        for guess, sent in zip(guesses, truth.of(group, Direction.BACKWARD), strict=True)
        if sent.labels is not None
    ]
    if not pairs:
        raise NothingToScore
    guess, labels = (torch.cat(list(side)) for side in zip(*pairs, strict=True))
    return of_tokens(guess, labels, blind, confidence)


def of_spans(
    ranked: list[list[torch.Tensor]],
    truth: GroundTruth,
    rows: int,
    blind: list[torch.Tensor],
    confidence: float,
) -> tuple[Estimate, float]:
    """Scores ranked guesses: how many of a part's n tokens are among the first n.

    Chance is how many are among the first n blind guesses.
    """
    parts = [
        (guess, part.unique())
        for guesses, sent in zip(ranked, truth.of(0, Direction.BACKWARD), strict=True)
        if sent.tokens is not None
        for guess, part in zip(guesses, sent.tokens.split(rows), strict=True)
    ]
    if not parts or not blind:
        raise NothingToScore
    trials = sum(len(labels) for _, labels in parts)
    hits = sum(int(torch.isin(guess[: len(labels)], labels).sum()) for guess, labels in parts)
    places = torch.stack(blind).argsort(1)  # of each token among the guesses
    chance = (
        sum(float((places[:, labels] < len(labels)).float().mean(0).sum()) for _, labels in parts) / trials
    )
    return rate(hits, trials, confidence), chance


def of_adapters(pairs: list[tuple[StolenAdapter, torch.Tensor]], confidence: float) -> tuple[Estimate, float]:
    """Scores stolen adapters by the mean cosine with the real ones; by chance it is 0."""
    if not all(stolen.tokens for stolen, _ in pairs):
        raise NothingToScore
    directions = [
        (stolen.delta / stolen.delta.norm().clamp_min(1e-30), real / real.norm()) for stolen, real in pairs
    ]
    cosine = float(np.mean([float((one * other).sum()) for one, other in directions]))
    width = _width_of_cosine(directions, confidence)
    tokens = sum(stolen.tokens for stolen, _ in pairs)
    return Estimate(cosine, max(-1.0, cosine - width), min(1.0, cosine + width), tokens), 0.0


def _width_of_cosine(pairs: list[tuple[torch.Tensor, torch.Tensor]], confidence: float) -> float:
    """Bounds the mean cosine of matrices [O, D] with these singular values in random directions.

    The mean is a sum of products of independent numbers that are nearly normal, weighted with products of the
    singular values. Chernoff's bound, with ``E exp(t g h) = (1 - t^2)^(-1/2)`` for normal g and h.
    """
    values = [[torch.linalg.svdvals(matrix).double().numpy() for matrix in pair] for pair in pairs]
    weights = np.concatenate(
        [np.outer(*both).ravel() / pair[0].numel() ** 0.5 for both, pair in zip(values, pairs, strict=True)]
    )
    weights = weights[weights > 1e-4 * weights.max()] / len(pairs)
    steps = np.linspace(0.001, 0.999, 999) / weights.max()
    growth = -0.5 * np.log1p(-((steps[:, None] * weights) ** 2)).sum(1)
    return float(((np.log(2 / (1 - confidence)) + growth) / steps).min())


def of_copy(stolen: StolenAdapter, delta: torch.Tensor) -> dict[str, float]:
    """Compares a copy: relative error, rank, and largest principal angle (degrees) of the column spaces."""
    real = int(torch.linalg.matrix_rank(delta, rtol=1e-4))
    spaces = [torch.linalg.svd(m)[0][:, :rank] for m, rank in ((stolen.delta, stolen.rank), (delta, real))]
    cosines = torch.linalg.svdvals(spaces[0].T @ spaces[1]).clamp(max=1)
    return {
        "relative_error": float((stolen.delta - delta).norm() / delta.norm()),
        "rank": float(stolen.rank),
        "largest_angle": float(cosines.acos().rad2deg().max()),
    }


def advantage(guesses: torch.Tensor, truth: torch.Tensor, confidence: float) -> Estimate:
    """Returns the advantage in a game with two outcomes: 0 by chance, 1 if the adversary is always right."""
    right = rate(int((guesses == truth).sum()), len(truth), confidence)
    return Estimate(2 * right.value - 1, 2 * right.low - 1, 2 * right.high - 1, right.trials)


def plain(value: Any) -> Any:
    """Returns a value as plain numbers and texts, for JSON."""
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
