"""Products of the ring on a GPU: one Triton kernel for both directions and both sizes of planes.

Tensor cores multiply int8 with int32 sums. A row's integers are four signed base-256 digits, those of an
int16 plane two, so ``r w = sum 256^(i + j) L_i w_j``; what is 2^32 times something is left out, which makes
seven products of eight. Digits are made in registers, and sums of one power of 256 share a register: nothing
but rows, weight and the answer goes through memory.

It runs on a CPU too, in Triton's interpreter, which is how it is tested: ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _digit(numbers):  # type: ignore[no-untyped-def]
    """The lowest signed digit, and what is left of the numbers without it."""
    digit = (numbers << 24) >> 24
    return digit.to(tl.int8), (numbers - digit) >> 8


@triton.jit(do_not_specialize=["count"])  # else some numbers of rows would be compiled while tenants wait
def _product(  # type: ignore[no-untyped-def]
    rows, weight, out, count, inner, columns,
    row_stride, weight_inner, weight_column, out_stride,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of the answer. Offsets are int64: a head times many rows has more than 2^31 elements."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INNER)
    from_rows = rows + t.to(tl.int64)[:, None] * row_stride + k[None, :]
    from_weight = weight + k.to(tl.int64)[:, None] * weight_inner + n.to(tl.int64)[None, :] * weight_column
    sum_0 = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    sum_1 = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    sum_2 = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    sum_3 = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    for at in range(0, inner, INNER):
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
        from_rows += INNER
        from_weight += INNER * weight_inner
    total = sum_0 + (sum_1 << 8) + (sum_2 << 16) + (sum_3 << 24)
    to = out + t.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(to, total, mask=(t < count)[:, None] & (n < columns)[None, :])


def triton_kernel(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See ``shared.ring.product.Kernel``; inner sizes up to 2^16, beyond which some tensor cores saturate."""
    if rows.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the elements of a row lie side by side")
    (count, inner), columns = rows.shape, weight.shape[1]
    tile = 16 if count <= 16 else 32 if count <= 32 else 64
    grid = (triton.cdiv(count, tile), triton.cdiv(columns, 64))
    with torch.cuda.device_of(rows):  # which need not be the current one
        _product[grid](
            rows, weight, out, count, inner, columns, rows.stride(0), *weight.stride(), out.stride(0),
            WIDE=weight.dtype == torch.int16, ROWS=tile, COLUMNS=64, INNER=64,
        )  # fmt: skip
