"""Every PEFT method that needs only a layer's output trains as it does locally; the others say why not.

Tolerances: gradients and logits of one pass in float32 differ by the order of additions, 1e-5
relative; three AdamW steps divide by the gradients' own size, which turns rounding of next to
nothing into steps, so losses are compared to 1e-3.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import Executor, relative_error
from parity import add_lora, fixed_result, gradients, load_local, loss_of, token_ids, worst_error
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn

import tenant_sdk

SOME = ["q_proj", "v_proj", "down_proj"]  # two of a group of three, and a group of its own
LANGUAGE: dict[str, Any] = {"task_type": "CAUSAL_LM"}

METHODS: dict[str, Callable[[], peft.PeftConfig]] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    "lora-dropout": lambda: peft.LoraConfig(
        r=4, target_modules=SOME, init_lora_weights=False, lora_dropout=0.2
    ),
    "lora-bias": lambda: peft.LoraConfig(r=4, target_modules=SOME, init_lora_weights=False, bias="all"),
    "lora-head": lambda: peft.LoraConfig(
        r=4, target_modules=SOME, init_lora_weights=False, modules_to_save=["lm_head", "norm"]
    ),
    "lora-embedding": lambda: peft.LoraConfig(
        r=4, target_modules=[*SOME, "embed_tokens"], init_lora_weights=False
    ),
    "rslora": lambda: peft.LoraConfig(r=4, target_modules=SOME, init_lora_weights=False, use_rslora=True),
    "gaussian": lambda: peft.LoraConfig(r=4, target_modules=SOME, init_lora_weights="gaussian"),
    "orthogonal": lambda: peft.LoraConfig(r=4, target_modules=SOME, init_lora_weights="orthogonal"),
    "adalora": lambda: peft.AdaLoraConfig(init_r=6, target_r=4, total_step=10, target_modules=SOME),
    # Scales the outputs of keys and values, the input of down_proj ...
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    ),
    # ... and here the input of one member of a group of two and of two members of one of three.
    "ia3-member": lambda: peft.IA3Config(
        target_modules=["q_proj", "k_proj", "up_proj"],
        feedforward_modules=["q_proj", "k_proj", "up_proj"],
        init_ia3_weights=False,
    ),
    "vera": lambda: peft.VeraConfig(r=8, target_modules=["q_proj", "o_proj"], init_weights=False),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=SOME, init_weights=False),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=SOME, init_weights=False),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=8, target_modules=SOME, init_weights=False),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **LANGUAGE),
    "prefix-projection": lambda: peft.PrefixTuningConfig(
        num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=32, **LANGUAGE
    ),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **LANGUAGE),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=32, **LANGUAGE),
}


def wrap(model: nn.Module, method: str) -> PeftModel:
    """The method's adapter, with the same values at every call."""
    torch.manual_seed(3)
    return peft.get_peft_model(model, METHODS[method]())


