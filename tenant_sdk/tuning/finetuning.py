"""Fine-tuning on files: the work of `symbiosis-tenant finetune`, with an unmodified Trainer."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)

from shared.errors import (
    Argument,
    ConfigurationError,
    Message,
    Placeholder,
    StorageError,
    counted,
    peer_text,
)
from shared.whole import whole_folder
from tenant_sdk.model.naming import base_of
from tenant_sdk.sequences.stack import CannotSplit
from tenant_sdk.session.session import Session
from tenant_sdk.storage import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    check_new_folder,
    disk_errors,
    free_megabytes,
)
from tenant_sdk.tuning.adapters import (
    AdapterOptions,
    add_adapter,
    default_rate,
    find_method,
    options_of,
    other_ranks,
)
from tenant_sdk.tuning.checkpoints import TrainingCheckpoints
from tenant_sdk.tuning.conversations import Example, TemplateDate
from tenant_sdk.tuning.data import Reader, Say, collate, collate_packed
from tenant_sdk.tuning.evaluation import perplexity
from tenant_sdk.tuning.folders import load_adapter, save_adapter
from tenant_sdk.tuning.long_sequences import long_tuning
from tenant_sdk.tuning.options import TrainingOptions
from tenant_sdk.tuning.progress import Progress, TrainingStep
from tenant_sdk.tuning.resuming import state_bytes
from tenant_sdk.tuning.samples import Sample, compare, right
from tenant_sdk.tuning.sampling import ends_of
from tenant_sdk.tuning.trackers import check_trackers, keep_from_git, where_reports_go
from tenant_sdk.tuning.trainer import Run, Trained, shown_losses, train

_FEW = 32  # tokens that show how a model attends
_NO_BASE = Message(
    "the adapter's card will not say where its base is found; {base} records that, and so does "
    "`base_model_name_or_path` in the adapter's adapter_config.json, which you can edit later",
    base=Placeholder("FOLDER|hub:NAME[@REVISION]"),
)
_EVALUATIONS = 5  # of the held-out loss in a training, unless another number is given
_BEFORE = "perplexity before"  # in the file of settings
_TRIED = 4  # examples of which one has gradients
_LAYER = re.compile(r"(.*?)\.(lora|hada|lokr|vera|ia3)_")  # of a part of its adapter
_EXPERT = re.compile(r"\.experts\.\d+\.")


def check_reports(names: Sequence[str]) -> None:
    """Refuse what the Trainer cannot report to.

    Raises:
        ConfigurationError: it knows no such thing, or its package is not installed.
    """
    for name in names:
        argument = Argument("report_to", name)
        if name not in INTEGRATION_TO_CALLBACK:
            raise ConfigurationError("{} must be one of {}", argument, ", ".join(INTEGRATION_TO_CALLBACK))
        # Before its package is imported, which looks for its files.
        check_trackers([name])
        keep_from_git([name])
        if name not in get_available_reporting_integrations():
            raise ConfigurationError(
                "{} needs its package, which is not installed: `pip install {}`", argument, name
            )


@dataclass(frozen=True)
class TrainingCallbacks:
    """How a training tells its user of itself.

    Args:
        say: called with a line; of the data's text it may name single characters, no more.
        show: called after every step, and with every loss.
        preview: called with the first example before anything is trained.
        evaluating: called while the held-out loss is measured, with the number of examples done and of all.
        samples: called at the end with held-out prompts and their answers.
        trained: called last with the model and its adapter, which is saved.
    """

    say: Say
    show: Callable[[TrainingStep], None]
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
    check_reports(training.report_to)
    say, output = callbacks.say, check_new_folder(training.output)
    day = TemplateDate(_started(output, training.resume) or today())
    adapter_folder = training.adapter
    if adapter_folder is not None:
        set_seed(training.seed)
        model = load_adapter(model, adapter_folder, session, trainable=True)
        training = replace(training, adapter=None, **options_of(model.peft_config["default"]))
    method = find_method(training.method)
    length = _sequence_length(training, model, training.virtual_tokens if method.prompt_like else 0)
    examples, held_out = _read(training, model, tokenizer, length, day, say)
    callbacks.preview(examples[0])
    size = min(training.batch_size, len(examples)) * training.gradient_accumulation
    steps = training.steps or max(1, math.ceil(training.epochs * math.ceil(len(examples) / size)))
    learning_rate = training.learning_rate or default_rate(method, model)
    say(
        f"{counted(steps, 'step')} of {size} out of {counted(len(examples), 'example')}, learning rate "
        f"{learning_rate:g}"
    )
    eval_steps = (training.eval_steps or math.ceil(steps / _EVALUATIONS)) if held_out else 0
    measurements = 1 + math.ceil(steps / eval_steps) if held_out else 0
    learned, measured = steps * size * _tokens(examples) / len(examples), measurements * _tokens(held_out)
    say(_traffic(session, learned, measured))
    for line in where_reports_go(training.report_to):
        say(line)

    model = _with_adapter(training, model, examples, steps, fresh=adapter_folder is None)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(f"{training.method} adapter with {trained:,} trained parameters{other_ranks(model)}")
    if not base_of(model).name:
        say(_NO_BASE)
    _check_space(output, state_bytes(model))
    _plan_memory(training, model, max(len(example["input_ids"]) for example in [*examples, *held_out]), say)

    settings = _settings(training, examples, held_out, day, adapter_folder)
    settings |= {"steps": steps, "learning_rate": learning_rate}
    settings |= {"sequence_length": length, "base_model": session.manifest.digest[:16]}
    checkpoints = TrainingCheckpoints(output, settings)
    resume_from, done = _begin(checkpoints, steps, training.resume, say)

    with checkpoints.resumable():
        progress = Progress(callbacks.show, say, shown_losses(steps), eval_steps, lambda: session.stats)
        held = _HeldOut(training, model, held_out, progress, callbacks, session)
        before = _perplexity_before(held, checkpoints, of_base=adapter_folder is None)
        if done < steps:
            _warm_up(model, examples[:_TRIED], say)
        started = time.perf_counter()
        run = Run(steps, learning_rate, eval_steps, held.measure, checkpoints.folder, resume_from)
        ended = train(training, run, model, examples, progress)
        seconds = time.perf_counter() - started
        losses, after = (ended.first_loss, ended.last_loss), held.perplexity_after(ended)
        report = TrainingReport(ended.step, seconds, done, *losses, before, after, ended.best)
        figures = _figures(training, settings, _tokens(examples), report)
        _save(output, model, session, figures, tokenizer if keep_tokenizer else None)
    checkpoints.remove()
    if held_out and training.samples:  # when nothing can be lost any more
        report = _answered(report, model, tokenizer, held_out, training, callbacks)
    callbacks.trained(model)
    return report


def _begin(checkpoints: TrainingCheckpoints, steps: int, resume: bool, say: Say) -> tuple[Path | None, int]:
    """The checkpoint from which a training goes on, and the steps that are done."""
    checkpoint = checkpoints.begin(resume=resume)
    done = int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
    if checkpoint is not None:
        say(f"the training goes on after step {done} of {steps}, from {checkpoint}")
    elif resume:
        say(f"there is no whole checkpoint in {checkpoints.folder}: the training begins with its first step")
    return checkpoint, done


@dataclass
class _HeldOut:
    """Measures the loss on held-out examples; a step's measurement is not made again for the end."""

    training: TrainingOptions
    model: Any
    examples: Sequence[Example]
    progress: Progress
    callbacks: TrainingCallbacks
    session: Session
    _last: tuple[int, float] = (0, 0.0)  # the step that was measured last, and its loss

    def measure(self, step: int = 0, steps: int = 0) -> float:
        """In nats per learned token; after a step, it is told along with the step's."""
        begun, before = time.perf_counter(), self.session.stats
        size = self.training.batch_size
        loss = math.log(perplexity(self.model, self.examples, size, self.callbacks.evaluating))
        self.progress.evaluated(loss, begun, before, step, steps)
        self._last = step, loss
        return loss

    def perplexity_after(self, ended: Trained) -> float | None:
        """Of the adapter that a training leaves, told as well; None: there are no examples."""
        if not self.examples:
            return None
        step, loss = self._last
        after = math.exp(loss if step == (ended.best or ended.step) else self.measure())
        self.callbacks.say(f"held-out perplexity after: {after:.2f}")
        return after


