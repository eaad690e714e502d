"""Activation checkpointing of whole models: what is asked for, and that gradients are the same."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Executor, make_model
from parity import add_lora, gradients, load_local, token_ids, worst_error
from test_experts import adapted
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpointed
from transformers import Trainer, TrainingArguments

import tenant_sdk


def lora(model: nn.Module, architecture: str) -> nn.Module:
    return (adapted(model) if architecture == "mixtral" else add_lora(model)).train()


def counted(session: tenant_sdk.Session, model: nn.Module) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Gradients, and requests, rows and bytes of them."""
    before = session.stats
    torch.manual_seed(3)  # of dropout
    found = gradients(model, token_ids(2, 12))
    after = session.stats
    names = ("requests", "rows", "effect_rows", "bytes_sent", "bytes_received")
    return found, [getattr(after, name) - getattr(before, name) for name in names]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "mixtral"])
def test_calls_and_gradients_are_those_without(
    architecture: str, serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    with serve(checkpoint(architecture)).connect() as session:
        model = lora(session.load_model(progress=False), architecture)
        counted(session, model)  # who is asked for together is learned
        expected, usual = counted(session, model)
        model.gradient_checkpointing_enable()
        got, asked = counted(session, model)
        assert asked == usual
        model.gradient_checkpointing_disable()
        assert counted(session, model)[1] == usual
    assert expected.keys() == got.keys()
    assert all(torch.equal(got[name], each) for name, each in expected.items())


@pytest.mark.parametrize("experts", ["routed", "padded"])
def test_experts_at_the_executor(
    experts: str, serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint("mixtral")
    masked = {"privacy": "one-time", "mask_sources": [f"local:{folder}"]} if experts == "padded" else {}
    with serve(folder, numerics="ring").connect(experts=experts, **masked) as session:
        model = lora(session.load_model(progress=False), "mixtral")
        expected, usual = counted(session, model)
        model.gradient_checkpointing_enable()
        got, asked = counted(session, model)
    assert asked == usual
    assert worst_error(got, expected) < 5e-3  # masks round in other ways each time


def test_under_one_time_masks(serve: Callable[..., Executor], checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    expected = gradients(add_lora(load_local(folder)).train(), token_ids(2, 12))
    masked = {"privacy": "one-time", "mask_sources": [f"local:{folder}"]}
    with serve(folder, numerics="ring").connect(**masked) as session:
        model = lora(session.load_model(progress=False), "llama")
        before = counted(session, model)[1]
        model.gradient_checkpointing_enable()
        got, asked = counted(session, model)
    assert asked == before
    assert worst_error(got, expected) < 5e-3


def test_dropout_is_the_same_in_the_second_run(llama: Executor) -> None:
    with llama.connect() as session:
        model = add_lora(session.load_model(progress=False), lora_dropout=0.3).train()
        found = []
        for _ in range(2):
            found.append(counted(session, model))
            model.gradient_checkpointing_enable()
    assert found[0][1] == found[1][1]
    assert all(torch.equal(found[1][0][name], each) for name, each in found[0][0].items())


def test_trainer(llama: Executor, tmp_path: Path) -> None:
    asked = []
    rows = [{"input_ids": ids, "labels": ids} for ids in token_ids(8, 12)]
    for checkpointing in (False, True):
        with llama.connect() as session:
            arguments = TrainingArguments(
                str(tmp_path),
                max_steps=2,
                gradient_checkpointing=checkpointing,
                report_to="none",
                dataloader_pin_memory=False,
                disable_tqdm=True,
                save_strategy="no",
            )
            Trainer(add_lora(session.load_model(progress=False)), arguments, train_dataset=rows).train()
            asked.append((session.stats.requests, session.stats.bytes_sent, session.stats.bytes_received))
    assert asked[0] == asked[1]


def test_a_model_that_was_checkpointed_before(
    llama: Executor, checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Attached, it asks once; detached, it is as it was; a reentrant checkpoint is taken as another."""
    model = load_local(checkpoint("llama")).train()
    model.gradient_checkpointing_enable()
    layer = model.model.layers[0]
    function = layer._gradient_checkpointing_func
    with llama.connect() as session:
        session.attach(model)
        requests = session.stats.requests
        gradients(model, token_ids())
        assert session.stats.requests - requests == 2 * 8
        with caplog.at_level(logging.WARNING):
            model.gradient_checkpointing_enable({"use_reentrant": True})
        assert "use_reentrant=True is taken as False" in caplog.text
        model.gradient_checkpointing_enable()
        session.detach(model, checkpoint("llama"))
    assert layer._gradient_checkpointing_func.func is function.func is checkpointed
    assert "gradient_checkpointing_enable" not in vars(model)


def test_what_somebody_else_records_stays_theirs(llama: Executor) -> None:
    made = []

    def contexts() -> tuple[torch.no_grad, torch.no_grad]:
        made.append(1)
        return torch.utils.checkpoint.noop_context_fn()  # type: ignore[return-value]

    with llama.connect() as session:
        model = add_lora(session.load_model(progress=False)).train()
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
        gradients(model, token_ids())
    assert len(made) == 2


def test_a_copy_switches_its_own(llama: Executor) -> None:
    with llama.connect() as session:
        model = session.attach(make_model("llama"), probe=False)
        other = copy.deepcopy(model)
        other.gradient_checkpointing_enable()
        assert other.is_gradient_checkpointing
        assert not model.is_gradient_checkpointing
