"""What comes before a training: its examples, its steps, the adapter, and a plan of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from shared.errors import ConfigurationError, Metavar, OptionText, StorageError, counted
from tenant_sdk.model.naming import base_of
from tenant_sdk.sequences.positions import rope_stable_length
from tenant_sdk.sequences.stack import CannotSplit
from tenant_sdk.session.session import Session
from tenant_sdk.storage import check_new_folder, free_megabytes
from tenant_sdk.tuning.adapters import (
    AdapterOptions,
    add_adapter,
    default_rate,
    find_method,
    other_ranks_text,
    training_options_of,
)
from tenant_sdk.tuning.conversations import Example, TemplateDate
from tenant_sdk.tuning.data import Notify, Reader, collate_packed, notify_template_day
from tenant_sdk.tuning.folders import load_adapter
from tenant_sdk.tuning.generation import sequence_length
from tenant_sdk.tuning.long_sequences import long_tuning
from tenant_sdk.tuning.options import TrainingOptions
from tenant_sdk.tuning.resume_settings import resume_settings_of, template_day
from tenant_sdk.tuning.resuming import state_bytes
from tenant_sdk.tuning.trackers import check_reports, where_reports_go

_PROBE_TOKENS = 32  # tokens that show how a model attends
_NO_BASE = OptionText(
    "the adapter's files will not say where its base is found. To have it recorded, give {base}, or edit "
    "`base_model_name_or_path` in the adapter's adapter_config.json later",
    base=Metavar("FOLDER|hub:NAME[@REVISION]"),
)
_EVALUATIONS = 5  # of the held-out loss in a training, unless another number is given


@dataclass(frozen=True)
class PreparedTraining:
    """A training that can begin.

    Attributes:
        options: with those of the adapter that is trained further.
        output: the absolute path of the adapter's new folder.
        model: with its adapter.
        examples: to learn from.
        held_out: on which the loss is measured; empty: it is not.
        steps: the schedule of the optimizer and of evaluations.
        resume_settings: what must be the same if the training is resumed.
    """

    options: TrainingOptions
    output: Path
    model: Any
    examples: Sequence[Example]
    held_out: Sequence[Example]
    steps: StepPlan
    resume_settings: Mapping[str, Any]


@dataclass(frozen=True)
class StepPlan:
    """How long a training is.

    Attributes:
        count: steps of the optimizer.
        size: examples of a step; the last step of an epoch has what is left.
        eval_steps: steps between measurements of the held-out loss; 0: it is not measured.
    """

    count: int
    size: int
    learning_rate: float
    eval_steps: int

    @property
    def evaluations(self) -> int:
        """How often the held-out loss is measured; the first time before the training."""
        return 1 + math.ceil(self.count / self.eval_steps) if self.eval_steps else 0


def prepare(
    training: TrainingOptions,
    model: Any,
    tokenizer: Any,
    session: Session,
    *,
    today: Callable[[], date],
    notify: Notify,
    preview: Callable[[Example], None],
) -> PreparedTraining:
    """Read the examples, plan steps and memory, and add the adapter to the model.

    Args:
        notify, preview: see ``TrainingCallbacks``.

    The other arguments and the errors are those of ``finetune``.
    """
    check_reports(training.report_to)
    output = check_new_folder(training.output)
    day = template_day(output, today, resume=training.resume)
    adapter_folder = training.adapter
    if adapter_folder is not None:
        set_seed(training.seed)
        model = load_adapter(model, adapter_folder, session, trainable=True)
        training = replace(training, adapter=None, **training_options_of(model.peft_config["default"]))
    new_tokens = training.virtual_tokens if find_method(training.method).prompt_like else 0
    length = sequence_length(training.sequence_length, model, new_tokens if adapter_folder is None else 0)
    examples, held_out = _read(training, model, tokenizer, length, day, notify)
    preview(examples[0])
    steps = _plan_steps(training, model, len(examples), evaluated=bool(held_out))
    notify(
        f"{counted(steps.count, 'step')} of {steps.size} out of {counted(len(examples), 'example')}, "
        f"learning rate {steps.learning_rate:g}"
    )
    learned = steps.count * count_tokens(examples) / math.ceil(len(examples) / steps.size)
    notify(_traffic(session, learned, steps.evaluations * count_tokens(held_out)))
    for line in where_reports_go(training.report_to):
        notify(line)

    if adapter_folder is None:
        model = _with_new_adapter(training, model, steps.count)
    if training.packing:
        model.config.use_cache = False
        _check_packing(model, examples)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    notify(f"{training.method} adapter with {trained:,} trained parameters{other_ranks_text(model)}")
    if not base_of(model).name:
        notify(_NO_BASE)
    _check_space(output, state_bytes(model))
    _plan_memory(
        training, model, max(len(example["input_ids"]) for example in [*examples, *held_out]), notify
    )

    settings = resume_settings_of(training, examples, held_out, day, adapter_folder)
    settings |= {"steps": steps.count, "learning_rate": steps.learning_rate}
    settings |= {"sequence_length": length, "base_model": session.manifest.digest[:16]}
    return PreparedTraining(training, output, model, examples, held_out, steps, settings)


def count_tokens(examples: Sequence[Example]) -> int:
    """The tokens of examples, learned or not."""
    return sum(len(example["input_ids"]) for example in examples)


def _read(
    training: TrainingOptions, model: Any, tokenizer: Any, length: int, day: TemplateDate, notify: Notify
) -> tuple[list[Example], list[Example]]:
    """The examples to learn from, and those that are held out, of so many tokens at most."""
    if length < training.sequence_length:
        notify(
            OptionText(
                "{sequence_length} is cut to {}: the model's context has no room for more",
                length,
                sequence_length=training.sequence_length,
            )
        )
    reader = Reader.of_model(model, tokenizer, length, training, notify=notify, day=day)
    examples = reader.read(training.data)
    notify_template_day(day, notify)
    held_out = replace(reader, keep_tail=True, day=TemplateDate(day.day)).read(training.held_out)
    lengths, stable_length = [len(example["input_ids"]) for example in examples], rope_stable_length(model)
    if (
        stable_length is not None
        and min(lengths) <= stable_length < max(lengths)
        and (training.batch_size > 1 or training.packing)
    ):
        notify(
            f"this model has other positions for texts above {stable_length:,} tokens: shorter records learn "
            "with these positions if they share a batch with such a text. Train with records of one kind, or "
            "one record at a time"
        )
    known = {tuple(example["input_ids"]) for example in examples}
    if same := sum(tuple(example["input_ids"]) in known for example in held_out):
        notify(
            f"{same} of {len(held_out)} held-out records are learned too: their loss says nothing of others"
        )
    return examples, held_out


def _plan_steps(training: TrainingOptions, model: Any, examples: int, *, evaluated: bool) -> StepPlan:
    size = min(training.batch_size * training.gradient_accumulation, examples)
    steps = training.steps or max(1, math.ceil(training.epochs * math.ceil(examples / size)))
    learning_rate = training.learning_rate or default_rate(find_method(training.method), model)
    eval_steps = training.eval_steps or math.ceil(steps / _EVALUATIONS)
    return StepPlan(steps, size, learning_rate, eval_steps if evaluated else 0)


def _traffic(session: Session, learned: float, measured: int) -> str:
    """What a training will take on the network, before it begins.

    Args:
        learned: tokens of all steps.
        measured: tokens of all measurements of the held-out loss.
    """
    step, evaluation = session.token_bytes(training=True), session.token_bytes(training=False)
    if not any(step):
        return "all frozen layers are kept here: a token takes nothing of the network"
    held_out = f", and {measured:,} of held-out data (without a backward pass)," if measured else ""
    up, down = (learned * step[at] + measured * evaluation[at] for at in range(2))
    return (
        f"a token takes {step.said()}, at most {step.tokens_per_second(1):,.3g} tokens/s at 1 Gbit/s; "
        f"{learned:,.0f} tokens{held_out} take about {up / 1e9:,.3g} GB up and {down / 1e9:,.3g} GB down"
    )


def _with_new_adapter(training: TrainingOptions, model: Any, steps: int) -> Any:
    set_seed(training.seed)
    options = AdapterOptions(
        training.method,
        training.rank,
        training.targets,
        training.virtual_tokens,
        steps,
        training.seed,
        alpha=training.alpha,
        dropout=training.dropout,
        gradient_accumulation=training.gradient_accumulation,
    )
    return add_adapter(model, options)


@torch.no_grad()
def _check_packing(model: Any, examples: Sequence[Example]) -> None:
    """Let an example through the model twice, packed behind a longer and behind a shorter one.

    Raises:
        ConfigurationError: what the model says of it differs: it sees what is before it.
    """
    first, last = (
        {name: ids[:_PROBE_TOKENS] for name, ids in each.items()} for each in (examples[0], examples[-1])
    )
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
            OptionText(
                "with this model, packed records would influence each other: its layers do not separate "
                "records by `position_ids`. Leave out {packing}"
            )
        )


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


def _plan_memory(training: TrainingOptions, model: Any, longest: int, notify: Notify) -> None:
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
    except CannotSplit:
        if training.memory_gib is not None:
            raise
        return  # nobody asked for it, and perhaps it is not needed
    if tuning.plan.chunked_loss or training.memory_gib is not None:
        notify(tuning.plan.sentence(length, batch))
