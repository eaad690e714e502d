"""Trainings that are interrupted and go on: the adapter and the losses are those of an uninterrupted one.

To the bit: on the ring an executor's answers are exact, and everything else is computed here, in one thread.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from conftest import RING, Executor
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_peft_methods import wrap
from test_trainer import losses, trainer
from trainings import options, records, train
from transformers import TrainerCallback

import tenant_sdk
from shared.errors import ConfigurationError, SymbiosisError
from tenant_sdk.sequences.planning import MemoryPlan
from tenant_sdk.tuning.adapters import METHODS
from tenant_sdk.tuning.finetuning import TrainingReport
from tenant_sdk.tuning.options import TrainingOptions

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "tenants.md"
STEPS = 12  # two epochs
Stopped = Callable[..., tuple[TrainingOptions, Path]]


@pytest.fixture(scope="module")
def executor(serve: Callable[..., Executor], checkpoint: Callable[[str], Path]) -> Executor:
    return serve(checkpoint("llama"), numerics=RING)


@pytest.fixture(scope="module")
def session(executor: Executor) -> Iterator[tenant_sdk.Session]:
    with executor.connect() as opened:
        yield opened


class Dropping:
    """A session whose models drop some of their attention, so that a step depends on random numbers."""

    def __init__(self, session: tenant_sdk.Session) -> None:
        self._session = session
        self.model: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def load_model(self, **options: Any) -> Any:
        self.model = self._session.load_model(**options)
        for module in self.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1
        return self.model


class Interruption:
    """Ends a training once: after a step, in the middle of the next one, or as a crash does in that."""

    def __init__(self, how: str, step: int) -> None:
        self.how, self.step, self.done = how, step, 0

    def show(self, now: Any) -> None:
        """Called with each step that is done."""
        self.done = now.step
        if self.how == "after" and now.step == self.step:
            raise KeyboardInterrupt

    def watch(self, model: Any) -> None:
        model.get_submodule("model.layers.1").register_forward_pre_hook(lambda *_: self.forward(model))

    def forward(self, model: Any) -> None:
        if self.how != "after" and self.done == self.step and model.training:
            raise KeyboardInterrupt if self.how == "within" else RuntimeError("a crash")


class Watched(Dropping):
    """Its next model is interrupted."""

    def __init__(self, session: tenant_sdk.Session, interruption: Interruption) -> None:
        super().__init__(session)
        self._interruption = interruption

    def load_model(self, **options: Any) -> Any:
        model = super().load_model(**options)
        self._interruption.watch(model)
        return model


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def figures(report: TrainingReport) -> dict[str, Any]:
    return {
        name: value
        for name, value in dataclasses.asdict(report).items()
        if name not in ("seconds", "resumed_at")
    }


def interrupt_and_resume(
    session: tenant_sdk.Session, training: TrainingOptions, interruption: Interruption
) -> None:
    """Compare with a training that goes through."""
    print(f"interrupted {interruption.how} step {interruption.step}")
    whole = dataclasses.replace(training, output=training.output.with_name("whole"))
    expected, _ = train(Dropping(session), whole)  # type: ignore[arg-type]
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        train(Watched(session, interruption), training, interruption.show)  # type: ignore[arg-type]
    resumed = dataclasses.replace(training, resume=True)
    report, _ = train(Dropping(session), resumed)  # type: ignore[arg-type]
    if interruption.how == "crash":
        assert report.resumed_at == interruption.step // training.save_steps * training.save_steps
    else:
        assert report.resumed_at == interruption.step
    same(tensors(training.output), tensors(whole.output))
    assert figures(report) == figures(expected)


def drawn(name: str, most: int = STEPS - 1) -> Interruption:
    """Other steps and ways for each test, the same in every run."""
    chance = random.Random(name)
    return Interruption(chance.choice(["after", "within", "crash"]), chance.randint(3, most))


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str, session: tenant_sdk.Session, text: Path) -> None:
    training = options(
        text, "resumed", method=method, steps=STEPS, batch_size=4, save_steps=3, held_out=(text,)
    )
    interrupt_and_resume(session, training, drawn(method))


# Ranks are given up from step 3 on, and fixed in step 9.
@pytest.mark.parametrize(("how", "step"), [("after", 7), ("crash", 7), ("within", 9)])
def test_adalora_after_ranks_were_reduced(
    how: str, step: int, session: tenant_sdk.Session, text: Path
) -> None:
    training = options(text, "resumed", method="adalora", steps=STEPS, batch_size=4, save_steps=3)
    interrupt_and_resume(session, training, Interruption(how, step))
    config = peft.PeftConfig.from_pretrained(str(training.output))
    assert 0 < sum(map(sum, config.rank_pattern.values())) < 3 * 14


@pytest.mark.parametrize(("how", "step"), [("within", 6), ("after", 8)])
def test_at_the_end_of_an_epoch_and_of_all(
    how: str, step: int, session: tenant_sdk.Session, text: Path
) -> None:
    """A new epoch draws random numbers before its first step."""
    training = options(text, "resumed", steps=8, batch_size=4, save_steps=50)
    interrupt_and_resume(session, training, Interruption(how, step))


def test_the_last_loss_is_a_mean_over_steps_before_and_after(
    session: tenant_sdk.Session, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenant_sdk.tuning.trainer.LOSSES", 2)  # of six steps: the mean of three
    training = options(text, "resumed", steps=6, save_steps=50)
    interrupt_and_resume(session, training, Interruption("within", 5))


@pytest.mark.parametrize("window", [None, 8])
def test_packed_records_and_windows(
    window: int | None, session: tenant_sdk.Session, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if window:
        plan = MemoryPlan(chunked_loss=True, window=window)
        monkeypatch.setattr("tenant_sdk.tuning.long_sequences.plan_step", lambda *_, **__: plan)
    training = options(
        records(text.parent, 8),
        "resumed",
        steps=6,
        sequence_length=64,
        packing=window is None,
        memory_gib=window and 1000,
    )
    interrupt_and_resume(session, training, drawn(f"{window}", 5))


# -- what cannot be resumed -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(session: tenant_sdk.Session, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """A copy of a training that goes on from step 3, and of its checkpoint; one of each method was made."""
    made: dict[str, Path] = {}

    def copy(text: Path, method: str = "lora") -> tuple[TrainingOptions, Path]:
        training = options(text, "adapter", method=method)
        folder = text.parent / "adapter.checkpoints"
        if method not in made:
            with pytest.raises(KeyboardInterrupt):
                train(session, training, Interruption("after", 3).show)
            made[method] = tmp_path_factory.mktemp(method) / "checkpoints"
            folder.rename(made[method])
        shutil.copytree(made[method], folder)
        return dataclasses.replace(training, resume=True), folder / "checkpoint-3"

    return copy


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def header(file: Path, **other: Any) -> None:
    """Write the file again with another header."""
    with safe_open(file, framework="pt") as stored:
        said = json.loads(stored.metadata()["state"])
    save_file(load_file(file), file, metadata={"state": json.dumps(said | other)})


def narrow(file: Path) -> None:
    with safe_open(file, framework="pt") as stored:
        said = stored.metadata()
    save_file({name: tensor[:1].clone() for name, tensor in load_file(file).items()}, file, metadata=said)


DAMAGED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "cut": ("training_state.safetensors", cut, r"training_state.safetensors cannot be read: "),
    "no tensors": ("training_state.safetensors", lambda file: file.write_bytes(b"{}"), "cannot be read: "),
    "absent": ("training_state.safetensors", Path.unlink, "holds no training_state.safetensors"),
    "another format": ("training_state.safetensors", lambda file: header(file, format=9), "format 9"),
    "word": ("training_state.safetensors", lambda file: header(file, more=1), "more"),
    "step": ("training_state.safetensors", lambda file: header(file, step=2), "at step 2.* at step 3"),
    "shapes": ("training_state.safetensors", narrow, r"lora_A.* is \[1, \d+\] there and \[2, \d+\] here"),
    "ranks": (
        "training_state.safetensors",
        lambda file: header(file, rank_patterns={"default": {"x": [True]}}),
        "ranks",
    ),
    "no optimizer": ("optimizer.pt", Path.unlink, "optimizer.pt is missing"),
    "no schedule": ("scheduler.pt", Path.unlink, "scheduler.pt is missing"),
    "no random numbers": ("rng_state.pth", Path.unlink, "rng_state.* is missing"),
    "optimizer": ("optimizer.pt", cut, "cannot go on from .*checkpoint-3: "),
    "random numbers": ("rng_state.pth", cut, "cannot go on from .*checkpoint-3: "),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_checkpoints_are_refused_in_a_sentence(
    kind: str, session: tenant_sdk.Session, text: Path, stopped: Stopped
) -> None:
    """And nobody is told to resume once more."""
    again, checkpoint = stopped(text, "adalora" if kind == "ranks" else "lora")
    name, damage, message = DAMAGED[kind]
    damage(checkpoint / name)
    before = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    with pytest.raises(ConfigurationError, match=message) as caught:
        train(session, again)
    assert "remove" in str(caught.value)
    assert not hasattr(caught.value, "__notes__")
    assert {file.name: file.read_bytes() for file in checkpoint.iterdir()} == before
    assert not again.output.exists()


def test_another_trainers_state_is_no_whole_checkpoint(
    session: tenant_sdk.Session, text: Path, stopped: Stopped
) -> None:
    again, checkpoint = stopped(text)
    (checkpoint / "trainer_state.json").write_text("{}")
    report, said = train(session, again)
    assert report.resumed_at == 0
    assert any("no whole checkpoint" in line for line in said)


def test_a_checkpoint_that_is_half_written_is_not_taken(
    session: tenant_sdk.Session, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, training = transformers.Trainer._save_rng_state, options(text, "adapter")

    def stop(self: Any, folder: str) -> None:
        if self.state.global_step == 4:
            raise RuntimeError("a crash")
        save(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr("transformers.Trainer._save_rng_state", stop)
        with pytest.raises(RuntimeError) as ended:
            train(session, training)
    folder = text.parent / "adapter.checkpoints"
    assert (folder / "checkpoint-4" / "training_state.safetensors").is_file()
    assert ended.value.__notes__[0].startswith("step 2 is kept")
    assert train(session, dataclasses.replace(training, resume=True))[0].resumed_at == 2


def test_damaged_settings(session: tenant_sdk.Session, text: Path, stopped: Stopped) -> None:
    again, checkpoint = stopped(text)
    (checkpoint.parent / "settings.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"settings.json cannot be read; remove"):
        train(session, again)


def test_a_resumed_training_that_ends_says_how_it_goes_on(
    session: tenant_sdk.Session, text: Path, stopped: Stopped
) -> None:
    again, checkpoint = stopped(text)
    error = SymbiosisError("gone")

    def stop(now: Any) -> None:
        raise error

    with pytest.raises(SymbiosisError):
        train(session, again, stop)
    note = f"step 4 is kept in {checkpoint.parent}; to go on from it, run the same training again"
    assert error.__notes__ == [note]
    assert train(session, again)[0].resumed_at == 4


def test_an_interruption_before_the_first_step_leaves_the_checkpoint_alone(
    session: tenant_sdk.Session, text: Path, stopped: Stopped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the Trainer loads it, the model, the optimizer and random numbers are partly a new training's."""
    again, checkpoint = stopped(text)
    before = {file.name: file.read_bytes() for file in checkpoint.iterdir()}

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("transformers.Trainer._load_optimizer_and_scheduler", stop)
        with pytest.raises(KeyboardInterrupt):
            train(session, again)
    assert {file.name: file.read_bytes() for file in checkpoint.iterdir()} == before


