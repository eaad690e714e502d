"""Exact gradients of a long sequence, a window of it and a layer at a time.

Forward, each layer lets the windows of the sequence through, one after the other: a window's attention sees
the keys and values of those before it. What a layer was given, its keys and values, and the executor's
answers are kept, where the plan says. Backward goes from the last layer to the first and in each from the
last window to the first: the window is computed again, without asking the executor, with a graph; what
later windows had to say about its keys and values is there by then, so its gradient is whole (FlexLLM's
token-level backward). One layer's keys and values and one window's activations are all that memory needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.cache_utils import Cache, CacheLayerMixin

from shared.compat import cache_name
from shared.memory import FreedMemory
from tenant_sdk.model.recording import Recording, Store
from tenant_sdk.model.virtual import training_forward
from tenant_sdk.sequences.chunked_loss import Loss, add_up
from tenant_sdk.sequences.stack import Call, CannotSplit, RandomAndAutocastState, Stack

FREED_BYTES = 128 << 20  # that lie free between blocks in use, before they are given back
CALL_BYTES = 256 << 20  # of masks and tables of windows, which are made again above


class ReferenceStore:
    """A store that keeps the tensors that it is given, not copies: nobody writes into them."""

    def write(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Store."""
        return tensor

    def read(self, stored: torch.Tensor) -> torch.Tensor:
        """See Store."""
        return stored

    def free(self, stored: torch.Tensor) -> None:
        """See Store."""


@dataclass
class SavedTensors:
    """Tensors of a sequence that are needed once more; their places go with them.

    Attributes:
        places: of tensors, by what they are.
    """

    store: Store
    places: dict[Any, Any] = field(default_factory=dict)

    def put(self, name: Any, tensor: torch.Tensor) -> None:
        """Keep a tensor."""
        self.places[name] = self.store.write(tensor)

    def pop(self, name: Any) -> torch.Tensor:
        """The tensor, which is kept no longer."""
        place = self.places.pop(name)
        tensor = self.store.read(place)
        self.store.free(place)
        return tensor

    def __del__(self) -> None:
        for place in self.places.values():
            self.store.free(place)


@dataclass
class _AttendedLayer:
    """Keys and values [B, H, T, E] of a layer, of as many tokens as were there; and their gradients.

    Attributes:
        span: the window that is in progress.
        gradients: by later windows, of what is before them.
    """

    length: int
    span: slice
    states: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=lambda: [None, None])
    recompute: bool = False


class _Append(torch.autograd.Function):
    """Keys, or values, of a window behind those of the windows before it."""

    @staticmethod
    def forward(ctx: Any, new: torch.Tensor, attended: _AttendedLayer, which: int) -> torch.Tensor:
        ctx.attended, ctx.which, ctx.span = attended, which, attended.span
        return attended.states[which][:, :, : attended.span.stop].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        """What this window says of earlier ones is added up; what all say of this one is its gradient."""
        attended, which, span = ctx.attended, ctx.which, ctx.span
        of_window, sums = gradient[:, :, span], attended.gradients[which]
        if sums is not None:
            of_window = of_window + sums[:, :, span]
        if span.start:
            if sums is None:
                sums = attended.gradients[which] = torch.zeros_like(attended.states[which])
            sums[:, :, : span.start] += gradient[:, :, : span.start]
        return of_window, None, None


class _WindowCacheLayer(CacheLayerMixin):
    """What a model takes for one layer of its cache."""

    def __init__(self, cache: WindowCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self.is_initialized = cache, True

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, H, T, E] of all tokens so far."""
        return self._cache.append(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys there are, and where they begin."""
        return self._cache.past + int(query_length), 0

    def get_seq_length(self) -> int:
        """How many tokens were before this window."""
        return self._cache.past

    def get_max_length(self) -> int:
        """Any number."""
        return -1

    get_max_cache_shape = get_max_length  # of older versions


