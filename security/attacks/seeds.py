"""An attack on the seeds: a prediction of a mask source's next seed from those it has received."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
from scipy import stats

from security.views.adversaries import MaskSourceView
from shared.wire.header import SEED_BYTES


@dataclass(frozen=True)
class SeedStatistics:
    """What the tests say about captured seeds.

    ``repeated`` counts seeds, and differences of consecutive ones, that came before; ``p_value`` is the
    smallest of all ``tests``, times their number, 1 at most (Bonferroni); ``worst`` names that test.
    ``others`` is how many requests carried something else than a seed of 32 bytes.
    """

    count: int
    others: int
    repeated: int
    p_value: float
    worst: str
    tests: int


class SeedPrediction:
    """Uniform bytes, unbiased bits, no repeats: of seeds, and of what is between one and the next.

    The differences, modulo 2^256 in both byte orders, show what counts up, such as a counter or a clock.
    """

    name: ClassVar[str] = "seed prediction"
    goal: ClassVar[str] = "the next seed, and so the masks under it"
    sees: ClassVar[str] = "all seeds of a mask source, also across reconnects and crashes"
    metric: ClassVar[str] = "smallest p-value; repeats"
    source: ClassVar[str] = "CWE-335, CWE-337: predictable seeds; NIST SP 800-22, monobit test"

    def attack(self, view: MaskSourceView, rng: np.random.Generator) -> SeedStatistics:
        """See Attack."""
        seeds = [seed for seed in view.seeds if len(seed) == SEED_BYTES]
        others = view.others + len(view.seeds) - len(seeds)
        tests: dict[str, float] = {}
        repeated = 0
        for what, found in _tested(seeds).items():
            repeated += len(found) - len(set(found))
            table = np.frombuffer(b"".join(found), np.uint8).reshape(-1, SEED_BYTES)
            if not len(table):
                continue
            counts = np.bincount(table.ravel(), minlength=256)
            tests[f"bytes of {what}, chi-square"] = float(stats.chisquare(counts).pvalue)
            ones = np.unpackbits(table, axis=1, bitorder="little").sum(0, dtype=np.int64)
            below, above = stats.binom.cdf(ones, len(table), 0.5), stats.binom.sf(ones - 1, len(table), 0.5)
            tails = 2 * np.minimum(below, above)
            tests |= {f"bit {bit} of {what}, bias": float(p) for bit, p in enumerate(tails)}
        worst = min(tests, key=lambda name: tests[name], default="nothing was sent")
        p_value = min(1.0, tests.get(worst, 0.0) * len(tests))
        return SeedStatistics(len(seeds), others, repeated, p_value, worst, len(tests))


def _tested(seeds: list[bytes]) -> dict[str, list[bytes]]:
    """Seeds, and how far it is from each to the next, as 32 bytes."""
    found = {"seeds": seeds}
    order: Literal["little", "big"]
    for order in ("little", "big"):
        numbers = [int.from_bytes(seed, order) for seed in seeds]
        steps = [(after - before) % (1 << 8 * SEED_BYTES) for before, after in pairwise(numbers)]
        found[f"{order}-endian differences"] = [step.to_bytes(SEED_BYTES, "little") for step in steps]
    return found
