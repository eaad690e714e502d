"""The folder of an adapter that may be anybody's: how `generate`, ``load_adapter`` and the gateway read it.

Its files are copied, each up to the size that it can have, so that what is checked is what is used. Then PEFT
says which tensors it would place where: it is given tensors and layers on the meta device.

By these rules a folder is refused:

- ``storage``: a file is missing, no plain file, larger than an adapter's, or not below the gateway's folder.
- ``adapter_config``: another method than those that are loaded, weights of the base that training began with
  a change of, a key that is not known, or a value that it cannot have.
- ``patterns``: a pattern or a table is too large, or a pattern repeats too much or takes too long.
- here: a tensor has a long name, no finite floats or another shape, is missing, or belongs to no layer or to
  the base; or the file's header is too large.
- ``provenance``: the record is damaged, or names another base.
- ``folders``: PEFT has written over a parameter of the base.
- ``gateway.adapters``: more than LoRA of linear layers, too high a rank, or no name for a model.
- ``gateway.worker``: its matrices make absurd numbers.

A tokenizer in the folder is not read (``command_line.opened``).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftConfig, PeftModel, PeftType, get_peft_model_state_dict, set_peft_model_state_dict
from peft.auto import MODEL_TYPE_TO_PEFT_MODEL_MAPPING
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared.checkpoint import NAME_LENGTH
from shared.errors import ConfigurationError, ModelMismatch, SymbiosisError
from tenant_sdk.model.remote_weight import RemoteWeight
from tenant_sdk.storage import ADAPTER_CONFIG as CONFIG
from tenant_sdk.storage import ADAPTER_WEIGHTS as WEIGHTS
from tenant_sdk.storage import TENSORS_HEADER_BYTES, UNREADABLE_TENSORS, check_adapter_folder, copy_file
from tenant_sdk.trust.attestation import base_model
from tenant_sdk.tuning.adapter_config import MAX_JSON_BYTES, read_adapter_config
from tenant_sdk.tuning.adapters import without_false_warnings
from tenant_sdk.tuning.provenance import RECORD

_ENTRY_BYTES = NAME_LENGTH + 256  # of a tensor in a file's header: its name, type, shape and place
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WIDEST = 8  # bytes of a number
# PEFT's names for the base model's layers inside of its own.
_INNER = frozenset({"base_layer", "original_module"})


class CheckedAdapter(NamedTuple):
    """An adapter that fits a model.

    Attributes:
        config: without patterns.
        overwritten: names of the model's own parameters that PEFT will write: those that may be, those that
            it writes with what they are already, and biases that the adapter was trained with.
        digest: SHA-256 over the content of its files.
    """

    config: PeftConfig
    overwritten: set[str]
    digest: str


def copy_and_check(
    source: Path,
    folder: Path,
    model: nn.Module,
    *,
    own_modules: Collection[str] = (),
    within: Path | None = None,
    check: Callable[[PeftConfig], None] = lambda _: None,
) -> CheckedAdapter:
    """Copy an adapter, and check it against a model, which is left as it was.

    Args:
        source: in PEFT's format; anybody may have written it.
        folder: empty; nobody else can change what is in it.
        model: without adapters.
        own_modules: names of its parameters that may be written over, such as embeddings that the user has
            resized.
        within: the folder that adapters are taken from; None: wherever they are.
        check: raises a ConfigurationError for an adapter that the caller has no use for.

    Raises:
        ConfigurationError: it is no adapter, is damaged, of a kind that is not loaded, or holds other tensors
            than its configuration asks for.
        ModelMismatch: it was made for another model.
        OSError: the disk is full.
    """
    check_adapter_folder(source)
    digest = hashlib.sha256()

    def copy(name: str, max_bytes: int) -> None:
        digest.update(f"{name} {copy_file(source / name, folder / name, max_bytes, within)} ".encode())

    try:
        for name in (CONFIG, RECORD):
            if (source / name).exists():
                copy(name, MAX_JSON_BYTES)
        config = read_adapter_config(folder, model)
        check(config)
        with _with_meta_adapter(model, config, source) as meta_adapter:
            copy(WEIGHTS, meta_adapter.max_file_bytes)
            overwritten = _check_weights(folder / WEIGHTS, meta_adapter, own_modules)
    except SymbiosisError as error:
        error.structured_message = error.structured_message.replaced(str(folder), str(source))
        raise
    return CheckedAdapter(config, overwritten, digest.hexdigest())


@dataclass(frozen=True)
class _MetaAdapter:
    """A model with an adapter whose tensors have no values.

    Attributes:
        config: as read.
        state: all tensors, by PEFT's names.
        expected: the adapter's, by the names that a file has for them; a bias of the base's is among them.
    """

    model: PeftModel
    config: Any
    state: dict[str, Tensor]
    expected: dict[str, Tensor]

    @property
    def max_header_bytes(self) -> int:
        """The most bytes that the file can have beside its numbers."""
        return TENSORS_HEADER_BYTES + _ENTRY_BYTES * (len(self.expected) + len(self.state))

    @property
    def max_file_bytes(self) -> int:
        """The most bytes that the file can have, with what it may repeat of the base's."""
        numbers = sum(each.numel() for each in self.expected.values())
        return _WIDEST * (numbers + sum(map(_held_numbers, self.state.values()))) + self.max_header_bytes

    def is_base(self, name: str) -> bool:
        """Whether a name of a file is that of a tensor of the base model, to which PEFT would write."""
        return name in self.state and not self.state[name].is_meta

    def dry_run(self, tensors: Mapping[str, Tensor], file: Path) -> tuple[list[str], list[str]]:
        """Have PEFT load tensors on the meta device; returns names that it does not know, and missing ones.

        Raises:
            ModelMismatch: some do not fit.
        """
        if self.config.is_prompt_learning:
            for name in tensors.keys() & self.expected.keys():
                _check_shape(tensors[name], self.expected[name], name, file)
            return sorted(tensors.keys() - self.expected), sorted(self.expected.keys() - tensors)
        if self.config.peft_type == PeftType.ADALORA:
            ranks = self.config.rank_pattern or {}
            tensors = {name: _unpruned(name, each, ranks) for name, each in tensors.items()}
        try:
            result: Any = set_peft_model_state_dict(self.model, tensors)
        except KeyError as error:
            return [], [str(error.args[0])]
        except Exception as error:  # torch has many kinds for shapes that do not fit
            raise _other_base_error(file, str(error)) from error
        # A tensor that several layers have is there if one of its names is.
        mine = {id(each) for each in self.expected.values() if each.is_meta}
        missing = dict.fromkeys(result.missing_keys)
        mine -= {id(each) for name, each in self.state.items() if name not in missing}
        return list(result.unexpected_keys), [name for name in missing if id(self.state[name]) in mine]


