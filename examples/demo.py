"""The whole product in a few minutes: a tenant tunes a chat model on private messages, through an executor.

Two executors serve SmolLM2-135M-Instruct, each in a process of its own behind TLS 1.3, with certificates and
tokens of its own: the *provider* and the *mask source*. In this process a tenant fine-tunes a LoRA adapter on
``examples/data/chats_train.jsonl``. What it sends to the provider is masked, every row with a mask of its own
(``one-time``); the mask source multiplies the masks and never sees a row; every answer is checked. Held-out
messages are answered by the base model, by the adapter through the executors, and by the same adapter in
plain transformers and PEFT. At last a gateway serves the adapter to OpenAI's client, eight requests at once.
Run it with ``make demo``; results are in ``out/demo``.

``--small``: with the model of 5 million parameters in this repository, and clinic notes instead of chats.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tenant_sdk  # isort: skip - before torch, whose threads it has wait without spinning

import demo_gateway
import peft
import torch
import transformers
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from demo_model import NotAvailable, chat_model
from demo_report import Display, draw_losses, print_summary

from shared.launching import Program
from shared.ownership import check_tree
from shared.wire.header import SEED_BYTES
from tenant_sdk.tuning.data import Reader
from tenant_sdk.tuning.finetuning import TrainingCallbacks, TrainingReport, finetune
from tenant_sdk.tuning.generation import generate_answers
from tenant_sdk.tuning.options import TrainingOptions
from tenant_sdk.tuning.progress import TrainingStep
from tenant_sdk.tuning.samples import Sample, sample_prompts
from tenant_sdk.tuning.sampling import Sampling, ends_of

HERE = Path(__file__).resolve().parent
DATA = HERE / "data"


@dataclass(frozen=True)
class Task:
    """A model, what it learns, and with which settings."""

    model: Path
    data: Path
    held_out: Path
    settings: dict[str, Any]
    chats: bool


@dataclass(frozen=True)
class Options:
    """Size of the demo."""

    task: Task
    output: Path
    privacy: str
    workers: int
    gateway: bool


def parse_arguments(display: Display) -> Options:
    """The defaults are what ``make demo`` runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="the small model of this repository")
    parser.add_argument("--model", type=Path, help="another folder of a model with a chat template")
    parser.add_argument("--output", type=Path, default=HERE.parent / "out" / "demo")
    parser.add_argument("--steps", type=int, help="default: 30, with --small 120")
    parser.add_argument("--held-out", type=int, default=40, help="messages that are answered at the end")
    parser.add_argument("--privacy", default="one-time")
    parser.add_argument("--workers", type=int, default=0, help="processes that share each executor's layers")
    parser.add_argument("--no-gateway", action="store_false", dest="gateway", help="leave out its part")
    given = parser.parse_args()
    if given.gateway and not demo_gateway.PYTHON.exists():
        parser.error("the gateway needs vLLM: `make gateway` installs it; --no-gateway leaves this part out")
    task = small_task(given.model) if given.small else None
    if task is None:
        try:
            task = chat_task(given.model or chat_model(HERE.parent / "out" / "models", display))
        except NotAvailable as error:
            display.console.print(f"{error}; this demo uses the small model of the repository instead")
            task = small_task(None)
    settings = task.settings | {"samples": given.held_out}
    settings |= {"steps": given.steps} if given.steps else {}
    task = replace(task, settings=settings)
    return Options(task, given.output, given.privacy, given.workers, given.gateway)


def chat_task(model: Path) -> Task:
    """Messages to a clinic, and the line for its book."""
    data, held_out = (DATA / f"chats_{part}.jsonl" for part in ("train", "heldout"))
    settings = {"steps": 30, "batch_size": 4, "packing": True, "learning_rate": 2e-3, "eval_steps": 10}
    return Task(model, data, held_out, settings, chats=True)


def small_task(model: Path | None) -> Task:
    """Clinic notes, and the fields in them; the model has never seen a chat."""
    data, held_out = (DATA / f"note_fields_{part}.jsonl" for part in ("train", "heldout"))
    settings = {"steps": 120, "batch_size": 8, "rank": 16, "learning_rate": 5e-3}
    return Task(model or HERE / "base_model", data, held_out, settings, chats=False)


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
    serve = [*command, "serve", options.task.model, "--numerics", "ring", "--port", "0"]
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
                f"serving {options.task.model.name} in ring numerics over TLS 1.3"
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


@dataclass
class Tuning:
    """What the training told.

    ``losses``: of each step; ``held_out``: by step; ``samples``: held-out answers.
    """

    losses: list[float]
    held_out: dict[int, float]
    samples: list[Sample]


