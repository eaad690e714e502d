"""Drafts: how they are trained, and tokens a second with them, beside kept layers, at several distances.

    python benchmarks/drafts.py --model out/models/SmolLM2-135M-Instruct
    python benchmarks/drafts.py --model ... --adapter out/demo/adapter \
        --data examples/data/chats_train.jsonl --held-out examples/data/chats_heldout.jsonl

A local copy of the model answers made-up prompts. `make_draft` learns these answers through an executor.
Prompts about other topics are then answered in sessions with one-time masks: without anything, with a quarter
of the weights kept, with the draft, and with both, in turn. Provider and mask source are processes of this
machine, behind a relay that holds back what passes. Prompt lookup is transformers' own.

With an adapter, the draft learns the chats of ``--data`` as they are, and answers those of ``--held-out``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from common import Executor, executor, save
from distance import away
from matplotlib import pyplot
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

import tenant_sdk
from tenant_sdk.drafts.head import backbones_of
from tenant_sdk.drafts.making import DraftCallbacks, make_draft
from tenant_sdk.drafts.options import DraftOptions
from tenant_sdk.trust.attestation import base_model
from tenant_sdk.tuning.data import chat_prompt
from tenant_sdk.tuning.generation import answer_ids
from tenant_sdk.tuning.sampling import Sampling

TOPICS = [
    "bread",
    "rain",
    "volcanoes",
    "bicycles",
    "sleep",
    "cheese",
    "trains",
    "chess",
    "gardening",
    "coffee",
    "dolphins",
    "electricity",
    "vaccines",
    "poetry",
    "soccer",
    "bridges",
    "honey",
    "mountains",
    "computers",
    "painting",
    "rivers",
    "winter",
    "salt",
    "friendship",
    "clocks",
    "glass",
    "tea",
    "libraries",
    "swimming",
    "tigers",
    "history",
    "music",
    "robots",
    "elections",
    "airplanes",
    "stars",
    "oceans",
    "jazz",
    "maps",
    "butter",
    "dreams",
    "cameras",
    "wheat",
    "lightning",
    "whales",
    "insurance",
    "oxygen",
    "gold",
    "yoga",
    "magnets",
    "theatre",
    "apples",
    "wolves",
    "paper",
    "islands",
    "running",
    "photosynthesis",
    "gravity",
    "inflation",
    "spiders",
    "deserts",
    "bees",
    "vitamins",
    "castles",
    "opera",
    "earthquakes",
    "pencils",
    "cats",
    "dogs",
    "hiking",
    "skiing",
    "camping",
    "fishing",
    "chemistry",
    "physics",
    "algebra",
    "statistics",
    "databases",
    "compilers",
    "passwords",
    "batteries",
    "forests",
    "bamboo",
    "roses",
    "tomatoes",
    "rice",
    "soup",
    "pasta",
    "chocolate",
    "knives",
    "shoes",
    "hats",
    "umbrellas",
    "violins",
    "guitars",
    "drums",
    "tennis",
    "golf",
    "penguins",
    "elephants",
    "horses",
    "owls",
    "frogs",
    "ants",
    "sharks",
    "turtles",
    "snakes",
    "lions",
    "bears",
    "rabbits",
]
QUESTIONS = (
    "Explain {} to a child.",
    "What is interesting about {}?",
    "Write a short poem about {}.",
    "List five facts about {}.",
    "Give me three tips about {}.",
    "Write a short story that mentions {}.",
    "Why do people care about {}?",
    "Write an email to a friend about {}.",
    "What are the advantages and disadvantages of {}?",
    "How would you describe {} in two sentences?",
    "Can you summarise the history of {}?",
    "Write a dialogue between two people about {}.",
)
HELD_OUT_TOPICS = 16
console = Console(width=None if sys.stdout.isatty() else 120)


def prompts() -> tuple[list[str], list[str]]:
    """To learn from, and about other topics."""
    order = random.Random(5)
    topics = order.sample(TOPICS, len(TOPICS))
    halves = topics[HELD_OUT_TOPICS:], topics[:HELD_OUT_TOPICS]
    learned, held_out = (
        [question.format(topic) for topic, question in product(half, QUESTIONS)] for half in halves
    )
    return order.sample(learned, len(learned)), order.sample(held_out, len(held_out))


def write_answers(model: Path, asked: list[str], most: int, file: Path) -> None:
    """Chats for training: prompts and the answers of a local copy of the model."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    local: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with file.open("a") as out:
        done = len(file.read_text().splitlines())
        for at in range(done, len(asked), 24):
            part = asked[at : at + 24]
            ids = [chat_prompt(tokenizer, [{"role": "user", "content": each}]) for each in part]
            answers = tokenizer.batch_decode(
                answer_ids(local, tokenizer, ids, Sampling(max_new_tokens=most)), skip_special_tokens=True
            )
            for question, answer in zip(part, answers, strict=True):
                turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                out.write(json.dumps({"messages": turns}) + "\n")
            out.flush()
            console.print(f"{at + len(part)} of {len(asked)} answers")


