"""A transformers model and tokenizer from an executor alone, without a checkpoint on this side."""

from __future__ import annotations

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
from tenant_sdk.surgery import attach_layers
from tenant_sdk.virtual import Group


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
        if not {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"} & set(names):
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
    with tempfile.TemporaryDirectory(prefix="symbiosis-") as folder:
        names = download_files(remote, Path(folder), tokenizer=False)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **config_overrides)
        generation = GenerationConfig.from_pretrained(folder) if "generation_config.json" in names else None
    config.dtype = dtype
    model = _skeleton(manifest.architecture, config, model_class)
    attach_layers(model, groups, offload_head=offload_head, probe=False)
    _fill(model, remote, dtype, progress=progress)
    if generation is not None:
        model.generation_config = generation
    model.name_or_path = manifest.model
    model.eval()
    return model


def _skeleton(architecture: str, config: Any, model_class: type[Any] | None) -> PreTrainedModel:
    found = model_class or getattr(transformers, architecture, None)
    if not (isinstance(found, type) and hasattr(found, "_from_config")):
        raise ModelMismatch(
            f"transformers {transformers.__version__} has no model class {architecture[:80]!r}; "
            "install the version that the provider runs, or give model_class="
        )
    # Auto classes choose by configuration, model classes take it as it is.
    build = getattr(found, "from_config", None) or found._from_config
    # Buffers are real from the start: rotary frequencies and the like are computed, not stored.
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = build(config)
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
            if name is None:
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
    model.tie_weights()
    _initialise_missing(model)


def _set(model: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=value.is_floating_point())
    else:
        owner._buffers[leaf] = value


def _initialise_missing(model: PreTrainedModel) -> None:
    """Parameters that the checkpoint lacks (a new classification head) start as transformers starts them."""
    for module in model.modules():
        missing = [name for name, p in module._parameters.items() if p is not None and p.is_meta]
        for name in missing:
            shape, kind = getattr(module, name).shape, getattr(module, name).dtype
            module._parameters[name] = nn.Parameter(torch.empty(shape, dtype=kind))
        if missing:
            model._init_weights(module)
