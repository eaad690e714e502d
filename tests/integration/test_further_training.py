"""An adapter that is trained further, and adapters that would not learn."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import Executor
from safetensors.torch import load_file, save_file
from trainings import LONGER, Letters, learned_record, options, train

import tenant_sdk
from shared.errors import (
    ConfigurationError,
)
from tenant_sdk.tuning.adapters import training_options_of
from tenant_sdk.tuning.finetuning import TrainingCallbacks, finetune
from tenant_sdk.tuning.options import TrainingOptions
from tenant_sdk.tuning.samples import Sample


def test_an_adapter_is_trained_further(session: tenant_sdk.Session, text: Path) -> None:
    first = options(text, "first", learning_rate=0.05, steps=8, held_out=(text,))
    before, _ = train(session, first)
    further = options(
        text, "further", adapter=first.output, held_out=(text,), steps=4, rank=TrainingOptions.rank
    )
    report, _ = train(session, further)
    assert report.perplexity_before == pytest.approx(before.perplexity_after, rel=1e-5)
    assert report.perplexity_after < report.perplexity_before
    config = json.loads((further.output / "adapter_config.json").read_text())
    assert config["r"] == 2


@pytest.mark.parametrize(("method", "rate"), [("ia3", 5e-3), ("rslora", 1e-3), ("loha", 1e-3)])
def test_an_adapter_decides_how_it_is_trained_further(
    session: tenant_sdk.Session, text: Path, method: str, rate: float
) -> None:
    rank = {} if method == "ia3" else {"rank": 3}
    first = options(text, "first", method=method, **{"rank": 2, **rank} if rank else {})
    train(session, dataclasses.replace(first, steps=2))
    further = dataclasses.replace(
        options(text, "further", steps=2, rank=TrainingOptions.rank), adapter=first.output
    )
    _, said = train(session, further)
    assert any(f"learning rate {rate:g}" in line for line in said)
    assert any(line.startswith(f"{method} adapter with ") for line in said)
    assert not any("learn nothing" in line for line in said)
    record = json.loads((further.output / "symbiosis.json").read_text())["training"]
    assert record["method"] == method
    assert record.get("rank", 3) == 3


def test_what_an_adapter_decides_is_not_given(session: tenant_sdk.Session, text: Path) -> None:
    with pytest.raises(ConfigurationError, match="adapter decides these: leave out method, rank"):
        options(text, "further", adapter=text.parent)
    train(session, options(text, "first", method="adalora", steps=6))
    further = options(text, "further", adapter=text.parent / "first", rank=TrainingOptions.rank)
    with pytest.raises(ConfigurationError, match="ADALORA cannot be trained further; these kinds can: LORA"):
        train(session, further)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6]), "alora_invocation_tokens"),
        (peft.LoraConfig(lora_alpha=0), "lora_alpha"),
        (peft.LoraConfig(alpha_pattern={"q_proj": 0}), "alpha_pattern"),
        (peft.LoraConfig(lora_dropout=1), "lora_dropout"),
        (peft.LoHaConfig(alpha=0), "alpha"),
        (peft.LoHaConfig(rank_dropout=1.0), "rank_dropout"),
        (peft.LoKrConfig(module_dropout=1.0), "module_dropout"),
        (peft.VeraConfig(vera_dropout=1.0), "vera_dropout"),
        (peft.LoraConfig(lora_alpha=1e-12), "lora_alpha"),
        (peft.LoraConfig(r=64, lora_alpha=-1e-3), "lora_alpha"),
        (peft.LoraConfig(alpha_pattern={"q_proj": 1e-12}), "alpha_pattern"),
        (peft.LoraConfig(r=8, lora_alpha=0.07), "lora_alpha"),
        (peft.LoraConfig(r=1, lora_alpha=1, rank_pattern={"q_proj": 128}), "lora_alpha"),
        (peft.LoraConfig(r=256, lora_alpha=0.15, use_rslora=True), "lora_alpha"),
        (peft.LoraConfig(lora_dropout=0.9999999), "lora_dropout"),
        (peft.LoHaConfig(alpha=1e-12), "alpha"),
    ],
)
def test_adapters_that_would_not_learn(config: Any, key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"an adapter with {key} = .* cannot be trained further"):
        training_options_of(config)


def test_adapters_whose_scale_is_small_but_used() -> None:
    for config in (
        peft.LoraConfig(r=8, lora_alpha=0.08),
        peft.LoraConfig(r=256, lora_alpha=0.17, use_rslora=True),
        peft.LoraConfig(r=8, lora_alpha=16, rank_pattern={"q_proj": 256}, alpha_pattern={"q_proj": 512}),
    ):
        assert training_options_of(config)["alpha"] == config.lora_alpha


def test_an_adapter_of_zeros_is_not_trained_further(session: tenant_sdk.Session, text: Path) -> None:
    """Either half of its product has a gradient that the other half is a factor of."""
    train(session, options(text, "first"))
    file = text.parent / "first" / "adapter_model.safetensors"
    save_file(
        {name: torch.zeros_like(each) for name, each in load_file(file).items()}, file, {"format": "pt"}
    )
    further = options(text, "further", adapter=text.parent / "first", rank=TrainingOptions.rank)
    with pytest.raises(ConfigurationError, match="would learn nothing: all its gradients are 0"):
        train(session, further)


def test_layers_of_an_adapter_that_learn_nothing_are_named(session: tenant_sdk.Session, text: Path) -> None:
    _, said = train(session, options(text, "first"))
    assert not any("learn" in line and "nothing" in line for line in said)
    file = text.parent / "first" / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({name: each * ("q_proj" not in name) for name, each in weights.items()}, file, {"format": "pt"})
    further = options(text, "further", adapter=text.parent / "first", rank=TrainingOptions.rank)
    _, said = train(session, further)
    assert any(
        line.startswith(f"2 of {len(weights) // 2} layers of the adapter learn nothing")
        and "layers.0.self_attn.q_proj" in line
        for line in said
    )


def test_the_record_of_an_adapter_has_its_own_layers(session: tenant_sdk.Session, text: Path) -> None:
    first = options(text, "first", method="loha", target_modules="v_proj, q_proj", steps=1)
    train(session, first)
    further = options(text, "further", adapter=first.output, steps=1, rank=TrainingOptions.rank)
    train(session, further)
    record = json.loads((further.output / "symbiosis.json").read_text())["training"]
    assert record.items() >= {"targets": ["q_proj", "v_proj"], "alpha": 2, "rank": 2}.items()


def test_answers_of_a_base_whose_biases_an_adapter_has(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path], text: Path
) -> None:
    """PEFT leaves them in place when the adapter is switched off."""
    path = learned_record(text.parent)
    with serve(checkpoint("qwen2")).connect() as session:
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", bias="all")
        model = peft.get_peft_model(session.load_model(progress=False), config)
        model.peft_config["default"].base_model_name_or_path = ""
        tenant_sdk.save_adapter(model, text.parent / "first", session)
        training = options(
            path,
            "further",
            adapter=text.parent / "first",
            held_out=(path,),
            rank=TrainingOptions.rank,
            **LONGER,
        )
        samples: list[Sample] = []
        told = TrainingCallbacks(lambda _: None, lambda _: None, samples=samples.extend)
        report = finetune(training, session.load_model(progress=False), Letters(), session, told)
    assert report.right_base is None
    assert [each.base for each in samples] == [None] * 4
