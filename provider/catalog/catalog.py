"""The catalog of tenants' downloads: manifest, parameters, files and scales. Nothing multiplies here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import msgspec
import torch

from provider.catalog.discovery import Discovery
from shared.checkpoint import Checkpoint
from shared.errors import CheckpointError, WireError
from shared.wire.header import BYTES, DTYPE_CODES, DTYPE_NAMES, Header, Operation, wire_dtypes
from shared.wire.messages import Fetch, GroupInfo, Limits, Manifest, digest_of, encode
from shared.wire.protocol import MAX_ANSWER_CONTROL_BYTES

log = logging.getLogger(__name__)


class _Download(NamedTuple):
    """Something of ``length`` rows, or bytes of a file, and how a range of them is read."""

    length: int
    columns: int
    dtype: int
    read: Callable[[int, int], torch.Tensor]


class Catalog:
    """The manifest of one executor, and everything that it lists.

    Args:
        checkpoint: what is served.
        discovery: what it offers.
        numerics: in which it is served.
        groups: those found, on the ring with bounds.
        scales: float32 [O] by number of group, on the ring.
        limits: what one message may hold.
        recorded: tell tenants that what they send is kept.
        part: the groups [first, stop) that are served; None: all.

    Raises:
        CheckpointError: the manifest is larger than any tenant takes.

    Attributes:
        checkpoint, manifest: the files are those that the manifest lists.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        discovery: Discovery,
        *,
        numerics: str,
        groups: Sequence[GroupInfo],
        scales: Mapping[int, torch.Tensor],
        limits: Limits | None = None,
        recorded: bool = False,
        part: tuple[int, int] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        manifest = Manifest(
            server="symbiosis/1",
            model=checkpoint.name,
            architecture=discovery.architecture,
            base_prefix=discovery.base_prefix,
            weights=checkpoint.weights_digest(groups),
            digest="",
            numerics=numerics,
            wire_dtypes=wire_dtypes(numerics),
            limits=limits or Limits(max_message_bytes=64 << 20, max_rows=65536),
            groups=tuple(groups),
            parameters=discovery.parameters,
            unavailable=discovery.unavailable,
            files=checkpoint.tenant_files(),
            recorded=recorded,
            part=part,
        )
        self.manifest = msgspec.structs.replace(manifest, digest=digest_of(manifest))
        size = len(encode(self.manifest))
        if size > MAX_ANSWER_CONTROL_BYTES:
            raise CheckpointError(
                f"the manifest of {checkpoint.name} has {size} bytes, and no tenant takes more "
                f"than {MAX_ANSWER_CONTROL_BYTES}: the model has too many layers and parameters"
            )
        if not any(file.name == "tokenizer.json" for file in manifest.files):
            log.warning(
                "%s has no tokenizer.json, the only kind that tenants take, so they get no tokenizer; to "
                "make one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
                checkpoint.folder,
            )
        self._parameters = {p.name: p for p in discovery.parameters}
        sources = map(checkpoint.stored.source, self._parameters)
        checkpoint.locate(key for source in sources if source is not None for key in source.keys)
        self._scales = {str(group): each for group, each in scales.items()}  # no other spelling is one

    def fetch(self, request: Fetch, request_id: int) -> tuple[Header, Callable[[], torch.Tensor]]:
        """The header that announces a piece of a parameter, file or group's scales, and what reads it.

        Raises:
            WireError: ``fetch``, for a name or range that is not in the manifest; ``too_large``.
        """
        download = self._download(request)
        if download is None:
            raise WireError("fetch", "no such parameter or file; the manifest lists what there is")
        length, columns, dtype, read = download
        if not 0 <= request.start < request.stop <= length:
            raise WireError("fetch", f"range outside 0 to {length}")
        rows = request.stop - request.start
        if request.kind == "file":  # bytes lie in one row
            rows, columns = 1, rows
        header = Header(Operation.REPLY, dtype=dtype, request_id=request_id, rows=rows, columns=columns)
        if header.payload_bytes > self.manifest.limits.max_message_bytes:
            raise WireError("too_large", "ask for fewer rows, or a smaller piece of a file")
        return header, partial(read, request.start, request.stop)

    def _download(self, request: Fetch) -> _Download | None:
        name = request.name
        if request.kind == "parameter" and name in self._parameters:
            info = self._parameters[name]
            dtype = DTYPE_CODES[DTYPE_NAMES[info.dtype]]
            return _Download(*info.rows, dtype, partial(self._read_parameter, name))
        if request.kind == "scales" and name in self._scales:
            scales = self._scales[name]
            return _Download(
                len(scales), 1, DTYPE_CODES[scales.dtype], lambda start, stop: scales[start:stop]
            )
        sizes = {file.name: file.size for file in self.manifest.files} if request.kind == "file" else {}
        return _Download(sizes[name], 1, BYTES, partial(self._read_file, name)) if name in sizes else None

    def _read_parameter(self, name: str, start: int, stop: int) -> torch.Tensor:
        info = self._parameters[name]
        if not info.shape:  # a single number has no rows
            return self.checkpoint.stored.read(name)
        each = info.rows[0] // info.shape[0]  # rows of one of the first axis
        if each == 1:
            return self.checkpoint.stored.read(name, slice(start, stop)).contiguous()
        return torch.cat(
            [
                self._first_axis(name, at)[max(0, start - at * each) : stop - at * each]
                for at in range(start // each, -(-stop // each))
            ]
        )

    @lru_cache(maxsize=1)  # noqa: B019 - it lives as long as its executor
    def _first_axis(self, name: str, at: int) -> torch.Tensor:
        """One of a parameter's first axis, such as an expert, as rows; made once for its pieces in order."""
        info = self._parameters[name]
        return self.checkpoint.stored.read(name, expert=at).reshape(-1, info.rows[1])

    def _read_file(self, name: str, start: int, stop: int) -> torch.Tensor:
        """A piece of a file, as it was when the manifest was made."""
        return torch.frombuffer(bytearray(self.checkpoint.files[name][start:stop]), dtype=torch.uint8)