@contextmanager
def _with_meta_adapter(model: nn.Module, config: PeftConfig, source: Path) -> Iterator[_MetaAdapter]:
    """Add a new adapter on the meta device to a model, for this block."""
    copied: Any = copy.deepcopy(config)
    copied.inference_mode = True
    if copied.peft_type == PeftType.ADALORA:  # sizes before it was pruned
        copied.rank_pattern = None
    trained = [(each, each.requires_grad) for each in model.parameters()]
    before = [(each, dict(each._modules), dict(each._parameters)) for each in model.modules()]
    base = {id(each) for each in (*model.parameters(), *model.buffers())}
    # Classes for a task expect transformers' models.
    task = copied.task_type if isinstance(model, PreTrainedModel) else None
    kind = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(task or "", PeftModel)
    try:
        try:
            with without_false_warnings(""):
                adapted: PeftModel = kind(model, copied, low_cpu_mem_usage=True)
        except Exception as error:  # every method has errors of its own for a model that lacks layers
            raise _other_base_error(source / WEIGHTS, str(error)) from error
        tables: Any = [each for module in adapted.modules() for each in (module._parameters, module._buffers)]
        for tensors in tables:  # some that are the adapter's PEFT has made with values
            for name, each in tensors.items():
                if each is not None and id(each) not in base and not each.is_meta:
                    empty = torch.empty_like(each, device="meta")
                    tensors[name] = nn.Parameter(empty) if isinstance(each, nn.Parameter) else empty
        state = adapted.state_dict(keep_vars=True)
        expected = get_peft_model_state_dict(adapted, dict(state), save_embedding_layers=False)
        yield _MetaAdapter(adapted, config, state, expected)
    finally:
        for module, modules, parameters in before:  # PEFT's `unload` would leave modules to save in it
            module._modules, module._parameters = modules, parameters
        vars(model).pop("peft_config", None)
        for each, requires in trained:
            each.requires_grad_(requires)


def _held_numbers(tensor: Tensor) -> int:
    """Numbers of a tensor that are in this process, where an expanded one has few."""
    if tensor.is_meta or isinstance(tensor, RemoteWeight):
        return 0
    return min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())


