"""How the parameters of a model are stored in a checkpoint, and how one of them, or an expert of it, is read.

A parameter may have another name in the checkpoint, be merged of several tensors, be a piece of one, lie
transposed, or be quantised (``shared.recipes``). Nothing is known of any architecture.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from shared.errors import CheckpointError
from shared.experts import projections
from shared.recipes import Layout, Recipe, Tensors, meta_model, prefix_of, recipes_of, strip_prefix
from shared.wire.header import DTYPE_CODES
from shared.wire.messages import Member

if TYPE_CHECKING:  # which takes seconds, and whoever serves what is stored as it is needs none of it
    from transformers import PreTrainedModel


class Source(NamedTuple):
    """What a parameter is made of.

    Attributes:
        parameter: its name in the model's state dict; of tied ones that which the checkpoint holds.
        keys: the tensors of the checkpoint.
        converted: whether transformers converts them; else the only one is the parameter.
    """

    parameter: str
    keys: tuple[str, ...]
    converted: bool

    @property
    def tensor(self) -> str:
        """Its name in manifests: see ``Member``."""
        return self.parameter if self.converted else self.keys[0]


class Stored:
    """The parameters of the model that a checkpoint's ``config.json`` describes.

    Everything is read, and transformers imported, when it is first asked for.

    Args:
        tensors: the checkpoint's.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._last: tuple[Recipe, dict[str, torch.Tensor]] | None = None
        self._alone: dict[str, int] = {}  # see ``_experts``
        self._lock = threading.Lock()

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model on the meta device, in float32.

        Raises:
            CheckpointError: transformers does not know it.
        """
        return meta_model(self._tensors.folder, torch.float32, len(self._tensors.names()))

    @property
    def prefix(self) -> str:
        """The attribute of the model that holds its base model, or nothing."""
        return prefix_of(self.model)

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

    @cached_property
    def largest_conversion(self) -> int:
        """Bytes that the largest conversion, of a parameter or an expert, takes while it runs, about."""
        largest = 0
        for name, recipe in self._recipes.items():
            if recipe.converter is not None:
                pieces = sum(each is recipe for each in self._recipes.values()) if recipe.makes_several else 1
                largest = max(largest, pieces * self._state[name].numel() // (self._experts(name) or 1))
        # float32, before and after the last step, and what is stored, which is no larger
        return 3 * 4 * largest

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
        source, expected = self._known(name), tuple(self._state[name].shape)
        shape, dtype = (
            self._converted_layout(source) if source.converted else self._tensors.layout(source.tensor)
        )
        if dtype not in DTYPE_CODES:
            raise CheckpointError(
                f"{source.tensor} has dtype {dtype}, which is not supported"
                + (" without the scales that go with it" if "float8" in str(dtype) else "")
            )
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
            expert: gives this one of the first axis, without that axis. Where the checkpoint has experts
                one by one, or one after the other, nothing else is read for either.

        Raises:
            CheckpointError: nothing holds it, there is no such expert, or it cannot be made.
        """
        source = self._known(name)
        if expert is not None:
            count = self._state[name].shape[0]
            if not 0 <= expert < count:
                raise CheckpointError(f"{self._tensors.folder}: {name} has no expert {expert}, but {count}")
            return self.read(name, slice(expert, expert + 1))[0]
        if not source.converted:
            return self._tensors.read(source.tensor, rows)
        recipe = self._recipes[source.parameter]
        if rows is not None and self._experts(source.parameter):
            return recipe.make(self.model, self._tensors.read, rows)[source.parameter]
        with self._lock:
            tensor = self._whole(recipe, again=rows is not None)[source.parameter]
        return tensor if rows is None else tensor[rows]

    def sha256(self, name: str) -> str:
        """Of a parameter's dtype, its axes, and its bytes as stored or made.

        The same bytes are another parameter under another dtype or in another shape.

        Raises:
            CheckpointError: see ``describe`` and ``read``.
        """
        shape, dtype = self.describe(name)
        source, total = self._known(name), parameter_hash(str(dtype).removeprefix("torch."), shape)
        count = self._experts(source.parameter) if source.converted else 0
        # One expert at a time: all together may be as large as the rest of the model.
        for rows in (slice(at, at + 1) for at in range(count)) if count else (None,):
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
        name = strip_prefix(name, self.prefix)
        return Member(name, outputs, source.tensor, transposed, source.converted), inputs

    def layers(self) -> Iterator[tuple[Member, int]]:
        """All linear layers whose weights are stored, the head too, and experts, with their inputs."""
        from transformers.pytorch_utils import Conv1D

        for name, module in self.model.named_modules():
            layer = self.layer(name) if isinstance(module, (nn.Linear, Conv1D)) else None
            if layer is not None:
                yield layer
        yield from self.experts()

    def experts(self) -> Iterator[tuple[Member, int]]:
        """Each expert of each projection of the mixtures of experts, as manifests list it, and its inputs.

        Raises:
            CheckpointError: see ``describe``.
        """
        for each in projections(self.model):
            source = self.source(each.name)
            if source is None:
                continue
            self.describe(each.name)
            count, outputs, inputs = each.axes
            name = strip_prefix(each.name, self.prefix)
            for expert in range(count):
                yield (
                    Member(
                        f"{name}.{expert}", outputs, source.tensor, each.transposed, source.converted, expert
                    ),
                    inputs,
                )

    @cached_property
    def _state(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.model.state_dict()
        return state

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        """Each name first, then those that are tied to it."""
        return {name: sorted(names, key=lambda each: each != name) for names in self.tied for name in names}

    @cached_property
    def _recipes(self) -> dict[str, Recipe]:
        return recipes_of(self._tensors, self.model)

    def _known(self, name: str) -> Source:
        source = self.source(name)
        if source is None:
            raise CheckpointError(f"{self._tensors.folder} has nothing for {name}")
        return source

    def _experts(self, name: str) -> int:
        """How many experts of a made parameter can be made alone."""
        if name not in self._alone:
            shape = tuple(self._state[name].shape)
            self._alone[name] = self._recipes[name].experts(shape, self._tensors.layout)
        return self._alone[name]

    def _converted_layout(self, source: Source) -> Layout:
        """Of what is made of tensors on the meta device."""

        def empty(key: str, rows: slice | None) -> torch.Tensor:
            shape, dtype = self._tensors.layout(key)
            whole = torch.empty(shape, dtype=dtype, device="meta")
            return whole if rows is None else whole[rows]

        experts = self._experts(source.parameter)
        recipe = self._recipes[source.parameter]
        layout = recipe.make(self.model, empty, slice(0, 1) if experts else None)[source.parameter]
        return (experts, *layout.shape[1:]) if experts else tuple(layout.shape), layout.dtype

    def _whole(self, recipe: Recipe, *, again: bool) -> dict[str, torch.Tensor]:
        """All that a recipe makes, which is kept if more of it will be asked for."""
        if self._last is not None and self._last[0] is recipe:
            return self._last[1]
        self._last = None  # so that not both are there
        tensors = recipe.make(self.model, self._tensors.read)
        if again or recipe.makes_several:
            self._last = recipe, tensors
        return tensors


def parameter_hash(dtype: str, shape: Iterable[int]) -> hashlib._Hash:
    """What a parameter's SHA-256 begins with; its bytes follow."""
    return hashlib.sha256(f"{dtype} {','.join(map(str, shape))} ".encode())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Of a tensor, not copied if it is contiguous."""
    flat: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return flat
