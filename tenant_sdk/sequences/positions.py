"""Positions whose frequencies change with the length of a text."""

from __future__ import annotations

from typing import Any

from torch import nn

_BY_LENGTH = ("dynamic", "longrope")


def rope_stable_length(model: nn.Module) -> int | None:
    """Returns up to how many tokens a model's positions do not depend on a text's length; None: never.

    A longer text has other frequencies at all its positions. So its keys are not those of its beginning, nor
    those that a shorter text beside it has.
    """
    kinds = [str(getattr(each, "rope_type", "")) for each in model.modules()]
    if not any(name in kind for kind in kinds for name in _BY_LENGTH):
        return None
    config: Any = getattr(model, "config", None)
    config = config.get_text_config(decoder=True) if config is not None else None
    ropes = getattr(config, "rope_parameters", None) or {}
    ropes = [ropes, *(each for each in ropes.values() if isinstance(each, dict))]
    lengths = [each.get("original_max_position_embeddings") for each in ropes]
    lengths += [getattr(config, f"{name}max_position_embeddings", None) for name in ("original_", "")]
    return min((length for length in lengths if isinstance(length, int)), default=0)
