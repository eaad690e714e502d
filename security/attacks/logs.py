"""Look for secrets in everything that is written: logs, metrics, and objects printed as text."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

PLANTED = "a planted secret"


@dataclass(frozen=True)
class Secrets:
    """What must not be written. ``tensors`` any shape; ``seeds`` and ``tokens`` as bytes and ids.

    ``planted`` was written on purpose, to show that the search finds what is there.
    """

    tensors: list[torch.Tensor]
    seeds: list[bytes]
    token_ids: list[int]
    text: list[str]
    passwords: list[str]
    planted: str = ""


class LogScan:
    """Search texts for tensors' numbers, token ids, text, seeds and passwords in their usual spellings."""

    name: ClassVar[str] = "log scan"
    goal: ClassVar[str] = "anything secret in what programs write"
    sees: ClassVar[str] = "logs, metrics, printed objects"
    metric: ClassVar[str] = "secrets found"
    source: ClassVar[str] = "CWE-532"

    def __init__(self, secrets: Secrets) -> None:
        self.patterns = dict(_patterns(secrets))

    def attack(self, view: dict[str, str], rng: np.random.Generator) -> list[str]:
        """What was found where.

        Args:
            view: texts by where they come from.
        """
        return [
            f"{what} in {where}"
            for where, text in view.items()
            for pattern, what in self.patterns.items()
            if pattern in text
        ]


def _patterns(secrets: Secrets) -> list[tuple[str, str]]:
    patterns: list[tuple[str, str]] = []
    for tensor in secrets.tensors:
        numbers = tensor.reshape(-1)[:3].tolist()
        # Three numbers side by side as Python, numpy and torch print them; one alone may be chance.
        for spell in (repr, "{:.4f}".format, "{: .4f}".format, "{:.6f}".format, "{: .4e}".format):
            for separator in (", ", " ", ","):
                patterns.append((separator.join(spell(number) for number in numbers), "numbers of a tensor"))
        patterns += _spelled(
            tensor.contiguous().view(torch.uint8).numpy().tobytes()[:24], "bytes of a tensor"
        )
    for seed in secrets.seeds:
        patterns += _spelled(seed, "a seed")
    for start in range(0, len(secrets.token_ids) - 4, 4):
        ids = secrets.token_ids[start : start + 4]
        patterns += [(separator.join(map(str, ids)), "token ids") for separator in (", ", " ", ",")]
    for line in secrets.text:
        patterns += [
            (line[i : i + 16], "text") for i in range(0, max(1, len(line) - 16), 16) if len(line) >= 16
        ]
    patterns += [(password, "a bearer token") for password in secrets.passwords]
    if secrets.planted:
        patterns.append((secrets.planted, PLANTED))
    return patterns


def _spelled(data: bytes, what: str) -> list[tuple[str, str]]:
    """Hexadecimal, base64 without the ends that depend on what is around, Python's own."""
    return [
        (data[:12].hex(), what),
        (data[:12].hex(" "), what),
        (base64.b64encode(data[:12]).decode(), what),
        (repr(data[:12])[2:-1], what),
        (str(list(data[:8]))[1:-1], what),
    ]
