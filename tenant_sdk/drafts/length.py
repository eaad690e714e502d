"""How many tokens a pass checks: a policy, without a clock.

A pass costs the same round trips for one row as for several, so the best number depends on the distance. It
is decided once for a session, from times and from what was held out when the draft was trained. It does not
depend on the text, so the number of rows tells an observer nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

_TRIALS = 3  # passes of each size that are timed


class DraftLength:
    """Chooses the number of guesses, after some passes of both sizes.

    Args:
        acceptance: of the first, second, ... guess: the share of passes in which it and all before it are
            right.
        most: guesses at most.
        fixed: this number instead of a choice.

    Attributes:
        chosen: the number of guesses; None until enough passes were timed.
    """

    def __init__(self, acceptance: Sequence[float], most: int, fixed: int | None = None) -> None:
        self._acceptance, self._most = list(acceptance[:most]), min(most, len(acceptance))
        self._seconds: dict[int, list[float]] = {0: [], self._most: []}
        self.chosen = fixed if fixed is not None else None if self._most else 0

    @property
    def next(self) -> int:
        """How many tokens the next pass shall check beside the one that is known."""
        if self.chosen is not None:
            return self.chosen
        return min(self._seconds, key=lambda size: (len(self._seconds[size]), -size))

    def observe(self, size: int, seconds: float) -> None:
        """A pass with so many guesses took so long, with the time to make them."""
        if self.chosen is not None or size not in self._seconds:
            return
        self._seconds[size].append(seconds)
        if min(map(len, self._seconds.values())) > _TRIALS:
            # The first of each size is slow: it meets code and memory that nothing has used yet.
            alone, whole = (median(self._seconds[size][1:]) for size in (0, self._most))
            self.chosen = best_length(self._acceptance, alone, (whole - alone) / self._most)


def tokens_a_pass(acceptance: Sequence[float]) -> float:
    """The mean number of tokens of a pass, with the one that the model itself adds."""
    return 1 + sum(acceptance)


def best_length(acceptance: Sequence[float], alone: float, each: float) -> int:
    """The number of guesses with the most tokens a second.

    Args:
        acceptance: see ``DraftLength``.
        alone: seconds of a pass without guesses.
        each: seconds that a guess adds.
    """

    def rate(size: int) -> float:
        return tokens_a_pass(acceptance[:size]) / (alone + size * max(each, 0.0))

    return max(range(len(acceptance) + 1), key=rate)
