"""Three kinds of drafts, trained on the same text: tokens a pass, and the time that guesses take.

The last line is the product's draft as it is used: it repeats the text where this is right more often.

    python benchmarks/draft_kinds.py --model out/models/SmolLM2-135M-Instruct --data chats.jsonl

The file has chats whose answers the model wrote (``drafts.py --data`` makes such a file). A local copy of the
model computes the last hidden states. Then each kind learns from the same texts, in the same order, with the
same loss, optimizer and number of steps:

- *recurrent*: the product's (``tenant_sdk/drafts/head.py``), as in ReDrafter and Hydra;
- *attention*: one decoder layer that reads all earlier hidden states, and its own for guesses, as in EAGLE-3
  (Li et al. 2025, section 3);
- *heads*: a network of its own for each guess, which knows no other guess, as in Medusa (Cai et al. 2024,
  section 2.1).

All read the model's own output head.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import save
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from tenant_sdk.drafts.head import WIDENING, DraftHead, Guesser, Vocabulary
from tenant_sdk.drafts.training import (
    LEARNED,
    Features,
    Positions,
    collect,
    frequent_tokens,
    gain,
    mean_tokens_a_pass,
    repeated_shares,
)
from tenant_sdk.tuning.data import Reader
from tenant_sdk.tuning.sampling import ends_of

PLACES = 256  # in a batch, about
HELD_OUT = 10  # one text of so many
FADING, THINNING = 0.8, 0.5  # as the product trains
RATE, WARMUP, DECAY = 1e-3, 50, 0.01
CONTEXT, REPEATS = 128, 200  # tokens that lie before timed guesses, and how often these are timed
console = Console(width=None if sys.stdout.isatty() else 120)


class Batch(NamedTuple):
    """Texts, padded on the right.

    Attributes:
        hidden: float32 ``[B, T, width]``.
        ids: int64 ``[B, T]``.
        guessable: int64 ``[B, T]``; see ``Positions``.
    """

    hidden: Tensor
    ids: Tensor
    guessable: Tensor


class Kind(nn.Module):
    """One kind of draft."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.vocabulary = vocabulary

    def guesses(self, batch: Batch) -> Iterator[Tensor]:
        """For each guess, behind right ones, what the output head shall read: ``[B, T, width]``."""
        raise NotImplementedError

    def timed(self, hidden: Tensor, ids: Tensor) -> Callable[[], object]:
        """Makes all guesses behind a text ``[1, T, width]``, whose earlier tokens it has read."""
        raise NotImplementedError

    def embed(self, ids: Tensor, ahead: int) -> Tensor:
        """Embeddings of the tokens so many places further on; zeros behind the end."""
        return self.vocabulary.embed(functional.pad(ids[:, ahead:], (0, min(ahead, ids.shape[1]))))


class Recurrent(Kind):
    """The product's."""

    def __init__(self, width: int, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.head = DraftHead(width, WIDENING * width)

    def guesses(self, batch: Batch) -> Iterator[Tensor]:
        """See Kind."""
        state = batch.hidden
        for at in range(LEARNED):
            state = self.head(state, self.embed(batch.ids, 1 + at))
            yield self.head.read(state)

    def timed(self, hidden: Tensor, ids: Tensor) -> Callable[[], object]:
        """See Kind."""

        def run() -> None:
            state, token = hidden[:, -1], ids[:, -1]
            for _ in range(LEARNED):
                state = self.head(state, self.vocabulary.embed(token))
                token = self.vocabulary.likeliest(self.head.read(state))[0]

        return run


class Heads(Kind):
    """A residual network for each guess."""

    def __init__(self, width: int, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LEARNED))
        for layer in self.layers:
            nn.init.zeros_(layer.weight)  # so each begins with the model's own next token

    def guesses(self, batch: Batch) -> Iterator[Tensor]:
        """See Kind."""
        for layer in self.layers:
            yield batch.hidden + functional.silu(layer(batch.hidden))

    def timed(self, hidden: Tensor, ids: Tensor) -> Callable[[], object]:
        """See Kind."""

        def run() -> None:
            last = hidden[:, -1]
            states = torch.cat([last + functional.silu(layer(last)) for layer in self.layers])
            self.vocabulary.likeliest(states)

        return run


