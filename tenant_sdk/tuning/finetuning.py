"""Fine-tuning on a text file: what `symbiosis-tenant finetune` does, with an unmodified Trainer."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from shared.errors import ConfigurationError, StorageError, SymbiosisError
from tenant_sdk.session import Session
from tenant_sdk.storage import (
    TrainingCheckpoints,
    check_new_folder,
    disk_errors,
    free_megabytes,
    whole_folder,
)
from tenant_sdk.tuning.adapters import AdapterOptions, add_adapter, find_method
from tenant_sdk.tuning.folders import save_adapter

Blocks = list[list[int]]


@dataclass(frozen=True)
class TrainingOptions:
    """Options of a training; see the help of `symbiosis-tenant finetune`.

    ``steps`` None: ``epochs`` passes over the data. ``learning_rate`` None: the method's own.
    """

    data: Path
    output: Path
    held_out: Path | None = None
    method: str = "lora"
    rank: int = 8
    targets: tuple[str, ...] = ("all-linear",)
    virtual_tokens: int = 20
    learning_rate: float | None = None
    steps: int | None = None
    epochs: float = 3.0
    batch_size: int = 8
    sequence_length: int = 256
    seed: int = 0
    save_steps: int = 50
    resume: bool = False


@dataclass(frozen=True)
class TrainingReport:
    """Result: losses in nats per token of the batches of a step, perplexities of the held-out text."""

    steps: int
    seconds: float
    trained_parameters: int
    first_loss: float
    last_loss: float
    perplexity_before: float | None
    perplexity_after: float | None


def read_tokens(path: Path, tokenizer: Any) -> list[int]:
    """Token ids of a whole UTF-8 text file.

    Raises:
        ConfigurationError: it cannot be read or holds next to nothing.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not plain text in UTF-8: {error.reason}") from error
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    # verbose=False: a text longer than the model's context is no mistake here.
    tokens: list[int] = tokenizer(text, verbose=False)["input_ids"]
    if len(tokens) < 2:
        raise ConfigurationError(f"{path} holds no text to learn from")
    return tokens


def pack(tokens: Sequence[int], length: int, *, keep_tail: bool) -> Blocks:
    """Consecutive blocks of ``length`` tokens.

    Args:
        keep_tail: add what is left at the end as a shorter block, if it has two tokens or more.
            A text shorter than one block is always one block.
    """
    blocks = [list(tokens[at : at + length]) for at in range(0, len(tokens), length)]
    if len(blocks) > 1 and len(blocks[-1]) < (2 if keep_tail else length):
        blocks.pop()
    return blocks


@torch.no_grad()
def perplexity(model: Any, blocks: Blocks, batch_size: int) -> float:
    """``exp`` of the mean negative log-likelihood per predicted token of held-out blocks."""
    was_training = model.training
    model.eval()
    nats, predicted = 0.0, 0
    for at in range(0, len(blocks), batch_size):
        batch = blocks[at : at + batch_size]
        for length in {len(block) for block in batch}:
            ids = torch.tensor([block for block in batch if len(block) == length], device=model.device)
            count = ids.shape[0] * (length - 1)
            nats += float(model(input_ids=ids, labels=ids).loss) * count
            predicted += count
    model.train(was_training)
    return math.exp(nats / predicted)


