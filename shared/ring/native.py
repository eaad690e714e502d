"""Native code for the ring's inner loops, where it was compiled and the processor has the instructions.

``product.c`` and ``rows.c`` are compiled when the package is installed, if there is a C compiler; without it,
or on other processors, the same integers are computed with torch (``shared.ring.product``,
``shared.ring.rows``), more slowly.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int64, c_uint32, c_void_p
from importlib.util import find_spec

import torch

log = logging.getLogger(__name__)

VERSION = 4  # of the functions' arguments; the same number stands in rows.c
PARALLEL_ELEMENTS = 1 << 15  # below, waking a second thread costs more than it saves


def _load() -> ctypes.CDLL | None:
    # Compiled as an extension module, but called through its plain functions: they need nothing of
    # Python, whose lock is released meanwhile. torch is loaded by now, and so is its OpenMP runtime,
    # which this code shares.
    spec = find_spec("shared.ring._native")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
        version = library.ring_version()
    except (OSError, AttributeError) as error:
        log.warning("the native code %s cannot be used, products are slower: %s", spec.origin, error)
        return None
    if version != VERSION:
        log.warning(
            "the native code %s is of another version, products are slower; install the package again",
            spec.origin,
        )
        return None
    pointers = POINTER(c_void_p)
    library.ring_below.argtypes = [c_void_p, c_int64, c_uint32]
    library.ring_below.restype = c_int
    library.ring_kernel.argtypes = [c_int]
    library.ring_kernel.restype = c_char_p
    library.ring_multiply.argtypes = [c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int]
    library.ring_multiply.argtypes += [c_int, c_int64, c_void_p, c_int64, c_int]
    library.ring_multiply.restype = c_int
    library.ring_quantize_and_mask.argtypes = [
        pointers,
        POINTER(c_int64),
        c_int64,
        c_int64,
        c_int64,
        c_void_p,
        c_double,
    ]
    library.ring_quantize_and_mask.argtypes += [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int]
    library.ring_quantize_and_mask.restype = c_int
    library.ring_unmask_and_dequantize.argtypes = [
        c_void_p,
        pointers,
        c_int64,
        c_int,
        c_int64,
        c_int64,
        c_void_p,
        c_void_p,
    ]
    library.ring_unmask_and_dequantize.argtypes += [
        pointers,
        POINTER(c_int64),
        c_int64,
        c_void_p,
        c_void_p,
        c_int,
    ]
    library.ring_unmask_and_dequantize.restype = c_int64
    library.ring_take_upper_bits.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_int, c_void_p, c_int]
    library.ring_take_upper_bits.restype = None
    library.ring_subtract_halves.argtypes = [c_void_p, pointers, c_int64, c_int64, c_float, c_void_p, c_int]
    library.ring_subtract_halves.restype = None
    library.ring_write.argtypes = [c_void_p, c_int, c_int64, c_int64, c_void_p, c_void_p, pointers]
    library.ring_write.argtypes += [POINTER(c_int64), c_int64, c_int]
    library.ring_write.restype = None
    return library


def _kernels() -> dict[str, int]:
    kernels: dict[str, int] = {}
    while LIBRARY is not None and (name := LIBRARY.ring_kernel(len(kernels))) is not None:
        kernels[name.decode()] = len(kernels)
    return kernels


LIBRARY = _load()
KERNELS = _kernels()  # names of the instructions that products can be computed with here, to their numbers


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements > PARALLEL_ELEMENTS else 1


def _address(tensor: torch.Tensor | None) -> int | None:
    """Every pointer that native code gets comes from here.

    Raises:
        ValueError: the tensor's memory is not the processor's.
    """
    if tensor is None:
        return None
    if tensor.device.type != "cpu":
        raise ValueError(f"native code takes tensors of the CPU, not of {tensor.device}")
    return tensor.data_ptr()


def _pointers(tensors: list[torch.Tensor]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(tensors))(*[_address(tensor) for tensor in tensors])


def _widths(tensors: list[torch.Tensor]) -> ctypes.Array[c_int64]:
    return (c_int64 * len(tensors))(*[tensor.shape[1] for tensor in tensors])


def multiply(which: int, rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See ``shared.ring.product.Kernel``; with one of KERNELS."""
    if LIBRARY is None:
        raise RuntimeError("there is no native code")
    if rows.stride(1) != 1 or out.stride(1) != 1 or 1 not in weight.stride():
        raise ValueError("the elements of a row lie side by side")
    if weight.dtype not in (torch.int8, torch.int16) or not rows.dtype == out.dtype == torch.int32:
        raise ValueError(f"int32 times int8 or int16 is wanted, not {rows.dtype} times {weight.dtype}")
    if weight.shape != (rows.shape[1], out.shape[1]) or len(rows) != len(out):
        raise ValueError(f"rows {[*rows.shape]} times a weight {[*weight.shape]} do not make {[*out.shape]}")
    by_rows = weight.stride(1) != 1
    failed = LIBRARY.ring_multiply(
        which, _address(rows), rows.stride(0), rows.shape[0], rows.shape[1], _address(weight),
        weight.stride(1) if by_rows else weight.stride(0), weight.itemsize, by_rows, weight.shape[1],
        _address(out), out.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory for a product")


def all_finite_below(values: torch.Tensor, limit: float) -> bool:
    """See ``shared.ring.rows.all_finite_below``; contiguous float32, and there is native code."""
    bits = int.from_bytes(struct.pack("<f", limit), "little")
    return bool(LIBRARY.ring_below(_address(values), values.numel(), bits))  # type: ignore[union-attr]


def quantize_and_mask(
    tensors: list[torch.Tensor],
    scales: torch.Tensor | None,
    step_per_norm: float,
    requests: torch.Tensor,
    exponents: torch.Tensor,
    projection: torch.Tensor | None,
    expected: torch.Tensor | None,
    integers: torch.Tensor | None,
) -> bool:
    """See ``shared.ring.rows.quantize_and_mask``, whose arguments these are; whether all norms are finite."""
    if LIBRARY is None:
        raise RuntimeError("there is no native code")
    failed = LIBRARY.ring_quantize_and_mask(
        _pointers(tensors), _widths(tensors), len(tensors), requests.shape[1], len(requests),
        _address(scales), step_per_norm, _address(projection), _address(requests), _address(exponents),
        _address(expected), _address(integers), _threads(requests.numel()),
    )  # fmt: skip
    return not failed


def unmask_and_dequantize(
    answers: torch.Tensor,
    effects: list[torch.Tensor],
    exponents: torch.Tensor,
    scales: torch.Tensor | None,
    tensors: list[torch.Tensor],
    challenge: torch.Tensor | None,
    expected: torch.Tensor | None,
) -> int:
    """See ``shared.ring.rows.unmask_and_dequantize``, whose arguments these are; how many rows are wrong."""
    if LIBRARY is None:
        raise RuntimeError("there is no native code")
    width = sum(tensor.shape[1] for tensor in tensors)
    wrong: int = LIBRARY.ring_unmask_and_dequantize(
        _address(answers), _pointers(effects), len(effects), answers.shape[1] // width, width, len(answers),
        _address(exponents), _address(scales), _pointers(tensors), _widths(tensors), len(tensors),
        _address(challenge), _address(expected), _threads(answers.numel()),
    )  # fmt: skip
    return wrong


def take_upper_bits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """See ``shared.ring.upper_bits.take_upper_bits``, whose arguments these are; 16 or 24 bits."""
    if LIBRARY is None:
        raise RuntimeError("there is no native code")
    rows, columns = numbers.shape
    if numbers.dtype != torch.int32 or numbers.stride(1) != 1:
        raise ValueError("int32 whose neighbours lie side by side are wanted")
    shape, dtype = ((rows, columns), torch.int16) if bits == 16 else ((rows, 3 * columns), torch.uint8)
    out = torch.empty(shape, dtype=dtype)
    stride = numbers.stride(0)
    LIBRARY.ring_take_upper_bits(
        _address(numbers), rows, stride, columns, bits, _address(out), _threads(numbers.numel())
    )
    return out


def subtract_halves(answers: torch.Tensor, effects: list[torch.Tensor], offset: float) -> torch.Tensor:
    """See ``shared.ring.upper_bits.subtract_upper_bits``, whose arguments these are; contiguous int16."""
    if LIBRARY is None:
        raise RuntimeError("there is no native code")
    out = torch.empty(answers.shape)
    LIBRARY.ring_subtract_halves(
        _address(answers), _pointers(effects), len(effects), answers.numel(), offset, _address(out),
        _threads(answers.numel()),
    )  # fmt: skip
    return out


def write_products(
    products: torch.Tensor, exponents: torch.Tensor, scales: torch.Tensor | None, tensors: list[torch.Tensor]
) -> None:
    """See ``shared.ring.rows.write_products``, whose arguments these are."""
    if LIBRARY is None:
        raise RuntimeError("there is no native code")
    width = sum(tensor.shape[1] for tensor in tensors)
    LIBRARY.ring_write(
        _address(products), products.shape[1] // width, width, len(products), _address(exponents),
        _address(scales), _pointers(tensors), _widths(tensors), len(tensors), _threads(products.numel()),
    )  # fmt: skip
