"""Training of a draft: the model's last hidden states of some text, and a short training on this machine.

The text is passed through the model once, which is all that the executor sees. The network then learns the
model's own distribution behind each token, by distillation, as in EAGLE (Li et al. 2024, section 3.2) and
ReDrafter (section 3.3). The loss of the second and later guesses weighs less, since they count only if those
before are right.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from shared.errors import ConfigurationError
from tenant_sdk.drafts.head import WIDENING, DraftHead, Vocabulary
from tenant_sdk.trust.attestation import base_model
from tenant_sdk.tuning.conversations import IGNORE_INDEX, Example
from tenant_sdk.tuning.data import collate

GUESSES = 5  # that a draft learns to make
_FADING = 0.8  # weight of each guess's loss, in those of the one before
_VOCABULARY = 8192  # tokens that are guessed at most
_RATE, _WARMUP, _DECAY = 2e-3, 20, 0.01
_BATCH = 8


@dataclass(frozen=True)
class Features:
    """What the model makes of a text.

    Attributes:
        ids: int64 ``[T]``.
        hidden: bfloat16 ``[T, width]``: the last hidden states.
        learned: bool ``[T]``: tokens that are guessed, such as those of answers.
    """

    ids: Tensor
    hidden: Tensor
    learned: Tensor


@torch.no_grad()
def collect(
    model: Any,
    examples: Sequence[Example],
    batch_size: int,
    *,
    kept: Path | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[Features]:
    """The features of examples, which takes one pass of the model over them.

    Args:
        model: of a session, or a PEFT model around it.
        kept: an own folder where features are left, and taken from if the same batch lies there.
        progress: called with the number of examples that are done, and of all.
    """
    base: Any = base_model(model)
    was_training, found = model.training, list[Features]()
    model.eval()
    for at in range(0, len(examples), batch_size):
        part = examples[at : at + batch_size]
        batch = {name: each.to(model.device) for name, each in collate(part).items()}
        hidden = _kept_hidden(kept, part)
        if hidden is None:
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            hidden = base.base_model(**inputs, use_cache=False).last_hidden_state.to("cpu", torch.bfloat16)
            _keep_hidden(kept, part, hidden)
        for example, states in zip(part, hidden, strict=True):
            learned = torch.tensor(example["labels"]) != IGNORE_INDEX
            size = len(learned)
            found.append(Features(torch.tensor(example["input_ids"]), states[:size].clone(), learned))
        progress(min(at + batch_size, len(examples)), len(examples))
    model.train(was_training)
    return found


def _name(part: Sequence[Example]) -> str:
    return f"features-{hashlib.sha256(repr(part).encode()).hexdigest()[:24]}.safetensors"


def _kept_hidden(folder: Path | None, part: Sequence[Example]) -> Tensor | None:
    if folder is None or not (folder / _name(part)).exists():
        return None
    try:
        return load_file(folder / _name(part))["hidden"]
    except (SafetensorError, OSError, KeyError):  # this process was killed while it was written
        return None


def _keep_hidden(folder: Path | None, part: Sequence[Example], hidden: Tensor) -> None:
    if folder is not None:
        partial = folder / "partial"
        save_file({"hidden": hidden.contiguous()}, partial)
        partial.replace(folder / _name(part))


def frequent_tokens(features: Sequence[Features], vocabulary: int) -> Tensor:
    """Int64 ``[S]``: ids that occur where something is learned, the most frequent ones."""
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for each in features:
        counts += torch.bincount(each.ids[each.learned], minlength=vocabulary)
    found = counts.argsort(descending=True)[:_VOCABULARY]
    return found[counts[found] > 0]


@dataclass(frozen=True)
class TrainingResult:
    """A trained network.

    Attributes:
        acceptance: of held-out text; see ``DraftCard``.
        losses: of each pass over the data, in nats a token of the first guess.
    """

    head: DraftHead
    acceptance: tuple[float, ...]
    losses: tuple[float, ...]
    seconds: float


class Trainer:
    """Trains a draft from features.

    Args:
        vocabulary: of the model.
        features: to learn from.
        epochs: passes over them.
        seed: of the network and of the order.
        progress: called with the steps that are done, all of them, and the loss of the first guess.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        features: Sequence[Features],
        *,
        epochs: int,
        seed: int,
        progress: Callable[[int, int, float], None] = lambda *_: None,
    ) -> None:
        self._vocabulary, self._features, self._epochs = vocabulary, features, epochs
        self._order, self._progress = torch.Generator().manual_seed(seed), progress
        width = features[0].hidden.shape[1]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._head = DraftHead(width, WIDENING * width)

    def train(self, held_out: Sequence[Features]) -> TrainingResult:
        """All passes over the data; then the shares of right guesses in held-out features."""
        started = time.perf_counter()
        steps = self._epochs * math.ceil(len(self._features) / _BATCH)
        optimizer = torch.optim.AdamW(self._head.parameters(), lr=_RATE, weight_decay=_DECAY)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / _WARMUP) * (1 - step / steps)
        )
        losses, step = list[float](), 0
        for _ in range(self._epochs):
            total, count = 0.0, 0
            for batch in self._batches():
                guessed = self._losses(batch)
                if not guessed:
                    continue
                loss = sum((_FADING**at * each for at, each in enumerate(guessed)), torch.zeros(()))
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                first = guessed[0].item()
                step, total, count = step + 1, total + first, count + 1
                self._progress(step, steps, first)
            losses.append(total / max(count, 1))
        self._head.eval().requires_grad_(False)
        shares = acceptance(self._head, self._vocabulary, held_out)
        return TrainingResult(self._head, shares, tuple(losses), time.perf_counter() - started)

    def _batches(self) -> Iterator[list[Features]]:
        order = torch.randperm(len(self._features), generator=self._order).tolist()
        for at in range(0, len(order), _BATCH):
            yield [self._features[each] for each in order[at : at + _BATCH]]

    def _losses(self, batch: Sequence[Features]) -> list[Tensor]:
        """Cross entropy of each guess with the model's own distribution, where something is learned."""
        ids, hidden, learned = padded(batch)
        with torch.no_grad():
            teacher = self._vocabulary.logits(hidden)
        losses = []
        for at, state in enumerate(states(self._head, self._vocabulary, ids, hidden, GUESSES)):
            # The state behind token t + 1 + at guesses token t + 2 + at.
            places = learned[:, at + 2 :]
            if not places.any():
                break
            logits = self._vocabulary.logits(self._head.read(state[:, : places.shape[1]][places]))
            wanted = teacher[:, at + 1 : at + 1 + places.shape[1]][places].softmax(-1)
            losses.append(-(wanted * logits.log_softmax(-1)).sum(-1).mean())
        return losses


