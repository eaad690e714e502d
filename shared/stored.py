"""How the parameters of a model are stored in a checkpoint, as transformers maps them.

A parameter may have another name in the checkpoint, be one of several tensors that are merged, be a piece of
one, lie transposed, or be quantised. The rules are transformers' own (``shared.compat.conversions``); here
they are followed for one parameter, or one expert of it, at a time. Nothing is known of any architecture.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import torch
from torch import nn

from shared import compat
from shared.errors import CheckpointError
from shared.wire.header import DTYPE_CODES
from shared.wire.messages import Member

if TYPE_CHECKING:  # which takes seconds, and whoever serves what is stored as it is needs none of it
    from transformers import PreTrainedModel

Layout = tuple[tuple[int, ...], torch.dtype]


class Tensors(Protocol):
    """Of a checkpoint's files (``shared.checkpoint.Checkpoint``)."""

    folder: Path

    def names(self) -> list[str]:
        """Of all."""
        ...

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """One as it is stored, or rows of its first axis."""
        ...

    def layout(self, name: str) -> Layout:
        """Shape and dtype of one as it is stored."""
        ...


class Source(NamedTuple):
    """What a parameter is made of.

    Attributes:
        parameter: its name in the model's state dict; of tied ones that which the checkpoint holds.
        keys: the tensors of the checkpoint.
        made: they are converted; else the only one is the parameter.
    """

    parameter: str
    keys: tuple[str, ...]
    made: bool

    @property
    def tensor(self) -> str:
        """As manifests call it: see ``Member``."""
        return self.parameter if self.made else self.keys[0]


class _Recipe(NamedTuple):
    """Tensors by the converter's pattern that takes them, and the first parameter that it makes of them."""

    converter: Any  # None: the only tensor is the parameter
    first: str
    keys: dict[str, list[str]]

    @property
    def all_keys(self) -> tuple[str, ...]:
        return tuple(key for keys in self.keys.values() for key in keys)

    @property
    def makes_several(self) -> bool:
        targets = self.converter.target_patterns
        return len(targets) > 1 or "*" in targets[0]

    @property
    def steps(self) -> list[Any]:
        """Of the conversion, without dequantising."""
        return [each for each in self.converter.operations if not type(each).__name__.endswith("Dequantize")]

    @property
    def merges(self) -> bool:
        """Whether each expert is a tensor of its own, and they are stacked in the first step."""
        return (
            bool(self.steps) and type(self.steps[0]).__name__ == "MergeModulelist" and self.steps[0].dim == 0
        )


