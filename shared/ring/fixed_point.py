"""Fixed point on the ring of integers modulo 2^32: how weights and activations become integers.

A float cannot be hidden well: a mask costs precision, and no mask on floats is uniform. Integers
modulo 2^32 have neither fault, so a ring executor multiplies those, and only those.

Weights have one scale for each output channel. With numerics ``ring`` they are one int16 *plane*, ``W ~ s
W1``, every row of W1 with the same L2 norm; with ``ring-fine`` two int8 planes, ``W ~ s (W1 + W2 / 256)``.
Activations are rows of int32 with a *step* for each row, ``x ~ step x_q``, chosen so that no product with any
row of any plane reaches 2^31 (Cauchy-Schwarz). Therefore the product modulo 2^32 *is* the integer product,
and ``y = step s u`` or ``y = step s (u1 + u2 / 256)`` with ``u_p = x_q W_p^T``. Backward is the same with
``(g s)_q`` and ``v_p = (g s)_q W_p``. How exact that is, and why the norm is what it is:
``docs/numerics.md``.

Everything here is integers or exactly rounded floats, so everybody who has the weights and the
rows gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

LIMIT = 2**31 - 1
# A float32 has 24 bits: more would only be zeros, and up to here float32 holds every integer.
MAX_NORM = 2.0**24
_STEP_ELEMENTS = 1 << 18  # of a weight at once: in the processor's cache
MARGIN = 1.0 + 2.0**-30  # the norm is itself rounded, to float64
LARGEST = 0x7F7F  # norm of a row of int16, so that no element needs more than two signed digits of 8 bits


class Planes(NamedTuple):
    """The integers of one weight W [O, D]."""

    planes: torch.Tensor  # int16 [1, O, D] or int8 [2, O, D]
    scales: torch.Tensor  # float32 [O]


class Bounds(NamedTuple):
    """Largest squared L2 norm that the other factor of a product can have, over all planes."""

    forward: int  # of a row [D]
    backward: int  # of a column [O]


def quantize_weight(weight: torch.Tensor, planes: int) -> Planes:
    """Planes and scales of W [O, D], any float dtype; the same bits everywhere.

    Args:
        weight: finite.
        planes: 1 or 2, see ``shared.wire.header.RINGS``.

    Raises:
        ValueError: NaN or infinity in the weight, or a scale that is infinite in float32.
    """
    return _two_planes(weight) if planes > 1 else _one_plane(weight)


def _one_plane(weight: torch.Tensor) -> Planes:
    """Rows of one norm, which is chosen by what their columns then are: see ``best_norm``."""
    made = _of_norm(weight, LARGEST)
    norm = best_norm(int(column_squares(made.planes).max()), *weight.shape)
    return made if norm == LARGEST else _of_norm(weight, norm)


def best_norm(largest_column: int, outputs: int, inputs: int) -> float:
    """The norm of the rows of a plane that makes rounding matter least, forward and backward together.

    Rounding the weight costs a share ``sqrt(D / 12) / norm`` of the result in both directions. Rounding rows
    costs ``sqrt(D / 12) norm / 2^31`` forward, since larger integers in the weight leave room for smaller
    ones in the row; backward that times ``sqrt(b O / D)``, where ``norm^2 b`` is the largest column's squared
    norm. The sum of the squares is least here; as groups of two are usual, whose columns add up, b and O
    count twice.

    Args:
        largest_column: squared L2 norm, for rows of norm LARGEST.
        outputs: O.
        inputs: D.
    """
    columns = 2 * largest_column / LARGEST**2
    # Roots and not powers, which are not the same everywhere.
    norm = 2.0**15 * math.sqrt(2 * math.sqrt(2 / (1 + columns * 2 * outputs / inputs)))
    return min(float(LARGEST), norm)


def _of_norm(weight: torch.Tensor, norm: float) -> Planes:
    """``W1 = round(W / s)`` with ``s = |W_j| / norm``, in float64 with ties to even.

    Norms come from sums of integers, since those of floats depend on the order of the terms.
    """
    outputs, inputs = weight.shape
    planes = torch.empty((1, outputs, inputs), dtype=torch.int16)
    scales = torch.empty(outputs)
    step = max(1, _STEP_ELEMENTS // inputs)
    for at in range(0, outputs, step):
        rows = weight[at : at + step].double()
        unit = rows.abs().amax(1) / LARGEST
        squares = (
            (rows / torch.where(unit > 0, unit, torch.inf).unsqueeze(1)).round_().square_().long().sum(1)
        )
        scale = unit * squares.double().sqrt() / norm
        rounded = scales[at : at + step] = _rounded(scale)
        integers = (rows / torch.where(rounded > 0, scale, torch.inf).unsqueeze(1)).round_()
        planes[0, at : at + step] = integers.clamp_(-LARGEST, LARGEST)
    return Planes(planes, scales)


def _two_planes(weight: torch.Tensor) -> Planes:
    """``s = max|W_j| / 127``, ``W1 = round(W / s)``, ``W2 = round(256 (W / s - W1))`` clipped to int8.

    Relative error near 3e-5 for trained weights.
    """
    outputs, inputs = weight.shape
    planes = torch.empty((2, outputs, inputs), dtype=torch.int8)
    scales = torch.empty(outputs)
    step = max(1, _STEP_ELEMENTS // inputs)
    for at in range(0, outputs, step):
        rows = weight[at : at + step].double()
        scale = rows.abs().amax(1) / 127.0
        rounded = scales[at : at + step] = _rounded(scale)
        ratio = rows / torch.where(rounded > 0, scale, torch.inf).unsqueeze(1)
        first = ratio.round()
        planes[0, at : at + step] = first
        planes[1, at : at + step] = ((ratio - first) * 256.0).round().clamp(-128, 127)
    return Planes(planes, scales)


def _rounded(scale: torch.Tensor) -> torch.Tensor:
    """In float32. One that becomes 0 makes every product 0, so its row's integers are 0 as well."""
    rounded = scale.float()
    if not rounded.isfinite().all():
        raise ValueError("a weight holds NaN, infinity or what is too large for float32")
    return rounded


