"""A transformers model and tokenizer from an executor alone, without a checkpoint on this side."""

from __future__ import annotations

import copy
import logging
import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shared.buffers import MAX_BUFFERS, buffer_bytes
from shared.compat import parameters_without_memory
from shared.errors import ConfigurationError, ModelMismatch, OptionReference, OptionText, peer_text
from shared.wire.header import Direction
from shared.wire.messages import TENANT_FILES, Manifest, ParameterInfo
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.model.configuration import download_files, read_configuration
from tenant_sdk.model.layer_replacement import (
    attach_layers,
    checked_layer,
    excluded_layers,
    own_head,
    plan_layers,
)
from tenant_sdk.model.mixtures import ExpertPlacement, expert_parameters
from tenant_sdk.model.remote_weight import RemoteWeight
from tenant_sdk.model.tokenizer import build_tokenizer
from tenant_sdk.model.virtual import RemoteGroup
from tenant_sdk.products.kept_groups import group_weights
from tenant_sdk.trust.attestation import linear_layers

log = logging.getLogger(__name__)

# Modules of which one layer or parameter of a manifest is the only trace, such as activations and containers.
PARTS_OF_A_NAME, PARTS_OF_A_MODEL = 16, 1024
# What a model that is built for a peer may read first: text, images, sound.
INPUTS = ("input_ids", "pixel_values", "input_features", "input_values")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_tokenizer(remote: RemoteExecutor) -> Any:
    """The executor's tokenizer.

    Raises:
        ConfigurationError: the checkpoint that it serves has none.
        ModelMismatch: it is refused (``tenant_sdk.model.tokenizer_file``).
    """
    files = download_files(remote, TENANT_FILES)
    if "tokenizer.json" not in files:
        raise ConfigurationError(
            f"the executor serves {peer_text(remote.manifest.model, 80)} without tokenizer.json, the "
            "only kind of tokenizer that is taken from a peer; load one yourself with "
            "AutoTokenizer.from_pretrained"
        )
    return build_tokenizer(files)