# -- a Trainer of one's own -----------------------------------------------------------------------


class Allocation(TrainerCallback):
    """AdaLoRA is told of each step by the training loop."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if isinstance(kwargs["model"].base_model, peft.AdaLoraModel):
            kwargs["model"].base_model.update_and_allocate(state.global_step)


class Stop(TrainerCallback):
    """At the end of a step, a checkpoint of which is not made."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise KeyboardInterrupt


OWN = {"max_steps": 8, "save_strategy": "steps", "save_steps": 3, "eval_steps": 3, "learning_rate": 1e-2}


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}


def adapted(session: tenant_sdk.Session, method: str) -> Any:
    model = wrap(Dropping(session).load_model(progress=False), method)
    # PEFT's files do not have it: neither an adapter nor asked to be saved.
    model.get_base_model().model.norm.requires_grad_(True)
    return model


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.filterwarnings("ignore:Adapter 'default'.* have invalid shape")  # AdaLoRA gives a layer no rank
@pytest.mark.parametrize(
    "method",
    ["lora-dropout", "lora-head", "adalora", "ia3-member", "vera", "oft", "prefix-projection", "p-tuning"],
)
def test_a_trainer_of_ones_own(method: str, executor: Executor, tmp_path: Path) -> None:
    """Each in a session of its own, as in a process of its own."""

    def run(folder: str, *more: TrainerCallback, resume: Path | None = None) -> Any:
        callbacks = (tenant_sdk.ExactResume(), Allocation(), *more)
        with executor.connect() as session:
            made = trainer(adapted(session, method), tmp_path / folder, *callbacks, **OWN)
            made.train(resume_from_checkpoint=resume and str(resume))
        return made

    whole = run("whole")
    step = random.Random(method).randint(4, 8)
    print(f"stopped in step {step}")
    with pytest.raises(KeyboardInterrupt):
        run("stopped", Stop(step))
    moved = tmp_path / "elsewhere"
    (tmp_path / "stopped" / f"checkpoint-{(step - 1) // 3 * 3}").rename(moved)
    resumed = run("resumed", resume=moved)
    same(parameters(resumed.model), parameters(whole.model))
    assert losses(resumed) == losses(whole)


