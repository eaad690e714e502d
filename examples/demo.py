"""The whole product in a few minutes: a tenant fine-tunes on private notes through a provider's executor.

Two executors serve ``examples/base_model``, each in a process of its own behind TLS 1.3, with
certificates and tokens of its own: the *provider* and the *mask source*. In this process a tenant
fine-tunes a LoRA adapter on ``examples/data`` with the Trainer of transformers. What it sends to the
provider is masked, every row with a mask of its own (``one-time``); the mask source multiplies the masks
and never sees a row; every answer is checked. The same training then runs without executors, and the two
are compared. At last a gateway serves the adapter to OpenAI's client, eight requests at once. Run it with
``make demo``; results are in ``out/demo``.
"""

from __future__ import annotations

import os

# Threads that spin while they wait would take the processor from the executor; read when torch loads.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import argparse
import json
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import demo_gateway
import peft
import torch
import transformers
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from demo_report import Display, draw_losses, print_table
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator, set_seed

import tenant_sdk
from shared.launching import Program
from shared.wire.header import SEED_BYTES
from tenant_sdk.tuning.conversations import whole
from tenant_sdk.tuning.data import Blocks, pack, read_tokens
from tenant_sdk.tuning.finetuning import perplexity

HERE = Path(__file__).resolve().parent
DATA = HERE / "data"
PROMPT = "Mon 3 March. Biscuit, beagle, 6 y, owner Mrs"
SEED = 0


@dataclass(frozen=True)
class Options:
    """Size of the demo."""

    base_model: Path
    output: Path
    steps: int
    batch_size: int
    sequence_length: int
    learning_rate: float
    rank: int
    new_tokens: int
    privacy: str
    workers: int
    gateway: bool


@dataclass
class Result:
    """What one training gave; ``losses`` in nats per token, one a step."""

    losses: list[float]
    perplexity_before: float
    perplexity_after: float
    text_before: list[int]
    text_after: list[int]
    train_seconds: float
    generate_seconds: float


def parse_arguments() -> Options:
    """The defaults are what ``make demo`` runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-model", type=Path, default=HERE / "base_model")
    parser.add_argument("--output", type=Path, default=HERE.parent / "out" / "demo")
    parser.add_argument("--steps", type=int, help="default: 120, with --full 300")
    parser.add_argument("--full", action="store_true", help="longer, for a better text")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--privacy", default="one-time")
    parser.add_argument("--workers", type=int, default=0, help="processes that share each executor's layers")
    parser.add_argument("--no-gateway", action="store_false", dest="gateway", help="leave out its part")
    given = vars(parser.parse_args())
    full = given.pop("full")
    if given["gateway"] and not demo_gateway.PYTHON.exists():
        parser.error("the gateway needs vLLM: `make gateway` installs it; --no-gateway leaves this part out")
    return Options(**given | {"steps": given["steps"] or (300 if full else 120)})


class Progress(TrainerCallback):
    """Moves the display's bar."""

    def __init__(self, advance: Callable[[], None]) -> None:
        self.advance = advance

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Of the Trainer."""
        self.advance()


def train(
    model: Any, blocks: Blocks, options: Options, advance: Callable[[], None]
) -> tuple[Any, list[float]]:
    """LoRA on every linear layer, by an ordinary Trainer; it cannot tell where the layers are computed."""
    set_seed(SEED)
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            seed=SEED,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            label_names=["labels"],
            dataloader_pin_memory=False,
            use_cpu=True,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=[whole(block) for block in blocks],
            data_collator=default_data_collator,
            callbacks=[Progress(advance)],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def generate(model: Any, tokenizer: Any, new_tokens: int) -> list[int]:
    """The most likely continuation of PROMPT."""
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    model.eval()
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
    )
    return out[0, ids.shape[1] :].tolist()


def run_one(
    model: Any,
    tokenizer: Any,
    blocks: Blocks,
    held_out: Blocks,
    options: Options,
    display: Display,
    where: str,
) -> tuple[Any, Result]:
    """Perplexity, training, perplexity, text: the same for both places."""
    with display.stage(f"held-out perplexity of the base model, {where}"):
        before = perplexity(model.eval(), [whole(block) for block in held_out], options.batch_size)
        text_before = generate(model, tokenizer, options.new_tokens)
    with display.stage(f"fine-tuning, {where}", total=options.steps) as advance:
        started = time.perf_counter()
        model, losses = train(model, blocks, options, advance)
        train_seconds = time.perf_counter() - started
    with display.stage(f"held-out perplexity and text with the adapter, {where}"):
        after = perplexity(model, [whole(block) for block in held_out], options.batch_size)
        started = time.perf_counter()
        text_after = generate(model, tokenizer, options.new_tokens)
        generate_seconds = time.perf_counter() - started
    return model, Result(losses, before, after, text_before, text_after, train_seconds, generate_seconds)


@dataclass(frozen=True)
class Operator:
    """Somebody who runs an executor, and what a tenant needs to reach it."""

    name: str
    url: str
    token: str
    ca: Path
    authority: str  # the first bytes of its SHA-256, for people to compare


def start_executor(name: str, folder: Path, options: Options) -> Program:
    """One operator's certificates, token for the tenant, and executor process."""
    folder.mkdir()
    tls, tokens, token = folder / "tls", folder / "tokens.json", folder / "token"
    command = [sys.executable, "-m", "provider.cli"]
    with log_of(options.output, name).open("wb") as log:
        subprocess.run([*command, "certs", tls], check=True, stdout=log, stderr=log)
        add = [*command, "token", "add", "clinic", "--token-file", tokens]
        token.write_bytes(subprocess.run(add, check=True, stdout=subprocess.PIPE, stderr=log).stdout)
    serve = [*command, "serve", options.base_model, "--numerics", "ring", "--port", "0"]
    serve += ["--tls-dir", tls, "--token-file", tokens, "--ready-file", folder / "ready.json"]
    serve += ["--workers", str(options.workers)]
    return Program(serve, folder / "ready.json", log_of(options.output, name))


