"""A message that comes in, on every transport: its header is checked before its payload has memory.

A message is 32 bytes of header, then the payload (``shared/PROTOCOL.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shared.errors import WireError
from shared.wire.header import HEADER_BYTES, Header, Operation, parse_header, request_id_of
from shared.wire.protocol import split_tensors


@dataclass(slots=True)
class Incoming:
    """A complete message.

    If ``error`` is set the payload was thrown away, and ``header`` holds only what could be read.
    """

    header: Header
    _payload: torch.Tensor | None = None
    error: WireError | None = None
    body: bytearray | None = None  # of a message that arrived at once, with its header
    admitted: Any = None  # what ``accept`` returned for the header

    @property
    def payload(self) -> torch.Tensor | None:
        """The message's rows: [rows, columns] of the header's dtype."""
        if self._payload is None and self.body is not None:
            header = self.header
            flat = torch.frombuffer(self.body, dtype=header.payload_dtype, offset=HEADER_BYTES)
            self._payload = flat.view(header.payload_shape)
        return self._payload

    @payload.setter
    def payload(self, value: torch.Tensor | None) -> None:
        self._payload = value

    def tensors(self, widths: tuple[int, ...]) -> list[torch.Tensor]:
        """Returns the tensors of rows that lie in order in the payload: [rows, width], none a view.

        An answer of which only the upper bits travel is one tensor, of its header's shape.
        """
        rows, dtype = self.header.rows, self.header.payload_dtype
        if self.header.truncated:
            widths = self.header.payload_shape[1:]
        if self.body is None:
            payload = self.payload
            return [] if payload is None else [own(b, b.shape) for b in split_tensors(payload, widths)]
        views, at = [], HEADER_BYTES
        for width in widths:
            # Few calls: most of what they cost is the memory that their code is read from.
            tensor = torch.frombuffer(self.body, dtype=dtype, count=rows * width, offset=at)
            views.append(tensor.resize_((rows, width)))
            at += tensor.nbytes
        return views


def own(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns the memory as a tensor that is no view: autograd forbids writing into one of several views."""
    if tensor._base is None and tensor.is_contiguous():
        return tensor.resize_(tuple(shape))
    owner = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return owner.set_(tensor.untyped_storage(), tensor.storage_offset(), tuple(shape))  # type: ignore[call-overload, no-any-return]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor, shared, not copied."""
    if tensor.dtype == torch.bfloat16:  # numpy has none
        tensor = tensor.view(torch.int16)
    return memoryview(tensor.detach().numpy().reshape(-1)).cast("B")  # type: ignore[arg-type]


def check_header(
    head: bytes | bytearray,
    accept: Callable[[Header], object],
    payload_bytes: int | None,
    elsewhere: frozenset[Operation] = frozenset(),
) -> Incoming:
    """Does the first check of every message, before anything is allocated for its payload.

    Args:
        head: begins with the header.
        accept: called with the header; returns what the session keeps for the message, or raises WireError to
            refuse it.
        payload_bytes: the bytes that really follow the header; None: not known yet.
        elsewhere: operations whose payload does not follow.

    Returns:
        The message, still without its payload; with its error if it is refused.

    Raises:
        WireError: fatal.
    """
    header: Header | None = None
    try:
        header = parse_header(head)
        expected = 0 if header.operation in elsewhere else header.payload_bytes
        if payload_bytes is not None and expected != payload_bytes:
            raise WireError(
                "payload_length",
                f"the header says {expected} bytes of payload "
                f"({header.rows} x {header.columns}), the message has {payload_bytes}",
            )
        return Incoming(header, admitted=accept(header))
    except WireError as error:
        if error.fatal:
            raise
        refused = error.with_traceback(None)  # which would keep the message and who reads it
        return Incoming(header or Header(0, request_id=request_id_of(head)), error=refused)


def new_payload(header: Header) -> torch.Tensor:
    """Allocates memory for a message's payload, of its shape and dtype."""
    return torch.empty(header.payload_shape, dtype=header.payload_dtype)
