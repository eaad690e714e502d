"""One real tenant, or one process that holds the whole model itself, working until it is told to stop.

``serving.py`` starts several. A plan on one line of standard input, then "ready" on standard output, on
the next line of input when to begin; the result on standard output.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from common import pss_mib
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache, logging

import tenant_sdk
from shared.compat import cache_name
from shared.memory import keep_freed_memory


def load(plan: dict[str, Any]) -> Any:
    """The model of a plan, with an adapter."""
    if plan.get("url"):
        options = {"privacy": "plain", "timeout": 300, **plan.get("session", {})}
        session = tenant_sdk.connect(plan["url"], token=plan["token"], ca=plan.get("ca"), **options)
        model = session.load_model(progress=False)
    else:
        model = AutoModelForCausalLM.from_pretrained(plan["folder"], dtype=torch.float32)
    torch.manual_seed(1)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM"))


def main() -> None:
    """Load, say so, work."""
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    keep_freed_memory()
    plan = json.loads(sys.stdin.readline())
    torch.set_num_threads(plan["threads"])
    model = load(plan)
    generator = torch.Generator().manual_seed(plan["seed"])
    ids = torch.randint(0, model.config.vocab_size, (plan["batch"], plan["length"]), generator=generator)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    times: list[tuple[float, float]] = []
    if plan["work"] == "tune":
        step()
    else:
        model.eval()
        with torch.inference_mode():
            cached = {cache_name(): DynamicCache(config=model.config)}
            model(input_ids=ids, **cached, use_cache=True)
            out = model(input_ids=ids[:, :1], **cached, use_cache=True)
    print("ready", flush=True)
    begin = float(sys.stdin.readline())
    end = begin + plan["seconds"]
    time.sleep(max(0.0, begin - time.time()))
    while time.time() < end:
        started = time.time()
        if plan["work"] == "tune":
            step()
        else:
            with torch.inference_mode():
                token = out.logits[:, -1:].argmax(-1)
                (cache,) = cached.values()
                if cache.get_seq_length() > plan["length"] + 200:
                    cache.crop(plan["length"] - cache.get_seq_length())
                out = model(input_ids=token, **cached, use_cache=True)
        times.append((started - begin, time.time() - started))
    peak = Path("/proc/self/status").read_text()
    hwm = next(int(line.split()[1]) / 1024 for line in peak.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"times": times, "pss_mib": pss_mib(), "peak_mib": hwm}))
    sys.stdout.flush()
    os._exit(0)  # as many as these at once would take long to take themselves apart


if __name__ == "__main__":
    main()