def _perplexity_before(held: _HeldOut, checkpoints: TrainingCheckpoints, *, of_base: bool) -> float | None:
    """Of the base, or of the adapter that is trained further; a resumed training has it already."""
    if not held.examples:
        return None
    name = f"{_BEFORE} {digest_of(repr(held.examples).encode())}"
    figure = checkpoints.kept(name)
    if not isinstance(figure, float):
        with held.model.disable_adapter() if of_base else nullcontext():
            figure = math.exp(held.measure())
        checkpoints.keep(name, figure)
    held.callbacks.say(f"held-out perplexity before: {figure:.2f}")
    return figure


def _warm_up(model: Any, examples: Sequence[Example], say: Say) -> None:
    """One pass, in which layers learn which of them share an input; its gradients are dropped.

    So the first step is like those after it, also in a training that is resumed. If layers have no gradient
    other than 0, there are more passes, and those that have none in any are told.

    Raises:
        ConfigurationError: no example has a gradient other than 0.
    """
    model.train()
    learns = dict[str, bool]()
    for example in examples:
        batch = {name: tensor.to(model.device) for name, tensor in collate([example]).items()}
        model(**batch).loss.backward()
        for name, each in model.named_parameters():
            if each.grad is not None:  # None: the model does not use it
                # Experts count as one, since no token may reach some.
                match = _LAYER.match(_EXPERT.sub(".experts.", name))
                layer = match[1] if match else "other parameters"
                learns[layer] = learns.get(layer, False) or bool(each.grad.any())
        model.zero_grad()
        if learns and all(learns.values()):
            return
    if not any(learns.values()):
        raise ConfigurationError(
            Message(
                "the adapter would learn nothing: all its gradients are 0, as they are if its weights are. "
                "Leave out {adapter} to train a new one"
            )
        )
    dead = [layer for layer, any_gradient in learns.items() if not any_gradient]
    say(
        f"{len(dead)} of {len(learns)} layers of the adapter learn nothing, such as {peer_text(dead[0])}: "
        "all their gradients are 0, as they are if their weights are"
    )


