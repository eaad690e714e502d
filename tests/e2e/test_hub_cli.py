"""A model that everybody knows by its name at a hub: served, checked, tuned, and used without an executor."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from commands import BASE_MODEL, TRAIN, here, ok, tenant
from conftest import RING, Executor, make_model
from hubs import COMMIT, hub
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

from shared.errors import CheckpointError, ModelMismatch
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.products.fingerprints import write_fingerprints
from tenant_sdk.tuning.folders import save_adapter
from tenant_sdk.tuning.local_model import attach_local_model

ALONE = """
import sys, torch
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1])
print(model(torch.arange(5)[None]).logits.shape)
"""


def test_from_a_hub_to_an_adapter_that_needs_no_executor(
    tmp_path: Path, serve_process: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = tmp_path / "adapter"
    with hub({"clinic/base": BASE_MODEL}) as served:
        here = {"HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "cache"), "COLUMNS": "200"}
        for name, value in here.items():
            monkeypatch.setenv(name, value)
        executor = serve_process(Path("hub:clinic/base"), "--numerics", RING)
        log = executor.log.read_text() if executor.log else ""
        assert f"clinic/base is clinic/base@{COMMIT} today" in " ".join(log.split())
        where = ("--mask-source", f"local:hub:clinic/base@{COMMIT}")
        more = ("--data", TRAIN, "--steps", 2, "--batch-size", 2, "--sequence-length", 16)
        run = tenant(
            "finetune",
            executor,
            *where,
            *more,
            "--output",
            adapter,
            "--base",
            "hub:clinic/base",
            secrets=here,
        )
        ok(run)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    write_fingerprints(f"hub:clinic/base@{COMMIT}", tmp_path / "prints")  # in this process, from the cache
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("clinic/base", COMMIT)
    record = json.loads((adapter / "symbiosis.json").read_text())
    assert (record["model"], record["privacy"]) == (f"clinic/base@{COMMIT}", "one-time")
    assert record["training"]["steps"] == 2
    done = subprocess.run(
        [sys.executable, "-c", ALONE, adapter],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert "torch.Size([1, 5," in done.stdout, done.stderr


def test_the_tenants_own_copy(
    tmp_path: Path, serve: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is downloaded; and an adapter goes with no other model unless one insists."""

    def download(*_: Any) -> None:
        raise AssertionError("downloaded")

    monkeypatch.setattr(RemoteExecutor, "parameter", download)
    monkeypatch.setattr(RemoteExecutor, "file", download)
    executor, adapter = serve(BASE_MODEL), tmp_path / "adapter"

    def run(command: str, *arguments: object) -> Result:
        return here(command, executor, "--privacy", "plain", "--model", BASE_MODEL, *arguments)

    more = ("--steps", 2, "--batch-size", 2, "--sequence-length", 16)
    learned = run("finetune", "--data", TRAIN, *more, "--output", adapter)
    assert learned.exit_code == 0, learned.exception
    assert "get gradients" not in learned.output
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(BASE_MODEL)

    say = ("generate", "--prompt", "Tue 4 March.", "--max-new-tokens", 2, "--adapter", adapter)
    assert run(*say).exit_code == 0
    record = json.loads((adapter / "symbiosis.json").read_text())
    (adapter / "symbiosis.json").write_text(json.dumps(record | {"weights": "0" * 64, "model": "clinic/o"}))
    refused = run(*say)
    assert isinstance(refused.exception, ModelMismatch)
    assert "was made for clinic/o (weights 0000000000000000), but this session's base is base_model" in str(
        refused.exception
    )
    assert "--allow-other-base" in str(refused.exception)
    assert run(*say, "--allow-other-base").exit_code == 0


def test_an_adapter_keeps_the_tokenizer_that_it_was_trained_with(
    tmp_path: Path, serve: Callable[..., Executor]
) -> None:
    """From a folder of its own, with a chat template that the executor's has not; its user names it again."""
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "words")
    chat = {"messages": [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "Yes."}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat))
    executor, adapter = serve(BASE_MODEL), tmp_path / "adapter"

    def run(command: str, *arguments: object) -> Result:
        return here(command, executor, "--privacy", "plain", *arguments)

    learn = ("--data", tmp_path / "chat.jsonl", "--steps", 1, "--tokenizer", tmp_path / "words")
    learned = run("finetune", *learn, "--output", adapter)
    assert learned.exit_code == 0, learned.exception
    assert AutoTokenizer.from_pretrained(adapter).chat_template == tokenizer.chat_template
    say = ("--prompt", "So?", "--max-new-tokens", 2, "--adapter", adapter)
    written = run("generate", *say, "--tokenizer", adapter)
    assert written.exit_code == 0, written.exception
    assert "session: " in written.stderr
    assert "%|" not in learned.stderr + written.stderr  # bars are for terminals
    quiet = run("generate", *say, "--tokenizer", adapter, "--quiet")
    assert quiet.stdout == written.stdout
    assert "is not used" not in written.stderr + quiet.stderr
    unnamed = run("generate", *say)
    assert f"the tokenizer in {adapter} is not used" in unnamed.stderr
    raw = run("generate", *say, "--raw", "--tokenizer", adapter)
    assert unnamed.stdout == raw.stdout != written.stdout  # the executor's has no template


