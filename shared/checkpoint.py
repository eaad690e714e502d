"""A Hugging Face checkpoint, read one tensor at a time, safetensors only.

The provider reads the layers that it serves; a tenant that has the checkpoint reads the same
layers to compute effects itself. Nothing here unpickles anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from shared.errors import CheckpointError
from shared.hub import checkpoint_folder, id_of_snapshot
from shared.options import WEIGHTS, WEIGHTS_INDEX, check_model_folder
from shared.wire.header import DTYPE_CODES
from shared.wire.messages import TENANT_FILES, FileInfo, GroupInfo, Manifest, Member


class Checkpoint:
    """Names, shapes and lazily read tensors of a checkpoint folder.

    Args:
        folder: contains ``config.json`` and ``model.safetensors``, or shards with their index; or the name
            of a model at a hub (``shared.hub``).

    Raises:
        CheckpointError: folder or model missing, no safetensors file, or a file that cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = checkpoint_folder(folder)
        check_model_folder(self.folder)
        self._file_of = self._find_tensors()

    def _find_tensors(self) -> dict[str, Path]:
        if (self.folder / WEIGHTS_INDEX).is_file():
            try:
                shards = {
                    str(shard)
                    for shard in json.loads((self.folder / WEIGHTS_INDEX).read_text())["weight_map"].values()
                }
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{self.folder / WEIGHTS_INDEX} is damaged: {error}") from error
        else:
            shards = {WEIGHTS}
        found: dict[str, Path] = {}
        for shard in sorted(shards):
            path = self.folder / Path(shard).name
            try:
                with safe_open(path, framework="pt") as file:
                    found.update(dict.fromkeys(file.keys(), path))
            except (OSError, SafetensorError, MemoryError, RuntimeError) as error:
                if "Cannot allocate memory" in str(error):  # it is mapped whole, whatever is then read of it
                    raise CheckpointError(
                        f"{path} cannot be mapped, for it is larger than this machine's memory or limits "
                        "allow: split the checkpoint (save_pretrained(max_shard_size=...)), or raise the "
                        "limit on address space (ulimit -v, vm.overcommit_memory)"
                    ) from error
                raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
        return found

    @property
    def name(self) -> str:
        """What people call the model: its name and commit at a hub, or else the folder's name."""
        folder = self.folder.resolve()
        return str(id_of_snapshot(folder) or folder.name)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def stored_as(self, name: str, prefix: str) -> str | None:
        """The tensor that holds an entry of the model's state dict, or None.

        A checkpoint may have been saved with or without the head, so with or without the base model's prefix.
        """
        candidates = [name, below(name, prefix), f"{prefix}.{name}"]
        candidates += [c.replace("LayerNorm.weight", "LayerNorm.gamma") for c in candidates]
        candidates += [c.replace("LayerNorm.bias", "LayerNorm.beta") for c in candidates]
        return next((c for c in candidates if c in self), None)

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._file_of)

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """One tensor in its stored dtype, or the given rows of its first axis."""
        with safe_open(self._file_of[name], framework="pt") as file:
            if rows is None:
                tensor: torch.Tensor = file.get_tensor(name)
            else:
                tensor = file.get_slice(name)[rows]
        return tensor

    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype, without reading more than one row."""
        with safe_open(self._file_of[name], framework="pt") as file:
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            dtype = (part[0:1] if shape else file.get_tensor(name)).dtype
        if dtype not in DTYPE_CODES:
            raise CheckpointError(f"{name} has dtype {dtype}, which is not supported")
        return shape, dtype

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same values."""
        return one == other or torch.equal(self.read(one), self.read(other))

    def member_weight(self, member: Member, outputs: slice | None = None) -> torch.Tensor:
        """The frozen weight W [outputs, inputs] of a layer, or some of its rows, in its stored dtype."""
        if outputs is None or not member.transposed:
            weight = self.read(member.tensor, outputs)
        else:
            with safe_open(self._file_of[member.tensor], framework="pt") as file:
                weight = file.get_slice(member.tensor)[:, outputs]
        return weight.T if member.transposed else weight

    def sha256(self, name: str) -> str:
        """Of a tensor's dtype, its axes, and its bytes as stored.

        The same bytes are another parameter under another dtype or in another shape.
        """
        tensor = self.read(name).contiguous()
        total = parameter_hash(str(tensor.dtype).removeprefix("torch."), tensor.shape)
        total.update(_bytes(tensor))
        return total.hexdigest()

    def weights_digest(self, groups: Iterable[GroupInfo]) -> str:
        """SHA-256 over name, dtype, shape and bytes of every served weight as stored, in order of name.

        Whoever has the checkpoint gets the same digest, whatever numerics an executor serves it in.
        """
        return self.digest_of_groups(group for group in groups if not group.head)

    def digest_of_groups(self, groups: Iterable[GroupInfo]) -> str:
        """The same with the head, if that is among them."""
        total = hashlib.sha256()
        for tensor in sorted({member.tensor for group in groups for member in group.members}):
            weight = self.read(tensor).contiguous()
            total.update(f"{tensor}|{weight.dtype}|{tuple(weight.shape)}|".encode())
            total.update(_bytes(weight))
        return total.hexdigest()

    def holds(self, manifest: Manifest) -> bool:
        """Whether these are the served weights of an executor with this manifest."""
        stored = all(m.tensor in self for g in manifest.groups if not g.head for m in g.members)
        return stored and self.weights_digest(manifest.groups) == manifest.weights

    def tenant_files(self) -> tuple[FileInfo, ...]:
        """The configuration and tokenizer files that the folder has, with size and SHA-256.

        Raises:
            CheckpointError: one is larger than any tenant accepts.
        """
        infos = []
        for name, most in TENANT_FILES.items():
            path = self.folder / name
            if path.is_file():
                data = path.read_bytes()
                if len(data) > most:
                    raise CheckpointError(f"{path} has {len(data)} bytes; no tenant takes more than {most}")
                infos.append(FileInfo(name, len(data), hashlib.sha256(data).hexdigest()))
        return tuple(infos)


def parameter_hash(dtype: str, shape: Iterable[int]) -> hashlib._Hash:
    """What a parameter's SHA-256 begins with; its bytes follow."""
    return hashlib.sha256(f"{dtype} {','.join(map(str, shape))} ".encode())


def below(name: str, prefix: str) -> str:
    """A name as it is below the base model."""
    return name.removeprefix(f"{prefix}.") if prefix else name


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous tensor, not copied."""
    flat: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return flat
