"""PEFT's adapters of prompts on a model whose transformers calls its cache otherwise than PEFT does.

PEFT looks for keys and values under the earlier name. It would find none, and put the prompt in front of
every new token, or leave a prefix out.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn

from shared.compat import OLD_CACHE_NAME, cache_name
from tenant_sdk.trust.attestation import base_model


class _Inputs(dict[str, Any]):
    """What ``generate`` gives a model. The cache is one entry, found and put there under both names."""

    def get(self, name: str, default: Any = None) -> Any:
        """See dict."""
        return super().get(_now(name), default)

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(_now(name))

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(_now(name), value)


def _now(name: str) -> str:
    return cache_name() if name == OLD_CACHE_NAME else name


def _called_now(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A model's arguments, by their present names."""
    return args, {_now(name): each for name, each in kwargs.items()}


def fit_prompt_adapters(model: Any) -> None:
    """Have adapters of prompts work on a model, those that it gets later too.

    Args:
        model: of transformers, or PEFT's around one.
    """
    base: Any = base_model(model)
    if cache_name() == OLD_CACHE_NAME or not hasattr(base, "prepare_inputs_for_generation"):
        return
    if _called_now in base._forward_pre_hooks.values():
        return
    own = base.prepare_inputs_for_generation

    @functools.wraps(own.__func__)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> _Inputs:
        return _Inputs(own.__func__(self, *args, **kwargs))

    base.prepare_inputs_for_generation = types.MethodType(prepare, base)
    if hasattr(model, "base_model_prepare_inputs_for_generation"):  # PEFT has looked it up already
        model.base_model_prepare_inputs_for_generation = base.prepare_inputs_for_generation
    base.register_forward_pre_hook(_called_now, with_kwargs=True)
