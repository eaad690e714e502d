"""Folders of adapters say what they belong to, load without any executor, and refuse another base."""

from __future__ import annotations

import gc
import json
import logging
import re
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import peft
import pytest
import torch
from conftest import Executor, make_model, relative_error
from parity import fixed_result, load_local, token_ids
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import tenant_sdk
from shared.errors import CheckpointError, ConfigurationError, ModelMismatch
from tenant_sdk.model.naming import base_of_peer, find_base, folder_of_peer
from tenant_sdk.model.remote_weight import RemoteWeight

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture
def session(llama: Executor) -> Iterator[tenant_sdk.Session]:
    with llama.connect() as opened:
        yield opened


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
    assert f"# A LORA adapter for {folder.name}" in card
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


# -- from anybody ---------------------------------------------------------------------------------


def change(folder: Path, **fields: Any) -> None:
    config = read(folder, "adapter_config.json") | fields
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"megatron_config": {"tensor_model_parallel_size": 1}, "megatron_core": "evil"},
            "has megatron_config",
        ),
        ({"layer_replication": [[0, 100_000]]}, "has layer_replication"),
        ({"arrow_config": {"top_k": 1}}, "has arrow_config"),
        ({"corda_config": {"cache_file": "/etc/passwd"}}, "has corda_config"),
        ({"lora_ga_config": {"cache_file": "/etc/passwd"}}, "has lora_ga_config"),
        ({"use_dora": True}, "has use_dora: True"),
        ({"what_a_later_peft_reads": "/etc/passwd"}, "has what_a_later_peft_reads: '/etc/passwd'"),
        ({"init_lora_weights": "pissa_niter_4"}, "begun with changes to the base's weights"),
        ({"init_lora_weights": "loftq"}, "begun with changes to the base's weights"),
        ({"peft_type": "XLORA", "adapters": {"0": "evil/adapter"}}, "of the kind 'XLORA'"),
        ({"peft_type": "SHADOW", "shadow_model": "evil/model"}, "of the kind 'SHADOW'"),
        ({"peft_type": "MULTITASK_PROMPT_TUNING"}, "of the kind 'MULTITASK_PROMPT_TUNING'"),
        ({"peft_type": ["LORA"]}, r"of the kind \['LORA'\]"),
        ({"task_type": "NONE"}, "cannot be used: Invalid task type"),
    ],
)
@pytest.mark.usefixtures("no_hub")
def test_what_no_folder_may_ask_for(
    fields: dict[str, Any], said: str, session: tenant_sdk.Session, saved: Path
) -> None:
    change(saved, **fields)
    with pytest.raises(ConfigurationError, match=said):
        tenant_sdk.load_adapter(session.load_model(progress=False), saved, session)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("model.embed_tokens.weight", {}),
        ("model.norm.weight", {}),
        ("lm_head.weight", {}),
        ("model.norm.original_module.weight", {"modules_to_save": ["model.norm"]}),
        (
            "model.embed_tokens.token_adapter.base_layer.weight",
            {"trainable_token_indices": {"embed_tokens": [0]}},
        ),
        ("model.layers.0.self_attn.q_proj.lora_A.base_layer.weight", {}),
        ("model.norm.bias", {"bias": "lora_only"}),
    ],
)
def test_an_adapter_does_not_write_over_the_base(
    name: str, fields: dict[str, Any], session: tenant_sdk.Session, saved: Path
) -> None:
    """PEFT would, and leave it so when the adapter is switched off or refused."""
    model = session.load_model(progress=False)
    held = {key: each for key, each in model.named_parameters() if not isinstance(each, RemoteWeight)}
    before = {key: each.clone() for key, each in held.items()}
    change(saved, **fields)
    weights = load_file(saved / "adapter_model.safetensors")
    weights[f"base_model.model.{name}"] = torch.zeros(4, 4)
    save_file(weights, saved / "adapter_model.safetensors")
    with pytest.raises(ConfigurationError, match=r"holds '\S+', which is no part of the adapter"):
        tenant_sdk.load_adapter(model, saved, session)
    assert all(torch.equal(held[key], each) for key, each in before.items())


