"""A trusted checkpoint or manifest, compared with the manifest of an executor.

Everything that a tenant downloads (configuration, tokenizer, embeddings, norms, head) is listed in the
manifest with its SHA-256, and refused if it is not that. So a manifest that lists what a checkpoint of the
tenant's own holds, or what an executor of another operator lists, stands for all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from torch import nn
from transformers.pytorch_utils import Conv1D

from shared.checkpoint import Checkpoint
from shared.errors import ModelMismatch
from shared.wire.messages import Manifest, Member

# What executors that do not collude must agree on.
ATTESTED = (
    "weights",
    "numerics",
    "groups",
    "architecture",
    "base_prefix",
    "parameters",
    "unavailable",
    "files",
    "digest",
)


class CheckpointContents(msgspec.Struct, frozen=True):
    """What a checkpoint holds besides the weights of linear layers.

    ``files``: SHA-256 by name. ``tensors``: of each tensor of the model that the checkpoint stores, SHA-256
    by the names that it has in the model's state dict; tied parameters are one tensor with several.
    """

    architecture: str
    base_prefix: str
    files: dict[str, str]
    tensors: tuple[dict[str, str], ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> CheckpointContents:
        """Of a checkpoint, which is read whole.

        Raises:
            CheckpointError: transformers does not know the model.
        """
        stored = checkpoint.stored
        tensors = []
        for names in stored.tied:
            sources = {name: source for name in names if (source := stored.source(name))}
            # Tied ones are often stored once.
            hashes = {source: stored.sha256(name) for name, source in sources.items()}
            if hashes:
                tensors.append({name: hashes[source] for name, source in sources.items()})
        return cls(
            type(stored.model).__name__,
            stored.prefix,
            {info.name: info.sha256 for info in checkpoint.tenant_files()},
            tuple(tensors),
        )

    def check(self, manifest: Manifest, what: str) -> None:
        """Hold a manifest against it.

        Args:
            what: is trusted, in words.

        Raises:
            ModelMismatch: the manifest lists something else, more, or less.
        """
        for mine, theirs, name in (
            (self.architecture, manifest.architecture, "architecture"),
            (self.base_prefix, manifest.base_prefix, "base_prefix"),
        ):
            if mine != theirs:
                raise ModelMismatch(f"the executor says {name} {theirs[:80]!r}, {what}: {mine!r}")
        files = {info.name: info.sha256 for info in manifest.files}
        for name in sorted(self.files.keys() | files.keys()):
            if self.files.get(name) != files.get(name):
                raise ModelMismatch(
                    f"the executor's {name} is not that of {what}: tokenizer and configuration decide how "
                    "many rows a text has, so both must have the same files"
                )
        known = {name: sha256 for names in self.tensors for name, sha256 in names.items()}
        for info in manifest.parameters:
            if known.get(info.name) != info.sha256:
                raise ModelMismatch(f"the executor's parameter {info.name[:80]} is not that of {what}")
        listed, served = {info.name for info in manifest.parameters}, set(_served(manifest))
        for names in self.tensors:
            # A tensor with several names, such as an embedding that is the head too, is needed for each.
            if not (listed & names.keys() or names.keys() <= served):
                raise ModelMismatch(f"the executor leaves out the parameter {min(names)}, which {what} has")


def open_checkpoint(folder: str | Path, manifest: Manifest) -> Checkpoint:
    """The tenant's copy of what the executor serves.

    Raises:
        CheckpointError: the folder cannot be read.
        ModelMismatch: it holds other weights than the executor serves.
    """
    checkpoint = Checkpoint(folder)
    _check_layers(checkpoint, manifest)
    if not checkpoint.holds(manifest):
        raise ModelMismatch(
            f"the checkpoint {folder} does not hold the weights that the executor serves "
            f"({manifest.model}, weights {manifest.weights[:16]})"
        )
    return checkpoint


def trusted_checkpoint(folder: str | Path, manifest: Manifest) -> Checkpoint:
    """The tenant's copy of what the executor serves, which is also right about all else that it lists.

    Raises:
        CheckpointError, ModelMismatch: as ``open_checkpoint``; other parameters or files.
    """
    checkpoint = open_checkpoint(folder, manifest)
    CheckpointContents.of(checkpoint).check(manifest, f"the checkpoint {folder}")
    return checkpoint


def _check_layers(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Refuse a layer that is said to have another layer's weight, or shape: the digest shows neither."""
    known = {member.name: (member, inputs) for member, inputs in checkpoint.stored.layers()}
    for group in manifest.groups:
        for member in group.members:
            mine = known.get(member.name)
            if mine is None:
                raise ModelMismatch(
                    f"the checkpoint {checkpoint.folder} does not hold the weights that the executor serves: "
                    f"it has no layer {member.name[:80]}"
                )
            if (member, group.inputs) != mine:
                raise ModelMismatch(
                    f"the executor says that {member.name} has {_weight(member, group.inputs)}; in "
                    f"{checkpoint.folder} it has {_weight(*mine)}"
                )


def _weight(member: Member, inputs: int) -> str:
    part = "" if member.expert is None else f", expert {member.expert}"
    axes = (member.outputs, inputs)
    return (
        f"the weight {member.tensor[:80]}{part}, {'made' if member.made else 'stored'} as "
        f"{list(axes[::-1] if member.transposed else axes)}"
    )


def check_agreement(url: str, source: Manifest, provider: Manifest) -> None:
    """Whether a mask source lists what the provider lists.

    Raises:
        ModelMismatch: it does not; one of the two lies, or is mistaken.
    """
    for field in ATTESTED:
        mine, theirs = getattr(source, field), getattr(provider, field)
        if mine != theirs:
            raise ModelMismatch(
                f"provider and mask source {url} do not serve the same: {_difference(field, mine, theirs)}. "
                "One of them is mistaken or lies; ask both which checkpoint they serve (the source: "
                f"{source.model[:80]!r}, {source.numerics[:20]}, digest {source.digest[:16]}; the provider: "
                f"{provider.model[:80]!r}, {provider.numerics[:20]}, digest {provider.digest[:16]})"
            )


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model below a PEFT wrapper, or the model itself."""
    get = getattr(model, "get_base_model", None)
    return get() if callable(get) else model


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a model by their name below the base model, as manifests name them.

    A layer that PEFT has wrapped goes by the name that it had before.
    """
    inner = base_model(model)
    prefix = getattr(inner, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(inner, prefix) else ""
    return {
        name.removeprefix(prefix).removesuffix(".base_layer"): module
        for name, module in inner.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
    }


def _served(manifest: Manifest) -> Iterator[str]:
    """The weights of layers that the executor multiplies with, as a state dict may name them."""
    for group in manifest.groups:
        if not group.head:
            for member in group.members:
                yield f"{member.name}.weight"
                yield f"{manifest.base_prefix}.{member.name}.weight"


def _difference(field: str, mine: object, theirs: object) -> str:
    if field in ("files", "parameters"):
        one, other = ({each.name: each for each in listed} for listed in (mine, theirs))  # type: ignore[attr-defined]
        differ = [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]
        return f"{field[:-1]} {min(differ)[:80]}" if differ else f"another order of {field}"
    return f"{'other' if field.endswith('s') else 'another'} {field}"