def train(pair: tuple[Executor, Executor], adapter: Path | None, data: Path, folder: Path) -> dict[str, Any]:
    """A draft, through an executor, without masks: these would change the times, not the draft."""
    began = time.perf_counter()
    with tenant_sdk.connect(pair[0].url, token=pair[0].token, ca=pair[0].ca, privacy="plain") as session:
        loaded: Any = session.load_model(progress=False)
        if adapter:
            loaded = tenant_sdk.load_adapter(loaded, adapter, session)
        tokenizer = session.load_tokenizer()
        options = DraftOptions(folder, data=[data])
        report = make_draft(options, loaded, tokenizer, session, DraftCallbacks(notify=console.print))
    seconds = time.perf_counter() - began
    console.print(
        f"draft: {report.tokens_a_pass:.2f} tokens a pass of held-out text, in {seconds / 60:.1f} minutes; "
        f"shares {[round(each, 2) for each in report.acceptance]}"
    )
    return {"tokens_a_pass": report.tokens_a_pass, "shares": report.acceptance, "seconds": seconds}


class Way:
    """A session in which text is written in one way."""

    def __init__(
        self, pair: tuple[Executor, Executor], adapter: Path | None, gib: float, folder: Path | None
    ) -> None:
        provider, source = pair
        self.session = tenant_sdk.connect(
            provider.url,
            token=provider.token,
            ca=provider.ca,
            mask_sources=[source.url],
            mask_source_token=source.token,
            mask_source_ca=source.ca,
            allow_same={"all"},
            keep_gib=gib,
        )
        self.model: Any = self.session.load_model(progress=False)
        if adapter:
            self.model = tenant_sdk.load_adapter(self.model, adapter, self.session)
        self.draft = folder and tenant_sdk.load_draft(folder, self.model, self.session)
        self.rates: list[float] = []

    def write(self, ids: list[int], tokens: int) -> list[int]:
        """An answer, whose tokens a second count."""
        prompt = torch.tensor([ids])
        options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
        more = {"custom_generate": self.draft} if self.draft else {}
        began = time.perf_counter()
        text: Any = self.model.generate(input_ids=prompt, max_new_tokens=tokens, **options, **more)
        new: list[int] = text[0, len(ids) :].tolist()
        self.rates.append(len(new) / (time.perf_counter() - began))
        return new


def lookup(model: Path, adapter: Path | None, asked: list[list[int]], tokens: int) -> float:
    """Tokens that a pass writes with prompt lookup, in a local model."""
    local: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter:
        local = PeftModel.from_pretrained(local, adapter).eval()
    passes, written = [0], 0
    backbones_of(base_model(local))[-1].register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    for ids in asked:
        prompt = torch.tensor([ids])
        text = local.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=tokens,
            prompt_lookup_num_tokens=5,
            pad_token_id=0,
        )
        written += text.shape[1] - len(ids)
    return written / passes[0]


