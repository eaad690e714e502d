"""Training of a draft: the model's last hidden states of some text, and a short training on this machine.

The text is passed through the model once, which is all that the executor sees. The network then learns the
model's own distribution behind each token, by distillation, as in EAGLE (Li et al. 2024, section 3.2) and
ReDrafter (section 3.3). The loss of the second and later guesses weighs less, since they count only if those
before are right.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from shared.atomic import atomic_file
from shared.errors import ConfigurationError
from tenant_sdk.drafts.head import MAX_VOCABULARY, WIDENING, DraftHead, Guesser, Vocabulary, backbones_of
from tenant_sdk.drafts.repeats import LONGEST, WINDOW, Ids, repeated
from tenant_sdk.storage import UNREADABLE_TENSORS
from tenant_sdk.trust.attestation import base_model
from tenant_sdk.tuning.conversations import IGNORE_INDEX, Example
from tenant_sdk.tuning.data import collate

GUESSES = 8  # of a draft at most
LEARNED = 5  # guesses that the network learns; more are right seldom, unless the text repeats itself
_LOSS_DECAY = 0.8  # weight of each guess's loss, in those of the one before
_THINNING = 0.5  # of the places of a guess, the part at which the next one is learned
_RATE, _WARMUP, _DECAY = 1e-3, 50, 0.01
BATCH = 256  # places


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
            hidden = backbones_of(base)[-1](**inputs, use_cache=False).last_hidden_state.to(
                "cpu", torch.bfloat16
            )
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
    except UNREADABLE_TENSORS:  # this process was killed while it was written
        return None


def _keep_hidden(folder: Path | None, part: Sequence[Example], hidden: Tensor) -> None:
    if folder is not None:
        with atomic_file(folder / _name(part)) as file:
            save_file({"hidden": hidden.contiguous()}, file)


def frequent_tokens(features: Sequence[Features], vocabulary: int) -> Tensor:
    """Int64 ``[S]``: ids that occur where something is learned, the most frequent ones."""
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for each in features:
        counts += torch.bincount(each.ids[each.learned], minlength=vocabulary)
    found = counts.argsort(descending=True)[:MAX_VOCABULARY]
    return found[counts[found] > 0]


def repeated_shares(features: Sequence[Features]) -> tuple[float, ...]:
    """How often the learned tokens of texts repeat what stands before: see ``Guesser``."""
    right, counted = [0] * LONGEST, [0] * LONGEST
    for each in features:
        ids = each.ids.numpy()
        for at in each.learned.nonzero().flatten().tolist():
            length, token = repeated(ids[:at]) if at else (0, 0)
            if length:
                counted[length - 1] += 1
                right[length - 1] += token == int(ids[at])
    return tuple(one / max(1, all_) for one, all_ in zip(right, counted, strict=True))


class Positions:
    """The places of several texts from which guesses can begin, one after the other.

    Args:
        features: of the texts.

    Attributes:
        ids: int64 ``[N]``, of all texts.
        hidden: bfloat16 ``[N, width]``.
        learned: bool ``[N]``.
        guessable: int64 ``[N]``: how many tokens behind the next one can be guessed from here.
        begin: int64 ``[N]``: the first place of the own text.
    """

    def __init__(self, features: Sequence[Features]) -> None:
        self.ids, self.hidden, self.learned = (
            torch.cat([getattr(each, name) for each in features]) for name in ("ids", "hidden", "learned")
        )
        self.guessable = torch.cat([_guessable(each.learned) for each in features])
        sizes = torch.tensor([len(each.ids) for each in features])
        self.begin = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)

    @property
    def starts(self) -> Tensor:
        """Int64 ``[P]``: places from which one token at least can be guessed."""
        return (self.guessable > 0).nonzero().squeeze(1)

    def states(self, at: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Hidden states of some places, float32, where the vocabulary is."""
        return self.hidden[at].to(vocabulary.device).float()

    def text(self, at: int) -> Ids:
        """Ids of the text up to the token behind a place, the newest ``WINDOW`` of them."""
        end = at + 2
        return self.ids[max(int(self.begin[at]), end - WINDOW) : end].numpy()


def _guessable(learned: Tensor) -> Tensor:
    """See ``Positions``: tokens t + 2, t + 3, ... as long as they are learned."""
    guessable = torch.zeros(len(learned), dtype=torch.int64)
    for at in range(len(learned) - 3, -1, -1):
        if learned[at + 2]:
            guessable[at] = min(GUESSES, 1 + int(guessable[at + 1]))
    return guessable


@dataclass(frozen=True)
class DraftGain:
    """How well a network guesses some text.

    Attributes:
        acceptance: see ``DraftCard``.
        tokens_a_pass: of greedy writing of this text, with all guesses. It is less than the shares promise,
            because a pass near the end of a text has little left to write.
    """

    acceptance: tuple[float, ...]
    tokens_a_pass: float


