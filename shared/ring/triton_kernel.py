"""Products of the ring on a GPU, in Triton: for both directions and both sizes of planes.

Tensor cores multiply int8 with int32 sums. A row's integers are four signed base-256 digits, those of an
int16 plane two, so ``r w = sum 256^(i + j) L_i w_j``; what is 2^32 times something is left out, which makes
seven products of eight.

Few rows take as long as it takes to read the weight. So digits are made in registers, and nothing but rows,
weight and the answer goes through memory; several programs share the inner size of one tile, and add up:
sums of integers are exact in any order. Many rows take as long as the tensor cores need. So digits are
written to memory once, side by side: of a row ``L_3 L_2 L_1 L_0``, of a weight's column ``w_0 w_1``. A sum of
one power of 256 is then one product: of ``L_3 L_2`` with ``w_0 w_1``, of ``L_2 L_1``, of ``L_1 L_0``, and of
``L_0`` with ``w_0``. The tiles are those that were fastest on an H100 (docs/explanation/decisions.md).

It runs on a CPU too, in Triton's interpreter, which is how it is tested: ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_FEW = 64  # rows at most
_SHARED = 2048  # the inner size from which programs share it
_APART = 512  # rows up to which there are too few tiles for a GPU, and each power of 256 is a program's
_DIGITS = 1 << 28  # bytes of a weight's digits at a time


@triton.jit
def _digit(numbers):  # type: ignore[no-untyped-def]
    """The lowest signed digit, and what is left of the numbers without it."""
    digit = (numbers << 24) >> 24
    return digit.to(tl.int8), (numbers - digit) >> 8


@triton.jit(do_not_specialize=["count"])  # else some numbers of rows would be compiled while tenants wait
def _product_of_few(  # type: ignore[no-untyped-def]
    rows, weight, out, count, inner, columns,
    row_stride, weight_inner, weight_column, out_stride,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A tile of the answer, or one of PARTS terms of it. Sums of one power of 256 share a register.

    Offsets are int64: a head times many rows has more than 2^31 elements.
    """
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(2) * INNER
    k = tl.arange(0, INNER)
    from_rows = rows + t.to(tl.int64)[:, None] * row_stride + (first + k)[None, :]
    from_weight = (
        weight + (first + k).to(tl.int64)[:, None] * weight_inner + n.to(tl.int64)[None, :] * weight_column
    )
    sum_0 = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    sum_1 = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    sum_2 = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    sum_3 = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    for at in range(first, inner, INNER * PARTS):
        here = k < inner - at
        r = tl.load(from_rows, mask=(t < count)[:, None] & here[None, :], other=0)
        w = tl.load(from_weight, mask=here[:, None] & (n < columns)[None, :], other=0).to(tl.int32)
        r_0, r = _digit(r)
        r_1, r = _digit(r)
        r_2, r = _digit(r)
        r_3, r = _digit(r)
        w_0, w = _digit(w)
        sum_0 = tl.dot(r_0, w_0, sum_0, out_dtype=tl.int32)
        sum_1 = tl.dot(r_1, w_0, sum_1, out_dtype=tl.int32)
        sum_2 = tl.dot(r_2, w_0, sum_2, out_dtype=tl.int32)
        sum_3 = tl.dot(r_3, w_0, sum_3, out_dtype=tl.int32)
        if WIDE:
            w_1, w = _digit(w)
            sum_1 = tl.dot(r_0, w_1, sum_1, out_dtype=tl.int32)
            sum_2 = tl.dot(r_1, w_1, sum_2, out_dtype=tl.int32)
            sum_3 = tl.dot(r_2, w_1, sum_3, out_dtype=tl.int32)
        from_rows += INNER * PARTS
        from_weight += INNER * PARTS * weight_inner
    total = sum_0 + (sum_1 << 8) + (sum_2 << 16) + (sum_3 << 24)
    to = out + t.to(tl.int64)[:, None] * out_stride + n[None, :]
    there = (t < count)[:, None] & (n < columns)[None, :]
    if PARTS > 1:
        tl.atomic_add(to, total, mask=there, sem="relaxed")
    else:
        tl.store(to, total, mask=there)


@triton.jit(do_not_specialize=["count"])
def _split(  # type: ignore[no-untyped-def]
    numbers, out, count, inner, stride, inner_stride,
    DIGITS: tl.constexpr, HIGHEST_FIRST: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """[count, inner] integers to [count, DIGITS * inner] digits."""
    t = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    k = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    there = (t < count)[:, None] & (k < inner)[None, :]
    from_ = numbers + t.to(tl.int64)[:, None] * stride + k.to(tl.int64)[None, :] * inner_stride
    left = tl.load(from_, mask=there, other=0).to(tl.int32)
    to = out + t.to(tl.int64)[:, None] * (DIGITS * inner) + k[None, :]
    for i in tl.static_range(DIGITS):
        digit, left = _digit(left)
        tl.store(to + (DIGITS - 1 - i if HIGHEST_FIRST else i) * inner, digit, mask=there)


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    rows, weight, t, n, count, columns, row_stride, weight_stride, length, total, INNER: tl.constexpr,
):  # fmt: skip
    """``total`` and the product of a tile's digits of this length, which lie side by side in both."""
    k = tl.arange(0, INNER)
    from_rows = rows + t.to(tl.int64)[:, None] * row_stride + k[None, :]
    from_weight = weight + n.to(tl.int64)[None, :] * weight_stride + k[:, None]
    for at in range(0, length, INNER):
        here = k < length - at
        r = tl.load(from_rows, mask=(t < count)[:, None] & here[None, :], other=0)
        w = tl.load(from_weight, mask=here[:, None] & (n < columns)[None, :], other=0)
        total = tl.dot(r, w, total, out_dtype=tl.int32)
        from_rows += INNER
        from_weight += INNER
    return total


