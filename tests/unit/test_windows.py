"""Losses by chunks and by windows against the whole: the same up to the order of additions."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from conftest import LLAMA_LIKE, make_model
from parity import add_lora, token_ids, worst_error
from test_experts import adapted
from torch import nn

import tenant_sdk
from shared.compat import cache_name
from shared.errors import ConfigurationError
from tenant_sdk.model.prompt_adapters import fit_prompt_adapters
from tenant_sdk.model.recording import CopyStore
from tenant_sdk.sequences.encrypted_file import EncryptedFile
from tenant_sdk.sequences.planning import MemoryPlan, StorageTier
from tenant_sdk.sequences.windows import SavedTensors

CLOSE = 1e-5  # float32: the order of additions
LENGTH = 50
CAUSAL = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gpt2", "gpt_bigcode", "opt", "mixtral"]


def batch(**more: Any) -> dict[str, Any]:
    """Two sequences with padding on the right, and a prompt that is not learned."""
    ids = token_ids(2, LENGTH)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[1, 40:] = 0
    labels[1, 40:] = labels[0, :7] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels} | more


def step(model: nn.Module, **inputs: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients."""
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(**inputs).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), found


def windows(model: nn.Module, window: int | None, **options: Any) -> tenant_sdk.LongTuning:
    """In windows, or the loss by chunks alone."""
    tuning = tenant_sdk.long_tuning(model, LENGTH, window=window or 1, **options)
    if window is None:
        tuning.use(MemoryPlan(chunked_loss=True))
    return tuning


def check(model: nn.Module, *sizes: int | None, tolerance: float = CLOSE, **inputs: Any) -> None:
    """Each size gives what the whole gives."""
    inputs = inputs or batch()
    loss, expected = step(model, **inputs)
    for size in sizes:
        tuning = windows(model, size)
        got_loss, got = step(model, **inputs)
        with torch.no_grad():
            assert float(model(**inputs).loss) == pytest.approx(loss, abs=1e-5)
        tuning.close()
        assert got_loss == pytest.approx(loss, abs=1e-5)
        assert worst_error(got, expected) < tolerance
    assert step(model, **inputs)[0] == loss  # as it was


@pytest.mark.parametrize("architecture", CAUSAL)
def test_architectures(architecture: str) -> None:
    add = adapted if architecture == "mixtral" else add_lora
    check(add(make_model(architecture)).eval(), None, 64, 16, 7)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Mistral", {"sliding_window": 9}),
        (
            "Gemma3Text",
            {"sliding_window": 9, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
        ),
        ("Granite", {"logits_scaling": 3.0}),
        ("Cohere", {"logit_scale": 0.5}),
        ("GPTNeoX", {"num_key_value_heads": None}),
        ("Bloom", {"num_key_value_heads": None}),
        (
            "Qwen3Moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
        ),
    ],
)
def test_more_architectures(name: str, options: dict[str, Any]) -> None:
    config_class = getattr(transformers, f"{name}Config")
    config = config_class(**{k: v for k, v in (LLAMA_LIKE | options).items() if v is not None})
    torch.manual_seed(0)
    causal = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    check((adapted if "Moe" in name else add_lora)(causal(config)).eval(), None, 16, 7)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention(implementation: str) -> None:
    model = make_model("llama")
    model.set_attn_implementation(implementation)
    check(add_lora(model).eval(), 16)


def test_padding_on_the_left() -> None:
    inputs = batch()
    inputs = {name: each.flip(1) for name, each in inputs.items()}
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    check(add_lora(make_model("llama")).eval(), 16, **inputs, position_ids=positions)


def test_what_is_divided_by() -> None:
    check(add_lora(make_model("llama")).eval(), None, 16, **batch(num_items_in_batch=torch.tensor(123)))
    check(add_lora(make_model("llama")).eval(), 16, **batch(num_items_in_batch=77))


def test_all_that_is_not_at_the_executor_may_be_trained() -> None:
    """Embeddings, norms and head, and adapters of some layers only."""
    model = make_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "embed" in name or "lm_head" in name)
    check(model, None, 16)
    adapted = peft.get_peft_model(
        make_model("llama"), peft.LoraConfig(target_modules=["v_proj"], layers_to_transform=[1])
    )
    check(adapted.eval(), None, 16)