def padded(batch: Sequence[Features]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, float32 hidden states and learned places of several texts, padded at the end."""
    ids, hidden, learned = (
        pad_sequence([getattr(each, name) for each in batch], batch_first=True)
        for name in ("ids", "hidden", "learned")
    )
    return ids, hidden.float(), learned


def states(
    head: DraftHead, vocabulary: Vocabulary, ids: Tensor, hidden: Tensor, guesses: int
) -> Iterator[Tensor]:
    """For each guess: states ``[B, T, width]``; row t goes on from the hidden state of token t."""
    state = hidden
    for at in range(min(guesses, ids.shape[1] - 1)):
        tokens = functional.pad(ids[:, at + 1 :], (0, at + 1))
        state = head(state, vocabulary.embed(tokens))
        yield state


@torch.no_grad()
def acceptance(head: DraftHead, vocabulary: Vocabulary, features: Sequence[Features]) -> tuple[float, ...]:
    """The shares of passes in which the first, second, ... guess and those before are the model's choice.

    The model's choice is its most likely token behind the text. Places behind a token that is not its choice
    do not count: greedy text does not have them.

    Raises:
        ConfigurationError: there is no place that counts.
    """
    right, counted = torch.zeros(GUESSES), torch.zeros(GUESSES)
    for each in features:
        ids, hidden, learned = padded([each])
        chosen = vocabulary.tokens.cpu()[vocabulary.logits(hidden).argmax(-1)]  # row t: of token t + 1
        agree = functional.pad(ids[:, 1:] == chosen[:, :-1], (1, 0)) & learned  # row t: token t is the choice
        so_far = agree[:, 1:]  # row t goes on from the hidden state of token t, with token t + 1
        for at, state in enumerate(states(head, vocabulary, ids, hidden, GUESSES)):
            # Guess `at` of row t is of token t + 2 + at.
            width = ids.shape[1] - at - 2
            so_far = so_far[:, :width].clone()
            guess = vocabulary.tokens.cpu()[vocabulary.logits(head.read(state[:, :width])).argmax(-1)]
            counted[at] += so_far.sum()
            so_far &= guess == chosen[:, at + 1 : at + 1 + width]
            right[at] += so_far.sum()
            so_far &= agree[:, at + 2 :]  # behind another token stands another text than the model's
    if not counted[0]:
        raise ConfigurationError(
            "a draft needs held-out text that the model would write itself: answers of the model, or texts "
            "that the adapter has learned"
        )
    return tuple((right / counted.clamp(min=1)).cumprod(0).tolist())