def _check_weights(file: Path, meta_adapter: _MetaAdapter, own_modules: Collection[str]) -> set[str]:
    """Refuse weights other than those that PEFT expects and would place; see ``CheckedAdapter``."""
    _check_header(file, meta_adapter.max_header_bytes)
    named = base_model(meta_adapter.model).named_parameters()
    # A stub of zeros is no weight that a file could repeat.
    base = {_base_name(name): each for name, each in named if _held_numbers(each) == each.numel()}
    tensors, overwritten, biases = dict[str, Tensor](), set[str](), set[str]()
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                described = _describe_tensor(opened, name, file)
                place, known = _base_name(name), name in meta_adapter.expected
                if known and meta_adapter.is_base(name):
                    _check_shape(described, meta_adapter.expected[name], name, file)
                    biases.add(name)
                elif place in own_modules or (not known and _is_unchanged(base.get(place), opened, name)):
                    overwritten.add(place)
                elif meta_adapter.is_base(name):
                    raise _unexpected_tensor_error(file, name)
                else:
                    tensors[name] = described
    except UNREADABLE_TENSORS as error:
        raise ConfigurationError(f"cannot read {file}: {error}") from error
    extra, missing = meta_adapter.dry_run(tensors, file)
    missing += [name for name in meta_adapter.expected if meta_adapter.is_base(name) and name not in biases]
    if extra:
        raise _unexpected_tensor_error(file, extra[0])
    if missing:
        raise ConfigurationError(f"{file} lacks {_name_in_file(missing[0])!r}, which {CONFIG} asks for")
    _check_finite(file)
    return overwritten | set(map(_base_name, biases))


def _check_header(file: Path, max_bytes: int) -> None:
    """Refuse a file whose description of its tensors is larger than that of this adapter can be."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
    if size > max_bytes:
        raise ConfigurationError(
            f"cannot read {file}: its header has {size} bytes; for this adapter, {max_bytes} are the most"
        )


def _describe_tensor(opened: Any, name: str, file: Path) -> Tensor:
    """A tensor of a file, on the meta device: its numbers are not read.

    Raises:
        ConfigurationError: it is not of floats.
    """
    if len(name) > NAME_LENGTH:
        raise ConfigurationError(
            f"{file} has {name[:80]!r}..., a name of {len(name)} characters; {NAME_LENGTH} are the most"
        )
    described = opened.get_slice(name)
    if (kind := described.get_dtype()) not in _FLOATS:
        raise ConfigurationError(f"{name} in {file} holds no plain floats")
    return torch.empty(described.get_shape(), dtype=_FLOATS[kind], device="meta")


def _check_shape(found: Tensor, expected: Tensor, name: str, file: Path) -> None:
    if found.shape != expected.shape:
        shapes = f"{list(found.shape)}, not {list(expected.shape)}"
        raise _other_base_error(file, f"size mismatch for {name}: {shapes}")


def _check_finite(file: Path) -> None:
    """Refuse a file with NaN or infinity, whose tensors fit."""
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            if not opened.get_tensor(name).isfinite().all():
                raise ConfigurationError(f"{name} in {file} holds NaN or infinity")


def _is_unchanged(held: Tensor | None, opened: Any, name: str) -> bool:
    """Whether a tensor of a file is one that the model holds already."""
    if held is None or list(held.shape) != opened.get_slice(name).get_shape():
        return False
    return torch.equal(opened.get_tensor(name).to(held), held)


def _base_name(name: str) -> str:
    """The base model's name for a tensor."""
    parts = name.removeprefix("base_model.model.").split(".")
    return ".".join(part for part in parts if part not in _INNER)


def _unpruned(name: str, tensor: Tensor, ranks: Mapping[str, Any]) -> Tensor:
    """A tensor of AdaLoRA's, on the meta device, as it was before ranks were taken from its layer."""
    layer, _, part = name.removeprefix("base_model.model.").rpartition(".")
    ranks_kept, shape, axis = ranks.get(f"{layer}.lora_E"), list(tensor.shape), int(part == "lora_B")
    if ranks_kept is None or len(shape) != 2 or shape[axis] != sum(ranks_kept):
        return tensor
    shape[axis] = len(ranks_kept)
    return tensor.new_empty(shape)


def _unexpected_tensor_error(file: Path, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{file} holds {_name_in_file(name)!r}, which is no part of the adapter that {CONFIG} describes, on "
        "this model: it would be left out, or written over the base model's. Take it out of the file"
    )


def _other_base_error(file: Path, error: str) -> ModelMismatch:
    """Of the mismatches that torch lists, one a line below a heading, the first."""
    heading, *mismatches = [line.strip(" \t.") for line in error.splitlines() if line.strip()] or [""]
    more = f" (and {len(mismatches) - 1} more)" if len(mismatches) > 1 else ""
    first = f"{mismatches[0]}{more}" if mismatches else heading
    return ModelMismatch(f"the adapter in {file.parent} was made for another base model: {first}")


def _name_in_file(name: str) -> str:
    """A tensor as a file calls it, without the name that PEFT gives to adapters."""
    return ".".join(part for part in name.removeprefix("base_model.model.").split(".") if part != "default")
