"""Each parameter of a model, made of the tensors of a checkpoint by transformers' own rules.

transformers reads a checkpoint whole. Here its rules (``shared.compat.conversions``) are followed as far as
the list of what each parameter is made of, and then for one parameter, or some experts of it, at a time.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from shared import compat
from shared.configuration import quantisation_of, without_loading
from shared.errors import CheckpointError
from shared.time_limit import TimeLimitExceeded, time_limit
from shared.wire.header import DTYPE_CODES

if TYPE_CHECKING:  # which takes seconds, and whoever serves what is stored as it is needs none of it
    from transformers import PreTrainedConfig, PreTrainedModel

Layout = tuple[tuple[int, ...], torch.dtype]
# Keys that count: a model is built of as many modules, or lists are made that long.
_COUNTS = re.compile(r"layer|depth|block|expert|^(num|n)_(stages|labels)$", re.IGNORECASE)
_SIZES = re.compile(r"size|dim|width|length|capacity|_id$", re.IGNORECASE)
_FEW, _LABELS = 1024, 1 << 17  # of anything is no matter; of labels, in each part
_MODULES = 32  # of a model for each of its tensors, at most
BUILD_SECONDS = 30.0  # models of a thousand layers take a few
_ARCHITECTURES = 16  # that a configuration names; each is imported
_DENSE = (torch.float32, torch.float16, torch.bfloat16)
_UNKNOWN = 1 << 14  # tensors, where a configuration stands alone


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


class Recipe(NamedTuple):
    """What one parameter, or the several pieces of one tensor, are made of.

    Attributes:
        converter: transformers' own; None: the only tensor is the parameter.
        first: the first parameter that is made.
        keys: tensors of the checkpoint, by the converter's pattern that takes them.
    """

    converter: Any
    first: str
    keys: dict[str, list[str]]

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Of the checkpoint's tensors."""
        return tuple(key for keys in self.keys.values() for key in keys)

    @property
    def makes_several(self) -> bool:
        """Whether other parameters than the first are made too."""
        targets = self.converter.target_patterns
        return len(targets) > 1 or "*" in targets[0]

    @property
    def steps(self) -> list[Any]:
        """Of the conversion, once everything is dense."""
        return [each for each in self.converter.operations if not type(each).__name__.endswith("Dequantize")]

    @property
    def merges(self) -> bool:
        """Whether each expert is a tensor of its own, or several, and they are stacked in the first step."""
        return any(type(each).__name__ == "MergeModulelist" and each.dim == 0 for each in self.steps[:1])

    def experts(self, shape: tuple[int, ...], layout: Callable[[str], Layout]) -> int:
        """How many experts of the parameter, of this shape, can be made alone; 0: it is made as a whole."""
        if len(shape) != 3 or not all(map(_changes_each_alone, self.steps[self.merges :])):
            return 0
        if self.merges:
            # One that is another than the rest would be broadcast, or converted, to what the first is.
            if any(len({layout(key) for key in keys}) != 1 for keys in self.keys.values()):
                return 0
            counts = {len(keys) for keys in self.keys.values()}
        else:
            counts = {(*layout(key)[0], 0)[0] for key in self.all_keys}
        return shape[0] if counts == {shape[0]} else 0

    def make(
        self, model: PreTrainedModel, read: Callable[..., torch.Tensor], experts: slice | None = None
    ) -> dict[str, torch.Tensor]:
        """The parameters that the converter makes, or some experts of the only one.

        Args:
            model: on the meta device.
            read: gives a tensor of the checkpoint, or rows of it.
            experts: from which to which; None: all. Nothing else is read.

        Raises:
            CheckpointError: they cannot be made.
        """
        converter = copy.deepcopy(self.converter)
        for pattern, keys in self.keys.items():
            for key in keys[experts] if experts and self.merges else keys:
                rows = None if self.merges else experts
                converter.add_tensor(self.first, key, pattern, partial(read, key, rows))
        try:
            tensors_made = converter.convert(self.first, model=model, config=model.config)
        except Exception as error:  # every step fails in a way of its own on tensors that do not fit
            reason = str(error)[:200] or repr(error)
            if isinstance(error, KeyError):
                reason = f"there is no {error.args[0]} among them"
            counts = {pattern: len(keys) for pattern, keys in self.keys.items()}
            if self.merges and len(set(counts.values())) > 1:
                reason = f"some experts lack tensors, of which there are {counts}"
            raise CheckpointError(
                f"{self.first} cannot be made of {', '.join(self.all_keys[:4])}: {reason}"
            ) from error
        return {
            name: (each[0] if isinstance(each, list) else each).detach()
            for name, each in tensors_made.items()
        }


