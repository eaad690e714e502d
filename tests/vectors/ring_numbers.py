"""The numbers of a ring for ``make_vectors.py``: masks, planes of weights, and products with them."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import torch

from shared.ring.fixed_point import Planes, bounds, quantize_weight
from shared.ring.mask_stream import MaskStream
from shared.ring.product import PlaneProducts
from shared.wire.header import RINGS, Direction

# Of group 0, q above k: scales 1, 0.5, 2^-149, 0 and 2^100.
WEIGHT = torch.tensor(
    [
        [127.0, 0.5, -1.5, 3 / 512],
        [-63.5, 0.75, 5 / 1024, -7 / 1024],
        [178 * 2.0**-149, -(2.0**-149), 0.0, 89 * 2.0**-149],
        [0.0, -0.0, 0.0, 0.0],
        [127 * 2.0**100, -(2.0**99), 3 * 2.0**91, 1.0],
    ]
)
PLANES = {numerics: quantize_weight(WEIGHT, count) for numerics, count in RINGS.items()}
SEED = bytes(range(32))
INTEGERS = torch.tensor(
    [[2**31 - 1, -(2**31), 1, -1], [0x7F7F7F80, 0, 65_536, 123_456_789]], dtype=torch.int32
)
GRADIENTS = torch.tensor([[2**31 - 1, -(2**31), 3, -4, 5], [7, 0, -9, 10, -(2**30)]], dtype=torch.int32)


def product(
    planes: Planes, widths: list[int], direction: int, members: int, rows: torch.Tensor
) -> torch.Tensor:
    """The answer of a ring executor."""
    height, inputs = planes.planes.shape[1:]
    assert sum(widths) == height
    outputs = sum(width for i, width in enumerate(widths) if members >> i & 1)
    columns = outputs if direction == Direction.FORWARD else inputs
    out = torch.empty((len(rows), len(planes.planes) * columns), dtype=torch.int32)
    PlaneProducts(planes.planes, widths).matmul(direction, members, rows, out)
    return out


def masks() -> list[dict[str, Any]]:
    """The first integers of some seeds, some far from the beginning, and the hash of many."""
    made: list[dict[str, Any]] = []
    for seed in (bytes(32), SEED, b"\xff" * 32):
        made.append({"seed": seed.hex(), "start": 0, "values": MaskStream(seed).draw(1, 3)[0].tolist()})
    for start in (1, 1_023, 65_534, 4 * 2**16 + 3):
        values = MaskStream(SEED).draw(1, start + 5)[0, start:].tolist()
        made.append({"seed": SEED.hex(), "start": start, "values": values})
    many = MaskStream(SEED).draw(11, 91).numpy().tobytes()
    made.append({"seed": SEED.hex(), "start": 0, "count": 1001, "sha256": hashlib.sha256(many).hexdigest()})
    return made


def uniform(seed: int, rows: int, columns: int) -> torch.Tensor:
    """float64 between -1 and 1, the same everywhere."""
    return MaskStream(bytes([seed]) * 32).draw(rows, columns).double() / 2**31


def some_weights() -> list[tuple[str, torch.Tensor]]:
    """Weights for ``planes``, in the dtypes that checkpoints have."""
    outlier = uniform(2, 7, 13).float()
    outlier[2, 3], outlier[5] = torch.finfo(torch.float32).max, 2.0**-140 * outlier[5]
    tiny = torch.tensor([[1e-44, 1.0], [3e-43, 1e-60], [4e-44, 5e-324]], dtype=torch.float64)
    wide = uniform(6, 24, 6)
    wide[:, 2] *= 100
    return [
        ("scales that are powers of two, ties, zeros, subnormals", WEIGHT),
        ("any float32", uniform(1, 7, 13).float()),
        ("an outlier, the largest float32, and subnormals", outlier),
        ("bfloat16", uniform(3, 2, 5).bfloat16()),
        ("float16", uniform(4, 2, 5).half()),
        ("float64", uniform(5, 2, 5)),
        ("float64 below the smallest float32", tiny),
        ("a column much larger than the others", wide),
    ]


def planes() -> list[dict[str, Any]]:
    """Planes, scales and bounds of weights."""
    made = []
    for numerics, count in RINGS.items():
        for name, weight in some_weights():
            found = quantize_weight(weight, count)
            made.append(
                {
                    "name": f"{numerics}: {name}",
                    "numerics": numerics,
                    "weight": weight.tolist(),
                    "planes": found.planes.tolist(),
                    "scales": found.scales.tolist(),
                    "bounds": list(bounds(found.planes)),
                }
            )
    return made


def products() -> list[dict[str, Any]]:
    """Products of integers with planes: both directions, subsets of members, the largest integers."""
    weights = [(weight, count) for count in RINGS.values() for _, weight in some_weights()]
    cases = ((0, [3, 2], (0b11,)), (1, [4, 1, 2], range(1, 8)), (2, [7], (1,)))
    made = []
    for fine, (first, outputs, all_members) in itertools.product((0, 1), cases):
        index = first + fine * len(some_weights())
        found = quantize_weight(*weights[index])
        for members in all_members:
            for direction in (Direction.FORWARD, Direction.BACKWARD):
                width = sum(n for i, n in enumerate(outputs) if members >> i & 1)
                columns = found.planes.shape[2] if direction == Direction.FORWARD else width
                rows = MaskStream(bytes([members, direction]) * 16).draw(3, columns)
                rows[0], rows[1] = 2**31 - 1, -(2**31)
                answer = product(found, outputs, direction, members, rows)
                made.append(
                    {
                        "name": f"{direction.name.lower()}, members {members:b}, weight {index}",
                        "weight": index,
                        "outputs": outputs,
                        "direction": int(direction),
                        "members": members,
                        "rows": rows.tolist(),
                        "answer": answer.tolist(),
                        "upper": {str(bits): (answer >> 32 - bits).tolist() for bits in (16, 24)},
                    }
                )
    return made
