"""How a continuation's tokens are chosen: the options of `symbiosis-tenant generate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import GenerationConfig


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. ``temperature`` 0 takes the most likely one, whatever the seed."""

    max_new_tokens: int = 100
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if self.max_new_tokens < 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ConfigurationError(
                "--max-new-tokens is at least 1, --temperature not negative, --top-p above 0 and at most 1"
            )

    def config(self, model: Any) -> GenerationConfig:
        """What ``generate`` takes; end and padding tokens are the model's own."""
        from transformers import GenerationConfig

        own = model.generation_config
        choose = (
            {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
            if self.temperature > 0
            else {"do_sample": False}
        )
        return GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            bos_token_id=own.bos_token_id,
            eos_token_id=own.eos_token_id,
            pad_token_id=own.pad_token_id if own.pad_token_id is not None else _first(own.eos_token_id),
            **choose,
        )


def _first(ids: int | list[int] | None) -> int | None:
    return ids[0] if isinstance(ids, list) else ids
