"""Gateways as processes, in the environment that `make gateway` makes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import peft
import pytest
import torch
from commands import BASE_MODEL, ENVIRONMENT, ROOT
from conftest import Executor
from transformers import AutoModelForCausalLM

from shared.launching import Program, free_port

PYTHON = Path(os.environ.get("SYMBIOSIS_GATEWAY_PYTHON", ROOT / ".venv-gateway" / "bin" / "python"))
needed = pytest.mark.skipif(not PYTHON.exists(), reason="no environment with vLLM: `make gateway` makes it")
SECONDS = 800  # a busy machine takes minutes to load vLLM; a test has 900
CLIENTS = Path(__file__).parent / "clients"
PROMPTS = (
    "Mon 3 March. Biscuit, beagle, 6 y, owner Mrs",
    "And in the beginning",
    "The king said unto",
    "Seen: Boaz, ram, owner Mr Rivers.",
)
NUMERICS = (
    "ring-fine"  # log-likelihoods of several tokens to 1e-3; with ``ring`` they are off by up to 1.4e-3
)
# Says what was said before and ends, as templates of chat models do.
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}, called as <tool_call>...</tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class RunningGateway:
    """A gateway and how to reach it."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text()


@contextmanager
def gateway(
    provider: Executor, masks: Executor, folder: Path, *options: object, **environment: str
) -> Iterator[RunningGateway]:
    """Serve with one-time masks until the block ends; its log is in the folder."""
    with starting_gateway(provider, masks, folder, *options, **environment) as program:
        yield RunningGateway(program.wait_until_ready(SECONDS), program.process, program.log)
    assert not (folder / "ran").exists(), "code of the working directory"


def starting_gateway(
    provider: Executor, masks: Executor, folder: Path, *options: object, **environment: str
) -> Program:
    """The program of ``gateway``, perhaps before it is ready."""
    folder.mkdir(exist_ok=True)
    ready, log = folder / "ready", folder / "log"
    command = [
        *("env", f"--chdir={unpacked(folder / 'unpacked')}"),
        *(PYTHON, "-P", "-m"),
        "tenant_sdk.command_line.main",
        "serve",
        "--port",
        free_port(),
        "--ready-file",
        ready,
    ]
    command += ["--provider", provider.url, "--ca", provider.ca, "--token-env", "TENANT_TOKEN"]
    command += ["--mask-source", masks.url, "--allow-same", "all", *options]
    variables = {**ENVIRONMENT, "TENANT_TOKEN": provider.token, "OMP_NUM_THREADS": "1", **environment}
    variables["SAGEMAKER_MODEL_PATH"] = str(folder / "unpacked")  # vLLM would run its model.py
    return Program(command, ready, log, variables, group=True)


def unpacked(folder: Path) -> Path:
    """A working directory in which somebody has put modules that Python and vLLM's processes look for."""
    (folder / "multiprocessing").mkdir(parents=True, exist_ok=True)
    code = f"open({str(folder.parent / 'ran')!r}, 'a').write(__name__)"
    for name in ("multiprocessing/__init__", "vllm", "llguidance", "msgspec", "tenant_sdk", "model"):
        (folder / f"{name}.py").write_text(code)
    return folder


def chat_model(folder: Path) -> Path:
    """``examples/base_model`` with a chat template."""
    shutil.copytree(BASE_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def ran(script: str, *arguments: object, python: Path = PYTHON) -> dict[str, Any]:
    """What a program of ``clients`` prints last; ``python``: of another environment than the gateway's."""
    command = [str(python), str(CLIENTS / script), *map(str, arguments)]
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def local(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def write_adapter(model: Path, folder: Path, seed: int, rank: int = 4) -> None:
    """A LoRA adapter that changes what the model says."""
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(local(model), peft.LoraConfig(r=rank, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.03)
    adapted.save_pretrained(folder)


def metric(executor: Executor, name: str) -> float:
    with urllib.request.urlopen(f"{executor.admin_url}/metrics", timeout=800) as answer:
        found = re.findall(rf"(?m)^{name}(?:{{.*}})? (\S+)$", answer.read().decode())
    return sum(map(float, found))


def complete(client: openai.OpenAI, name: str, prompt: str, tokens: int = 16, **options: Any) -> str:
    answer = client.completions.create(model=name, prompt=prompt, max_tokens=tokens, temperature=0, **options)
    return answer.choices[0].text
