"""What a training tells while it runs, and what it will take."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from tenant_sdk.connection.stats import Stats
from tenant_sdk.tuning.conversations import Example
from tenant_sdk.tuning.data import Collate

_DRAWN = 50  # batches, for the mean size of one


@dataclass(frozen=True)
class TrainingStep:
    """A step is done. ``loss`` in nats per token, of some steps only; speed and time since the beginning."""

    step: int
    steps: int
    loss: float | None
    tokens_per_second: float
    seconds_left: float


def last_loss(history: Sequence[Mapping[str, float]], steps: int) -> float:
    """The mean over the last steps, of a Trainer's history that has each."""
    losses = [entry["loss"] for entry in history if "loss" in entry][-steps:]
    return sum(losses) / len(losses)


class Progress(TrainerCallback):
    """Tells the command line about every step, with the mean loss of so many whenever they are done."""

    def __init__(self, show: Callable[[TrainingStep], None], steps: int) -> None:
        self._show, self._steps = show, steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See TrainerCallback; a resumed training has done steps before."""
        self._started, self._first = time.perf_counter(), state.global_step
        self._tokens = state.num_input_tokens_seen

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """See TrainerCallback."""
        if logs and "loss" in logs:
            self._tell(state, None)
            if state.global_step == 1 or state.global_step % self._steps == 0:
                self._tell(state, last_loss(state.log_history, self._steps))

    def _tell(self, state: Any, loss: float | None) -> None:
        seconds = time.perf_counter() - self._started
        speed = (state.num_input_tokens_seen - self._tokens) / seconds
        left = seconds / max(1, state.global_step - self._first) * (state.max_steps - state.global_step)
        self._show(TrainingStep(state.global_step, state.max_steps, loss, speed, left))


def estimate(
    model: Any,
    examples: Sequence[Example],
    batch_size: int,
    steps: int,
    seed: int,
    stats: Callable[[], Stats],
    collate: Collate,
) -> str:
    """What ``steps`` steps will take, as a line, from one that is done here; its gradients are dropped.

    Before it a single example goes through the model: layers learn from it which of them share an input, and
    fetch what they check answers with, which steps after the first do not.
    """
    chance = random.Random(seed)  # noqa: S311 - which examples are measured
    size = min(batch_size, len(examples))
    model.train()
    _pass(model, collate(chance.sample(examples, 1)))
    measured = collate(chance.sample(examples, size))
    before, started = stats(), time.perf_counter()
    _pass(model, measured)
    seconds, after = time.perf_counter() - started, stats()
    model.zero_grad()
    # Batches differ in how much their longest example makes them padded.
    mean = sum(_rows(collate(chance.sample(examples, size))) for _ in range(_DRAWN)) / _DRAWN
    # The last batch of an epoch may be small.
    filled = len(examples) / (math.ceil(len(examples) / size) * size)
    times = steps * mean * filled / _rows(measured)
    up, down = (
        times * (getattr(after, name) - getattr(before, name)) / 1e9
        for name in ("bytes_sent", "bytes_received")
    )
    return (
        f"estimate: {steps} steps in about {_time(times * seconds)}, {_gb(up)} up and "
        f"{_gb(down)} down, from one measured step"
    )


def _time(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.2g} seconds"


def _gb(amount: float) -> str:
    return f"{amount:,.1f} GB" if amount >= 10 else f"{amount:.3g} GB"


def _pass(model: Any, batch: dict[str, Tensor]) -> None:
    model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).loss.backward()


def _rows(batch: dict[str, Tensor]) -> int:
    """Tokens of a batch with its padding, which the executor multiplies like others."""
    return batch["input_ids"].numel()
