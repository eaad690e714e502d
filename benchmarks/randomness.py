"""Whether bytes look drawn at random: the tests of NIST SP 800-22 Rev. 1a that suit streams of many MiB.

Each test gives P-values of one sequence of bits. Over many sequences of a random stream these are uniform,
and the verdict is on that: by the distance of Kolmogorov and Smirnov, and by the number of small ones. No
test proves that bytes are random; one that fails shows that they are not. Libraries for the same tests loop
over bits in Python, which takes minutes for a MiB.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy import fft, special, stats

SEQUENCE_BYTES = 1 << 17  # 2^20 bits; the standard's examples have 10^6
BLOCK_BITS = 128  # of the frequency within a block
RUN_BLOCK_BITS, SHORTEST, LONGEST = 10_000, 10, 16  # classes of a block's longest run: at most, at least
PATTERN, ENTROPY_PATTERN = 16, 10  # bits
ALPHA = 0.01  # of a single P-value
LIMIT = 1e-9  # of a verdict; there are a few hundred in one run


class Verdict(NamedTuple):
    """What many P-values of one test say.

    Attributes:
        uniform: probability of so large a distance from the uniform distribution.
        small: how many are below ALPHA.
        few: probability of so many small ones.
    """

    uniform: float
    small: int
    few: float

    @property
    def random(self) -> bool:
        """Whether a random stream would do this, but for one in 10^9."""
        return min(self.uniform, self.few) >= LIMIT


@dataclass
class Battery:
    """P-values of all sequences of one stream, by the test's name; ``add`` it bytes in pieces of any size."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _rest: bytes = b""

    def add(self, data: bytes) -> None:
        """Bytes of the stream; those behind the last whole sequence wait for the next."""
        data = self._rest + data
        whole = len(data) - len(data) % SEQUENCE_BYTES
        for at in range(0, whole, SEQUENCE_BYTES):
            for name, value in p_values(data[at : at + SEQUENCE_BYTES]).items():
                self.values[name].append(value)
        self._rest = data[whole:]

    @property
    def sequences(self) -> int:
        """How many there were."""
        return max(map(len, self.values.values()), default=0)

    def verdicts(self) -> dict[str, Verdict]:
        """Of each test."""
        return {name: verdict(values) for name, values in self.values.items()}

    def refused(self) -> list[str]:
        """Tests that the stream fails.

        Raises:
            ValueError: there is no whole sequence.
        """
        if not self.sequences:
            raise ValueError(f"a stream of fewer than {SEQUENCE_BYTES} bytes is not tested")
        return [name for name, each in self.verdicts().items() if not each.random]


def verdict(values: Iterable[float]) -> Verdict:
    """Of a test's P-values."""
    found = np.fromiter(values, float)
    small = int((found < ALPHA).sum())
    uniform = float(stats.kstest(found, "uniform").pvalue)
    return Verdict(uniform, small, float(stats.binom.sf(small - 1, len(found), ALPHA)))


def p_values(data: bytes) -> dict[str, float]:
    """Of every test on one sequence (section 2 of the standard).

    Args:
        data: at least 40 blocks of RUN_BLOCK_BITS; a byte's first bit is its most significant one.
    """
    packed = np.frombuffer(data, np.uint8)
    bits = np.unpackbits(packed)
    counts = _patterns(packed)
    first, second = _serial(counts, len(bits))
    forward, backward = _cumulative_sums(bits)
    return {
        "frequency": _frequency(counts[1], len(bits)),
        "frequency in blocks": _block_frequency(bits),
        "runs": _runs(counts, bits),
        "longest run": _longest_run(bits, _run_classes()),
        "spectral": _spectral(bits),
        "serial, first": first,
        "serial, second": second,
        "approximate entropy": _approximate_entropy(counts, len(bits)),
        "cumulative sums": forward,
        "cumulative sums, backward": backward,
    }


def _patterns(packed: np.ndarray) -> dict[int, np.ndarray]:
    """How often each pattern of 1 to PATTERN bits begins, in a sequence whose end meets its beginning."""
    wide = packed.astype(np.int64)
    window = wide << 16 | np.roll(wide, -1) << 8 | np.roll(wide, -2)
    size = 1 << PATTERN
    counts = {PATTERN: np.zeros(size, np.int64)}
    for shift in range(8):
        counts[PATTERN] += np.bincount(window >> (8 - shift) & (size - 1), minlength=size)
    for length in range(PATTERN - 1, 0, -1):
        counts[length] = counts[length + 1].reshape(-1, 2).sum(1)
    return counts


def _frequency(counts: np.ndarray, n: int) -> float:
    """Section 2.1."""
    return math.erfc(abs(int(counts[1] - counts[0])) / math.sqrt(2 * n))


