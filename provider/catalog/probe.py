"""One tiny forward pass of a model finds layers that get the same tensor, and weights that it reads itself.

It runs on the ``meta`` device, which has shapes but no values. A model that looks at values on its way gets a
second pass on the CPU, whose parameters are all zero, and whose products are not computed.
"""

from __future__ import annotations

import copy
import inspect
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shared.buffers import MAX_BUFFERS, buffer_bytes
from shared.compat import parameters_without_memory
from shared.wire.header import MAX_MEMBERS

log = logging.getLogger(__name__)

TOKENS, SAMPLES, FRAMES = 4, 4000, 64  # of text, of sound, of a spectrogram
SECONDS = 60.0  # of a pass, looked at between two operations
MAX_BYTES = 1 << 28  # of one tensor in it; a larger one is looked at before it is made
LOOKED_AT = 1 << 20  # bytes that an operation gets: more, and it may make a tensor of MAX_BYTES
MEL_BINS = ("feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel", "feature_size")
# What a placeholder for a weight allows as well, by the operation's name.
HARMLESS = ("detach", "alias", "_to_copy")


@dataclass
class Probe:
    """What was seen.

    Attributes:
        groups: names of layers that get the same tensor, at most ``MAX_MEMBERS``; one not reached is alone.
        kept: the other layers, for which no product can stand, and why, in words.
        reached: how many layers were called, or read.
        stopped: what ended the pass before its end.
    """

    groups: list[list[str]] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    reached: int = 0
    stopped: Exception | None = None


def probe(model: PreTrainedModel, layers: Collection[str]) -> Probe:
    """Run a model once on inputs of its kind, and look at its linear layers.

    Args:
        model: on the meta device.
        layers: names of those that are looked at. The output head is alone, whoever else gets its input.
    """
    result = _best(model, layers, "meta")
    left = result.reached < len(layers) and any(towers_of(model, "meta"))
    # Tenants load no model of larger tables, and here they would take their memory.
    if (result.stopped is not None or left) and buffer_bytes(model) <= MAX_BUFFERS:
        again = _best(_with_values(model), layers, "cpu")
        if again.reached > result.reached or (again.stopped is None and result.stopped is not None):
            result = again
    if result.stopped is not None:
        log.warning(
            "%d of %d layers were reached before the tiny forward pass stopped with: %s. The others are "
            "served, each with a request of its own, which is correct and slower",
            *(result.reached, len(layers), str(result.stopped)[:300] or type(result.stopped).__name__),
        )
    return result


def _best(model: PreTrainedModel, layers: Collection[str], device: str) -> Probe:
    """The first pass that ends, or else the one that came furthest."""
    unknown = NotImplementedError(f"this model takes {model.main_input_name}, and nothing like it is known")
    best: Probe | None = None
    for inputs in inputs_of(model, device):
        result = _pass(model, layers, inputs, device)
        if best is None or best.reached < result.reached or result.stopped is None:
            best = result
        if result.stopped is None:
            break
    return best or Probe([[name] for name in layers], stopped=unknown)


def _pass(
    model: PreTrainedModel, layers: Collection[str], inputs: dict[str, torch.Tensor], device: str
) -> Probe:
    watch = _Watch(model, layers)
    with watch.hooks():
        stopped = watch.call(model, inputs)
        if stopped is None and len(watch.inputs) < len(layers):
            for name, beside in towers_of(model, device):
                watch.call(getattr(model, name), beside)
    return Probe(watch.groups(), watch.kept, len(watch.inputs.keys() | watch.kept.keys()), stopped)


# -- inputs ----------------------------------------------------------------------------------------


def inputs_of(model: PreTrainedModel, device: str) -> Iterator[dict[str, torch.Tensor]]:
    """Inputs to try one after the other: the smallest first that a model of this kind may take.

    All of them are ones: zeros are padding to some models.
    """
    named = model.main_input_name
    name = named if isinstance(named, str) else named[0]
    ids = torch.ones((1, TOKENS), dtype=torch.long, device=device)
    rest = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    parameters = inspect.signature(model.forward).parameters
    # There are no values to look at: some models look for padding if there is no mask, others look at the
    # mask if there is one.
    masks: list[dict[str, torch.Tensor]] = [{}, {"attention_mask": torch.ones_like(ids)}]
    if name == "input_ids":
        yield from ({name: ids} | rest | mask for mask in masks)
    others = {"input_ids": ids} if "input_ids" in parameters else {}
    for main in (name, "pixel_values", "input_features") if name == "input_ids" else (name,):
        shapes = _shapes(main, model.config) if main in (name, *parameters) else ()
        for shape, extra in product(shapes, ({}, others) if others and name == main else (others,)):
            yield {main: torch.ones(shape, dtype=model.dtype, device=device)} | extra | rest


