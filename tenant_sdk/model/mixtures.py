"""Swapping the weights of a model's experts for placeholders, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from shared.checkpoint import Checkpoint
from shared.errors import ModelMismatch
from shared.experts import Projection, projections
from shared.recipes import strip_prefix
from shared.wire.header import Direction, RequestClass
from shared.wire.messages import GroupInfo, Manifest, Member
from tenant_sdk.model.experts import IMPLEMENTATION, Experts, Padding, RemoteExperts, experts_forward
from tenant_sdk.model.virtual import RemoteGroup
from tenant_sdk.trust.attestation import base_model

_BEFORE = "_implementation_before"  # of a module: what multiplied its experts before they were attached


class ExpertPlacement(NamedTuple):
    """Where experts are multiplied: at the executor or here, and there with which padding."""

    remote: bool = True
    padding: Padding | None = None


class Planned(NamedTuple):
    """A projection that is to be swapped, and the groups of its experts."""

    projection: Projection
    name: str  # below the base model, as manifests name it
    groups: list[RemoteGroup]


def plan_experts(
    model: nn.Module, groups: Sequence[RemoteGroup], exclude: Sequence[str] = ()
) -> list[Planned]:
    """Which projections of a model an executor serves.

    Args:
        exclude: see ``attach_layers``; names of experts are without their number.

    Raises:
        ModelMismatch: one is not here, has another shape, or not all of its experts are served.
    """
    served: dict[str, list[RemoteGroup]] = {}
    for group in groups:
        if group.info.of_expert:
            name = group.info.members[0].name.rpartition(".")[0]
            if not any(fits(name, entry) for entry in exclude):
                served.setdefault(name, []).append(group)
    here = own_projections(model)
    for name, found in served.items():
        _check(name, here.get(name), [group.info for group in found])
    return [Planned(here[name], name, found) for name, found in served.items()]


def own_projections(model: nn.Module) -> dict[str, Projection]:
    """The projections of a model, whatever is in their place, by their names below the base model."""
    inner = base_model(model)
    prefix = getattr(inner, "base_model_prefix", "")
    prefix = prefix if hasattr(inner, prefix) else ""
    # PEFT puts a wrapper around the module for each parameter that it adapts.
    return {strip_prefix(each.name.replace(".base_layer", ""), prefix): each for each in projections(inner)}


def _check(name: str, here: Projection | None, infos: Sequence[GroupInfo]) -> None:
    if here is None:
        raise ModelMismatch(
            f"the executor serves {name[:80]}, which this model does not have; attach a model of the "
            "architecture that the executor serves"
        )
    if isinstance(here.weight, RemoteExperts):
        raise ModelMismatch(f"{name} is attached already; detach the model first")
    count, outputs, inputs = here.axes
    other = ModelMismatch(
        f"{name} has {count} experts of {outputs} outputs and {inputs} inputs here, and others at the "
        "executor; attach a model of the architecture and size that the executor serves"
    )
    if len(infos) != count:  # before anything is made of a number that a peer says
        raise other
    expected = [
        GroupInfo(inputs, (Member(f"{name}.{at}", outputs, "", here.transposed, expert=at),))
        for at in range(count)
    ]
    # Not what a checkpoint calls it. No digest covers what is said to be the head.
    reasons = [
        GroupInfo(
            info.inputs,
            tuple(Member(m.name, m.outputs, "", m.transposed, expert=m.expert) for m in info.members),
            head=info.head,
        )
        for info in infos
    ]
    if reasons != expected:
        raise other


def attach_experts(model: nn.Module, plan: Iterable[Planned], padding: Padding | None) -> int:
    """Swap projections for placeholders; how many."""
    plan = list(plan)
    for projection, name, groups in plan:
        weight = projection.weight
        device = torch.device("cpu") if weight.is_meta else weight.device
        experts = Experts(
            name,
            groups,
            None if projection.batched else padding,  # they get equally many rows anyway
            skips=projection.zeros and padding is None,
        )
        placeholder = RemoteExperts(experts, weight.shape, weight.dtype, device, projection.transposed)
        projection.module._parameters[projection.parameter] = nn.Parameter(placeholder, requires_grad=False)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    modules: list[Any] = [each.projection.module for each in plan if not each.projection.batched]
    # Each module's own configuration, which may be another than the model's; or several have the same.
    before = [module.config._experts_implementation for module in modules]
    for module, implementation in zip(modules, before, strict=True):
        module.config._experts_implementation = IMPLEMENTATION
        vars(module).setdefault(_BEFORE, implementation)
    return len(plan)


def fits(name: str, entry: str) -> bool:
    """Whether an entry of ``exclude`` is a layer's name, with the base model's or without, or parts of it.

    Such as ``self_attn``, ``experts.down_proj`` or ``layers.0``.
    """
    return f".{entry}." in f".{name}." or f".{entry}".endswith(f".{name}")


def is_close(answer: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether they differ by no more than this share, in norm; NaN differs."""
    return bool((answer - expected).norm() <= tolerance * expected.norm())


def probe_experts(planned: Planned, tolerance: float) -> None:
    """Compare one random row for each expert with the executor's answer.

    Raises:
        ModelMismatch: another weight is there than here.
    """
    projection, name, groups = planned
    count, _, inputs = projection.axes
    rows = torch.randn((count, inputs), generator=torch.Generator().manual_seed(0))
    got = Experts(name, groups, None).product(Direction.FORWARD, rows, [1] * count, RequestClass.UNDECLARED)
    for at, (row, answer) in enumerate(zip(rows, got, strict=True)):
        weight = projection.weight[at].detach().float().cpu()
        expected = row @ (weight if projection.transposed else weight.T)
        if not is_close(answer, expected, tolerance):
            raise ModelMismatch(
                f"{name}.{at} has other weights here than at the executor; "
                "attach the very checkpoint that the executor serves"
            )


def detach_experts(model: nn.Module, manifest: Manifest, source: Checkpoint) -> int:
    """Put real weights back; how many projections."""
    members: dict[str, list[Member]] = {}
    for group in manifest.groups:
        for member in group.members:
            if member.expert is not None:
                members.setdefault(member.name.rpartition(".")[0], []).append(member)
    count = 0
    for name, projection in own_projections(model).items():
        module, parameter = projection.module, projection.parameter
        placeholder = module._parameters[parameter]
        if isinstance(placeholder, RemoteExperts):
            weights = [source.member_weight(member) for member in members[name]]
            real = torch.stack(
                [w.T if m.transposed else w for w, m in zip(weights, members[name], strict=True)]
            )
            real = real.to(placeholder.device, placeholder.dtype)
            module._parameters[parameter] = nn.Parameter(real, requires_grad=False)
            if _BEFORE in vars(module):
                config: Any = module.config
                config._experts_implementation = vars(module).pop(_BEFORE)
            count += 1
    return count


def expert_parameters(manifest: Manifest, exclude: Sequence[str] = ()) -> set[str]:
    """The full names of a manifest's parameters that hold the weights of experts that are swapped."""
    names = {m.name.rpartition(".")[0] for g in manifest.groups for m in g.members if m.expert is not None}
    names = {name for name in names if not any(fits(name, entry) for entry in exclude)}
    prefix = manifest.base_prefix
    return {info.name for info in manifest.parameters if strip_prefix(info.name, prefix) in names}