def _changes_each_alone(step: Any) -> bool:
    """Whether a step of a conversion does the same to each expert, along other axes than the first."""
    axes = [getattr(step, axis, 1) for axis in ("dim", "dim0", "dim1")]
    known = type(step).__name__ in ("Concatenate", "Transpose", "Chunk", "Interleave") and min(axes) > 0
    return known and not getattr(step, "check_dims", False)  # that looks at the shape of all together


def recipes_of(tensors: Tensors, model: PreTrainedModel) -> dict[str, Recipe]:
    """What each parameter or persistent buffer that a checkpoint holds is made of, by its name in the model.

    Args:
        model: on the meta device, in the dtype in which weights are dequantised.

    Raises:
        CheckpointError: the checkpoint is quantised in a way that is not served.
    """
    said, conversions = quantisation_of(tensors.folder), compat.conversions()
    if conversions is None and said is None:
        return _of_own_names(tensors, model)
    if conversions is None:
        raise CheckpointError(
            f"{tensors.folder} is quantised, and only other versions of transformers can make dense weights "
            "of it; the log says what is missing in this one"
        )
    plain = _by_rules(tensors, model, conversions, None)
    if said is None or _are_dense(tensors, model, plain):
        return plain
    from shared.quantised import check_complete, quantizer_of

    recipes = _by_rules(tensors, model, conversions, quantizer_of(said))
    # Rules for quantised layers take every weight.
    recipes = {name: _without_rules(tensors, recipe) for name, recipe in recipes.items()}
    used = {key for recipe in recipes.values() for key in recipe.all_keys}
    check_complete(set(tensors.names()) - used, used)
    return recipes


def _are_dense(tensors: Tensors, model: PreTrainedModel, plain: Mapping[str, Recipe]) -> bool:
    """Whether a checkpoint holds dense weights alone, whatever its configuration says.

    Programs that make dense weights of quantised ones often leave the configuration as it was.
    """
    used = {key: name for name, recipe in plain.items() for key in recipe.all_keys}
    state = model.state_dict()
    return used.keys() == set(tensors.names()) and all(
        dtype in _DENSE and (plain[name].converter is not None or shape == state[name].shape)
        for key, name in used.items()
        for shape, dtype in [tensors.layout(key)]
    )


