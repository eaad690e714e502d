"""The base executor: frozen weights and a manifest, no state of any tenant."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from provider.discovery import discover
from provider.weights import NUMERICS, WIRE_DTYPES
from shared.checkpoint import Checkpoint
from shared.errors import ConfigurationError, WireError
from shared.header import BYTES, DTYPE_CODES, DTYPE_NAMES, Header, Operation
from shared.messages import Fetch, Limits, Manifest

log = logging.getLogger(__name__)

T = TypeVar("T")
Progress = Callable[[Iterable[T], str], Iterable[T]]


def _silent(items: Iterable[T], _what: str) -> Iterable[T]:
    return items


class Scheduler(Protocol):
    """Decides when a request's product runs and with which others."""

    def run(self, header: Header, rows: torch.Tensor, answer: Header) -> torch.Tensor:
        """Block until the product is done; the answer's payload, flat."""
        ...

    def answered(self, header: Header, stop: Callable[[], bool]) -> None:
        """The answer is on its way; use the time until ``stop()``, when the tenant's next request is here."""
        ...


class BaseExecutor:
    """Serves every group of one checkpoint in one numerics (Symbiosis §3.2).

    Args:
        folder: the checkpoint.
        numerics: a name in ``NUMERICS``.
        limits: what one message may hold.
        serve_head: also serve the output head.
        progress: wraps an iterable to show how far loading is, as ``tqdm`` does.

    Raises:
        CheckpointError: see ``discover``.
        ConfigurationError: unknown numerics.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        numerics: str = "float32",
        limits: Limits | None = None,
        serve_head: bool = False,
        progress: Progress = _silent,  # type: ignore[type-arg]
    ) -> None:
        if numerics not in NUMERICS:
            raise ConfigurationError(f"unknown numerics {numerics!r}; choose from {', '.join(NUMERICS)}")
        self.checkpoint = Checkpoint(folder)
        found = discover(self.checkpoint, serve_head=serve_head)
        self._tensors = found.parameter_tensors
        self._weights = [
            NUMERICS[numerics](self.checkpoint, info) for info in progress(found.groups, "loading layers")
        ]
        self.manifest = Manifest(
            server="symbiosis/1",
            model=self.checkpoint.folder.resolve().name,
            architecture=found.architecture,
            base_prefix=found.base_prefix,
            digest=self.checkpoint.digest(found.groups),
            numerics=numerics,
            wire_dtypes=WIRE_DTYPES,
            limits=limits or Limits(max_message_bytes=64 << 20, max_rows=65536),
            groups=found.groups,
            parameters=found.parameters,
            unavailable=found.unavailable,
            files=self.checkpoint.tenant_files(),
        )
        self._parameters = {p.name: p for p in found.parameters}
        self._files = {f.name: f for f in self.manifest.files}

    def product(self, header: Header, rows: torch.Tensor, answer: Header) -> torch.Tensor:
        """The product of an accepted request.

        Args:
            header: of the request; forward, backward or effect.
            rows: its payload, any shape, blocks one behind the other.
            answer: header of the answer, for its size.

        Raises:
            WireError: ``non_finite``, for rows with NaN or infinity.
        """
        # One reduction is cheaper than looking at every element; a finite tensor whose sum
        # overflows gets the second look.
        if not math.isfinite(rows.sum().item()) and not rows.isfinite().all():
            raise WireError("non_finite", "the rows hold NaN or infinity; nothing was computed")
        out = torch.empty(answer.rows * answer.columns, dtype=rows.dtype)
        self._weights[header.group].product(header.direction, header.members, rows.view(-1), out)
        return out

    def read_ahead(self, group: int, stop: Callable[[], bool]) -> None:
        """Bring a group's weight nearer to the processor, until ``stop()``; past the last comes the first."""
        self._weights[group % len(self._weights)].read_ahead(stop)

    def fetch(self, request: Fetch, request_id: int) -> tuple[Header, torch.Tensor]:
        """A piece of a parameter or file, and the header that announces it.

        Raises:
            WireError: ``fetch``, for a name or range that is not in the manifest.
        """
        if request.kind == "parameter" and request.name in self._parameters:
            shape = self._parameters[request.name].shape
            length = shape[0] if shape else 1
        elif request.kind == "file" and request.name in self._files:
            length = self._files[request.name].size
        else:
            raise WireError("fetch", "no such parameter or file; the manifest lists what there is")
        if not 0 <= request.start < request.stop <= length:
            raise WireError("fetch", f"range outside 0 to {length}")
        rows = slice(request.start, request.stop)
        if request.kind == "file":
            if request.stop - request.start > self.manifest.limits.max_message_bytes:
                raise WireError("too_large", "ask for a smaller piece")
            path = self.checkpoint.folder / self._files[request.name].name
            with path.open("rb") as file:
                file.seek(request.start)
                data = bytearray(file.read(request.stop - request.start))
            tensor = torch.frombuffer(data, dtype=torch.uint8)
            return Header(
                Operation.REPLY, dtype=BYTES, request_id=request_id, rows=1, columns=len(data)
            ), tensor
        info = self._parameters[request.name]
        width = torch.Size(info.shape[1:]).numel()
        header = Header(
            Operation.REPLY,
            dtype=DTYPE_CODES[DTYPE_NAMES[info.dtype]],
            request_id=request_id,
            rows=request.stop - request.start,
            columns=width,
        )
        if header.payload_bytes > self.manifest.limits.max_message_bytes:
            raise WireError("too_large", "ask for fewer rows")
        tensor = self.checkpoint.read(self._tensors[request.name], rows if info.shape else None)
        return header, tensor.contiguous()