@pytest.mark.filterwarnings("ignore:Adapter 'default'.* have invalid shape")
@pytest.mark.parametrize("method", ["adalora", "p-tuning"])
def test_the_best_model_is_loaded_at_the_end(
    method: str, session: tenant_sdk.Session, tmp_path: Path
) -> None:
    seen: dict[int, dict[str, torch.Tensor]] = {}

    class Note(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen[state.global_step] = parameters(kwargs["model"])

    best = OWN | {"load_best_model_at_end": True, "learning_rate": 1.0}
    callbacks = (tenant_sdk.ExactResume(), Allocation(), Note())
    run = trainer(adapted(session, method), tmp_path, *callbacks, **best)
    run.train()
    same(parameters(run.model), seen[run.state.best_global_step])


def test_the_example_of_the_document(session: tenant_sdk.Session, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n([^`]*ExactResume[^`]*)```", DOCUMENT.read_text())
    before: list[float] = []
    for steps in (6, 8):  # the second goes on where the first has ended
        model = adapted(session, "p-tuning")
        ready = trainer(model, tmp_path, **OWN)
        names = {
            "tenant_sdk": tenant_sdk,
            "transformers": transformers,
            "Trainer": transformers.Trainer,
            "model": model,
            "arguments": ready.args,
            "collator": ready.data_collator,
            "examples": ready.train_dataset,
        }
        ready.args.eval_strategy, ready.args.max_steps = "no", steps
        exec(code, names)
        assert names["trainer"].state.global_step == steps
        assert losses(names["trainer"])["loss"][: len(before)] == before
        before = losses(names["trainer"])["loss"]


def test_what_it_does_not_do(session: tenant_sdk.Session, tmp_path: Path) -> None:
    def run(model: Any, *callbacks: TrainerCallback) -> Any:
        return trainer(model, tmp_path / "run", *callbacks, **OWN)

    exact = tenant_sdk.ExactResume
    with pytest.raises(ConfigurationError, match="has no adapter"):
        run(session.load_model(progress=False), exact())
    random_lora = peft.LoraConfig(target_modules=["q_proj"], velora_config=peft.VeloraConfig())
    with pytest.raises(ConfigurationError, match="velora_config"):
        run(peft.get_peft_model(session.load_model(progress=False), random_lora), exact())
    late = run(adapted(session, "lora"))
    late.add_callback(exact())
    with pytest.raises(ConfigurationError, match="callbacks="):
        late.train()
    run(adapted(session, "lora")).train()
    with pytest.raises(ConfigurationError, match=r"checkpoint-8 holds no training_state"):
        run(adapted(session, "lora"), exact()).train(resume_from_checkpoint=True)
