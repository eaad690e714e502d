"""What the names of a configuration's numbers do not tell: values by model type or by class.

Those of ``type!`` are given already when the defaults are made.
"""

from __future__ import annotations

from typing import Any

_SERIES = {"prediction_length": 4, "context_length": 8, "num_time_features": 1, "lags_sequence": [1]}
_ROTARY = {"rope_type": "default", "rope_theta": 1e4}
OVERRIDES: dict[str, dict[str, Any]] = {
    "autoformer!": _SERIES,
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "informer!": _SERIES,
    "time_series_transformer!": _SERIES,
    # Every second layer attends, or none would, among so few.
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 32},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
    },
    "zamba": {
        "layers_block_type": ["mamba", "hybrid"],
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "hybrid_layer_ids": [1],
        "n_mamba_heads": 4,
        "mamba_headdim": 32,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "num_key_value_heads": 4,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1},
    "xlstm": {"num_heads": 4, "embedding_dim": 64, "hidden_size": 64, "chunk_size": 8},
    "longcat_flash": {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "head_dim": 16, "qk_head_dim": 32},
    "hrm_text": {"num_layers_per_stack": 2},
    "xmod": {"default_language": "en_XX"},
    "reformer": {
        "axial_pos_embds_dim": [32, 32],
        "axial_pos_shape": [2, 4],
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 4,
    },
    "ReformerModelWithLMHead": {"is_decoder": True},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": None, "sliding_attention": _ROTARY}},
    "cohere_compass": {
        "text_config": {"rope_parameters": {"full_attention": None, "sliding_attention": _ROTARY}}
    },
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "emu3": {"vocabulary_map": {"<image>": 4}},
    "blt": {"encoder_hash_byte_group_vocab": 160},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "esm": {"vocab_size": 160, "mask_token_id": 4, "pad_token_id": 1, "position_embedding_type": "absolute"},
    "mobilebert": {"embedding_size": 64, "intra_bottleneck_size": 64, "true_hidden_size": 64},
}
for _type in ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm46v", "glm_ocr", "glm_image", "glmga", "glm4v_moe"):
    # The sections of three positions are written in the model, for heads of 128.
    _sections = {"rope_parameters": {**_ROTARY, "mrope_section": [1, 1, 2] if "moe" in _type else [2, 3, 3]}}
    OVERRIDES |= {f"{_type}_text": _sections, _type: {"text_config": _sections}}
