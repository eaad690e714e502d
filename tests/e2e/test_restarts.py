"""Executors that are killed and started again while tenants work, who end up with the very same bits."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from commands import BASE_MODEL, TRAIN, ok_here, tenant
from conftest import RING, Executor
from peft import get_peft_model_state_dict
from ring_sessions import ExecutorFactory, one_time
from test_trainer import adapt, trainer
from transformers import TrainerCallback

from provider.serve.tokens import TokenFile

pytest_plugins = ("ring_fixtures",)

SECONDS = 120.0


class RestartableExecutor:
    """An executor in a process that is killed, and started again at the same port meanwhile."""

    def __init__(self, serve_process: Callable[..., Executor], folder: Path) -> None:
        self._start = lambda *options: serve_process(folder, "--numerics", RING, *options)
        self.executor = self._start()
        self._starting: threading.Thread | None = None

    def kill(self) -> None:
        process = self.executor.process
        assert process is not None
        process.kill()
        process.wait()

    def restart(self) -> None:
        """In the background."""

        def start() -> None:
            self.executor = self._start("--port", self.executor.url.rpartition(":")[2])

        self._starting = threading.Thread(target=start)
        self._starting.start()

    def settle(self) -> None:
        """Wait until it is there again, if it is on its way."""
        if self._starting is not None:
            self._starting.join(SECONDS)


class Killing(TrainerCallback):
    """Kills an executor in the middle of each of some steps: ``{step: (victim, backward)}``."""

    def __init__(self, plan: dict[int, tuple[RestartableExecutor, bool]]) -> None:
        self.plan, self.step, self.killed = plan, 0, list[int]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step

    def watch(self, model: Any) -> None:
        block = model.get_submodule("base_model.model.model.layers.1")
        block.register_forward_pre_hook(lambda *_: self.kill(backward=False))
        block.register_full_backward_pre_hook(lambda *_: self.kill(backward=True))

    def kill(self, *, backward: bool) -> None:
        victim, when = self.plan.get(self.step, (None, backward))
        if victim is not None and when == backward and self.step not in self.killed:
            self.killed.append(self.step)
            victim.settle()
            victim.kill()
            victim.restart()


def test_a_training_whose_executors_are_killed_ends_with_the_same_adapter(
    serve_process: Callable[..., Executor],
    executors: ExecutorFactory,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Provider and mask source, in the middle of a forward and of a backward pass."""
    options = {"max_steps": 5, "eval_strategy": "no", "gradient_accumulation_steps": 1}
    adapters, folder = [], checkpoint("llama")
    with one_time(*executors("llama")[:2]) as session:
        run = trainer(adapt(session.load_model(progress=False)), tmp_path / "whole", **options)
        run.train()
        adapters.append(get_peft_model_state_dict(run.model))
    provider, source = (RestartableExecutor(serve_process, folder) for _ in range(2))
    killing = Killing({1: (provider, False), 2: (source, False), 3: (provider, True), 4: (source, True)})
    executors = (provider.executor, source.executor)
    with one_time(*executors, patience=SECONDS, mask_budget_mib=0.0) as session:
        run = trainer(adapt(session.load_model(progress=False)), tmp_path / "run", killing, **options)
        killing.watch(run.model)
        run.train()
        adapters.append(get_peft_model_state_dict(run.model))
        stats = session.stats
    assert killing.killed == [1, 2, 3, 4]
    assert stats.reconnections >= 4
    assert stats.seconds_reconnecting > 1.0  # an executor takes longer to start
    whole, disturbed = adapters
    assert whole.keys() == disturbed.keys()
    assert all(torch.equal(whole[name], disturbed[name]) for name in whole)
    for each in (provider, source):
        each.settle()


# -- the command line -----------------------------------------------------------------------------

MASKS = ("--mask-source", f"local:{BASE_MODEL}")
STEPS = 4


def learning(executor: Executor, output: Path, *more: object) -> tuple[Any, ...]:
    training = ("--steps", STEPS, "--batch-size", 2, "--sequence-length", 24)
    return ("finetune", executor, *MASKS, "--data", TRAIN, "--output", output, *training, *more)


def finetune(executor: Executor, output: Path, *more: object) -> subprocess.Popen[str]:
    return tenant(*learning(executor, output, *more))


def until(stream: IO[str] | None, text: str) -> str:
    """What a process writes until it has written this."""
    assert stream is not None
    read = ""
    for line in stream:
        read += line
        if text in line:
            return read
    pytest.fail(f"it ended without {text!r}:\n{read}")


