"""The options of a noise bank."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ConfigurationError


@dataclass(frozen=True)
class NoiseBankOptions:
    """Size and lifetime of a noise-bank.

    ``masks`` K, a power of two up to 256, for each group and direction. ``scale`` is the noise's
    standard deviation in units of the activations' root mean square; it is rounded up to a power
    of two. After ``rotate_rows`` rows or ``rotate_seconds``, the next bank is fetched in the background. The
    old one serves until then.
    """

    masks: int = 16
    scale: float = 1.0
    rotate_rows: int = 1 << 16
    rotate_seconds: float = 600.0

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        if not 1 <= self.masks <= 256 or self.masks & (self.masks - 1):
            raise ConfigurationError(f"masks must be a power of two from 1 to 256, not {self.masks}")
        if self.scale <= 0 or self.rotate_rows < 1 or self.rotate_seconds <= 0:
            raise ConfigurationError("scale, rotate_rows and rotate_seconds must be positive")
