"""How long work on some rows takes: a line, corrected by all that is seen (the f of FlexLLM §6.2)."""

from __future__ import annotations

from dataclasses import dataclass

LEARNING = 0.1  # weight of the newest
OUTLIER = 4.0  # work interrupted by something else counts as no more than this times the forecast


@dataclass
class LinearLatency:
    """``seconds = fixed + per_row * rows``."""

    fixed: float
    per_row: float

    def seconds(self, rows: int) -> float:
        """The forecast for so many rows."""
        return self.fixed + self.per_row * rows

    def rows(self, seconds: float) -> int:
        """How many are done within some seconds; may be 0 or less."""
        return int((seconds - self.fixed) / self.per_row)

    def observe(self, rows: int, seconds: float, *, fixed: bool | None = None) -> None:
        """Correct the forecast by what so many rows took.

        Args:
            rows: how many.
            seconds: that they took.
            fixed: the fixed term takes the blame, else the term for rows; None: the larger of the two.
        """
        seconds = min(seconds, OUTLIER * self.seconds(rows))
        if self.per_row * rows < self.fixed if fixed is None else fixed:
            right = max(seconds - self.per_row * rows, 0.1 * self.fixed)
            self.fixed += LEARNING * (right - self.fixed)
        else:
            right = max((seconds - self.fixed) / rows, 0.1 * self.per_row)
            self.per_row += LEARNING * (right - self.per_row)