class WindowCache(Cache):
    """What a model takes for its cache: one layer's keys and values, which the driver of windows gives.

    Attributes:
        past: how many tokens were before the window.
        attended: of the layer that is in progress.
    """

    def __init__(self, layers: int) -> None:
        self.past = 0
        self.attended: _AttendedLayer | None = None
        super().__init__(layers=[_WindowCacheLayer(self) for _ in range(layers)])

    def append(self, *new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, H, T, E] of a window behind those before it."""
        attended = self.attended
        if attended is None:
            raise CannotSplit("the model attends outside of its layers, so its sequences cannot be cut")
        span = attended.span
        if new[0].shape[2] != span.stop - span.start:
            raise CannotSplit("a layer attends to other tokens than it is given, so they cannot be cut")
        if attended.recompute:
            keys, values = (
                _Append.apply(each, attended, which)  # type: ignore[no-untyped-call]
                for which, each in enumerate(new)
            )
            return keys, values
        if not span.start:
            attended.states = [
                each.new_empty((*each.shape[:2], attended.length, each.shape[3])) for each in new
            ]
        for state, each in zip(attended.states, new, strict=True):
            state[:, :, span] = each
        keys, values = (state[:, :, : span.stop] for state in attended.states)
        return keys, values


@dataclass(frozen=True)
class Batch:
    """What a model is given to learn from: [B, T] each, and embeddings [B, T, D] in the place of ids."""

    labels: torch.Tensor  # shifted: of the next tokens
    items: torch.Tensor | int | float
    ids: torch.Tensor | None = None
    embeddings: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def of(self, span: slice) -> dict[str, Any]:
        """The inputs of a window."""
        inputs = {"input_ids": self.ids, "inputs_embeds": self.embeddings, "position_ids": self.positions}
        cut: dict[str, Any] = {name: v[:, span] for name, v in inputs.items() if v is not None}
        if self.mask is not None:
            cut["attention_mask"] = self.mask[:, : span.stop]
        return cut


@dataclass(frozen=True)
class Stores:
    """Where a sequence is kept: answers of the executor (None: they are asked for again), and all else."""

    answers: Store | None
    states: Store


class WindowedRun:
    """One batch on its way through a model, forward and perhaps backward.

    Args:
        window: tokens of each sequence that are computed at once.
        wanted: whether there will be a backward.
    """

    def __init__(self, stack: Stack, batch: Batch, window: int, stores: Stores, *, wanted: bool) -> None:
        self.stack, self.batch, self.stores, self.wanted = stack, batch, stores, wanted
        self._length = batch.labels.shape[1]
        self.spans = [slice(at, min(at + window, self._length)) for at in range(0, self._length, window)]
        self._cache = WindowCache(len(stack.layers))
        self._calls: dict[int, list[Call]] = {}
        self._call_bytes = 0
        self._saved = SavedTensors(stores.states)
        self._answers: dict[tuple[int, int], Recording] = {}
        self._random_and_autocast: dict[tuple[int, int], RandomAndAutocastState] = {}
        self._freed = FreedMemory(FREED_BYTES)
        outside = bool(stack.outer()) or (batch.embeddings is not None and batch.embeddings.requires_grad)
        trained = (index for index in range(len(stack.layers)) if stack.of_layer(index))
        self._outside = outside
        # Below the first that is trained nothing needs a gradient.
        self._first = 0 if outside else next(trained, len(stack.layers))

    def state(self) -> list[Any]:
        """What must be the same when windows are computed again: versions of tensors, modes of modules."""
        batch = self.batch
        inputs = (batch.labels, batch.ids, batch.embeddings, batch.mask, batch.positions)
        tensors = [each for each in (*inputs, *self.stack.model.parameters()) if each is not None]
        modes = [module.training for module in self.stack.model.modules()]
        return [*(each._version for each in tensors if not each.is_inference()), *modes]

    # -- forward -----------------------------------------------------------------------------------

    @torch.no_grad()
    def loss(self, loss: Loss) -> None:
        """Let the batch through and add its loss up."""
        with self.stack.uncheckpointed(), training_forward() if self.wanted else nullcontext():
            hidden = [self._first_layer_input(at) for at in range(len(self.spans))]
            for index in range(len(self.stack.layers)):
                self._layer_forward(index, hidden)
                self._freed.trim()
            for at, span in enumerate(self.spans):
                gradient = loss.add(hidden[at], self.batch.labels[:, span])
                hidden[at] = hidden[at].new_empty(0)
                if gradient is not None:
                    self._saved.put(("top", at), gradient)

    def _first_layer_input(self, at: int) -> torch.Tensor:
        self._random_and_autocast[-1, at] = RandomAndAutocastState.now(self.batch.labels.device)
        hidden, calls = self._embed_window(at)
        self._keep_calls(at, calls)
        return hidden

    def _layer_forward(self, index: int, hidden: list[torch.Tensor]) -> None:
        """Replace what a layer is given, for each window, by what it gives."""
        recompute = self.wanted and index >= self._first
        for at, span in self._attending(_AttendedLayer(self._length, self.spans[0])):
            call = self._call(at, index)
            with ExitStack() as recorded:
                if recompute:
                    self._saved.put((index, at), hidden[at])
                    self._random_and_autocast[index, at] = RandomAndAutocastState.now(hidden[at].device)
                    if self.stores.answers is not None:
                        recording = self._answers[index, at] = Recording(self.stores.answers)
                        recorded.enter_context(recording.record())
                hidden[at] = self.stack.layer(index, hidden[at], call)
            if recompute and span.stop == self._length:
                assert self._cache.attended is not None  # noqa: S101 -- ``_attending`` sets it
                for which, state in enumerate(self._cache.attended.states):
                    self._saved.put((index, "states", which), state)

    # -- backward ----------------------------------------------------------------------------------

    def gradients(
        self, scale: torch.Tensor, parameters: Sequence[nn.Parameter]
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Gradients of embeddings [B, T, D], if they are wanted, and of parameters; once.

        Args:
            scale: what the gradient of the sum over tokens is multiplied by.
        """
        by_parameter: dict[int, torch.Tensor | None] = {}

        def add(params: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
            sums = add_up([by_parameter.get(id(p)) for p in params], gradients)
            by_parameter.update((id(p), each) for p, each in zip(params, sums, strict=True))

        with self.stack.uncheckpointed():
            tops = [self._saved.pop(("top", at)) for at in range(len(self.spans))]
            gradients = [top * scale for top in tops]
            del tops
            for index in range(len(self.stack.layers) - 1, self._first - 1, -1):
                self._layer_backward(index, gradients, add)
                self._freed.trim()
            embeddings = self._embeddings_backward(gradients, add) if self._outside else None
        return embeddings, [by_parameter.get(id(p)) for p in parameters]

    def _layer_backward(self, index: int, gradients: list[torch.Tensor], add: Callable[..., None]) -> None:
        """Replace gradients of what a layer gave, for each window, by those of what it was given."""
        attended = _AttendedLayer(self._length, self.spans[-1], recompute=True)
        for which in range(2):
            if (index, "states", which) in self._saved.places:
                attended.states.append(self._saved.pop((index, "states", which)))
        below = index > self._first or self._outside
        trained = self.stack.of_layer(index)
        for at, _ in self._attending(attended):
            call = self._call(at, index)
            recording = self._answers.pop((index, at), None)
            hidden = self._saved.pop((index, at)).detach().requires_grad_(below)
            with ExitStack() as contexts:
                contexts.enter_context(self._random_and_autocast.pop((index, at)).restored())
                if recording is not None:
                    contexts.enter_context(recording.replay())
                contexts.enter_context(torch.enable_grad())
                out = self.stack.layer(index, hidden, call)
            wanted = [*([hidden] if below else []), *trained]
            layer_gradients = torch.autograd.grad(out, wanted, gradients[at].to(out.dtype), allow_unused=True)
            del out
            gradients[at] = gradients[at].new_empty(0)
            if below:
                gradients[at], *rest = layer_gradients
                add(trained, rest)
            else:
                add(trained, layer_gradients)

    def _embeddings_backward(
        self, gradients: list[torch.Tensor], add: Callable[..., None]
    ) -> torch.Tensor | None:
        outer, embeddings = self.stack.outer(), self.batch.embeddings
        of_parts: list[torch.Tensor | None] = []
        for at, span in enumerate(self.spans):
            part = (
                None
                if embeddings is None
                else embeddings[:, span].detach().requires_grad_(embeddings.requires_grad)
            )
            with self._random_and_autocast[-1, at].restored(), torch.enable_grad():
                hidden, _ = self._embed_window(at, part)
            wanted = [each for each in (part, *outer) if each is not None and each.requires_grad]
            if not hidden.requires_grad:
                continue
            gradients_of_window = list(
                torch.autograd.grad(hidden, wanted, gradients[at].to(hidden.dtype), allow_unused=True)
            )
            if part is not None and part.requires_grad:
                of_parts.append(gradients_of_window.pop(0))
            add(outer, gradients_of_window)
        gradients_of_parts = [each for each in of_parts if each is not None]
        return torch.cat(gradients_of_parts, 1) if gradients_of_parts else None

    # -- both --------------------------------------------------------------------------------------

    def _attending(self, attended: _AttendedLayer) -> Iterator[tuple[int, slice]]:
        """The windows in order, backwards if they are computed again, while a layer attends to this."""
        order = range(len(self.spans))
        try:
            for at in reversed(order) if attended.recompute else order:
                attended.span = self.spans[at]
                self._cache.past, self._cache.attended = attended.span.start, attended
                yield at, attended.span
        finally:
            self._cache.attended = None

    def _embed_window(
        self, at: int, embeddings: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[Call]]:
        span = self.spans[at]
        inputs = self.batch.of(span)
        if embeddings is not None:
            inputs["inputs_embeds"] = embeddings
        self._cache.past = span.start
        return self.stack.first_layer_inputs(**inputs, **{cache_name(): self._cache}, use_cache=True)

    def _keep_calls(self, at: int, calls: list[Call]) -> None:
        tensors = {id(each): each for call in calls for each in call.tensors()}
        size = sum(each.nbytes for each in tensors.values())
        if self._call_bytes + size > CALL_BYTES:
            self._calls.clear()
            self._call_bytes = 0
        self._calls[at] = calls
        self._call_bytes += size

    def _call(self, at: int, index: int) -> Call:
        """How a layer is called for a window; masks of long sequences are made again."""
        if at not in self._calls:
            with torch.no_grad(), self._random_and_autocast[-1, at].restored():
                self._keep_calls(at, self._embed_window(at)[1])
        return self._calls[at][index]


class WindowedLoss(torch.autograd.Function):
    """A batch's loss by windows; backward computes them again."""

    @staticmethod
    def forward(
        ctx: Any, run: WindowedRun, embeddings: torch.Tensor | None, *parameters: nn.Parameter
    ) -> torch.Tensor:
        """The loss, with all that its gradient needs kept."""
        outer = run.stack.outer()
        loss = Loss(run.stack, run.batch.items, outer, wanted=True)
        run.loss(loss)
        ctx.run, ctx.parameters, ctx.state = run, parameters, run.state()
        ctx.logits = {id(p): each for p, each in zip(outer, loss.gradients, strict=True)}
        return loss.mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of embeddings and parameters."""
        if ctx.run is None:
            raise RuntimeError("the windows of this loss are gone after one backward; compute it again")
        run, ctx.run = ctx.run, None
        if ctx.state != run.state():
            raise RuntimeError(
                "parameters, inputs or training mode changed between the forward and the backward of a loss: "
                "its windows would be computed again as something else; call backward before anything changes"
            )
        scale = gradient / run.batch.items
        embeddings, parameter_gradients = run.gradients(scale, ctx.parameters)
        behind = [ctx.logits.get(id(p)) for p in ctx.parameters]
        scaled = [None if each is None else each * scale for each in behind]
        return None, embeddings, *add_up(parameter_gradients, scaled)
