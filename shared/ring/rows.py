"""Both ends of a product on the ring: float rows to masked integers, answers to float rows.

In native code where there is some, else with torch; the results are the same.
"""

from __future__ import annotations

import math

import torch

from shared.ring import native as ring_native
from shared.ring.fixed_point import MARGIN, dequantize, exponents, quantize_rows

CHUNK_ELEMENTS = 1 << 17  # at once, which then stay in the processor's cache


def _check(tensor: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Native code goes where sizes lead it, and some of them come from peers."""
    if tensor is not None and tensor.device.type != "cpu":
        raise ValueError(f"a tensor of the CPU is wanted, not of {tensor.device}")
    if tensor is not None and (tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous()):
        raise ValueError(
            f"a contiguous {dtype} of shape {shape} is wanted, not {tensor.dtype} {tensor.shape}"
        )


def all_finite_below(values: torch.Tensor, limit: float = math.inf) -> bool:
    """Whether all of a float tensor, on whatever device, are numbers of less than ``limit``'s size."""
    ordinary = values.dtype == torch.float32 and values.device.type == "cpu" and values.is_contiguous()
    if ordinary and ring_native.LIBRARY is not None:
        return ring_native.all_finite_below(values, limit)
    # One reduction is cheaper than a look at every element, which a finite tensor has if its sum overflows.
    if limit == math.inf and math.isfinite(values.sum().item()):
        return True
    return bool((values.abs() < limit).all())


def quantize_and_mask(
    tensors: list[torch.Tensor],
    scales: torch.Tensor | None,
    max_norm: float,
    requests: torch.Tensor,
    projection: torch.Tensor | None,
    integers: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Add the integers of float rows to masks.

    Args:
        tensors: contiguous float32 [T, C_b], side by side one row x.
        scales: float32 [C], to multiply x by first, or None.
        max_norm: from ``shared.ring.fixed_point.max_row_norm``.
        requests: int32 [T, C], the masks; ``round(x / step)`` is added to them.
        projection: int64 [C] of a fingerprint, or None.
        integers: float32 [T, C], to write ``round(x / step)`` into, or None. They are exact, for no row is
            longer than 2^24.

    Returns:
        The rows' exponents (``shared.ring.fixed_point.exponents``), int32 [T]; and ``sum round(x / step) *
        projection`` modulo 2^64, int64 [T], if there is one. None if a row's norm is not finite.

    Raises:
        ValueError: tensors of other dtypes or shapes.
    """
    rows, columns = requests.shape
    _check(requests, torch.int32, (rows, columns))
    for tensor in tensors:
        _check(tensor, torch.float32, (rows, tensor.shape[1]))
    if sum(tensor.shape[1] for tensor in tensors) != columns:
        raise ValueError("the tensors are not as wide as the request")
    _check(scales, torch.float32, (columns,))
    _check(projection, torch.int64, (columns,))
    _check(integers, torch.float32, (rows, columns))
    exponents_of_rows = torch.empty(len(requests), dtype=torch.int32)
    expected = None if projection is None else torch.empty(len(requests), dtype=torch.int64)
    if ring_native.LIBRARY is not None:
        fine = ring_native.quantize_and_mask(
            tensors, scales, MARGIN / max_norm, requests, exponents_of_rows, projection, expected, integers
        )
        return (exponents_of_rows, expected) if fine else None
    step = max(1, CHUNK_ELEMENTS // requests.shape[1])
    for first in range(0, len(requests), step):
        part = slice(first, first + step)
        x = tensors[0][part] if len(tensors) == 1 else torch.cat([tensor[part] for tensor in tensors], 1)
        if scales is not None:
            x = x * scales
        norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
        if not norms.isfinite().all():
            return None
        exponents_of_rows[part] = exponents(norms, max_norm)
        numbers = quantize_rows(x, exponents_of_rows[part])
        requests[part] += numbers
        if integers is not None:
            integers[part] = numbers
        if projection is not None and expected is not None:
            expected[part] = (numbers.long() * projection).sum(1)
    return exponents_of_rows, expected


def unmask_and_dequantize(
    answers: torch.Tensor,
    effects: list[torch.Tensor],
    exponents: torch.Tensor,
    scales: torch.Tensor | None,
    tensors: list[torch.Tensor],
    challenge: torch.Tensor | None,
    expected: torch.Tensor | None,
) -> int:
    """Take the effects off answers, check them, and write ``step s u``, or ``step s (u1 + u2 / 256)``.

    Args:
        answers: contiguous int32 [T, P N], the products with the planes side by side; changed.
        effects: of each mask source, contiguous int32 [T, P N].
        exponents: from ``quantize_and_mask``.
        scales: float32 [N], or None backward, where they went into the rows.
        tensors: contiguous float32 [T, N_b] to write into, side by side one row.
        challenge: int32 [P N] of a fingerprint, or None.
        expected: from ``quantize_and_mask``.

    Returns:
        How many rows fail ``sum u * challenge == expected`` modulo 2^64.

    Raises:
        ValueError: tensors of other dtypes or shapes, or one of ``challenge`` and ``expected`` alone.
    """
    rows, columns = answers.shape
    for each in (answers, *effects):
        _check(each, torch.int32, (rows, columns))
    for tensor in tensors:
        _check(tensor, torch.float32, (rows, tensor.shape[1]))
    width = sum(tensor.shape[1] for tensor in tensors)
    if columns not in (width, 2 * width):
        raise ValueError("the tensors are not as wide as a plane of the answers")
    _check(exponents, torch.int32, (rows,))
    _check(scales, torch.float32, (width,))
    _check(challenge, torch.int32, (columns,))
    _check(expected, torch.int64, (rows,))
    if (challenge is None) != (expected is None):  # native code would read at address 0
        raise ValueError("a challenge and what is expected go together")
    if ring_native.LIBRARY is not None:
        return ring_native.unmask_and_dequantize(
            answers, effects, exponents, scales, tensors, challenge, expected
        )
    wrong = 0
    step = max(1, CHUNK_ELEMENTS // answers.shape[1])
    for first in range(0, len(answers), step):
        part = slice(first, first + step)
        integers = answers[part]
        for effect in effects:
            integers.sub_(effect[part])
        if challenge is not None and expected is not None:
            wrong += int(((integers.long() * challenge).sum(1) != expected[part]).sum())
        _write(integers, exponents[part], scales, [tensor[part] for tensor in tensors])
    return wrong


def write_products(
    products: torch.Tensor, exponents: torch.Tensor, scales: torch.Tensor | None, tensors: list[torch.Tensor]
) -> None:
    """Write ``step s u``, or ``step s (u1 + u2 / 256)``.

    Args:
        products: contiguous float32 [T, P N], with the planes side by side.
        exponents, scales, tensors: see ``unmask_and_dequantize``.

    Raises:
        ValueError: tensors of other dtypes or shapes.
    """
    rows, columns = products.shape
    width = sum(tensor.shape[1] for tensor in tensors)
    if columns not in (width, 2 * width):
        raise ValueError("the tensors are not as wide as a plane of the products")
    _check(products, torch.float32, (rows, columns))
    _check(exponents, torch.int32, (rows,))
    _check(scales, torch.float32, (width,))
    for tensor in tensors:
        _check(tensor, torch.float32, (rows, tensor.shape[1]))
    if ring_native.LIBRARY is not None:
        ring_native.write_products(products, exponents, scales, tensors)
    else:
        _write(products, exponents, scales, tensors)


def _write(
    products: torch.Tensor, exponents: torch.Tensor, scales: torch.Tensor | None, tensors: list[torch.Tensor]
) -> None:
    width, at = sum(tensor.shape[1] for tensor in tensors), 0
    for tensor in tensors:
        to = at + tensor.shape[1]
        planes = [plane[:, at:to] for plane in products.split(width, 1)]
        dequantize(planes, exponents, None if scales is None else scales[at:to], tensor)
        at = to
