"""Fixed point on the ring of integers modulo 2^32: how weights and activations become integers.

A float cannot be hidden well: a mask costs precision, and no mask on floats is uniform. Integers
modulo 2^32 have neither fault, so a ring executor multiplies those, and only those.

Weights have one scale for each output channel. With numerics ``ring`` they are one int16 *plane*, ``W ~ s
W1``, every row of W1 with the same L2 norm; with ``ring-fine`` two int8 planes, ``W ~ s (W1 + W2 / 256)``.
Activations are rows of int32 with a *step* for each row, ``x ~ step x_q``, chosen so that no product with any
row of any plane reaches 2^31 (Cauchy-Schwarz). Therefore the product modulo 2^32 *is* the integer product,
and ``y = step s u`` or ``y = step s (u1 + u2 / 256)`` with ``u_p = x_q W_p^T``. Backward is the same with
``(g s)_q`` and ``v_p = (g s)_q W_p``. How exact that is, and why the norm is what it is:
``docs/explanation/numerics.md``.

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
# Of a row of zeros: half answers add a unit times the step to its product, which then is still zero.
ZERO_EXPONENT = -8 * 512
_STEP_ELEMENTS = 1 << 18  # of a weight at once: in the processor's cache
MARGIN = 1.0 + 2.0**-30  # the norm is itself rounded, to float64
EVEN = 4  # times the share that each column had of evenly spread weights
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
    """Rows of one norm, which is chosen by what their columns then are: see ``best_norm``.

    ``W1 = round(W / s)`` with ``s = |W_j| / norm``, in float64 with ties to even. The norms |W_j| come from
    sums of integers, since those of floats depend on the order of the terms.
    """
    outputs, inputs = weight.shape
    planes = torch.empty((1, outputs, inputs), dtype=torch.int16)
    norms = torch.empty(outputs, dtype=torch.float64)
    columns = torch.zeros(inputs, dtype=torch.int64)
    for at in _steps_over(planes):
        rows = weight[at].to(torch.float64, copy=True)
        unit = _largest(rows) / LARGEST
        integers = (rows / torch.where(unit > 0, unit, torch.inf).unsqueeze(1)).round_()
        norms[at] = unit * integers.mul_(integers).long().sum(1).double().sqrt()
        _fill(planes[0, at], rows, norms[at] / LARGEST)
        columns += _squares(planes[0, at]).sum(0)
    norm = best_norm(int(columns.max()), outputs, inputs)
    scales = norms / norm
    if norm != LARGEST:
        for at in _steps_over(planes):
            _fill(planes[0, at], weight[at].to(torch.float64, copy=True), scales[at])
    return Planes(planes, _rounded(scales))


def _fill(plane: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor) -> None:
    """Integers of rows in float64, which are lost; see ``_rounded``."""
    rows.div_(torch.where(_rounded(scales) > 0, scales, torch.inf).unsqueeze(1))
    plane.copy_(rows.round_().clamp_(-LARGEST, LARGEST))


def best_norm(largest_column: int, outputs: int, inputs: int) -> float:
    """The norm of the rows of a plane that makes rounding matter least, forward and backward together.

    Rounding the weight costs a share ``sqrt(D / 12) / norm`` of the result in both directions. Rounding rows
    costs ``sqrt(D / 12) norm / 2^31`` forward, since larger integers in the weight leave room for smaller
    ones in the row; backward that times ``sqrt(b O / D)``, where ``norm^2 b`` is the largest column's squared
    norm. The sum of the squares is least here; as groups of two are usual, whose columns add up, b and O
    count twice. But for the gradients of a layer with one very large column, its outputs are not given up:
    a column counts as EVEN even ones at most.

    Args:
        largest_column: squared L2 norm, for rows of norm LARGEST.
        outputs: O.
        inputs: D.
    """
    columns = 2 * min(largest_column / LARGEST**2, EVEN * outputs / inputs)
    # Roots and not powers, which are not the same everywhere.
    norm = 2.0**15 * math.sqrt(2 * math.sqrt(2 / (1 + columns * 2 * outputs / inputs)))
    return min(float(LARGEST), norm)


def _two_planes(weight: torch.Tensor) -> Planes:
    """``s = max|W_j| / 127``, ``W1 = round(W / s)``, ``W2 = round(256 (W / s - W1))`` clipped to int8.

    Relative error near 3e-5 for trained weights.
    """
    outputs, inputs = weight.shape
    planes = torch.empty((2, outputs, inputs), dtype=torch.int8)
    scales = torch.empty(outputs)
    for at in _steps_over(planes):
        ratio = weight[at].to(torch.float64, copy=True)
        scale = _largest(ratio) / 127.0
        rounded = scales[at] = _rounded(scale)
        ratio.div_(torch.where(rounded > 0, scale, torch.inf).unsqueeze(1))
        first = ratio.round()
        planes[0, at] = first
        planes[1, at] = ratio.sub_(first).mul_(256.0).round_().clamp_(-128, 127)
    return Planes(planes, scales)


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """Magnitude in each row; NaN where there is one."""
    least, largest = rows.aminmax(dim=1)
    return torch.maximum(largest.abs(), least.abs())


def _rounded(scale: torch.Tensor) -> torch.Tensor:
    """In float32. One that becomes 0 makes every product 0, so its row's integers are 0 as well."""
    rounded = scale.float()
    if not rounded.isfinite().all():
        raise ValueError("a weight holds NaN, infinity or what is too large for float32")
    return rounded