def test_the_author_of_an_adapter_does_not_decide_how_many_rows_a_text_has(
    tmp_path: Path, serve: Callable[..., Executor]
) -> None:
    """The author may be the provider, who sees rows, and whose tokenizer would be attested by nobody."""
    executor, adapter = serve(BASE_MODEL), tmp_path / "adapter"
    with executor.connect() as session:
        model: Any = session.load_model(progress=False)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        save_adapter(model, adapter, session)

    def rows(word: str) -> int:
        say = ("--prompt", f"Seen: Boaz, has {word}.", "--max-new-tokens", 2, "--adapter", adapter)
        written = here("generate", executor, "--privacy", "plain", *say)
        assert written.exit_code == 0, written.exception
        count = re.search(r"([\d,]+) rows", written.stderr)
        assert count is not None
        return int(count[1].replace(",", ""))

    words = ("diabetes", "arthritis")
    honest = [rows(word) for word in words]
    rules = json.loads((BASE_MODEL / "tokenizer.json").read_text())
    filler = {"type": "Replace", "pattern": {"String": "diabetes"}, "content": "x y " * 50}
    rules["normalizer"] = {"type": "Sequence", "normalizers": [filler]}
    (adapter / "tokenizer.json").write_text(json.dumps(rules))
    shutil.copy(BASE_MODEL / "tokenizer_config.json", adapter)
    assert [rows(word) for word in words] == honest


def test_a_tokenizer_is_a_folder(tmp_path: Path, serve: Callable[..., Executor]) -> None:
    done = here(
        *("generate", serve(BASE_MODEL), "--privacy", "plain", "--prompt", "x", "--tokenizer", "clinic/words")
    )
    assert str(done.exception) == "there is no folder clinic/words to take a tokenizer from"


def test_a_copy_that_is_not_quite_the_executors(tmp_path: Path, serve: Callable[..., Executor]) -> None:
    """Attached, it passes as one that was rounded; of its files every byte counts."""
    model = make_model("llama")
    model.save_pretrained(tmp_path / "served")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.03
    model.save_pretrained(tmp_path / "own")
    with serve(tmp_path / "served").connect() as session:
        session.attach(model)
        with pytest.raises(
            ModelMismatch, match=r"does not hold the weights .* Give the very checkpoint that"
        ):
            attach_local_model(session, str(tmp_path / "own"))
        attach_local_model(session, str(tmp_path / "served"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "vit"}, "AutoModelForCausalLM does not load a ViTConfig"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "GPTQ quantized model requires"),
    ],
)
def test_a_copy_that_transformers_does_not_load_here(
    changes: dict[str, Any], reason: str, tmp_path: Path, serve: Callable[..., Executor]
) -> None:
    make_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with serve(BASE_MODEL).connect() as session, pytest.raises(CheckpointError) as caught:
        attach_local_model(session, str(tmp_path))
    assert reason in str(caught.value)
    assert str(caught.value).endswith("Leave out model: then the provider's dense weights are used")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("command", ["generate", "finetune"])
def test_a_model_that_is_not_causal(
    command: str, tmp_path: Path, serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    more = {"generate": ("--prompt", "x"), "finetune": ("--data", TRAIN, "--output", tmp_path / "adapter")}
    executor = serve(checkpoint("bert"))
    for own in ((), ("--model", checkpoint("bert"))):
        done = here(command, executor, "--privacy", "plain", *more[command], *own)
        assert "BertModel is not a causal language model: the command line" in str(done.exception)


def test_a_copy_with_an_adapter_beside_it(tmp_path: Path, serve: Callable[..., Executor]) -> None:
    """transformers would put it into the model, whose weights would still be the executor's to the byte."""
    shutil.copytree(BASE_MODEL, tmp_path / "own")
    (tmp_path / "own" / "adapter_config.json").write_text("{}")
    with serve(BASE_MODEL).connect() as session, pytest.raises(CheckpointError, match="holds an adapter"):
        attach_local_model(session, str(tmp_path / "own"))


def test_a_copy_that_is_none(tmp_path: Path, serve: Callable[..., Executor]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with (
        serve(BASE_MODEL).connect() as session,
        pytest.raises(CheckpointError, match="has no model"),
    ):
        attach_local_model(session, str(tmp_path))


def test_a_copy_of_more_layers_than_it_holds(tmp_path: Path, serve: Callable[..., Executor]) -> None:
    """transformers would build all of them before it reads a weight."""
    shutil.copytree(BASE_MODEL, tmp_path / "own")
    config = json.loads((BASE_MODEL / "config.json").read_text())
    (tmp_path / "own" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1000}))
    with serve(BASE_MODEL).connect() as session, pytest.raises(CheckpointError, match="many more layers"):
        attach_local_model(session, str(tmp_path / "own"))


@pytest.mark.parametrize("key", ["attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("value", ["kernels-community/x", "flash_attention_2"])
def test_a_copy_chooses_no_code(key: str, value: str, tmp_path: Path, serve: Callable[..., Executor]) -> None:
    """With the package ``kernels``, transformers would fetch and run it."""
    shutil.copytree(BASE_MODEL, tmp_path / "own")
    config = json.loads((BASE_MODEL / "config.json").read_text())
    (tmp_path / "own" / "config.json").write_text(json.dumps(config | {key: value}))
    with serve(BASE_MODEL).connect() as session:
        model, _ = attach_local_model(session, str(tmp_path / "own"))
        assert model.config._attn_implementation == "sdpa"


def test_a_copy_does_not_say_how_text_is_generated(tmp_path: Path, serve: Callable[..., Executor]) -> None:
    """The number of rows would depend on the text, or others' tokens would be chosen."""
    shutil.copytree(BASE_MODEL, tmp_path / "own")
    said = {"prompt_lookup_num_tokens": 5, "num_beams": 4, "use_cache": False, "eos_token_id": 3}
    (tmp_path / "own" / "generation_config.json").write_text(json.dumps(said))
    with serve(BASE_MODEL).connect() as session:
        model, _ = attach_local_model(session, str(tmp_path / "own"))
    found = model.generation_config
    assert found.eos_token_id == 3
    assert not found.prompt_lookup_num_tokens
    assert found.num_beams in (None, 1)
