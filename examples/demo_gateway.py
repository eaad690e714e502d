"""The demo's last part: the adapter that was just trained, served by the gateway to OpenAI's own client."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import openai

from shared.launching import Program, free_port

PYTHON = Path(__file__).resolve().parents[1] / ".venv-gateway" / "bin" / "python"
ADAPTER = "clinic"
CLIENTS = 8  # at once
SECONDS = 240  # to start


class Party(NamedTuple):
    """An executor, as the command line of ``symbiosis-tenant`` has it."""

    url: str
    ca: Path
    token: str


class Answer(NamedTuple):
    """What one client was told, and when each token came, in seconds since it asked."""

    tokens: list[int]
    text: str
    times: list[float]


@contextmanager
def gateway(
    base_model: str, adapter: Path, privacy: str, parties: Sequence[Party], log: Path
) -> Iterator[str]:
    """``symbiosis-tenant serve`` on this machine until the block ends; its URL."""
    provider, *sources = parties
    with tempfile.TemporaryDirectory(prefix="symbiosis-demo-") as temporary:
        folder = Path(temporary)
        shutil.copytree(adapter, folder / "adapters" / ADAPTER)
        command = [
            PYTHON,
            "-m",
            "tenant_sdk.command_line.main",
            "serve",
            "--name",
            base_model,
            "--port",
            free_port(),
        ]
        command += ["--adapters", folder / "adapters", "--ready-file", folder / "url"]
        command += ["--privacy", privacy, "--provider", provider.url, "--ca", provider.ca]
        command += ["--token-env", "TOKEN_0"]
        for at, source in enumerate(sources, 1):
            command += ["--mask-source", source.url, "--mask-source-ca", source.ca]
            command += ["--mask-source-token-env", f"TOKEN_{at}"]
        for sign in ("host", "address", "machine") if sources else ():
            command += ["--allow-same", sign]
        tokens = {f"TOKEN_{at}": party.token for at, party in enumerate(parties)}
        with Program(command, folder / "url", log, tokens, group=True) as program:
            yield program.wait_until_ready(SECONDS)


def ask(url: str, models: Sequence[str], prompt: Any, new_tokens: int) -> dict[str, Any]:
    """A client for each of these models, all at once: what the first of each model was told, and how fast.

    Args:
        prompt: a text, or the messages of a chat.
    """
    began = time.perf_counter()
    answers = asyncio.run(_ask_all(url, models, prompt, new_tokens))
    seconds = time.perf_counter() - began
    firsts = sorted(each.times[0] for each in answers)
    return {
        "clients": len(answers),
        "tokens_per_second": sum(len(each.tokens) for each in answers) / seconds,
        "first_token_seconds": firsts[len(firsts) // 2],
        "tokens": {model: each.tokens for model, each in zip(models, answers, strict=True)},
        "text": {model: each.text for model, each in zip(models, answers, strict=True)},
        "same_for_all_clients": len({(m, tuple(a.tokens)) for m, a in zip(models, answers, strict=True)})
        == len(set(models)),
    }


async def _ask_all(url: str, models: Sequence[str], prompt: Any, new_tokens: int) -> list[Answer]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return await asyncio.gather(*(_ask(client, model, prompt, new_tokens) for model in models))


async def _ask(client: openai.AsyncOpenAI, model: str, prompt: Any, new_tokens: int) -> Answer:
    """The most likely continuation or answer, streamed."""
    began, tokens, text, times = time.perf_counter(), list[int](), "", list[float]()
    options: dict[str, Any] = {"model": model, "max_tokens": new_tokens, "temperature": 0, "stream": True}
    options["extra_body"] = {"return_token_ids": True}
    if isinstance(prompt, str):
        stream = await client.completions.create(prompt=prompt, **options)
    else:
        stream = await client.chat.completions.create(messages=prompt, **options)
    async for event in stream:
        for choice in event.choices:
            tokens += (choice.model_extra or {}).get("token_ids") or []
            text += (choice.text if isinstance(prompt, str) else choice.delta.content) or ""
            times.append(time.perf_counter() - began)
    return Answer(tokens, text, times)
