"""The one operation of a ring executor: int32 rows times int16 or int8 planes, modulo 2^32.

Several ways to compute the same integers, and a measurement that chooses:

native       compiled code (``product.c``), named after its instructions: rows are split into halves of 16
             bits, with ``amx`` into bytes, and none of their products ever goes through memory.
``triton``   digits of 8 bits in a GPU's registers (``triton_kernel.py``).
``int8``     rows are split into four signed base-256 digits, int16 weights into two, each an int8 matrix,
             with int32 sums, which processors with VNNI or AMX and GPUs have instructions for.
``float64``  a float64 holds a half's sums exactly: for processors whose int8 product is slow or, without
             VNNI, saturates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import lru_cache, partial

import torch

from shared.checkpoint import Checkpoint
from shared.compat import int8_product
from shared.errors import CheckpointError, ConfigurationError
from shared.ring import native as ring_native
from shared.ring.fixed_point import LARGEST, Planes, quantize_weight
from shared.wire.header import Direction, member_indices
from shared.wire.messages import GroupInfo

log = logging.getLogger(__name__)

# rows int32 [T, K], weight int8 or int16 [K, N] (any strides), out int32 [T, N]; every T, K, N >= 1.
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]

# Bytes 0x80: adding them and flipping the same bits again turns a number's unsigned bytes into
# signed digits, carries included.
_SIGNS = -0x7F7F7F80
# Digit products of one tile: within the last-level cache, and under the number of rows at which
# int8 products of some shapes have been seen to fall off a cliff.
_TILE_BYTES = 8 << 20
_TILE_ROWS = 256
_CUDA_TILE_ROWS = 4096  # for memory
_EXACT_COLUMNS = 1 << 21  # 2^16 * 2^15 * 2^21 = 2^52: sums of so many products are exact in float64
# 2 * 2^7 * 2^7 * 2^16 = 2^31: sums of so many digits' products, two of which share a sum, stay within int32.
# Tensor cores' instructions do not all wrap beyond.
_INT8_COLUMNS = 1 << 16


def digits(rows: torch.Tensor) -> torch.Tensor:
    """Signed base-256 digits, least significant first, with ``r = sum 256^i L_i`` modulo 2^32 or 2^16.

    Args:
        rows: int32 or int16 [T, K].

    Returns:
        int8 [4, T, K] or [2, T, K].
    """
    signs = _SIGNS if rows.dtype == torch.int32 else 0x80
    flipped = (rows + signs).bitwise_xor_(signs)
    out = torch.empty((rows.itemsize, *rows.shape), dtype=torch.int8, device=rows.device)
    for i in range(rows.itemsize):
        out[i].copy_(flipped if i == 0 else flipped >> 8 * i)  # a conversion to int8 keeps the low byte
    return out


def int8_kernel(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See ``Kernel``. The four digits are stacked into one call, so that few rows fill a call too."""
    if weight.dtype == torch.int16:
        low, high = digits(weight)
        more = torch.empty_like(out, memory_format=torch.contiguous_format)
        int8_kernel(rows, high, more)
        int8_kernel(rows, low, out)
        out.add_(more, alpha=256)
        return
    height, columns = weight.shape
    tile = _CUDA_TILE_ROWS if rows.is_cuda else min(_TILE_ROWS, max(32, _TILE_BYTES // (16 * columns)))
    if height == 1:  # whose stride says nothing, but the library believes it
        weight = torch.empty_like(weight, memory_format=torch.contiguous_format).copy_(weight)
    if rows.is_cuda:  # columns side by side: for others cuBLAS lacks some sizes, and is slow at the rest
        weight = torch.nn.functional.pad(weight.T, (0, -height % 8, 0, -columns % 8)).contiguous().T
    for at in range(0, len(rows), tile):
        stacked = digits(rows[at : at + tile]).view(-1, height)
        count = len(stacked)
        if rows.is_cuda:  # cuBLAS wants more than 16 rows, and multiples of 8 everywhere
            padded = max(24, -(-count // 8) * 8)
            stacked = torch.nn.functional.pad(stacked, (0, -height % 8, 0, padded - count))
        parts = int8_product(rows.device)(stacked, weight)[:count, :columns]
        _combine(parts.reshape(4, -1, columns), out[at : at + tile])


def _combine(parts: torch.Tensor, out: torch.Tensor) -> None:
    """``sum 256^i parts[i]`` for int32 [4, T, N], wrapping."""
    total = torch.add(parts[2], parts[3], alpha=256)
    torch.add(parts[1], total, alpha=256, out=total)
    torch.add(parts[0], total, alpha=256, out=out)


def float64_kernel(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See ``Kernel``."""
    for at in range(0, len(rows), _TILE_ROWS):
        part, total = rows[at : at + _TILE_ROWS], out[at : at + _TILE_ROWS]
        total.zero_()
        low = part.to(torch.int16).int()
        high = part - low >> 16
        for first in range(0, rows.shape[1], _EXACT_COLUMNS):
            inner = slice(first, first + _EXACT_COLUMNS)
            floats = weight[inner].double()
            for half, factor in ((low, 1), (high, 1 << 16)):
                product = (half[:, inner].double() @ floats).long()
                total.add_((product * factor).to(torch.int32))


def _triton_kernel(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See ``Kernel``."""
    from shared.ring.triton_kernel import triton_kernel  # which not every machine can import

    triton_kernel(rows, weight, out)


def in_pieces(kernel: Kernel, max_rows: int) -> Kernel:
    """The same products for any inner size, by a kernel that is exact up to ``max_rows``."""

    def whole(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        kernel(rows[:, :max_rows], weight[:max_rows], out)
        for at in range(max_rows, rows.shape[1], max_rows):
            more = torch.empty_like(out, memory_format=torch.contiguous_format)
            kernel(rows[:, at : at + max_rows], weight[at : at + max_rows], more)
            out.add_(more)

    return whole


KERNELS: dict[str, Kernel] = {
    "int8": in_pieces(int8_kernel, _INT8_COLUMNS),
    "float64": float64_kernel,
    "triton": in_pieces(_triton_kernel, _INT8_COLUMNS // 2),
}
KERNELS |= {name: partial(ring_native.multiply, which) for name, which in ring_native.KERNELS.items()}
# Kernels that run on one kind of device.
ONLY = {"triton": "cuda"} | dict.fromkeys(ring_native.KERNELS, "cpu")


# Odd and round, more than a kernel takes at once, and enough for several threads; rows, inner, columns.
_TRIED = ((1, 1, 1), (30, 1, 5), (1, 64, 33), (3, 257, 8), (70, 130, 96), (33, 128, 192), (20, 1100, 48))

# Where sums of tensor cores that saturate would, and all that is compiled, so that no tenant waits for it.
_ON_GPU = ((17, _INT8_COLUMNS + 600, 8), (5, 2112, 64), (33, 2112, 64), (70, 256, 64), (520, 256, 64))


def is_exact(kernel: Kernel, device: str = "cpu") -> bool:
    """Whether a kernel gets the integers right here: extreme values, odd sizes, both layouts.

    An int8 product that saturates, or a broken library, shows on rows and weights of -128.
    """
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in _TRIED if device == "cpu" else (*_TRIED, *_ON_GPU):
        wide = torch.randint(-(2**31), 2**31, (rows, inner), generator=generator, dtype=torch.int32)
        # Every digit -128; every half -32768.
        extreme = [torch.full_like(wide, value) for value in (0x7F7F7F80, 0x7FFF8000)]
        for dtype in (torch.int8, torch.int16):
            least, largest = (-128, 127) if dtype == torch.int8 else (-LARGEST, LARGEST)
            random = torch.randint(least, largest + 1, (columns, inner), generator=generator, dtype=dtype)
            for x in (wide, *extreme):
                for w in (random.T, torch.full((inner, columns), least, dtype=dtype)):
                    got = torch.empty((rows, columns), dtype=torch.int32, device=device)
                    kernel(x.to(device), w.to(device), got)
                    expected = (x.long() @ w.long()).to(torch.int32)  # the low 32 bits
                    if not torch.equal(got.cpu(), expected):
                        return False
    return True


@lru_cache
def fastest_kernel(device: str = "cpu") -> Kernel:
    """The faster of the kernels that are exact on this machine, by a measurement of some milliseconds.

    Raises:
        ConfigurationError: none is exact.
    """
    kind = torch.device(device).type
    generator = torch.Generator().manual_seed(0)
    count, size = (1024, 4096) if kind == "cuda" else (64, 768)
    rows = torch.randint(-(2**31), 2**31, (count, size), generator=generator, dtype=torch.int32).to(device)
    weight = torch.randint(-LARGEST, LARGEST, (size, size), generator=generator, dtype=torch.int16).to(device)
    out = torch.empty((count, size), dtype=torch.int32, device=device)
    seconds = {}
    for name, kernel in KERNELS.items():
        if ONLY.get(name, kind) != kind:
            continue
        if reason := fault(kernel, device):
            log.warning("the ring kernel %s is not used on this machine: %s", name, reason)
            continue
        best = float("inf")
        for _ in range(4):
            started = time.perf_counter()
            kernel(rows, weight.T, out)
            out[0, 0].item()  # waits for a GPU
            best = min(best, time.perf_counter() - started)
        seconds[name] = best
    if not seconds:
        raise ConfigurationError(
            "no way to multiply integers is exact on this machine, so it cannot serve ring numerics; "
            "another version of torch may help"
        )
    chosen = min(seconds, key=lambda name: seconds[name])
    measured = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in seconds.items())
    log.info("ring kernel: %s (%d rows of %d x %d: %s)", chosen, count, size, size, measured)
    if kind == "cpu" and not ring_native.KERNELS:
        log.warning(
            "products of the ring take many times as long here, because its native code was not compiled: "
            "install the package again with a C compiler at hand, or serve with ring-fine numerics, which "
            "does better without"
        )
    return KERNELS[chosen]


def fault(kernel: Kernel, device: str) -> str:
    """Why a kernel cannot be used on a device; empty if it can."""
    try:
        return "" if is_exact(kernel, device) else "it computes wrong integers"
    except Exception as error:  # of a library, compiler or driver, which others do without
        return str(error).partition("\n")[0] or repr(error)


def group_planes(checkpoint: Checkpoint, info: GroupInfo, planes: int) -> Planes:
    """The integers of all members of a group, one above the other: so many planes [P, O, D], scales [O].

    Raises:
        CheckpointError: a weight holds NaN or infinity.
    """
    widths = [m.outputs for m in info.members]
    scales = torch.empty(sum(widths))
    whole = torch.empty((planes, sum(widths), info.inputs), dtype=torch.int8 if planes > 1 else torch.int16)
    parts = zip(info.members, whole.split(widths, 1), scales.split(widths), strict=True)
    for member, part, part_scales in parts:
        try:
            quantized = quantize_weight(checkpoint.member_weight(member), planes)
        except ValueError as error:
            raise CheckpointError(f"{member.tensor}: {error}") from error
        part.copy_(quantized.planes)
        part_scales.copy_(quantized.scales)
    return Planes(whole, scales)


class PlaneProducts:
    """Both products of one group's planes.

    Args:
        planes: int16 [1, O, D] or int8 [2, O, D], O of all members, one above the other in each plane: the
        only copy.
        widths: O of each member.
    """

    def __init__(self, planes: torch.Tensor, widths: list[int]) -> None:
        self._kernel = fastest_kernel(str(planes.device))
        self._planes = planes
        self._starts = [sum(widths[:i]) for i in range(len(widths) + 1)]

    def matmul(self, direction: int, member_bits: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply modulo 2^32.

        Args:
            direction: a ``Direction``.
            member_bits: which members take part.
            rows: int32, forward [T, D]; backward [T, O], O of the members together.
            out: int32, the products with the planes side by side, forward [T, P O], backward [T, P D].
        """
        runs = self._runs(member_bits)
        whole = len(runs) == 1 and runs[0] == (0, self._starts[-1])
        if direction == Direction.FORWARD and whole:
            self._kernel(rows, self._planes.view(-1, self._planes.shape[2]).T, out)
            return
        parts = out.split(out.shape[1] // len(self._planes), 1)
        for plane, part in zip(self._planes, parts, strict=True):
            at = 0
            for first, last in runs:
                width = last - first
                if direction == Direction.FORWARD:
                    self._kernel(rows, plane[first:last].T, part[:, at : at + width])
                elif at == 0:
                    self._kernel(rows[:, :width], plane[first:last], part)
                else:
                    more = torch.empty_like(part, memory_format=torch.contiguous_format)
                    self._kernel(rows[:, at : at + width], plane[first:last], more)
                    part.add_(more)
                at += width

    def _runs(self, member_bits: int) -> list[tuple[int, int]]:
        """The rows of a plane that belong to the members, neighbours joined."""
        runs: list[tuple[int, int]] = []
        for i in member_indices(member_bits):
            first, last = self._starts[i], self._starts[i + 1]
            if runs and runs[-1][1] == first:
                runs[-1] = (runs[-1][0], last)
            else:
                runs.append((first, last))
        return runs
