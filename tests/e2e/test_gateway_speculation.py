"""Speculation in a gateway: drafts of the base and of an adapter, and prompt lookup."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import peft
import psutil
import pytest
import torch
from commands import BASE_MODEL
from conftest import Executor
from gateways import (
    NUMERICS,
    PROMPTS,
    complete,
    gateway,
    local,
    metric,
    needed,
    starting_gateway,
    write_adapter,
)
from raw_peers import eventually
from transformers import AutoTokenizer

from tenant_sdk.drafts.folder import save_draft
from tenant_sdk.drafts.head import DraftHead, Guesser, Vocabulary
from tenant_sdk.drafts.making import DraftCallbacks, make_draft
from tenant_sdk.drafts.options import DraftOptions
from tenant_sdk.tuning.folders import load_adapter

pytestmark = needed

COUNTED = ("symbiosis_rows_total", "symbiosis_product_seconds_count")  # by the provider
SIZE = 20  # tokens of an answer
GUESSES = 3
# No guess is right: a control character is no part of a text.
NEVER = 1


@pytest.fixture
def executors(serve_process: Callable[..., Executor]) -> tuple[Executor, Executor]:
    provider, masks = (serve_process(BASE_MODEL, "--numerics", NUMERICS) for _ in range(2))
    return provider, masks


def make_drafts(provider: Executor, adapter: Path, folder: Path, texts: Path) -> None:
    """``base``, which is always wrong, and ``one``, which knows the adapter's answers by heart."""
    (folder / "base").mkdir(parents=True)
    with provider.connect() as session:
        model: Any = session.load_model(progress=False)
        shares = {"acceptance": (0.5,) * GUESSES, "learned_tokens": 1, "held_out_tokens": 1}
        head = DraftHead(model.config.hidden_size, 64)
        vocabulary = Vocabulary.of(model, torch.tensor([NEVER]))
        save_draft(folder / "base", Guesser(head, vocabulary), model, session, **shares)
        options = DraftOptions(folder / "one", prompts=[texts], answer_tokens=SIZE, epochs=60)
        adapted = load_adapter(model, adapter, session)
        make_draft(options, adapted, AutoTokenizer.from_pretrained(BASE_MODEL), session, DraftCallbacks())


def test_drafts_change_no_text(executors: tuple[Executor, Executor], tmp_path: Path) -> None:
    """Sequences of the base and of an adapter, in the same steps, each with a draft of its own."""
    provider, masks = executors
    write_adapter(BASE_MODEL, tmp_path / "adapters" / "one", seed=0)
    texts = tmp_path / "prompts.txt"
    texts.write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    make_drafts(provider, tmp_path / "adapters" / "one", tmp_path / "drafts", texts)
    options = ("--speculate", tmp_path / "drafts", "--draft-tokens", GUESSES)
    options += ("--adapters", tmp_path / "adapters", "--name", "base")
    with (
        gateway(provider, masks, tmp_path / "drafting", *options, TMPDIR=str(tmp_path)) as it,
        openai.OpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0, timeout=800) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        base = local(BASE_MODEL)
        words = AutoTokenizer.from_pretrained(BASE_MODEL)
        groups, steps = 4 * base.config.num_hidden_layers, dict[str, int]()
        for name in ("base", "one"):
            complete(client, name, PROMPTS[0], 1)  # what checking needs
            before = counted(provider, groups)
            complete(client, name, PROMPTS[0], SIZE, extra_body={"ignore_eos": True})
            rows, steps[name] = (b - a for a, b in zip(before, counted(provider, groups), strict=True))
            # One step read the prompt; each other had one row and three guesses.
            assert 0 < rows - (1 + GUESSES) * (steps[name] - 1) <= len(words(PROMPTS[0])["input_ids"])
        assert steps["base"] == SIZE
        assert steps["one"] < SIZE  # the draft has learned three of the four answers

        asked = [(name, prompt) for prompt in PROMPTS for name in ("base", "one")]
        answers = list(threads.map(lambda each: complete(client, *each, SIZE), asked))
        models = {
            "base": base,
            "one": peft.PeftModel.from_pretrained(local(BASE_MODEL), tmp_path / "adapters/one"),
        }
        for (name, prompt), answer in zip(asked, answers, strict=True):
            ids = words(prompt, return_tensors="pt")["input_ids"]
            expected = models[name].generate(input_ids=ids, max_new_tokens=SIZE, do_sample=False)
            assert answer == words.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)

        # An engine that somebody ends writes no answers that look complete.
        stream = client.completions.create(model="base", prompt=PROMPTS[0], max_tokens=200, stream=True)
        next(stream)
        (engine,) = engines(it.process)
        engine.terminate()
        with pytest.raises(openai.APIError):
            list(stream)
        assert it.process.wait(800) == 1


