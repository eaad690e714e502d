"""A Hugging Face checkpoint, read one tensor at a time, safetensors only.

The provider reads the layers that it serves; a tenant that has the checkpoint reads the same
layers to compute effects itself. Nothing here unpickles anything.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from shared.command_line import WEIGHTS, WEIGHTS_INDEX, check_model_folder
from shared.errors import CheckpointError
from shared.hub import checkpoint_folder, id_of_snapshot, own_file
from shared.recipes import Layout
from shared.stored import Stored, bytes_of
from shared.wire.messages import TENANT_FILES, FileInfo, GroupInfo, Manifest, Member

# Of a tensor, in characters. Transformers and PEFT search names for patterns, in the square of their length.
NAME_LENGTH = 500


_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}


class _Place(NamedTuple):
    """Where a tensor lies in a file of safetensors."""

    path: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, rows: slice | None) -> torch.Tensor:
        """The tensor, or rows of its first axis, as a copy.

        Raises:
            CheckpointError: the file has become shorter.
        """
        start, shape = 0, self.shape
        if rows is not None:
            start, stop, _ = rows.indices(self.shape[0])
            shape = (max(0, stop - start), *self.shape[1:])
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        data = bytearray(math.prod(shape) * self.dtype.itemsize)
        if not data:
            return torch.empty(shape, dtype=self.dtype)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.begin + start * row)
            left = memoryview(data)
            while left and (count := file.readinto(left)):
                left = left[count:]
        if left:
            raise CheckpointError(f"{self.path} has become shorter since it was opened")
        return torch.frombuffer(data, dtype=self.dtype).reshape(shape)


def _places(path: Path) -> dict[str, _Place]:
    """Of the tensors of a file that safetensors has opened."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {
        name: _Place(path, 8 + size + each["data_offsets"][0], _DTYPES[each["dtype"]], (*each["shape"],))
        for name, each in header.items()
        if name != "__metadata__" and each["dtype"] in _DTYPES
    }


