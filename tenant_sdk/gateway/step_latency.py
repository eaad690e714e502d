"""How long a step of a gateway takes, and how long it may take while clients share it. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from shared.latency import LEARNING, OUTLIER, LinearLatency

# How many times as long a step may take for prompts: while others decode, and else while others may come.
STEP_FACTOR_BUSY, STEP_FACTOR_QUIET = 1.5, 2.5
MIN_ROWS = 8  # of prompts, however long they take
FEW_TOKENS = 2048  # attended to in a step; beyond that, attention takes the blame for its time


@dataclass
class StepLatency:
    """How long a step takes: for its rows, and for what decoding sequences attend to.

    Args:
        line: for rows.
        per_token: seconds for each token that the row of a decoding sequence attends to.
    """

    line: LinearLatency
    per_token: float

    def seconds(self, rows: int, tokens: int = 0) -> float:
        """The forecast."""
        return self.line.seconds(rows) + self.per_token * tokens

    def observe(self, rows: int, tokens: int, seconds: float, *, prompts: bool) -> None:
        """Correct it. Prompts are in every step as long as a client sends them: what they add is theirs."""
        if prompts or tokens <= FEW_TOKENS:
            self.line.observe(rows, seconds - self.per_token * tokens, fixed=not prompts)
            return
        seconds = min(seconds, OUTLIER * self.seconds(rows, tokens))
        right = max((seconds - self.line.seconds(rows)) / tokens, 0.1 * self.per_token)
        self.per_token += LEARNING * (right - self.per_token)

    def max_seconds(self, decoding: int, tokens: int = 0, *, busy: bool) -> float:
        """Seconds that a step may take while there are several clients.

        Args:
            decoding: rows of sequences whose prompt is read.
            tokens: that those of the client attend to which attends to the fewest.
            busy: clients other than those whose prompts are read have sequences.
        """
        return (STEP_FACTOR_BUSY if busy and decoding else STEP_FACTOR_QUIET) * self.seconds(
            max(1, decoding), tokens
        )

    def rows(self, decoding: int, tokens: int, seconds: float, max_rows: int) -> int:
        """How many rows such a step may have; ``tokens``: that those attend to whose clients read as well."""
        return min(max_rows, max(self.line.rows(seconds - self.per_token * tokens), decoding + MIN_ROWS))