def main() -> None:
    """Print a table; write drafts.json and drafts.png."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="a folder instead of a new draft")
    parser.add_argument("--data", type=Path, help="file with chats, to which missing answers are added")
    parser.add_argument("--adapter", type=Path, help="folder of an adapter that answers")
    parser.add_argument("--held-out", type=Path, help="file with chats instead of made-up prompts")
    parser.add_argument("--answers", type=int, default=480)
    parser.add_argument("--distances", type=float, nargs="+", default=[0.0, 1.0, 10.0], help="ms")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    if options.adapter and not (options.draft or options.data):
        parser.error("--adapter needs --data, the chats that its draft learns, or --draft")
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    options.output.mkdir(parents=True, exist_ok=True)
    learned, held_out = prompts()
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    chats = [[{"role": "user", "content": each}] for each in held_out]
    if options.held_out:
        chats = [json.loads(line)["messages"][:-1] for line in options.held_out.read_text().splitlines()]
    asked = [chat_prompt(tokenizer, each) for each in chats]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        data = options.data or folder / "chats.jsonl"
        if options.draft is None and options.adapter is None:
            write_answers(options.model, learned[: options.answers], 112, data)
        both = [
            stack.enter_context(executor(options.model, folder / party, "--numerics", "ring"))
            for party in ("provider", "source")
        ]
        draft = options.draft or options.output / f"draft-{int(time.time())}"
        if options.draft is None:
            found["training"] = train((both[0], both[1]), options.adapter, data, draft)
        found["lookup"] = lookup(options.model, options.adapter, asked[: options.rounds * 2], options.tokens)
        console.print(f"prompt lookup: {found['lookup']:.2f} tokens a pass")
        found["rates"] = {
            distance: measure(both, distance, draft, asked, options) for distance in sorted(options.distances)
        }
    save(options.output / "drafts.json", found)
    plot(found["rates"], options.output / "drafts.png")


def measure(
    both: list[Executor], distance: float, draft: Path, asked: list[list[int]], options: Any
) -> dict[str, Any]:
    """All ways at one distance, in turn, with the same prompts."""
    with ExitStack() as relays:
        pair = tuple(relays.enter_context(away(each, distance / 1e3)) for each in both)
        with tenant_sdk.connect(both[0].url, token=both[0].token, ca=both[0].ca, privacy="plain") as session:
            groups = [each for each in session.manifest.groups if not each.head]
        size = 4 * sum(each.inputs * sum(m.outputs for m in each.members) for each in groups) / 2**30
        ways = {
            title: Way(pair, options.adapter, gib, folder)
            for title, gib, folder in (
                ("nothing", 0.0, None),
                ("a quarter kept", 0.2501 * size, None),
                ("draft", 0.0, draft),
                ("both", 0.2501 * size, draft),
            )
        }
        for way in ways.values():  # meets its code and memory, and chooses its number of guesses
            relays.callback(way.session.close)
            way.write(asked[-1], 16)
            way.rates.clear()
        for ids in asked[: options.rounds]:
            texts = [way.write(ids, options.tokens) for way in ways.values()]
            assert texts[0] == texts[2], "greedy text depends on the draft"
    table = Table(title=f"{distance:g} ms away")
    for heading in ("way", "tokens/s", "times", "tokens a pass", "guesses"):
        table.add_column(heading, justify="right")
    rows = {}
    base = ways["nothing"].rates
    for title, way in ways.items():
        times = [mine / theirs for mine, theirs in zip(way.rates, base, strict=True)]
        passes = way.draft.tokens / way.draft.passes if way.draft else 1.0
        guesses = way.draft._length.chosen if way.draft else 0
        rows[title] = [statistics.median(way.rates), min(times), statistics.median(times), max(times), passes]
        spread = f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
        table.add_row(title, f"{statistics.median(way.rates):.2f}", spread, f"{passes:.2f}", str(guesses))
    console.print(table)
    return rows


def plot(rates: dict[float, Any], path: Path) -> None:
    """Tokens a second over the distance."""
    figure, axes = pyplot.subplots(figsize=(7, 4), constrained_layout=True)
    for title in next(iter(rates.values())):
        axes.plot(
            [f"{each:g} ms" for each in rates], [row[title][0] for row in rates.values()], "o-", label=title
        )
    axes.set(xlabel="round trip", ylabel="tokens a second", yscale="log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:.3g}")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
