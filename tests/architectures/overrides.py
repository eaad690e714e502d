"""What the names of a configuration's numbers do not tell: values by model type or by class.

Those of ``type!`` are given already when the defaults are made.
"""

from __future__ import annotations

from typing import Any

OVERRIDES: dict[str, dict[str, Any]] = {
    "autoformer!": {"prediction_length": 4, "context_length": 8},
    "informer!": {"prediction_length": 4, "context_length": 8},
    "time_series_transformer!": {"prediction_length": 4, "context_length": 8},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [2, 4]},
    "ReformerModelWithLMHead": {"is_decoder": True},
    "nemotron": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "esm": {"vocab_size": 160, "mask_token_id": 4, "pad_token_id": 1, "position_embedding_type": "absolute"},
}
