"""Fine-tuning on files: what `symbiosis-tenant finetune` does, with an unmodified Trainer."""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from transformers.trainer import TRAINER_STATE_NAME

from shared.errors import Argument, ConfigurationError, Message, Placeholder, StorageError, SymbiosisError
from tenant_sdk.model.naming import base_of
from tenant_sdk.sequences.stack import NotInParts
from tenant_sdk.session.session import Session
from tenant_sdk.storage import (
    TrainingCheckpoints,
    check_new_folder,
    disk_errors,
    free_megabytes,
    whole_folder,
)
from tenant_sdk.tuning.adapters import AdapterOptions, add_adapter, find_method, other_ranks
from tenant_sdk.tuning.conversations import Day, Example
from tenant_sdk.tuning.data import Collate, Reader, Say, collate, collate_packed, trained_tokens
from tenant_sdk.tuning.folders import save_adapter
from tenant_sdk.tuning.long_sequences import long_tuning
from tenant_sdk.tuning.options import TrainingOptions
from tenant_sdk.tuning.progress import Progress, TrainingStep, estimate, last_loss
from tenant_sdk.tuning.resuming import ExactResume, state_bytes
from tenant_sdk.tuning.sampling import ends_of
from tenant_sdk.tuning.trackers import check_trackers, keep_from_git, where_reports_go

_FEW = 32  # tokens that show how a model attends
_NO_BASE = Message(
    "the adapter's card does not say where its base is found; {base} would have it said",
    base=Placeholder("FOLDER|hub:NAME[@REVISION]"),
)
_LOSSES = 50  # that a training shows, each the mean over as many steps


def check_reports(names: Sequence[str]) -> None:
    """Refuse what the Trainer cannot report to.

    Raises:
        ConfigurationError: it knows no such thing, or its package is not installed.
    """
    for name in names:
        given = Argument("report_to", name)
        if name not in INTEGRATION_TO_CALLBACK:
            raise ConfigurationError("{} must be one of {}", given, ", ".join(INTEGRATION_TO_CALLBACK))
        # Before its package is imported, which looks for its files.
        check_trackers([name])
        keep_from_git([name])
        if name not in get_available_reporting_integrations():
            raise ConfigurationError(
                "{} needs its package, which is not installed: `pip install {}`", given, name
            )


@dataclass(frozen=True)
class Told:
    """How a training tells its user of itself.

    Args:
        say: called with a line; of the data's text it may name single characters, no more.
        show: called after every step, and with every loss.
        preview: called with the first example before anything is trained.
    """

    say: Say
    show: Callable[[TrainingStep], None]
    preview: Callable[[Example], None] = lambda _: None


@dataclass(frozen=True)
class TrainingReport:
    """Result: losses in nats per token, of the first step and of the last fiftieth of them, and perplexities.

    ``seconds`` are those since ``resumed_at``, the number of steps that a training before it had done.
    """

    steps: int
    seconds: float
    resumed_at: int
    trained_parameters: int
    first_loss: float
    last_loss: float
    perplexity_before: float | None
    perplexity_after: float | None


@torch.no_grad()
def perplexity(model: Any, examples: Sequence[Example], batch_size: int) -> float:
    """``exp`` of the mean negative log-likelihood per learned token of held-out examples."""
    was_training = model.training
    model.eval()
    nats, predicted = 0.0, 0
    # Neighbours in length: less padding.
    ordered = sorted(examples, key=lambda example: len(example["input_ids"]))
    for at in range(0, len(ordered), batch_size):
        batch = ordered[at : at + batch_size]
        count = sum(map(trained_tokens, batch))
        inputs = {name: tensor.to(model.device) for name, tensor in collate(batch).items()}
        nats += float(model(**inputs).loss) * count
        predicted += count
    model.train(was_training)
    return math.exp(nats / predicted)


