"""How a continuation's tokens are chosen: the options of `symbiosis-tenant generate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigurationError
from shared.options import check_text

if TYPE_CHECKING:
    from transformers import GenerationConfig


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens, and when to stop.

    ``temperature`` 0 takes the most likely token, whatever the seed. ``repetition_penalty`` divides the
    scores of tokens that were there before, those of the prompt too; 1 leaves them alone. ``stop``: texts
    after which to stop, and which are printed. ``stop_loops``: stop when the text only repeats itself.
    """

    max_new_tokens: int = 100
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_loops: bool = True

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if self.max_new_tokens < 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ConfigurationError(
                "--max-new-tokens is at least 1, --temperature not negative, --top-p above 0 and at most 1"
            )
        if not self.repetition_penalty > 0 or not all(self.stop):
            raise ConfigurationError(
                "--repetition-penalty is above 0, and --stop is a text that is not empty"
            )

        for text in self.stop:
            check_text("--stop", text)

    def config(self, model: Any, tokenizer: Any) -> GenerationConfig:
        """What ``generate`` takes; a text ends with what the model or the tokenizer says ends one."""
        from transformers import GenerationConfig

        own = model.generation_config
        ends = ends_of(own, tokenizer)
        choose = (
            {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
            if self.temperature > 0
            else {"do_sample": False}
        )
        return GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            bos_token_id=own.bos_token_id,
            eos_token_id=list(ends) or None,
            pad_token_id=own.pad_token_id if own.pad_token_id is not None else next(iter(ends), None),
            repetition_penalty=self.repetition_penalty,
            stop_strings=list(self.stop) or None,
            **choose,
        )


def ends_of(generation: GenerationConfig, tokenizer: Any) -> tuple[int, ...]:
    """Ids of the tokens that end a text: first the tokenizer's own, then those that the model names."""
    ends = [*_ids(getattr(tokenizer, "eos_token_id", None)), *_ids(generation.eos_token_id)]
    return tuple(dict.fromkeys(ends))


def _ids(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else ids
