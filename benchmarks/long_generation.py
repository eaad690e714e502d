"""Tokens of a long context: keys and values as transformers keeps them, in the host's memory, on the disk.

    python benchmarks/long_generation.py --rounds 3
    python benchmarks/long_generation.py --cold      # the file is read from the disk, not from its cache
    python benchmarks/long_generation.py --pieces    # what one layer costs

12 layers, d = 768, float32 (72 KiB of keys and values a token), an executor on the same machine, ``plain``.
The cache is filled with random keys and values; only what comes then is measured, the places in turn in one
process, and the memory of each in one of its own. With ``half``, half of the layers stay in memory. What the
system keeps in memory of files, as long as nobody else needs it, is not the process's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from common import (
    LAYERS,
    WIDTH,
    Executor,
    arguments,
    executor,
    forget_peak_memory,
    peak_memory_mib,
    spread,
    write_model,
)
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

import tenant_sdk
from shared.compat import cache_name
from tenant_sdk.sequences.encrypted_file import PIECE, EncryptedFile
from tenant_sdk.sequences.kv_budget import fill
from tenant_sdk.sequences.kv_layers import BLOCK, Block

TOKEN_BYTES = LAYERS * 2 * WIDTH * 4
HEADS, HEAD = 12, 64
FILLED, WARM = 4096, 3  # tokens that are filled in at once; new ones that are not counted
PLACES = ("transformers", "host", "disk", "half")
console = Console(width=None if sys.stdout.isatty() else 120)


class Times:
    """When each token came; before the next, the system forgets what it keeps of a file."""

    def __init__(self, file: int | None) -> None:
        self.at: list[tuple[float, float]] = []  # and when the next was begun
        self._file = file

    def put(self, ids: torch.Tensor) -> None:
        came = time.perf_counter()
        if self._file is not None:
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        self.at.append((came, time.perf_counter()))

    def end(self) -> None:
        pass


def filled(session: Any, model: Any, place: str, context: int) -> Any:
    """A cache with so many random tokens."""
    if place == "transformers":
        cache = DynamicCache(config=model.config)
    else:
        half = 1.15 * context * TOKEN_BYTES / 2 / 2**30 if place == "half" else 0.0
        kv = "host" if place == "host" else "disk"
        cache = session.generate_options(model, kv=kv, kv_memory_gib=half)[cache_name()]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for at in range(0, context, FILLED):
            new = torch.randn(1, min(FILLED, context - at), HEADS, HEAD, generator=generator).transpose(1, 2)
            for layer in cache.layers:
                layer.update(new, new)
    return cache


def tenant(options: argparse.Namespace) -> None:
    """Places in turn, all contexts: milliseconds of new tokens, a list a round; MiB of memory of them all."""
    found: dict[str, Any] = {}
    with tenant_sdk.connect(
        options.url, token=options.token, ca=options.ca, privacy="plain", patience=0.0
    ) as session:
        model = session.load_model(progress=False)
        for context in [256, *options.contexts]:  # the first is not counted
            prompt = torch.randint(3, 30000, (1, context + 1), generator=torch.Generator().manual_seed(1))
            caches = {place: filled(session, model, place, context) for place in options.places}
            texts = dict.fromkeys(caches, prompt)
            took: dict[str, list[list[float]]] = {place: [] for place in caches}
            forget_peak_memory(os.getpid())
            for _ in range(options.rounds):
                for place, cache in caches.items():
                    times = Times(file_of(cache) if options.cold else None)
                    texts[place] = model.generate(
                        texts[place],
                        attention_mask=torch.ones_like(texts[place]),
                        **{cache_name(): cache},
                        do_sample=False,
                        max_new_tokens=options.tokens + WARM,
                        min_new_tokens=options.tokens + WARM,
                        streamer=times,
                    )
                    pairs = zip(times.at[WARM:], times.at[WARM + 1 :], strict=False)
                    took[place].append([1e3 * (came - begun) for (_, begun), (came, _) in pairs])
            assert len({tuple(text[0].tolist()) for text in texts.values()}) == 1
            found[str(context)] = {"ms": took, "mib": peak_memory_mib()}
            del cache, caches
    print(json.dumps(found))


def file_of(cache: Any) -> int | None:
    """The descriptor of its file, all of which is on the disk then."""
    budgets = [layer._kv_budget for layer in cache.layers if hasattr(layer, "blocks")]
    if not budgets:
        return None
    os.fsync(budgets[0].spill._file)
    return int(budgets[0].spill._file)


def measure(running: Executor, options: argparse.Namespace, places: tuple[str, ...], rounds: int) -> Any:
    """Places, in one process."""
    command = [sys.executable, __file__, "--url", running.url, "--token", running.token, "--places", *places]
    command += ["--ca", str(running.ca), "--tokens", str(options.tokens), "--rounds", str(rounds)]
    command += ["--contexts", *map(str, options.contexts), *(["--cold"] if options.cold else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def show(times: Any, memory: Any, contexts: list[int]) -> None:
    """Milliseconds a token, and what that is of transformers' and of host's; MiB of a process with one."""
    table = Table(title="ms a new token: median of rounds, least and most; MiB of memory", highlight=False)
    for column in ("tokens before", *memory):
        table.add_column(column)
    for context in map(str, contexts):
        middles = {place: list(map(statistics.median, took)) for place, took in times[context]["ms"].items()}
        cells = []
        for place, own in middles.items():
            of = [
                f"{statistics.median(a / b for a, b in zip(own, middles[to], strict=True)):.2f}"
                for to in ("transformers", "host")
                if to in middles and to != place
            ]
            cells.append("; ".join([spread(own, 1, 0), *of, f"{memory[place][context]['mib']:,.0f} MiB"]))
        table.add_row(f"{int(context):,}", *cells)
    console.print(table)
    console.print("between: ratios to transformers' and to host, medians of those of each round")


def pieces(context: int, repeats: int = 40) -> None:
    """What a token costs in one layer: least milliseconds, as other work only adds to them."""
    spill = EncryptedFile()
    keys, values = torch.randn(2, 1, HEADS, context, HEAD)
    first = [torch.randn(context, 1, HEADS, HEAD).permute(1, 2, 0, 3) for _ in range(2)]
    new = torch.randn(1, HEADS, 1, HEAD)
    blocks = [Block(*[spill.write(each)] * 2) for each in keys.split(BLOCK, 2)]
    out = [torch.zeros_like(keys), torch.zeros_like(keys)]
    sealed, cipher = bytearray(PIECE + 16), AESGCM(bytes(16))
    cipher.encrypt_into(bytes(12), bytes(PIECE), None, sealed)
    plain, count = bytearray(PIECE), 2 * keys.nbytes // PIECE
    attention = torch.nn.functional.scaled_dot_product_attention
    for name, what in {
        "attention": lambda: attention(new, keys, values),
        "attention, tokens first": lambda: attention(new, *first),
        "torch.cat of keys and of values": lambda: [torch.cat([each, new], 2) for each in (keys, values)],
        "reading back": lambda: fill(spill, list(enumerate(blocks)), out),
        "of that, decrypting": lambda: [
            cipher.decrypt_into(bytes(12), sealed, None, plain) for _ in range(count)
        ],
    }.items():
        took = []
        for _ in range(repeats):
            began = time.perf_counter()
            what()
            took.append(1e3 * (time.perf_counter() - began))
        console.print(f"{name}: {min(took):.1f} ms, median {statistics.median(took):.1f}", highlight=False)


def main() -> None:
    """Measure in turn, print a table, write long_generation.json."""
    parser = arguments(__doc__, rounds=5, output="out/bench")
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 8192, 16384, 32768])
    parser.add_argument("--cold", action="store_true", help="each token, drop the file from memory")
    parser.add_argument("--pieces", action="store_true", help="what one layer costs, nothing else")
    parser.add_argument("--places", nargs="+", help=argparse.SUPPRESS)
    for name in ("url", "token", "ca"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.url:
        return tenant(options)
    if options.pieces:
        return pieces(options.contexts[-1])
    places = ("host", "disk", "half") if options.cold else PLACES
    with tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name:
        work = Path(name)
        write_model(work / "model", context=2**17)
        with executor(work / "model", work / "executor") as running:
            times = measure(running, options, places, options.rounds)
            options.output.mkdir(parents=True, exist_ok=True)
            found = {"times": times, "memory": {}}
            for place in places:
                found["memory"][place] = measure(running, options, (place,), 1)
    show(times, found["memory"], options.contexts)
    name = f"long_generation{'_cold' if options.cold else ''}.json"
    (options.output / name).write_text(json.dumps(found))
    return None


if __name__ == "__main__":
    main()
