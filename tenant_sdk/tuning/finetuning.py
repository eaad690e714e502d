"""Fine-tuning on files: the work of `symbiosis-tenant finetune`, with an unmodified Trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from shared.atomic import atomic_folder
from shared.errors import OptionText, peer_text
from tenant_sdk.session.session import Session
from tenant_sdk.storage import disk_errors
from tenant_sdk.tuning.adapters import find_method
from tenant_sdk.tuning.checkpoints import TrainingCheckpoints, step_of
from tenant_sdk.tuning.conversations import Example
from tenant_sdk.tuning.data import Notify
from tenant_sdk.tuning.folders import save_adapter
from tenant_sdk.tuning.held_out import HeldOutLoss
from tenant_sdk.tuning.options import TrainingOptions
from tenant_sdk.tuning.preparation import count_tokens, prepare
from tenant_sdk.tuning.progress import Progress, TrainingStep
from tenant_sdk.tuning.samples import Sample, compare, right
from tenant_sdk.tuning.trainer import TrainingRun, shown_losses, train
from tenant_sdk.tuning.warm_up import check_gradients, warm_up

_WARM_UPS = 4  # examples of which one has gradients
# What an adapter's folder, which users publish, says of its training: of the options, no others.
_CARD_SETTINGS = (
    "method",
    "learning_rate",
    "schedule",
    "warmup_steps",
    "weight_decay",
    "batch_size",
    "gradient_accumulation",
    "early_stopping",
    "packing",
    "sequence_length",
    "train_on_prompt",
    "seed",
)
_CARD_RESULTS = (
    "steps",
    "seconds",
    "resumed_at",
    "first_loss",
    "last_loss",
    "perplexity_before",
    "perplexity_after",
    "best_step",
)


@dataclass(frozen=True)
class TrainingCallbacks:
    """How a training tells its user of itself.

    Args:
        notify: called with a line; of the data's text it may name single characters, no more.
        show_step: called after every step, and with every loss.
        preview: called with the first example before anything is trained.
        evaluating: called while the held-out loss is measured, with the number of examples done and of all.
        samples: called at the end with held-out prompts and their answers.
        trained: called last with the model and its adapter, which is saved.
    """

    notify: Notify
    show_step: Callable[[TrainingStep], None]
    preview: Callable[[Example], None] = lambda _: None
    evaluating: Callable[[int, int], None] = lambda *_: None
    samples: Callable[[Sequence[Sample]], None] = lambda _: None
    trained: Callable[[Any], None] = lambda _: None


@dataclass(frozen=True)
class TrainingReport:
    """Result: losses in nats per token, of the first step and of the last fiftieth of them, and perplexities.

    ``seconds`` are those since ``resumed_at``, the number of steps that a training before it had done.
    ``best_step``: the adapter is that of this step, if the training could end early. ``answered``: held-out
    prompts with short answers, and how many of them base (None: not known) and adapter answered to the
    letter.
    """

    steps: int
    seconds: float
    resumed_at: int
    first_loss: float
    last_loss: float
    perplexity_before: float | None
    perplexity_after: float | None
    best_step: int | None = None
    answered: int = 0
    right_base: int | None = 0
    right_adapter: int | None = 0


def finetune(
    training: TrainingOptions,
    model: Any,
    tokenizer: Any,
    session: Session,
    callbacks: TrainingCallbacks,
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
    notify, new_adapter = callbacks.notify, training.adapter is None
    prepared = prepare(
        training, model, tokenizer, session, today=today, notify=notify, preview=callbacks.preview
    )
    training, model, examples = prepared.options, prepared.model, prepared.examples
    steps, eval_steps = prepared.steps.count, prepared.steps.eval_steps
    checkpoints = TrainingCheckpoints(prepared.output, prepared.resume_settings)
    with checkpoints.resumable():
        resume_from, done = _begin(checkpoints, steps, training.resume, notify)
        progress = Progress(
            callbacks.show_step, notify, shown_losses(steps), eval_steps, lambda: session.stats
        )
        held_out = HeldOutLoss(
            model, prepared.held_out, training.batch_size, session, progress, callbacks.evaluating, notify
        )
        before = held_out.perplexity_before(checkpoints, of_base=new_adapter)
        if done < steps:
            check_gradients(warm_up(model, examples[:_WARM_UPS]), notify)
        started = time.perf_counter()
        rate = prepared.steps.learning_rate
        run = TrainingRun(steps, rate, eval_steps, held_out.measure, checkpoints.folder, resume_from)
        ended = train(training, run, model, examples, progress)
        seconds = time.perf_counter() - started
        losses, after = (ended.first_loss, ended.last_loss), held_out.perplexity_after(ended)
        report = TrainingReport(ended.step, seconds, done, *losses, before, after, ended.best)
        entries = _card_entries(training, prepared.resume_settings, count_tokens(examples), report)
        _save(prepared.output, model, session, entries, tokenizer if keep_tokenizer else None)
        checkpoints.remove()
    if prepared.held_out and training.samples:  # when nothing can be lost any more
        report = _with_answers(report, model, tokenizer, prepared.held_out, training, callbacks)
    callbacks.trained(model)
    return report


def _begin(
    checkpoints: TrainingCheckpoints, steps: int, resume: bool, notify: Notify
) -> tuple[Path | None, int]:
    """The checkpoint from which a training goes on, and the steps that are done."""
    checkpoint = checkpoints.begin(resume=resume)
    done = step_of(checkpoint) if checkpoint else 0
    if checkpoint is not None:
        notify(f"the training goes on after step {done} of {steps}, from {checkpoint}")
    elif resume:
        notify(
            f"there is no whole checkpoint in {checkpoints.folder}: the training begins with its first step"
        )
    return checkpoint, done


def _with_answers(
    report: TrainingReport,
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    training: TrainingOptions,
    callbacks: TrainingCallbacks,
) -> TrainingReport:
    """With how many held-out prompts base and adapter answer to the letter."""
    callbacks.notify(
        f"the adapter is saved; it and the base answer up to {training.samples} held-out prompts"
    )
    try:
        samples = compare(model, tokenizer, examples, training.samples)
    except Exception as error:  # the adapter is saved, and good
        callbacks.notify(f"held-out prompts could not be answered: {peer_text(repr(error))}")
        return report
    except BaseException as error:
        saved = str(training.output)
        error.add_note(OptionText("the training is complete, and the adapter is saved in {}", saved))
        raise
    if samples:
        callbacks.samples(samples)
    base, adapter = right(samples, lambda each: each.base), right(samples, lambda each: each.adapted)
    return replace(report, answered=len(samples), right_base=base, right_adapter=adapter)


def _card_entries(
    training: TrainingOptions, settings: Mapping[str, Any], tokens: int, report: TrainingReport
) -> dict[str, Any]:
    """What the adapter's folder says of its training: nothing of the text but its length."""
    method, measured = find_method(training.method), asdict(report)
    names = [*_CARD_SETTINGS]
    if method.low_rank:
        names += ["rank", "targets", "alpha", "dropout"]
    if method.prompt_like:
        names.append("virtual_tokens")
    entries = {name: settings.get(name) for name in names} | {"tokens_of_data": tokens}
    entries |= {name: measured[name] for name in _CARD_RESULTS}
    if resumed_at := entries.pop("resumed_at"):
        entries |= {"resumed_at_step": resumed_at, "seconds_since_resumed": entries.pop("seconds")}
    return {name: value for name, value in entries.items() if value is not None}


def _save(output: Path, model: Any, session: Session, entries: dict[str, Any], tokenizer: Any) -> None:
    """Make the adapter's folder; a tokenizer goes there unless it is None."""
    resume = OptionText(
        "Then run the same training with {resume}: the trained adapter is in the last checkpoint.",
        resume=True,
    )
    with disk_errors(output, "the adapter", resume), atomic_folder(output) as folder:
        save_adapter(model, folder, session, training=entries, tokenizer=tokenizer)
