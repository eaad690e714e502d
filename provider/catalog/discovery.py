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

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from provider.catalog.experts import with_experts
from provider.catalog.probe import probe
from shared.checkpoint import Checkpoint
from shared.errors import CheckpointError, ConfigurationError
from shared.experts import projections
from shared.recipes import meta_model, prefix_of, strip_prefix
from shared.stored import Stored
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


def discover(checkpoint: Checkpoint, *, serve_head: bool = False) -> Discovery:
    """Find the groups of a checkpoint and the parameters that tenants hold.

    Args:
        checkpoint: of any causal language model or encoder that transformers knows.
        serve_head: also serve the output head, for tenants that ask for ``offload_head=True``.

    Raises:
        CheckpointError: unknown architecture, or no frozen linear layer that could be served.
    """
    model = meta_model(checkpoint.folder, torch.bfloat16, len(checkpoint.names()))
    stored = checkpoint.stored
    head = model.get_output_embeddings()
    layers = _linear_layers(model, serve_head=serve_head)
    groups: list[GroupInfo] = []
    served: set[str] = set()
    probed = probe(model, layers)
    for reason in dict.fromkeys(probed.kept.values()):
        names = [name for name, why in probed.kept.items() if why == reason]
        log.warning("tenants keep %d layers, such as %s: %s", len(names), names[0], reason)
    for names in probed.groups:
        members: list[Member] = []
        for name in names:
            found = stored.layer(name)
            if found is None and any(part.isdigit() for part in name.split(".")):
                raise CheckpointError(
                    f"{checkpoint.folder} has no weight for {name}: fewer blocks than config.json says, or "
                    "another architecture"
                )
            if found is None:
                log.warning("layer %s has no weight in the checkpoint; tenants keep it", name)
                continue
            member, inputs = found
            members.append(member)
            if layers[name] is not head:
                served.add(f"{name}.weight")
        if members:
            groups.append(GroupInfo(inputs, tuple(members), head=layers[names[0]] is head))
    if not any(not g.head for g in groups):
        raise CheckpointError(
            f"{checkpoint.folder} has no linear layer to serve: {type(model).__name__} has "
            f"{len(layers)} and the checkpoint holds the weights of none of them"
        )
    groups = with_experts(groups, stored.experts())
    tied = [[name for name in names if name not in served] for names in stored.tied]
    parameters, missing = _tenant_parameters(stored, tied)
    if missing and stored.unused:
        # They may be the parameters, under names and in shapes that transformers does not know.
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
    return Discovery(type(model).__name__, stored.prefix, tuple(groups), parameters, missing)


def groups_of_architecture(folder: Path, *, serve_head: bool = False) -> list[GroupInfo]:
    """The groups that a checkpoint would have, by its ``config.json`` alone; their tensors' names are empty.

    Raises:
        CheckpointError: unknown architecture, or no linear layer.
    """
    model = meta_model(folder, torch.bfloat16)
    head, prefix = model.get_output_embeddings(), prefix_of(model)
    layers = _linear_layers(model, serve_head=serve_head)
    groups = []
    for names in probe(model, layers).groups:
        # [O, D]; Conv1D keeps [D, O]
        sizes = [tuple(layers[name].weight.shape) for name in names]  # type: ignore[arg-type]
        sizes = [
            size[::-1] if isinstance(layers[name], Conv1D) else size
            for name, size in zip(names, sizes, strict=True)
        ]
        members = tuple(
            Member(strip_prefix(name, prefix), size[0], "", isinstance(layers[name], Conv1D))
            for name, size in zip(names, sizes, strict=True)
        )
        groups.append(GroupInfo(sizes[0][1], members, head=layers[names[0]] is head))
    if not groups:
        raise CheckpointError(f"{folder}/config.json is of a model without linear layers")
    experts = [
        (Member(f"{name}.{expert}", outputs, "", each.transposed, expert=expert), inputs)
        for each in projections(model)
        for name in [strip_prefix(each.name, prefix)]
        for count, outputs, inputs in [each.axes]
        for expert in range(count)
    ]
    return with_experts(groups, experts)


def _linear_layers(model: PreTrainedModel, *, serve_head: bool) -> dict[str, nn.Module]:
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and (module is not head or serve_head)
    }


def _tenant_parameters(
    stored: Stored, tied: list[list[str]]
) -> tuple[tuple[ParameterInfo, ...], tuple[str, ...]]:
    """Parameters for tenants, and the names that nothing is stored for.

    Args:
        tied: lists of names; those of one list are one tensor in the model.
    """
    infos: list[ParameterInfo] = []
    missing: list[str] = []
    for names in filter(None, tied):
        first = stored.source(names[0])  # the embeddings', even if only a head tied to them is stored
        if first is None:
            missing.append(names[0])
            continue
        untied = [name for name in names[1:] if stored.source(name) != first]
        hashes = {name: stored.sha256(name) for name in (names[0], *untied)}
        for name, sha256 in hashes.items():
            if name == names[0] or sha256 != hashes[names[0]]:
                shape, dtype = stored.describe(name)
                infos.append(ParameterInfo(name, shape, str(dtype).removeprefix("torch."), sha256))
    return tuple(infos), tuple(missing)


def part_of(groups: Sequence[GroupInfo], index: int, count: int) -> tuple[int, int]:
    """The groups [first, stop) of the ``index``-th of ``count`` parts, from 1, about equally large.

    Raises:
        ConfigurationError: there are fewer groups than parts.
    """
    if not 0 < index <= count <= len(groups):
        raise ConfigurationError(
            "{part} is too small a part: each has at least one of the groups of layers, and there are {}",
            len(groups),
            part=f"{index}/{count}",
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
