"""The privacy modes by name, and what differs between them wherever the SDK asks."""

from __future__ import annotations

from enum import StrEnum


class Privacy(StrEnum):
    """A privacy mode; its value is the option ``privacy``."""

    ONE_TIME = "one-time"
    NOISE_BANK = "noise-bank"
    PLAIN = "plain"

    @property
    def hides_zeros(self) -> bool:
        """Whether a row of zeros looks like any other to the executor.

        A mask that serves several rows shows in a row of zeros, and no mask shows the zeros.
        """
        return self is Privacy.ONE_TIME
