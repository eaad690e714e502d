"""Activation checkpointing that asks the executor nothing twice."""

from __future__ import annotations

import functools
import logging
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import noop_context_fn
from transformers import PreTrainedModel

from tenant_sdk.model.recording import CopyStore, Recording, RecordingContext, Store

log = logging.getLogger(__name__)

_ENABLE = "gradient_checkpointing_enable"  # transformers' newer name leads here too, if it is replaced
_FUNCTION = "_gradient_checkpointing_func"  # of each module that can be checkpointed


class _Once:
    """What modules call to be checkpointed: the function that they had, with a recording."""

    def __init__(self, inner: Callable[..., Any], store: Store) -> None:
        self.inner, self.store = inner, store

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A graph that is compiled would not take it: products are asked for again there.
        if torch.compiler.is_compiling():
            return self.inner(function, *args, **kwargs)
        return self.inner(function, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[RecordingContext, RecordingContext]:
        recording = Recording(self.store)
        return recording.record(), recording.replay()


def keep_products(model: nn.Module, store: Store | None = None) -> None:
    """Have a model's checkpointed layers asked for once, whoever switches checkpointing on.

    Args:
        model: its layers are virtual; changed in place.
        store: of the answers until they are needed again; default: in memory.
    """
    store = store or CopyStore()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            enable = functools.partial(_enable, store=store)
            functools.update_wrapper(enable, getattr(type(module), _ENABLE))
            vars(module)[_ENABLE] = types.MethodType(enable, module)
    _replace(model, store)


def keeps_products(model: nn.Module) -> bool:
    """Whether ``keep_products`` was called."""
    return _ENABLE in vars(model)


def is_checkpointed(model: nn.Module) -> bool:
    """Whether checkpointing is switched on for any layer."""
    return any(vars(module).get("gradient_checkpointing") for module in model.modules())


def forget_products(model: nn.Module) -> None:
    """Undo ``keep_products``."""
    for module in model.modules():
        vars(module).pop(_ENABLE, None)
        function = vars(module).get(_FUNCTION)
        if isinstance(function, _Once):
            setattr(module, _FUNCTION, function.inner)


def _enable(
    self: Any, gradient_checkpointing_kwargs: dict[str, Any] | None = None, *, store: Store, **kwargs: Any
) -> None:
    """``gradient_checkpointing_enable`` of a model whose products are kept."""
    if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        log.warning(
            "use_reentrant=True is taken as False: only so are products kept for the second run, and not "
            "asked for again"
        )
    hooked = getattr(self, "_require_grads_hooks", None) or getattr(self, "_require_grads_hook", None)
    with warnings.catch_warnings():  # the name is older than the one that was called, perhaps
        warnings.simplefilter("ignore", FutureWarning)
        getattr(type(self), _ENABLE)(self, gradient_checkpointing_kwargs, **kwargs)
    if not hooked:
        # Embeddings whose gradients are wanted are of use to reentrant checkpoints alone; here they would
        # cost a request: gradients of the first layer's input.
        self.disable_input_require_grads()
    _replace(self, store)


def _replace(model: nn.Module, store: Store) -> None:
    for module in model.modules():
        function = vars(module).get(_FUNCTION)
        if function is None:
            continue
        if isinstance(function, _Once):
            function = function.inner
        keywords = getattr(function, "keywords", {})
        has_own_context = keywords.get("context_fn", noop_context_fn) is not noop_context_fn or keywords.get(
            "debug"
        )
        setattr(module, _FUNCTION, function if has_own_context else _Once(function, store))
