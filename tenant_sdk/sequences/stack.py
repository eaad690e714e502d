"""A causal language model taken apart at its decoder layers: the part before, each layer, the part after.

Everything is the model's own code. Its layers are told what to do for a while: to say how they were called,
or to give what is already known of them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from shared.errors import ConfigurationError

_Handler = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
_handler: ContextVar[_Handler | None] = ContextVar("handler", default=None)


class CannotSplit(ConfigurationError):
    """The model is built in a way that its sequences cannot be taken apart; nothing was changed."""


@dataclass(frozen=True)
class Call:
    """How a layer is called, but for the hidden states [B, T, D]."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors of it, such as masks and rotary tables."""
        waiting: list[Any] = [*self.args, *self.kwargs.values()]
        while waiting:
            each = waiting.pop()
            if isinstance(each, torch.Tensor):
                yield each
            elif isinstance(each, (tuple, list)):
                waiting += each
            elif isinstance(each, dict):
                waiting += each.values()


class Stack:
    """The decoder layers of a model, what is before them and what is behind.

    Args:
        model: a causal language model of transformers, without PEFT's wrapper; its layers are changed in
            place, until ``close``, and do the same as before unless this class asks otherwise.
        passed_by: called when gradients are wanted of the first layer, and nobody here asked for it.

    Raises:
        CannotSplit: it has not one list of layers.
    """

    def __init__(self, model: nn.Module, passed_by: Callable[[], None] = lambda: None) -> None:
        self.model: Any = model
        self.base: Any = getattr(model, getattr(model, "base_model_prefix", "") or " ", None)
        lists = [
            each
            for each in (self.base.modules() if isinstance(self.base, nn.Module) else ())
            if isinstance(each, nn.ModuleList)
            and all(isinstance(m, GradientCheckpointingLayer) for m in each)
        ]
        if len(lists) != 1 or self.base is model:
            raise CannotSplit(
                f"{type(model).__name__} is no decoder with one list of layers, so its sequences cannot be "
                "cut into parts"
            )
        self.layers = list(lists[0])
        self._lengths: dict[int, int | None] = {}  # of the tuples that layers give; None: a tensor
        self.forward = model.forward
        self._forwards = [(layer, vars(layer).get("forward")) for layer in self.layers]
        self._inner = [layer.forward for layer in self.layers]
        for index, layer in enumerate(self.layers):
            layer.forward = instead(layer.forward, _forward_to_handler(index, passed_by))

    def close(self) -> None:
        """Give the layers their own forward back."""
        for layer, forward in self._forwards:
            del layer.forward
            if forward is not None:
                layer.forward = forward
        self._forwards.clear()

    def outer(self) -> list[nn.Parameter]:
        """What is trained and in no layer, now: adapters come and go."""
        of_layers = {id(p) for layer in self.layers for p in layer.parameters()}
        return [each for each in self.model.parameters() if each.requires_grad and id(each) not in of_layers]

    def of_layer(self, index: int) -> list[nn.Parameter]:
        """What is trained of a layer."""
        return [each for each in self.layers[index].parameters() if each.requires_grad]

    @contextmanager
    def uncheckpointed(self) -> Iterator[None]:
        """The layers do what they do without transformers' own checkpointing."""
        on = [m for m in self.model.modules() if vars(m).get("gradient_checkpointing")]
        for module in on:
            module.gradient_checkpointing = False
        try:
            yield
        finally:
            for module in on:
                module.gradient_checkpointing = True

    def observe(self, **inputs: Any) -> None:
        """Let something small through the layers, to see what they give."""

        def record_output(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = self._inner[index](*args, **kwargs)
            self._lengths[index] = len(out) if isinstance(out, tuple) else None
            return out

        with _handling(record_output), torch.no_grad():
            self.base(**inputs, use_cache=False)

    def first_layer_inputs(self, **inputs: Any) -> tuple[torch.Tensor, list[Call]]:
        """What the first layer is given, and how each is called.

        Args:
            inputs: of the model's base, for B sequences of T tokens.

        Returns:
            [B, T, D], with a graph where something needs one; and a call for each layer.

        Raises:
            CannotSplit: something is done between the layers.
        """
        calls: list[Call] = []
        first: list[torch.Tensor] = []

        def pass_on(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, rest, named = _split_hidden(args, kwargs)
            first.append(hidden)
            if index != len(calls) or hidden is not first[0]:
                raise CannotSplit(
                    f"{type(self.model).__name__} does something between its layers, so its sequences cannot "
                    "be cut into windows"
                )
            calls.append(Call(rest, named))
            return self._shaped(index, hidden)

        with _handling(pass_on):
            self.base(**inputs)
        if len(calls) != len(self.layers):
            raise CannotSplit(f"{type(self.model).__name__} leaves out layers, so windows would differ")
        return first[0], calls

    def layer(self, index: int, hidden: torch.Tensor, call: Call) -> torch.Tensor:
        """A layer's output [B, T, D]."""
        with _handling(lambda at, args, kwargs: self._inner[at](*args, **kwargs)):
            out = self.layers[index](hidden, *call.args, **call.kwargs)
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    def last_layer_output(self, **inputs: Any) -> torch.Tensor:
        """The last layer's output [B, T, D]."""
        last: list[torch.Tensor] = []

        def capture(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = self._inner[index](*args, **kwargs)
            if index == len(self.layers) - 1:
                last.append(out[0] if isinstance(out, tuple) else out)
                # What is behind is made apart; with a graph it would be kept for nothing.
                return self._shaped(index, last[0].detach())
            return out

        with _handling(capture):
            self.base(**inputs)
        return last[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [1, T, V] of the last layer's output [1, T, D]."""

        def give(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._shaped(
                index, hidden if index == len(self.layers) - 1 else _split_hidden(args, kwargs)[0]
            )

        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        with _handling(give):
            out = self.forward(input_ids=ids, use_cache=False)
        return out.logits if hasattr(out, "logits") else out[0]  # type: ignore[no-any-return]

    def _shaped(self, index: int, hidden: torch.Tensor) -> Any:
        length = self._lengths[index]
        return hidden if length is None else (hidden, *[None] * (length - 1))


def _split_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    """The hidden states that a layer is called with, and all else."""
    if args:
        return args[0], args[1:], kwargs
    return kwargs["hidden_states"], (), {name: v for name, v in kwargs.items() if name != "hidden_states"}


def instead(inner: Callable[..., Any], what: Callable[..., Any]) -> Callable[..., Any]:
    """A module's forward that does something else; copies of the module have their own.

    Args:
        inner: its forward so far.
        what: is called with the module, its forward so far, and the arguments of a call.
    """
    if not isinstance(inner, types.MethodType):  # somebody else's function in the place of the method

        @functools.wraps(inner)
        def function(*args: Any, **kwargs: Any) -> Any:
            return what(None, inner, args, kwargs)

        return function
    original = inner.__func__

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return what(self, functools.partial(original, self), args, kwargs)

    return types.MethodType(forward, inner.__self__)


def _forward_to_handler(index: int, passed_by: Callable[[], None]) -> Callable[..., Any]:
    """What a layer does instead of its forward: what it is told, if it is."""

    def what(_: nn.Module | None, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        handler = _handler.get()
        if handler is not None:
            return handler(index, args, kwargs)
        if not index and torch.is_grad_enabled():
            passed_by()
        return inner(*args, **kwargs)

    return what


@contextmanager
def _handling(handler: _Handler | None) -> Iterator[None]:
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


# -- what a computation depends on besides its inputs -----------------------------------------------


@dataclass(frozen=True)
class RandomAndAutocastState:
    """The state of random numbers and of automatic mixed precision, to be restored."""

    random: Sequence[torch.Tensor]
    device: torch.device
    autocast: tuple[bool, torch.dtype]

    @classmethod
    def now(cls, device: torch.device) -> RandomAndAutocastState:
        """The present one, of the CPU and of a device."""
        random = [torch.get_rng_state()]
        if device.type == "cuda":
            random.append(torch.cuda.get_rng_state(device))
        kind = device.type
        return cls(random, device, (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore it for a while; afterwards random numbers go on as if nothing had been."""
        enabled, dtype = self.autocast
        with ExitStack() as stack:
            devices = [self.device] if self.device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices=devices))
            torch.set_rng_state(self.random[0])
            if devices:
                torch.cuda.set_rng_state(self.random[1], self.device)
            stack.enter_context(torch.autocast(self.device.type, dtype=dtype, enabled=enabled))
            yield
