"""Adapters from anybody: what of a folder is used, and what no folder may ask for."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import relative_error
from parity import fixed_result, load_local, token_ids
from safetensors.torch import load_file, save_file
from test_adapter_folders import folder, no_hub, read, saved

import tenant_sdk
from shared.errors import ConfigurationError
from tenant_sdk.model.remote_weight import RemoteWeight
from tenant_sdk.tuning.adapters import AdapterOptions, add_adapter

__all__ = ["folder", "no_hub", "saved"]  # fixtures

QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


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
        ({"init_lora_weights": "pissa_niter_4"}, "began with changes to the base's weights"),
        ({"init_lora_weights": "loftq"}, "began with changes to the base's weights"),
        ({"peft_type": "XLORA", "adapters": {"0": "evil/adapter"}}, "of the kind 'XLORA'"),
        ({"peft_type": "SHADOW", "shadow_model": "evil/model"}, "of the kind 'SHADOW'"),
        ({"peft_type": "MULTITASK_PROMPT_TUNING"}, "of the kind 'MULTITASK_PROMPT_TUNING'"),
        ({"peft_type": ["LORA"]}, r"of the kind \['LORA'\]"),
        ({"task_type": "NONE"}, "task_type is 'NONE'"),
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
    monkeypatch.setattr("tenant_sdk.tuning.untrusted_adapter._check_weights", lambda *_: set())
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
    loaded = tenant_sdk.load_adapter(session.load_model(progress=False), tmp_path / "own", session)
    expected, found = (
        peft.get_peft_model_state_dict(each, save_embedding_layers=False) for each in (adapted, loaded)
    )
    assert any("norm" in name for name in found)
    assert all(torch.equal(values, found[name]) for name, values in expected.items())


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


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"r": 2**31}, "has rank 2147483648, and no layer|r is 2147483648"),
        ({"r": 1025}, "has rank 1025, and no layer of this model has more than 64"),
        ({"rank_pattern": {"q_proj": 1025}}, "has rank 1025"),
        ({"r": True}, "r is True: Expected `int"),
        ({"lora_alpha": 1e30}, r"lora_alpha is 1e\+30"),
        ({"lora_dropout": 2}, "lora_dropout is 2"),
        ({"bias": "none "}, "bias is 'none '"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"target_modules": [3]}, r"target_modules is \[3\]"),
        ({"target_modules": [f"x{at}" for at in range(5000)]}, "target_modules is .*4096"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is"),
        ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern is"),
        ({"alpha_pattern": dict.fromkeys(map(str, range(5000)), 1)}, "alpha_pattern is .*4096"),
        ({"target_parameters": [3]}, "target_parameters is"),
        ({"layers_pattern": ["(a+)+"]}, "no patterns"),
    ],
)
def test_values_that_no_adapter_has(
    fields: dict[str, Any], said: str, session: tenant_sdk.Session, saved: Path
) -> None:
    change(saved, **fields)
    model = session.load_model(progress=False)
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(ConfigurationError, match=said):
        tenant_sdk.load_adapter(model, saved, session)
    assert [name for name, _ in model.named_modules()] == names


Weights = dict[str, torch.Tensor]


def renamed(weights: Weights, before: str, after: str) -> Weights:
    return {name.replace(before, after): each for name, each in weights.items()}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda w: renamed(w, "model.layers", "language_model.layers"),
            "holds '.*language_model.*no part of",
        ),
        (lambda w: renamed(w, "base_model.model.", ""), "holds '.*no part of"),
        (lambda w: {**w, QUERY.replace(".0.", ".99."): torch.ones(2, 64)}, r"holds '.*layers\.99\..*no part"),
        (
            lambda w: {**w, QUERY.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(64)},
            "no part of",
        ),
        (lambda w: {n: each for n, each in w.items() if n != QUERY}, r"lacks 'model\.layers\.0\..*lora_A"),
        (lambda w: {**w, QUERY: w[QUERY] * float("nan")}, "holds NaN or infinity"),
        (lambda w: {**w, QUERY: w[QUERY].to(torch.int8)}, "holds no plain floats"),
        # The numbers of what does not fit are not read: they may be many.
        (lambda w: {**w, "x": torch.full((3,), float("nan"))}, "no part of"),
        (lambda w: {**w, QUERY: torch.full((3,), float("nan"))}, "another base model"),
        (lambda w: {**w, "a." * 500: torch.ones(0)}, "a name of 1000 characters"),
    ],
)
def test_weights_that_are_not_the_adapters(
    spoil: Callable[[Weights], Weights], said: str, session: tenant_sdk.Session, saved: Path
) -> None:
    """PEFT would leave out the one kind, and begin anew with the other."""
    save_file(spoil(load_file(saved / "adapter_model.safetensors")), saved / "adapter_model.safetensors")
    model = session.load_model(progress=False)
    before = fixed_result(model, token_ids())
    with pytest.raises(ConfigurationError, match=said):
        tenant_sdk.load_adapter(model, saved, session)
    assert torch.equal(fixed_result(model, token_ids()), before)


@pytest.mark.parametrize("size", [1 << 40, 1 << 20])
def test_a_file_that_begins_with_a_large_header(size: int, session: tenant_sdk.Session, saved: Path) -> None:
    """It would be read, and taken apart, before anything else."""
    (saved / "adapter_model.safetensors").write_bytes(size.to_bytes(8, "little") + b"{")
    with pytest.raises(ConfigurationError, match=r"adapter_model\.safetensors: its header has"):
        tenant_sdk.load_adapter(session.load_model(progress=False), saved, session)


@pytest.mark.parametrize("name", ["adapter_config.json", "symbiosis.json", "adapter_model.safetensors"])
def test_files_that_are_larger_than_they_can_be(name: str, session: tenant_sdk.Session, saved: Path) -> None:
    """Sparse ones, or zeros in an archive, which would fill the disk and the memory."""
    os.truncate(saved / name, 60 << 30)
    with pytest.raises(ConfigurationError, match=rf"adapter/{name} has more than \d+ bytes"):
        tenant_sdk.load_adapter(session.load_model(progress=False), saved, session)


def test_a_model_with_an_adapter_takes_no_second(session: tenant_sdk.Session, saved: Path) -> None:
    model = session.load_model(progress=False)
    tenant_sdk.load_adapter(model, saved, session)
    with pytest.raises(ConfigurationError, match="has an adapter already"):
        tenant_sdk.load_adapter(model, saved, session)


def test_ranks_that_adalora_took_away(session: tenant_sdk.Session, tmp_path: Path) -> None:
    """Its folder has smaller tensors than its configuration asks for, and a table of those that are left."""
    steps = 12
    options = AdapterOptions("adalora", rank=4, steps=steps)
    model = add_adapter(session.load_model(progress=False), options).train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    for step in range(steps):
        model(input_ids=token_ids(), labels=token_ids()).loss.backward()
        optimizer.step()
        model.base_model.update_and_allocate(step + 1)
        optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # layers that keep no rank at all
        tenant_sdk.save_adapter(model, tmp_path, session)
    assert read(tmp_path, "adapter_config.json")["rank_pattern"]
    loaded = tenant_sdk.load_adapter(session.load_model(progress=False), tmp_path, session)
    expected = fixed_result(model.eval(), token_ids())
    assert relative_error(fixed_result(loaded, token_ids()), expected) < 1e-3


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