def rest(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status and what else it writes."""
    assert process.stdout is not None
    assert process.stderr is not None
    with process:  # which closes both
        err, out = process.stderr.read(), process.stdout.read()
    return process.returncode, out, err


def weights(output: Path) -> bytes:
    return (output / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def base(serve: Callable[..., Executor]) -> Executor:
    return serve(BASE_MODEL, numerics=RING)


@pytest.fixture(scope="module")
def undisturbed(base: Executor, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The adapter of a training that nothing happens to."""
    output = tmp_path_factory.mktemp("undisturbed") / "adapter"
    ok_here(*learning(base, output))
    return weights(output)


def test_finetune_and_generate_go_on_after_a_restart(
    serve_process: Callable[..., Executor], base: Executor, undisturbed: bytes, tmp_path: Path
) -> None:
    restartable = RestartableExecutor(serve_process, BASE_MODEL)
    run = finetune(restartable.executor, tmp_path / "adapter")
    until(run.stderr, f"step 2 of {STEPS}")
    restartable.kill()
    said = until(run.stderr, "is unavailable")
    assert "waiting up to 10 minutes" in said
    restartable.restart()
    status, _, err = rest(run)
    assert status == 0, err
    assert err.count("is back after") == 1
    assert weights(tmp_path / "adapter") == undisturbed
    restartable.settle()

    prompt = ("--prompt", "Mon 6 January.", "--max-new-tokens", 80, "--adapter", tmp_path / "adapter")
    expected, _ = ok_here("generate", base, *MASKS, *prompt)
    run = tenant("generate", restartable.executor, *MASKS, *prompt)
    assert run.stdout is not None
    begun = run.stdout.read(1)
    restartable.kill()
    restartable.restart()
    status, out, err = rest(run)
    assert status == 0, err
    assert "is back after" in err
    assert begun + out == expected
    restartable.settle()


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_and_resume_end_with_the_same_adapter(
    ended_by: signal.Signals, base: Executor, undisturbed: bytes, tmp_path: Path
) -> None:
    """In the middle of a step, whichever it is: what was saved is a whole number of steps."""
    output = tmp_path / "adapter"
    run = finetune(base, output)
    until(run.stderr, f"step 2 of {STEPS}")
    run.send_signal(ended_by)
    status, _, err = rest(run)
    assert status == 128 + ended_by
    (step,) = re.findall(
        rf"^interrupted\nstep (\d) is kept in {output}.checkpoints; to go on from it, run the same training "
        "with --resume",
        err,
        re.M,
    )
    assert (output.with_name("adapter.checkpoints") / f"checkpoint-{step}").is_dir()
    assert err.endswith("with --resume\n")  # and nothing goes on
    assert "Traceback" not in err
    assert not output.exists()
    ok_here(*learning(base, output, "--resume"))
    assert weights(output) == undisturbed


def test_an_executor_that_comes_back_and_refuses_the_token(
    serve_process: Callable[..., Executor], tmp_path: Path
) -> None:
    """Waiting would be in vain, and nothing is lost."""
    TokenFile(tmp_path / "others").add("other")
    restartable, output = RestartableExecutor(serve_process, BASE_MODEL), tmp_path / "adapter"
    run = finetune(restartable.executor, output)
    until(run.stderr, f"step 2 of {STEPS}")
    restartable.kill()
    port = restartable.executor.url.rpartition(":")[2]
    serve_process(BASE_MODEL, "--numerics", RING, "--port", port, "--token-file", str(tmp_path / "others"))
    status, _, err = rest(run)
    assert status == 1, err
    error, note = err.splitlines()[-2:]
    assert error.startswith("error: ")
    assert "token" in error
    assert re.match(
        rf"step \d is kept in {output}.checkpoints; to go on from it, run the same training with --resume",
        note,
    )


def test_ctrl_c_while_it_waits_and_patience_that_runs_out(
    serve_process: Callable[..., Executor], base: Executor, undisturbed: bytes, tmp_path: Path
) -> None:
    restartable = RestartableExecutor(serve_process, BASE_MODEL)
    output = tmp_path / "adapter"
    run = finetune(restartable.executor, output)
    until(run.stderr, f"step 2 of {STEPS}")
    restartable.kill()
    until(run.stderr, "is unavailable")
    run.send_signal(signal.SIGINT)
    status, _, err = rest(run)
    assert status != 0
    assert "again and again" not in err  # it did not wait until the end
    assert "run the same training with --resume" in err
    restartable.restart()
    restartable.settle()
    run = finetune(restartable.executor, output, "--resume", "--patience", 2)
    until(run.stderr, f"step 3 of {STEPS}")
    restartable.kill()
    status, _, err = rest(run)
    assert status == 1, err
    assert f"error: {restartable.executor.url} was tried again and again for 2." in err
    assert f"is kept in {output}.checkpoints; to go on from it, run the same training again" in err
    ok_here(*learning(base, output, "--resume"))
    assert weights(output) == undisturbed