def await_executor(name: str, folder: Path, program: Program) -> Operator:
    """The operator once its executor listens."""
    url, token = json.loads(program.wait_until_ready())["url"], (folder / "token").read_text().strip()
    ca = folder / "tls" / "ca.pem"
    authority = x509.load_pem_x509_certificate(ca.read_bytes()).fingerprint(SHA256())
    return Operator(name, url, token, ca, authority.hex(":")[:23])


def log_of(output: Path, name: str) -> Path:
    """Where an executor writes."""
    return output / f"{name.replace(' ', '_')}.log"


@contextmanager
def executors(names: Sequence[str], options: Options, display: Display) -> Iterator[list[Operator]]:
    """Executor processes behind TLS. They must end well when told to."""
    operators: list[Operator] = []
    programs: list[Program] = []
    with tempfile.TemporaryDirectory(prefix="symbiosis-demo-") as temporary:
        try:
            with display.stage(
                f"{' and '.join(names)}: each its own certificate authority, token and process "
                f"serving {options.base_model.name} in ring numerics over TLS 1.3"
            ):
                for name in names:
                    folder = Path(temporary) / name
                    programs.append(start_executor(name, folder, options))
                for name, program in zip(names, programs, strict=True):
                    operators.append(await_executor(name, Path(temporary) / name, program))
            yield operators
            with display.stage("executors stopped by SIGTERM"):
                for program in programs:
                    program.stop()
                    if (status := program.process.returncode) != 0:
                        raise RuntimeError(f"an executor ended with status {status} after SIGTERM")
        finally:
            for program in programs:
                program.stop(signal.SIGKILL)