def tune(
    options: Options, session: tenant_sdk.Session, display: Display, adapter: Path
) -> tuple[TrainingReport, Tuning]:
    """LoRA on every linear layer, as `symbiosis-tenant finetune` does it with transformers' Trainer."""
    with display.stage("tenant: model skeleton and tokenizer from the provider"):
        model, tokenizer = session.load_model(progress=False), session.load_tokenizer()
    task, told = options.task, Tuning([], {}, [])
    training = TrainingOptions(data=(task.data,), held_out=(task.held_out,), output=adapter, **task.settings)

    def show(now: TrainingStep) -> None:
        if now.held_out is not None and now.held_out not in told.held_out.values():
            told.held_out[now.step if told.held_out else 0] = now.held_out
        if now.loss is not None:
            told.losses.append(now.loss)
        elif now.step > len(told.losses):
            advance()

    steps = task.settings["steps"]
    with display.stage(f"fine-tuning through the executors, {steps} steps", total=steps) as advance:
        report = finetune(
            training,
            model,
            tokenizer,
            session,
            TrainingCallbacks(lambda _: None, show, samples=told.samples.extend),
        )
    return report, told


def in_plain_transformers(options: Options, adapter: Path) -> list[str]:
    """Answers to the held-out prompts by the saved adapter, without executors."""
    model = transformers.AutoModelForCausalLM.from_pretrained(options.task.model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.task.model)
    ends = ends_of(model.generation_config, tokenizer)
    examples = Reader(tokenizer, TrainingOptions.sequence_length, ends=ends).read([options.task.held_out])
    prompts, expected = zip(*sample_prompts(examples, options.task.settings["samples"]), strict=True)
    adapted = peft.PeftModel.from_pretrained(model, str(adapter))
    sampling = Sampling(max_new_tokens=max(map(len, expected)) + 1)
    return list(generate_answers(adapted, tokenizer, prompts, sampling))


def right_fields(answered: Sequence[str], expected: Sequence[str]) -> float:
    """The share of fields, which semicolons separate, that are right to the letter."""
    right = total = 0
    for answer, fields in zip(answered, expected, strict=True):
        given = [each.strip() for each in answer.split(";")]
        wanted = [each.strip() for each in fields.split(";")]
        total += len(wanted)
        right += sum(one == other for one, other in zip(given, wanted, strict=False))
    return right / total


def serve_adapter(
    adapter: Path, operators: list[Operator], options: Options, display: Display
) -> dict[str, Any]:
    """The base model and the adapter, asked for by OpenAI's client through a gateway on this machine."""
    parties = [demo_gateway.Party(each.url, each.ca, each.token) for each in operators]
    base, models = options.task.model.name, [options.task.model.name, demo_gateway.ADAPTER]
    record = json.loads(options.task.held_out.read_text().splitlines()[0])
    asked_of = record["messages"][:-1] if options.task.chats else record["prompt"]
    log, started = log_of(options.output, "gateway"), time.perf_counter()
    with ExitStack() as stack:
        with display.stage("gateway: symbiosis-tenant serve, on this machine, with the adapter"):
            url = stack.enter_context(demo_gateway.gateway(base, adapter, options.privacy, parties, log))
            start_seconds = time.perf_counter() - started
        clients = models * (demo_gateway.CLIENTS // 2)
        with display.stage(f"{len(clients)} requests at once by OpenAI's client, half for the adapter"):
            demo_gateway.ask(url, models, asked_of, 2)  # the first of all fetches the fingerprints
            told = demo_gateway.ask(url, clients, asked_of, 40)
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
    for old in (adapter, options.output / "adapter.checkpoints"):
        shutil.rmtree(old, ignore_errors=True)
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
            report, told = tune(options, session, display, adapter)
            stats, manifest = session.stats, session.manifest
        served = serve_adapter(adapter, operators, options, display) if options.gateway else None
    with display.stage("the saved adapter in plain transformers and PEFT"):
        plain = in_plain_transformers(options, adapter)
    samples = told.samples
    expected, base, adapted = (
        [getattr(each, name) for each in samples] for name in ("expected", "base", "adapted")
    )
    summary = {
        "model": manifest.model,
        "digest": manifest.digest,
        "privacy": options.privacy,
        "numerics": manifest.numerics,
        "training": asdict(report),
        "losses": told.losses,
        "held_out_losses": told.held_out,
        "fields_right_before": right_fields(base, expected),
        "fields_right_after": right_fields(adapted, expected),
        "answers": [asdict(each) | {"plain": text} for each, text in zip(samples, plain, strict=True)],
        "same_in_plain_transformers": sum(map(str.__eq__, plain, adapted)),
        "gateway": served,
        "gateway_gives_same_answer": served
        and served["text"][demo_gateway.ADAPTER].strip() == samples[0].adapted,
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
    draw_losses(told.losses, told.held_out, options.privacy, options.output / "loss.png")
    return summary


def main() -> None:
    """Run the demo and show what came out; if it fails, show the executors' last words."""
    warnings.simplefilter("ignore", FutureWarning)  # between transformers and peft
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # That the masks protect nothing on one machine stands in the summary.
    logging.getLogger("tenant_sdk").setLevel(logging.ERROR)
    display = Display()
    options = parse_arguments(display)
    options.output.mkdir(parents=True, exist_ok=True)
    check_tree(options.output)  # a link there would have another file written over
    try:
        summary = run(options, display)
    except BaseException:
        display.show_logs([log_of(options.output, name) for name in [*operators_of(options), "gateway"]])
        raise
    print_summary(display.console, summary, options.output)


if __name__ == "__main__":
    main()
