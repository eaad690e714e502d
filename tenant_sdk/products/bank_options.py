"""The options of a noise bank."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ConfigurationError


@dataclass(frozen=True)
class NoiseBankOptions:
    """Size and lifetime of a noise-bank.

    Attributes:
        masks: Number of masks for each group and direction: a power of two, at most 256.
        scale: Standard deviation of the noise, in units of the root mean square of the activations. The
            session rounds it up to a power of two.
        rotate_rows: Number of rows after which the session fetches the next bank.
        rotate_seconds: Time in seconds after which the session fetches the next bank. It fetches the bank in
            the background, and uses the old one until then.
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
