"""Fixtures: certificates, tokens, tiny models, executors in this process and as processes of their own."""

from __future__ import annotations

import datetime
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
import transformers
from hypothesis import settings
from tiers import RELEASE
from transformers import PreTrainedModel

import tenant_sdk
from provider.executor.base import BaseExecutor
from provider.serve import handshake
from provider.serve.certificates import write_certificates
from provider.serve.server import Server, server_context
from provider.serve.tokens import TokenFile
from provider.session.tenant import Service
from shared.launching import Program
from shared.wire.messages import Limits

# A shell that starts the tests in the background has them ignore Ctrl-C, which some tests press.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Hundreds of programs, most of whose time would be imports.
subprocess.Popen = prepared.Popen  # type: ignore[misc]
# The models are tiny, and threads of tenant and executor in one process would only wait for each other.
torch.set_num_threads(1)

# The same examples in every run: a property test that fails must fail for everybody.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """As ``shared.imports``: what all tests import is not looked through for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the release tier."""
    for item in items:
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        if not RELEASE.keys().isdisjoint({file, f"{file}::{item.name.partition('[')[0]}"}):
            item.add_marker("release")


TENANT = "alice"
# Most tests of integers run with one numerics, which may be the other: TEST_RING=ring-fine pytest ...
RING = os.environ.get("TEST_RING", "ring")


@dataclass(frozen=True)
class Executor:
    """A running executor and what a tenant needs to reach it."""

    url: str
    token: str
    ca: Path
    server: Server | None = None
    process: subprocess.Popen[bytes] | None = None
    admin_url: str = ""
    log: Path | None = None

    def connect(self, **options: Any) -> tenant_sdk.Session:
        """A session; ``plain`` unless the test says otherwise."""
        # Executors of one test have the same authority and tokens.
        usual = {"token": self.token, "ca": self.ca, "privacy": "plain", "allow_same": {"authority", "token"}}
        usual["patience"] = 0.0  # most tests that break a connection want to see it fail
        return tenant_sdk.connect(self.url, **(usual | options))


@pytest.fixture(scope="session", autouse=True)
def handshakes_take_their_time() -> Iterator[None]:
    """Both ends are in this process, which may stand still for a while on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "HANDSHAKE_SECONDS", 600.0)
        yield


@pytest.fixture(scope="session")
def tls_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A development CA with certificates for this machine."""
    folder = tmp_path_factory.mktemp("tls")
    write_certificates(folder, now=datetime.datetime.now(datetime.UTC))
    return folder


@pytest.fixture(scope="session")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A token file, and the token of TENANT."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.json"
    return path, TokenFile(path).add(TENANT)


@pytest.fixture(scope="session")
def serve(tls_dir: Path, token_file: tuple[Path, str]) -> Iterator[Callable[..., Executor]]:
    """Start an executor in this process, behind real TLS sockets: ``serve(folder, numerics=...)``."""
    servers: list[Server] = []

    def start(folder: Path, *, limits: Limits | None = None, port: int = 0, **options: Any) -> Executor:
        base = BaseExecutor(folder, limits=limits, **{"numerics": "float32", **options})
        server = Server(
            Service.of(base),
            context=server_context(tls_dir),
            tokens=TokenFile(token_file[0]),
            port=port,
        )
        servers.append(server)
        return Executor(server.url, token_file[1], tls_dir / "ca.pem", server=server)

    yield start
    for server in servers:
        server.drain(1.0)


@contextmanager
def executor_processes(
    tls_dir: Path, token_file: tuple[Path, str], tmp_path: Path
) -> Iterator[Callable[..., Executor]]:
    """Start executors as processes, which end with the block; logs go to ``tmp_path``."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(
        folder: Path,
        *options: str,
        launcher: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Executor:
        ready, log = tmp_path / f"ready-{len(processes)}", tmp_path / f"log-{len(processes)}"
        command = [
            *(launcher or [sys.executable]),
            "-m",
            "provider.cli",
            "serve",
            str(folder),
            "--tls-dir",
            str(tls_dir),
        ]
        command += ["--token-file", str(token_file[0]), "--port", "0", "--ready-file", str(ready)]
        command += ["--numerics", "float32", *options]
        program = Program(command, ready, log, environment)
        processes.append(program.process)
        told = json.loads(program.wait_until_ready())
        return Executor(
            told["url"],
            token_file[1],
            tls_dir / "ca.pem",
            process=program.process,
            admin_url=told["admin_url"],
            log=log,
        )

    try:
        yield start
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture
def serve_process(
    tls_dir: Path, token_file: tuple[Path, str], tmp_path: Path
) -> Iterator[Callable[..., Executor]]:
    """Start an executor as its own process: ``serve_process(folder, "--option", ...)``."""
    with executor_processes(tls_dir, token_file, tmp_path) as start:
        yield start


LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT_LIKE: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 128,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_BERT_LIKE: dict[str, Any] = {
    key: value for key, value in LLAMA_LIKE.items() if key not in ("num_key_value_heads",)
}
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA_LIKE),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA_LIKE),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA_LIKE, "head_dim": 16}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**LLAMA_LIKE, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**LLAMA_LIKE, "head_dim": 16}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT_LIKE),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT_LIKE),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            **{k: v for k, v in LLAMA_LIKE.items() if k not in ("num_key_value_heads", "intermediate_size")},
            "ffn_dim": 96,
            "word_embed_proj_dim": 64,
        },
    ),
    "bert": ("BertModel", "BertConfig", _BERT_LIKE),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**LLAMA_LIKE, "num_local_experts": 4}),
}


def make_model(architecture: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model of an architecture with random weights and non-zero biases."""
    class_name, config_name, options = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    model = getattr(transformers, class_name)(getattr(transformers, config_name)(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model.eval()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a saved tiny model: ``checkpoint("llama")``; made once."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp(architecture)
            make_model(architecture).save_pretrained(made[architecture])
        return made[architecture]

    return make


@pytest.fixture(scope="session")
def llama(serve: Callable[..., Executor], checkpoint: Callable[[str], Path]) -> Executor:
    """A tiny Llama in an executor of this process, shared by many tests."""
    return serve(checkpoint("llama"))


@pytest.fixture(scope="module")
def session(llama: Executor) -> Iterator[tenant_sdk.Session]:
    """A session with the tiny Llama."""
    with llama.connect() as opened:
        yield opened


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 distance."""
    return float((got - expected).norm() / expected.norm())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file to learn from."""
    path = tmp_path / "notes.txt"
    path.write_text("Rex, terrier, 4 y. Plan: rest. " * 12)
    return path
