"""Statistics of what a provider received: rows with the least surprising contents, under one-time masks.

    python benchmarks/mask_randomness.py                      # 8 MiB of each kind of rows
    python benchmarks/mask_randomness.py --mib 128            # half a GiB
    python benchmarks/mask_randomness.py --mib 128 --external # PractRand or dieharder, too

Two executors run as processes, a provider that writes a transcript and a mask source. A tenant sends rows
of zeros, of one constant, with a single number that is not zero, and of real text, as the bundled model
computes them. The bytes in the transcript go through tests of NIST SP 800-22
(``randomness.py``), and so do the differences of successive messages, which show a mask that
serves twice. Three controls must fail: rows without masks, a noise bank, whose masks serve often, and one-
time masks from a broken random source, which always gives the same bytes. Exits with 1 if masked rows fail
or a control passes. The transcript takes as many bytes as are sent.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from randomness import ALPHA, LIMIT, SEQUENCE_BYTES, Battery
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

import tenant_sdk
from security.recordings.executors import ExecutorProcess
from security.recordings.transcript import RecordedRequest
from shared.wire.header import Direction, Operation
from tenant_sdk import NoiseBankOptions
from tenant_sdk.session import opening
from tenant_sdk.session.assembly import assemble

logging.disable_progress_bar()
ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "base_model"
TEXT = ROOT / "docs" / "explanation" / "privacy.md"
GROUP, ROWS, TOKENS = 0, 512, 256  # q, k and v of the first layer; rows of a message; tokens of a text
KINDS = ("zeros", "constants", "one-number", "text")
CONTROLS = ("plain", "noise-bank", "one-seed")
CONTROL_MIB = 2
# Tests of dieharder that need less than 64 MiB: birthdays, ones, runs, and two of SP 800-22.
DIEHARDER = (0, 8, 15, 100, 101)


def text_rows() -> torch.Tensor:
    """What the first layer's q, k and v get for a text of this project, [N, D]."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokens = tokenizer(TEXT.read_text(), return_tensors="pt", verbose=False)["input_ids"][0]
    taken: list[torch.Tensor] = []
    layer = model.model.layers[0].self_attn.q_proj
    layer.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0][0]))
    with torch.no_grad():
        for part in tokens.split(TOKENS):
            model(part[None])
    return torch.cat(taken)


def rows_of(kind: str, text: torch.Tensor, message: int) -> torch.Tensor:
    """Rows of one message: [ROWS, D]."""
    width = text.shape[1]
    if kind == "zeros":
        return torch.zeros((ROWS, width))
    if kind == "constants":
        return torch.full((ROWS, width), 1.25)
    if kind == "one-number":
        return torch.eye(width)[torch.arange(ROWS) % width]
    return text[(torch.arange(ROWS) + message * ROWS) % len(text)]


@contextmanager
def session_of(
    label: str, provider: ExecutorProcess, source: ExecutorProcess
) -> Iterator[tenant_sdk.Session]:
    """A session of a kind of rows or of a control, whose name is its tenant's."""
    given: dict[str, Any] = {"provider": provider.url, "token": provider.token(label), "ca": provider.ca}
    given |= {"privacy": "plain", "allow_transcript": True}
    if label == "noise-bank":
        given |= {
            "privacy": "noise-bank",
            "noise_bank": NoiseBankOptions(),
            "mask_sources": [f"local:{MODEL}"],
        }
    elif label != "plain":
        given |= {"privacy": "one-time", "mask_sources": [source.url], "mask_budget_mib": 0}
        given |= {
            "mask_source_token": source.token(label),
            "mask_source_ca": source.ca,
            "allow_same": ["all"],
        }
    with ExitStack() as stack:
        if label == "one-seed":
            broken = partial(assemble, entropy=lambda size: b"\x5a" * size)
            stack.enter_context(mock.patch.object(opening, "assemble", broken))
        yield stack.enter_context(tenant_sdk.connect(**given))


