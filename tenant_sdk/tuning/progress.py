"""Progress of a training while it runs, and the remaining time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from tenant_sdk.connection.stats import Stats

_MEASURED_STEPS = 3  # steps after the first, of which the estimate is made
_RECENT_STEPS = 50  # steps, of which speed is the mean


@dataclass(frozen=True)
class TrainingStep:
    """A step is done.

    ``loss`` and ``held_out`` in nats per token; ``loss`` of some steps only. Speeds are those of the last
    steps, without the first of all, in which connections and buffers are new. ``seconds_left``: with
    measurements of the held-out loss; None: not known yet.
    """

    step: int
    steps: int
    loss: float | None
    held_out: float | None
    tokens_per_second: float
    bytes_per_second: float
    seconds_left: float | None


@dataclass(frozen=True)
class _Cost:
    """What a step, or a measurement of the held-out loss, took; bytes that were sent and received."""

    seconds: float
    tokens: int
    sent: int
    received: int


def last_loss(history: Sequence[Mapping[str, float]], steps: int) -> float:
    """The mean over the last steps, of a Trainer's history that has each."""
    losses = [entry["loss"] for entry in history if "loss" in entry][-steps:]
    return sum(losses) / len(losses)


class Progress(TrainerCallback):
    """Tells about every step, with the mean loss of so many whenever they are done.

    Args:
        show_step: called after every step.
        notify: called with a line, once some steps are done: what the rest will take.
        steps: of which losses are the mean.
        eval_steps: after so many the held-out loss is measured; 0: never.
        stats: of the session.
        clock: seconds.
    """

    def __init__(
        self,
        show_step: Callable[[TrainingStep], None],
        notify: Callable[[str], None],
        steps: int,
        eval_steps: int,
        stats: Callable[[], Stats],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._show_step, self._notify, self._steps, self._eval_steps = show_step, notify, steps, eval_steps
        self._stats, self._clock = stats, clock
        self._begun: tuple[float, int, Stats] | None = None
        self._costs: deque[_Cost] = deque(maxlen=_RECENT_STEPS)
        self._evaluation = _Cost(0.0, 0, 0, 0)
        self._done = 0  # steps since this process began
        self._held_out: float | None = None

    def evaluated(self, loss: float, begun: float, before: Stats, step: int = 0, steps: int = 0) -> None:
        """The held-out loss was measured, from a time of the clock and with these figures before it."""
        now = self._stats()
        sent, received = now.bytes_sent - before.bytes_sent, now.bytes_received - before.bytes_received
        self._evaluation, self._held_out = _Cost(self._clock() - begun, 0, sent, received), loss
        if step:
            self._show_progress(step, steps, None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        self._begun = self._clock(), state.num_input_tokens_seen, self._stats()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """See TrainerCallback; of a step whose loss is logged when it is done."""
        if not logs or "loss" not in logs:
            return
        if self._begun is not None:
            began, tokens, before = self._begun
            now, self._begun = self._stats(), None
            cost = _Cost(
                self._clock() - began,
                state.num_input_tokens_seen - tokens,
                now.bytes_sent - before.bytes_sent,
                now.bytes_received - before.bytes_received,
            )
            self._done += 1
            if self._done == 2:
                self._costs.clear()  # of the first, in which connections and buffers were new
            self._costs.append(cost)
        left = state.max_steps - state.global_step
        if self._done == 1 + _MEASURED_STEPS and left:
            self._notify(self._estimate(left, state.global_step))
        self._show_progress(state.global_step, state.max_steps, None)
        if state.global_step == 1 or state.global_step % self._steps == 0:
            self._show_progress(state.global_step, state.max_steps, last_loss(state.log_history, self._steps))

    def _evaluations_left(self, step: int, steps: int) -> int:
        return (steps // self._eval_steps - step // self._eval_steps) if self._eval_steps else 0

    def _remaining(self, step: int, steps: int, of: Callable[[_Cost], float]) -> float:
        mean = sum(map(of, self._costs)) / len(self._costs)
        return mean * (steps - step) + of(self._evaluation) * self._evaluations_left(step, steps)

    def _show_progress(self, step: int, steps: int, loss: float | None) -> None:
        seconds = sum(cost.seconds for cost in self._costs) or 1e-9
        moved = sum(cost.sent + cost.received for cost in self._costs)
        left = None
        if self._done > 1 or step == steps:
            left = self._remaining(step, steps, lambda cost: cost.seconds)
        tokens = sum(cost.tokens for cost in self._costs)
        now = (tokens / seconds, moved / seconds, left)
        held_out = self._held_out
        self._show_step(TrainingStep(step, steps, loss, held_out, *now))

    def _estimate(self, left: int, step: int) -> str:
        steps = step + left
        took, up, down = (
            self._remaining(step, steps, of)
            for of in (
                lambda cost: cost.seconds,
                lambda cost: float(cost.sent),
                lambda cost: float(cost.received),
            )
        )
        return (
            f"estimate: {left} more steps in about {_time(took)}, {_gb(up / 1e9)} up and "
            f"{_gb(down / 1e9)} down, from {_MEASURED_STEPS} measured steps"
        )


def _time(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.2g} seconds"


def _gb(amount: float) -> str:
    return f"{amount:,.1f} GB" if amount >= 10 else f"{amount:.3g} GB"
