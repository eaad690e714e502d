"""Products that a layer needs twice are asked for once.

Where activations are given up and computed again (checkpointing), the products would be asked for again
too. A recording keeps the answers of a layer's first run and gives them to the second.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Protocol

import torch

SAMPLED_ROWS, SAMPLED_COLUMNS = 8, 16  # of what was asked, kept to compare
SAME = 1e-3  # of the largest sampled number; other rows differ by much more, a GPU's rounding by less

Compute = Callable[[], list[torch.Tensor]]


class Store(Protocol):
    """Where tensors are kept: in memory, or a ``EncryptedFile``."""

    def write(self, tensor: torch.Tensor) -> Any:
        """Keep a copy of a tensor."""
        ...

    def read(self, stored: Any) -> torch.Tensor:
        """A tensor that was kept."""
        ...

    def free(self, stored: Any) -> None:
        """Give its place up; it is not read any more."""
        ...


class CopyStore:
    """Keeps copies of tensors in memory, where they are: the model may write into those that it was given."""

    def write(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Store."""
        return tensor.detach().clone()

    def read(self, stored: torch.Tensor) -> torch.Tensor:
        """See Store; the copy itself."""
        return stored

    def free(self, stored: torch.Tensor) -> None:
        """See Store."""


class OnHost:
    """A store of tensors on the CPU, for a model on any device."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, tensor: torch.Tensor) -> tuple[Any, torch.device]:
        """See Store."""
        return self._store.write(tensor.cpu()), tensor.device

    def read(self, stored: tuple[Any, torch.device]) -> torch.Tensor:
        """See Store."""
        return self._store.read(stored[0]).to(stored[1])

    def free(self, stored: tuple[Any, torch.device]) -> None:
        """See Store."""
        self._store.free(stored[0])


@dataclass(frozen=True)
class _Answer:
    """What was asked of whom, a sample of it, and where the answers are."""

    request: tuple[Any, ...]
    sample: list[torch.Tensor]
    kept: list[Any]

    def matches(self, request: tuple[Any, ...], sample: Sequence[torch.Tensor]) -> bool:
        """Whether it is the answer to this too."""
        if self.request != request:
            return False
        return all(
            torch.equal(mine, other)
            or bool((mine - other).abs().max() <= SAME * mine.abs().max())  # False for NaN
            for mine, other in zip(self.sample, sample, strict=True)
        )


class Recording:
    """The answers to the products of one run of a layer, for one more run of it.

    An answer is given once: to the first product of the same group, direction, members and shape whose rows
    are the same in a sample. A product that none fits is asked for, which is right and only slower. One
    thread uses it at a time.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._answers: list[_Answer] = []
        weakref.finalize(self, _free, store, self._answers)

    def record(self) -> RecordingContext:
        """While this context lasts, answers are kept."""
        return RecordingContext(self, replays=False)

    def replay(self) -> RecordingContext:
        """While this context lasts, answers that were kept are given, and groups learn nothing."""
        return RecordingContext(self, replays=True)

    def keep(
        self, request: tuple[Any, ...], tensors: Sequence[torch.Tensor], answers: list[torch.Tensor]
    ) -> None:
        """Keep the answers to a product of tensors."""
        kept = [self._store.write(answer) for answer in answers]
        self._answers.append(_Answer(request, _sample(tensors), kept))

    def take(self, request: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The answers to a product, if they were kept."""
        sample = _sample(tensors)
        for index, answer in enumerate(self._answers):
            if answer.matches(request, sample):
                del self._answers[index]
                answers = [self._store.read(each) for each in answer.kept]
                for each in answer.kept:
                    self._store.free(each)
                return answers
        return None


class RecordingContext:
    """A context in which this thread's products are recorded, or given again. It may be entered often."""

    def __init__(self, recording: Recording, *, replays: bool) -> None:
        self._recording, self._replays = recording, replays
        self._entered: list[Token[RecordingContext | None]] = []
        self._around: RecordingContext | None = None  # checkpoints may lie in one another
        self._touched: list[Any] = []

    def __enter__(self) -> None:
        self._around = _mode.get()
        self._entered.append(_mode.set(self))

    def __exit__(self, *_: object) -> None:
        _mode.reset(self._entered.pop())
        for each in self._touched:
            each.forget()
        self._touched.clear()

    def answer(
        self, request: tuple[Any, ...], tensors: Sequence[torch.Tensor], compute: Compute
    ) -> list[torch.Tensor]:
        """The answers to a product."""
        if self._replays:
            # A second run may end as soon as it has computed what is needed: nobody parts from anybody then.
            if hasattr(request[0], "forget"):
                self._touched.append(request[0])
            recorded = self._recording.take(request, tensors)
            if recorded is not None:
                return recorded
        answers = compute() if self._around is None else self._around.answer(request, tensors, compute)
        if not self._replays:
            self._recording.keep(request, tensors, answers)
        return answers


_mode: ContextVar[RecordingContext | None] = ContextVar("mode", default=None)


def answered(
    request: tuple[Any, ...], tensors: Sequence[torch.Tensor], compute: Compute
) -> list[torch.Tensor]:
    """The answers to a product: asked for, unless a recording that is replayed has them.

    Args:
        request: of whom, and what; compared.
        tensors: the rows, [..., T, W] each.
        compute: gives the answers; they are fresh.
    """
    mode = _mode.get()
    if mode is None:
        return compute()
    return mode.answer((*request, *(tensor.shape for tensor in tensors), tensors[0].dtype), tensors, compute)


def _sample(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [
        tensor.detach()[
            :: max(1, len(tensor) // SAMPLED_ROWS), :: max(1, tensor.shape[-1] // SAMPLED_COLUMNS)
        ]
        .float()
        .clone()
        for tensor in tensors
        if tensor.numel()
    ]


def _free(store: Store, answers: list[_Answer]) -> None:
    """What nobody asked for again: no gradient was wanted."""
    for answer in answers:
        for each in answer.kept:
            store.free(each)
