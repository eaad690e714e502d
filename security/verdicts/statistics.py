"""Intervals of a measured rate or mean, at a stated confidence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from shared.errors import ConfigurationError

CONFIDENCE = 0.99
POWER = 0.99


@dataclass(frozen=True)
class Estimate:
    """A figure, the interval that holds it at the confidence that was asked for, and its trials."""

    value: float
    low: float
    high: float
    trials: int


def rate(successes: int, trials: int, confidence: float = CONFIDENCE) -> Estimate:
    """Returns a success rate with its exact interval (Clopper and Pearson, Biometrika 1934).

    Raises:
        ConfigurationError: There are no trials.
    """
    if trials < 1:
        raise ConfigurationError("a rate needs at least one trial")
    tail = (1 - confidence) / 2
    low = stats.beta.ppf(tail, successes, trials - successes + 1) if successes else 0.0
    high = stats.beta.ppf(1 - tail, successes + 1, trials - successes) if successes < trials else 1.0
    return Estimate(successes / trials, float(low), float(high), trials)


def _least(chance: float, trials: int, confidence: float) -> int:
    """Returns the fewest successes whose interval lies above chance."""
    return int(stats.binom.isf((1 - confidence) / 2, trials, chance)) + 1


def visible(chance: float, trials: int, confidence: float = CONFIDENCE) -> float:
    """Returns how far above chance an observed rate must be for its interval to lie above chance."""
    return _least(chance, trials, confidence) / trials - chance


def missing(chance: float, trials: int, confidence: float = CONFIDENCE) -> float | None:
    """Returns how far below chance an observed rate must be for its interval to lie below chance.

    None where even no success at all does not lie below it, because too few are expected.
    """
    hits = int(stats.binom.ppf((1 - confidence) / 2, trials, chance)) - 1
    return chance - hits / trials if hits >= 0 else None


def detectable(chance: float, trials: int, confidence: float = CONFIDENCE) -> float:
    """Returns how far above chance the true rate must be to be found with probability POWER.

    That is more than ``visible``: a true rate just so far above chance is observed below it half the time.
    """
    least = _least(chance, trials, confidence)
    return float(stats.beta.ppf(POWER, least, trials - least + 1)) - chance if least <= trials else 1 - chance


def power_at(advantage: float, chance: float, trials: int, confidence: float = CONFIDENCE) -> float:
    """Returns the probability that a true rate so far above chance is observed as above chance."""
    least = _least(chance, trials, confidence)
    return float(stats.binom.sf(least - 1, trials, min(1.0, chance + advantage)))


def blind_hits(guesses: np.ndarray, truth: np.ndarray) -> float:
    """Returns how often guesses that were made without the tenant's rows would be right: the chance level.

    What an adversary knows without those rows goes into its guesses and nowhere else, so the guesses have to
    be those of the same attack on rows that it drew itself; the truth only scores them. Neither of two
    simpler levels is right. The frequencies of the attack's real guesses may have been learned from the rows,
    and would make that pass for chance. And frequencies of public text in place of the true ones give the
    rate at which guesses hit other text: not that of guesses at the tenant's which rest on nothing.

    A token that was never guessed counts as half a guess: rare ones are not impossible.
    """
    size = int(max(guesses.max(initial=0), truth.max(initial=0))) + 1
    first, second = np.bincount(guesses, minlength=size) + 0.5, np.bincount(truth, minlength=size)
    return float(first @ second) / (float(first.sum()) * len(truth))
