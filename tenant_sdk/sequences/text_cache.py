"""A cache that knows its text, so that ``generate`` does not go on from it with another one.

``generate`` skips as many tokens as have keys and values already, whichever they are; no cache is shown them.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from shared.errors import ConfigurationError

# Before, what is there already would be read again if a prompt is read in chunks.
_GOES_ON_IN_CHUNKS = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 21)


def can_crop(cache: Any) -> bool:
    """Whether tokens can be removed from a cache without a trace: no layer has put them into a state.

    Convolutions keep their last inputs, and so can go back; recurrent layers cannot.
    """
    if vars(type(cache)).get("is_croppable") is False:  # of its own kind, as MiniMax's
        return False
    return not any(
        isinstance(layer, LinearAttentionCacheLayerMixin) and not getattr(layer, "is_croppable", False)
        for layer in getattr(cache, "layers", ())
    )


class TextCache(DynamicCache):
    """Keys and values, and the tokens that they are of.

    Attributes:
        text: tokens ``[B, T]`` of which the first that have keys and values are here, as far as they are
            known: not those that the model was called with directly. None: nothing is known.
        reordered: beams exchanged their keys and values, so behind ``text`` there are those of candidates.
        began: tokens that had keys and values when ``generate`` was last called.
    """

    text: Tensor | None = None
    reordered: bool = False
    began: int = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See DynamicCache."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self.reordered = True

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See DynamicCache."""
        super().batch_repeat_interleave(repeats)
        self.text = None if self.text is None else self.text.repeat_interleave(repeats, 0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """See DynamicCache."""
        super().batch_select_indices(indices)
        self.text = None if self.text is None else self.text[indices.to(self.text.device)]

    def activate_past_recording(self) -> None:
        """See DynamicCache. Before it reads anything, ``generate`` asks for this if others propose tokens.

        Raises:
            ConfigurationError: it would read all of a text that was read in part already.
        """
        if 0 < self.get_seq_length() == self.began:
            raise ConfigurationError(
                "prompt lookup and assistant models do not go on from keys and values that are there: leave "
                "them out, or make new options with generate_options"
            )
        super().activate_past_recording()  # type: ignore[no-untyped-call]

    def keep(self, ids: Tensor) -> bool:
        """Forget what is not of these tokens ``[1, T]``, and at least the last of them, which is read again.

        Returns:
            False: it cannot be forgotten, because layers keep a window or a state.
        """
        held = self.get_seq_length()
        known = ids[:, :0] if self.text is None else self.text[:, :held].to(ids.device)
        length = min(known.shape[1], ids.shape[1] - 1)
        differs = (known[0, :length] != ids[0, :length]).nonzero()
        same = int(differs[0]) if len(differs) else length
        if same == held:
            return True
        if (
            self.reordered
            or not can_crop(self)
            or not all(isinstance(layer, DynamicLayer) and not layer.is_sliding for layer in self.layers)
        ):
            return False
        self.crop(same - held)
        return True

    def check(self, ids: Tensor) -> None:
        """Refuse tokens ``[B, T]`` that do not go on from those that are here.

        Raises:
            ConfigurationError: they do not.
        """
        held = self.get_seq_length()
        if not held:
            return
        known = ids[:, :0] if self.text is None else self.text[:, :held].to(ids.device)
        if self.reordered and known.shape[1] < held:
            raise ConfigurationError(
                "keys and values that beams leave are those of candidates, not of the text that they gave: "
                "make new options with generate_options for what follows it"
            )
        # A prompt that beams or several sequences share is given once, and each of them has its row here.
        new_ids = ids.repeat_interleave(len(known) // len(ids), 0)
        if ids.shape[1] <= held or not torch.equal(new_ids[:, : known.shape[1]], known):
            raise ConfigurationError(
                f"these options hold keys and values of {held:,} tokens, and the {ids.shape[1]:,} given do "
                "not begin with them and go on: make new options with generate_options for another text, or "
                "for the same one again"
            )


def guard(model: Any) -> None:
    """Have a model's ``generate`` check a ``TextCache`` that it is given; an own one of it is left."""
    if "generate" not in vars(model):
        model.generate = types.MethodType(_generate, model)


@functools.wraps(GenerationMixin.generate)
def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    # Under whichever name: versions of transformers that have a new one take the old one too.
    cache = next((each for each in kwargs.values() if isinstance(each, TextCache)), None)
    if cache is None:
        return type(self).generate(self, *args, **kwargs)
    cache.began = cache.get_seq_length()
    if cache.began and not _GOES_ON_IN_CHUNKS:
        kwargs["prefill_chunk_size"] = None
    ids = args[0] if args else kwargs.get("inputs")
    ids, mask = kwargs.get("input_ids") if ids is None else ids, kwargs.get("attention_mask")
    # As transformers takes it: with a mask that is longer, only what is new was given.
    if ids is None or (mask is not None and mask.shape[1] != ids.shape[1]):
        cache.text = None if cache.text is None else cache.text[:, : cache.began]
        return type(self).generate(self, *args, **kwargs)
    cache.check(ids)
    cache.text, cache.reordered = ids, False
    generated = type(self).generate(self, *args, **kwargs)
    if not cache.reordered:
        cache.text = getattr(generated, "sequences", generated)[:, : cache.get_seq_length()].clone()
    return generated