def test_what_is_written_over_the_base_all_the_same_is_noticed(
    session: tenant_sdk.Session, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT may come to read names in other ways."""
    monkeypatch.setattr("tenant_sdk.tuning.folders.check_weights", lambda *_: set())
    weights = load_file(saved / "adapter_model.safetensors")
    model = session.load_model(progress=False)
    weights["base_model.model.model.norm.weight"] = torch.ones_like(model.model.norm.weight)
    save_file(weights, saved / "adapter_model.safetensors")
    with pytest.raises(ConfigurationError, match=r"written over model\.norm\.weight"):
        tenant_sdk.load_adapter(model, saved, session)


def test_modules_that_an_adapter_brings_are_its_own(session: tenant_sdk.Session, tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"], trainable_token_indices=[1])
    adapted = peft.get_peft_model(session.load_model(progress=False), config)
    tenant_sdk.save_adapter(adapted, tmp_path / "own", session)
    tenant_sdk.load_adapter(session.load_model(progress=False), tmp_path / "own", session)


@pytest.mark.usefixtures("no_hub")
def test_where_a_folder_says_that_it_comes_from_leads_nowhere(
    session: tenant_sdk.Session, saved: Path, tmp_path: Path
) -> None:
    """PEFT would ask a hub about the base's name, and that is the author's choice, whenever it saves."""
    change(
        saved,
        base_model_name_or_path="evil/base",
        revision="evil",
        auto_mapping={"base_model_class": "x", "parent_library": "evil"},
        runtime_config={"ephemeral_gpu_offload": True},
        eva_config={"rho": 2.0},
        init_lora_weights="eva",
        peft_version="99.0",
        use_dora=False,
        what_a_later_peft_reads=None,
    )
    loaded = tenant_sdk.load_adapter(session.load_model(progress=False), saved, session, trainable=True)
    loaded.save_pretrained(tmp_path / "again")
    assert "evil" not in (tmp_path / "again" / "adapter_config.json").read_text()
    assert loaded.peft_config["default"].runtime_config.ephemeral_gpu_offload is False


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_damaged_configuration(content: bytes, session: tenant_sdk.Session, saved: Path) -> None:
    (saved / "adapter_config.json").write_bytes(content)
    with pytest.raises(ConfigurationError, match="cannot read"):
        tenant_sdk.load_adapter(session.load_model(progress=False), saved, session)


@pytest.mark.usefixtures("no_hub")
def test_the_text_that_a_prompt_began_with_is_not_read(
    session: tenant_sdk.Session, folder: Path, tmp_path: Path
) -> None:
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    peft.get_peft_model(load_local(folder), config).save_pretrained(tmp_path, save_embedding_layers=False)
    words = {"tokenizer_name_or_path": "evil/words", "tokenizer_kwargs": {"trust_remote_code": True}}
    change(tmp_path, prompt_tuning_init="TEXT", prompt_tuning_init_text="x", **words)
    loaded = tenant_sdk.load_adapter(session.load_model(progress=False), tmp_path, session)
    assert loaded.peft_config["default"].tokenizer_name_or_path is None
    fixed_result(loaded, token_ids())


def test_tokens_that_switch_an_adapter_on_change_no_rows(
    session: tenant_sdk.Session, folder: Path, tmp_path: Path
) -> None:
    """The provider would see them in how many rows there are."""
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[7, 8]
    )
    peft.get_peft_model(load_local(folder), config).save_pretrained(tmp_path, save_embedding_layers=False)
    loaded = tenant_sdk.load_adapter(session.load_model(progress=False), tmp_path, session)
    counts = []
    for text in ([1, 2, 7, 8, 3], [1, 2, 8, 7, 3]):
        before = session.stats.rows, session.stats.requests
        loaded.generate(input_ids=torch.tensor([text]), max_new_tokens=3, min_new_tokens=3)
        counts.append((session.stats.rows - before[0], session.stats.requests - before[1]))
    assert counts[0] == counts[1]


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
