"""Fixed point on the ring of integers modulo 2^32: how weights and activations become integers.

A float cannot be hidden well: a mask costs precision, and no mask on floats is uniform. Integers
modulo 2^32 have neither fault, so a ring executor multiplies those, and only those.

Weights are two int8 *planes* and one scale for each output channel, ``W ~ s (W1 + W2 / 256)``.
Activations are rows of int32 with a power of two for each row, ``x ~ 2^e x_q``, chosen so that
no product with any row of W1 or W2 reaches 2^31 (Cauchy-Schwarz). Therefore the product modulo
2^32 *is* the integer product, and ``y = 2^e s (u1 + u2 / 256)`` with ``u_p = x_q W_p^T``.
Backward is the same with ``(g s)_q`` and ``v_p = (g s)_q W_p``: ``gx = 2^e (v1 + v2 / 256)``.

Everything here is integers or exactly rounded floats, so everybody who has the weights and the
rows gets the same bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from shared.wire.header import PLANES

LIMIT = 2**31 - 1
# A float32 has 24 bits: more would only be zeros, and up to here float32 holds every integer.
MAX_NORM = 2.0**24
_STEP_ELEMENTS = 1 << 18  # of a weight at once: in the processor's cache
MARGIN = 1.0 + 2.0**-30  # the norm is itself rounded, to float64


class Planes(NamedTuple):
    """The integers of one weight W [O, D]."""

    planes: torch.Tensor  # int8 [2, O, D]
    scales: torch.Tensor  # float32 [O]


class Bounds(NamedTuple):
    """Largest squared L2 norm that the other factor of a product can have, over both planes."""

    forward: int  # of a row [D]
    backward: int  # of a column [O]


def quantize_weight(weight: torch.Tensor) -> Planes:
    """Planes and scales of W [O, D], any float dtype; relative error near 3e-5 for trained weights.

    ``s = max|W_j| / 127``, ``W1 = round(W / s)``, ``W2 = round(256 (W / s - W1))`` clipped to int8,
    in float64 with ties to even.

    Raises:
        ValueError: NaN or infinity in the weight, or a scale that is infinite in float32.
    """
    outputs, inputs = weight.shape
    planes = torch.empty((PLANES, outputs, inputs), dtype=torch.int8)
    scales = torch.empty(outputs)
    step = max(1, _STEP_ELEMENTS // inputs)
    for at in range(0, outputs, step):
        rows = weight[at : at + step].double()
        scale = rows.abs().amax(1) / 127.0
        rounded = scale.float()
        if not rounded.isfinite().all():
            raise ValueError("a weight holds NaN, infinity or what is too large for float32")
        scales[at : at + step] = rounded
        # A scale that float32 rounds to 0 makes every product 0, so the integers are 0 as well.
        ratio = rows / torch.where(rounded > 0, scale, torch.inf).unsqueeze(1)
        first = ratio.round()
        planes[0, at : at + step] = first
        planes[1, at : at + step] = ((ratio - first) * 256.0).round().clamp(-128, 127)
    return Planes(planes, scales)


def bounds(planes: torch.Tensor) -> Bounds:
    """Of int8 planes [2, O, D]; O of all members together."""
    step = max(1, _STEP_ELEMENTS // planes.shape[2])
    rows = [int(part.to(torch.int32).square_().sum(2).max()) for part in planes.split(step, 1)]
    return Bounds(max(rows), int(column_squares(planes).max()))


def column_squares(planes: torch.Tensor) -> torch.Tensor:
    """Squared L2 norms of the columns of int8 planes [2, O, D]: int64 [2, D]; members' add up."""
    step = max(1, _STEP_ELEMENTS // planes.shape[2])
    # Sums of integers are int64.
    return torch.stack([part.to(torch.int32).square_().sum(1) for part in planes.split(step, 1)]).sum(0)


def capacity(bound: int, width: int) -> float:
    """The largest L2 norm that ``x / 2^e`` may have, before rounding, so that no product overflows.

    ``(|x / 2^e| + sqrt(width) / 2) sqrt(bound) <= 2^31 - 1``, where the second term is what rounding
    can add.

    Args:
        bound: a field of ``Bounds``.
        width: elements of a row.

    Raises:
        ValueError: no row of this width fits.
    """
    room = LIMIT / math.sqrt(bound) - math.sqrt(width) / 2 if bound else MAX_NORM
    if room < 1:
        raise ValueError(f"rows of {width} elements are too wide for products modulo 2^32")
    return min(room, MAX_NORM)


def exponents(norms: torch.Tensor, room: float) -> torch.Tensor:
    """The smallest e for each row, or one more, with ``norm / 2^e <= room``.

    A power of two divides a float32 exactly, so that rounding to integers is the only rounding.

    Args:
        norms: float64 [T], L2 norms of the rows.
        room: from ``capacity``.

    Returns:
        int32 [T]; 0 for rows of zeros.
    """
    return torch.frexp(norms * (MARGIN / room))[1]


def _near(exponent: torch.Tensor) -> torch.Tensor:
    """Whether 2^e and 2^-e, and what they multiply, stay clear of float32's ends: bool [T]."""
    return exponent.abs() < 64


def _power(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2^e, exactly: the bits of a float with that exponent."""
    if dtype == torch.float32:
        return (exponent + 127 << 23).view(torch.float32)
    return (exponent.long() + 1023 << 52).view(torch.float64)


def quantize_rows(rows: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """``round(x / 2^e)``, ties to even.

    Args:
        rows: finite float32 [T, C].
        exponent: from ``exponents``, for rows that may be parts of wider ones.

    Returns:
        int32 [T, C].
    """
    # Both are exact but for what rounds to 0 anyway, so a row does not depend on those beside it.
    dtype = torch.float32 if _near(exponent).all() else torch.float64
    return torch.mul(rows, _power(-exponent, dtype).unsqueeze(1)).round_().to(torch.int32)


def dequantize(
    first: torch.Tensor,
    second: torch.Tensor,
    exponent: torch.Tensor,
    scales: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write ``2^e s (u1 + u2 / 256)``; the bits of a row do not depend on the rows beside it.

    Args:
        first, second: int32 [T, N], the two planes' products.
        exponent: int32 [T].
        scales: float32 [N], or None backward, where they went into the rows.
        out: float32 [T, N].
    """
    near = _near(exponent)
    if near.all():
        _join(first, second, exponent, scales, out)
        return
    for which, dtype in ((near, torch.float32), (~near, torch.float64)):
        result = torch.empty((int(which.sum()), out.shape[1]), dtype=dtype)
        _join(first[which], second[which], exponent[which], scales, result)
        out[which] = result.float()


def _join(
    first: torch.Tensor,
    second: torch.Tensor,
    exponent: torch.Tensor,
    scales: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """See ``dequantize``, computed in the dtype of ``out``."""
    out.copy_(second)
    out.mul_(1 / 256).add_(first)
    if scales is not None:
        out.mul_(scales)
    out.mul_(_power(exponent, out.dtype).unsqueeze(1))
