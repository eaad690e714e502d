"""The loss on held-out data, before, during and after a training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from tenant_sdk.session.session import Session
from tenant_sdk.tuning.checkpoints import TrainingCheckpoints
from tenant_sdk.tuning.conversations import Example
from tenant_sdk.tuning.data import Notify
from tenant_sdk.tuning.evaluation import perplexity
from tenant_sdk.tuning.progress import Progress
from tenant_sdk.tuning.resume_settings import digest_of
from tenant_sdk.tuning.trainer import TrainingEnd

_BEFORE = "perplexity before"  # in the file of settings


@dataclass
class HeldOutLoss:
    """Measures the loss on held-out examples; a step's measurement is not made again for the end.

    Attributes:
        evaluating, notify: see ``TrainingCallbacks``.
    """

    model: Any
    examples: Sequence[Example]
    batch_size: int
    session: Session
    progress: Progress
    evaluating: Callable[[int, int], None]
    notify: Notify
    _last: tuple[int, float] = field(default=(0, 0.0), init=False)  # the step measured last, and its loss

    def measure(self, step: int = 0, steps: int = 0) -> float:
        """In nats per learned token; after a step, it is told along with the step's."""
        begun, before = time.perf_counter(), self.session.stats
        loss = math.log(perplexity(self.model, self.examples, self.batch_size, self.evaluating))
        self.progress.evaluated(loss, begun, before, step, steps)
        self._last = step, loss
        return loss

    def perplexity_before(self, checkpoints: TrainingCheckpoints, *, of_base: bool) -> float | None:
        """Of the base, or of the adapter that is trained further; a resumed training has it already."""
        if not self.examples:
            return None
        name = f"{_BEFORE} {digest_of(repr(self.examples).encode())}"
        figure = checkpoints.kept(name)
        if not isinstance(figure, float):
            with self.model.disable_adapter() if of_base else nullcontext():
                figure = math.exp(self.measure())
            checkpoints.keep(name, figure)
        self.notify(f"held-out perplexity before: {figure:.2f}")
        return figure

    def perplexity_after(self, ended: TrainingEnd) -> float | None:
        """Of the adapter that a training leaves, told as well; None: there are no examples."""
        if not self.examples:
            return None
        step, loss = self._last
        after = math.exp(loss if step == (ended.best or ended.step) else self.measure())
        self.notify(f"held-out perplexity after: {after:.2f}")
        return after
