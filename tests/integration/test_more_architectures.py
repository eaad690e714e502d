"""Further architectures, one pass each: nothing here knows any of them by name.

``test_architectures.py`` looks at a few closely; this is about the breadth of what transformers
has: encoders and decoders, shared and fused layers, parallel blocks, experts, state spaces.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import Executor, relative_error
from parity import virtual_layers
from transformers import PreTrainedModel

_PLAIN: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 130,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_SEQ2SEQ: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "vocab_size": 128,
    "max_position_embeddings": 130,
}
_NAMED: dict[str, Any] = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2}

_EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_TEXT: dict[str, Any] = {
    **_GROUPED,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
}
_VISION: dict[str, Any] = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8}

# Class, configuration class, its options, round trips of one pass.
TABLE: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED, 8),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _GROUPED, 8),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_GROUPED, "head_dim": 16}, 8),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", _GROUPED, 8),
    # Attention and feed-forward side by side on the same tensor.
    "phi": ("PhiForCausalLM", "PhiConfig", _PLAIN, 6),
    "cohere": ("CohereForCausalLM", "CohereConfig", _GROUPED, 6),
    "gptj": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {**_NAMED, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64},
        6,
    ),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {**_NAMED, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        6,
    ),
    # Fused projections.
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _GROUPED, 8),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**_NAMED, "hidden_size": 64, "n_layer": 2, "n_head": 4}, 8),
    # Encoders; two layers of a head. ALBERT runs one block twice and projects its embeddings.
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", _PLAIN, 9),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": 128, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
        9,
    ),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**_PLAIN, "embedding_size": 32}, 10),
    "deberta": ("DebertaV2ForMaskedLM", "DebertaV2Config", _PLAIN, 9),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**_PLAIN, "cls_token_id": 1, "sep_token_id": 2},
        9,
    ),
    # Stored under other names than the model has, or in other pieces, which transformers converts.
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _PLAIN, 8),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_GROUPED, **_EXPERTS, "head_dim": 16}, 4),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**_PLAIN, **_EXPERTS, **_LATENT}, 12),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**_GROUPED, **_EXPERTS, "head_dim": 16}, 4),
    "nomic_bert": ("NomicBertForMaskedLM", "NomicBertConfig", _PLAIN, 9),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {"text_config": _TEXT, "vision_config": _VISION},
        8,
    ),
    # Encoder and decoder: the cross attentions of both blocks get the encoder's output, so their keys
    # and values are one group.
    "bart": ("BartForConditionalGeneration", "BartConfig", _SEQ2SEQ, 21),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
        | {"decoder_start_token_id": 0, "pad_token_id": 0},
        21,
    ),
}


def build(class_name: str, config_name: str, options: dict[str, Any], folder: Path) -> PreTrainedModel:
    """Saves a random model and gives it back as a tenant would load it."""
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**options)
    model_class = getattr(transformers, class_name)
    model_class(config).save_pretrained(folder)
    return model_class.from_pretrained(folder).eval()


def inputs_for(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    ids = torch.arange(3, 19).view(2, 8)
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


@pytest.mark.parametrize("architecture", TABLE)
def test_equals_local(architecture: str, serve: Callable[..., Executor], tmp_path: Path) -> None:
    *names, round_trips = TABLE[architecture]
    local = build(*names, tmp_path)  # type: ignore[arg-type]
    inputs = inputs_for(local)
    with serve(tmp_path).connect(experts="local") as session, torch.no_grad():
        expected = local(**inputs)[0]
        for model in (session.load_model(progress=False), session.attach(local, probe=False)):
            counts = []
            for _ in range(2):
                before = session.stats.requests
                got = model(**inputs)[0]
                counts.append(session.stats.requests - before)
                # float32 in another order of additions.
                assert relative_error(got, expected) < 1e-5
            assert counts == [round_trips, round_trips]


_STATES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "state_size": 8}


@pytest.mark.parametrize("kind", ["Mamba", "FalconMamba"])
def test_a_model_that_reads_its_own_weights(
    kind: str, serve: Callable[..., Executor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One layer's weight is multiplied with by the model itself, so it stays with the tenant, who is told."""
    local = build(f"{kind}ForCausalLM", f"{kind}Config", _STATES, tmp_path)
    inputs = inputs_for(local)
    executor = serve(tmp_path)
    assert "tenants keep 2 layers, such as backbone.layers.0.mixer.dt_proj" in caplog.text
    with executor.connect() as session, torch.no_grad():
        served = {member.name for group in session.manifest.groups for member in group.members}
        assert not any("dt_proj" in name for name in served)
        expected = local(**inputs)[0]
        for get in (lambda: session.load_model(progress=False), lambda: session.attach(local)):
            caplog.clear()
            model = get()
            assert "no product can stand for 2 linear layers" in caplog.text
            assert "layers.0.mixer.dt_proj, layers.1.mixer.dt_proj" in caplog.text
            assert not any("dt_proj" in name for name in virtual_layers(model))
            assert relative_error(model(**inputs)[0], expected) < 1e-5


def test_experts_beside_state_spaces(serve: Callable[..., Executor], tmp_path: Path) -> None:
    options = {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4}
    options |= {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
    local = build("JambaForCausalLM", "JambaConfig", options | {"use_mamba_kernels": False}, tmp_path)
    inputs = inputs_for(local)
    with serve(tmp_path).connect() as session, torch.no_grad():
        expected = local(**inputs)[0]
        model = session.attach(local)
        assert not any("dt_proj" in name for name in virtual_layers(model))
        assert relative_error(model(**inputs)[0], expected) < 1e-5
