"""Which layers of a checkpoint are served, and which of them receive the same tensor.

No table of architectures: one tiny forward pass on the ``meta`` device, which has shapes but no
values, shows which layers are called with the same tensor object.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from provider.catalog.probe import probe
from shared.checkpoint import Checkpoint, below
from shared.errors import CheckpointError, ConfigurationError
from shared.wire.messages import GroupInfo, Member, ParameterInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Discovery:
    """What a checkpoint offers: groups for the executor, parameters for tenants."""

    architecture: str
    base_prefix: str
    groups: tuple[GroupInfo, ...]
    parameters: tuple[ParameterInfo, ...]
    unavailable: tuple[str, ...]
    parameter_tensors: dict[str, str]  # parameter name -> tensor name in the checkpoint


def discover(checkpoint: Checkpoint, *, serve_head: bool = False) -> Discovery:
    """Find the groups of a checkpoint and the parameters that tenants hold.

    Args:
        checkpoint: of any causal language model or encoder that transformers knows.
        serve_head: also serve the output head, for tenants that ask for ``offload_head=True``.

    Raises:
        CheckpointError: unknown architecture, or no frozen linear layer that could be served.
    """
    model = _skeleton(checkpoint.folder)
    prefix = model.base_model_prefix if hasattr(model, model.base_model_prefix) else ""
    head = model.get_output_embeddings()
    layers = _linear_layers(model, serve_head=serve_head)
    aliases = _names_of_tensors(model)
    groups: list[GroupInfo] = []
    served: set[str] = set()
    probed = probe(model, layers)
    for reason in dict.fromkeys(probed.kept.values()):
        names = [name for name, why in probed.kept.items() if why == reason]
        log.warning("tenants keep %d layers, such as %s: %s", len(names), names[0], reason)
    for names in probed.groups:
        members: list[Member] = []
        for name in names:
            weight = layers[name].weight
            known_as = [f"{name}.weight", *aliases[id(weight)]]
            stored = [checkpoint.stored_as(alias, prefix) for alias in known_as]
            tensor = next((t for t in stored if t is not None), None)
            if tensor is None and any(part.isdigit() for part in name.split(".")):
                raise CheckpointError(
                    f"{checkpoint.folder} has no weight for {name}: fewer blocks than config.json says, or "
                    "another architecture"
                )
            if tensor is None:
                log.warning("layer %s has no weight in the checkpoint; tenants keep it", name)
                continue
            transposed = isinstance(layers[name], Conv1D)
            shape = _checked_shape(checkpoint, tensor, tuple(weight.shape))  # type: ignore[arg-type]
            outputs, inputs = reversed(shape) if transposed else shape
            members.append(Member(below(name, prefix), outputs, tensor, transposed))
            if layers[name] is not head:
                served.add(f"{name}.weight")
        if members:
            groups.append(GroupInfo(inputs, tuple(members), head=layers[names[0]] is head))
    if not any(not g.head for g in groups):
        raise CheckpointError(
            f"{checkpoint.folder} has no linear layer to serve: {type(model).__name__} has "
            f"{len(layers)} and the checkpoint holds the weights of none of them"
        )
    tied = [[n for n in names if n not in served] for names in aliases.values()]
    parameters, tensors, missing = _tenant_parameters(checkpoint, model, tied, prefix)
    used = {m.tensor for g in groups for m in g.members} | set(tensors.values())
    if missing and set(checkpoint.names()) - used:
        # transformers renames or merges tensors of this checkpoint while loading it.
        log.warning(
            "tenants cannot load this model from here, only attach one that they loaded: %d parameters "
            "have other names or shapes in the checkpoint, such as %s",
            len(missing),
            missing[0],
        )
    else:
        for name in missing:
            log.warning("%s is not in the checkpoint; tenants initialise it as transformers does", name)
        missing = ()
    return Discovery(type(model).__name__, prefix, tuple(groups), parameters, missing, tensors)


def groups_of_architecture(folder: Path, *, serve_head: bool = False) -> list[GroupInfo]:
    """The groups that a checkpoint would have, by its ``config.json`` alone; their tensors' names are empty.

    Raises:
        CheckpointError: unknown architecture, or no linear layer.
    """
    model = _skeleton(folder)
    head = model.get_output_embeddings()
    layers = _linear_layers(model, serve_head=serve_head)
    groups = []
    for names in probe(model, layers).groups:
        # [O, D]; Conv1D keeps [D, O]
        sizes = [tuple(layers[name].weight.shape) for name in names]  # type: ignore[arg-type]
        sizes = [
            size[::-1] if isinstance(layers[name], Conv1D) else size
            for name, size in zip(names, sizes, strict=True)
        ]
        members = tuple(Member(name, size[0], "") for name, size in zip(names, sizes, strict=True))
        groups.append(GroupInfo(sizes[0][1], members, head=layers[names[0]] is head))
    if not groups:
        raise CheckpointError(f"{folder}/config.json is of a model without linear layers")
    return groups


def _linear_layers(model: PreTrainedModel, *, serve_head: bool) -> dict[str, nn.Module]:
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and (module is not head or serve_head)
    }


def _skeleton(folder: Path) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return _build(folder, config)
    except CheckpointError:
        raise
    except Exception as error:
        # Every architecture fails in a way of its own on a configuration that makes no sense.
        raise CheckpointError(f"{folder}/config.json cannot be used: {error!r}") from error


def _build(folder: Path, config: Any) -> PreTrainedModel:
    for name in config.architectures or []:
        model_class = getattr(transformers, name, None)
        if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
            config._attn_implementation = "eager"
            # Only shapes matter here, and mixtures of experts have their grouped product in bfloat16 alone.
            config.dtype = torch.bfloat16
            with torch.device("meta"):
                model: PreTrainedModel = model_class._from_config(config)
            model.eval()
            return model
    raise CheckpointError(
        f"{folder}/config.json names no architecture that transformers "
        f"{transformers.__version__} has (architectures: {config.architectures})"
    )


def _checked_shape(checkpoint: Checkpoint, tensor: str, expected: tuple[int, ...]) -> tuple[int, ...]:
    shape = checkpoint.describe(tensor)[0]
    if shape != expected:
        raise CheckpointError(
            f"{checkpoint.folder}: {tensor} has shape {list(shape)}, "
            f"the configuration asks for {list(expected)}"
        )
    return shape


def _names_of_tensors(model: PreTrainedModel) -> dict[int, list[str]]:
    """Names by tensor: tied parameters are one tensor with several names."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return names


