"""Attacks on a gateway's traffic: requests that many sequences share, and their information about each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from security.attacks.base import cosine, unit
from security.attacks.masking import DistinguishingGame
from security.attacks.streams import guess_from_labelled


class AdapterOfRows(DistinguishingGame):
    """Rows of a layer behind an adapter, each under one of two adapters."""

    name: ClassVar[str] = "adapter of a row"
    goal: ClassVar[str] = "which of two adapters a sequence is answered with"
    sees: ClassVar[str] = "rows of one prompt that the provider chose; for half of them also the adapter"
    metric: ClassVar[str] = "rows whose adapter is right"


class AdaptersInStep:
    """Sequences of one prompt under one adapter have the same rows, under several adapters they have not."""

    name: ClassVar[str] = "adapters in a step"
    goal: ClassVar[str] = "whether sequences computed together have one adapter or as many adapters"
    sees: ClassVar[str] = "rows of a layer behind the adapters; for half of the requests also the answer"
    metric: ClassVar[str] = "requests told apart"
    source: ClassVar[str] = "Chen et al., Punica, arXiv 2310.18547: adapters that share a batch"

    def attack(self, view: tuple[list[torch.Tensor], list[int]], rng: np.random.Generator) -> torch.Tensor:
        """Guesses for the requests that it was not told of.

        Args:
            view: rows [N, C] of each request, and whether each of the first ones has several adapters.
        """
        requests, labels = view
        likeness = [_likeness(rows) for rows in requests]
        return guess_from_labelled(likeness, [""] * len(likeness), labels)


def _likeness(rows: torch.Tensor) -> float:
    """How like the nearest other row the rows are in the mean."""
    directions = unit(rows.float())
    together = directions @ directions.T
    return float(together.fill_diagonal_(-1.0).max(1).values.mean())


class SequenceBoundary:
    """Where in a request one sequence's rows end and the next one's begin: where neighbours differ most."""

    name: ClassVar[str] = "boundary of sequences"
    goal: ClassVar[str] = "which rows of a request belong to one sequence"
    sees: ClassVar[str] = "rows of two prompts in one request, of words that the provider chose"
    metric: ClassVar[str] = "requests divided at the right row"
    source: ClassVar[str] = "the same rows without masks; nothing else is known of"

    def __init__(self, least: int) -> None:
        self.least = least

    def attack(self, view: list[torch.Tensor], rng: np.random.Generator) -> torch.Tensor:
        """For each request's rows [N, C] how many belong to the first: ``least`` to N - ``least``."""
        guesses = []
        for rows in view:
            alike = cosine(rows[:-1].float(), rows[1:].float())  # of row i with row i + 1
            inner = alike[self.least - 1 : len(rows) - self.least]
            guesses.append(self.least + int(inner.argmin()))
        return torch.tensor(guesses)


@dataclass(frozen=True)
class SeenSequences:
    """What numbers of rows say: each prompt's length, in order, how many answers ended, and most at once."""

    prompts: list[int]
    ended: int
    most: int


class StepCounts:
    """Count sequences: each that decodes is one row of a step, and what is more is a prompt that came.

    A step of fewer rows than sequences is one after some have ended.
    """

    name: ClassVar[str] = "traffic analysis, gateway"
    goal: ClassVar[str] = "when sequences begin and end, how many there are, how long each prompt is"
    sees: ClassVar[str] = "how many rows each step has"
    metric: ClassVar[str] = "prompts whose length is read exactly"
    source: ClassVar[str] = "Weiss et al., arXiv 2403.09751, for token lengths"

    def attack(self, view: list[int], rng: np.random.Generator) -> SeenSequences:
        """See Attack; the view begins when nothing is computed."""
        prompts: list[int] = []
        decoding = ended = largest = 0
        for rows in view:
            if rows > decoding:
                prompts.append(rows - decoding)
                decoding += 1
            else:
                ended += decoding - rows
                decoding = rows
            largest = max(largest, decoding)
        return SeenSequences(prompts, ended + decoding, largest)


class CachedPrefix:
    """A prompt whose beginning was computed before sends fewer rows."""

    name: ClassVar[str] = "cached prefix"
    goal: ClassVar[str] = "whether a prompt begins as one did before, under the same adapter"
    sees: ClassVar[str] = "rows of each prompt; for half of them also the answer"
    metric: ClassVar[str] = "prompts told apart"
    source: ClassVar[str] = "Song et al., The early bird catches the leak, arXiv 2409.20002, who take times"

    def attack(self, view: tuple[list[int], list[int]], rng: np.random.Generator) -> torch.Tensor:
        """Guesses for the prompts that it was not told of; the view: rows, and whether it was met before."""
        rows, labels = view
        return guess_from_labelled([float(count) for count in rows], [""] * len(rows), labels)


class ByteSearch:
    """Look for what must not be sent in everything that was.

    Args:
        sought: strings of bytes, and what each is.
    """

    name: ClassVar[str] = "transcript search"
    goal: ClassVar[str] = "anything of the tenant's that is sent as it is"
    sees: ClassVar[str] = "every byte that an executor recorded"
    metric: ClassVar[str] = "secrets found"
    source: ClassVar[str] = "CWE-319"

    def __init__(self, sought: dict[bytes, str]) -> None:
        self.sought = sought

    def attack(self, view: dict[str, bytes], rng: np.random.Generator) -> list[str]:
        """What was found where; the view: bytes by where they come from."""
        return [
            f"{what} in {where}"
            for where, data in view.items()
            for pattern, what in self.sought.items()
            if pattern in data
        ]