@torch.no_grad()
def check_packing(model: Any, examples: Sequence[Example]) -> None:
    """Let an example through the model twice, packed behind a longer and behind a shorter one.

    Raises:
        ConfigurationError: what the model says of it differs: it sees what is before it.
    """
    first, last = ({name: ids[:_FEW] for name, ids in each.items()} for each in (examples[0], examples[-1]))
    shorter = {name: ids[: len(ids) // 2] for name, ids in first.items()}
    was_training = model.training
    model.eval()
    one, other = (
        model(**{name: tensor.to(model.device) for name, tensor in collate_packed([before, last]).items()})
        .logits[0, -len(last["input_ids"]) :]
        .float()
        for before in (first, shorter)
    )
    model.train(was_training)
    if (one - other).norm() > 1e-3 * one.norm():  # floats are summed in another order, and rounded again
        raise ConfigurationError(
            Message(
                "with this model packed records would see each other: its layers do not keep apart what "
                "`position_ids` does. Leave out {packing}"
            )
        )


class _AdaLora(TrainerCallback):
    """AdaLoRA moves rank between layers after each step, if the training loop asks for it."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].base_model.update_and_allocate(state.global_step)


class _Between(TrainerCallback):
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
            self._drawn = random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.unsaved = False

    def forget_draws(self) -> None:
        """Take back what was drawn since, for a step that was not done: it is drawn again."""
        python, numpy, cpu, cuda = self._drawn
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state_all(cuda)


def finetune(
    training: TrainingOptions,
    model: Any,
    tokenizer: Any,
    session: Session,
    told: Told,
    *,
    keep_tokenizer: bool = False,
    today: Callable[[], date] = date.today,
) -> TrainingReport:
    """Train an adapter on files and save it as a standard PEFT folder.

    Args:
        model: from ``session.load_model()``, or attached; gets the adapter, in place.
        session: of the model; a training is not resumed on another base.
        keep_tokenizer: it is another than the base's; save it beside the adapter.
        today: the day that chat templates may write, unless a training that is resumed has one.

    Raises:
        ConfigurationError: an option does not fit the text, the model or the output folder.
        StorageError: the disk is full or not writable; no half-written adapter is left.
    """
    check_reports(training.report_to)
    say, output = told.say, check_new_folder(training.output)
    day = Day(_started(output, training.resume) or today())
    method = find_method(training.method)
    length = _sequence_length(training, model, training.virtual_tokens if method.prompt_like else 0)
    examples, held_out = _read(training, model, tokenizer, length, day, say)
    told.preview(examples[0])
    steps = training.steps or max(
        1, math.ceil(training.epochs * math.ceil(len(examples) / training.batch_size))
    )
    learning_rate = training.learning_rate or method.learning_rate
    size = min(training.batch_size, len(examples))
    say(f"{steps} steps of {size} out of {len(examples)} examples, learning rate {learning_rate:g}")
    for line in where_reports_go(training.report_to):
        say(line)

    model = _with_adapter(training, model, examples, steps)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(f"{training.method} adapter with {trained:,} trained parameters{other_ranks(model)}")
    _check_space(output, state_bytes(model))
    _fit(training, model, max(len(example["input_ids"]) for example in [*examples, *held_out]), say)

    settings = _settings(training, examples, day) | {"steps": steps, "learning_rate": learning_rate}
    settings |= {"sequence_length": length, "base_model": session.manifest.digest[:16]}
    checkpoints = TrainingCheckpoints(output, settings)
    resume_from = checkpoints.begin(resume=training.resume)
    if training.resume and resume_from is None:
        say(f"there is no whole checkpoint in {checkpoints.folder}: the training begins with its first step")

    with checkpoints.resumable():
        before = None
        if held_out:
            with model.disable_adapter():
                before = perplexity(model, held_out, training.batch_size)
            say(f"held-out perplexity before: {before:.2f}")
        done = int(resume_from.name.rpartition("-")[2]) if resume_from else 0
        if done < steps:
            planned = training.batch_size, steps - done, training.seed
            say(estimate(model, examples, *planned, lambda: session.stats, _collate(training)))
        started = time.perf_counter()
        losses = _train(training, model, examples, steps, learning_rate, checkpoints, resume_from, told.show)
        seconds = time.perf_counter() - started
        after = None
        if held_out:
            after = perplexity(model, held_out, training.batch_size)
            say(f"held-out perplexity after: {after:.2f}")
        tokens = sum(len(example["input_ids"]) for example in examples)
        report = TrainingReport(steps, seconds, done, trained, *losses, before, after)
        figures = _figures(training, settings, tokens, report)
        _save(output, model, session, figures, tokenizer if keep_tokenizer else None)
    checkpoints.remove()
    if not base_of(model).name:
        say(_NO_BASE)
    return report


def _save(output: Path, model: Any, session: Session, figures: dict[str, Any], tokenizer: Any) -> None:
    """Make the adapter's folder; a tokenizer goes there unless it is None."""
    resume = Message(
        "Then run the same training with {resume}: the trained adapter is in the last checkpoint.",
        resume=True,
    )
    with disk_errors(output, "the adapter", resume), whole_folder(output) as folder:
        save_adapter(model, folder, session, training=figures, tokenizer=tokenizer)


def _started(output: Path, resume: bool) -> date | None:
    """The day of the training that is resumed, if its chat template writes it."""
    kept = TrainingCheckpoints(output, {}).kept("day") if resume else None
    try:
        return date.fromisoformat(kept) if isinstance(kept, str) else None
    except ValueError:
        return None


def _read(
    training: TrainingOptions, model: Any, tokenizer: Any, length: int, day: Day, say: Say
) -> tuple[list[Example], list[Example]]:
    """The examples to learn from, and those that are held out, of so many tokens at most."""
    if length < training.sequence_length:
        say(
            Message(
                "{sequence_length} is cut to {}: the model's context has no room for more",
                length,
                sequence_length=training.sequence_length,
            )
        )
    reader = Reader(
        tokenizer,
        length,
        training.train_on_prompt,
        ends=ends_of(model.generation_config, tokenizer),
        embeddings=model.get_input_embeddings().weight.shape[0],
        say=say,
        day=day,
    )
    examples = reader.read(training.data)
    if day.written:
        say(f"the chat template writes the date: {day.day} in each record, and at inference that of the day")
    return examples, replace(reader, keep_tail=True, day=Day(day.day)).read(training.held_out)


def _with_adapter(training: TrainingOptions, model: Any, examples: Sequence[Example], steps: int) -> Any:
    """The model with a fresh adapter."""
    set_seed(training.seed)
    model = add_adapter(
        model,
        AdapterOptions(
            training.method, training.rank, training.targets, training.virtual_tokens, steps, training.seed
        ),
    )
    if training.packing:
        model.config.use_cache = False
        check_packing(model, examples)
    return model


def _settings(training: TrainingOptions, examples: Sequence[Example], day: Day) -> dict[str, Any]:
    """What must be the same if the training is resumed."""
    settings = asdict(training)
    other = ("output", "held_out", "resume", "epochs", "save_steps", "report_to", "memory_gib", "base")
    for name in (*other, "target_modules"):
        del settings[name]
    settings["targets"] = list(training.targets)
    if day.written:
        settings["day"] = str(day.day)
    settings["data"] = hashlib.sha256(repr(examples).encode()).hexdigest()[:16]
    return settings


def _figures(
    training: TrainingOptions, settings: Mapping[str, Any], tokens: int, report: TrainingReport
) -> dict[str, Any]:
    """What the adapter's folder says of its training: nothing of the text but its length."""
    method, chosen = find_method(training.method), dict(settings)
    chosen.pop("day", None)
    for name in ("data", "base_model", *(() if method.low_rank else ("rank", "targets"))):
        del chosen[name]
    if not method.prompt_like:
        del chosen["virtual_tokens"]
    figures = chosen | {"tokens": tokens} | asdict(report)
    if resumed_at := figures.pop("resumed_at"):
        figures |= {"resumed_at_step": resumed_at, "seconds_since_resumed": figures.pop("seconds")}
    return {name: value for name, value in figures.items() if value is not None}


def _collate(training: TrainingOptions) -> Collate:
    """What makes a batch of examples."""
    return collate_packed if training.packing else collate


def _sequence_length(training: TrainingOptions, model: Any, virtual_tokens: int) -> int:
    limit = getattr(model.config, "max_position_embeddings", None) or training.sequence_length
    length = min(training.sequence_length, limit - virtual_tokens)
    if length < 2:
        raise ConfigurationError(
            "no room for text: the model takes {} positions, {} of them for virtual tokens, and "
            "{sequence_length}",
            limit,
            virtual_tokens,
            sequence_length=training.sequence_length,
        )
    return length


def _fit(training: TrainingOptions, model: Any, longest: int, say: Say) -> None:
    """Have a batch of the longest examples fit into memory; say how, if that takes anything.

    Raises:
        ConfigurationError: it cannot, in the memory that was given.
    """
    batch = 1 if training.packing else training.batch_size
    length = longest * (training.batch_size if training.packing else 1)
    try:
        tuning = long_tuning(
            model, length, batch_size=batch, memory_gib=training.memory_gib, packed=training.packing
        )
    except NotInParts:
        if training.memory_gib is not None:
            raise
        return  # nobody asked for it, and perhaps it is not needed
    if tuning.plan.chunked_loss or training.memory_gib is not None:
        say(tuning.plan.sentence(length, batch))


def _check_space(output: Path, state: int) -> None:
    """Fail before hours of training: two checkpoints (adapter, state, two moments) and the adapter."""
    needed = state * (2 * 4 + 1) / 1e6 + 5
    free = free_megabytes(output.parent)
    if free < needed:
        raise StorageError(
            "only {:.0f} MB are free at {}, the training needs up to {:.0f} MB for checkpoints and the "
            "adapter; free some space or choose another {output}",
            *(free, str(output.parent), needed),
        )


def _train(
    training: TrainingOptions,
    model: Any,
    examples: Sequence[Example],
    steps: int,
    learning_rate: float,
    checkpoints: TrainingCheckpoints,
    resume_from: Path | None,
    show: Callable[[TrainingStep], None],
) -> tuple[float, float]:
    """Run the Trainer; the losses at the start and at the end."""
    shown = max(1, steps // _LOSSES)
    arguments = TrainingArguments(
        output_dir=str(checkpoints.folder),
        max_steps=steps,
        per_device_train_batch_size=training.batch_size,
        learning_rate=learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=min(10, steps // 10),
        seed=training.seed,
        logging_steps=1,  # a mean over several would begin anew when a training is resumed
        save_strategy="steps",
        save_steps=training.save_steps,
        save_total_limit=1,
        report_to=list(training.report_to) or "none",
        include_num_input_tokens_seen="non_padding",
        label_names=["labels"],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    between = _Between()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=list(examples),
        data_collator=_collate(training),
        callbacks=[
            ExactResume(),
            between,
            Progress(show, shown),
            *([_AdaLora()] if training.method == "adalora" else []),
        ],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    resume = Message(
        "Then run the same training with {resume}: it goes on from the last whole checkpoint.", resume=True
    )
    with disk_errors(checkpoints.folder, "a checkpoint", resume):
        try:
            if resume_from and resume_from.name == f"checkpoint-{steps}":  # the Trainer would do another step
                model.load_adapter(str(resume_from), "default")
                trainer.state = TrainerState.load_from_json(str(resume_from / TRAINER_STATE_NAME))
            else:
                trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        except (KeyboardInterrupt, SymbiosisError):
            if between.unsaved:  # so that nothing is lost when the training is resumed
                between.forget_draws()
                trainer._save_checkpoint(model, trial=None)
            raise
        except Exception as error:
            if resume_from is None or between.begun:
                raise
            # torch and the Trainer have many errors for a damaged file.
            raise ConfigurationError(
                "cannot go on from {}: {}; remove it and leave out {resume}", str(resume_from), str(error)
            ) from error
    history = trainer.state.log_history
    return last_loss(history[:1], 1), last_loss(history, shown)