def _tenant_parameters(
    checkpoint: Checkpoint, model: PreTrainedModel, tied: list[list[str]], prefix: str
) -> tuple[tuple[ParameterInfo, ...], dict[str, str], tuple[str, ...]]:
    """Parameters for tenants, the tensors that hold them, and the names that have none.

    Args:
        tied: lists of names; those of one list are one tensor in the model.
    """
    infos: list[ParameterInfo] = []
    tensors: dict[str, str] = {}
    state = model.state_dict()
    missing: list[str] = []
    for names in filter(None, tied):
        stored = [(n, t) for n in names if (t := checkpoint.stored_as(n, prefix)) is not None]
        if not stored:
            missing.append(names[0])
        for at, (name, tensor) in enumerate(stored):
            if at == 0:
                name = names[0]  # the embeddings', even if only a head tied to them is stored
            elif checkpoint.same(tensor, stored[0][1]):
                continue
            shape = _checked_shape(checkpoint, tensor, tuple(state[name].shape))
            dtype = checkpoint.describe(tensor)[1]
            infos.append(
                ParameterInfo(name, shape, str(dtype).removeprefix("torch."), checkpoint.sha256(tensor))
            )
            tensors[name] = tensor
    return tuple(infos), tensors, tuple(missing)


def part_of(groups: Sequence[GroupInfo], index: int, count: int) -> tuple[int, int]:
    """The groups [first, stop) of the ``index``-th of ``count`` parts, from 1, about equally large.

    Raises:
        ConfigurationError: there are fewer groups than parts.
    """
    if not 0 < index <= count <= len(groups):
        raise ConfigurationError(
            f"part={index}/{count} cannot be: a part has at least one of the groups of layers, and there are "
            f"{len(groups)}"
        )
    sizes = [group.inputs * sum(member.outputs for member in group.members) for group in groups]
    ends, total = list(accumulate(sizes)), sum(sizes)
    # Each has one at least, whatever the others weigh.
    cuts = [0]
    for part in range(1, count):
        at = bisect_left(ends, total * part / count) + 1
        cuts.append(min(max(at, cuts[-1] + 1), len(groups) - (count - part)))
    cuts.append(len(groups))
    return cuts[index - 1], cuts[index]
