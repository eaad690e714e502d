"""A real gateway, as a process of an environment that has vLLM, and clients of it."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from security.recordings.executors import AuditError
from shared.launching import Program, free_port

_ROOT = Path(__file__).resolve().parents[2]
START_SECONDS, ANSWER_SECONDS = 600.0, 120.0  # vLLM takes minutes to import where others compute
NO_GATEWAY = (
    "--no-gateway was given, or no environment with vLLM was found: make one with `make gateway`, which is "
    ".venv-gateway in the project's folder, or name another one's python with --gateway"
)


def gateway_command(named: Path | None = None) -> list[str] | None:
    """How to run ``symbiosis-tenant`` where vLLM is; None: nothing was named, and nothing found.

    Args:
        named: the python or ``symbiosis-tenant`` of an environment.

    Raises:
        AuditError: what was named is not there.
    """
    if named is not None and not os.access(named, os.X_OK):
        raise AuditError(f"--gateway {named}: there is no such program")
    beside = _ROOT / ".venv-gateway" / "bin" / "symbiosis-tenant"
    program = named or (beside if beside.exists() else None)
    if program is not None:
        return [
            str(program),
            *(["-m", "tenant_sdk.command_line.main"] if program.name.startswith("python") else []),
        ]
    if importlib.util.find_spec("vllm") is not None:
        return [sys.executable, "-P", "-m", "tenant_sdk.command_line.main"]
    return None


@dataclass(frozen=True)
class Work:
    """What clients did between two moments (seconds since the epoch), and the tokens that they know of.

    ``sent`` are those of prompts and answers whose rows were sent, in any order.
    """

    begin: float
    end: float
    sent: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Gateway:
    """One that answers at ``url`` to who has the ``key``."""

    url: str
    key: str

    def open(self, model: str, prompt: Any, tokens: int, **options: Any) -> Any:
        """Ask for so many tokens after a prompt; the response, which may be a stream.

        Args:
            prompt: text, ids, or a list of such.

        Raises:
            AuditError: it does not answer.
        """
        fields = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body = fields | {"ignore_eos": True, "return_token_ids": True} | options
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        request = urllib.request.Request(  # noqa: S310
            f"{self.url}/v1/completions", json.dumps(body).encode(), headers
        )
        try:
            return urllib.request.urlopen(request, timeout=ANSWER_SECONDS)  # noqa: S310
        except OSError as error:
            raise AuditError(f"the gateway does not answer: {error}") from error

    def ask(self, requests: list[tuple[str, Any, int]]) -> Work:
        """Let clients ask at the same time for ``tokens`` after ``prompt`` with ``model``, and wait."""

        def one(each: tuple[str, Any, int]) -> list[int]:
            with self.open(*each) as response:
                choices = json.load(response)["choices"]
            # The last token of an answer is sent to nobody.
            return [t for c in choices for t in [*c["prompt_token_ids"], *c["token_ids"][:-1]]]

        begin = time.time()
        with ThreadPoolExecutor(len(requests)) as clients:
            sent = [token for tokens in clients.map(one, requests) for token in tokens]
        return Work(begin, time.time(), sent)

    def come_one_by_one(self, requests: list[tuple[str, Any, int]]) -> Work:
        """Let each client come when the one before it has its first token; all answers go on meanwhile."""
        begin, streams = time.time(), []
        for model, prompt, tokens in requests:
            streams.append(self.open(model, prompt, tokens, stream=True))
            streams[-1].readline()
        for stream in streams:
            with stream:
                stream.read()
        return Work(begin, time.time())


@contextmanager
def gateway(
    command: list[str], options: list[Any], secrets: Mapping[str, str], key: str, log: Path
) -> Iterator[Gateway]:
    """A gateway that is ready; stopped at the end.

    Args:
        command: see ``gateway_command``.
        options: of ``symbiosis-tenant serve``.
        secrets: variables that the options name.
        key: for its clients.
        log: what it says goes there.

    Raises:
        LaunchError: it does not start, with its last words.
    """
    ready = log.with_suffix(".ready")
    words = [*command, "serve", *options, "--port", free_port(), "--api-key-env", "GATEWAY_KEY"]
    environment = {**secrets, "GATEWAY_KEY": key, "GOMP_SPINCOUNT": "1000"}
    with Program([*words, "--ready-file", ready], ready, log, environment, group=True) as program:
        yield Gateway(program.wait_until_ready(START_SECONDS), key)


def write_adapters(model: Path, folder: Path, names: list[str]) -> None:
    """LoRA adapters of random numbers on up projections, each so strong that it changes what rows are."""
    config = transformers.AutoConfig.from_pretrained(model)
    for number, name in enumerate(names):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            base = transformers.AutoModelForCausalLM.from_config(config)
            lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["up_proj"], task_type="CAUSAL_LM")
            adapted = peft.get_peft_model(base, lora)
            for each, parameter in adapted.named_parameters():
                if "lora_B" in each:
                    torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(str(folder / name))
