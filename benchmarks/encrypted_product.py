"""The encrypted product of Concrete ML: one hidden row times a clear weight, as a baseline.

    pip install -e '.[encrypted-baseline]'
    python benchmarks/encrypted_product.py --inputs 768 --outputs 3072

The tenant encrypts a row, the provider multiplies it by its clear weight without seeing it, the tenant
decrypts: the library's default parameters, and the calls with which Concrete ML runs a linear layer, in
one process without serialisation or network. The library takes every processor, or a CUDA device.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

LIBRARY, LARGEST = "concrete_ml_extensions", 127  # 8 bits with sign, symmetric, one step for a tensor


def quantise(values: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], float]:
    """Integers of 8 bits, and the size of their step in the unit of ``values``."""
    step = float(np.abs(values).max()) / LARGEST
    return np.rint(values / step).astype(np.int64), step


def relative_error(result: npt.NDArray[Any], exact: npt.NDArray[Any]) -> float:
    """L2 norm of the difference over that of ``exact``; no unit."""
    return float(np.linalg.norm(result - exact) / np.linalg.norm(exact))


def timed(name: str, verbose: bool, call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What ``call`` returns, and its wall-clock seconds; if verbose, says its name before it starts."""
    if verbose:
        print(f"{name:<15}", end="", flush=True)
    started, processor = time.perf_counter(), time.process_time()
    result = call(*arguments)
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    if verbose:
        print(f"{seconds:9.3f} s, {processor:9.3f} s of processor time", flush=True)
    return result, seconds


def encrypted_product_seconds(
    inputs: int, outputs: int, seed: int, *, verbose: bool = False
) -> tuple[float, float] | None:
    """Seconds to encrypt, multiply and decrypt one row, and the relative L2 error of the result (no unit).

    None if the library is not installed. Key generation is not counted. The error is against the clear
    float64 product of row and weight as they were before quantisation. ``seed`` draws row and weight; keys
    and encryption differ every time. ``verbose`` prints one line for each phase.
    """
    if importlib.util.find_spec(LIBRARY) is None:
        return None
    library = importlib.import_module(LIBRARY)
    random = np.random.default_rng(seed)
    row, weight = random.standard_normal((1, inputs)), random.standard_normal((inputs, outputs))
    (small_row, row_step), (small_weight, weight_step) = quantise(row), quantise(weight)
    exact = small_row @ small_weight
    settings = json.loads(library.default_params())
    assert np.abs(exact).max() < 2 ** (settings["bits_reserved_for_computation"] - 1), "would wrap around"
    last = outputs % settings["packing_ks_polynomial_size"] or settings["packing_ks_polynomial_size"]
    parameters = library.MatmulCryptoParameters.deserialize(json.dumps(settings))
    # Negative integers go in, and come out, as their two's complement.
    plain, factor = small_row.astype(np.uint64), small_weight.astype(np.uint64)
    (private, public), _ = timed("key generation", verbose, library.create_private_key, parameters)
    hidden, before = timed("encryption", verbose, library.encrypt_matrix, private, parameters, plain)
    answer, during = timed("product", verbose, library.matrix_multiplication, hidden, factor, public)
    found, after = timed("decryption", verbose, library.decrypt_matrix, answer, private, parameters, last)
    found = found.astype(np.int64)
    if verbose:
        print(f"relative error without that of quantisation: {relative_error(found, exact):.1e}")
    return before + during + after, relative_error(found * (row_step * weight_step), row @ weight)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Seconds of one encrypted row times a clear weight.")
    for option, default in ("--inputs", 768), ("--outputs", 3072), ("--seed", 0):
        parser.add_argument(option, type=int, default=default)
    options = parser.parse_args()
    measured = encrypted_product_seconds(options.inputs, options.outputs, options.seed, verbose=True)
    if measured is None:
        raise SystemExit("concrete-ml-extensions is not installed: see the head of this file")
    print(f"1 x {options.inputs} -> {options.outputs}: {measured[0]:.2f} s, error {measured[1]:.1e}")
