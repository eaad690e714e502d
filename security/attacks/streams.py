"""Attacks on streams: information about the text in numbers of rows and times, prompt by prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch


@dataclass(frozen=True)
class Stream:
    """The forward passes for one prompt: ``rows`` of each, and when it ``arrived`` (seconds)."""

    rows: tuple[int, ...]
    arrived: tuple[float, ...]


# Streams, and of the first of them which of two kinds of text they were for.
LabelledStreams = tuple[list[Stream], list[int]]


class SpeculationWatch:
    """Speculation sends more rows where the text repeats itself: count them.

    A tenant that guesses ahead, from its prompt or with a small model, has its guesses checked in one pass of
    several rows. How many depends on how often they are right, and so on the text.
    """

    name: ClassVar[str] = "speculation"
    goal: ClassVar[str] = "whether a text repeats itself"
    sees: ClassVar[str] = "rows of each pass, prompt by prompt; for half of the prompts also the answer"
    metric: ClassVar[str] = "prompts told apart by numbers of rows"
    source: ClassVar[str] = "Wei et al., When speculation spills secrets, arXiv 2411.01076"

    def attack(self, view: LabelledStreams, rng: np.random.Generator) -> torch.Tensor:
        """Guesses for the prompts of which it was not told, by what tells the others apart best."""
        streams, labels = view
        numbers = np.array(
            [(s.rows[0], max(s.rows[1:], default=0), len(s.rows), sum(s.rows)) for s in streams], float
        )
        known = torch.tensor(labels, dtype=torch.bool)

        def again(column: np.ndarray) -> int:
            values = [*column[: len(labels)], *column[: len(labels)]]
            return int((guess_from_labelled(values, [""] * len(values), labels) == known).sum())

        best = max(numbers.T, key=again)
        return guess_from_labelled(list(best), [""] * len(best), labels)


class KnownTexts:
    """Recognise a text by the passes that write it; each of several texts was seen some times before.

    Linear discriminants without covariances: what differs between texts counts by how little it differs
    between two times of the same text.
    """

    name: ClassVar[str] = "text from passes"
    goal: ClassVar[str] = "which of several known texts is written"
    sees: ClassVar[str] = "rows and times of each pass; for each text also those of earlier times"
    metric: ClassVar[str] = "texts recognised"
    source: ClassVar[str] = "Wei et al., When speculation spills secrets, arXiv 2411.01076"

    def attack(self, view: tuple[list[list[Stream]], list[Stream]], rng: np.random.Generator) -> torch.Tensor:
        """Int64, of each new stream: the known text that it is of.

        Args:
            view: known streams of each text, and new ones.
            rng: not used.
        """
        known, new = view
        most = max(len(stream.rows) for stream in (*(each for text in known for each in text), *new))
        seen = np.array([[_course(stream, most) for stream in text] for text in known])
        means = seen.mean(1)
        within = seen.std(1).mean(0) + 1e-3 * seen.std((0, 1)) + 1e-9
        asked = np.array([_course(stream, most) for stream in new])
        away = (((asked[:, None] - means) / within) ** 2).sum(-1)
        return torch.from_numpy(away.argmin(1))


def _course(stream: Stream, most: int) -> list[float]:
    """Passes, rows of each, and how long after the first each came; as many numbers for all streams."""
    rows = [*stream.rows, *[0] * (most - len(stream.rows))]
    times = [at - stream.arrived[0] for at in stream.arrived]
    return [len(stream.rows), *rows, *times, *[times[-1]] * (most - len(times))]


class TopicFromTraffic:
    """Tell topics by lengths and times: naive Bayes with normal distributions."""

    name: ClassVar[str] = "topic from traffic"
    goal: ClassVar[str] = "which of two topics a prompt is about"
    sees: ClassVar[str] = "rows and times of each pass, prompt by prompt; for half of them also the topic"
    metric: ClassVar[str] = "topics right"
    source: ClassVar[str] = "McDonald and Bar Or, Whisper Leak, arXiv 2511.03675"

    def attack(self, view: LabelledStreams, rng: np.random.Generator) -> torch.Tensor:
        """See Attack; guesses for the prompts of which it was not told."""
        streams, labels = view
        features = np.array([_features(stream) for stream in streams])
        known, topics = features[: len(labels)], np.array(labels)
        scores = []
        for topic in (0, 1):
            of_topic = known[topics == topic]
            mean, spread = of_topic.mean(0), of_topic.std(0) + 0.05 * known.std(0) + 1e-6
            scores.append((-0.5 * ((features - mean) / spread) ** 2 - np.log(spread)).sum(1))
        return torch.from_numpy((scores[1] > scores[0])[len(labels) :])


def _features(stream: Stream) -> list[float]:
    """Logarithms of the prompt's rows, passes, and times between passes."""
    gaps = np.diff(stream.arrived)
    typical, longest = (float(np.median(gaps)), float(gaps.max())) if len(gaps) else (1.0, 1.0)
    numbers = (stream.rows[0], len(stream.rows), sum(stream.rows), typical + 1e-4, longest + 1e-4)
    return [float(np.log(number)) for number in numbers]


def guess_from_labelled(values: list[float], kinds: list[str], labels: list[int]) -> torch.Tensor:
    """Which of two secrets each value goes with, learned for each kind from the first, ``labels`` ones.

    The secret whose mean is nearer; the first one where both are equally near. bool [values - told]
    """
    guesses = []
    for value, kind in list(zip(values, kinds, strict=True))[len(labels) :]:
        away = []
        for secret in (0, 1):
            of_secret = [
                v for v, k, t in zip(values, kinds, labels, strict=False) if (k, t) == (kind, secret)
            ]
            away.append(abs(value - float(np.mean(of_secret))) if of_secret else float("inf"))
        guesses.append(away[1] < away[0])
    return torch.tensor(guesses, dtype=torch.bool)
