"""What a training tells of its speed and of what is left, with a clock and figures of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tenant_sdk.command_line.training import plotted
from tenant_sdk.connection.stats import Stats
from tenant_sdk.tuning.progress import Progress, TrainingStep


class Session:
    """A clock, and what was sent and received by it."""

    def __init__(self) -> None:
        self.now, self.figures = 0.0, Stats()

    def work(self, seconds: float, sent: int, received: int) -> None:
        self.now += seconds
        self.figures = Stats(
            bytes_sent=self.figures.bytes_sent + sent, bytes_received=self.figures.bytes_received + received
        )


class Training:
    """Runs steps as the Trainer does."""

    def __init__(self, steps: int, every: int = 1, eval_steps: int = 0) -> None:
        self.session, self.seen, self.said = Session(), list[TrainingStep](), list[str]()
        self.progress = Progress(
            *(self.seen.append, self.said.append, every, eval_steps),
            lambda: self.session.figures,
            lambda: self.session.now,
        )
        self.state = SimpleNamespace(
            global_step=0, max_steps=steps, num_input_tokens_seen=0, log_history=list[dict[str, float]]()
        )

    def step(self, seconds: float, loss: float = 1.0, tokens: int = 100, sent: int = 10**9) -> None:
        call: Any = (None, self.state, None)
        self.progress.on_step_begin(*call)
        self.session.work(seconds, sent, 2 * sent)
        self.state.global_step += 1
        self.state.num_input_tokens_seen += tokens
        self.state.log_history.append({"loss": loss})
        self.progress.on_log(*call, logs={"loss": loss})

    def check(self, seconds: float, loss: float) -> None:
        begun, before = self.session.now, self.session.figures
        self.session.work(seconds, 10**8, 10**8)
        self.progress.evaluated(loss, begun, before, self.state.global_step, self.state.max_steps)


def test_the_first_step_is_not_typical() -> None:
    """It took 60 seconds, and the others 2: what is left is 2 for each."""
    training = Training(10)
    training.step(60.0)
    assert training.seen[-1].seconds_left is None
    training.step(2.0)
    assert training.seen[-1].seconds_left == pytest.approx(8 * 2.0)
    assert training.seen[-1].tokens_per_second == pytest.approx(50)
    assert training.seen[-1].bytes_per_second == pytest.approx(1.5e9)
    for _ in range(8):
        training.step(2.0)
    assert training.seen[-1].seconds_left == 0.0


def test_the_estimate_is_made_of_warm_steps_and_checks() -> None:
    training = Training(10, eval_steps=5)
    training.check(4.0, 3.0)
    for _ in range(3):
        training.step(6.0)
    assert training.said == []
    training.step(6.0)
    # Six steps of 6 s, 1 GB and 2 GB; two checks of 4 s, and 0.1 GB each way.
    assert training.said == [
        "estimate: 6 more steps in about 44 seconds, 6.2 GB up and 12.2 GB down, from 3 measured steps"
    ]
    training.step(6.0)
    assert len(training.said) == 1


def test_a_short_training_needs_no_estimate() -> None:
    training = Training(4)
    for _ in range(4):
        training.step(1.0)
    assert training.said == []


def test_losses_are_means_and_the_held_out_loss_is_the_last_one() -> None:
    training = Training(4, every=2, eval_steps=2)
    training.check(1.0, 5.0)
    for loss in (4.0, 2.0):
        training.step(1.0, loss)
    training.check(1.0, 3.5)
    assert [each.loss for each in training.seen if each.loss is not None] == [4.0, 3.0]
    assert training.seen[0].held_out == 5.0
    assert training.seen[-1].held_out == 3.5


@pytest.mark.parametrize(
    ("values", "bars"),
    [([3.0, 2.0, 1.0], "█▅▁"), ([1.0, 1.0], "▁▁"), ([4.0, 4.0, 0.0, 0.0], "█▁")],
)
def test_plotted_losses(values: list[float], bars: str) -> None:
    assert plotted(values, width=2 if len(values) == 4 else 50) == bars
