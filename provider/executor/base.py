"""The base executor: frozen weights and a manifest, no state of any tenant."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from provider.catalog.discovery import discover
from provider.executor.weights import NUMERICS, RingWeight
from shared.checkpoint import Checkpoint
from shared.errors import ConfigurationError, WireError
from shared.ring.mask_stream import MaskStream
from shared.wire.header import BYTES, DTYPE_CODES, DTYPE_NAMES, Header, Operation
from shared.wire.messages import Fetch, Limits, Manifest, digest_of
from shared.wire.protocol import GroupShape, split_blocks

log = logging.getLogger(__name__)

T = TypeVar("T")
Progress = Callable[[Iterable[T], str], Iterable[T]]


def _silent(items: Iterable[T], _what: str) -> Iterable[T]:
    return items


class BaseExecutor:
    """Serves every group of one checkpoint in one numerics (Symbiosis §3.2).

    Args:
        folder: the checkpoint.
        numerics: a name in ``NUMERICS``.
        device: of weights and products, such as ``cpu`` or ``cuda:0``.
        limits: what one message may hold.
        serve_head: also serve the output head.
        recorded: tell tenants that what they send is kept.
        progress: wraps an iterable to show how far loading is, as ``tqdm`` does.

    Raises:
        CheckpointError: see ``discover``.
        ConfigurationError: unknown numerics or device; ring numerics where no product is exact.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        numerics: str = "float32",
        device: str = "cpu",
        limits: Limits | None = None,
        serve_head: bool = False,
        recorded: bool = False,
        progress: Progress = _silent,  # type: ignore[type-arg]
    ) -> None:
        if numerics not in NUMERICS:
            raise ConfigurationError(f"unknown numerics {numerics!r}; choose from {', '.join(NUMERICS)}")
        self._device = _device(device)
        self.checkpoint = Checkpoint(folder)
        found = discover(self.checkpoint, serve_head=serve_head)
        self._tensors = found.parameter_tensors
        make = NUMERICS[numerics].weight
        self._weights = [
            make(self.checkpoint, info, self._device) for info in progress(found.groups, "loading layers")
        ]
        groups = tuple(
            msgspec.structs.replace(info, bounds=weight.bounds) if isinstance(weight, RingWeight) else info
            for info, weight in zip(found.groups, self._weights, strict=True)
        )
        manifest = Manifest(
            server="symbiosis/1",
            model=self.checkpoint.folder.resolve().name,
            architecture=found.architecture,
            base_prefix=found.base_prefix,
            weights=self.checkpoint.weights_digest(found.groups),
            digest="",
            numerics=numerics,
            wire_dtypes=NUMERICS[numerics].wire_dtypes,
            limits=limits or Limits(max_message_bytes=64 << 20, max_rows=65536),
            groups=groups,
            parameters=found.parameters,
            unavailable=found.unavailable,
            files=self.checkpoint.tenant_files(),
            recorded=recorded,
        )
        self.manifest = msgspec.structs.replace(manifest, digest=digest_of(manifest))
        if not any(file.name == "tokenizer.json" for file in manifest.files):
            log.warning(
                "%s has no tokenizer.json, the only kind that tenants take, so they get no tokenizer; to "
                "make one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
                self.checkpoint.folder,
            )
        self._shapes = [GroupShape.of(g, numerics) for g in groups]
        self._by_name = {str(group): weight for group, weight in enumerate(self._weights)}
        self._parameters = {p.name: p for p in found.parameters}
        self._files = {f.name: f for f in self.manifest.files}

    def blocks(self, header: Header, payload: torch.Tensor) -> list[torch.Tensor]:
        """The rows of an accepted request: [T, D] forward; backward one [T, O_m] for each member.

        On the ring there is one block in both directions. Seeds are expanded into their masks.

        Args:
            header: of one of PRODUCTS.
            payload: [T, columns], or a seed; not copied.

        Raises:
            WireError: ``non_finite``, for rows with NaN or infinity.
        """
        if header.operation == Operation.SEED_EFFECT:
            return [MaskStream(payload.numpy().tobytes()).draw(header.rows, header.columns)]
        # One reduction is cheaper than looking at every element; a finite tensor whose sum
        # overflows gets the second look.
        if (
            payload.is_floating_point()
            and not math.isfinite(payload.sum().item())
            and not payload.isfinite().all()
        ):
            raise WireError("non_finite", "the rows hold NaN or infinity; nothing was computed")
        return split_blocks(
            payload, self._shapes[header.group].plan(header.direction, header.members).request_widths
        )

    def product(
        self, group: int, direction: int, members: int, blocks: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Multiply blocks of any number of rows: see ``GroupWeight``. Fresh blocks on the CPU."""
        weight = self._weights[group]
        if (
            self._device.type == "cpu"
        ):  # each call into torch lets go of Python's lock, and queues for it again
            return weight.product(direction, members, blocks)
        there = [block.to(self._device) for block in blocks]
        return [out.cpu() for out in weight.product(direction, members, there)]

    def zeros(self, group: int, direction: int, members: int, rows: int) -> list[torch.Tensor]:
        """Blocks of a request, to measure with."""
        widths = self._shapes[group].plan(direction, members).request_widths
        dtype = DTYPE_NAMES[self.manifest.wire_dtypes[0]]
        return [torch.zeros((rows, width), dtype=dtype) for width in widths]

    def read_ahead(self, group: int, stop: Callable[[], bool]) -> None:
        """Bring a group's weight nearer to the processor, until ``stop()``; past the last comes the first."""
        if self._device.type == "cpu":
            self._weights[group % len(self._weights)].read_ahead(stop)

    def fetch(self, request: Fetch, request_id: int) -> tuple[Header, Callable[[], torch.Tensor]]:
        """The header that announces a piece of a parameter, file or group's scales, and what reads it.

        Raises:
            WireError: ``fetch``, for a name or range that is not in the manifest.
        """
        scales = self._scales(request)
        if request.kind == "parameter" and request.name in self._parameters:
            shape = self._parameters[request.name].shape
            length = shape[0] if shape else 1
        elif request.kind == "file" and request.name in self._files:
            length = self._files[request.name].size
        elif scales is not None:
            length = len(scales)
        else:
            raise WireError("fetch", "no such parameter or file; the manifest lists what there is")
        if not 0 <= request.start < request.stop <= length:
            raise WireError("fetch", f"range outside 0 to {length}")
        rows = slice(request.start, request.stop)
        if request.kind == "file":
            if request.stop - request.start > self.manifest.limits.max_message_bytes:
                raise WireError("too_large", "ask for a smaller piece")
            columns = request.stop - request.start
            header = Header(Operation.REPLY, dtype=BYTES, request_id=request_id, rows=1, columns=columns)
            return header, partial(self._read, request)
        if scales is not None:
            width, dtype = 1, torch.float32
        else:
            info = self._parameters[request.name]
            width, dtype = torch.Size(info.shape[1:]).numel(), DTYPE_NAMES[info.dtype]
        header = Header(
            Operation.REPLY,
            dtype=DTYPE_CODES[dtype],
            request_id=request_id,
            rows=request.stop - request.start,
            columns=width,
        )
        if header.payload_bytes > self.manifest.limits.max_message_bytes:
            raise WireError("too_large", "ask for fewer rows")
        if scales is not None:
            return header, lambda: scales[rows]
        tensor, part = self._tensors[request.name], rows if info.shape else None
        return header, lambda: self.checkpoint.read(tensor, part).contiguous()

    def _read(self, request: Fetch) -> torch.Tensor:
        """A piece of a file.

        Raises:
            WireError: ``internal``, if the file is shorter by now.
        """
        with (self.checkpoint.folder / self._files[request.name].name).open("rb") as file:
            file.seek(request.start)
            data = bytearray(file.read(request.stop - request.start))
        if len(data) < request.stop - request.start:
            raise WireError("internal", "the executor's file has changed; report it")
        return torch.frombuffer(data, dtype=torch.uint8)

    def _scales(self, request: Fetch) -> torch.Tensor | None:
        """A group's scales, if that is what is asked for."""
        weight = self._by_name.get(request.name) if request.kind == "scales" else None
        return weight.scales if isinstance(weight, RingWeight) else None


def _device(name: str) -> torch.device:
    try:
        torch.empty(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"no device {name!r} here: {reason}") from error