@dataclass(frozen=True)
class TrainingResult:
    """A trained network.

    Attributes:
        gain: in held-out text.
    """

    guesser: Guesser
    gain: DraftGain


class Trainer:
    """Trains a draft.

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
        self._places = places = Positions(features)
        self._random, self._progress = torch.Generator().manual_seed(seed), progress
        width = places.hidden.shape[1]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._head = DraftHead(width, WIDENING * width)
        self._head.to(vocabulary.device)

    def train(self, held_out: Positions) -> TrainingResult:
        """All passes over the places; then the gain in held-out text."""
        starts = self._places.starts
        steps = self._epochs * math.ceil(len(starts) / BATCH)
        optimizer = torch.optim.AdamW(self._head.parameters(), lr=_RATE, weight_decay=_DECAY)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / _WARMUP) * (1 - step / steps)
        )
        step = 0
        for _ in range(self._epochs):
            order = starts[torch.randperm(len(starts), generator=self._random)]
            for batch in order.split(BATCH):
                guessed = self._losses(batch)
                loss = sum((_LOSS_DECAY**at * each for at, each in enumerate(guessed)), torch.zeros(()))
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                step += 1
                self._progress(step, steps, guessed[0].item())
        self._head.eval().requires_grad_(False)
        guesser = Guesser(self._head, self._vocabulary, repeated_shares(self._features))
        return TrainingResult(guesser, gain(guesser, held_out))

    def _losses(self, at: Tensor) -> list[Tensor]:
        """Cross entropy of each guess with the model's own distribution, from some places.

        All guesses train the same network, so each is learned at a part of the places of the one before.
        """
        places, vocabulary, losses = self._places, self._vocabulary, list[Tensor]()
        state = places.states(at, vocabulary)
        for guess in range(LEARNED):
            kept = places.guessable[at] > guess
            if guess:
                kept &= torch.rand(len(at), generator=self._random) < _THINNING
            at, state = at[kept], state[kept]
            if not len(at):
                break
            state = self._head(state, vocabulary.embed(places.ids[at + 1 + guess]))
            with torch.no_grad():
                wanted = vocabulary.logits(places.states(at + 1 + guess, vocabulary)).softmax(-1)
            logits = vocabulary.logits(self._head.read(state))
            losses.append(-(wanted * logits.log_softmax(-1)).sum(-1).mean())
        return losses


@torch.no_grad()
def gain(guesser: Guesser, places: Positions) -> DraftGain:
    """What a draft makes of texts that the model would write.

    Positions behind a token that is not the model's choice do not count: greedy text does not have them.

    Raises:
        ConfigurationError: there is no place that counts.
    """
    vocabulary, everywhere = guesser.vocabulary, torch.arange(len(places.ids))
    chosen = torch.cat(
        [vocabulary.chosen(places.states(at, vocabulary)).cpu() for at in everywhere.split(BATCH)]
    )
    agrees = functional.pad(places.ids[1:] == chosen[:-1], (1, 0))  # the token is the model's choice
    right, counted = torch.zeros(GUESSES), torch.zeros(GUESSES)
    run = torch.zeros(len(places.ids), dtype=torch.int64)  # right guesses from a place, one after the other
    for at in places.starts.split(BATCH):
        texts = [places.text(place) for place in at.tolist()]
        guesses = guesser(places.states(at, vocabulary), texts, GUESSES).cpu()
        active = torch.ones(len(at), dtype=torch.bool)  # all guesses so far are right
        for guess in range(GUESSES):
            active &= places.guessable[at] > guess
            ahead = (at + 2 + guess).clamp(max=len(places.ids) - 1)
            active &= agrees[ahead]
            counted[guess] += active.sum()
            active &= guesses[:, guess] == places.ids[ahead]
            right[guess] += active.sum()
            run[at] += active
    if not counted[0]:
        raise ConfigurationError(
            "a draft needs held-out text that the model would write itself: answers of the model, or texts "
            "that the adapter has learned"
        )
    acceptance = tuple((right / counted.clamp(min=1)).cumprod(0).tolist())
    return DraftGain(acceptance, mean_tokens_a_pass((places.learned & agrees).tolist(), run.tolist()))


def mean_tokens_a_pass(written: Sequence[bool], run: Sequence[int]) -> float:
    """The tokens of a pass: the mean of a walk through texts, from pass to pass.

    Args:
        written: by token: it belongs to a text that is walked through. A text's first token is its prompt's.
        run: by place, of the token before the newest one: how many guesses are right.
    """
    tokens, passes, newest = 0, 0, 0
    while newest + 1 < len(written):
        if not (written[newest] and written[newest + 1]):
            newest += 1
            continue
        right, passes = run[newest - 1] if newest else 0, passes + 1
        ahead = newest + 1
        while ahead + 1 < len(written) and written[ahead + 1] and ahead < newest + 1 + right:
            ahead += 1
        tokens, newest = tokens + ahead - newest, ahead
    return tokens / passes if passes else 1.0