def bounds(planes: torch.Tensor) -> Bounds:
    """Of planes [P, O, D]; O of all members together."""
    rows = [int(part.sum(2).max()) for part in _squares(planes)]
    return Bounds(max(rows), int(column_squares(planes).max()))


def column_squares(planes: torch.Tensor) -> torch.Tensor:
    """Squared L2 norms of the columns of planes [P, O, D]: int64 [P, D]; members' add up."""
    return torch.stack([part.sum(1) for part in _squares(planes)]).sum(0)


def _squares(planes: torch.Tensor) -> Iterator[torch.Tensor]:
    """Elements squared, some rows after the other; sums of integers are int64."""
    step = max(1, _STEP_ELEMENTS // planes.shape[2])
    return (part.to(torch.int32).square_() for part in planes.split(step, 1))


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
    """The exponent for each row of the smallest step with ``norm / step <= room``.

    Steps are ``(8 + c) / 16 * 2^p``, c of 0 to 7, and their exponents ``8 p + c``: an eighth of an octave
    wastes little of the room, and multiplying by such a step is as exact as float32 is.

    Args:
        norms: float64 [T], L2 norms of the rows.
        room: from ``capacity``.

    Returns:
        int32 [T].
    """
    fraction, power = torch.frexp(norms * (MARGIN / room))
    return 8 * power + (16 * fraction).ceil().to(torch.int32) - 8


def steps(exponent: torch.Tensor) -> torch.Tensor:
    """Of exponents: float64 [T]; as float32 they are exact where that has them."""
    power = (exponent.long() >> 3) + 1023 << 52  # 2^p, exactly: the bits of a float with that exponent
    return (8 + exponent % 8).double() / 16 * power.view(torch.float64)


def quantize_rows(rows: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """``round(x / step)``, ties to even.

    Args:
        rows: finite float32 [T, C].
        exponent: from ``exponents``, for rows that may be parts of wider ones.

    Returns:
        int32 [T, C].
    """
    return torch.mul(rows, (1 / steps(exponent)).unsqueeze(1)).round_().to(torch.int32)


def dequantize(
    planes: list[torch.Tensor], exponent: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Write ``step s u``, or ``step s (u1 + u2 / 256)``; a row's bits do not depend on the rows beside it.

    Args:
        planes: int32 [T, N], the products with each.
        exponent: int32 [T].
        scales: float32 [N], or None backward, where they went into the rows.
        out: float32 [T, N].
    """
    # Whether a step, and what it multiplies, stays clear of float32's ends.
    near = (exponent >> 3).abs() < 64
    if near.all():
        _join(planes, exponent, scales, out)
        return
    for which, dtype in ((near, torch.float32), (~near, torch.float64)):
        result = torch.empty((int(which.sum()), out.shape[1]), dtype=dtype)
        _join([each[which] for each in planes], exponent[which], scales, result)
        out[which] = result.float()


def _join(
    planes: list[torch.Tensor], exponent: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor
) -> None:
    """See ``dequantize``, computed in the dtype of ``out``."""
    out.copy_(planes[-1])
    if len(planes) > 1:
        out.mul_(1 / 256).add_(planes[0])
    if scales is not None:
        out.mul_(scales)
    out.mul_(steps(exponent).to(out.dtype).unsqueeze(1))