def train(model: nn.Module, steps: int = 3) -> list[float]:
    """Losses of some AdamW steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)  # dropout
        loss = loss_of(model, token_ids(seed=step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Local:
    """What a method gives locally, and the adapter that it trained."""

    def __init__(self, method: str, folder: Path, adapter: Path) -> None:
        model = wrap(load_local(folder), method)
        torch.manual_seed(0)
        self.gradients = gradients(model.train(), token_ids())
        self.losses = train(model)
        self.result = fixed_result(model.eval(), token_ids())
        self.adapter = adapter
        model.save_pretrained(adapter)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
# PEFT's own, on the local model: it calls the cache as earlier versions of transformers do.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("method", METHODS)
def test_trains_as_locally(
    method: str, llama: Executor, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkpoint("llama")
    local = Local(method, folder, tmp_path / "local")
    with llama.connect() as session:
        model = wrap(session.load_model(progress=False), method)
        torch.manual_seed(0)
        got = gradients(model.train(), token_ids())
        assert worst_error(got, local.gradients) < 1e-5
        assert train(model) == pytest.approx(local.losses, abs=1e-3)
        trained = fixed_result(model.eval(), token_ids())
        # AdamW steps by the learning rate wherever a gradient is not zero, be it rounding alone, so a few
        # of the values that hardly matter go the other way.
        assert relative_error(trained, local.result) < 2e-2

        model.save_pretrained(tmp_path / "remote")
        saved = load_file(tmp_path / "remote" / "adapter_model.safetensors")
        expected = load_file(local.adapter / "adapter_model.safetensors")
        assert {n: t.shape for n, t in saved.items()} == {n: t.shape for n, t in expected.items()}
        configs = [
            json.loads((tmp_path / side / "adapter_config.json").read_text()) for side in ("remote", "local")
        ]
        for config in configs:
            config.pop("base_model_name_or_path")
            config.pop("target_modules", None)  # a set, in any order
        assert configs[0] == configs[1]

        # Trained here, used without any executor ...
        elsewhere = PeftModel.from_pretrained(load_local(folder), tmp_path / "remote").eval()
        assert relative_error(fixed_result(elsewhere, token_ids()), trained) < 1e-5
        # ... and trained without any executor, used here.
        here = tenant_sdk.load_adapter(session.load_model(progress=False), local.adapter, session).eval()
        assert relative_error(fixed_result(here, token_ids()), local.result) < 1e-5


@pytest.mark.parametrize("method", ["prefix", "prompt", "p-tuning"])
@pytest.mark.parametrize("first", ["adapter", "attach"])
def test_prompts_are_in_front_of_all_that_is_generated(
    method: str, first: str, llama: Executor, checkpoint: Callable[[str], Path]
) -> None:
    """Tokens are those of whole texts, without keys and values that are kept."""
    ids = token_ids(rows=1)
    with llama.connect() as session:
        if first == "adapter":
            model = session.attach(wrap(load_local(checkpoint("llama")), method)).eval()
        else:
            model = wrap(session.load_model(progress=False), method).eval()
        with torch.no_grad():
            for each in model.prompt_encoder.parameters():
                each *= 20  # or it would change no token
            whole = ids
            for _ in range(6):
                mask = torch.ones_like(whole)
                following = model(input_ids=whole, attention_mask=mask).logits[:, -1:].argmax(-1)
                whole = torch.cat([whole, following], 1)
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Position ids are not supported")
            given = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
            with model.disable_adapter():
                without = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(given, whole)
    assert not torch.equal(given, without)


def test_adapters_that_scale_one_member_cost_no_more_than_they_must(llama: Executor) -> None:
    """IA3 scales the input of up_proj: gate_proj and up_proj cannot share a request then, and learn it."""
    config = peft.IA3Config(target_modules=["up_proj"], feedforward_modules=["up_proj"])
    with llama.connect() as session:
        model = peft.get_peft_model(session.load_model(progress=False), config)
        counts = []
        for seed in range(3):
            before = session.stats.requests
            fixed_result(model, token_ids(seed=seed))
            counts.append(session.stats.requests - before)
    assert counts == [10, 10, 10]  # qkv, o, gate, up, down in each of two blocks


@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension")
@pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor")
def test_boft(llama: Executor, checkpoint: Callable[[str], Path]) -> None:
    config = {"boft_block_size": 8, "target_modules": SOME, "init_weights": False}
    results = []
    with llama.connect() as session:
        for model in (load_local(checkpoint("llama")), session.load_model(progress=False)):
            torch.manual_seed(3)
            results.append(gradients(peft.get_peft_model(model, peft.BOFTConfig(**config)), token_ids()))
    assert worst_error(results[1], results[0]) < 1e-5


def test_eva(llama: Executor, checkpoint: Callable[[str], Path]) -> None:
    """EVA needs activations, which a tenant has, not weights."""
    outcome = []
    with llama.connect() as session:
        for model in (load_local(checkpoint("llama")), session.load_model(progress=False)):
            torch.manual_seed(3)
            config = peft.LoraConfig(
                r=2,
                target_modules=["q_proj", "v_proj"],
                init_lora_weights="eva",
                eva_config=peft.EvaConfig(rho=1.0, tau=0.9, use_label_mask=False),
            )
            adapted = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
            batches = [{"input_ids": token_ids(rows=4, seed=seed)} for seed in range(4)]
            peft.initialize_lora_eva_weights(
                adapted,
                batches,
                prepare_model_inputs_fn=None,
                prepare_layer_inputs_fn=lambda inputs, *_: inputs[0].flatten(0, 1),
                show_progress_bar=False,
            )
            outcome.append({n: p.detach() for n, p in adapted.named_parameters() if "lora_A" in n})
    for name, matrix in outcome[0].items():
        # A singular vector's sign is not determined.
        cosines = torch.nn.functional.cosine_similarity(matrix, outcome[1][name])
        assert float(cosines.abs().min()) > 0.999, name


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("DoRA", {"use_dora": True}),
        ("PiSSA", {"init_lora_weights": "pissa"}),
        ("PiSSA", {"init_lora_weights": "pissa_niter_4"}),
        ("OLoRA", {"init_lora_weights": "olora"}),
    ],
)
def test_methods_that_need_the_weight_fail_at_once(
    named: str, options: dict[str, Any], llama: Executor
) -> None:
    with llama.connect() as session:
        model = session.load_model(progress=False)
        before = session.stats.requests
        with pytest.raises(tenant_sdk.RemoteWeightUnavailable) as caught:
            peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=SOME, **options))
        assert session.stats.requests == before
    assert named in str(caught.value)
    assert "layers.0.self_attn.q_proj" in str(caught.value)
    assert "Use a method that needs only the layer's output: LoRA" in str(caught.value)


@pytest.mark.parametrize(
    "config", [peft.ShiraConfig(r=2, target_modules=SOME), peft.HRAConfig(target_modules=SOME)]
)
def test_other_methods_that_need_the_weight_do_not_train_wrongly(
    config: peft.PeftConfig, llama: Executor
) -> None:
    with llama.connect() as session:
        model = session.load_model(progress=False)
        with pytest.raises(tenant_sdk.RemoteWeightUnavailable, match=r"SHiRA|HRA"):
            fixed_result(peft.get_peft_model(model, config), token_ids())


@pytest.mark.parametrize("method", ["lora", "adalora", "ia3", "vera", "loha", "lokr", "oft"])
@pytest.mark.parametrize("how", ["merge_and_unload", "merge_adapter"])
def test_merging_fails_at_once(method: str, how: str, llama: Executor) -> None:
    with llama.connect() as session:
        model = wrap(session.load_model(progress=False), method)
        expected = fixed_result(model, token_ids())
        with pytest.raises(tenant_sdk.RemoteWeightUnavailable, match=r"merg.*keep the adapter beside"):
            getattr(model, how)()
        if how == "merge_adapter":  # nothing was half done
            assert torch.equal(fixed_result(model, token_ids()), expected)


def test_unload_and_disable_work(llama: Executor, checkpoint: Callable[[str], Path]) -> None:
    expected = fixed_result(load_local(checkpoint("llama")), token_ids())
    with llama.connect() as session:
        model = add_lora(session.load_model(progress=False))
        with model.disable_adapter():
            assert relative_error(fixed_result(model, token_ids()), expected) < 1e-5
        assert relative_error(fixed_result(model, token_ids()), expected) > 1e-2
        assert relative_error(fixed_result(model.unload(), token_ids()), expected) < 1e-5


def test_several_adapters_in_one_batch(llama: Executor, checkpoint: Callable[[str], Path]) -> None:
    """PEFT's mixed batches write into the layers' outputs."""
    outcome = []
    with llama.connect() as session:
        for model in (load_local(checkpoint("llama")), session.load_model(progress=False)):
            adapted = add_lora(model)
            torch.manual_seed(11)
            adapted.add_adapter("other", copy.deepcopy(adapted.peft_config["default"]))
            names = ["default", "other", "__base__"]
            with torch.no_grad():
                outcome.append(adapted.eval()(input_ids=token_ids(rows=3), adapter_names=names).logits)
    assert relative_error(outcome[1], outcome[0]) < 1e-5


def test_training_a_remote_layer_in_full_is_refused(llama: Executor) -> None:
    """modules_to_save copies the layer and trains it, but there is nothing here to train."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["o_proj"])
    with llama.connect() as session:
        model = peft.get_peft_model(session.load_model(progress=False), config)
        with pytest.raises(
            tenant_sdk.RemoteWeightUnavailable, match=r"o_proj is to be trained in full.*exclude="
        ):
            loss_of(model, token_ids())


def test_training_an_excluded_layer_in_full(llama: Executor, checkpoint: Callable[[str], Path]) -> None:
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["o_proj"], init_lora_weights=False
    )
    outcome = []
    with llama.connect() as session:
        remote = session.attach(load_local(checkpoint("llama")), exclude=["o_proj"])
        for model in (load_local(checkpoint("llama")), remote):
            torch.manual_seed(3)
            outcome.append(gradients(peft.get_peft_model(model, config), token_ids()))
    assert any("o_proj" in name for name in outcome[0])
    assert worst_error(outcome[1], outcome[0]) < 1e-5


def test_attach_to_a_model_that_has_an_adapter(llama: Executor, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    local = add_lora(load_local(folder))
    expected = gradients(local, token_ids())
    with llama.connect() as session:
        model = session.attach(add_lora(load_local(folder)))
        assert worst_error(gradients(model, token_ids()), expected) < 1e-5
        session.detach(model, folder)
        before = session.stats.requests
        assert torch.equal(fixed_result(model, token_ids()), fixed_result(local, token_ids()))
        merged = model.merge_and_unload()
        assert session.stats.requests == before
    assert relative_error(fixed_result(merged, token_ids()), fixed_result(local, token_ids())) < 1e-5