def _by_rules(
    tensors: Tensors, model: PreTrainedModel, conversions: compat.Conversions, quantizer: Any
) -> dict[str, Recipe]:
    """As transformers collects tensors in ``convert_and_load_state_dict_in_model``."""
    rules = conversions.rules(model, hf_quantizer=quantizer)
    converters = [rule for rule in rules if isinstance(rule, conversions.Converter)]
    renamings = [rule for rule in rules if isinstance(rule, conversions.Renaming)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, state, recipes = model.base_model_prefix, model.state_dict(), dict[str, Recipe]()
    for key in sorted(tensors.names(), key=conversions.order):
        name, pattern = conversions.rename(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = conversions.rename(key, [], [], prefix, state)
        if name in state:
            recipe = recipes.setdefault(name, Recipe(by_pattern.get(pattern), name, {}))
            recipe.keys.setdefault(pattern or key, []).append(key)

    def empty(key: str, _rows: slice | None) -> torch.Tensor:
        shape, dtype = tensors.layout(key)
        return torch.empty(shape, dtype=dtype, device="meta")

    for recipe in list(recipes.values()):
        if recipe.converter is not None and recipe.makes_several:
            recipes |= {name: recipe for name in recipe.make(model, empty) if name in state}
    return recipes


def _without_rules(tensors: Tensors, recipe: Recipe) -> Recipe:
    if recipe.converter is None or recipe.steps or len(recipe.all_keys) > 1:
        return recipe
    dense = tensors.layout(recipe.all_keys[0])[1] in DTYPE_CODES
    return recipe._replace(converter=None) if dense else recipe


def _of_own_names(tensors: Tensors, model: PreTrainedModel) -> dict[str, Recipe]:
    """Of tensors that have the parameters' names, with or without the prefix, or those of old norms."""
    stored, prefix, recipes = set(tensors.names()), prefix_of(model), dict[str, Recipe]()
    for name in model.state_dict():
        candidates = [name, strip_prefix(name, prefix), f"{prefix}.{name}"]
        candidates += [each.replace("LayerNorm.weight", "LayerNorm.gamma") for each in candidates]
        candidates += [each.replace("LayerNorm.bias", "LayerNorm.beta") for each in candidates]
        key = next((each for each in candidates if each in stored), None)
        if key is not None:
            recipes[name] = Recipe(None, name, {key: [key]})
    return recipes


def prefix_of(model: PreTrainedModel) -> str:
    """The attribute of a model that holds its base model, or nothing."""
    prefix: str = model.base_model_prefix
    return prefix if hasattr(model, prefix) else ""


def strip_prefix(name: str, prefix: str) -> str:
    """A name as it is below the base model, without the prefix."""
    return name.removeprefix(f"{prefix}.") if prefix else name


def config_in(folder: Path, tensors: int = _UNKNOWN) -> PreTrainedConfig:
    """The configuration of a checkpoint folder; nothing in it is run, and no hub is asked.

    Args:
        tensors: that the checkpoint has.

    Raises:
        CheckpointError: it names a backbone, which transformers would load from a hub; or says more layers
            than there are tensors.
        OSError, ValueError: it cannot be read.
    """
    import transformers

    values = json.loads((folder / "config.json").read_bytes())
    if isinstance(values, dict) and values.get("configuration_files"):
        raise CheckpointError(
            f"{folder}/config.json names other files to be read in its place: remove configuration_files"
        )
    # transformers asks for it although local files alone are wanted.
    if name := _backbone(values):
        raise CheckpointError(
            f"{folder}/config.json names the backbone {name[:80]!r}, which would be loaded from elsewhere; "
            "only models whose folder holds all of them are served"
        )
    _check_counts(values, max(_FEW, tensors), f"{folder}/config.json")
    clean = without_loading(values, f"{folder}/config.json")
    building = bounded_build(f"{folder}/config.json", tensors)
    with tempfile.TemporaryDirectory(prefix="symbiosis-") as alone, building:
        (Path(alone) / "config.json").write_text(json.dumps(clean))
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
            alone, local_files_only=True, trust_remote_code=False
        )
    config.name_or_path = str(folder)
    return config


def _backbone(read: Any) -> str:
    """What a configuration, or a part of it, calls its backbone; empty: none is named."""
    if isinstance(read, list):
        return next(filter(None, map(_backbone, read)), "")
    if not isinstance(read, dict):
        return ""
    name = read.get("backbone")
    return name if name and isinstance(name, str) else _backbone(list(read.values()))


def _check_counts(said: Any, limit: int, where: str, key: str = "") -> None:
    """Refuse a configuration that counts more of something than a checkpoint can hold.

    Raises:
        CheckpointError: which key, and what it says.
    """
    if isinstance(said, dict):
        for name, each in said.items():
            _check_counts(each, limit, where, name)
    elif isinstance(said, list):
        for each in said[: limit + 1] if _COUNTS.search(key) else said:
            _check_counts(each, limit, where, key)
    elif isinstance(said, int) and _COUNTS.search(key) and not _SIZES.search(key):
        limit = _LABELS if key == "num_labels" else limit
        if said > limit:
            raise CheckpointError(f"{where}: {key[:80]} is {said:.6g}, and its tensors hold {limit} at most")


@contextmanager
def bounded_build(called: str, tensors: int) -> Iterator[None]:
    """Around what builds a model in this thread: stop if it has far more modules than there are tensors.

    And if it takes long: some families fill tables, or list pairs of places, in loops of Python as long as
    their configuration says.

    Args:
        called: what describes the model.
        tensors: that the checkpoint has.

    Raises:
        CheckpointError: it has, or takes more than BUILD_SECONDS of a processor.
    """
    left, thread = _FEW + _MODULES * tensors, threading.get_ident()

    def count(*_: Any) -> None:
        nonlocal left
        left -= threading.get_ident() == thread
        if left < 0:
            raise CheckpointError(
                f"{called} describes a model of many more layers than its {tensors} tensors hold"
            )

    hook = torch.nn.modules.module.register_module_module_registration_hook(count)
    try:
        with time_limit(BUILD_SECONDS):
            yield
    except TimeLimitExceeded as error:
        raise CheckpointError(
            f"{called} describes a model that takes more than {BUILD_SECONDS:.0f} s to build, "
            "without its weights; no known model does"
        ) from error
    finally:
        hook.remove()


def meta_model(folder: Path, dtype: torch.dtype, tensors: int = _UNKNOWN) -> PreTrainedModel:
    """The model that a folder's ``config.json`` describes, on the meta device, as if it were not quantised.

    Args:
        tensors: that the checkpoint has.

    Raises:
        CheckpointError: transformers does not know it, or it has many more layers than tensors.
    """
    import transformers

    try:
        config = config_in(folder, tensors)
        for name in (config.architectures or [])[:_ARCHITECTURES]:
            each = getattr(transformers, name, None)
            if isinstance(each, type) and issubclass(each, transformers.PreTrainedModel):
                for part in (config, config.get_text_config(decoder=True)):
                    vars(part).pop("quantization_config", None)
                config._attn_implementation = "eager"
                config.dtype = dtype
                with torch.device("meta"), bounded_build(f"{folder}/config.json", tensors):
                    model: PreTrainedModel = each._from_config(config)
                model.eval()
                return model
    except CheckpointError:
        raise
    except Exception as error:
        # Every architecture fails in a way of its own on a configuration that makes no sense.
        raise CheckpointError(f"{folder}/config.json cannot be used: {error!r}") from error
    raise CheckpointError(
        f"{folder}/config.json names no architecture that transformers "
        f"{transformers.__version__} has (architectures: {config.architectures})"
    )
