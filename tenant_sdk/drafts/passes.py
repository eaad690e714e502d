"""Passes of a model over several tokens, of whose keys and values only those of right ones stay."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from shared.compat import cache_name, generation_steps
from shared.errors import ConfigurationError
from tenant_sdk.drafts.options import VIRTUAL_TOKENS
from tenant_sdk.sequences.contexts import activated
from tenant_sdk.sequences.positions import rope_stable_length
from tenant_sdk.sequences.text_cache import can_crop
from tenant_sdk.trust.attestation import base_model


def check_supported(model: Any) -> None:
    """Refuse a model of which a pass cannot compute several tokens, or forget those of wrong guesses.

    Args:
        model: may be a PEFT model around another.

    Raises:
        ConfigurationError: the model is such.
    """
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise ConfigurationError(VIRTUAL_TOKENS)
    if activated(model):
        raise ConfigurationError(
            "a draft does not go with adapters that tokens of the prompt activate (aLoRA): leave out "
            "the draft"
        )
    model = base_model(model)
    if getattr(model, "_is_stateful", False):  # transformers refuses assisted generation for these, too
        raise ConfigurationError(
            f"{type(model).__name__} has layers with a recurrent state, from which a wrong guess cannot be "
            "removed: leave out the draft"
        )


class Passes:
    """A prompt, and the passes after it.

    Args:
        model: with keys and values of tokens; not a PEFT model around it.
        arguments: for the model, as ``generate`` prepares them.

    Raises:
        ConfigurationError: this transformers, or this model, cannot check several tokens at once.
    """

    def __init__(self, model: Any, arguments: dict[str, Any]) -> None:
        check_supported(model)
        steps = generation_steps()
        if steps is None:
            raise ConfigurationError("drafts do not go with this version of transformers: see the log")
        self._model, self._arguments, self._steps = model, arguments, steps
        self._outputs: Any = None
        self._rows = self._length = 0
        config = model.config.get_text_config(decoder=True)
        names = ("max_position_embeddings", "original_max_position_embeddings")
        most: list[int | None] = [getattr(config, name, None) for name in names]
        most.append(rope_stable_length(model))
        self._positions = min((each for each in most if each is not None), default=None)

    @property
    def cache(self) -> Any:
        """Keys and values."""
        return self._arguments.get(cache_name())

    @property
    def max_guesses(self) -> int:
        """Guesses for which the model has positions, and the same ones as without guesses."""
        if self._positions is None:
            return 1 << 30
        return max(0, self._positions - self._length - 1)

    def prompt(self, ids: Tensor, config: GenerationConfig) -> Tensor:
        """Read a prompt ``[B, T]``, from where its keys and values end; logits, of the last token at least.

        Raises:
            ConfigurationError: the model keeps no keys and values.
        """
        self._outputs = self._steps.prompt(self._model, ids, config, self._arguments)
        if (made := getattr(self._outputs, cache_name(), None)) is not None:  # the model may have made it
            self._arguments[cache_name()] = made
        cache = self.cache
        if cache is None or not hasattr(cache, "crop") or not can_crop(cache):
            raise ConfigurationError(
                f"{type(self._model).__name__} keeps no keys and values that could be forgotten again, as a "
                "draft needs it: leave out the draft"
            )
        # From now on layers with a window keep enough to go back.
        cache.activate_past_recording()
        self._length = ids.shape[1]
        return self._outputs.logits  # type: ignore[no-any-return]

    def logits(self, ids: Tensor, rows: int) -> Tensor:
        """Logits ``[B, rows, vocabulary]`` of the last tokens of a text, of which all but those were read."""
        arguments = self._extend(dict(self._arguments), rows)
        if "logits_to_keep" in arguments:
            arguments["logits_to_keep"] = rows
        inputs = self._model.prepare_inputs_for_generation(ids, next_sequence_length=rows, **arguments)
        self._outputs, self._rows = self._model(**inputs, return_dict=True), rows
        logits: Tensor = self._outputs.logits[:, -rows:]
        if logits.shape[1] != rows:  # somebody else prepares the inputs
            raise ConfigurationError(
                f"{type(self._model).__name__} computed {logits.shape[1]} of {rows} tokens: leave out the "
                "draft"
            )
        if rows > 1 and getattr(self._outputs, cache_name(), self.cache) is not self.cache:
            raise ConfigurationError(
                f"{type(self._model).__name__} began anew with other keys and values, in which wrong guesses "
                "would stay: leave out the draft"
            )
        return logits

    def keep(self, rows: int) -> None:
        """Keep the first of the rows of the last check; the others are forgotten."""
        self.cache.crop(rows - self._rows)
        if rows:
            self._extend(self._arguments, rows)
        self._length += rows

    def _extend(self, arguments: dict[str, Any], tokens: int) -> dict[str, Any]:
        """The same arguments, for so many more tokens."""
        return self._steps.extend(self._model, self._outputs, arguments, False, num_new_tokens=tokens)
