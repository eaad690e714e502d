"""A draft from files: the work of `symbiosis-tenant draft`."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from shared.atomic import atomic_folder, write_atomically
from shared.encoded import read_within
from shared.errors import ConfigurationError
from tenant_sdk.drafts.decoding import Draft
from tenant_sdk.drafts.folder import adapter_digest, save_draft
from tenant_sdk.drafts.head import Vocabulary
from tenant_sdk.drafts.length import DraftLength
from tenant_sdk.drafts.options import KEPT_PARTS, DraftOptions
from tenant_sdk.drafts.passes import check_supported
from tenant_sdk.drafts.training import (
    BATCH,
    GUESSES,
    Features,
    Positions,
    Trainer,
    TrainingResult,
    collect,
    frequent_tokens,
)
from tenant_sdk.session.session import Session
from tenant_sdk.storage import check_new_folder, disk_errors
from tenant_sdk.trust.attestation import base_model
from tenant_sdk.tuning.checkpoints import TrainingCheckpoints
from tenant_sdk.tuning.conversations import IGNORE_INDEX, Example, TemplateDate
from tenant_sdk.tuning.data import (
    Notify,
    Reader,
    chat_prompt,
    has_chat_template,
    notify_template_day,
    prompt_tokens,
)
from tenant_sdk.tuning.generation import (
    answer_ids,
    batched,
    context_length,
    ignores_padding,
    sequence_length,
)
from tenant_sdk.tuning.records import prompts_of
from tenant_sdk.tuning.resume_settings import digest_of, template_day, unchanging
from tenant_sdk.tuning.sampling import Sampling

_LARGEST_ANSWERS = 256 << 20  # of one batch
_HELD_OUT = 10  # one text of so many
_STEPS, _MIN_STEPS, _MAX_EPOCHS = 1500, 200, 40
_MIN_GAIN = 1.05  # tokens a pass, below which a draft is of no use
_FEW = 500  # held-out tokens, of which a share says little
_TIMED_PASSES, _TIMED_PROMPT = 6, 16


@dataclass(frozen=True)
class DraftCallbacks:
    """How the making of a draft tells its user of itself.

    Args:
        notify: called with a line.
        writing: called while the model answers prompts, with the number that is done, and of all.
        reading: the same while the model computes the text.
        training: called with the steps that are done, all of them, and the loss of the first guess.
    """

    notify: Notify = lambda _: None
    writing: Callable[[int, int], None] = lambda *_: None
    reading: Callable[[int, int], None] = lambda *_: None
    training: Callable[[int, int, float], None] = lambda *_: None


@dataclass(frozen=True)
class DraftReport:
    """What a draft promises.

    Attributes:
        acceptance: see ``DraftCard``.
        tokens_a_pass: see ``DraftGain``.
        seconds_without_guesses: of a pass, here and now.
        seconds_with_guesses: of a pass with all guesses, and of making them.
        requests: that wait for each other in a pass; each takes a round trip.
    """

    acceptance: tuple[float, ...]
    tokens_a_pass: float
    seconds_without_guesses: float
    seconds_with_guesses: float
    requests: float

    @property
    def faster(self) -> float:
        """Tokens a second with all guesses, in those without, here and now."""
        # A pass with more rows takes no less; what was measured may differ by chance.
        without = self.seconds_without_guesses
        return self.tokens_a_pass * without / max(self.seconds_with_guesses, without)

    @property
    def pays_from(self) -> float:
        """Seconds that a round trip must take longer than here for all guesses to pay; 0: they do here."""
        gain = self.tokens_a_pass
        if gain < _MIN_GAIN:
            return math.inf
        if self.faster >= 1:
            return 0.0
        if not self.requests:
            return math.inf
        return max(
            0.0,
            (self.seconds_with_guesses / gain - self.seconds_without_guesses)
            / (self.requests * (1 - 1 / gain)),
        )


def default_epochs(places: int) -> int:
    """Passes over so many places: many over few of them, as far as there is something to learn."""
    epochs = min(_MAX_EPOCHS, max(1, round(_STEPS * BATCH / places)))
    return max(epochs, math.ceil(_MIN_STEPS / math.ceil(places / BATCH)))


def make_draft(
    options: DraftOptions,
    model: Any,
    tokenizer: Any,
    session: Session,
    callbacks: DraftCallbacks,
    *,
    today: Callable[[], date] = date.today,
) -> DraftReport:
    """Train a draft and save it.

    Args:
        model: of the session, with the adapter for which the draft is.
        today: the day that chat templates may write, unless a training that is resumed has one.

    Raises:
        ConfigurationError: a file is wrong, or there is too little text; or see ``TrainingCheckpoints``.
        StorageError: the folder cannot be written.
    """
    base: Any = base_model(model)
    check_supported(model)
    output = check_new_folder(options.output)
    day = template_day(output, today, resume=options.resume)
    length = sequence_length(options.sequence_length, model)
    reader = Reader.of_model(model, tokenizer, length, options, notify=callbacks.notify, day=day)
    examples = reader.read(options.data)
    prompts = _prompts(options.prompts, tokenizer, day)
    notify_template_day(day, callbacks.notify)
    settings = _settings(options, examples, prompts, model, session)
    if day.written:
        settings["day"] = str(day.day)
    checkpoints = TrainingCheckpoints(output, settings, parts=KEPT_PARTS)
    with checkpoints.resumable():
        checkpoints.begin(resume=options.resume)
        with disk_errors(checkpoints.folder, "what the model computes", "Then run again."):
            examples += _answers(options, model, tokenizer, prompts, checkpoints.folder, callbacks.writing)
            found = collect(
                model, examples, options.batch_size, kept=checkpoints.folder, progress=callbacks.reading
            )
        trained, held_out = _split(found, options.seed)
        vocabulary = Vocabulary.of(
            base, frequent_tokens(trained, base.get_input_embeddings().weight.shape[0])
        )
        learned = sum(int(each.learned.sum()) for each in trained)
        callbacks.notify(f"{learned:,} tokens to learn, {len(vocabulary.tokens):,} of them different")
        if (count := sum(int(each.learned.sum()) for each in held_out)) < _FEW:
            callbacks.notify(
                f"only {count} tokens are held out, so the shares of right guesses are uncertain"
            )
        if not (places := len(Positions(trained).starts)):
            raise ConfigurationError("there is nothing to guess: the texts are too short for a draft")
        epochs = options.epochs or default_epochs(places)
        trainer = Trainer(vocabulary, trained, epochs=epochs, seed=options.seed, progress=callbacks.training)
        result = trainer.train(Positions(held_out))
        report = _measure_passes(model, result, examples[0], session)
        with disk_errors(output, "the draft", "Then run again."), atomic_folder(output) as folder:
            save_draft(
                folder,
                result.guesser,
                model,
                session,
                acceptance=result.gain.acceptance,
                learned_tokens=learned,
                held_out_tokens=sum(int(each.learned.sum()) for each in held_out),
            )
        checkpoints.remove()
    return report


def _prompts(files: Sequence[Path], tokenizer: Any, day: TemplateDate) -> list[list[int]]:
    """Ids of the prompts of files; as a user's messages if there is a chat template.

    Raises:
        ConfigurationError: see ``prompts_of``.
    """
    lines = [line for file in files for line in prompts_of(file)]
    if has_chat_template(tokenizer):
        return [chat_prompt(tokenizer, [{"role": "user", "content": line}], day) for line in lines]
    return [prompt_tokens(tokenizer, line) for line in lines]


def _settings(
    options: DraftOptions,
    examples: Sequence[Example],
    prompts: Sequence[Sequence[int]],
    model: Any,
    session: Session,
) -> dict[str, Any]:
    """What must be the same if the work is resumed."""
    return unchanging(options) | {
        "data": digest_of(repr((examples, prompts)).encode()),
        "adapter": adapter_digest(model)[:16],
        "base_model": session.manifest.digest[:16],
    }


def _answers(
    options: DraftOptions,
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    kept: Path,
    progress: Callable[[int, int], None],
) -> list[Example]:
    """The model's own answers to prompts; those that lie in a folder are not written again."""
    found = list[Example]()
    longest = max(map(len, prompts), default=0) + options.answer_tokens
    if prompts and longest > context_length(model):
        raise ConfigurationError("the longest prompt and {answer_tokens} do not fit into the model's context")
    padded, done = ignores_padding(model, longest), 0
    for part in batched(prompts, padded=padded, size=options.batch_size):
        file = kept / f"answers-{digest_of(repr(part).encode())}.json"
        if file.exists():
            answers: list[list[int]] = json.loads(read_within(file, _LARGEST_ANSWERS))
        else:
            answers = answer_ids(model, tokenizer, part, Sampling(max_new_tokens=options.answer_tokens))
            write_atomically(file, json.dumps(answers).encode())
        for prompt, answer in zip(part, answers, strict=True):
            found.append({"input_ids": [*prompt, *answer], "labels": [IGNORE_INDEX] * len(prompt) + answer})
        done += len(part)
        progress(done, len(prompts))
    return found


