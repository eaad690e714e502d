"""Attacks on the masks as such: can two inputs be told apart, and are the bytes uniform and unrelated?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from scipy import stats

from security.recordings.executors import AuditError
from security.views.adversaries import View

BLOCK_BYTES = 16  # of the cipher that masks come from
RUN = 8  # numbers whose top bytes are looked for
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
        rows, labels = view
        known = labels.numpy()
        # Rates with one of each added, so that a bit that never varied does not decide everything.
        counts = [
            _bit_sums(rows[: len(labels)][torch.from_numpy(known == side)]) + 1.0 for side in (False, True)
        ]
        sizes = [float((known == side).sum()) + 2.0 for side in (False, True)]
        rates = [count / size for count, size in zip(counts, sizes, strict=True)]
        ones = np.log(rates[1]) - np.log(rates[0])
        zeros = np.log1p(-rates[1]) - np.log1p(-rates[0])
        scores = [
            bits @ (ones - zeros) + zeros.sum()
            for part in rows[len(labels) :].split(1024)
            for bits in [_bits(part)]
        ]
        guesses = np.concatenate(scores) > 0
        before = {row.tobytes(): side for row, side in zip(as_bytes(rows[: len(labels)]), known, strict=True)}
        for i, row in enumerate(as_bytes(rows[len(labels) :])):
            guesses[i] = before.get(row.tobytes(), guesses[i])
        return torch.from_numpy(guesses)


def _bits(rows: torch.Tensor) -> np.ndarray:
    return np.unpackbits(as_bytes(rows), axis=1).astype(np.float32)


def _bit_sums(rows: torch.Tensor) -> np.ndarray:
    return np.asarray(np.sum([_bits(part).sum(0, dtype=np.float64) for part in rows.split(1024)], axis=0))


@dataclass(frozen=True)
class Randomness:
    """What the tests say about captured bytes.

    ``p_value`` is the smallest of all ``tests``, times their number, 1 at most (Bonferroni); ``worst`` names
    that test. ``repeated_blocks`` are those of 16 bytes that occur again, ``repeated_tops`` runs of eight
    numbers whose top bytes do: the same masks under other rows.
    """

    p_value: float
    worst: str
    tests: int
    repeated_blocks: int
    repeated_tops: int
    bytes_tested: int
    histogram: np.ndarray  # of all bytes: int64 [256]


class Uniformity:
    """Chi-square of every byte position, bias of every bit, correlation of neighbours, repetitions.

    A session can have numbers of several dtypes. The bytes of each are tested by themselves.
    Rows are small beside masks, so a mask that serves twice, for whatever products, mostly shows in the same
    top bytes under both rows, even where the rows and with them all other bytes differ.
    """

    name: ClassVar[str] = "uniformity and independence"
    goal: ClassVar[str] = "any structure in what is sent"
    sees: ClassVar[str] = "rows of all layers and both directions, across reconnects and crashes"
    metric: ClassVar[str] = "smallest p-value; repetitions"
    source: ClassVar[str] = "Pearson, 1900; NIST SP 800-22, monobit and serial tests"

    def attack(self, view: View, rng: np.random.Generator) -> Randomness:
        """See Attack.

        Raises:
            AuditError: there are no rows to test.
        """
        if not view.requests:
            raise AuditError("there are no bytes to test: the executor was sent no rows")
        # Request by request, for all of them together may be larger than the memory.
        kinds: dict[torch.dtype, _Counted] = {}
        blocks, tops = [], []
        for seen in view.requests:
            raw = seen.raw
            data = as_bytes(raw.reshape(-1, 1))
            kinds.setdefault(raw.dtype, _Counted()).add(data)
            blocks.append(_blocks(data))
            tops.append(_tops(data))
        tests: dict[str, float] = {}
        for dtype, counted in kinds.items():
            of = f" of {str(dtype).removeprefix('torch.')}" if len(kinds) > 1 else ""
            tests |= {f"{name}{of}": p_value for name, p_value in counted.tests().items()}
        worst = min(tests, key=lambda name: tests[name])
        histogram = sum(counted.counts.sum(0) for counted in kinds.values())
        return Randomness(
            min(1.0, tests[worst] * len(tests)),
            worst,
            len(tests),
            _repeated(blocks),
            _repeated(tops),
            int(histogram.sum()),
            histogram,
        )


class _Counted:
    """The bytes of numbers of one dtype: how often each value of each, [bytes of a number, 256]."""

    def __init__(self) -> None:
        self.counts: Any = 0
        self._first: list[np.ndarray] = []
        self._missing = CORRELATED

    def add(self, data: np.ndarray) -> None:
        """Count more: uint8 [numbers, bytes of a number]."""
        self.counts = self.counts + np.stack([np.bincount(column, minlength=256) for column in data.T])
        self._first.append(data[: self._missing].copy())  # a view would keep it all
        self._missing -= len(self._first[-1])

    def tests(self) -> dict[str, float]:
        """The p-value of each test, by its name."""
        tests: dict[str, float] = {}
        numbers = int(self.counts[0].sum())
        for position, counts in enumerate(self.counts):
            tests[f"byte {position}, chi-square"] = float(stats.chisquare(counts).pvalue)
            for bit in range(8):
                ones = int(counts[np.arange(256) >> bit & 1 == 1].sum())
                deviation = (2 * ones - numbers) / np.sqrt(numbers)
                tests[f"bit {8 * position + bit}, bias"] = float(2 * stats.norm.sf(abs(deviation)))
        for position, column in enumerate(np.concatenate(self._first).T.astype(np.float32)):
            column -= column.mean()
            for lag in (1, 2, 4):
                together = float(column[lag:] @ column[:-lag] / max(float(column @ column), 1e-30))
                tests[f"byte {position}, correlation at distance {lag}"] = float(
                    2 * stats.norm.sf(abs(together) * np.sqrt(len(column)))
                )
        return tests


def _blocks(numbers: np.ndarray) -> np.ndarray:
    """A number for each block of 16 bytes, made of both halves: two blocks share it once in 2^64 pairs."""
    data = numbers.reshape(-1)
    halves = data[: len(data) // BLOCK_BYTES * BLOCK_BYTES].view(np.uint64).reshape(-1, 2)
    return np.asarray(halves[:, 0] * np.uint64(0x9E3779B97F4A7C15) ^ halves[:, 1])


def _tops(numbers: np.ndarray) -> np.ndarray:
    """The top bytes of each run of eight numbers, together one number of 64 bits."""
    tops = numbers[:, -1]
    return np.ascontiguousarray(tops[: len(tops) // RUN * RUN]).view(np.uint64)


def _repeated(numbers: list[np.ndarray]) -> int:
    """How many occurred before, anywhere in what was sent."""
    everything = np.concatenate(numbers)
    numbers.clear()
    everything.sort()
    return int((everything[1:] == everything[:-1]).sum())
