"""transformers' own Trainer, as a fine-tuning uses it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME

from shared.errors import ConfigurationError, OptionText, SymbiosisError
from tenant_sdk.storage import disk_errors
from tenant_sdk.tuning.checkpoints import checkpoint_after, step_of
from tenant_sdk.tuning.conversations import Example
from tenant_sdk.tuning.data import Collate, collate, collate_packed
from tenant_sdk.tuning.options import TrainingOptions
from tenant_sdk.tuning.progress import last_loss
from tenant_sdk.tuning.resuming import ExactResume

LOSSES = 50  # that a training shows, each the mean over as many steps


@dataclass(frozen=True)
class TrainingRun:
    """What a training does, beside its options.

    Attributes:
        steps: of the optimizer.
        eval_steps: after so many steps ``measure`` is called; 0: never.
        measure: the held-out loss, in nats per token; called with the step and the number of steps.
        folder: for checkpoints.
        resume_from: the checkpoint to go on from; None: there is none.
    """

    steps: int
    learning_rate: float
    eval_steps: int
    measure: Callable[[int, int], float]
    folder: Path
    resume_from: Path | None


@dataclass(frozen=True)
class TrainingEnd:
    """How a training ended: its last step, the step that the adapter is of, the first and the last loss."""

    step: int
    best: int | None
    first_loss: float
    last_loss: float


def collator(training: TrainingOptions) -> Collate:
    """What makes a batch of examples."""
    return collate_packed if training.packing else collate


def train(
    training: TrainingOptions,
    run: TrainingRun,
    model: Any,
    examples: Sequence[Example],
    progress: TrainerCallback,
) -> TrainingEnd:
    """Run the Trainer on a model with an adapter.

    Raises:
        ConfigurationError: the checkpoint to go on from is damaged.
        StorageError: a checkpoint cannot be written.
    """
    unsaved_steps, resume_from = _UnsavedSteps(), run.resume_from
    callbacks = [ExactResume(), unsaved_steps, progress]
    if training.method == "adalora":
        callbacks.append(_AdaLora())
    if training.early_stopping:
        callbacks.append(EarlyStoppingCallback(training.early_stopping))
    trainer = _Trainer(
        run,
        model=model,
        args=_arguments(training, run),
        train_dataset=list(examples),
        eval_dataset=[] if run.eval_steps else None,
        data_collator=collator(training),
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    resume = OptionText(
        "Then run the same training with {resume}: it goes on from the last whole checkpoint.", resume=True
    )
    with disk_errors(run.folder, "a checkpoint", resume):
        try:
            if resume_from and step_of(resume_from) == run.steps:
                # The Trainer would do another step.
                trainer.state = TrainerState.load_from_json(str(resume_from / TRAINER_STATE_NAME))
                best = trainer.state.best_global_step if training.early_stopping else None
                folder = checkpoint_after(run.folder, best) if best else resume_from
                model.load_adapter(str(folder), "default")
            else:
                trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        except (KeyboardInterrupt, SymbiosisError):
            # So that nothing is lost when the training is resumed. If a measurement decides how it goes on,
            # the steps before it are done again.
            if unsaved_steps.unsaved and not (training.early_stopping and trainer.measuring):
                unsaved_steps.restore_random_state()
                trainer._save_checkpoint(model, trial=None)
            raise
        except Exception as error:
            if resume_from is None or unsaved_steps.begun:
                raise
            # torch and the Trainer have many errors for a damaged file.
            raise ConfigurationError(
                "cannot go on from {}: {}; remove it and leave out {resume}", str(resume_from), str(error)
            ) from error
    history, best = trainer.state.log_history, trainer.state.best_global_step
    return TrainingEnd(
        trainer.state.global_step,
        best if training.early_stopping else None,
        last_loss(history[:1], 1),
        last_loss(history, shown_losses(run.steps)),
    )


def shown_losses(steps: int) -> int:
    """Of how many steps a loss is the mean."""
    return max(1, steps // LOSSES)


def _arguments(training: TrainingOptions, run: TrainingRun) -> TrainingArguments:
    warmup = training.warmup_steps
    best = training.early_stopping is not None
    # The Trainer saves the best model only where it measures.
    save_steps = run.eval_steps if best else training.save_steps
    return TrainingArguments(
        output_dir=str(run.folder),
        max_steps=run.steps,
        per_device_train_batch_size=training.batch_size,
        gradient_accumulation_steps=training.gradient_accumulation,
        learning_rate=run.learning_rate,
        lr_scheduler_type="constant_with_warmup" if training.schedule == "constant" else training.schedule,
        warmup_steps=min(10, run.steps // 10) if warmup is None else warmup,
        weight_decay=training.weight_decay,
        seed=training.seed,
        logging_steps=1,  # a mean over several would begin anew when a training is resumed
        eval_strategy="steps" if run.eval_steps else "no",
        eval_steps=run.eval_steps or None,
        save_strategy="steps",
        save_steps=save_steps,
        save_total_limit=1,
        load_best_model_at_end=best,
        metric_for_best_model="eval_loss" if best else None,
        restore_callback_states_from_checkpoint=best,
        report_to=list(training.report_to) or "none",
        include_num_input_tokens_seen="non_padding",
        label_names=["labels"],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


class _Trainer(Trainer):
    """Measures the held-out loss by learned token; the Trainer's own is a mean over batches."""

    def __init__(self, run: TrainingRun, **options: Any) -> None:
        super().__init__(**options)
        self._run, self.measuring = run, False

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See Trainer."""
        self.measuring = True
        metrics = {"eval_loss": self._run.measure(self.state.global_step, self.state.max_steps)}
        self.measuring = False
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class _AdaLora(TrainerCallback):
    """AdaLoRA moves rank between layers after each step, if the training loop asks for it."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].base_model.update_and_allocate(state.global_step)


class _UnsavedSteps(TrainerCallback):
    """Whether the parameters are those of a whole number of steps that no checkpoint has.

    Attributes:
        begun: a step has, so that a checkpoint to resume from is loaded.
    """

    begun = unsaved = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun = True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.unsaved = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:  # a checkpoint holds the losses, too
            self.unsaved = True
            cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
            self._random_state = random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.unsaved = False

    def restore_random_state(self) -> None:
        """Take back what was drawn since, for a step that was not done: it is drawn again."""
        python, numpy, cpu, cuda = self._random_state
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state_all(cuda)
