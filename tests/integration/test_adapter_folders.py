"""Folders of adapters say what they belong to, load without any executor, and refuse another base."""

from __future__ import annotations

import gc
import json
import logging
import re
import shutil
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import peft
import pytest
import torch
from conftest import Executor, make_model, relative_error
from parity import fixed_result, load_local, token_ids
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import tenant_sdk
from shared.errors import CheckpointError, ConfigurationError, ModelMismatch
from tenant_sdk.model.naming import base_of_peer, find_base, folder_of_peer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks a hub about a file fails the test."""

    def asked(*names: Any, **_: Any) -> None:
        raise AssertionError(f"asked a hub: {names}")

    monkeypatch.setattr("peft.utils.other.file_exists", asked)


def adapted(model: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).eval()


def read(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


# -- saving ---------------------------------------------------------------------------------------


def test_a_folder_says_what_it_belongs_to_and_loads_without_an_executor(
    session: tenant_sdk.Session, folder: Path, tmp_path: Path
) -> None:
    model = adapted(session.load_model(base=folder, progress=False))
    expected = fixed_result(model, token_ids())
    tenant_sdk.save_adapter(
        model, tmp_path / "one", session, training={"steps": 3, "note": "a|b\nc", "perplexity": 25.205985}
    )
    model.save_pretrained(tmp_path / "plain")
    for name in ("one", "plain"):
        assert read(tmp_path / name, "adapter_config.json")["base_model_name_or_path"] == str(folder)
        elsewhere = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / name).eval()
        assert relative_error(fixed_result(elsewhere, token_ids()), expected) < 1e-5
    record, manifest = read(tmp_path / "one", "symbiosis.json"), session.manifest
    for name in ("digest", "weights", "numerics", "architecture"):
        assert record[name] == getattr(manifest, name)
    assert (record["privacy"], record["training"]["steps"]) == ("plain", 3)
    assert record["training"]["perplexity"] == 25.21
    card = (tmp_path / "one" / "README.md").read_text()
    assert "library_name: peft" in card
    assert f"AutoModelForCausalLM.from_pretrained('{folder}')" in card
    assert "tenant_sdk.load_adapter(session.load_model()" in card
    assert "| privacy mode | plain |" in card
    assert r"| note | a\|b c |" in card
    assert "| perplexity | 25.21 |" in card
    assert "`ADAPTER` is this folder)" in card
    assert "More Information Needed" not in card


@pytest.mark.usefixtures("no_hub")
def test_a_provider_that_serves_a_model_of_a_hub(
    serve: Callable[..., Executor], folder: Path, tmp_path: Path
) -> None:
    cached = tmp_path / "models--clinic--tiny" / "snapshots" / COMMIT
    shutil.copytree(folder, cached)
    with serve(cached).connect() as session:
        assert session.manifest.model == f"clinic/tiny@{COMMIT}"
        model = adapted(session.load_model(progress=False))
        assert model.name_or_path == "clinic/tiny"
        tenant_sdk.save_adapter(model, tmp_path / "adapter", session)
        assert session.load_model(base="", progress=False).name_or_path == ""
    config = read(tmp_path / "adapter", "adapter_config.json")
    assert (config["base_model_name_or_path"], config["revision"]) == ("clinic/tiny", COMMIT)
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "base_model: clinic/tiny" in card
    assert f"from_pretrained('clinic/tiny', revision='{COMMIT}')" in card


@pytest.mark.usefixtures("no_hub")
def test_the_name_of_a_providers_folder_is_no_address(
    session: tenant_sdk.Session, folder: Path, tmp_path: Path
) -> None:
    """It stands in the adapter for people to read; a model with that name would be looked up at a hub."""
    model = adapted(session.load_model(progress=False))
    assert model.name_or_path == ""
    tenant_sdk.save_adapter(model, tmp_path, session)
    assert read(tmp_path, "adapter_config.json")["base_model_name_or_path"] == folder.name
    card = (tmp_path / "README.md").read_text()
    assert "base_model:" not in card
    assert f"# Adapter for {folder.name} (LORA)" in card
    assert "AutoModelForCausalLM.from_pretrained('FOLDER_OF_THE_BASE')" in card
    assert "(`ADAPTER` is this folder, `FOLDER_OF_THE_BASE` that of the base model)" in card


@pytest.mark.parametrize(
    "name",
    ["/etc", "../../models", "~/x", "a/b/c", ".", "..", "", "org/../x", "file:///x", "o/n\n#", "o/`n`"],
)
def test_a_provider_cannot_name_a_path(name: str, session: tenant_sdk.Session) -> None:
    manifest = msgspec.structs.replace(session.manifest, model=name)
    assert base_of_peer(manifest).name == ""
    assert folder_of_peer(manifest).name == ""


def test_a_provider_cannot_name_a_folder_that_is_here(
    session: tenant_sdk.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = msgspec.structs.replace(session.manifest, model="clinic/tiny@main")
    assert base_of_peer(manifest) == ("clinic/tiny", None)  # a branch is not what was served
    (tmp_path / "clinic" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert base_of_peer(manifest).name == ""


def test_a_base_that_cannot_be(
    session: tenant_sdk.Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model("llama", seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelMismatch, match="does not hold the weights"):
        session.load_model(base=tmp_path / "other", progress=False)
    with pytest.raises(CheckpointError, match="not a checkpoint folder"):
        find_base(tmp_path, session.manifest)
    with pytest.raises(ConfigurationError, match="neither a folder here nor a model of a hub"):
        find_base("missing", session.manifest)
    assert find_base("/models/tiny", session.manifest).name == "/models/tiny"
    assert "no folder /models/tiny here" in caplog.text


def test_one_line_after_a_trainer(session: tenant_sdk.Session, tmp_path: Path) -> None:
    model = adapted(session.load_model(progress=False))
    rows = [{"input_ids": ids, "labels": ids} for ids in token_ids(4)]
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=2, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    tenant_sdk.save_adapter(model, tmp_path / "adapter", session, training=trainer)
    training = read(tmp_path / "adapter", "symbiosis.json")["training"]
    assert (training["steps"], training["batch_size"], training["learning_rate"]) == (2, 8, 5e-5)
    assert training["last_loss"] > 0
    assert "| steps | 2 |" in (tmp_path / "adapter" / "README.md").read_text()


@pytest.mark.usefixtures("no_hub")
def test_embeddings_that_have_grown_are_saved(session: tenant_sdk.Session, tmp_path: Path) -> None:
    base = session.load_model(progress=False)
    base.resize_token_embeddings(130, mean_resizing=False)
    tenant_sdk.save_adapter(adapted(base), tmp_path, session)
    assert any("embed_tokens" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    again = session.load_model(progress=False)
    again.resize_token_embeddings(130, mean_resizing=False)
    tenant_sdk.load_adapter(again, tmp_path, session)
    assert torch.equal(again.get_input_embeddings().weight, base.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("option", "meant"), [("tokeniser", "tokenizer"), ("save_embeding_layers", "save_emb")]
)
def test_an_option_that_nobody_knows_is_not_dropped(
    option: str, meant: str, session: tenant_sdk.Session, tmp_path: Path
) -> None:
    model = adapted(session.load_model(progress=False))
    with pytest.raises(ConfigurationError, match=rf"save_adapter\({option}=\.\.\.\).*did you mean {meant}"):
        tenant_sdk.save_adapter(model, tmp_path / "adapter", session, **{option: None})
    assert not (tmp_path / "adapter").exists()


def test_a_model_without_an_adapter_is_not_saved(session: tenant_sdk.Session, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM has no adapter"):
        tenant_sdk.save_adapter(session.load_model(progress=False), tmp_path, session)


# -- loading --------------------------------------------------------------------------------------


@pytest.fixture
def saved(session: tenant_sdk.Session, tmp_path: Path) -> Path:
    tenant_sdk.save_adapter(adapted(session.load_model(progress=False)), tmp_path / "adapter", session)
    return tmp_path / "adapter"


def test_an_adapter_of_another_base_is_refused(
    serve: Callable[..., Executor], saved: Path, folder: Path, tmp_path: Path
) -> None:
    make_model("llama", seed=1).save_pretrained(tmp_path / "other")
    with serve(tmp_path / "other").connect() as session:
        model = session.load_model(progress=False)
        with pytest.raises(ModelMismatch) as refused:
            tenant_sdk.load_adapter(model, saved, session)
        for part in (folder.name, "base is other", session.manifest.weights[:16], "allow_other_base=True"):
            assert part in str(refused.value)
        loaded = tenant_sdk.load_adapter(model, saved, session, allow_other_base=True)
        assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_an_adapter_of_a_larger_base_shows_what_does_not_fit(
    serve: Callable[..., Executor], saved: Path, tmp_path: Path
) -> None:
    config = make_model("llama").config
    config.hidden_size, config.head_dim = 32, 8
    LlamaForCausalLM(config).save_pretrained(tmp_path / "small")
    with serve(tmp_path / "small").connect() as session:
        model = session.load_model(progress=False)
        with pytest.raises(ModelMismatch) as refused:
            tenant_sdk.load_adapter(model, saved, session, allow_other_base=True)
    said = r"another base model: size mismatch for .*q_proj.*\[2, 64\].*\[2, 32\]\) \(and 3 more\)$"
    assert re.search(said, str(refused.value))


def test_another_tokenizer_is_no_other_base(
    serve: Callable[..., Executor],
    saved: Path,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.copytree(folder, tmp_path / "same")
    (tmp_path / "same" / "special_tokens_map.json").write_text("{}")
    with serve(tmp_path / "same").connect() as session:
        model = tenant_sdk.load_adapter(session.load_model(progress=False), saved, session, trainable=True)
    assert "another tokenizer, configuration or embeddings" in caplog.text
    assert any(parameter.requires_grad for parameter in model.parameters())


def test_a_folder_of_plain_peft_loads(session: tenant_sdk.Session, folder: Path, tmp_path: Path) -> None:
    local = adapted(load_local(folder))
    local.save_pretrained(tmp_path)
    loaded = tenant_sdk.load_adapter(session.load_model(progress=False), tmp_path, session)
    expected = fixed_result(local, token_ids())
    assert relative_error(fixed_result(loaded, token_ids()), expected) < 1e-5


@pytest.mark.parametrize("content", [b"{", b'{"weights": 3}', b"\xff"])
def test_a_damaged_record(content: bytes, session: tenant_sdk.Session, saved: Path) -> None:
    (saved / "symbiosis.json").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"symbiosis\.json is damaged"):
        tenant_sdk.load_adapter(session.load_model(progress=False), saved, session)


# -- what users are told --------------------------------------------------------------------------


def learn(model: Any) -> None:
    ids = token_ids()
    model(input_ids=ids, labels=ids).loss.backward()


def test_parameters_that_train_unnoticed(
    session: tenant_sdk.Session, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = session.attach(load_local(folder))
    fixed_result(model, token_ids())
    assert "frozen" not in caplog.text  # nothing is trained
    learn(model)
    learn(model)
    (warning,) = (each for each in caplog.records if "frozen" in each.message)
    assert warning.levelno == logging.WARNING
    assert "14 parameters of LlamaForCausalLM are frozen, at the executor; 7 others" in warning.message
    assert "model.embed_tokens.weight" in warning.message
    assert "requires_grad_(False)" in warning.message


@pytest.mark.parametrize("how", ["frozen", "adapter first", "adapter later", "detached"])
def test_no_word_where_an_adapter_trains_alone(
    how: str, session: tenant_sdk.Session, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = load_local(folder)
    if how == "frozen":
        model.requires_grad_(False)
    model = adapted(model) if how == "adapter first" else model
    session.attach(model)
    model = adapted(model) if how in ("frozen", "adapter later") else model
    if how == "detached":
        session.detach(model)
    learn(model)
    assert "frozen" not in caplog.text


def test_no_deprecation_of_libraries_reaches_the_user(session: tenant_sdk.Session) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapted(session.load_model(progress=False))


def test_a_model_that_nobody_uses_is_freed(session: tenant_sdk.Session, folder: Path) -> None:
    model = session.attach(load_local(folder))
    embeddings = weakref.ref(model.get_input_embeddings().weight)
    del model
    gc.collect()
    assert embeddings() is None
