"""Several LoRA adapters of one tenant, trained in one batch: one request a layer for the rows of all.

Punica (arXiv:2310.18547) computes the products of many adapters over one backbone together, to serve them;
here they are trained so, over the executor's layers (Symbiosis, arXiv:2507.03220). PEFT makes the adapters
and saves them. Its own batches of several adapters (``adapter_names=``) are for inference, and go through
the adapters one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.loss.loss_utils import ForCausalLMLoss

from shared.errors import ConfigurationError, NonFiniteError, OptionText
from tenant_sdk.model.virtual import without_padding
from tenant_sdk.sequences.chunked_loss import shifted
from tenant_sdk.sequences.positions import rope_stable_length
from tenant_sdk.session.session import Session
from tenant_sdk.tuning.adapter_config import ALLOWED_INIT_LORA_WEIGHTS, not_plain
from tenant_sdk.tuning.adapters import without_false_warnings
from tenant_sdk.tuning.conversations import IGNORE_INDEX
from tenant_sdk.tuning.folders import save_adapter
from tenant_sdk.tuning.segmented_lora import segmented_lora

Batch = Mapping[str, Any]
_KEYS = {"input_ids", "attention_mask", "labels", "num_items_in_batch"}


class MultiAdapter:
    """LoRA adapters of one model, each with its own data, rank, layers and optimizer, trained in one batch.

    ``losses`` runs the model once for all adapters. The loss and the gradients of an adapter depend only on
    its own batch and weights. Add the losses, and call ``backward`` once on the sum. An adapter without a
    batch does not change. Use an object of this class in one thread only.

    Attributes:
        model: PEFT model around the given model, with all adapters.
        names: Names of the adapters.
    """

    def __init__(
        self,
        model: nn.Module,
        configs: Mapping[str, peft.LoraConfig],
        *,
        seeds: Mapping[str, int] | None = None,
    ) -> None:
        """Add adapters to a model, in place.

        Args:
            model: Causal language model of transformers without adapters. It may be attached to a session, or
                local.
            configs: LoRA configuration of each adapter, by name.
            seeds: Seeds of adapters, by name. The initial weights and the dropout of an adapter are as if it
                were alone, after ``torch.manual_seed(seed)``. An adapter without a seed gets one from torch's
                generator.

        Raises:
            ConfigurationError: The model or a configuration is not suitable, or a configuration requires more
                than plain LoRA of linear layers. The model is unchanged.
        """
        if not configs:
            raise ConfigurationError("configs={}: give a LoraConfig for each adapter")
        if hasattr(model, "peft_config"):
            raise ConfigurationError(f"{type(model).__name__} has adapters already; give the base model")
        if unknown := (seeds or {}).keys() - configs.keys():
            raise ConfigurationError(f"seeds={sorted(unknown)}: no such adapter")
        for name, config in configs.items():
            _check(name, config)
        self.names = tuple(configs)
        self._base: Any = model
        self._blocks = [module for module in model.modules() if "gradient_checkpointing" in vars(module)]
        self._random: dict[str, torch.Generator] = {}
        self.model: Any = None
        drawn = {name: int(torch.randint(2**62, ())) for name in configs} | dict(seeds or {})
        try:
            with torch.random.fork_rng(devices=[]):
                for name, config in configs.items():
                    self._add(name, dataclasses.replace(config), drawn[name])  # PEFT fills in what is open
            self._layers = dict(self._adapted())
        except (ValueError, KeyError, TypeError, ConfigurationError) as error:
            if self.model is not None:
                self.model.unload()
            vars(model).pop("peft_config", None)
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"{type(model).__name__} does not take the adapters: {error}") from error
        self._train_all()

    def _add(self, name: str, config: peft.LoraConfig, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        with without_false_warnings():
            if self.model is None:
                self.model = peft.get_peft_model(self._base, config, adapter_name=name)
            else:
                self.model.add_adapter(name, config)
        # Dropout goes on where the weights' values ended, as in a training alone.
        self._random[name] = torch.Generator().set_state(torch.get_rng_state())

    def _adapted(self) -> Iterator[tuple[str, Any]]:
        """The adapted layers by name."""
        for name, module in self.model.named_modules():
            if isinstance(module, lora.LoraLayer):
                if type(module) is not lora.Linear or ".experts." in name:
                    raise ConfigurationError(
                        f"{name} is no linear layer that gets all tokens in order; several adapters can be "
                        "trained together only on such layers. Leave it out of target_modules"
                    )
                yield name, module

    def _train_all(self) -> None:
        for name in self.names:
            for parameter in self.parameters(name):
                parameter.requires_grad_(True)

    def parameters(self, name: str) -> list[nn.Parameter]:
        """The parameters of one adapter, for its optimizer, in the order of the layers.

        Raises:
            ConfigurationError: There is no such adapter.
        """
        self._check_names([name])
        return [
            parameter
            for layer in self._layers.values()
            if name in layer.lora_A
            for part in (layer.lora_A, layer.lora_B)
            for parameter in part[name].parameters()
        ]

    def losses(self, batches: Mapping[str, Batch]) -> dict[str, Tensor]:
        """The loss of each adapter on its batch, as ``model(**batch).loss`` with this adapter alone.

        Args:
            batches: Batches by name of the adapter, for one or more adapters. A batch has ``input_ids`` and
                ``labels``, both int64 [B, T], as a data collator makes them. B and T may differ between
                adapters. A batch may also have ``attention_mask`` [B, T], and ``num_items_in_batch`` to
                accumulate gradients: the sum of the loss over tokens is divided by this number.

        Raises:
            ConfigurationError: ``logits`` raises it, a batch has no labels, or the model has another loss
                function.
            NonFiniteError: ``logits`` raises it, or a loss is NaN or infinite.
        """
        mixture = getattr(self._base.config, "output_router_logits", False)  # a term for its experts
        if self._base.loss_function is not ForCausalLMLoss or mixture:
            raise ConfigurationError(
                f"{type(self._base).__name__} has a loss of its own; compute losses from logits()"
            )
        for name, batch in batches.items():
            if batch.get("labels") is None:
                raise ConfigurationError(f"the batch of adapter {name} has no labels")
        losses = {}
        for name, logits in self.logits(batches).items():
            labels, items = batches[name]["labels"], batches[name].get("num_items_in_batch")
            losses[name] = ForCausalLMLoss(logits, labels, logits.shape[-1], items)
        _refuse(tuple(name for name, loss in losses.items() if not loss.isfinite()), "the loss")
        return losses

    def logits(self, batches: Mapping[str, Batch]) -> dict[str, Tensor]:
        """The logits [B, T, V] of each adapter on its batch, from one forward pass.

        Each batch is padded at its end to the length of the longest batch. The model does not send padding at
        the end of a sequence to the executor, unless labels require a prediction there. This applies to
        padding of the given batches too. Logits of such padding have no meaning. In some models (LongRoPE,
        dynamic NTK), positions depend on the longest sequence of a pass if it exceeds a certain length. A
        batch that exceeds this length gets a pass of its own.

        Raises:
            ConfigurationError: There is no such adapter, a batch has an unknown key or a wrong shape, or the
                model uses gradient checkpointing.
            NonFiniteError: Rows of some adapters cannot be sent. The attribute ``adapters`` names these
                adapters. The other adapters can continue without them.
        """
        self._check_names(batches)
        if any(vars(module)["gradient_checkpointing"] for module in self._blocks):
            raise ConfigurationError(
                "several adapters cannot be trained together with gradient checkpointing: call "
                "model.gradient_checkpointing_disable()"
            )
        stable_length, found = rope_stable_length(self._base), dict[str, Tensor]()
        ids = {name: batch.get("input_ids") for name, batch in batches.items()}  # checked later
        lengths = {name: 0 if each is None else each.shape[-1] for name, each in ids.items()}
        # Longer ones later: such a model may remember the longest text.
        long = sorted(
            (n for n in batches if stable_length is not None and lengths[n] > stable_length),
            key=lengths.__getitem__,
        )
        for part in [{n: b for n, b in batches.items() if n not in long}, *({n: batches[n]} for n in long)]:
            found |= self._finite_logits(part) if part else {}
        return {name: found[name] for name in batches}

    def _finite_logits(self, batches: Mapping[str, Batch]) -> dict[str, Tensor]:
        try:
            return self._logits(batches)
        except NonFiniteError as error:
            if len(batches) > 1:
                _refuse(tuple(name for name in batches if not self._can_run(name, batches[name])), "a row")
            raise NonFiniteError(
                OptionText("{} (adapter {})", error.structured_message, ", ".join(batches)),
                adapters=tuple(batches),
            ) from error

    def _can_run(self, name: str, batch: Batch) -> bool:
        try:
            with torch.no_grad():
                self._logits({name: batch})
        except NonFiniteError:
            return False
        return True

    def _logits(self, batches: Mapping[str, Batch]) -> dict[str, Tensor]:
        ids, attended, needed = _joined(batches)
        shapes = {name: batch["input_ids"].shape for name, batch in batches.items()}
        counts, lengths = ({name: shape[axis] for name, shape in shapes.items()} for axis in (0, 1))
        padding = nullcontext() if needed.all() else without_padding(needed)
        with padding, self._mixed(_Mixed(counts, lengths, self._random)):
            logits = self._base(input_ids=ids, attention_mask=attended, use_cache=False).logits
        parts = zip(lengths.items(), logits.split(list(counts.values())), strict=True)
        return {name: part[:, :length].contiguous() for (name, length), part in parts}

    @contextmanager
    def _mixed(self, mixed: _Mixed) -> Iterator[None]:
        """Adapted layers take a batch of several adapters."""
        for layer in self._layers.values():
            layer.forward = partial(mixed.forward, layer)
        try:
            yield
        finally:
            for layer in self._layers.values():
                del layer.forward

    @contextmanager
    def use(self, name: str) -> Iterator[Any]:
        """The PEFT model with this adapter alone, to generate or to evaluate.

        Raises:
            ConfigurationError: There is no such adapter.
        """
        self._check_names([name])
        self.model.set_adapter(name)
        try:
            yield self.model
        finally:
            self._train_all()

    def save(self, name: str, folder: str | Path, session: Session, **options: Any) -> None:
        """Save one adapter. For options and errors, see ``tenant_sdk.save_adapter``."""
        self._check_names([name])
        save_adapter(self.model, folder, session, adapter=name, **options)

    def _check_names(self, names: Any) -> None:
        if not names or (unknown := [name for name in names if name not in self.names]):
            raise ConfigurationError(
                f"no adapter {unknown[0]!r}; there are {', '.join(self.names)}"
                if names
                else "there is no batch"
            )


def _check(name: str, config: Any) -> None:
    """That a configuration is one of plain LoRA.

    Raises:
        ConfigurationError: it is not, or has an option that would have no effect here, or another.
    """
    if type(config) is not peft.LoraConfig:  # AdaLoRA's is a subclass
        raise ConfigurationError(f"adapter {name}: a {type(config).__name__} is no LoraConfig")
    if options := not_plain(config):
        raise ConfigurationError(
            f"adapter {name}: {options[0]} is not possible where several adapters are trained together; "
            "leave it out, or train this one alone"
        )
    if config.init_lora_weights not in ALLOWED_INIT_LORA_WEIGHTS:
        raise ConfigurationError(
            f"adapter {name}: init_lora_weights={config.init_lora_weights!r} reads base weights or data; "
            f"choose from {', '.join(map(repr, ALLOWED_INIT_LORA_WEIGHTS))}"
        )


def _refuse(names: tuple[str, ...], what: str) -> None:
    """Raises NonFiniteError if there are names."""
    if names:
        raise NonFiniteError(
            f"{what} of adapter {', '.join(names)} holds NaN or infinity. Go on without it, or lower its "
            "learning rate",
            adapters=names,
        )


def _joined(batches: Mapping[str, Batch]) -> tuple[Tensor, Tensor, Tensor]:
    """Input ids and attention mask, int64 [B, T], of all batches, padded behind; what is needed, bool [B, T].

    Raises:
        ConfigurationError: a batch has another key or shape.
    """
    for name, batch in batches.items():
        if unknown := batch.keys() - _KEYS:
            raise ConfigurationError(
                f"the batch of adapter {name} has {', '.join(sorted(unknown))}; possible are "
                f"{', '.join(sorted(_KEYS))}"
            )
        shape = batch["input_ids"].shape if "input_ids" in batch else ()
        others = (batch.get(key) for key in ("attention_mask", "labels"))
        if len(shape) != 2 or 0 in shape or any(o is not None and o.shape != shape for o in others):
            raise ConfigurationError(
                f"the batch of adapter {name} needs input_ids [B, T], and attention_mask and labels like them"
            )
    length = max(batch["input_ids"].shape[1] for batch in batches.values())
    ids, attended, needed = [], [], []
    for batch in batches.values():
        tokens, mask, labels = batch["input_ids"], batch.get("attention_mask"), batch.get("labels")
        mask = torch.ones_like(tokens) if mask is None else mask.to(tokens.dtype)
        padding = (0, length - tokens.shape[1])
        ids.append(pad(tokens, padding))
        attended.append(pad(mask, padding))
        if labels is not None:
            mask = mask.bool() | (shifted(labels) != IGNORE_INDEX)
        needed.append(pad(mask.bool(), padding))
    # Nothing that is behind the last of a sequence reaches it; padding in front does, where it has no mask.
    return torch.cat(ids), torch.cat(attended), torch.cat(needed).flip(1).cumsum(1).flip(1) > 0


@dataclass(frozen=True)
class _Mixed:
    """Whose the sequences of a batch are, one adapter's after the other's.

    Attributes:
        counts: sequences of each adapter.
        lengths: their tokens without those that were added to fit the longest.
        random: what dropout is drawn from.
    """

    counts: Mapping[str, int]
    lengths: Mapping[str, int]
    random: Mapping[str, torch.Generator]

    def forward(self, layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``lora.Linear.forward``, x [B, T, D], or [B T, D] as some models have it.

        Raises:
            ConfigurationError: x is something else, and nobody knows whose its rows are.
        """
        result: Tensor = layer.base_layer(x, *args, **kwargs)
        adapters = [name for name in self.counts if name in layer.lora_A]
        if not adapters:
            return result
        sequences, tokens = sum(self.counts.values()), max(self.lengths.values())
        if x.shape[:-1] not in ((sequences, tokens), (sequences * tokens,)):
            raise ConfigurationError(
                f"an adapted layer gets {list(x.shape[:-1])} rows for {sequences} sequences of {tokens}"
                " tokens, so the rows cannot be assigned to adapters; leave it out of target_modules"
            )
        dtype = layer.lora_A[adapters[0]].weight.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        rows = self._dropped(layer, x.to(dtype).view(sequences, tokens, -1))
        downs, ups = (
            [part[name].weight.to(dtype) if name in part else None for name in self.counts]
            for part in (layer.lora_A, layer.lora_B)
        )
        added = segmented_lora(
            rows.flatten(0, 1),
            [count * tokens for count in self.counts.values()],
            *(downs, ups),
            [layer.scaling.get(name, 0.0) for name in self.counts],
        )
        return (result + added.view(result.shape)).to(result.dtype)

    def _dropped(self, layer: Any, x: Tensor) -> Tensor:
        """Each adapter's sequences of [B, T, D] with its own dropout; padding comes out as 0."""
        shares = {
            name: layer.lora_dropout[name].p
            for name in self.counts
            if layer.training and name in layer.lora_dropout and hasattr(layer.lora_dropout[name], "p")
        }
        if not any(shares.values()):
            return x
        dropped = []
        for name, count in self.counts.items():
            length, share = self.lengths[name], shares.get(name, 0.0)
            mask = torch.ones(count, length, x.shape[-1])
            if share:
                mask = mask.bernoulli_(1 - share, generator=self.random[name]) / (1 - share)
            dropped.append(pad(mask, (0, 0, 0, x.shape[1] - length)))
        return x * torch.cat(dropped).to(x)
