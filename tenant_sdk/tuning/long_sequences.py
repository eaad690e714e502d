"""Any training loop with long sequences: a model's loss, made so that it fits into memory."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from shared.errors import ConfigurationError, SymbiosisError
from tenant_sdk.model.checkpointing import forget_products, is_checkpointed, keep_products, keeps_products
from tenant_sdk.model.recording import CopyStore, OnHost, Store
from tenant_sdk.sequences.chunked_loss import ChunkedLoss, Loss, loss_divisor, shifted
from tenant_sdk.sequences.encrypted_file import EncryptedFile
from tenant_sdk.sequences.measuring import FRACTION, free_disk, memory_left, shapes_of
from tenant_sdk.sequences.planning import GIB, MemoryPlan, StorageTier, plan_step
from tenant_sdk.sequences.positions import rope_stable_length
from tenant_sdk.sequences.stack import CannotSplit, Stack, instead
from tenant_sdk.sequences.windows import Batch, ReferenceStore, Stores, WindowedLoss, WindowedRun
from tenant_sdk.trust.attestation import base_model

log = logging.getLogger(__name__)

PROBE_TOKENS, PROBE_WINDOW = 11, 4  # tokens of the sequence that both ways are compared with
TOLERANCE = 0.03  # relative; masks round gradients to 5e-3, bfloat16 to 2e-2, and another function is far off
_SPLIT = ("labels", "shift_labels", "num_items_in_batch", "input_ids", "inputs_embeds")
_PER_TOKEN = ("attention_mask", "position_ids")
_IGNORED = ("use_cache", "return_dict", "logits_to_keep", "output_attentions", "output_hidden_states")
_TUNING = "_long_tuning"  # of a model: who changed it


class LongTuning:
    """A model whose loss is computed by a plan. ``long_tuning`` makes it; ``close`` restores the model.

    Attributes:
        plan: The method that computes the loss, and the place of each kind of data.
    """

    def __init__(self, model: nn.Module, folder: Path | None, max_length: int) -> None:
        self.plan, self._model, self._folder, self._max_length = MemoryPlan(), model, folder, max_length
        self._stack = stack = Stack(model, self._warn_unplanned)
        self._said: set[str] = set()
        self._spill: EncryptedFile | None = None
        self._switched_on, self._attached = False, keeps_products(model)
        vars(model)[_TUNING] = self
        self._inner = stack.forward
        self._names = list(inspect.signature(self._inner).parameters)
        self._before = vars(model).get("forward")

        model.forward = instead(self._inner, self._forward_of)

    def __str__(self) -> str:
        return str(self.plan)

    def __deepcopy__(self, memo: Any) -> LongTuning:
        """Copies of the model do as they did; what this has is the model's own."""
        return self

    def close(self) -> None:
        """Restore the model. A second call does nothing."""
        if vars(self._model).get(_TUNING) is not self:
            return
        del vars(self._model)[_TUNING]
        del self._model.forward
        if self._before is not None:
            self._model.forward = self._before
        self._stack.close()
        if self._switched_on:
            self._model.gradient_checkpointing_disable()
        if self.plan.checkpointed:
            (keep_products if self._attached else forget_products)(self._model)
        self._spill = None

    def use(self, plan: MemoryPlan) -> None:
        """Follow another plan from now on."""
        self.plan = plan
        if StorageTier.DISK in (plan.answers, plan.states) and self._spill is None:
            self._spill = EncryptedFile(self._folder)
        if plan.checkpointed:
            keep_products(self._model, self._store(plan.answers))
            if not is_checkpointed(self._model):
                self._model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
                self._switched_on = True

    def _store(self, place: StorageTier, *, unshared: bool = False) -> Store:
        """Own: of tensors that nobody else writes into."""
        if place == StorageTier.DISK:
            assert self._spill is not None  # noqa: S101 -- ``use`` makes it
            return OnHost(self._spill)
        return ReferenceStore() if unshared else CopyStore()

    def _forward_of(self, model: nn.Module | None, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if model not in (None, self._model):  # a copy of it
            return inner(*args, **kwargs)
        return self._forward(dict(zip(self._names, args, strict=False)) | kwargs)

    def _warn_unplanned(self) -> None:
        if self.plan.chunked_loss:
            self._warn(
                "a step was not made as planned, and takes the memory of a whole one: the model was called "
                "without labels, or by a trainer with a forward of its own (label smoothing, TRL's trainers)"
            )

    def _warn(self, what: str) -> None:
        """Once."""
        if what not in self._said:
            self._said.add(what)
            log.warning(what)

    def _forward(self, inputs: dict[str, Any]) -> Any:
        plan = self.plan
        labels: Any = inputs.get("labels")
        targets = inputs.get("shift_labels")
        if (labels is None and targets is None) or not plan.chunked_loss:
            return self._inner(**inputs)
        if inputs.get("fused_lm_head"):
            raise ConfigurationError(
                "TRL's trainers need log-probabilities of each token, but long_tuning gives only a loss: use "
                "transformers' Trainer, or close() and gradient_checkpointing=True"
            )
        if getattr(self._model, "loss_function", None) is not ForCausalLMLoss:
            raise ConfigurationError(
                f"{type(self._model).__name__} has its own loss_function, which cannot be computed in "
                "chunks: tune without long_tuning, or with transformers' loss"
            )
        for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
            if inputs.get(name):
                raise ConfigurationError(f"{name}=True is not possible with long_tuning; leave it out")
        if targets is None:
            targets = shifted(labels)
        if targets.shape[-1] > self._max_length:
            self._warn(f"a text is longer than the {self._max_length:,} tokens that were planned for")
        items = loss_divisor(targets, inputs.get("num_items_in_batch"))
        if plan.window is None:
            loss = self._whole_loss(inputs, targets, items)
        else:
            loss = self._windowed_loss(inputs, targets, items, plan.window)
        return CausalLMOutputWithPast(loss=loss)

    def _whole_loss(self, arguments: dict[str, Any], targets: torch.Tensor, items: Any) -> torch.Tensor:
        apart = ("labels", "shift_labels", "num_items_in_batch", *_IGNORED)
        inputs = {name: each for name, each in arguments.items() if each is not None and name not in apart}
        hidden = self._stack.last_layer_output(**inputs, use_cache=False)
        if torch.is_grad_enabled():
            loss: torch.Tensor = ChunkedLoss.apply(  # type: ignore[no-untyped-call]
                self._stack, targets, items, hidden, *self._stack.outer()
            )
            return loss
        total = Loss(self._stack, items, (), wanted=False)
        total.add(hidden, targets)
        return total.mean

    def _windowed_loss(
        self, arguments: dict[str, Any], targets: torch.Tensor, items: Any, window: int
    ) -> torch.Tensor:
        if getattr(self._stack.model.get_input_embeddings(), "neftune_noise_alpha", None):
            raise ConfigurationError(
                "NEFTune's noise depends on the length of the whole sequence: do not use it with windows"
            )
        for name, each in arguments.items():
            if name not in (*_SPLIT, *_PER_TOKEN, *_IGNORED) and each is not None and each is not False:
                raise ConfigurationError(f"{name} cannot be cut into windows; leave it out")
        batch = Batch(
            targets,
            items,
            arguments.get("input_ids"),
            arguments.get("inputs_embeds"),
            arguments.get("attention_mask"),
            arguments.get("position_ids"),
        )
        _check_batch(batch, self._stack.model.config.get_text_config())
        stores = Stores(
            None if self.plan.answers == StorageTier.NOWHERE else self._store(self.plan.answers),
            self._store(self.plan.states, unshared=True),
        )
        parameters = [each for each in self._stack.model.parameters() if each.requires_grad]
        embeddings = batch.embeddings
        wanted = torch.is_grad_enabled() and (
            bool(parameters) or (embeddings is not None and embeddings.requires_grad)
        )
        run = WindowedRun(self._stack, batch, window, stores, wanted=wanted)
        if wanted:
            loss: torch.Tensor = WindowedLoss.apply(run, embeddings, *parameters)  # type: ignore[no-untyped-call]
            return loss
        total = Loss(self._stack, items, (), wanted=False)
        run.loss(total)
        return total.mean


def _check_batch(batch: Batch, config: Any) -> None:
    """Refuse what a window would see otherwise than the whole sequence.

    Raises:
        ConfigurationError: packed sequences, or a mask of another kind.
    """
    if batch.mask is not None and batch.mask.dim() != 2:
        raise ConfigurationError("with windows, attention_mask must have the shape [B, T] and mark padding")
    eager = getattr(config, "_attn_implementation", None) == "eager"
    if eager and batch.mask is not None and not bool(batch.mask[:, 0].all()):
        # A row that may attend to nothing attends to all alike, there.
        raise ConfigurationError(
            "padding on the left cannot be cut into windows with eager attention: pad on the right, or load "
            "the model with attn_implementation='sdpa'"
        )
    positions = batch.positions
    if positions is not None and (
        positions.dim() != 2 or (batch.mask is None and bool((positions.diff() != 1).any()))
    ):
        raise ConfigurationError(
            "position_ids begin anew within a row: packed sequences cannot be cut into windows; put each in "
            "a row of its own"
        )


def long_tuning(
    model: nn.Module,
    max_length: int,
    *,
    batch_size: int = 1,
    memory_gib: float | None = None,
    window: int | None = None,
    packed: bool = False,
    folder: str | Path | None = None,
) -> LongTuning:
    """Train a model on long sequences in bounded memory, in any training loop.

    From now on, a call of the model with ``labels`` returns only the loss, without logits. The gradients are
    the same as before, up to rounding. This function chooses a method that fits into the memory: no change, a
    loss that is computed in chunks, activations that are computed again, or windows along the sequence. The
    model keeps the necessary data in memory or in an encrypted file. It sends no request twice, unless the
    disk is too small as well. Before this function returns, it compares the chosen method with the model's
    own on a few tokens.

    Args:
        model: Model from ``session.load_model``, or an attached model. If it will have an adapter, add the
            adapter first.
        max_length: Number of tokens of the longest sequence.
        batch_size: Number of sequences in a batch.
        memory_gib: Memory for this process in GiB, in total. It is the memory of the model's device: of the
            host or of a GPU. Default: the memory that the process has already, and 80 % of the free memory.
        window: Number of tokens in a window. If it is given, the model uses windows. Default: this function
            decides.
        packed: Each row holds several sequences, so windows are not possible.
        folder: Folder of the encrypted file. Default: ``TMPDIR``, else ``/var/tmp``.

    Raises:
        ConfigurationError: ``memory_gib`` is too small, or the chosen method would change the results of the
            model.
    """
    if max_length < 2 or batch_size < 1 or (window is not None and window < 1):
        raise ConfigurationError(
            f"max_length={max_length}, batch_size={batch_size}, window={window}: no room for text; "
            "max_length must be at least 2, the others at least 1"
        )
    inner: Any = base_model(model)
    folder = None if folder is None else Path(folder)
    if (before := vars(inner).get(_TUNING)) is not None:
        if before._model is not inner:
            raise CannotSplit(
                "this is a copy of a model that long_tuning has changed: close() the tuning of the first "
                "model before you copy that model"
            )
        before.close()
    tuning = LongTuning(inner, folder, max_length)
    stack = tuning._stack
    try:
        ids = _probe_tokens(inner)
        with _refuse_unsplittable(inner):
            stack.observe(input_ids=ids)
            shapes = shapes_of(stack, ids)
        left = memory_left(memory_gib, inner.device)
        disk = int(FRACTION * free_disk(folder))
        plan = plan_step(
            shapes, max_length, batch_size, left, disk, window=window, packed=packed, budget=memory_gib
        )
        _compare(tuning, plan, model, ids)
        tuning.use(plan)
    except BaseException:
        tuning.close()
        raise
    log.info("%s", plan.sentence(max_length, batch_size))
    if plan.memory > left:
        log.warning(
            "%s, by estimate; %.1f GiB are free", plan.sentence(max_length, batch_size), max(0, left) / GIB
        )
    return tuning


def _probe_tokens(model: Any) -> torch.Tensor:
    """Tokens [1, T] to try with, others each time: rows that are known give away masks that serve again."""
    config = model.config.get_text_config()
    count = min(PROBE_TOKENS, getattr(config, "max_position_embeddings", None) or PROBE_TOKENS)
    generator = torch.Generator()
    generator.seed()
    ids = torch.randint(config.vocab_size, (1, count), generator=generator)
    return ids.to(model.device)


@contextmanager
def _refuse_unsplittable(model: nn.Module) -> Iterator[None]:
    """Whatever a model does with a cache that is not its own, it is not taken apart then."""
    try:
        yield
    except SymbiosisError:
        raise
    except Exception as error:
        raise CannotSplit(f"{type(model).__name__} cannot be cut into windows: {error}") from error


def _compare(tuning: LongTuning, plan: MemoryPlan, model: nn.Module, ids: torch.Tensor) -> None:
    """Refuse a model, perhaps in PEFT's wrapper, whose loss, or gradients, the plan would change.

    Raises:
        CannotSplit: it would.
    """
    if not plan.chunked_loss:
        return
    name = type(tuning._model).__name__
    if plan.window is not None and rope_stable_length(tuning._model) is not None:
        raise CannotSplit(
            f"the positions of {name} depend on the length of the whole sequence: windows would differ"
        )
    if any(hasattr(each, "keep_window_size") for each in model.modules()):  # more than there are tokens here
        raise CannotSplit(f"{name} attends to selected tokens of the whole sequence: windows would differ")
    parameters = [each for each in model.parameters() if each.requires_grad]
    training = {module: module.training for module in model.modules()}
    model.eval()  # dropout would differ

    def loss_and_gradients() -> list[torch.Tensor]:
        with torch.enable_grad():
            loss = model(input_ids=ids, labels=ids).loss
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True) if parameters else ()
        return [loss.detach(), *(torch.zeros(()) if each is None else each for each in gradients)]

    try:
        with _refuse_unsplittable(tuning._model):
            expected = loss_and_gradients()
            tuning.plan = MemoryPlan(
                chunked_loss=True,
                window=None if plan.window is None else PROBE_WINDOW,
                answers=StorageTier.MEMORY,
            )
            got = loss_and_gradients()
    finally:
        tuning.plan = MemoryPlan()
        for module, was in training.items():
            module.training = was
    for mine, other in ((got[:1], expected[:1]), (got[1:], expected[1:])):
        apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(mine, other, strict=True))
        if not apart <= TOLERANCE**2 * sum(float(each.double().square().sum()) for each in other):
            raise CannotSplit(
                f"{name} gives another loss, or other gradients, in parts than as a whole (bidirectional "
                "attention, a recurrent state, or a loss of its own), so its sequences cannot be cut"
            )