def send(session: tenant_sdk.Session, kind: str, text: torch.Tensor, mib: int) -> None:
    """So many MiB of rows."""
    members = (1 << len(session.manifest.groups[GROUP].members)) - 1
    for message in range(mib * 2**20 // (4 * ROWS * text.shape[1])):
        rows = rows_of(kind, text, message)
        session.products.submit(GROUP, Direction.FORWARD, members, [rows]).result()


def examine(requests: Sequence[RecordedRequest]) -> tuple[Battery, Battery]:
    """The bytes of the messages, and of the differences of successive ones."""
    itself, differences = Battery(), Battery()
    before = None
    for request in requests:
        numbers = np.frombuffer(request.payload, "<u4")
        itself.add(numbers.tobytes())
        if before is not None:
            differences.add((numbers - before).tobytes())
        before = numbers
    return itself, differences


def external(requests: Sequence[RecordedRequest], folder: Path) -> None:
    """The same bytes through other programs, which judge for themselves."""
    file = folder / "bytes"
    with file.open("wb") as out:
        for request in requests:
            out.write(request.payload)
    if program := shutil.which("RNG_test"):
        with file.open("rb") as data:
            subprocess.run([program, "stdin32"], stdin=data, check=False)
    elif program := shutil.which("dieharder"):
        for test in DIEHARDER:
            subprocess.run([program, "-g", "201", "-f", str(file), "-d", str(test)], check=False)
    else:
        print("neither PractRand (RNG_test) nor dieharder is installed")


def record(folder: Path, mib: int) -> dict[str, list[RecordedRequest]]:
    """Send all kinds of rows, and what the provider received of each: its messages of ROWS rows, in order."""
    text = text_rows()
    provider, source = (ExecutorProcess(folder / name, MODEL, "ring") for name in ("provider", "source"))
    with ExitStack() as stack:
        for executor in (provider, source):
            executor.token("first")  # without one it does not start
            stack.callback(executor.stop)
            executor.launch()
        provider.await_ready()
        source.await_ready()
        for label in (*KINDS, *CONTROLS):
            with session_of(label, provider, source) as session:
                if label in KINDS:
                    send(session, label, text, mib)
                else:
                    send(session, "text", text, min(CONTROL_MIB, mib))
    (recorded,) = provider.transcripts()
    received: dict[str, list[RecordedRequest]] = {label: [] for label in recorded.tenants.values()}
    for request in recorded.requests:
        if request.header.operation == Operation.PRODUCT and request.header.rows == ROWS:
            received[recorded.tenants[request.session]].append(request)
    return received


def row_of(label: str, stream: str, battery: Battery) -> list[str]:
    """Of the table."""
    verdicts = battery.verdicts()
    least, test = min((min(each.uniform, each.few), name) for name, each in verdicts.items())
    small = sum(each.small for each in verdicts.values()) / battery.sequences / len(verdicts)
    mib = battery.sequences * SEQUENCE_BYTES / 2**20
    refused = f"{len(battery.refused())} of {len(verdicts)}"
    return [
        label,
        stream,
        f"{mib:g}",
        str(battery.sequences),
        f"{small:.2%}",
        f"{least:.1e}, {test}",
        refused,
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=8, help="of each kind of rows")
    parser.add_argument("--external", action="store_true", help="PractRand or dieharder, too")
    options = parser.parse_args(words)
    wrong = list[str]()
    table = Table("rows", "stream", "MiB", "sequences", f"P < {ALPHA}", "least verdict", "refused by")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        received = record(Path(scratch), options.mib)
        sent = time.monotonic() - started
        for label, requests in received.items():
            streams = dict(zip(("messages", "differences"), examine(requests), strict=True))
            for stream, battery in streams.items():
                table.add_row(*row_of(label, stream, battery))
                if label in KINDS and battery.refused():
                    wrong.append(f"masked rows ({label}, {stream}) fail: {', '.join(battery.refused())}")
            if label in CONTROLS and not any(battery.refused() for battery in streams.values()):
                wrong.append(f"the control {label} passes")
        tested = time.monotonic() - started - sent
        print(f"{sent:.0f} s of sending, {tested:.0f} s of tests; refused below {LIMIT:g}")
        Console(width=110).print(table)
        if options.external:
            external([request for kind in KINDS for request in received[kind]], Path(scratch))
    print("; ".join(wrong) or "masked rows pass all tests, and no control does")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    sys.exit(main())
