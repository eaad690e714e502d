"""Bytes of a token for Llama-shaped models of four sizes, and what links of three speeds take; runs nothing.

    python benchmarks/traffic.py

Without the head, which tenants keep. One mask source, whose effects come over the same link of the tenant's.
"""

from __future__ import annotations

from shared.wire.header import Direction, half_bits
from shared.wire.protocol import GroupShape
from shared.wire.traffic import SPEEDS, token_bytes

# Layers, width, keys and values, inner width.
MODELS = {
    "SmolLM2-135M": (30, 576, 192, 1536),
    "Llama 3.2 1B": (16, 2048, 512, 8192),
    "Llama 3.1 8B": (32, 4096, 1024, 14336),
    "Llama 3.1 70B": (80, 8192, 1024, 28672),
}
USES = {"decoding": (Direction.FORWARD,), "tuning": (Direction.FORWARD, Direction.BACKWARD)}


def shapes(layers: int, width: int, keys: int, inner: int, planes: int) -> list[GroupShape]:
    """The groups of a model: q with k and v, o, gate with up, down."""
    block = [(width, (width, keys, keys)), (width, (width,)), (width, (inner, inner)), (inner, (width,))]
    return [GroupShape(inputs, outputs, planes=planes) for inputs, outputs in block] * layers


def main() -> None:
    """Print a table in Markdown."""
    print("| model | d | use | answers | MB up | MB down |", *(f"{speed} Gbit/s |" for speed in SPEEDS))
    print("|---|---:|---|---|---:|---:|" + "---:|" * len(SPEEDS))
    for name, sizes in MODELS.items():
        for use, directions in USES.items():
            for answers, bits in (("exact", 32), ("half", half_bits("ring"))):
                found = token_bytes(shapes(*sizes, planes=1), directions, answer_bits=bits, sources=1)
                rates = [f"{found.tokens_per_second(speed):,.0f}" for speed in SPEEDS]
                moved = [f"{size / 1e6:.3g}" for size in found]
                print("|", " | ".join([name, str(sizes[1]), use, answers, *moved, *rates]), "|")


if __name__ == "__main__":
    main()