def _answered(
    report: TrainingReport,
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    training: TrainingOptions,
    callbacks: TrainingCallbacks,
) -> TrainingReport:
    """With how many held-out prompts base and adapter answer to the letter."""
    try:
        samples = compare(model, tokenizer, examples, training.samples)
    except Exception as error:  # the adapter is saved, and good
        callbacks.say(f"held-out prompts could not be answered: {peer_text(repr(error))}")
        return report
    except BaseException as error:
        saved = str(training.output)
        error.add_note(Message("the training is complete, and the adapter is saved in {}", saved))
        raise
    if samples:
        callbacks.samples(samples)
    base, adapter = right(samples, lambda each: each.base), right(samples, lambda each: each.adapted)
    return replace(report, answered=len(samples), right_base=base, right_adapter=adapter)


def digest_of(content: bytes) -> str:
    """Short, to compare a setting by."""
    return hashlib.sha256(content).hexdigest()[:16]


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
    day = TrainingCheckpoints(output, {}).kept("day") if resume else None
    try:
        return date.fromisoformat(day) if isinstance(day, str) else None
    except ValueError:
        return None


def _read(
    training: TrainingOptions, model: Any, tokenizer: Any, length: int, day: TemplateDate, say: Say
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
    held_out = replace(reader, keep_tail=True, day=TemplateDate(day.day)).read(training.held_out)
    known = {tuple(example["input_ids"]) for example in examples}
    if same := sum(tuple(example["input_ids"]) in known for example in held_out):
        say(f"{same} of {len(held_out)} held-out records are learned too: their loss says nothing of others")
    return examples, held_out


def _with_adapter(
    training: TrainingOptions, model: Any, examples: Sequence[Example], steps: int, *, fresh: bool
) -> Any:
    """The model with an adapter, a fresh one if it has none; packed examples do not see each other."""
    if fresh:
        model = _with_fresh_adapter(training, model, steps)
    if training.packing:
        model.config.use_cache = False
        check_packing(model, examples)
    return model


def _with_fresh_adapter(training: TrainingOptions, model: Any, steps: int) -> Any:
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
    )
    return add_adapter(model, options)