def check_causal(remote: RemoteExecutor, config: Any = None) -> None:
    """Let through what continues text.

    Args:
        config: of the model; default: the executor's, all that is downloaded before another is refused.

    Raises:
        ConfigurationError: it has an encoder, or reads images or sound, or generates nothing.
    """
    name = remote.manifest.architecture
    model_class = getattr(transformers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        return  # ``load_model`` says what is wrong, here and below
    if config is None:
        try:
            config, _ = read_configuration(remote)
        except ModelMismatch:
            return
    if (
        not model_class.can_generate()
        or model_class.main_input_name != "input_ids"
        or getattr(config, "is_encoder_decoder", False)
    ):
        raise ConfigurationError(
            f"{name} is not a causal language model: the command line tunes and generates with those; in "
            "Python session.load_model() and attach() take it"
        )


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    """One of ``DTYPES``, by its name as well.

    Raises:
        ConfigurationError: it is none of them.
    """
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    for each in DTYPES:
        if each is named:
            return each
    raise ConfigurationError(
        f"dtype={dtype!r:.40} cannot be: what tenants hold takes {', '.join(map(str, DTYPES))}, or the name "
        "of one"
    )


def load_model(
    remote: RemoteExecutor,
    groups: Sequence[RemoteGroup],
    placement: ExpertPlacement,
    /,
    *,
    dtype: torch.dtype | str,
    offload_head: bool,
    exclude: Sequence[str],
    progress: bool,
    model_class: type[Any] | None,
    **config_overrides: Any,
) -> PreTrainedModel:
    """Build the model without weights, put virtual layers in, download the parameters that tenants hold.

    Raises:
        ModelMismatch: this transformers does not build the model that the executor serves.
        ConfigurationError: an entry of ``exclude`` fits no layer; ``dtype`` is none.
    """
    dtype, manifest = _dtype(dtype), remote.manifest
    if manifest.unavailable:
        raise ModelMismatch(
            f"the executor cannot supply {len(manifest.unavailable)} of the parameters that tenants hold, "
            f"such as {manifest.unavailable[0]}; load the checkpoint with transformers and use session.attach"
        )
    if "trust_remote_code" in config_overrides:
        raise ConfigurationError("trust_remote_code: code from an executor is never run")
    apart = excluded_layers(groups, exclude)
    _check_memory(manifest, apart, dtype, expert_parameters(manifest, exclude), placement)
    config, generation = read_configuration(remote, config_overrides)
    config.dtype = dtype
    _check_shapes(
        manifest,
        config,
        model_class,
        groups,
        offload_head=offload_head,
        exclude=exclude,
        other_head=model_class is not None or bool(config_overrides),
    )
    # Buffers are real from the start: rotary frequencies and the like are computed, not stored.
    with _LargeOnMeta():
        model = _build(manifest, config, model_class, parameters_without_memory())
    attach_layers(
        model,
        groups,
        offload_head=offload_head,
        exclude=exclude,
        probe=False,
        held=manifest.parameters,
        placement=placement,
    )
    _fill_excluded(model, apart, dtype)
    _fill(model, remote, dtype, progress=progress)
    model.generation_config = generation
    model.eval()
    return model


def _check_memory(
    manifest: Manifest,
    apart: Sequence[tuple[RemoteGroup, int]],
    dtype: torch.dtype,
    experts: Collection[str],
    placement: ExpertPlacement,
) -> None:
    """Refuse to download more than this machine has memory for.

    Raises:
        ModelMismatch: the parameters are larger than the machine's memory.
    """
    here = [info for info in manifest.parameters if not (placement.remote and info.name in experts)]
    numbers = sum(math.prod(info.shape) for info in here)  # torch's own would wrap around
    numbers += sum(group.info.inputs * group.info.members[index].outputs for group, index in apart)
    size = numbers * dtype.itemsize
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        padded, routed = OptionReference("experts", "padded"), OptionReference("experts", "routed")
        elsewhere = OptionText(". Much of it are experts: {} or {} leaves them with it", padded, routed)
        raise ModelMismatch(
            OptionText(
                "the executor lists parameters of {:.1f} GiB for this machine, which has {:.1f} GiB of "
                "memory{}",
                *(size / 2**30, memory / 2**30, elsewhere if experts and not placement.remote else ""),
            )
        )


def _check_shapes(
    manifest: Manifest,
    config: Any,
    model_class: type[Any] | None,
    groups: Sequence[RemoteGroup],
    *,
    offload_head: bool,
    exclude: Sequence[str] = (),
    other_head: bool = False,
) -> None:
    """Build the model without memory for any tensor, and compare it with what the executor lists.

    Args:
        other_head: the tenant may have asked for another head than the executor's.

    Raises:
        ModelMismatch: it has more modules than any model of so many layers, parameters of other shapes, or
            more than ``MAX_BUFFERS`` of tables that it computes, or of parameters that nobody supplies.
    """
    model = _build(manifest, config, model_class, torch.device("meta"))
    plan = plan_layers(model, groups, offload_head=offload_head, exclude=exclude, other_head=other_head)
    state = model.state_dict(keep_vars=True)
    # By tensor, not by name: tied parameters are one, of which one name is listed.
    supplied = set()
    for info, name in _named(manifest, state, model, other_head=other_head):
        if name is not None:
            supplied.add(id(state[name]))
        elif not other_head:  # or the configuration could have numbers as large as it
            raise ModelMismatch(
                f"the executor lists {info.name}, which a {manifest.architecture} does not have"
            )
    supplied |= {id(layer.weight) for _, _, layer in plan}
    supplied |= {id(layer.weight) for _, _, layer in _here(model, excluded_layers(groups, exclude))}
    fresh = {id(each): each for each in state.values() if id(each) not in supplied}
    size = sum(each.numel() * each.element_size() for each in fresh.values())
    if size > MAX_BUFFERS:
        raise ModelMismatch(
            f"the executor lists no values for parameters of {size / 2**30:.1f} GiB; the limit for what is "
            f"made here is {MAX_BUFFERS / 2**30:.0f} GiB"
        )
    if (computed := buffer_bytes(model)) > MAX_BUFFERS:
        raise ModelMismatch(
            f"the executor's configuration makes tables of {computed / 2**30:.1f} GiB; the limit is "
            f"{MAX_BUFFERS / 2**30:.0f} GiB"
        )


class _LargeOnMeta(TorchFunctionMode):
    """While it lasts, what is larger than all buffers may be takes no memory: experts are made before."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and "device" not in kwargs:
            size = args[0] if args and not isinstance(args[0], int) else args
            if all(isinstance(n, int) for n in size) and math.prod(size) > MAX_BUFFERS // 4:
                kwargs = kwargs | {"device": "meta"}
        return func(*args, **kwargs)


def _model_class(manifest: Manifest, config: Any, model_class: type[Any] | None) -> Callable[[Any], Any]:
    """What builds the model from its configuration."""
    name = manifest.architecture
    chosen_class = model_class or getattr(transformers, name, None)
    if model_class is None and not (
        isinstance(chosen_class, type)
        and issubclass(chosen_class, PreTrainedModel)
        and chosen_class.config_class is type(config)
    ):
        raise ModelMismatch(
            f"transformers {transformers.__version__} has no model class {name[:80]!r} for a "
            f"{type(config).__name__}; install the version that the provider runs, or give model_class="
        )
    reads = getattr(chosen_class, "main_input_name", "")
    if model_class is None and reads not in INPUTS:
        raise ModelMismatch(
            f"{name[:80]} reads {reads!s:.80}; models are built for a peer if they read {', '.join(INPUTS)}. "
            "Load the checkpoint with transformers and use session.attach"
        )
    # Auto classes choose by configuration, model classes take it as it is.
    build: Any = getattr(chosen_class, "from_config", None) or getattr(chosen_class, "_from_config", None)
    if build is None:
        raise ModelMismatch(f"model_class={chosen_class!r} is not a transformers model class")
    return build  # type: ignore[no-any-return]


def _build(
    manifest: Manifest,
    config: Any,
    model_class: type[Any] | None,
    without_memory: AbstractContextManager[Any],
) -> PreTrainedModel:
    """The model, in a context that keeps its parameters from taking memory.

    Raises:
        ModelMismatch: transformers cannot build it, or it has more parts than the manifest accounts for.
    """
    build = _model_class(manifest, config, model_class)
    names = sum(len(group.members) for group in manifest.groups) + len(manifest.parameters)
    try:
        with _few_modules(PARTS_OF_A_NAME * names + PARTS_OF_A_MODEL), without_memory:
            model: PreTrainedModel = build(copy.deepcopy(config))
    except ModelMismatch:
        raise
    except Exception as error:
        raise ModelMismatch(
            f"{manifest.architecture[:80]} cannot be built from a {type(config).__name__}: {str(error)[:200]}"
        ) from error
    return model


@contextmanager
def _few_modules(limit: int) -> Iterator[None]:
    """Let this thread put no more than so many modules together."""
    thread, count = threading.get_ident(), 0

    def registered(_parent: nn.Module, _name: str, _module: nn.Module | None) -> None:
        nonlocal count
        count += threading.get_ident() == thread
        if count > limit:
            raise ModelMismatch(
                f"the executor's configuration makes a model of more than {limit} parts, which its manifest "
                "does not account for"
            )

    handle = register_module_module_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()


def _named(
    manifest: Manifest, state: Mapping[str, torch.Tensor], model: PreTrainedModel, *, other_head: bool = True
) -> Iterator[tuple[ParameterInfo, str | None]]:
    """The manifest's parameters and the names that they have in a model; None: it does not need one.

    Args:
        other_head: the model's own head may have parameters of other shapes, which it keeps.

    Raises:
        ModelMismatch: it has one of another shape.
    """
    # Another class around the same base model (a classifier, say) has other names for the rest.
    prefix, its = f"{model.base_model_prefix}.", f"{manifest.base_prefix}."
    head = own_head(model) if other_head else set()
    for info in manifest.parameters:
        names = (
            info.name,
            prefix + info.name,
            info.name.removeprefix(prefix),
            prefix + info.name.removeprefix(its),
        )
        name = next((n for n in names if n in state), None)
        if name is not None and tuple(state[name].shape) != info.shape:
            if id(model.get_submodule(name.rpartition(".")[0])) in head:
                yield info, None
                continue
            raise ModelMismatch(
                f"{name} has shape {list(state[name].shape)} here and {list(info.shape)} at the executor"
            )
        yield info, name


def _fill(model: PreTrainedModel, remote: RemoteExecutor, dtype: torch.dtype, *, progress: bool) -> None:
    state = model.state_dict(keep_vars=True)
    total = sum(math.prod(info.shape) for info in remote.manifest.parameters)
    with tqdm(total=total, desc="tenant parameters", unit="el", unit_scale=True, disable=not progress) as bar:
        for info, name in _named(remote.manifest, state, model):
            if name is None or isinstance(state[name], RemoteWeight):  # not needed here
                bar.update(math.prod(info.shape))
                continue
            tensor = state[name]
            target = torch.empty(info.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
            rows, at = target.view(info.rows), 0
            for piece in remote.parameter(info):
                rows[at : at + len(piece)] = piece
                at += len(piece)
                bar.update(piece.numel())
            _set(model, name, target)
    _tie(model)
    _initialise_missing(model, remote.manifest.architecture)


def _here(
    model: nn.Module, apart: Sequence[tuple[RemoteGroup, int]]
) -> Iterator[tuple[RemoteGroup, int, nn.Module]]:
    """The excluded layers that a model has, but the head, whose weight is a parameter of the manifest."""
    layers = linear_layers(model)
    for group, index in apart:
        member = group.info.members[index]
        if member.name in layers and not group.info.head:
            yield group, index, checked_layer(layers[member.name], member, group.info.inputs)


def _fill_excluded(model: nn.Module, apart: Sequence[tuple[RemoteGroup, int]], dtype: torch.dtype) -> None:
    """Give excluded layers the weights that the executor multiplies with: its products with unit rows."""
    for group, index, layer in _here(model, apart):
        weight = group_weights(partial(group.product, Direction.FORWARD), group.info, index, dtype)
        if not isinstance(layer, Conv1D):
            weight = weight.T.contiguous()
        layer.weight = nn.Parameter(weight, requires_grad=True)


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


def _initialise_missing(model: PreTrainedModel, architecture: str) -> None:
    """Parameters that the checkpoint lacks (a new classification head) start as transformers starts them.

    Args:
        architecture: that the executor says.
    """
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if not missing:
        return
    # Some checkpoints leave out biases, which start at zero; none leaves out a weight inside a block.
    in_blocks = [n for n in missing if not n.endswith("bias") and any(p.isdigit() for p in n.split("."))]
    if in_blocks and type(model).__name__ != architecture:
        raise ModelMismatch(
            f"the executor has no values for {len(in_blocks)} parameters inside the blocks of a "
            f"{type(model).__name__}, such as {in_blocks[0]}; give model_class= a class around the base of a "
            f"{architecture[:80]}, which it serves"
        )
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