def _split(features: Sequence[Features], seed: int) -> tuple[list[Features], list[Features]]:
    """Those to learn from, and a tenth that is held out.

    Raises:
        ConfigurationError: there are fewer than two.
    """
    if len(features) < 2:
        raise ConfigurationError("a draft needs two texts at least, of which one is held out")
    mixed = random.Random(seed).sample(features, len(features))  # noqa: S311 - an order, no secret
    held_out = max(1, len(mixed) // _HELD_OUT)
    return mixed[held_out:], mixed[:held_out]


def _measure_passes(model: Any, result: TrainingResult, example: Example, session: Session) -> DraftReport:
    """Time passes with and without guesses."""
    ids = torch.tensor([example["input_ids"][:_TIMED_PROMPT]], device=model.device)
    seconds, requests = dict[int, float](), 0.0
    acceptance = result.gain.acceptance
    most = len(acceptance)
    for guesses in (0, most):
        length = DraftLength(acceptance, GUESSES, guesses)
        draft = Draft(result.guesser, length)
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
        tokens = 1 + _TIMED_PASSES * (1 + guesses)
        model.generate(input_ids=ids, custom_generate=draft, max_new_tokens=tokens, **options)
        before, passes = session.stats.requests, draft.passes
        model.generate(input_ids=ids, custom_generate=draft, max_new_tokens=tokens, **options)
        seconds[guesses] = draft.seconds_a_pass
        requests = (session.stats.requests - before) / (1 + draft.passes - passes)
    return DraftReport(acceptance, result.gain.tokens_a_pass, seconds[0], seconds[most], requests)