def _settings(
    training: TrainingOptions,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    day: TemplateDate,
    adapter_folder: Path | None,
) -> dict[str, Any]:
    """What must be the same if the training is resumed."""
    settings = asdict(training)
    other = ["output", "held_out", "resume", "epochs", "save_steps", "report_to", "memory_gib", "base"]
    other += ["with_draft"]
    if training.early_stopping is None:
        other += ["eval_steps"]
    for name in (*other, "target_modules", "samples"):
        del settings[name]
    if training.early_stopping is not None:  # the best step is that of these
        settings["held_out"] = digest_of(repr(held_out).encode())
    settings["targets"] = list(training.targets)
    if day.written:
        settings["day"] = str(day.day)
    settings["data"] = digest_of(repr(examples).encode())
    if adapter_folder is not None:  # the adapter that is trained further
        files = [(adapter_folder / name).read_bytes() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
        settings["adapter"] = digest_of(b"".join(files))
    return settings


def _figures(
    training: TrainingOptions, settings: Mapping[str, Any], tokens: int, report: TrainingReport
) -> dict[str, Any]:
    """What the adapter's folder says of its training: nothing of the text but its length."""
    method, chosen = find_method(training.method), dict(settings)
    for name in ("day", "held_out"):
        chosen.pop(name, None)
    for name in ("data", "base_model", *(() if method.low_rank else ("rank", "targets", "alpha", "dropout"))):
        del chosen[name]
    if not method.prompt_like:
        del chosen["virtual_tokens"]
    later = ("answered", "right_base", "right_adapter")
    figures = chosen | {"tokens_of_data": tokens} | asdict(report)
    figures = {name: value for name, value in figures.items() if name not in later}
    if resumed_at := figures.pop("resumed_at"):
        figures |= {"resumed_at_step": resumed_at, "seconds_since_resumed": figures.pop("seconds")}
    return {name: value for name, value in figures.items() if value is not None}


def _tokens(examples: Sequence[Example]) -> int:
    return sum(len(example["input_ids"]) for example in examples)


def _traffic(session: Session, learned: float, measured: int) -> str:
    """What a training will take on the network, before it begins.

    Args:
        learned: tokens of all steps.
        measured: tokens of all measurements of the held-out loss.
    """
    step, check = session.token_bytes(training=True), session.token_bytes(training=False)
    if not any(step):
        return "all frozen layers are kept here: a token takes nothing of the network"
    held_out = f" and {measured:,} of held-out data, forward alone," if measured else ""
    up, down = (learned * step[at] + measured * check[at] for at in range(2))
    return (
        f"a token takes {step.said()}, at most {step.tokens_per_second(1):,.3g} tokens/s at 1 Gbit/s; "
        f"{learned:,.0f} tokens{held_out} take about {up / 1e9:,.3g} GB up and {down / 1e9:,.3g} GB down"
    )


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


def _plan_memory(training: TrainingOptions, model: Any, longest: int, say: Say) -> None:
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