@pytest.mark.parametrize("method", ["prompt", "p", "ia3", "adalora"])
def test_methods(method: str) -> None:
    torch.manual_seed(0)
    task = {"task_type": "CAUSAL_LM"}
    config = {
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **task),
        "p": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **task),
        "ia3": lambda: peft.IA3Config(**task),
        "adalora": lambda: peft.AdaLoraConfig(total_step=10, target_modules=["q_proj"], **task),
    }[method]()
    check(peft.get_peft_model(make_model("llama"), config).eval(), None, 16)


def test_prefix_tuning_is_refused() -> None:
    model = peft.get_peft_model(
        make_model("llama"), peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    )
    fit_prompt_adapters(model)  # as every model that is attached
    with pytest.raises(ConfigurationError, match=f"{cache_name()} cannot be cut"):
        windows(model, 16)


def test_dropout_is_the_same_in_both_passes() -> None:
    """One window draws as the whole does; where several draw, the loss's slope is the gradient."""
    model = add_lora(make_model("gpt2"), lora_dropout=0.2).train()
    loss, expected = step(model, **batch())
    tuning = windows(model, LENGTH)
    got_loss, got = step(model, **batch())
    assert got_loss == pytest.approx(loss, abs=1e-5)
    assert worst_error(got, expected) < CLOSE
    tuning.close()
    windows(model, 16)
    _, found = step(model, **batch())
    slope = sum(float(each.double().square().sum()) for each in found.values())
    losses = []
    for sign in (1, -1):
        moved = copy.deepcopy(dict(model.named_parameters()))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in found:
                    parameter += sign * 1e-3 / slope**0.5 * found[name]
        losses.append(step(model, **batch())[0])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(moved[name])
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(slope**0.5, rel=0.02)


def test_nothing_is_lost_in_float16() -> None:
    """Gradients of a mean over 100,000 tokens, before they are scaled, are less than float16 has."""
    model = add_lora(make_model("llama")).eval()
    inputs = batch(num_items_in_batch=100_000)
    _, expected = step(model, **inputs)

    def error() -> float:
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(**inputs).loss
        (loss * 65536.0).backward()
        return worst_error(
            {n: p.grad / 65536.0 for n, p in model.named_parameters() if p.grad is not None}, expected
        )

    usual = error()
    for size in (None, 16):
        tuning = windows(model, size)
        assert error() < 2 * usual + CLOSE
        tuning.close()


def test_mixed_precision() -> None:
    model = add_lora(make_model("llama")).eval()
    with torch.autocast("cpu", torch.bfloat16):
        _, expected = step(model, **batch())
        windows(model, 16)
        loss = model(**batch()).loss
    model.zero_grad()
    loss.backward()  # outside, as training loops do
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert worst_error(got, expected) < 0.1  # 8 bits


def test_gradients_add_up_and_are_asked_for_as_any() -> None:
    model = add_lora(make_model("llama")).eval()
    parameters = [p for p in model.parameters() if p.requires_grad]
    once = torch.autograd.grad(model(**batch()).loss, parameters)
    windows(model, 16)
    loss = model(**batch()).loss
    model.zero_grad()
    (2 * loss).backward()
    (3 * model(**batch()).loss).backward()
    for parameter, each in zip(parameters, once, strict=True):
        torch.testing.assert_close(parameter.grad, 5 * each, rtol=1e-4, atol=1e-6)
    got = torch.autograd.grad(model(**batch()).loss, parameters)
    torch.testing.assert_close(got, once, rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match="compute it again"):
        loss.backward()


def test_on_disk_and_asked_again() -> None:
    model = add_lora(make_model("llama")).eval()
    _, expected = step(model, **batch())
    tuning = windows(model, 16)
    for answers, states in (
        (StorageTier.DISK, StorageTier.DISK),
        (StorageTier.DISK, StorageTier.MEMORY),
        (StorageTier.NOWHERE, StorageTier.DISK),
    ):
        tuning.use(MemoryPlan(chunked_loss=True, window=16, answers=answers, states=states))
        assert worst_error(step(model, **batch())[1], expected) < CLOSE
    assert tuning._spill is not None
    taken = tuning._spill.nbytes
    assert taken > 2 * 2 * LENGTH * 64 * 4  # two layers were given this
    for _ in range(3):
        model(**batch())  # and nothing is wanted of it
    gc.collect()
    step(model, **batch())
    assert tuning._spill.nbytes <= 2 * taken


