"""A transformers model and tokenizer from an executor alone, without a checkpoint on this side."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel

from shared.errors import ConfigurationError, ModelMismatch
from shared.messages import TENANT_FILES
from tenant_sdk.remote import RemoteExecutor
from tenant_sdk.remote_weight import RemoteWeight
from tenant_sdk.surgery import attach_layers
from tenant_sdk.virtual import Group

log = logging.getLogger(__name__)

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
# What would let an executor choose code, kernels or another loading path on the tenant's machine.
_NOT_FROM_A_PEER = (
    "auto_map",
    "quantization_config",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
)


def download_files(remote: RemoteExecutor, folder: Path, *, tokenizer: bool) -> list[str]:
    """Write the configuration (or tokenizer) files into a folder; their names.

    Only names of ``TENANT_FILES`` are written, so an executor cannot choose a path.
    """
    wanted = [
        info
        for info in remote.manifest.files
        if info.name in TENANT_FILES and (tokenizer or info.name in ("config.json", "generation_config.json"))
    ]
    for info in wanted:
        (folder / info.name).write_bytes(remote.file(info))
    return [info.name for info in wanted]


def load_tokenizer(remote: RemoteExecutor) -> Any:
    """The executor's tokenizer.

    Raises:
        ConfigurationError: the checkpoint that it serves has none.
    """
    with tempfile.TemporaryDirectory(prefix="symbiosis-") as folder:
        names = download_files(remote, Path(folder), tokenizer=True)
        if not set(_TOKENIZERS) & set(names):
            raise ConfigurationError(
                f"the executor serves {remote.manifest.model} without a tokenizer; load one yourself with "
                "AutoTokenizer.from_pretrained"
            )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.name_or_path = remote.manifest.model
    return tokenizer


def load_model(
    remote: RemoteExecutor,
    groups: Sequence[Group],
    *,
    dtype: torch.dtype,
    offload_head: bool,
    progress: bool,
    model_class: type[Any] | None,
    config_overrides: dict[str, Any],
) -> PreTrainedModel:
    """Build the model's skeleton, put virtual layers in, download the parameters that tenants hold.

    Raises:
        ModelMismatch: this transformers does not build the model that the executor serves.
    """
    manifest = remote.manifest
    if manifest.unavailable:
        raise ModelMismatch(
            f"the executor cannot supply {len(manifest.unavailable)} of the parameters that tenants hold, "
            f"such as {manifest.unavailable[0]}; load the checkpoint with transformers and use session.attach"
        )
    if "trust_remote_code" in config_overrides:
        raise ConfigurationError("trust_remote_code: code from an executor is never run")
    with tempfile.TemporaryDirectory(prefix="symbiosis-") as folder:
        names = download_files(remote, Path(folder), tokenizer=False)
        config = _configuration(Path(folder), config_overrides)
        generation = GenerationConfig.from_pretrained(folder) if "generation_config.json" in names else None
    config.dtype = dtype
    model = _skeleton(manifest.architecture, config, model_class)
    attach_layers(model, groups, offload_head=offload_head, probe=False)
    _fill(model, remote, dtype, progress=progress)
    if generation is not None:
        model.generation_config = generation
    # PEFT asks the Hugging Face Hub about a model's name whenever it saves an adapter; an empty name
    # keeps it from telling a third party which model this tenant uses.
    model.name_or_path = ""
    model.config.name_or_path = manifest.model
    model.eval()
    return model


def _configuration(folder: Path, overrides: dict[str, Any]) -> Any:
    """The downloaded configuration, less what a peer has no say in."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in raw.items() if k not in _NOT_FROM_A_PEER}))
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, **overrides)
    except Exception as error:
        # Every configuration class refuses nonsense in a way of its own.
        raise ModelMismatch(
            f"transformers {transformers.__version__} cannot read the executor's configuration "
            f"({str(error)[:200]}); install the version that the provider runs"
        ) from error


def _skeleton(architecture: str, config: Any, model_class: type[Any] | None) -> PreTrainedModel:
    found = model_class or getattr(transformers, architecture, None)
    if model_class is None and not (
        isinstance(found, type) and issubclass(found, PreTrainedModel) and found.config_class is type(config)
    ):
        raise ModelMismatch(
            f"transformers {transformers.__version__} has no model class {architecture[:80]!r} for a "
            f"{type(config).__name__}; install the version that the provider runs, or give model_class="
        )
    # Auto classes choose by configuration, model classes take it as it is.
    build = getattr(found, "from_config", None) or getattr(found, "_from_config", None)
    if build is None:
        raise ModelMismatch(f"model_class={found!r} is not a transformers model class")
    # Buffers are real from the start: rotary frequencies and the like are computed, not stored.
    try:
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = build(config)
    except Exception as error:
        raise ModelMismatch(
            f"{getattr(found, '__name__', found)} cannot be built from a {type(config).__name__}: "
            f"{str(error)[:200]}"
        ) from error
    return model


def _fill(model: PreTrainedModel, remote: RemoteExecutor, dtype: torch.dtype, *, progress: bool) -> None:
    infos = {info.name: info for info in remote.manifest.parameters}
    total = sum(torch.Size(info.shape).numel() for info in infos.values())
    state = model.state_dict(keep_vars=True)
    prefix = f"{model.base_model_prefix}."
    with tqdm(total=total, desc="tenant parameters", unit="el", unit_scale=True, disable=not progress) as bar:
        for info in infos.values():
            # Another class around the same base model (a classifier, say) has other names for the rest.
            names = (info.name, prefix + info.name, info.name.removeprefix(prefix))
            name = next((n for n in names if n in state), None)
            if name is None or isinstance(state[name], RemoteWeight):  # not needed here
                bar.update(torch.Size(info.shape).numel())
                continue
            tensor = state[name]
            if tuple(tensor.shape) != info.shape:
                raise ModelMismatch(
                    f"{name} has shape {list(tensor.shape)} here and {list(info.shape)} at the executor"
                )
            target = torch.empty(info.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
            at = 0
            for piece in remote.parameter(info):
                (target if info.shape else target[None])[at : at + len(piece)] = piece
                at += len(piece)
                bar.update(piece.numel())
            _set(model, name, target)
    _tie(model)
    _initialise_missing(model)


def _tie(model: PreTrainedModel) -> None:
    """Tie as transformers does, whichever of the tied names the checkpoint holds."""
    for name in list(model.all_tied_weights_keys):
        if isinstance(model.get_parameter_or_buffer(name), RemoteWeight):  # an offloaded head
            del model.all_tied_weights_keys[name]
    missing = {
        name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.is_meta
    }
    model.tie_weights(missing_keys=missing, recompute_mapping=False)


def _set(model: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=value.is_floating_point())
    else:
        owner._buffers[leaf] = value


def _initialise_missing(model: PreTrainedModel) -> None:
    """Parameters that the checkpoint lacks (a new classification head) start as transformers starts them."""
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if not missing:
        return
    # Some checkpoints leave out biases, which start at zero; none leaves out a weight inside a block.
    in_blocks = [n for n in missing if not n.endswith("bias") and any(p.isdigit() for p in n.split("."))]
    if in_blocks:
        raise ModelMismatch(
            f"the executor supplies no values for {len(in_blocks)} parameters inside the model's blocks, "
            f"such as {in_blocks[0]}: it serves another model than its configuration says"
        )
    log.warning("initialised here, because the executor has no values for them: %s", ", ".join(missing))
    modules = [m for m in model.modules() if any(p.is_meta for p in m.parameters(recurse=False))]
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                fresh = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=True)
                module.register_parameter(name, fresh)
            else:
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        model._init_weights(module)