def serve_adapter(
    adapter: Path, operators: list[Operator], options: Options, display: Display
) -> dict[str, Any]:
    """The base model and the adapter, asked for by OpenAI's client through a gateway on this machine."""
    parties = [demo_gateway.Party(each.url, each.ca, each.token) for each in operators]
    base, models = options.base_model.name, [options.base_model.name, demo_gateway.ADAPTER]
    log, started = log_of(options.output, "gateway"), time.perf_counter()
    with ExitStack() as stack:
        with display.stage("gateway: symbiosis-tenant serve, on this machine, with the adapter"):
            url = stack.enter_context(demo_gateway.gateway(base, adapter, options.privacy, parties, log))
            start_seconds = time.perf_counter() - started
        clients = models * (demo_gateway.CLIENTS // 2)
        with display.stage(f"{len(clients)} requests at once by OpenAI's client, half for the adapter"):
            demo_gateway.ask(url, models, PROMPT, 2)  # the first of all fetches the fingerprints
            told = demo_gateway.ask(url, clients, PROMPT, options.new_tokens)
    return {"adapter": demo_gateway.ADAPTER, "start_seconds": start_seconds} | told


def operators_of(options: Options) -> list[str]:
    """Who runs an executor: only one-time masks need a mask source."""
    return ["provider", "mask source"] if options.privacy == "one-time" else ["provider"]


def masking(stats: tenant_sdk.Stats, privacy: str, operators: list[Operator]) -> dict[str, Any]:
    """What was masked, who saw what, what was checked."""
    seeds = stats.effect_requests * SEED_BYTES if privacy == "one-time" else 0
    rows = {"rows": stats.rows, "bytes": stats.bytes_sent - seeds}
    if privacy != "one-time":
        return {"provider_saw": rows | {"masked": privacy}, "checked_rows": stats.verified_rows}
    return {
        "provider_saw": rows | {"masked": "every row by a mask of its own, uniform modulo 2^32"},
        "mask_source_saw": {"seeds": stats.effect_requests, "bytes": seeds, "rows": 0},
        "checked_rows": stats.verified_rows,
        "rows_for_fingerprints": stats.rows - stats.verified_rows,
        "authorities": {operator.name: operator.authority for operator in operators},
        "tokens": len({operator.token for operator in operators}),
        "same_machine": True,
    }


def run(options: Options, display: Display) -> dict[str, Any]:
    """The demo; its summary, which is also written to the output folder."""
    adapter = options.output / "adapter"
    shutil.rmtree(adapter, ignore_errors=True)
    started = time.perf_counter()
    with executors(operators_of(options), options, display) as operators:
        provider, *sources = operators
        with tenant_sdk.connect(
            provider.url,
            token=provider.token,
            ca=provider.ca,
            privacy=options.privacy,
            mask_sources=[source.url for source in sources],
            mask_source_token=[source.token for source in sources],
            mask_source_ca=[source.ca for source in sources],
            # One machine plays both, which have tokens, authorities and keys of their own; in earnest they
            # must not collude.
            allow_same={"host", "address", "machine"},
        ) as session:
            with display.stage("tenant: model skeleton and tokenizer from the provider"):
                model: Any = session.load_model(progress=False)
                tokenizer = session.load_tokenizer()
                blocks, held_out = (
                    pack(read_tokens(DATA / name, tokenizer), options.sequence_length, keep_tail=tail)
                    for name, tail in (("clinic_notes_train.txt", False), ("clinic_notes_heldout.txt", True))
                )
            model, remote = run_one(
                model, tokenizer, blocks, held_out, options, display, "through the executors"
            )
            model.save_pretrained(str(adapter))
            stats, manifest = session.stats, session.manifest
        served = serve_adapter(adapter, operators, options, display) if options.gateway else None

    local_model = transformers.AutoModelForCausalLM.from_pretrained(options.base_model, dtype=torch.float32)
    _, local = run_one(local_model, tokenizer, blocks, held_out, options, display, "all local")
    with display.stage("the saved adapter in plain transformers and PEFT"):
        plain = transformers.AutoModelForCausalLM.from_pretrained(options.base_model, dtype=torch.float32)
        reloaded = generate(
            peft.PeftModel.from_pretrained(plain, str(adapter)), tokenizer, options.new_tokens
        )
    differences = [abs(a - b) for a, b in zip(remote.losses, local.losses, strict=True)]
    summary = {
        "model": manifest.model,
        "digest": manifest.digest,
        "privacy": options.privacy,
        "numerics": manifest.numerics,
        "steps": options.steps,
        "tokens_per_step": options.batch_size * options.sequence_length,
        "executor": asdict(remote),
        "local": asdict(local),
        "largest_loss_difference": max(differences),
        "same_tokens": remote.text_after == local.text_after,
        "saved_adapter_gives_same_tokens": reloaded == remote.text_after,
        "gateway": served,
        "gateway_gives_same_tokens": served and served["tokens"][demo_gateway.ADAPTER] == remote.text_after,
        "prompt": PROMPT,
        "text_base_model": tokenizer.decode(remote.text_before),
        "text_executor": tokenizer.decode(remote.text_after),
        "text_local": tokenizer.decode(local.text_after),
        "traffic": asdict(stats),
        "masking": masking(stats, options.privacy, operators),
        "seconds": time.perf_counter() - started,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
    }
    (options.output / "summary.json").write_text(json.dumps(summary, indent=1))
    draw_losses(remote.losses, local.losses, options.privacy, options.output / "loss.png")
    return summary


def main() -> None:
    """Run the demo and show what came out; if it fails, show the executors' last words."""
    warnings.simplefilter("ignore", FutureWarning)  # between transformers and peft
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # That the masks protect nothing on one machine stands in the summary.
    logging.getLogger("tenant_sdk").setLevel(logging.ERROR)
    options, display = parse_arguments(), Display()
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        summary = run(options, display)
    except BaseException:
        display.show_logs([log_of(options.output, name) for name in [*operators_of(options), "gateway"]])
        raise
    print_table(display.console, summary, options.output)


if __name__ == "__main__":
    main()
