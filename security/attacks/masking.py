"""Attacks on the masks as such: can two inputs be told apart, and are the bytes uniform and unrelated?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from scipy import stats

from security.views import View

BLOCK_BYTES = 16  # of the cipher that masks come from
CORRELATED = 1 << 23  # how many numbers the test of neighbours takes


def as_bytes(rows: torch.Tensor) -> np.ndarray:
    """The bytes of rows as they were sent: uint8 [T, bytes]."""
    return rows.contiguous().view(torch.uint8).numpy().reshape(len(rows), -1)


class DistinguishingGame:
    """Two inputs, chosen by the adversary, are sent in an order that it must guess.

    Its classifier looks first whether it was told of the very row before, as when a mask serves twice;
    else it is naive Bayes on every bit, learned from the rows that it was told of. Half of the rows
    teach, half are guessed.
    """

    name: ClassVar[str] = "distinguishing game"
    goal: ClassVar[str] = "which of two chosen inputs a row hides"
    sees: ClassVar[str] = "rows; for half of them also the answer"
    metric: ClassVar[str] = "advantage (0: chance, 1: certain)"
    source: ClassVar[str] = "Goldwasser and Micali, 1984: indistinguishability"

    def attack(self, view: tuple[torch.Tensor, torch.Tensor], rng: np.random.Generator) -> torch.Tensor:
        """Guesses for the second half.

        Args:
            view: rows [N, C], and which input each of the first half is, bool [N // 2].
        """
        rows, told = view
        known = told.numpy()
        # Rates with one of each added, so that a bit that never varied does not decide everything.
        counts = [
            _bit_sums(rows[: len(told)][torch.from_numpy(known == side)]) + 1.0 for side in (False, True)
        ]
        sizes = [float((known == side).sum()) + 2.0 for side in (False, True)]
        rates = [count / size for count, size in zip(counts, sizes, strict=True)]
        ones = np.log(rates[1]) - np.log(rates[0])
        zeros = np.log1p(-rates[1]) - np.log1p(-rates[0])
        scores = [
            bits @ (ones - zeros) + zeros.sum()
            for part in rows[len(told) :].split(1024)
            for bits in [_bits(part)]
        ]
        guesses = np.concatenate(scores) > 0
        before = {row.tobytes(): side for row, side in zip(as_bytes(rows[: len(told)]), known, strict=True)}
        for i, row in enumerate(as_bytes(rows[len(told) :])):
            guesses[i] = before.get(row.tobytes(), guesses[i])
        return torch.from_numpy(guesses)


def _bits(rows: torch.Tensor) -> np.ndarray:
    return np.unpackbits(as_bytes(rows), axis=1).astype(np.float32)


def _bit_sums(rows: torch.Tensor) -> np.ndarray:
    return np.asarray(np.sum([_bits(part).sum(0, dtype=np.float64) for part in rows.split(1024)], axis=0))


@dataclass(frozen=True)
class Randomness:
    """What the tests say about captured bytes.

    ``p_value`` is the smallest of all tests, times their number (Bonferroni); ``worst`` names that test.
    """

    p_value: float
    worst: str
    repeated_blocks: int
    bytes_tested: int
    histogram: np.ndarray  # of all bytes: int64 [256]


class Uniformity:
    """Chi-square of every byte position, bias of every bit, correlation of neighbours, repeated blocks."""

    name: ClassVar[str] = "uniformity and independence"
    goal: ClassVar[str] = "any structure in what is sent"
    sees: ClassVar[str] = "rows of all layers and both directions, across reconnects and crashes"
    metric: ClassVar[str] = "smallest p-value; repeated blocks of 16 bytes"
    source: ClassVar[str] = "Pearson, 1900; NIST SP 800-22, monobit and serial tests"

    def attack(self, view: View, rng: np.random.Generator) -> Randomness:
        """See Attack."""
        kept = [seen.raw.reshape(-1) for seen in view.requests]
        words = torch.cat(kept) if kept else torch.empty(0, dtype=torch.int32)
        data = as_bytes(words[:, None])
        tests: dict[str, float] = {}
        histogram = np.zeros(256, np.int64)
        for position in range(data.shape[1]):
            counts = np.bincount(data[:, position], minlength=256)
            histogram += counts
            tests[f"byte {position}, chi-square"] = float(stats.chisquare(counts).pvalue)
            for bit in range(8):
                ones = int(counts[np.arange(256) >> bit & 1 == 1].sum())
                deviation = (2 * ones - len(data)) / np.sqrt(len(data))
                tests[f"bit {8 * position + bit}, bias"] = float(2 * stats.norm.sf(abs(deviation)))
        for position in range(data.shape[1]):
            column = data[:CORRELATED, position].astype(np.float32)
            column -= column.mean()
            for lag in (1, 2, 4):
                together = float(column[lag:] @ column[:-lag] / max(float(column @ column), 1e-30))
                tests[f"byte {position}, correlation at distance {lag}"] = float(
                    2 * stats.norm.sf(abs(together) * np.sqrt(len(column)))
                )
        worst = min(tests, key=lambda name: tests[name])
        return Randomness(
            min(1.0, tests[worst] * len(tests)), worst, _repeated(view), int(data.size), histogram
        )


def _repeated(view: View) -> int:
    """Blocks that occur again anywhere in what was sent."""
    blocks = []
    for seen in view.requests:
        data = as_bytes(seen.raw).reshape(-1)
        whole = data[: len(data) // BLOCK_BYTES * BLOCK_BYTES].reshape(-1, BLOCK_BYTES)
        blocks.append(np.ascontiguousarray(whole).view(np.dtype((np.void, BLOCK_BYTES))).ravel())
    if not blocks:
        return 0
    # Sorted by one number made of both halves: two different blocks share it once in 2^64 pairs.
    everything = np.concatenate(blocks)
    halves = everything.view(np.uint64).reshape(-1, 2)
    mixed = halves[:, 0] * np.uint64(0x9E3779B97F4A7C15) ^ halves[:, 1]
    mixed.sort()
    return int((mixed[1:] == mixed[:-1]).sum())