def _block_frequency(bits: np.ndarray) -> float:
    """Section 2.2."""
    blocks = len(bits) // BLOCK_BITS
    ones = bits[: blocks * BLOCK_BITS].reshape(blocks, BLOCK_BITS).sum(1, dtype=np.int64)
    chi = 4 * BLOCK_BITS * ((ones / BLOCK_BITS - 0.5) ** 2).sum()
    return float(special.gammaincc(blocks / 2, chi / 2))


def _runs(counts: dict[int, np.ndarray], bits: np.ndarray) -> float:
    """Section 2.3; 0 where the frequency is too far off for the test."""
    n, share = len(bits), counts[1][1] / len(bits)
    if abs(share - 0.5) >= 2 / math.sqrt(n):
        return 0.0
    runs = 1 + counts[2][0b01] + counts[2][0b10] - int(bits[0] != bits[-1])
    product = share * (1 - share)
    return math.erfc(abs(runs - 2 * n * product) / (2 * math.sqrt(2 * n) * product))


@cache
def _run_classes() -> tuple[float, ...]:
    """Probabilities of the classes of section 2.4, exactly: the standard's table has four digits."""

    def at_most(longest: int) -> float:
        # Of blocks without longer runs, by the number of bits: each begins with 0 to longest ones and a zero.
        none_longer = [1.0] * (longest + 1)
        for _ in range(RUN_BLOCK_BITS - longest):
            none_longer.append(sum(none_longer[-1 - ones] * 0.5 ** (ones + 1) for ones in range(longest + 1)))
        return none_longer[RUN_BLOCK_BITS]

    below = [at_most(longest) for longest in range(SHORTEST, LONGEST)]
    return (below[0], *(b - a for a, b in pairwise(below)), 1 - below[-1])


def _longest_run(bits: np.ndarray, classes: tuple[float, ...]) -> float:
    """Section 2.4."""
    blocks = len(bits) // RUN_BLOCK_BITS
    here = inside = bits[: blocks * RUN_BLOCK_BITS].reshape(blocks, RUN_BLOCK_BITS)
    longest = np.zeros(blocks, np.int64)
    for length in range(1, LONGEST + 1):  # where a run of this length begins
        longest[here.any(1)] = length
        here = here[:, :-1] & inside[:, length:]
    found = np.bincount(np.clip(longest, SHORTEST, LONGEST) - SHORTEST, minlength=len(classes))
    expected = blocks * np.array(classes)
    return float(special.gammaincc((len(classes) - 1) / 2, ((found - expected) ** 2 / expected).sum() / 2))


def _spectral(bits: np.ndarray) -> float:
    """Section 2.6."""
    n = len(bits)
    heights = fft.rfft(bits.astype(np.float32) * 2 - 1)[: n // 2]
    limit = n * math.log(1 / 0.05)
    low = int((heights.real**2 + heights.imag**2 < limit).sum())
    return math.erfc(abs(low - 0.95 * n / 2) / math.sqrt(n * 0.95 * 0.05 / 4) / math.sqrt(2))


def _serial(counts: dict[int, np.ndarray], n: int) -> tuple[float, float]:
    """Section 2.11."""
    psi = [2**m / n * float((counts[m] ** 2).sum()) - n for m in (PATTERN, PATTERN - 1, PATTERN - 2)]
    first, second = psi[0] - psi[1], psi[0] - 2 * psi[1] + psi[2]
    return (
        float(special.gammaincc(2 ** (PATTERN - 2), first / 2)),
        float(special.gammaincc(2 ** (PATTERN - 3), second / 2)),
    )


def _approximate_entropy(counts: dict[int, np.ndarray], n: int) -> float:
    """Section 2.12."""
    phi = [
        float(special.xlogy(counts[m] / n, counts[m] / n).sum())
        for m in (ENTROPY_PATTERN, ENTROPY_PATTERN + 1)
    ]
    chi = 2 * n * (math.log(2) - (phi[0] - phi[1]))
    return float(special.gammaincc(2 ** (ENTROPY_PATTERN - 1), chi / 2))


def _cumulative_sums(bits: np.ndarray) -> tuple[float, float]:
    """Section 2.13: forward and backward."""
    n = len(bits)
    sums = np.cumsum(bits.astype(np.int32) * 2 - 1, dtype=np.int32)
    low, high, last = min(0, int(sums.min())), max(0, int(sums.max())), int(sums[-1])
    return _excursion(max(high, -low), n), _excursion(max(last - low, high - last), n)


def _excursion(z: int, n: int) -> float:
    """Of a walk's largest distance from its beginning."""
    root = math.sqrt(n)
    k = np.arange(math.floor((-n / z + 1) / 4), math.floor((n / z - 1) / 4) + 1)
    inner = (special.ndtr((4 * k + 1) * z / root) - special.ndtr((4 * k - 1) * z / root)).sum()
    k = np.arange(math.floor((-n / z - 3) / 4), math.floor((n / z - 1) / 4) + 1)
    outer = (special.ndtr((4 * k + 3) * z / root) - special.ndtr((4 * k + 1) * z / root)).sum()
    return float(np.clip(1 - inner + outer, 0, 1))