class Stored:
    """The parameters of the model that a checkpoint's ``config.json`` describes.

    Everything is read, and transformers imported, when it is first asked for.

    Args:
        tensors: the checkpoint's.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._last: tuple[_Recipe, dict[str, torch.Tensor]] | None = None
        self._apart: dict[str, int] = {}  # see ``_experts``
        self._lock = threading.RLock()

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model without values, in float32.

        Raises:
            CheckpointError: transformers does not know it.
        """
        return skeleton(self._tensors.folder, torch.float32)

    @property
    def prefix(self) -> str:
        """The attribute of the model that holds its base model, or nothing."""
        prefix: str = self.model.base_model_prefix
        return prefix if hasattr(self.model, prefix) else ""

    @cached_property
    def tied(self) -> list[list[str]]:
        """The names of each tensor of the model, in its order; tied ones are one tensor with several."""
        names: dict[int, list[str]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            names.setdefault(id(tensor), []).append(name)
        return list(names.values())

    @cached_property
    def unused(self) -> tuple[str, ...]:
        """Tensors of the checkpoint that no parameter is made of."""
        used = {key for recipe in self._recipes.values() for key in recipe.all_keys}
        return tuple(name for name in self._tensors.names() if name not in used)

    def source(self, name: str) -> Source | None:
        """What holds a parameter or persistent buffer, or one that is tied to it; None: nothing."""
        held = next((each for each in self._names.get(name, ()) if each in self._recipes), None)
        if held is None:
            return None
        recipe = self._recipes[held]
        return Source(held, recipe.all_keys, recipe.converter is not None)

    def describe(self, name: str) -> Layout:
        """Shape and dtype of a parameter as it is stored, or as it is made; nothing of it is read.

        Raises:
            CheckpointError: nothing holds it; not what the configuration asks for; an unsupported dtype.
        """
        source = self._known(name)
        recipe, expected = self._recipes[source.parameter], tuple(self._state[name].shape)
        if not source.made:
            shape, dtype = self._tensors.layout(source.tensor)
        elif self._experts(source.parameter):
            made = self._make(recipe, self._empty, slice(0, 1))[source.parameter]
            shape, dtype = (expected[0], *made.shape[1:]), made.dtype
        else:
            made = self._make(recipe, self._empty)[source.parameter]
            shape, dtype = tuple(made.shape), made.dtype
        if dtype not in DTYPE_CODES:
            raise CheckpointError(f"{source.tensor} has dtype {dtype}, which is not supported")
        if shape != expected:
            raise CheckpointError(
                f"{self._tensors.folder}: {source.tensor} has shape {list(shape)}, "
                f"the configuration asks for {list(expected)}"
            )
        return shape, dtype

    def read(self, name: str, rows: slice | None = None, expert: int | None = None) -> torch.Tensor:
        """A parameter, or rows of its first axis, in the dtype of ``describe``.

        Args:
            name: in the model's state dict.
            rows: from where to where.
            expert: gives this one of the first axis, without that axis. Where experts are stored one by one
                or one after the other, nothing else is read for either.

        Raises:
            CheckpointError: nothing holds it, or it cannot be made.
        """
        source = self._known(name)
        if expert is not None:
            count = self._state[name].shape[0]
            if not 0 <= expert < count:
                raise CheckpointError(f"{self._tensors.folder}: {name} has no expert {expert}, but {count}")
            return self.read(name, slice(expert, expert + 1))[0]
        if not source.made:
            return self._tensors.read(source.tensor, rows)
        recipe, read = self._recipes[source.parameter], self._tensors.read
        with self._lock:
            if rows is not None and self._experts(source.parameter):
                return self._make(recipe, read, rows)[source.parameter]
            if self._last is None or self._last[0] is not recipe:
                self._last = None  # so that not both are there
                self._last = recipe, self._make(recipe, read)
            made = self._last[1][source.parameter]
            if rows is None and len(self._last[1]) == 1:
                self._last = None  # nobody asks for more of it
        return made if rows is None else made[rows]

    def sha256(self, name: str) -> str:
        """Of a parameter's dtype, its axes, and its bytes as stored or made.

        The same bytes are another parameter under another dtype or in another shape.

        Raises:
            CheckpointError: see ``describe`` and ``read``.
        """
        shape, dtype = self.describe(name)
        total = parameter_hash(str(dtype).removeprefix("torch."), shape)
        source = self._known(name)
        apart = self._experts(source.parameter) if source.made else 0
        for rows in (slice(at, at + 1) for at in range(apart)) if apart else (None,):
            total.update(bytes_of(self.read(name, rows)))
        return total.hexdigest()

    def layer(self, name: str) -> tuple[Member, int] | None:
        """A linear layer of the model as manifests list it, and its inputs; None: nothing holds its weight.

        Raises:
            CheckpointError: see ``describe``.
        """
        from transformers.pytorch_utils import Conv1D

        source = self.source(f"{name}.weight")
        if source is None:
            return None
        transposed = isinstance(self.model.get_submodule(name), Conv1D)
        shape, _ = self.describe(f"{name}.weight")
        outputs, inputs = reversed(shape) if transposed else shape
        return Member(below(name, self.prefix), outputs, source.tensor, transposed, source.made), inputs

    def layers(self) -> Iterator[tuple[Member, int]]:
        """All linear layers whose weights are stored, the head too, and their inputs; see ``layer``."""
        from transformers.pytorch_utils import Conv1D

        for name, module in self.model.named_modules():
            found = self.layer(name) if isinstance(module, (nn.Linear, Conv1D)) else None
            if found is not None:
                yield found

    @cached_property
    def largest(self) -> int:
        """Bytes that the largest conversion takes while it is under way, about."""
        return max((self._bytes(name) for name, each in self._recipes.items() if each.converter), default=0)

    def _bytes(self, name: str) -> int:
        recipe, experts = self._recipes[name], self._experts(name)
        count = self._state[name].numel() // (experts or 1)
        results = sum(each is recipe for each in self._recipes.values())
        # What is made, before and after the last step; what is stored is no larger.
        return 4 * count * results * 3

    def _known(self, name: str) -> Source:
        source = self.source(name)
        if source is None:
            raise CheckpointError(f"{self._tensors.folder} has nothing for {name}")
        return source

    @cached_property
    def _state(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.model.state_dict()
        return state

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        """Of each name itself, and those that are tied to it."""
        return {
            name: [name, *(each for each in names if each != name)] for names in self.tied for name in names
        }

    @cached_property
    def _recipes(self) -> dict[str, _Recipe]:
        """By the parameter that is made."""
        found, said = compat.conversions(), quantisation_of(self._tensors.folder)
        if found is None and said is None:
            return self._of_own_names()
        if found is None:
            raise CheckpointError(
                f"{self._tensors.folder} is quantised, and dense weights can be made of it with another version "
                "of transformers alone; see the log"
            )
        quantizer = None
        if said is not None:
            from shared.quantised import check_complete, quantizer_of

            quantizer = quantizer_of(said)
        mapping = found.rules(self.model, hf_quantizer=quantizer)
        converters = [rule for rule in mapping if isinstance(rule, found.Converter)]
        renamings = [rule for rule in mapping if isinstance(rule, found.Renaming)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        prefix, state, recipes = self.model.base_model_prefix, self._state, dict[str, _Recipe]()
        for key in sorted(self._tensors.names(), key=found.order):
            name, pattern = found.rename(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = found.rename(key, [], [], prefix, state)
            if name in state:
                recipe = recipes.setdefault(name, _Recipe(by_pattern.get(pattern), name, {}))
                recipe.keys.setdefault(pattern or key, []).append(key)
        for recipe in list(recipes.values()):
            if recipe.converter is not None and recipe.makes_several:
                recipes |= dict.fromkeys(self._make(recipe, self._empty), recipe)
        if quantizer is not None:
            recipes = {name: self._plain(recipe) for name, recipe in recipes.items()}
            used = {key for recipe in recipes.values() for key in recipe.all_keys}
            check_complete(set(self._tensors.names()) - used, used)
        return {name: recipe for name, recipe in recipes.items() if name in state}

    def _plain(self, recipe: _Recipe) -> _Recipe:
        """Of a quantised checkpoint, whose rules take every weight: without them if this one is dense."""
        if recipe.converter is None or recipe.steps or len(recipe.all_keys) > 1:
            return recipe
        dense = self._tensors.layout(recipe.all_keys[0])[1] in DTYPE_CODES
        return _Recipe(None, recipe.first, recipe.keys) if dense else recipe

    def _of_own_names(self) -> dict[str, _Recipe]:
        """Of tensors that have the parameters' names, with or without the prefix, or those of old norms."""
        there, recipes = set(self._tensors.names()), dict[str, _Recipe]()
        for name in self._state:
            candidates = [name, below(name, self.prefix), f"{self.prefix}.{name}"]
            candidates += [each.replace("LayerNorm.weight", "LayerNorm.gamma") for each in candidates]
            candidates += [each.replace("LayerNorm.bias", "LayerNorm.beta") for each in candidates]
            key = next((each for each in candidates if each in there), None)
            if key is not None:
                recipes[name] = _Recipe(None, name, {key: [key]})
        return recipes

    def _experts(self, name: str) -> int:
        """How many experts of a parameter can be made one at a time; 0: it is made as a whole."""
        if name not in self._apart:
            recipe, shape = self._recipes[name], tuple(self._state[name].shape)
            if len(shape) != 3 or not all(map(_changes_each_alone, recipe.steps[recipe.merges :])):
                counts = set()
            elif recipe.merges:
                counts = {len(keys) for keys in recipe.keys.values()}
            else:
                counts = {(*self._tensors.layout(key)[0], 0)[0] for key in recipe.all_keys}
            self._apart[name] = shape[0] if counts == {shape[0]} else 0
        return self._apart[name]

    def _empty(self, key: str, rows: slice | None = None) -> torch.Tensor:
        """Like a tensor of the checkpoint, without memory."""
        shape, dtype = self._tensors.layout(key)
        empty = torch.empty(shape, dtype=dtype, device="meta")
        return empty if rows is None else empty[rows]

    def _make(
        self, recipe: _Recipe, read: Callable[..., torch.Tensor], experts: slice | None = None
    ) -> dict[str, torch.Tensor]:
        """The parameters that a converter makes, or those experts of the only one.

        Raises:
            CheckpointError: it cannot.
        """
        converter = copy.deepcopy(recipe.converter)
        for pattern, keys in recipe.keys.items():
            if experts and recipe.merges:
                keys = keys[experts]
            for key in keys:
                cut = experts and not recipe.merges
                converter.add_tensor(recipe.first, key, pattern, partial(read, key, experts if cut else None))
        try:
            made = converter.convert(recipe.first, model=self.model, config=self.model.config)
        except CheckpointError:
            raise
        except Exception as error:  # every step fails in a way of its own on tensors that do not fit
            raise CheckpointError(
                f"{self._tensors.folder}: {recipe.first} cannot be made of {', '.join(recipe.all_keys[:4])}: "
                f"{str(error)[:200] or repr(error)}"
            ) from error
        return {name: (each[0] if isinstance(each, list) else each).detach() for name, each in made.items()}


def _changes_each_alone(step: Any) -> bool:
    """Whether a step of a conversion does the same to each expert, along other axes than the first."""
    axes = [getattr(step, axis, 1) for axis in ("dim", "dim0", "dim1")]
    return type(step).__name__ in ("Concatenate", "Transpose", "Chunk", "Interleave") and min(axes) > 0


def below(name: str, prefix: str) -> str:
    """A name as it is below the base model."""
    return name.removeprefix(f"{prefix}.") if prefix else name


def parameter_hash(dtype: str, shape: Iterable[int]) -> hashlib._Hash:
    """What a parameter's SHA-256 begins with; its bytes follow."""
    return hashlib.sha256(f"{dtype} {','.join(map(str, shape))} ".encode())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Of a tensor, not copied if it is contiguous."""
    flat: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return flat


def quantisation_of(folder: Path) -> dict[str, Any] | None:
    """What a ``config.json`` says of how the checkpoint was quantised; None: it was not.

    Raises:
        CheckpointError: it is no configuration.
    """
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder}/config.json cannot be used: {error}") from error
    for each in (config, config.get("text_config")):
        said = each.get("quantization_config") if isinstance(each, dict) else None
        if said:
            return dict(said)
    return None


def skeleton(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model that a folder's ``config.json`` describes, without values, dense.

    Raises:
        CheckpointError: transformers does not know it.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        classes = [getattr(transformers, name, None) for name in config.architectures or []]
        for each in classes:
            if isinstance(each, type) and issubclass(each, transformers.PreTrainedModel):
                for part in (config, config.get_text_config(decoder=True)):
                    vars(part).pop("quantization_config", None)
                config._attn_implementation = "eager"
                config.dtype = dtype
                with torch.device("meta"):
                    model: PreTrainedModel = each._from_config(config)
                return model.eval()
    except Exception as error:
        # Every architecture fails in a way of its own on a configuration that makes no sense.
        raise CheckpointError(f"{folder}/config.json cannot be used: {error!r}") from error
    raise CheckpointError(
        f"{folder}/config.json names no architecture that transformers "
        f"{transformers.__version__} has (architectures: {config.architectures})"
    )
