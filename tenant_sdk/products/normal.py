"""Normal numbers of uniform ones (Box and Muller, 1958)."""

from __future__ import annotations

import math

import torch


def normal_of_uniform(uniform: torch.Tensor) -> torch.Tensor:
    """Returns standard normal numbers, float64 [n, ...], of numbers in (0, 1), float64 [2n, ...]."""
    radius, angle = uniform.chunk(2)
    return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()
