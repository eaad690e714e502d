"""Arguments for unmodified ``generate`` with a long context: a cache, and how to read the prompt."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin
from transformers.integrations import sdpa_attention

from shared.compat import cache_name
from shared.errors import ConfigurationError
from shared.wire.messages import GroupInfo
from tenant_sdk.sequences.encrypted_file import EncryptedFile
from tenant_sdk.sequences.kv_budget import KvBudget
from tenant_sdk.sequences.kv_layers import DiskLayer, HostLayer
from tenant_sdk.sequences.positions import rope_stable_length
from tenant_sdk.sequences.prefill import MAX_CHUNK, Demand
from tenant_sdk.sequences.text_cache import TextCache, guard

PLACES = ("device", "host", "disk")
_CONTEXT = 32_768  # of models that do not say how long their context is


@dataclass(frozen=True)
class LongContext:
    """Where keys and values lie, and how much memory a prompt may take.

    Attributes:
        kv: ``device``: with the model, as transformers does it. ``host``: in the host's memory, in buffers.
            ``disk``: in an encrypted file without a name, besides what fits into ``kv_memory_gib``.
        kv_memory_gib: of keys and values that stay in memory with ``disk``.
        kv_folder: for the file; default ``TMPDIR``, else ``/var/tmp``.
        memory_gib: for what a chunk of the prompt takes besides keys and values; default 1, and what
            attention copies of them.
        context: tokens of prompt and answer together at most; default: of the model.
        batch_size: sequences that are read at once; beams count.
    """

    kv: str = "host"
    kv_memory_gib: float = 0.0
    kv_folder: str | Path | None = None
    memory_gib: float | None = None
    context: int | None = None
    batch_size: int = 1

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if self.kv not in PLACES:
            raise ConfigurationError("{kv} must be one of {}", ", ".join(PLACES), kv=self.kv)
        if self.kv_memory_gib < 0:
            raise ConfigurationError("{kv_memory_gib} must be at least 0", kv_memory_gib=self.kv_memory_gib)
        if self.memory_gib is not None and self.memory_gib <= 0:
            raise ConfigurationError("{memory_gib} must be more than 0", memory_gib=self.memory_gib)
        if self.batch_size < 1 or (self.context is not None and self.context < 1):
            raise ConfigurationError(
                f"context={self.context} and batch_size={self.batch_size}: there must be one at least"
            )
        if self.kv != "disk" and (self.kv_memory_gib or self.kv_folder is not None):
            raise ConfigurationError("{kv_memory_gib} and {kv_folder} need {kv}", kv="disk")

    def options(self, model: Any, groups: Sequence[GroupInfo]) -> dict[str, Any]:
        """Keyword arguments of one call of ``model.generate``, see ``Session.generate_options``.

        Args:
            groups: that the executor serves.
        """
        base, reason = _base(model), _unsupported_reason(model)
        if reason is not None:
            if self.kv == "device":
                return {}
            raise ConfigurationError("{}; {kv} leaves keys and values to transformers", reason, kv="device")
        cache = TextCache(config=base.config)
        options: dict[str, Any] = {}
        # Some models would lose the state of such layers at the end of a chunk.
        if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
            options |= self._chunk(model, groups, cache)
        if self.kv != "device":
            self._place(cache, base.config)
            guard(base)
            options[cache_name()] = cache
        return options

    def fitting(self, model: Any, groups: Sequence[GroupInfo], context: int) -> dict[str, Any]:
        """The same for a context of so many tokens, where none was given."""
        return replace(self, context=self.context or context).options(model, groups)

    def resumed(
        self, model: Any, groups: Sequence[GroupInfo], ids: Tensor, tokens: int, before: dict[str, Any]
    ) -> dict[str, Any]:
        """The same for a text that shares its beginning with the one before, whose keys and values it keeps.

        Args:
            ids: tokens of the prompt, ``[1, T]``.
            tokens: of prompt and answer at most.
            before: what this returned for the text before; {}: there was none.
        """
        options = self.fitting(model, groups, tokens)
        if _unsupported_reason(model) is not None:
            return options
        cache = before.get(cache_name())
        if _positions_depend_on_length(model, 1, ids.shape[1]) or cache is None or not cache.keep(ids):
            cache = options.get(cache_name()) or TextCache(config=_base(model).config)
        guard(_base(model))
        return {**options, cache_name(): cache}

    def _chunk(self, model: Any, groups: Sequence[GroupInfo], cache: DynamicCache) -> dict[str, int]:
        base = _base(model)
        config = base.config.get_text_config(decoder=True)
        context = self.context or getattr(config, "max_position_embeddings", None) or _CONTEXT
        if activated(model) or _positions_depend_on_length(model, 1, context):
            return {}
        eager = getattr(config, "_attn_implementation", None) == "eager"
        heads = _largest_size(config, "num_attention_heads") if eager else 0
        windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
        kept = [min(context, window + MAX_CHUNK) if window else context for window in windows]
        copies = self.batch_size * max(kept, default=context) * _repeated_head_bytes(base, config)
        demand = Demand(groups, _largest_size(config, "hidden_size"), heads, self.batch_size, copies)
        memory = 2**30 + copies if self.memory_gib is None else int(self.memory_gib * 2**30)
        chunk = demand.chunk(memory, context)
        return {"prefill_chunk_size": chunk} if chunk < context else {}

    def _place(self, cache: DynamicCache, config: Any) -> None:
        """Replace layers that keep everything; those of a window, or of a state, are bounded already."""
        config = config.get_text_config(decoder=True)
        modes = getattr(config, "kv_sharing_modes", None) or ()
        shared = any(mode is not None for mode in modes) or getattr(config, "num_kv_shared_layers", None)
        if self.kv == "disk" and shared:
            raise ConfigurationError(
                "layers of this model use keys and values of others, so they have to be in memory: use {kv}",
                kv="host",
            )
        replaced = [at for at, layer in enumerate(cache.layers) if type(layer) is DynamicLayer]
        kv_budget = (
            KvBudget(EncryptedFile(self.kv_folder), int(self.kv_memory_gib * 2**30))
            if self.kv == "disk"
            else None
        )
        for at in replaced:
            cache.layers[at] = HostLayer() if kv_budget is None else DiskLayer(kv_budget)


def default_place(model: Any) -> str:
    """Where keys and values are when nothing is said: in buffers where that costs no copies to a device."""
    return "host" if model.device.type == "cpu" and _unsupported_reason(model) is None else "device"


def _largest_size(config: Any, name: str) -> int:
    """A size of a model; the largest where layers differ."""
    value = getattr(config, name, None) or 0
    return int(max(value) if isinstance(value, list | tuple) else value)


def _repeated_head_bytes(model: Any, config: Any) -> int:
    """Bytes for each token that a layer's attention copies, so that every head has its own keys and values.

    Where several heads share a pair, transformers does so for whatever is read under a mask, as all chunks
    but the first are; unless TRANSFORMERS_SDPA_FORCE_GQA is 1, in versions that know of it.
    """
    attention, tensor = getattr(config, "_attn_implementation", None), torch.empty(1)
    if attention == "sdpa":
        copying = not sdpa_attention.use_gqa_in_sdpa(tensor, tensor, tensor)
    else:
        copying = attention == "eager"
    shared = [each for each in model.modules() if getattr(each, "num_key_value_groups", 1) > 1]
    if not copying or not shared:
        return 0
    heads = _largest_size(config, "num_attention_heads")
    width = max(getattr(each, "head_dim", _largest_size(config, "hidden_size") // heads) for each in shared)
    return int(2 * heads * width * model.dtype.itemsize)


def _base(model: Any) -> Any:
    """The transformers model in a PEFT model."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _positions_depend_on_length(model: Any, part: int, whole: int) -> bool:
    """Whether the beginning of a text, of so many tokens, has other positions than it has in the whole."""
    stable_length = rope_stable_length(_base(model))
    return stable_length is not None and part <= stable_length < whole