def test_guesses_change_neither_tokens_nor_rows(executors: tuple[Executor, Executor], tmp_path: Path) -> None:
    """Prompt lookup finds much in a text that repeats itself, and nothing elsewhere."""
    provider, masks = executors
    words = AutoTokenizer.from_pretrained(BASE_MODEL)
    options = ("--speculate", "prompt-lookup", "--draft-tokens", GUESSES, "--name", "base")
    with (
        # Short, as sockets' names need it.
        tempfile.TemporaryDirectory() as folder,
        gateway(provider, masks, tmp_path / "guessing", *options, TMPDIR=folder) as it,
        openai.OpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0, timeout=800) as client,
    ):
        whole, taken = local(BASE_MODEL), list[int]()
        for prompt in ("one two three four one two three four one two three four one two", PROMPTS[0]):
            ids = words(prompt, return_tensors="pt")["input_ids"]
            complete(client, "base", prompt, 1)  # what checking needs
            groups = 4 * whole.config.num_hidden_layers
            before = counted(provider, groups)
            answer = complete(client, "base", prompt, SIZE)
            rows, steps = (b - a for a, b in zip(before, counted(provider, groups), strict=True))
            expected = whole.generate(ids, max_new_tokens=SIZE, do_sample=False)[0, ids.shape[1] :]
            assert answer == words.decode(expected, skip_special_tokens=True)
            # One step read what was not read before; each other had one row and three guesses.
            assert 0 < rows - (1 + GUESSES) * (steps - 1) <= ids.shape[1]
            taken.append(steps)
        assert taken[0] < taken[1]  # how many there are depends on the text

        assert os.listdir(folder)
        stream = client.completions.create(model="base", prompt=PROMPTS[0], max_tokens=200, stream=True)
        next(stream)
        it.process.send_signal(signal.SIGHUP)  # a terminal that is closed; SIGTERM is what it becomes
        with pytest.raises(openai.APIError, match="the gateway is shutting down"):
            list(stream)
        assert it.process.wait(800) == 0
        assert os.listdir(folder) == []


def test_a_gateway_that_ends_while_its_engine_starts(
    executors: tuple[Executor, Executor], tmp_path: Path
) -> None:
    with starting_gateway(*executors, tmp_path / "starting", TMPDIR=str(tmp_path)) as program:
        eventually(lambda: bool(engines(program.process)))
        engine = engines(program.process)[0]
        program.process.terminate()
        program.process.wait(800)
        eventually(lambda: not engine.is_running())
    assert not list(tmp_path.glob("symbiosis-gateway-*"))


def engines(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Of vLLM, below a gateway."""
    below = psutil.Process(process.pid).children(recursive=True)
    return [each for each in below if "EngineCore" in each.name()]


def counted(provider: Executor, groups: int) -> tuple[int, int]:
    """Rows and requests of a provider for each group, once they are counted."""
    found = [0.0, 0.0]

    def whole() -> bool:
        found[:] = [metric(provider, name) / groups for name in COUNTED]
        return all(each == int(each) for each in found)

    eventually(whole)  # all groups are asked alike
    return int(found[0]), int(found[1])
