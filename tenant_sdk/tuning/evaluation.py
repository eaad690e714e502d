"""Losses and answers on data that a model has not learned: the work of `symbiosis-tenant evaluate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner
from torch.nn.functional import cross_entropy

from shared.errors import ConfigurationError
from tenant_sdk.sequences.positions import rope_stable_length
from tenant_sdk.trust.attestation import base_model
from tenant_sdk.tuning.conversations import IGNORE_INDEX, Example, TemplateDate
from tenant_sdk.tuning.data import Notify, Reader, collate, learned_tokens, notify_template_day
from tenant_sdk.tuning.generation import sequence_length
from tenant_sdk.tuning.options import EvaluationOptions
from tenant_sdk.tuning.samples import Sample, base_alone, compare


@dataclass(frozen=True)
class EvaluationCallbacks:
    """How an evaluation tells its user of itself.

    Args:
        notify: called with a line about a file.
        reading: called while the loss is measured, with the number of records that are done, and of all.
        answering: the same for prompts that are answered.
    """

    notify: Notify = lambda _: None
    reading: Callable[[int, int], None] = lambda *_: None
    answering: Callable[[int, int], None] = lambda *_: None


@dataclass(frozen=True)
class EvaluationReport:
    """Perplexities by learned token, and answers.

    Attributes:
        base: perplexity of the base model. None: the adapter has biases, which stay when it is switched off.
        adapter: None: there is no adapter.
        samples: of the prompts with short answers.
    """

    base: float | None
    adapter: float | None
    samples: Sequence[Sample]


def evaluate(
    options: EvaluationOptions,
    files: Sequence[Path],
    model: Any,
    tokenizer: Any,
    callbacks: EvaluationCallbacks,
    *,
    today: Callable[[], date] = date.today,
) -> EvaluationReport:
    """Measure a model, with and without its adapter, on records of files.

    Args:
        model: a causal language model, or a PEFT model with one adapter.
        today: the day that chat templates may write.

    Raises:
        ConfigurationError: a file or a record is wrong; the message names file and line.
    """
    day = TemplateDate(today())
    length = sequence_length(options.sequence_length, model)
    reader = Reader.of_model(
        model, tokenizer, length, options, keep_tail=True, day=day, notify=callbacks.notify
    )
    examples, size = reader.read(files), options.batch_size
    notify_template_day(day, callbacks.notify)
    adapter = base = None
    if hasattr(model, "peft_config"):
        adapter = perplexity(model, examples, size, callbacks.reading)
        callbacks.notify(f"perplexity of the adapter: {adapter:.2f}")
    with base_alone(model) as alone:
        if alone:
            base = perplexity(model, examples, size, callbacks.reading)
            callbacks.notify(f"perplexity of the base: {base:.2f}")
    samples = compare(model, tokenizer, examples, None, options.answer_tokens, callbacks.answering)
    return EvaluationReport(base, adapter, samples)


@contextmanager
def loss_of_tokens(model: Any) -> Iterator[dict[str, Any]]:
    """Have a model compute the loss of its tokens alone, for as long as the block lasts.

    Some configurations of mixtures add a term for the router, and PEFT's AdaLoRA adds one for its matrices.

    Yields:
        More arguments of each pass.
    """
    router = {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}
    tuner = getattr(model, "base_model", None)
    if not isinstance(tuner, BaseTuner) or type(tuner).forward is BaseTuner.forward:
        yield router
        return
    vars(tuner)["forward"] = tuner.model.forward  # as PEFT's other methods have it
    try:
        yield router
    finally:
        del vars(tuner)["forward"]


@torch.no_grad()
def check_loss(model: Any, outputs: Any, labels: torch.Tensor) -> None:
    """Refuse a model whose loss is not that of the next tokens.

    transformers has causal models that compare each prediction with the token that it was made from. They
    leave it to callers to shift the labels.

    Args:
        outputs: of a pass under ``loss_of_tokens``, with ``loss`` and ``logits``. Without logits nothing is
            checked: windows of long sequences give none, and compute the loss themselves.
        labels: int64 [B, T].

    Raises:
        ConfigurationError: the loss is closer to that of the tokens themselves.
    """
    if outputs.logits is None:
        return
    logits = outputs.logits[:, -labels.shape[1] :]  # behind those of virtual tokens
    next_ones, themselves = _mean_loss(logits[:, :-1], labels[:, 1:]), _mean_loss(logits, labels)
    if abs(outputs.loss - themselves) < abs(outputs.loss - next_ones):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        raise ConfigurationError(
            f"{type(base).__name__} compares each prediction with the token that it was made from, not with "
            "the next one: trained so, it would learn to repeat tokens. Train it in a loop of your own, with "
            "labels that are shifted by one"
        )


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """In nats, of the labels that are learned; a sequence at a time, since logits take much memory."""
    parts = zip(logits, labels, strict=True)
    total = sum(float(cross_entropy(each.float(), label, reduction="sum")) for each, label in parts)
    return total / int((labels != IGNORE_INDEX).sum())


@torch.no_grad()
def perplexity(
    model: Any,
    examples: Sequence[Example],
    batch_size: int,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> float:
    """``exp`` of the mean negative log-likelihood per learned token of held-out examples.

    Args:
        progress: called with the number of examples that are done, and of all.

    Raises:
        ConfigurationError: see ``check_loss``.
    """
    was_training = model.training
    model.eval()
    nats, predicted = 0.0, 0
    # Neighbours in length: less padding.
    ordered = sorted(examples, key=lambda example: len(example["input_ids"]))
    at = 0
    with loss_of_tokens(model) as more:
        for batch in _batches(model, ordered, batch_size):
            progress(at, len(ordered))
            count = sum(map(learned_tokens, batch))
            inputs = {name: tensor.to(model.device) for name, tensor in collate(batch).items()}
            outputs = model(**inputs, **more)
            if not at:
                check_loss(model, outputs, inputs["labels"])
            nats += float(outputs.loss) * count
            del outputs  # the logits, before the next ones are computed
            predicted += count
            at += len(batch)
    model.train(was_training)
    return math.exp(nats / predicted)


def _batches(model: Any, ordered: Sequence[Example], size: int) -> Iterator[list[Example]]:
    """Examples for one pass each; of one length where positions depend on the longest text of a pass."""
    stable_length = rope_stable_length(base_model(model))
    virtual = getattr(getattr(model, "active_peft_config", None), "num_virtual_tokens", None) or 0
    batch = list[Example]()
    for example in ordered:
        length = len(example["input_ids"])
        apart = stable_length is not None and length + virtual > stable_length and batch
        if len(batch) == size or (apart and length != len(batch[-1]["input_ids"])):
            yield batch
            batch = []
        batch.append(example)
    if batch:
        yield batch
