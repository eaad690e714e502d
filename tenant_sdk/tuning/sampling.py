"""How a continuation's tokens are chosen: the options of `symbiosis-tenant generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from shared.errors import ConfigurationError, OptionText
from shared.options import Option, check_fields, check_text

if TYPE_CHECKING:
    from transformers import GenerationConfig


_GROUP = "Sampling"
TOKENS = 100  # unless another number is given
_MIN_TEMPERATURE = 1e-3


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens, and when to stop.

    Raises:
        ConfigurationError: a value is out of bounds.
    """

    max_new_tokens: Annotated[
        int | None,
        Option(
            _GROUP,
            "Stop after at most this many tokens. Default: 100, or 1000 in a chat.",
            minimum=1,
            unit="TOKENS",
        ),
    ] = None
    temperature: Annotated[
        float,
        Option(
            _GROUP,
            "Sampling temperature. 0: always take the most likely token.",
            minimum=0,
            unit="NUMBER",
        ),
    ] = 0.0
    top_p: Annotated[
        float,
        Option(
            _GROUP,
            "Sample from the most likely tokens whose probabilities add up to this.",
            minimum=0,
            exclusive_minimum=True,
            maximum=1,
            unit="SHARE",
        ),
    ] = 1.0
    seed: Annotated[
        int, Option(_GROUP, "Seed of everything random except masks.", minimum=0, unit="NUMBER")
    ] = 0
    repetition_penalty: Annotated[
        float,
        Option(
            _GROUP,
            "Above 1, tokens that are already in the prompt or the text become less likely, so an adapter "
            "copies less from the prompt. 1: off.",
            minimum=0,
            exclusive_minimum=True,
            unit="NUMBER",
        ),
    ] = 1.0
    stop: Annotated[
        Sequence[str],
        Option(
            _GROUP,
            "Also stop after this text. The text itself is printed.",
            unit="TEXT",
            cli_singular="stop",
        ),
    ] = ()
    allow_loops: Annotated[
        bool,
        Option(
            _GROUP,
            "Continue even if the text repeats itself. Without this option, generation stops if the text "
            "ends with one sequence at least three times in a row, with at least 32 tokens in total.",
        ),
    ] = False

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        check_fields(self)
        if 0 < self.temperature < _MIN_TEMPERATURE:  # logits that are divided by it would be infinite
            raise ConfigurationError(
                "{temperature} must be 0 or at least {}", _MIN_TEMPERATURE, temperature=self.temperature
            )
        if not all(self.stop):
            raise ConfigurationError(OptionText("{stop} must be a text that is not empty"))
        for text in self.stop:
            check_text("stop", text)

    @property
    def most_tokens(self) -> int:
        """How many tokens there are at most."""
        return TOKENS if self.max_new_tokens is None else self.max_new_tokens

    def config(self, model: Any, tokenizer: Any) -> GenerationConfig:
        """What ``generate`` takes; a text ends with what the model or the tokenizer says ends one."""
        from transformers import GenerationConfig

        defaults = model.generation_config
        ends = ends_of(defaults, tokenizer)
        choose = (
            {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
            if self.temperature > 0
            else {"do_sample": False}
        )
        return GenerationConfig(
            max_new_tokens=self.most_tokens,
            bos_token_id=defaults.bos_token_id,
            eos_token_id=list(ends) or None,
            pad_token_id=defaults.pad_token_id
            if defaults.pad_token_id is not None
            else next(iter(ends), None),
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