def activated(model: Any) -> bool:
    """Whether an adapter changes only what follows some tokens of the prompt (aLoRA).

    PEFT counts these rows from the end of each pass, as if each pass read the whole prompt.
    """
    adapter = getattr(model, "active_peft_config", None)
    return getattr(adapter, "alora_invocation_tokens", None) is not None


def _unsupported_reason(model: Any) -> str | None:
    """Why keys and values of a model cannot be placed."""
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        return "the adapter puts keys and values of its own in front of the prompt"
    base = _base(model)
    if base.config.is_encoder_decoder:
        return "the model has an encoder and a decoder"
    parameters = inspect.signature(base.forward).parameters
    if not (
        cache_name() in parameters
        and base._supports_default_dynamic_cache()
        and _has_keys_and_values(base.config)
    ):
        return "the model keeps a state of its own kind, or none, instead of keys and values"
    return None


def _has_keys_and_values(config: Any) -> bool:
    """Whether a layer of the cache is one of keys and values, not of a state alone."""
    layers = DynamicCache(config=config).layers
    return not layers or any(isinstance(layer, CacheLayerMixin) for layer in layers)


def prefill(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    options: dict[str, Any],
    *,
    copies: int = 1,
    decode_on: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Read a prompt, all but its last token, and move the model; see ``Session.prefill``."""
    if input_ids.shape[1] < 2:
        raise ConfigurationError("a prompt that is read ahead has at least two tokens")
    if _unsupported_reason(model) is not None:
        raise ConfigurationError(f"this prompt cannot be read ahead: {_unsupported_reason(model)}")
    if activated(model) or _positions_depend_on_length(model, input_ids.shape[1] - 1, input_ids.shape[1]):
        raise ConfigurationError(
            "this prompt cannot be read ahead: what the model computes of it depends on its last token, too"
        )
    cache = options.setdefault(cache_name(), TextCache(config=_base(model).config))
    guard(_base(model))
    # Without a mask generate infers one, now and when it goes on.
    mask = {} if attention_mask is None else {"attention_mask": attention_mask[:, :-1]}
    # Of one token nothing is kept: generate does not run the model on what it has chosen last.
    model.generate(
        input_ids=input_ids[:, :-1],
        **mask,
        **options,
        max_new_tokens=1,
        do_sample=False,
        num_beams=1,
        return_dict_in_generate=False,
    )
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    if decode_on is not None or dtype is not None:
        before = model.dtype
        _convert(model, decode_on, dtype)
        for layer in cache.layers:
            _move(layer, model.device, before, model.dtype)
    return options


def _convert(model: Any, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
    """Move a model, and have in it what it would have, had it been loaded in this dtype.

    So tables that are computed in float32 in any case, such as frequencies of positions, are not rounded.
    """
    base, buffers = _base(model), dict[str, Tensor]()
    if dtype is not None:
        with torch.device("meta"):
            loaded = type(base)._from_config(copy.deepcopy(base.config), dtype=dtype)
        own_dtypes = {name: each.dtype for name, each in loaded.named_buffers()}
        # Buffers of the checkpoint take the dtype, as parameters do.
        tables = base.named_non_persistent_buffers()
        buffers = {name: each for name, each in tables if own_dtypes.get(name, dtype) != dtype}
    model.to(device=device, dtype=dtype)
    for name, table in buffers.items():
        path, _, leaf = name.rpartition(".")
        base.get_submodule(path)._buffers[leaf] = table.to(model.device)


def _move(layer: Any, device: torch.device, before: torch.dtype, dtype: torch.dtype) -> None:
    """Move what a layer of a cache has; ours follow the tokens that they are given next.

    What was of another dtype than the model, such as float32 states in a model of bfloat16, keeps it.
    """
    if isinstance(layer, HostLayer):
        return

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, dtype if value.dtype == before else value.dtype)
        if isinstance(value, dict):
            return {key: moved(each) for key, each in value.items()}
        return value

    for name, value in vars(layer).items():
        setattr(layer, name, moved(value))
    layer.device = device
    if getattr(layer, "dtype", None) == before:
        layer.dtype = dtype