def towers_of(model: PreTrainedModel, device: str) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """What makes features of an image or of sound in models that can do without: methods and their inputs."""
    config, ones = model.config, partial(torch.ones, dtype=model.dtype, device=device)
    if hasattr(model, "get_image_features"):
        (image, *_) = _shapes("pixel_values", config)
        yield "get_image_features", {"pixel_values": ones(image)}
        yield "get_image_features", {"pixel_values": ones((1, *image))}
        # Or patches one after the other, and how many there are in time, height and width.
        patch, deep = _number(config, ("patch_size",), 14), _number(config, ("temporal_patch_size",), 1)
        side = 2 * _number(config, ("spatial_merge_size",), 1)
        grid = torch.tensor([[1, side, side]], device=device)
        patches = ones((side * side, image[1] * deep * patch * patch))
        yield "get_image_features", {"pixel_values": patches, "image_grid_thw": grid}
    if hasattr(model, "get_audio_features"):
        for shape in _shapes("input_features", config):
            yield "get_audio_features", {"input_features": ones(shape)}


def _shapes(name: str, config: Any) -> Sequence[tuple[int, ...]]:
    """What a main input of this name may be like, most particular first; none if the name is not known."""
    size = _number_or_pair(config, "image_size", 224)
    image = (1, _number(config, ("num_channels", "in_channels", "in_chans"), 3), *size)
    mel = _number(config, MEL_BINS, 80)
    places = _number(config, ("max_source_positions",), FRAMES)
    video = (1, _number(config, ("num_frames", "frames_per_clip"), 16), *image[1:])
    known: dict[str, Sequence[tuple[int, ...]]] = {
        "pixel_values": [image, video],
        "pixel_values_videos": [video],
        "input_features": [(1, mel, 2 * places), (1, FRAMES, mel)],
        "input_values": [(1, SAMPLES), (1, _number(config, ("max_length",), FRAMES), mel), (1, 1, SAMPLES)],
        "inputs_embeds": [(1, TOKENS, _number(config, ("hidden_size", "d_model"), 64))],
    }
    return known.get(name, ())


def _values(config: Any, name: str) -> Iterator[Any]:
    """What a configuration, or one of a part of the model, says under a name."""
    for part in (config, *(getattr(config, f"{each}_config", None) for each in ("vision", "audio", "text"))):
        if getattr(part, name, None) is not None:
            yield getattr(part, name)
    encoder = getattr(config, "encoder", None)
    if getattr(encoder, name, None) is not None:
        yield getattr(encoder, name)


def _number(config: Any, names: Sequence[str], default: int) -> int:
    return next((v for name in names for v in _values(config, name) if isinstance(v, int)), default)


def _number_or_pair(config: Any, name: str, default: int) -> tuple[int, int]:
    value = next(_values(config, name), default)
    value = [value, value] if isinstance(value, int) else value
    return (value[0], value[1]) if isinstance(value, list | tuple) and len(value) == 2 else (default, default)


# -- watching --------------------------------------------------------------------------------------


