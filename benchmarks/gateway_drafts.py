"""A gateway with a draft against one without, for several clients at once, at a distance.

    make gateway                                     # vLLM, in an environment of its own
    python benchmarks/gateway_drafts.py --model out/models/SmolLM2-135M-Instruct --adapter out/demo/adapter \
        --data examples/data/chats_train.jsonl --held-out examples/data/chats_heldout.jsonl

Both gateways serve the adapter, from the same provider and mask source, which a relay keeps at a distance.
Clients ask for answers to chats that nobody learned, at once. The gateways take turns.
Everything shares this machine's processors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
from common import arguments, executor, save, spread
from distance import away
from drafts import train
from gateway import gateway, load, wait_for_masks
from rich.console import Console

NAME = "adapter"
console = Console(width=None if sys.stdout.isatty() else 120)


async def answers(url: str, chats: list[Any], tokens: int) -> tuple[list[str], int]:
    """The texts that clients get who ask at once, and their tokens."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=900) as client:
        got = await asyncio.gather(
            *(
                client.chat.completions.create(model=NAME, messages=chat, max_tokens=tokens, temperature=0)
                for chat in chats
            )
        )
    texts = [each.choices[0].message.content or "" for each in got]
    return texts, sum(each.usage.completion_tokens for each in got if each.usage)


def measure(urls: dict[str, str], chats: list[Any], options: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens a second of each gateway, in turn, each time with other chats."""
    rates: dict[str, list[float]] = {way: [] for way in urls}
    for at in range(options.rounds):
        first = at * options.clients
        asked = [chats[(first + number) % len(chats)] for number in range(options.clients)]
        texts = list[list[str]]()
        for way, url in urls.items():
            wait_for_masks(url)
            began = time.perf_counter()
            found, count = asyncio.run(answers(url, asked, options.tokens))
            rates[way].append(count / (time.perf_counter() - began))
            texts.append(found)
        same = sum(one == other for one, other in zip(*texts, strict=True))
        now = ", ".join(f"{way} {each[-1]:.2f} tokens/s" for way, each in rates.items())
        console.print(f"round {at + 1} of {options.rounds}: {now}; {same} of {len(asked)} texts are the same")
    return rates


def main() -> None:
    """Print tokens a second and their ratio; write gateway_drafts.json."""
    parser = arguments(__doc__, rounds=5, output="out/bench")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, required=True, help="folder of the adapter that answers")
    parser.add_argument("--data", type=Path, required=True, help="chats that the draft learns")
    parser.add_argument("--held-out", type=Path, required=True, help="chats whose questions are asked")
    parser.add_argument("--draft", type=Path, help="a folder instead of a new draft")
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--distance", type=float, default=10.0, help="ms of a round trip to the executors")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer at most")
    options = parser.parse_args()
    chats = [json.loads(line)["messages"][:-1] for line in options.held_out.read_text().splitlines()]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name, ExitStack() as stack:
        work = Path(name)
        shutil.copytree(options.adapter, work / "adapters" / NAME)
        both = [
            stack.enter_context(executor(options.model, work / party, "--numerics", "ring"))
            for party in ("provider", "masks")
        ]
        draft = options.draft or work / "draft"
        if options.draft is None:
            found["training"] = train((both[0], both[1]), options.adapter, options.data, draft)
        distant = [stack.enter_context(away(each, options.distance / 1e3)) for each in both]
        ways = {"no draft": (), "draft": ("--speculate", draft, "--draft-tokens", options.draft_tokens)}
        urls = {}
        for way, more in ways.items():
            (work / way).mkdir()
            urls[way] = stack.enter_context(
                gateway(distant[0], distant[1], work / "adapters", work / way, *more)
            )
            load(urls[way], [NAME] * options.clients, 16)
        rates = found["rates"] = measure(urls, chats, options)
    for way, each in rates.items():
        console.print(f"{way}: {spread(each, digits=1)} tokens/s")
    ratios = [one / other for one, other in zip(rates["draft"], rates["no draft"], strict=True)]
    console.print(f"{options.clients} clients, {options.distance:g} ms: draft / no draft {spread(ratios)}")
    shape = {key: str(value) for key, value in vars(options).items() if key != "output"}
    save(options.output / "gateway_drafts.json", found | {"shape": shape, "ratios": ratios})


if __name__ == "__main__":
    main()