@triton.jit(do_not_specialize=["count"])
def _product_of_digits(  # type: ignore[no-untyped-def]
    rows, weight, out, count, inner, columns, out_stride,
    DIGITS: tl.constexpr, APART: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of the answer, or the term of one power of 256; GROUP tiles below each other share the cache."""
    pid = tl.program_id(0)
    group = GROUP * tl.cdiv(columns, COLUMNS)
    top = pid // group * GROUP
    height = min(tl.cdiv(count, ROWS) - top, GROUP)
    t = (top + pid % group % height) * ROWS + tl.arange(0, ROWS)
    n = pid % group // height * COLUMNS + tl.arange(0, COLUMNS)
    row_stride, weight_stride, length = 4 * inner, DIGITS * inner, DIGITS * inner
    to = out + t.to(tl.int64)[:, None] * out_stride + n[None, :]
    there = (t < count)[:, None] & (n < columns)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    if APART:
        power = 3 - tl.program_id(1)
        length = tl.where(power == 0, inner, length)
        rows += (3 - power) * inner
        total = _sum(rows, weight, t, n, count, columns, row_stride, weight_stride, length, total, INNER)
        tl.atomic_add(to, total << 8 * power, mask=there, sem="relaxed")
    else:
        # Sums of tensor cores stop at the ends of int32, so of each sum the bits that will go are left out.
        total = _sum(rows, weight, t, n, count, columns, row_stride, weight_stride, length, total, INNER)
        total = (total & 0xFF) << 8
        rows += inner
        total = _sum(rows, weight, t, n, count, columns, row_stride, weight_stride, length, total, INNER)
        total = (total & 0xFFFF) << 8
        rows += inner
        total = _sum(rows, weight, t, n, count, columns, row_stride, weight_stride, length, total, INNER)
        tl.store(to, total << 8, mask=there)  # registers are few
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
        rows += inner
        total = _sum(rows, weight, t, n, count, columns, row_stride, weight_stride, inner, total, INNER)
        tl.store(to, total + tl.load(to, mask=there, other=0), mask=there)


def _digits(numbers: torch.Tensor, count: int, highest_first: bool) -> torch.Tensor:
    """[T, K] integers as [T, count * K] digits."""
    out = numbers.new_empty((len(numbers), count * numbers.shape[1]), dtype=torch.int8)
    grid = (triton.cdiv(numbers.shape[0], 64), triton.cdiv(numbers.shape[1], 64))
    _split[grid](
        numbers, out, *numbers.shape, *numbers.stride(), DIGITS=count, HIGHEST_FIRST=highest_first, SIDE=64
    )
    return out


def _few(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    (count, inner), columns = rows.shape, weight.shape[1]
    height, width = (16, 128) if count <= 16 else (64, 64)
    parts = 1 if inner < _SHARED else 8 if height == 16 else 4
    if parts > 1:
        out.zero_()
    grid = (triton.cdiv(count, height), triton.cdiv(columns, width), parts)
    _product_of_few[grid](
        rows, weight, out, count, inner, columns, rows.stride(0), *weight.stride(), out.stride(0),
        WIDE=weight.dtype == torch.int16, ROWS=height, COLUMNS=width, INNER=64, PARTS=parts,
        num_warps=4, num_stages=3,
    )  # fmt: skip


def _many(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    count, inner = rows.shape
    apart, row_digits = count <= _APART, _digits(rows, 4, highest_first=True)
    if apart:
        out.zero_()
    most = max(1, _DIGITS // (inner * weight.itemsize))
    for at in range(0, weight.shape[1], most):
        part, to = weight[:, at : at + most], out[:, at : at + most]
        tiles = triton.cdiv(count, 128) * triton.cdiv(part.shape[1], 128)
        _product_of_digits[tiles, 4 if apart else 1](
            row_digits, _digits(part.T, weight.itemsize, highest_first=False), to,
            count, inner, part.shape[1], to.stride(0), DIGITS=weight.itemsize, APART=apart,
            ROWS=128, COLUMNS=128, INNER=128, GROUP=8, num_warps=8 if apart else 4, num_stages=3,
        )  # fmt: skip


def triton_kernel(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See ``shared.ring.product.Kernel``; inner sizes up to 2^15, beyond which some tensor cores saturate."""
    if rows.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the elements of a row lie side by side")
    with torch.cuda.device_of(rows):  # which need not be the current one
        (_few if len(rows) <= _FEW else _many)(rows, weight, out)