class Attention(Kind):
    """A decoder layer over the hidden states of the text, and over its own where the text is guessed."""

    def __init__(self, width: int, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.heads = max(1, width // 64)
        self.state_norm, self.token_norm, self.feed_norm, self.output_norm = (
            nn.RMSNorm(width, eps=1e-6) for _ in range(4)
        )
        self.query, self.key, self.value = (nn.Linear(2 * width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        hidden = WIDENING * width
        self.up, self.gate = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        for layer in (self.out, self.down):
            nn.init.zeros_(layer.weight)

    def projected(self, state: Tensor, token: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, turned by their places, and values: ``[B, heads, T, width of a head]``."""
        both = torch.cat([self.state_norm(state), self.token_norm(token)], -1)
        query, key, value = (
            layer(both).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return turned(query, places), turned(key, places), value

    def finished(self, state: Tensor, attended: Tensor) -> Tensor:
        """The state behind a token, from what its query found ``[B, heads, T, width of a head]``."""
        state = state + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.feed_norm(state)
        changed: Tensor = state + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return changed

    def guesses(self, batch: Batch) -> Iterator[Tensor]:
        """See Kind. Each place's guesses read the text up to the place, and the guesses before them."""
        state, length = batch.hidden, batch.ids.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        own: list[tuple[Tensor, Tensor]] = []
        for at in range(LEARNED):
            places = torch.arange(length) + at
            query, key, value = self.projected(state, self.embed(batch.ids, 1 + at), places)
            own.append((key, value))
            scale = query.shape[-1] ** -0.5
            text = (query @ own[0][0].transpose(-1, -2) * scale).masked_fill(future, -torch.inf)
            later = [(query * keys).sum(-1, keepdim=True) * scale for keys, _ in own[1:]]
            weights = torch.cat([text, *later], -1).softmax(-1)
            attended = weights[..., :length] @ own[0][1]
            for number, (_, values) in enumerate(own[1:]):
                attended = attended + weights[..., length + number, None] * values
            state = self.finished(state, attended)
            yield self.output_norm(state)

    def timed(self, hidden: Tensor, ids: Tensor) -> Callable[[], object]:
        """See Kind."""
        _, keys, values = self.projected(hidden, self.vocabulary.embed(ids), torch.arange(hidden.shape[1]))

        def run() -> None:
            state, token, cache = hidden[:, -1:], ids[:, -1:], (keys, values)
            for at in range(LEARNED):
                place = torch.tensor([hidden.shape[1] + at])
                query, key, value = self.projected(state, self.vocabulary.embed(token), place)
                cache = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
                state = self.finished(state, functional.scaled_dot_product_attention(query, *cache))
                token = self.vocabulary.likeliest(self.output_norm(state))[0]

        return run


def turned(heads: Tensor, places: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, section 3.2)."""
    half = heads.shape[-1] // 2
    angles = places[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    first, second = heads[..., :half], heads[..., half:]
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)


def batches(features: Sequence[Features], order: Sequence[int]) -> Iterator[Batch]:
    """Texts in order, about ``PLACES`` places at once."""
    part: list[Features] = []
    for number, index in enumerate(order):
        part.append(features[index])
        if sum(int(each.learned.sum()) for each in part) >= PLACES or number == len(order) - 1:
            padded = [
                nn.utils.rnn.pad_sequence(column, batch_first=True)
                for column in (
                    [each.hidden.float() for each in part],
                    [each.ids for each in part],
                    [Positions([each]).guessable for each in part],
                )
            ]
            yield Batch(*padded)
            part = []


def losses(kind: Kind, batch: Batch, random: torch.Generator) -> list[Tensor]:
    """Cross entropy of each guess with the model's own distribution."""
    found, kept = list[Tensor](), batch.guessable > 0
    for at, state in enumerate(kind.guesses(batch)):
        kept = kept & (batch.guessable > at)
        if at:
            kept = kept & (torch.rand(kept.shape, generator=random) < THINNING)
        if not kept.any():
            break
        with torch.no_grad():
            right = functional.pad(batch.hidden[:, 1 + at :], (0, 0, 0, 1 + at))[kept]
            wanted = kind.vocabulary.logits(right).softmax(-1)
        found.append(-(wanted * kind.vocabulary.logits(state[kept]).log_softmax(-1)).sum(-1).mean())
    return found


def train(kind: Kind, features: Sequence[Features], epochs: int, title: str) -> float:
    """All epochs; the seconds that they took."""
    began, random = time.perf_counter(), torch.Generator().manual_seed(0)
    steps = epochs * sum(1 for _ in batches(features, range(len(features))))
    optimizer = torch.optim.AdamW(kind.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * max(0.0, 1 - step / steps)
    )
    step = 0
    for epoch in range(epochs):
        for batch in batches(features, torch.randperm(len(features), generator=random).tolist()):
            guessed = losses(kind, batch, random)
            loss = sum((FADING**at * each for at, each in enumerate(guessed)), torch.zeros(()))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(kind.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
        console.print(f"{title}: epoch {epoch + 1} of {epochs}, loss of the first guess {guessed[0]:.2f}")
    kind.eval().requires_grad_(False)
    return time.perf_counter() - began


@torch.no_grad()
def tokens_a_pass(kind: Kind, features: Sequence[Features]) -> float:
    """Of greedy writing of some texts, as ``gain`` finds it for the product's kind."""
    written, runs = list[bool](), list[int]()
    for text in features:
        batch = next(batches([text], [0]))
        chosen = kind.vocabulary.chosen(batch.hidden)
        agrees = functional.pad(batch.ids[:, 1:] == chosen[:, :-1], (1, 0))
        right, run = batch.guessable > 0, torch.zeros_like(batch.ids)
        for at, state in enumerate(kind.guesses(batch)):
            ahead, more = 1 + at, (0, 1 + at)
            right &= (batch.guessable > at) & functional.pad(agrees[:, ahead:], more)
            right &= kind.vocabulary.likeliest(state)[0] == functional.pad(chosen[:, ahead:], more)
            run += right
        written += (text.learned & agrees[0]).tolist()
        runs += run[0].tolist()
    return mean_tokens_a_pass(written, runs)


def timed(kinds: dict[str, Kind], width: int) -> dict[str, float]:
    """Milliseconds in which each kind makes all guesses for one text, in turn; medians."""
    hidden, ids = torch.randn(1, CONTEXT, width), torch.zeros(1, CONTEXT, dtype=torch.int64)
    runs = {title: kind.timed(hidden, ids) for title, kind in kinds.items()}
    seconds: dict[str, list[float]] = {title: [] for title in runs}
    with torch.no_grad():
        for _ in range(REPEATS):
            for title, run in runs.items():
                began = time.perf_counter()
                run()
                seconds[title].append(time.perf_counter() - began)
    return {title: 1e3 * statistics.median(each) for title, each in seconds.items()}


def main() -> None:
    """Print a table; write draft_kinds.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="chats whose answers the model wrote")
    parser.add_argument("--adapter", type=Path, help="folder of an adapter that wrote the answers")
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model.eval().requires_grad_(False)
    if options.adapter:
        model = PeftModel.from_pretrained(model, options.adapter)
    reader = Reader(
        tokenizer, 512, False, ends=ends_of(model.generation_config, tokenizer), notify=console.print
    )
    features = collect(model, reader.read([options.data]), 8)
    held_out, learned = features[::HELD_OUT], [each for at, each in enumerate(features) if at % HELD_OUT]
    vocabulary = Vocabulary.of(model, frequent_tokens(learned, model.config.vocab_size))
    width = features[0].hidden.shape[1]
    kinds: dict[str, Kind] = {}
    for kind in (Recurrent, Attention, Heads):
        torch.manual_seed(0)
        kinds[kind.__name__.lower()] = kind(width, vocabulary)
    seconds = {title: train(kind, learned, options.epochs, title) for title, kind in kinds.items()}
    gains = {title: tokens_a_pass(kind, held_out) for title, kind in kinds.items()}
    milliseconds = timed(kinds, width)
    count = sum(int(each.learned.sum()) for each in learned)
    table = Table(title=f"{count:,} tokens learned, {options.epochs} times; {LEARNED} guesses")
    for heading in ("kind", "tokens a pass", "million parameters", "ms", "minutes"):
        table.add_column(heading, justify="right")
    found = {}
    for title, kind in kinds.items():
        size = sum(each.numel() for each in kind.parameters()) / 1e6
        found[title] = {
            "tokens_a_pass": gains[title], "million_parameters": size,
            "milliseconds": milliseconds[title], "training_seconds": seconds[title],
        }  # fmt: skip
        figures = (
            f"{gains[title]:.2f}",
            f"{size:.1f}",
            f"{milliseconds[title]:.2f}",
            f"{seconds[title] / 60:.1f}",
        )
        table.add_row(title, *figures)
    recurrent = kinds["recurrent"]
    assert isinstance(recurrent, Recurrent)
    for title, repeats in (("alone", ()), ("with repetitions", repeated_shares(learned))):
        guesser = Guesser(recurrent.head, vocabulary, repeats)
        found[title] = {"tokens_a_pass": gain(guesser, Positions(held_out)).tokens_a_pass}
        table.add_row(f"recurrent, 8 guesses, {title}", f"{found[title]['tokens_a_pass']:.2f}")
    console.print(table)
    save(options.output / "draft_kinds.json", {"learned": count, "epochs": options.epochs, "kinds": found})


if __name__ == "__main__":
    main()