def test_without_labels_and_without_gradients() -> None:
    model = add_lora(make_model("llama")).eval()
    ids = token_ids(2, 9)
    expected = model(input_ids=ids).logits
    generated = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    windows(model, 4)
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=5, do_sample=False), generated)


def test_transformers_own_checkpointing_may_be_on() -> None:
    model = add_lora(make_model("llama")).train()
    _, expected = step(model, **batch())
    model.gradient_checkpointing_enable()
    for size in (None, 16):
        tuning = windows(model, size)
        assert worst_error(step(model, **batch())[1], expected) < CLOSE
        tuning.close()
    assert model.is_gradient_checkpointing


def test_checkpointing_that_a_plan_switched_on_goes_with_it() -> None:
    model = add_lora(make_model("llama")).train()
    loss, expected = step(model, **batch())
    own = set(vars(model.base_model.model))
    for answers in (StorageTier.MEMORY, StorageTier.DISK):
        tuning = windows(model, None)
        tuning.use(MemoryPlan(chunked_loss=True, checkpointed=True, answers=answers))
        got_loss, got = step(model, **batch())
        assert got_loss == pytest.approx(loss, abs=1e-5)
        assert worst_error(got, expected) < CLOSE
        assert model.is_gradient_checkpointing
        tuning.close()
        tuning.close()
        assert not model.is_gradient_checkpointing
    assert set(vars(model.base_model.model)) - own <= {"_require_grads_hooks"}  # transformers' own, empty


def test_modes_of_modules_stay_theirs() -> None:
    model = add_lora(make_model("llama")).train()
    model.base_model.model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    windows(model, 4)
    assert [module.training for module in model.modules()] == before


def test_long_masks_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenant_sdk.sequences.windows.CALL_BYTES", 0)
    check(add_lora(make_model("llama")).eval(), 16)


def test_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenant_sdk.sequences.chunked_loss.MIN_CHUNK", 13)
    monkeypatch.setattr("tenant_sdk.sequences.chunked_loss.CHUNK_BYTES", 0)
    check(add_lora(make_model("gemma2")).eval(), None, 16)


@pytest.mark.parametrize("size", [None, 16])
def test_a_head_that_is_trained_from_now_on(size: int | None) -> None:
    def adapted_head(base: Any) -> nn.Module:
        torch.manual_seed(7)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        return peft.get_peft_model(base, config).eval()

    _, expected = step(adapted_head(make_model("llama")), **batch())
    base = make_model("llama")
    windows(base, size)
    _, got = step(adapted_head(base), **batch())
    assert got.keys() == expected.keys()
    assert worst_error(got, expected) < CLOSE


@pytest.mark.parametrize("what", ["parameter", "input", "mode"])
def test_what_changed_before_the_backward_is_noticed(what: str) -> None:
    model = add_lora(make_model("llama")).eval()
    windows(model, 16)
    inputs = batch()
    loss = model(**inputs).loss
    with torch.no_grad():
        if what == "parameter":
            next(p for p in model.parameters() if p.requires_grad).add_(1e-3)
        elif what == "input":
            inputs["input_ids"][0, 0] += 1
        else:
            model.train()
    with pytest.raises(RuntimeError, match="changed between the forward and the backward"):
        loss.backward()


def test_kept_places_go_with_it(tmp_path: Path) -> None:
    spill = EncryptedFile(tmp_path)
    for _ in range(3):
        kept = SavedTensors(spill)
        kept.put("a", torch.zeros(1000))
        del kept
        gc.collect()
    assert spill.nbytes < 2 * 4016
    kept = SavedTensors(CopyStore())
    kept.put("a", torch.ones(3))
    assert kept.pop("a").sum() == 3
    assert not kept.places
