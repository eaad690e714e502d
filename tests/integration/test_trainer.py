"""An unmodified ``transformers.Trainer`` through an executor: parity, resume, and executors that die."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Executor
from parity import load_local
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import tenant_sdk

STEPS = 50
# Both sides run the same float32 arithmetic in another order; after fifty AdamW steps, whose update
# divides by the gradient's own size, that has grown to less than this.
LOSS_TOLERANCE = 1e-3


class Rows(Dataset):  # type: ignore[type-arg]
    """Repeatable random token rows with some structure to learn."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(3, 100, (count, 1), generator=generator)
        self.ids = (starts + torch.arange(12) * 2) % 125 + 3

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def adapt(model: Any) -> Any:
    torch.manual_seed(11)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def trainer(model: Any, folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    defaults = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 25,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 5,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(str(folder), **{**defaults, **options})
    return Trainer(
        model, arguments, train_dataset=Rows(64, 1), eval_dataset=Rows(8, 2), callbacks=list(callbacks)
    )


def losses(run: Trainer) -> dict[str, list[float]]:
    history = run.state.log_history
    return {key: [entry[key] for entry in history if key in entry] for key in ("loss", "eval_loss")}


@pytest.mark.parametrize("privacy", ["plain", "noise-bank"])
def test_loss_curves_equal_local(
    privacy: str, llama: Executor, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    local = trainer(adapt(load_local(checkpoint("llama"))), tmp_path / "local")
    local.train()
    with llama.connect(privacy=privacy) as session:
        remote = trainer(adapt(session.load_model(progress=False)), tmp_path / "remote")
        remote.train()
    ours, theirs = losses(remote), losses(local)
    assert len(ours["loss"]) == STEPS
    assert len(ours["eval_loss"]) == 2
    for key in ours:
        assert ours[key] == pytest.approx(theirs[key], abs=LOSS_TOLERANCE)
    assert ours["loss"][-1] < ours["loss"][0] - 0.1  # it learned something


class Killer(TrainerCallback):
    """Kills the executor while a request of the given step is in flight."""

    def __init__(self, executor: Executor, at_step: int) -> None:
        self._executor, self._at_step = executor, at_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._at_step:
            threading.Thread(target=self._kill_in_the_middle).start()

    def _kill_in_the_middle(self) -> None:
        assert self._executor.process is not None
        before = self._requests()
        while self._requests() < before + 3:  # the step is in progress
            pass
        self._executor.process.kill()

    def _requests(self) -> float:
        text = urllib.request.urlopen(f"{self._executor.admin_url}/metrics", timeout=800).read().decode()
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith("symbiosis_product_seconds_count")
        )


def test_a_killed_executor_is_an_error_in_time_and_training_resumes(
    serve_process: Callable[..., Executor], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 5, "max_steps": 20, "eval_strategy": "no"}
    whole = trainer(adapt(load_local(checkpoint("llama"))), tmp_path / "whole", **saving)
    whole.train()

    executor = serve_process(checkpoint("llama"))
    killer = Killer(executor, at_step=12)
    with executor.connect(timeout=20.0) as session:
        run = trainer(adapt(session.load_model(progress=False)), tmp_path / "run", killer, **saving)
        with pytest.raises(tenant_sdk.ConnectionLost):  # and not that of the timeout
            run.train()
        with pytest.raises(tenant_sdk.ConnectError):  # and it stays an error, not a hang
            run.model(input_ids=Rows(1, 1).ids)

    executor = serve_process(checkpoint("llama"))
    with executor.connect() as session:
        resumed = trainer(adapt(session.load_model(progress=False)), tmp_path / "run", **saving)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-10"))
    assert losses(resumed)["loss"] == pytest.approx(losses(whole)["loss"], abs=LOSS_TOLERANCE)


def test_adapters_saved_by_trainer_load_elsewhere(
    llama: Executor, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    with llama.connect() as session:
        run = trainer(adapt(session.load_model(progress=False)), tmp_path / "run", max_steps=3)
        run.train()
        run.save_model(str(tmp_path / "adapter"))
        ids = Rows(2, 9).ids
        with torch.no_grad():
            expected = run.model.eval()(input_ids=ids).logits
            local = PeftModel.from_pretrained(load_local(checkpoint("llama")), tmp_path / "adapter")
            # Other orders of the same float32 sums.
            assert torch.allclose(local(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
