"""Tiny models of kinds whose checkpoints are read in ways of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
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

# Class, configuration class and its options.
TABLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    # Stored under other names than the model has, or in other pieces, which transformers converts.
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _PLAIN),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_GROUPED, **_EXPERTS, "head_dim": 16}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**_PLAIN, **_EXPERTS, **_LATENT}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**_GROUPED, **_EXPERTS, "head_dim": 16}),
    "nomic_bert": ("NomicBertForMaskedLM", "NomicBertConfig", _PLAIN),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {"text_config": _TEXT, "vision_config": _VISION},
    ),
}


def build(class_name: str, config_name: str, options: dict[str, Any], folder: Path) -> PreTrainedModel:
    """Saves a random model and gives it back as a tenant would load it."""
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**options)
    model_class = getattr(transformers, class_name)
    model_class(config).save_pretrained(folder)
    return model_class.from_pretrained(folder).eval()
