"""Swapping the frozen layers of a model for virtual ones, and back."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from shared.checkpoint import Checkpoint
from shared.compat import transforms_run
from shared.errors import CheckpointError, ConfigurationError, ModelMismatch
from shared.wire.header import Direction
from shared.wire.messages import Manifest, Member, ParameterInfo
from tenant_sdk.model.checkpointing import forget_products, keep_products
from tenant_sdk.model.mixtures import (
    ExpertPlacement,
    attach_experts,
    detach_experts,
    fits,
    is_close,
    own_projections,
    plan_experts,
    probe_experts,
)
from tenant_sdk.model.prompt_adapters import fit_prompt_adapters
from tenant_sdk.model.remote_weight import RemoteWeight
from tenant_sdk.model.virtual import RemoteGroup, VirtConv1D, VirtLinear, virtual_layer
from tenant_sdk.trust.attestation import base_model, linear_layers, open_checkpoint

log = logging.getLogger(__name__)

# A wrong model is off by the size of the answer itself; bfloat16 weights by a hundredth of it.
PROBE_TOLERANCE = 0.05
MAX_NAMES = 8  # in a warning


def attach_layers(
    model: nn.Module,
    groups: Sequence[RemoteGroup],
    *,
    offload_head: bool = False,
    exclude: Sequence[str] = (),
    probe: bool = True,
    held: Sequence[ParameterInfo] = (),
    placement: ExpertPlacement = ExpertPlacement(),  # noqa: B008 -- a value
) -> int:
    """Replace every served linear layer of a model, and the weights of its experts.

    Args:
        model: transformers model or PEFT model around one.
        groups: of the session.
        offload_head: replace the output head too.
        exclude: layers whose names one of these fits (see ``fits``) stay local.
        probe: compare one random row per layer with the executor's answer before its weight goes.
        held: what the executor lists for tenants to hold; a warning names the linear layers among it.
        placement: of experts.

    Returns:
        How many layers were replaced; a projection of experts is one.

    Raises:
        ModelMismatch: a layer is missing or has another shape or other weights; nothing was changed.
        ConfigurationError: an entry of ``exclude`` fits no layer.
    """
    # PEFT reads it of every model.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    transforms_run()  # is tried now, and not while a compiler looks on
    plan = plan_layers(model, groups, offload_head=offload_head, exclude=exclude)
    unused, head = of_another_head(model, groups), own_head(model)
    experts = plan_experts(model, groups, exclude) if placement.remote else []
    if probe:
        for group, index, layer in plan:
            _probe(group, index, layer, alone=id(layer) in head)
        for each in experts:
            probe_experts(each, PROBE_TOLERANCE)
    replaced = {id(layer): (group, index) for group, index, layer in plan}
    for parent in list(base_model(model).modules()):
        for name, child in list(parent.named_children()):
            if id(child) in replaced:
                setattr(parent, name, virtual_layer(*replaced[id(child)], child))
    attach_experts(model, experts, placement.padding)
    keep_products(base_model(model))
    fit_prompt_adapters(model)
    _warn_about_local(base_model(model), placement, exclude)
    _warn_about_kept(model, held)
    if unused:
        log.warning(
            "a %s does not use these layers of the executor, which are of another model's head: %s",
            *(type(base_model(model)).__name__, _few(unused)),
        )
    return len(plan) + len(experts)


def plan_layers(
    model: nn.Module,
    groups: Sequence[RemoteGroup],
    *,
    offload_head: bool = False,
    exclude: Sequence[str] = (),
    other_head: bool = True,
) -> list[tuple[RemoteGroup, int, nn.Module]]:
    """Which layers are to be replaced: group, member, layer.

    Other arguments and errors: see ``attach_layers``.

    Args:
        other_head: the model may have another head than the executor's: that is left alone.
    """
    layers = linear_layers(model)
    apart = set(excluded_layers(groups, exclude))
    unused = of_another_head(model, groups) if other_head else []
    plan: list[tuple[RemoteGroup, int, nn.Module]] = []
    for group in groups:
        if group.info.head and not offload_head:
            continue
        for index, member in enumerate(group.info.members):
            if member.expert is None and (group, index) not in apart and member.name not in unused:
                plan.append((group, index, checked_layer(layers.get(member.name), member, group.info.inputs)))
    head = getattr(base_model(model), "get_output_embeddings", lambda: None)()
    for group, index, layer in plan:
        name = group.info.members[index].name
        if ".lora_" in name or ".modules_to_save" in name:
            raise ModelMismatch(f"the executor claims {name}, which tenants keep for themselves")
        if (layer is head) != group.info.head:  # digests cover all weights but the head's
            said, known = ("no", "the") if layer is head else ("the", "no")
            raise ModelMismatch(
                f"the executor says that {name} is {said} output head, and here it is {known} output head; "
                "attach a model of the architecture that the executor serves"
            )
    return plan


def own_head(model: nn.Module) -> set[int]:
    """By identity, the modules outside the base model, but for the output head: a classifier, say."""
    inner = base_model(model)
    base = getattr(inner, getattr(inner, "base_model_prefix", ""), None)
    if not isinstance(base, nn.Module):
        return set()
    head = getattr(inner, "get_output_embeddings", lambda: None)()
    return set(map(id, inner.modules())) - set(map(id, base.modules())) - {id(inner), id(head)}


def of_another_head(model: nn.Module, groups: Sequence[RemoteGroup]) -> list[str]:
    """Names of served layers that belong to the head of another model around the same base model.

    This model does not have them, and they are in no block; or its own head's have another shape.
    """
    layers, head = linear_layers(model), own_head(model)
    served = [
        (member, group.info.inputs)
        for group in groups
        for member in group.info.members
        if member.expert is None and not group.info.head
    ]
    if not any(member.name in layers for member, _ in served):
        return []  # another architecture
    absent = [m.name for m, _ in served if m.name not in layers and not _in_block(m.name)]
    return absent + [
        member.name
        for member, inputs in served
        if (layer := layers.get(member.name)) is not None
        and id(layer) in head
        and tuple(layer.weight.shape) != _shape(layer, member, inputs)  # type: ignore[arg-type]
    ]


def _in_block(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _shape(layer: nn.Module, member: Member, inputs: int) -> tuple[int, int]:
    return (inputs, member.outputs) if isinstance(layer, Conv1D) else (member.outputs, inputs)


def excluded_layers(groups: Sequence[RemoteGroup], exclude: Sequence[str]) -> list[tuple[RemoteGroup, int]]:
    """The served linear layers whose names an entry of ``exclude`` fits: group and member.

    Experts, of which there are none among them, go by the name of their projection.

    Raises:
        ConfigurationError: an entry fits no layer, or it is no list.
    """
    if isinstance(exclude, str):
        raise ConfigurationError(f"exclude is a list: write exclude=[{exclude!r}]")
    members = [(group, index) for group in groups for index in range(len(group.info.members))]
    served = [group.info.members[index] for group, index in members]
    names = [m.name if m.expert is None else m.name.rpartition(".")[0] for m in served]
    for entry in exclude:
        if not any(fits(name, entry) for name in names):
            kinds = dict.fromkeys(name.rpartition(".")[2] for name in names)
            raise ConfigurationError(
                f"exclude={entry!r} fits no served layer: they have names such as {names[0]}, and end with "
                f"{_few(list(kinds))}"
            )
    return [
        (group, index)
        for (group, index), name in zip(members, names, strict=True)
        if group.info.members[index].expert is None and any(fits(name, entry) for entry in exclude)
    ]


def checked_layer(layer: nn.Module | None, member: Member, inputs: int) -> nn.Module:
    """The layer of a model that a member stands for.

    Raises:
        ModelMismatch: there is none, or one of another kind or shape.
    """
    if layer is None:
        raise ModelMismatch(
            f"the executor serves {member.name}, which this model does not have; attach a model of the "
            f"architecture that the executor serves, or do without the layer: exclude=[{member.name!r}]"
        )
    if isinstance(layer, (VirtLinear, VirtConv1D)):
        raise ModelMismatch(f"{member.name} is attached already; detach the model first")
    weight = layer.weight
    shape = tuple(weight.shape)  # type: ignore[arg-type]
    expected = _shape(layer, member, inputs)
    if member.transposed != isinstance(layer, Conv1D):
        # Or an executor could multiply with the transpose of a square weight, which no digest shows.
        raise ModelMismatch(
            f"the executor says that {member.name} is another kind of layer than it is here; attach "
            "a model of the architecture that the executor serves"
        )
    if shape != expected:
        raise ModelMismatch(
            f"{member.name} has shape {list(shape)} here and {list(expected)} at the executor"
        )
    return layer


def _probe(group: RemoteGroup, index: int, layer: nn.Module, *, alone: bool = False) -> None:
    weight = layer.weight.detach().float().cpu()  # type: ignore[operator]
    if isinstance(layer, Conv1D):
        weight = weight.T
    x = torch.randn((1, weight.shape[1]), generator=torch.Generator().manual_seed(index))
    expected = x @ weight.T
    (got,) = group.product(Direction.FORWARD, 1 << index, [x])
    if not is_close(got, expected, PROBE_TOLERANCE):
        name = group.info.members[index].name
        raise ModelMismatch(
            f"{name} has other weights here than at the executor; "
            + (
                f"if this head is to be another, keep it local: exclude=[{name!r}]"
                if alone
                else "attach the very checkpoint that the executor serves. If transformers reported that it "
                "lacks weights of this class, use session.load_model(model_class=...), which finds them"
            )
        )


def _warn_about_local(model: nn.Module, placement: ExpertPlacement, exclude: Sequence[str]) -> None:
    """Name the parameters of three axes that stay here, and what experts take: most weights of a mixture."""
    experts = {name: each.weight for name, each in own_projections(model).items()}
    known = set(map(id, experts.values())) | {
        id(each) for module in model.modules() if isinstance(module, _ConvNd) for each in module.parameters()
    }
    others = [
        name
        for name, each in model.named_parameters()
        if each.dim() == 3 and len(each) > 1 and id(each) not in known and not isinstance(each, RemoteWeight)
    ]
    if others:
        log.warning("these parameters are no linear layers and stay in tenant memory: %s", _few(others))
    here = {
        name: each
        for name, each in experts.items()
        if not isinstance(each, RemoteWeight) and not any(fits(name, entry) for entry in exclude)
    }
    size = sum(each.numel() * each.element_size() for each in here.values()) / 2**20
    if here and not placement.remote:
        log.warning(
            "the weights of experts stay in this machine's memory, %.1f MiB: experts are local. 'padded' "
            "leaves them with the provider, which is sent more rows than are needed; 'routed' shows it how "
            "many tokens each expert gets, which depends on the text (docs/explanation/privacy.md)",
            size,
        )
    elif here:
        log.warning(
            "the executor does not serve the experts %s; their weights stay in this machine's memory, %.1f "
            "MiB",
            *(_few(list(here)), size),
        )


def _warn_about_kept(model: nn.Module, held: Sequence[ParameterInfo]) -> None:
    """Name the linear layers whose weights the executor leaves to tenants."""
    inner = base_model(model)
    prefix = getattr(inner, "base_model_prefix", "")
    head = getattr(inner, "get_output_embeddings", lambda: None)()
    listed = {info.name.removeprefix(f"{prefix}.") for info in held}
    kept = [n for n, each in linear_layers(model).items() if f"{n}.weight" in listed and each is not head]
    if kept:
        log.warning(
            "no product can stand for %d linear layers (the model reads their weights, or they do more "
            "than multiply); their weights stay in tenant memory: %s",
            *(len(kept), _few(kept)),
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")


def warn_if_trained(model: nn.Module) -> None:
    """Have one warning logged when a gradient reaches a parameter that the model has now, if any does.

    Not at once: whoever generates trains nothing, and ``peft.get_peft_model`` freezes them all later.
    """
    adapters = set()
    for module in base_model(model).modules():
        # How PEFT wraps a layer, and a module that is saved with the adapter.
        inner = getattr(module, "base_layer", None) or getattr(module, "original_module", None)
        if inner is not None:
            adapters |= set(map(id, module.parameters())) - set(map(id, inner.parameters()))
    trained_parameters = [
        each for each in base_model(model).parameters() if each.requires_grad and id(each) not in adapters
    ]
    # A parameter keeps its hooks alive, so nothing in them may keep parameters alive.
    mine, seen, handles = set(map(id, trained_parameters)), weakref.ref(model), list[Any]()

    def trained(_: torch.Tensor) -> None:
        for handle in handles:
            handle.remove()
        alive = seen()
        if alive is None:
            return
        now = dict(base_model(alive).named_parameters())
        frozen = sum(isinstance(parameter.data, RemoteWeight) for parameter in now.values())
        names = [name for name, each in now.items() if id(each) in mine and each.requires_grad]
        if frozen and names:
            log.warning(
                "%d parameters of %s are frozen, at the executor; %d others get gradients and would be "
                "trained: %s. To train an adapter alone, freeze them with model.requires_grad_(False) before "
                "it is added, or add it with peft.get_peft_model, which does that",
                *(frozen, type(base_model(alive)).__name__, len(names)),
                _few(names),
            )

    handles += [parameter.register_post_accumulate_grad_hook(trained) for parameter in trained_parameters]


def detach_layers(model: nn.Module, manifest: Manifest, checkpoint: str | Path | None) -> int:
    """Put real linear layers back, their weights read from a checkpoint; how many.

    Args:
        checkpoint: folder of the checkpoint; None tries the one that the model was loaded from.

    Raises:
        CheckpointError: there is no such folder.
        ModelMismatch: it holds other weights than the executor serves.
    """
    inner = base_model(model)
    folder = checkpoint or getattr(inner, "name_or_path", "")
    if not folder or not Path(folder).is_dir():
        raise CheckpointError(
            "the weights were given up when the model was attached; give detach(model, checkpoint=FOLDER) "
            "the folder that holds them"
        )
    source = open_checkpoint(folder, manifest)
    members = {member.name: member for group in manifest.groups for member in group.members}
    virtual = {
        id(layer): name
        for name, layer in linear_layers(model).items()
        if isinstance(layer, (VirtLinear, VirtConv1D))
    }
    for parent in list(inner.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in virtual:
                setattr(parent, name, _real_layer(child, source, members[virtual[id(child)]]))
    forget_products(inner)
    return len(virtual) + detach_experts(model, manifest, source)


def _real_layer(layer: nn.Module, source: Checkpoint, member: Member) -> nn.Module:
    placeholder = layer.weight
    weight = source.member_weight(member).to(placeholder.device, placeholder.dtype)  # type: ignore[arg-type]
    real: nn.Module
    if isinstance(layer, VirtConv1D):
        real = Conv1D.__new__(Conv1D)
        nn.Module.__init__(real)
        real.nx, real.nf = layer.nx, layer.nf
        weight = weight.T
    else:
        real = nn.Linear(1, 1, device="meta")
        real.in_features, real.out_features = weight.shape[1], weight.shape[0]
    real.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    real.register_parameter("bias", layer.bias)  # type: ignore[arg-type]
    return real.train(layer.training)