def bounds(planes: torch.Tensor) -> Bounds:
    """Of planes [P, O, D]; O of all members together."""
    row, columns = squared_norms(planes)
    return Bounds(row, int(columns.max()))


def squared_norms(planes: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Squared L2 norms of planes [P, O, D]: of the longest row, and of all columns, int64 [P, D]; the
    columns of a group's members add up.
    """
    row, columns = 0, torch.zeros((len(planes), planes.shape[2]), dtype=torch.int64)
    for at in _steps_over(planes):
        squares = _squares(planes[:, at])
        row = max(row, int(squares.sum(2).max()))
        columns += squares.sum(1)
    return row, columns


def _steps_over(planes: torch.Tensor) -> Iterator[slice]:
    """Rows that fit into a core's cache, some after the other."""
    step = max(1, _STEP_ELEMENTS // planes.shape[2])
    return (slice(at, at + step) for at in range(0, planes.shape[1], step))


def _squares(integers: torch.Tensor) -> torch.Tensor:
    """In int32, whose sums are int64."""
    wide = integers.to(torch.int32)
    return wide.mul_(wide)


def max_row_norm(bound: int, width: int, limit: int = LIMIT) -> float:
    """The largest L2 norm that ``x / step`` may have, before rounding, so that no product overflows.

    ``(|x / step| + sqrt(width) / 2) sqrt(bound) <= 2^31 - 1``, where the second term is what rounding
    can add.

    Args:
        bound: a field of ``Bounds``.
        width: elements of a row.
        limit: of products, instead of 2^31 - 1.

    Raises:
        ValueError: no row of this width fits.
    """
    max_norm = limit / math.sqrt(bound) - math.sqrt(width) / 2 if bound else MAX_NORM
    if max_norm < 1:
        raise ValueError(f"rows of {width} elements are too wide for products modulo 2^32")
    return min(max_norm, MAX_NORM)


def exponents(norms: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The exponent for each row of the smallest step with ``norm / step <= max_norm``.

    Steps are ``(8 + c) / 16 * 2^p``, c of 0 to 7, and their exponents ``8 p + c``: an eighth of an octave
    wastes little of it, and multiplying by such a step rounds once. Rows of zeros get ZERO_EXPONENT.

    Args:
        norms: float64 [T], L2 norms of the rows.
        max_norm: from ``max_row_norm``.

    Returns:
        int32 [T].
    """
    fraction, power = torch.frexp(norms * (MARGIN / max_norm))
    exponent = 8 * power + (16 * fraction).ceil().to(torch.int32) - 8
    return torch.where(norms > 0, exponent, ZERO_EXPONENT)


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
    # Whether a step, and what it multiplies with scales of trained weights, stays clear of float32's ends.
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