class _AdaLora(TrainerCallback):
    """AdaLoRA moves rank between layers after each step, if the training loop asks for it."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].base_model.update_and_allocate(state.global_step)


class _Between(TrainerCallback):
    """Whether the parameters are those of a whole number of steps."""

    whole = True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.whole = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.whole = True


class _Progress(TrainerCallback):
    """Tells the command line about every step: ``show(step, steps, loss)``."""

    def __init__(self, show: Callable[[int, int, float | None], None]) -> None:
        self._show = show

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._show(state.global_step, state.max_steps, None)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self._show(state.global_step, state.max_steps, logs["loss"])


def finetune(
    training: TrainingOptions,
    model: Any,
    tokenizer: Any,
    session: Session,
    *,
    show: Callable[[int, int, float | None], None],
    say: Callable[[str], None],
) -> TrainingReport:
    """Train an adapter on a text file and save it as a standard PEFT folder.

    Args:
        model: from ``session.load_model()``, or attached; gets the adapter, in place.
        session: of the model; a training is not resumed on another base.
        show: called with the step, the number of steps, and sometimes the loss.
        say: called with a line for the user.

    Raises:
        ConfigurationError: an option does not fit the text, the model or the output folder.
        StorageError: the disk is full or not writable; no half-written adapter is left.
    """
    output = check_new_folder(training.output)
    method = find_method(training.method)
    length = _sequence_length(training, model, training.virtual_tokens if method.prompt_like else 0)
    tokens = read_tokens(training.data, tokenizer)
    blocks = pack(tokens, length, keep_tail=False)
    held_out = None
    if training.held_out is not None:
        held_out = pack(read_tokens(training.held_out, tokenizer), length, keep_tail=True)
    steps = training.steps or max(
        1, math.ceil(training.epochs * math.ceil(len(blocks) / training.batch_size))
    )
    learning_rate = training.learning_rate or method.learning_rate
    say(
        f"{len(tokens)} tokens in {len(blocks)} blocks of {len(blocks[0])}; {steps} steps of "
        f"{min(training.batch_size, len(blocks))} blocks, learning rate {learning_rate:g}"
    )

    set_seed(training.seed)
    model = add_adapter(
        model,
        AdapterOptions(
            training.method, training.rank, training.targets, training.virtual_tokens, steps, training.seed
        ),
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(f"{training.method} adapter with {trained:,} trained parameters")
    _check_space(output, trained)

    settings = asdict(training) | {
        "data": hashlib.sha256(repr(tokens).encode()).hexdigest()[:16],
        "steps": steps,
        "learning_rate": learning_rate,
        "sequence_length": length,
        "base_model": session.manifest.digest[:16],
    }
    for name in ("output", "held_out", "resume", "epochs", "save_steps"):
        del settings[name]
    settings["targets"] = list(training.targets)
    checkpoints = TrainingCheckpoints(output, settings)
    resume_from = checkpoints.begin(resume=training.resume)

    before = None
    if held_out is not None:
        with model.disable_adapter():
            before = perplexity(model, held_out, training.batch_size)
        say(f"held-out perplexity before: {before:.2f}")
    started = time.perf_counter()
    losses = _train(training, model, blocks, steps, learning_rate, checkpoints, resume_from, show)
    seconds = time.perf_counter() - started
    after = None
    if held_out is not None:
        after = perplexity(model, held_out, training.batch_size)
        say(f"held-out perplexity after: {after:.2f}")
    report = TrainingReport(steps, seconds, trained, losses[0], losses[-1], before, after)
    resume = "Then run the same command with --resume: the trained adapter is in the last checkpoint."
    with disk_errors(output, "the adapter", resume), whole_folder(output) as folder:
        save_adapter(model, folder, session, training=_figures(training, settings, len(tokens), report))
    checkpoints.remove()
    return report


def _figures(
    training: TrainingOptions, settings: Mapping[str, Any], tokens: int, report: TrainingReport
) -> dict[str, Any]:
    """What the adapter's folder says of its training: nothing of the text but its length."""
    method, chosen = find_method(training.method), dict(settings)
    for name in ("data", "base_model", *(() if method.low_rank else ("rank", "targets"))):
        del chosen[name]
    if not method.prompt_like:
        del chosen["virtual_tokens"]
    figures = chosen | {"tokens": tokens} | asdict(report)
    return {name: value for name, value in figures.items() if value is not None}


def _sequence_length(training: TrainingOptions, model: Any, virtual_tokens: int) -> int:
    limit = getattr(model.config, "max_position_embeddings", None) or training.sequence_length
    length = min(training.sequence_length, limit - virtual_tokens)
    if length < 2 or training.batch_size < 1 or training.rank < 1:
        raise ConfigurationError(
            f"no room for text: --sequence-length is {training.sequence_length}, the model takes {limit} "
            f"positions, {virtual_tokens} of them for virtual tokens; batch size and rank are at least 1"
        )
    return length


def _check_space(output: Path, parameters: int) -> None:
    """Fail before hours of training, not after: two checkpoints (weights, two moments) and the adapter."""
    needed = parameters * 4 * (2 * 3 + 1) / 1e6 + 5
    free = free_megabytes(output.parent)
    if free < needed:
        raise StorageError(
            f"only {free:.0f} MB are free at {output.parent}, the training needs up to {needed:.0f} MB for "
            "checkpoints and the adapter; free some space or choose another --output"
        )


def _train(
    training: TrainingOptions,
    model: Any,
    blocks: Blocks,
    steps: int,
    learning_rate: float,
    checkpoints: TrainingCheckpoints,
    resume_from: Path | None,
    show: Callable[[int, int, float | None], None],
) -> list[float]:
    """Run the Trainer; the logged losses in order."""
    arguments = TrainingArguments(
        output_dir=str(checkpoints.folder),
        max_steps=steps,
        per_device_train_batch_size=training.batch_size,
        learning_rate=learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=min(10, steps // 10),
        seed=training.seed,
        logging_steps=max(1, steps // 50),
        logging_first_step=True,
        save_strategy="steps",
        save_steps=training.save_steps,
        save_total_limit=1,
        report_to="none",
        label_names=["labels"],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    between = _Between()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": block, "labels": block} for block in blocks],
        data_collator=default_data_collator,
        callbacks=[between, _Progress(show), *([_AdaLora()] if training.method == "adalora" else [])],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    resume = "Then run the same command with --resume: it goes on from the last whole checkpoint."
    with disk_errors(checkpoints.folder, "a checkpoint", resume):
        try:
            trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        except (KeyboardInterrupt, SymbiosisError):
            if trainer.state.global_step and between.whole:  # so that --resume loses nothing
                trainer._save_checkpoint(model, trial=None)
            raise
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
