"""A chat model against local execution: a fine-tuning iteration, and decoding.

    python benchmarks/chat_model.py out/models/SmolLM2-135M-Instruct      # made by `make demo`

LoRA r = 8 on every linear layer, one sequence for an iteration; decoding after a prompt of 64 tokens. Every
round measures all modes in turn. Provider, mask source and tenant share the machine. Prints medians, ranges,
and ratios to local execution in the same run.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from common import arguments, executor
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from split_execution import PROMPT, fill, generate
from transformers import AutoModelForCausalLM, logging

logging.set_verbosity_error()
logging.disable_progress_bar()
TOKENS, NEW_TOKENS = 256, 16
BUDGET = 400 << 20  # bytes of effects for an iteration
MODES: dict[str, dict[str, Any]] = {
    "local": {},
    "plain, ring": {"privacy": "plain"},
    "one-time": {},
    "one-time, effects ahead": {"mask_budget_mib": 0},
    "one-time, half answers": {"answers": "half"},
    "one-time, half answers, effects ahead": {"answers": "half", "mask_budget_mib": 0},
}


def iteration(model: Any, ids: torch.Tensor) -> float:
    """Seconds of a forward and a backward pass."""
    model.train()
    began = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    return time.perf_counter() - began


def main() -> None:
    """Run it."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("model", type=Path)
    options = parser.parse_args()
    ids = torch.randint(10, 40_000, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[list[float]]] = {mode: [[], []] for mode in MODES}
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        provider, masks = (
            stack.enter_context(executor(options.model, work / name, "--numerics", "ring"))
            for name in ("provider", "masks")
        )
        loaded: dict[str, tuple[Any, Any]] = {}
        for mode, given in MODES.items():
            session = None
            if mode == "local":
                base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
            else:
                source = {"mask_sources": [masks.url], "mask_source_token": [masks.token]}
                source |= {"mask_source_ca": [masks.ca], "allow_same": ["all"]}
                more = given if given.get("privacy") == "plain" else {**source, **given}
                session = stack.enter_context(provider.connect(**more))
                base = session.load_model(progress=False)
            torch.manual_seed(0)
            config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
            loaded[mode] = get_peft_model(base, config), session
        for number in range(options.rounds + 1):  # the first warms up
            for mode, (model, session) in loaded.items():
                if session is not None and "ahead" in mode and number:
                    fill(session, BUDGET)
                seconds = iteration(model, ids)
                # Effects are filled in for an iteration, so decoding would not find its own.
                token = float("nan") if "ahead" in mode else generate(model, ids[:1, :PROMPT], NEW_TOKENS)
                if number:
                    times[mode][0].append(seconds)
                    times[mode][1].append(token)
    table = Table(
        title=f"{options.model.name}: {TOKENS} tokens; seconds and ratios to local", highlight=False
    )
    for column in ("", "iteration, s", "ratio", "decoding, ms a token", "ratio"):
        table.add_column(column)
    medians = {mode: [statistics.median(each) for each in both] for mode, both in times.items()}
    for mode, both in times.items():
        cells = []
        for at, (each, scale) in enumerate(zip(both, (1, 1000), strict=True)):
            shown = [scale * value for value in (medians[mode][at], min(each), max(each))]
            cells += [f"{shown[0]:.2f} ({shown[1]:.2f}-{shown[2]:.2f})"]
            cells += [f"{medians[mode][at] / medians['local'][at]:.2f}"]
        table.add_row(mode, *cells)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


if __name__ == "__main__":
    main()