class Checkpoint:
    """Names, shapes and lazily read tensors of a checkpoint folder.

    Args:
        folder: contains ``config.json`` and ``model.safetensors``, or shards with their index; or a model
            of a hub, ``hub:NAME[@REVISION]`` (``shared.hub``).

    Raises:
        CheckpointError: folder or model missing, no safetensors file, or a file that cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = checkpoint_folder(folder)
        check_model_folder(self.folder)
        self._file_of = self._find_tensors()
        self._places: dict[str, _Place] = {}
        self._kept = threading.local()

    def _find_tensors(self) -> dict[str, Path]:
        index = own_file(self.folder, WEIGHTS_INDEX)
        if index.is_file():
            try:
                shards = {str(shard) for shard in json.loads(index.read_text())["weight_map"].values()}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"{index} is damaged: {error}") from error
        else:
            shards = {WEIGHTS}
        file_of: dict[str, Path] = {}
        for shard in sorted(shards):
            try:
                path = own_file(self.folder, Path(shard).name)
            except ValueError as error:
                raise CheckpointError(f"{index} is damaged: no file can be called {shard!r:.80}") from error
            try:
                with safe_open(path, framework="pt") as file:
                    file_of.update(dict.fromkeys(file.keys(), path))
            except (OSError, SafetensorError, MemoryError, RuntimeError) as error:
                if "Cannot allocate memory" in str(error):  # it is mapped whole, whatever is then read of it
                    raise CheckpointError(
                        f"{path} cannot be mapped, for it is larger than this machine's memory or limits "
                        "allow: split the checkpoint (save_pretrained(max_shard_size=...)), or raise the "
                        "limit on address space (ulimit -v, vm.overcommit_memory)"
                    ) from error
                raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
        for name, path in file_of.items():
            if len(name) > NAME_LENGTH:
                raise CheckpointError(
                    f"{path} has {name[:80]!r}..., a name of {len(name)} characters; "
                    f"{NAME_LENGTH} are the most"
                )
        return file_of

    @property
    def name(self) -> str:
        """What people call the model: its name and commit at a hub, or else the folder's name."""
        folder = self.folder.resolve()
        return str(id_of_snapshot(folder) or folder.name)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @cached_property
    def stored(self) -> Stored:
        """How the model's parameters are stored here."""
        return Stored(self)

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._file_of)

    def file_bytes(self) -> int:
        """The size of the files with tensors."""
        return sum(path.stat().st_size for path in set(self._file_of.values()))

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """One tensor in its stored dtype, or the given rows of its first axis."""
        place = self._places.get(name)
        if place is not None:
            return place.read(rows)
        file = self._file(name)
        tensor: torch.Tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        return tensor

    def locate(self, names: Iterable[str]) -> None:
        """Have these tensors read without safetensors, which reads the names of all tensors of a file.

        It keeps Python's lock while it does, for 70 ms with 18,000 names (EPYC), so no other thread runs.
        """
        wanted = set(names) & self._file_of.keys()
        for path in {self._file_of[name] for name in wanted}:
            self._places |= {name: place for name, place in _places(path).items() if name in wanted}

    def layout(self, name: str) -> Layout:
        """Shape and dtype of a tensor, without reading more than one row."""
        file = self._file(name)
        part = file.get_slice(name)
        shape = tuple(part.get_shape())
        return shape, (part[0:1] if shape else file.get_tensor(name)).dtype

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """While it lasts, this thread opens a file once for tensors that it reads one after the other.

        To open one is to read the names of all its tensors, of which experts have thousands. It is mapped as
        long as it is open, so what was read of it counts as this process's memory.
        """
        before = getattr(self._kept, "files", None)
        self._kept.files = {} if before is None else before
        try:
            yield
        finally:
            self._kept.files = before

    def _file(self, name: str) -> Any:
        path, files = self._file_of[name], getattr(self._kept, "files", None)
        if files is None:
            return safe_open(path, framework="pt")
        if path not in files:
            files.clear()  # one at a time
            files[path] = safe_open(path, framework="pt")
        return files[path]

    def member_weight(self, member: Member, outputs: slice | None = None) -> torch.Tensor:
        """The frozen weight W [outputs, inputs] of a layer, or some of its rows, as stored or made."""
        if member.made or member.expert is not None:
            weight = self._own_axes(member)
            weight = weight.T if member.transposed else weight
            return weight if outputs is None else weight[outputs]
        if outputs is None or not member.transposed:
            weight = self.read(member.tensor, outputs)
        else:
            weight = self._file(member.tensor).get_slice(member.tensor)[:, outputs]
        return weight.T if member.transposed else weight

    def _own_axes(self, member: Member) -> torch.Tensor:
        """A layer's weight, of which ``transposed`` says what its axes are."""
        if member.made:
            return self.stored.read(member.tensor, expert=member.expert)
        if member.expert is None:
            return self.read(member.tensor)
        return self.read(member.tensor, slice(member.expert, member.expert + 1))[0]

    def weights_digest(self, groups: Iterable[GroupInfo]) -> str:
        """SHA-256 over name, dtype, shape and bytes of every served weight, stored or made, in order of name.

        Whoever has the checkpoint gets the same digest, whatever numerics an executor serves it in.
        """
        return self.digest_of_groups(group for group in groups if not group.head)

    def digest_of_groups(self, groups: Iterable[GroupInfo]) -> str:
        """The same with the head, if that is among them."""
        total = hashlib.sha256()
        members = {
            (member.tensor, -1 if member.expert is None else member.expert, member.made): member
            for group in groups
            for member in group.members
        }
        with self.kept_open():
            for tensor, expert, is_made in sorted(members):
                weight = self._own_axes(members[tensor, expert, is_made])
                name = tensor if expert < 0 else f"{tensor}[{expert}]"
                total.update(f"{name}|{weight.dtype}|{tuple(weight.shape)}|".encode())
                total.update(bytes_of(weight))
        return total.hexdigest()

    def has(self, member: Member) -> bool:
        """Whether there is a weight of a layer; whether it has the layer's shape is not looked at."""
        return self.stored.source(member.tensor) is not None if member.made else member.tensor in self

    def holds(self, manifest: Manifest) -> bool:
        """Whether these are the served weights of an executor with this manifest."""
        members = [member for group in manifest.groups if not group.head for member in group.members]
        with self.kept_open():
            return all(map(self.has, members)) and self.weights_digest(manifest.groups) == manifest.weights

    @cached_property
    def files(self) -> dict[str, bytes]:
        """Configuration and tokenizer files that the folder has: what tenants may download of it.

        Raises:
            CheckpointError: one is larger than any tenant accepts, or lies elsewhere.
        """
        contents = {}
        for name, max_bytes in TENANT_FILES.items():
            path = own_file(self.folder, name)
            if path.is_file():
                with path.open("rb") as file:
                    contents[name] = file.read(max_bytes + 1)
                if len(contents[name]) > max_bytes:
                    raise CheckpointError(
                        f"{path} has more than {max_bytes} bytes, the most that a tenant takes"
                    )
        return contents

    def tenant_files(self) -> tuple[FileInfo, ...]:
        """Of ``files`` the sizes and SHA-256.

        Raises:
            CheckpointError: see there.
        """
        files = self.files.items()
        return tuple(FileInfo(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in files)