class _Watch(TorchDispatchMode):
    """Sees each linear layer's input, and every operation on a weight outside its own layer's forward.

    An operation on a parameter of ``_with_values`` is run on the meta device, for shapes, and gives zeros.
    """

    def __init__(self, model: PreTrainedModel, layers: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs: dict[str, torch.Tensor] = {}  # kept, so that no two tensors share an id
        self.kept: dict[str, str] = {}
        self._model = model
        self._layers = {model.get_submodule(name): name for name in layers}
        # The head's weight may be the embeddings', which are read.
        self._head = self._layers.get(model.get_output_embeddings())
        self._weights = {id(e.weight): name for e, name in self._layers.items() if name != self._head}
        self._copies: list[torch.Tensor] = []
        self._inside: list[nn.Module] = []
        self._zeros = {p.untyped_storage().data_ptr() for p in model.parameters() if not p.is_meta}
        self._until = 0.0

    def call(self, function: Callable[..., object], inputs: dict[str, torch.Tensor]) -> Exception | None:
        """Call the model or a part of it; what ended that, if it was not its end."""
        self._until = time.monotonic() + SECONDS
        self._inside.clear()
        try:
            with torch.no_grad(), self:
                function(**inputs)
        except Exception as error:
            # Every architecture fails in a way of its own on an input that is not quite its kind.
            return error
        return None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """The layers, while they say what they get and give."""
        handles: list[Any] = []
        for module in self._model.modules():
            if isinstance(module, (nn.Linear, Conv1D, nn.Embedding)):
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def groups(self) -> list[list[str]]:
        """The layers that can be served, by the tensor that they got; those that got none are alone."""
        together: dict[int, list[str]] = {}
        for name, tensor in self.inputs.items():
            if name != self._head and name not in self.kept:
                together.setdefault(id(tensor), []).append(name)
        parts = [
            names[at : at + MAX_MEMBERS]
            for names in together.values()
            for at in range(0, len(names), MAX_MEMBERS)
        ]
        called = {name for names in parts for name in names}
        return parts + [[n] for n in self._layers.values() if n not in called and n not in self.kept]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inside.append(module)
        if module in self._layers:
            self.inputs.setdefault(self._layers[module], args[0] if args else next(iter(kwargs.values())))

    def _leave(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        self._inside.pop()
        if module not in self._layers:
            return
        name = self._layers[module]
        weight: Any = module.weight
        width = weight.shape[1 if isinstance(module, Conv1D) else 0]
        if not isinstance(output, torch.Tensor) or output.shape[-1] != width:
            self.kept[name] = f"{type(module).__name__} does more than multiply"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and note whose weight it is on."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        result = self._run(func, args, kwargs, tensors)
        for tensor in tensors:
            if id(tensor) in self._weights and not self._is_inside(tensor):
                self._note(self._weights[id(tensor)], func.overloadpacket.__name__, result)
        return result

    def _is_inside(self, weight: torch.Tensor) -> bool:
        return bool(self._inside) and any(p is weight for p in self._inside[-1]._parameters.values())

    def _note(self, name: str, operation: str, result: Any) -> None:
        if operation not in HARMLESS:
            self.kept.setdefault(name, "the model reads the weight itself")
        elif isinstance(result, torch.Tensor):
            self._copies.append(result)
            self._weights[id(result)] = name

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """What an operation gives, with as little memory and time as its shapes need.

        Raises:
            TimeoutError, MemoryError: the pass has taken long enough; it asks for a tensor too large.
        """
        if time.monotonic() > self._until:
            raise TimeoutError(f"a pass on four tokens took more than {SECONDS:.0f} s")
        blank = any(not each.is_meta and each.untyped_storage().data_ptr() in self._zeros for each in tensors)
        blank = blank and not func.is_view and not func._schema.is_mutable
        large = sum(each.nbytes for each in tensors if not each.is_meta) > LOOKED_AT
        if not blank and not (large and not func.is_view):
            return func(*args, **kwargs)
        on_meta = tree_map(_to_meta, (args, kwargs | ({"device": "meta"} if "device" in kwargs else {})))
        try:
            shapes = func(*on_meta[0], **on_meta[1])
        except (RuntimeError, NotImplementedError):  # they depend on values
            if sum(each.nbytes for each in tensors) > MAX_BYTES:
                raise
            return func(*args, **kwargs)
        largest = max(
            (leaf.nbytes for leaf in tree_leaves(shapes) if isinstance(leaf, torch.Tensor)), default=0
        )
        if largest > MAX_BYTES:
            raise MemoryError(f"{func} makes a tensor of {largest / 2**30:.1f} GiB")
        return tree_map(_to_zeros, shapes) if blank else func(*args, **kwargs)


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _to_zeros(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _with_values(model: PreTrainedModel) -> PreTrainedModel:
    """The same model on the CPU: its buffers, and parameters that are each one zero, whatever their shape."""
    with parameters_without_memory():
        same: PreTrainedModel = type(model)._from_config(copy.deepcopy(model.config))
    zeros: dict[torch.dtype, torch.Tensor] = {}
    parameters: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for module in same.modules():
        for name, old in module._parameters.items():
            if old is None:
                continue
            if id(old) not in parameters:
                zero = zeros.setdefault(old.dtype, torch.zeros((), dtype=old.dtype))
                parameters[id(old)] = nn.Parameter(zero.expand(old.shape), requires_grad=False)
            module._parameters[name] = parameters[id(old)]
    same.eval()
    return same
