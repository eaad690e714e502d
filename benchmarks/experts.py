"""Mixtures of experts in each of the settings: seconds and bytes of a token, a prompt and a step of tuning.

    python benchmarks/experts.py --rounds 5

Two mixtures of one layer, d = 512: 8 experts of which a token goes to 2, and 64 of which it goes to 8; both
have as many weights in all and as many that a token uses. One-time masks, verified; executor and mask source
are processes of their own on the same cores. LoRA r = 8 on attention and, by ``target_parameters``, on the
experts. Every round measures all settings in turn. What the provider reads off the routes is the audit's
matter (``symbiosis-audit``). Prints a table, and writes experts.json into --output.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from common import arguments, executor, save, spread
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, MixtralConfig, MixtralForCausalLM, logging

import tenant_sdk
from shared.compat import cache_name
from shared.memory import keep_freed_memory
from tenant_sdk.model.remote_weight import RemoteWeight

WIDTH, VOCABULARY, EVERY = 512, 1000, 14336  # the experts' intermediate sizes together
MIXTURES = {8: 2, 64: 8}  # experts, and to how many of them a token goes
SETTINGS = ("no executor", "local", "padded", "routed")
DECODED, PROMPT, BATCH = 16, 256, (4, 64)  # tokens, tokens, sequences x tokens


def write_mixture(folder: Path, experts: int, used: int) -> None:
    """Save one of random weights."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=EVERY // experts,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        num_local_experts=experts,
        num_experts_per_tok=used,
    )
    MixtralForCausalLM(config).save_pretrained(folder)


def work(model: Any, sent: Callable[[], int]) -> dict[str, Callable[[], tuple[float, float]]]:
    """What is measured: each gives its seconds and bytes, of one token if it decodes.

    Args:
        sent: how many bytes went to executors and back so far.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (1, PROMPT), generator=generator)
    batch = torch.randint(0, VOCABULARY, BATCH, generator=generator)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def since(began: float, before: int, tokens: int = 1) -> tuple[float, float]:
        return (time.perf_counter() - began) / tokens, (sent() - before) / tokens

    def decode() -> tuple[float, float]:
        with torch.inference_mode():
            cached = {cache_name(): DynamicCache(config=model.config)}
            model.eval()(input_ids=ids[:, :16], **cached, use_cache=True)
            began, before = time.perf_counter(), sent()
            for at in range(DECODED):
                model(input_ids=ids[:, at : at + 1], **cached, use_cache=True)
        return since(began, before, DECODED)

    def prefill() -> tuple[float, float]:
        began, before = time.perf_counter(), sent()
        with torch.inference_mode():
            model.eval()(input_ids=ids, use_cache=False)
        return since(began, before)

    def tune() -> tuple[float, float]:
        began, before = time.perf_counter(), sent()
        model.train()(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return since(began, before)

    return {"a decoded token": decode, f"a prompt of {PROMPT}": prefill, "a step of 4 x 64": tune}


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(
        model,
        LoraConfig(
            r=8,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            task_type="CAUSAL_LM",
        ),
    )


def measure(experts: int, rounds: int) -> list[dict[str, Any]]:
    """Of one mixture: for each setting and kind of work seconds of each round, and bytes."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_mixture(folder / "model", experts, MIXTURES[experts])
        serving, source = (
            stack.enter_context(executor(folder / "model", folder / name, "--numerics", "ring"))
            for name in ("provider", "source")
        )
        found, runs = list[dict[str, Any]](), list[Callable[[], tuple[float, float]]]()
        for setting in SETTINGS:
            session = None
            if setting == "no executor":
                model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
            else:
                session = stack.enter_context(
                    tenant_sdk.connect(
                        serving.url,
                        token=serving.token,
                        ca=serving.ca,
                        privacy="one-time",
                        mask_sources=[source.url],
                        mask_source_token=source.token,
                        mask_source_ca=source.ca,
                        allow_same=["all"],
                        experts=setting,
                        timeout=300,
                    )
                )
                model = session.load_model(progress=False)
            held = sum(p.numel() for p in model.parameters() if not isinstance(p, RemoteWeight))
            for what, run in work(adapted(model), partial(_bytes, session)).items():
                found.append({"experts": experts, "setting": setting, "what": what, "held": held})
                runs.append(run)
        for run in runs:
            run()  # fingerprints, forecasts
        for _ in range(rounds):
            for each, run in zip(found, runs, strict=True):
                seconds, sent = run()
                each.setdefault("seconds", []).append(seconds)
                each.setdefault("bytes", []).append(sent)
    return found


def _bytes(session: tenant_sdk.Session | None) -> int:
    return session.stats.bytes_sent + session.stats.bytes_received if session else 0


def main() -> None:
    parser = arguments(__doc__, rounds=5, output="out")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    keep_freed_memory()
    found = [each for experts in MIXTURES for each in measure(experts, options.rounds)]
    table = Table(title=f"One layer of experts, one-time masks; median of {options.rounds} rounds (range)")
    for title in ("experts", "setting", "weights here", "", "ms", "KB to and from the executors"):
        table.add_column(title, justify="right")
    for each in found:
        table.add_row(
            str(each["experts"]),
            each["setting"],
            f"{each['held']:,}",
            each["what"],
            spread(each["seconds"], 1e3, 1),
            spread(each["bytes"], 1e-3, 0) if any(each["bytes"]) else "",
        )
    Console(width=140).print(table)
    save(options.output / "experts.json", found)


if __name__ == "__main__":
    main()
