"""A connected executor as the rest of the SDK sees it: products of groups, parameters, files."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from shared.errors import ConfigurationError, ConnectionLost, Metavar, SymbiosisError, WireError
from shared.stored import parameter_hash
from shared.wire.header import (
    BYTES,
    DTYPE_CODES,
    DTYPE_NAMES,
    RINGS,
    Header,
    Operation,
    RequestClass,
)
from shared.wire.incoming import Incoming, tensor_bytes
from shared.wire.messages import Fetch, FileInfo, ParameterInfo, encode
from shared.wire.protocol import GroupShape, RequestWidths
from tenant_sdk.connection.channel import Channel, ResponseFuture, copy_error
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.replicas.parts import PartConnections
from tenant_sdk.connection.replicas.reconnecting import (
    ConnectionOptions,
    FindReplicas,
    ReconnectingConnection,
)

FETCH_BYTES = 4 << 20
PIECE_ROWS = 16  # of a request that is cut, a multiple of this


class LazyResult:
    """The result of a product in flight, computed by the thread that asks for it.

    It is like a future, but without a thread in the background. The thread that asks for the result sends and
    receives for all threads that wait on the same connection; then it takes the mask off its own answer. One
    thread at a time may use it.
    """

    __slots__ = ("_error", "_finish", "_result")

    def __init__(self, finish: Callable[[], list[torch.Tensor]]) -> None:
        """Make one from a function that waits for the result and returns it; the function is called once."""
        self._finish: Callable[[], list[torch.Tensor]] | None = finish
        self._result: list[torch.Tensor] | None = None
        self._error: SymbiosisError | None = None

    def result(self) -> list[torch.Tensor]:
        """Wait for the product. Further calls return the same tensors, or raise the same error.

        Raises:
            SymbiosisError: the connection, the executor, a mask source, or a wrong answer.
        """
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                self._result = finish()
            except SymbiosisError as error:
                self._error = copy_error(error)
                raise
        if self._error is not None:
            raise copy_error(self._error)
        if self._result is None:
            raise ConnectionLost("somebody waited for this product and was interrupted")
        return self._result


class RemoteExecutor:
    """Requests products over a connection that is opened again when it breaks, perhaps to another replica.

    Executors that serve a part of the layers each are one of these together, with a connection to each.

    What is lost or refused may be sent again (``ReconnectingConnection``): the same bytes, so the same rows
    under the same masks, or the same seed.

    Args:
        find: the executor's replicas, and what opens a connection to each, now and again later.
        wire_dtype: float32 or bfloat16: what activations are sent as. On the ring it is int32.
        options: how they are connected to; default: ``ConnectionOptions()``.

    Raises:
        ConfigurationError: the executor does not take this dtype.
        WireError: its manifest is not valid.
    """

    def __init__(
        self,
        find: FindReplicas,
        wire_dtype: torch.dtype = torch.float32,
        options: ConnectionOptions | None = None,
    ) -> None:
        options = options or ConnectionOptions()
        self.stats = options.stats
        self._parts = PartConnections(find, options)
        self.connection, self.manifest = self._parts.all[0], self._parts.manifest
        self.ring = self.manifest.numerics in RINGS
        if self.ring and wire_dtype == torch.float32:
            wire_dtype = torch.int32
        if wire_dtype not in [DTYPE_NAMES[name] for name in self.manifest.wire_dtypes]:
            self._parts.close()
            raise ConfigurationError(
                "the executor computes in {!r} and takes {} on the wire, not {}; give another "
                "{wire_dtype}, or install a version of the SDK that knows these numerics",
                *(self.manifest.numerics, ", ".join(self.manifest.wire_dtypes), str(wire_dtype)),
                wire_dtype=Metavar("NAME"),
            )
        self.wire_dtype = wire_dtype
        self.shapes = [GroupShape.of(info, self.manifest.numerics) for info in self.manifest.groups]

    @property
    def url(self) -> str:
        """The executor's URL; of several executors the one that serves the first group."""
        return self.connection.url

    def is_over_network(self, group: int) -> bool:
        """Returns whether answers of a group come over a network."""
        return self._parts.connection_for(group).last_channel.piece_bytes > 0

    def submit(
        self,
        operation: Operation,
        key: ProductKey,
        tensors: list[torch.Tensor],
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> LazyResult:
        """Ask the executor for a product; nothing is masked here. See ``submit_pieces``.

        Args:
            operation: PRODUCT, or EFFECT for the product of a mask.
            key: the kind of product.
            tensors: on the CPU: [T, D] forward; backward one [T, O_m] for each member. They must not
                change until the result is here.
            request_class: how urgent it is.

        Returns:
            The result: writable tensors in the tensors' dtype that nobody else holds: one [T, O_m] for
            each member forward, one [T, D] backward; cut answers are as ``take_upper_bits`` makes them.

        Raises:
            ValueError: tensors of other shapes, or without rows.
        """
        check_shapes(tensors, self._request_widths(key).request_widths)
        pieces = self.pieces(key, tensors[0].shape[0])

        def part_of(piece: slice) -> list[torch.Tensor]:
            return [tensor[piece] for tensor in tensors]

        sent = self.submit_pieces(operation, key, pieces, part_of, request_class)
        if len(pieces) == 1:
            return sent[0]

        def finish() -> list[torch.Tensor]:
            return [torch.cat(parts) for parts in zip(*(sent.pop(0).result() for _ in pieces), strict=True)]

        return LazyResult(finish)

    def submit_pieces(
        self,
        operation: Operation,
        key: ProductKey,
        pieces: list[slice],
        tensors_of: Callable[[slice], list[torch.Tensor]],
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> list[LazyResult]:
        """Ask the executor for a product, with a request for each piece, in order and on one connection.

        What the connection takes is sent at once: while a piece travels or is multiplied, the next is made.

        Args:
            operation, key, request_class: see ``submit``.
            pieces: slices of the rows, see ``pieces``.
            tensors_of: makes the tensors of a piece that are sent; called in the order of the pieces.

        Returns:
            One result for each piece.
        """
        channel = self._parts.connection_for(key.group).channel
        return [
            self.submit_piece(channel, operation, key, tensors_of(piece), request_class) for piece in pieces
        ]

    def submit_piece(
        self,
        channel: Channel,
        operation: Operation,
        key: ProductKey,
        tensors: list[torch.Tensor],
        request_class: RequestClass,
    ) -> LazyResult:
        """Send one request as it is; see ``submit``."""
        started = time.perf_counter()
        shape, rows, dtype = self.shapes[key.group], tensors[0].shape[0], tensors[0].dtype
        widths = self._request_widths(key)
        wire = [tensor.to(self.wire_dtype).contiguous() for tensor in tensors]

        request = Header(
            operation, key.direction, DTYPE_CODES[self.wire_dtype], key.group, rows=rows,
            members=key.member_bits, request_class=request_class, answer_bits=key.answer_bits,
        )  # fmt: skip

        def send(channel: Channel) -> ResponseFuture:
            return channel.submit(lambda protocol: protocol.product(request, shape), wire)

        # A list, from which it is taken: the rows are let go as soon as the answer is there.
        answers = [self._parts.connection_for(key.group).send(channel, send)]
        channel.flush()
        spent = time.perf_counter() - started

        def finish() -> list[torch.Tensor]:
            started = time.perf_counter()
            results = answers.pop()().tensors(widths.answer_widths)
            if dtype != self.wire_dtype:
                results = [result.to(dtype) for result in results]
            answer_bytes = rows * widths.answer_columns * self._item_bits(key.answer_bits) // 8
            self._count(operation, rows, widths, answer_bytes, spent + time.perf_counter() - started)
            return results

        return LazyResult(finish)

    def _item_bits(self, answer_bits: int) -> int:
        """Returns the bits of each number of an answer, as it travels."""
        return answer_bits if self.ring else 8 * self.wire_dtype.itemsize

    def _count(
        self, operation: Operation, rows: int, widths: RequestWidths, answer_bytes: int, seconds: float
    ) -> None:
        stats, itemsize = self.stats, self.wire_dtype.itemsize
        with stats.lock:
            stats.seconds_waiting += seconds
            if operation == Operation.EFFECT:
                stats.effect_requests += 1
                stats.effect_rows += rows
            else:
                stats.requests += 1
                stats.rows += rows
            stats.bytes_sent += rows * widths.request_columns * itemsize
            stats.bytes_received += answer_bytes

    def _request_widths(self, key: ProductKey) -> RequestWidths:
        return self.shapes[key.group].widths(key.direction, key.member_bits)

    def pieces(self, key: ProductKey, rows: int) -> list[slice]:
        """Cuts a request of so many rows into pieces, in order and about equally large.

        Pieces are no larger than the executor takes. Over a network they are so small that upload, product
        and download of one request go on at once.
        """
        row_bytes, max_rows = self._row_bytes(key), self.max_rows(key)
        if piece_bytes := self._parts.connection_for(key.group).last_channel.piece_bytes:
            max_rows = min(max_rows, max(PIECE_ROWS, piece_bytes // row_bytes))
        if rows <= max_rows:
            return [slice(0, rows)]
        each = -(-rows // -(-rows // max_rows))
        each = min(max_rows, -(-each // PIECE_ROWS) * PIECE_ROWS)  # products are made in tiles of rows
        return [slice(at, min(at + each, rows)) for at in range(0, rows, each)]

    def _row_bytes(self, key: ProductKey) -> int:
        """Returns the bytes of a row or of its answer, whichever is larger."""
        widths = self._request_widths(key)
        answer = widths.answer_columns * self._item_bits(key.answer_bits) // 8
        return max(widths.request_columns * self.wire_dtype.itemsize, answer)

    def max_rows(self, key: ProductKey) -> int:
        """Returns how many rows one request of this kind may have, from the executor's limits."""
        limits = self.manifest.limits
        return max(1, min(limits.max_rows, limits.max_message_bytes // self._row_bytes(key)))

    def seed_effect(
        self,
        key: ProductKey,
        rows: int,
        seed: bytes,
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> torch.Tensor:
        """Returns the product of the mask that a seed expands to (``shared.ring.mask_stream``).

        ``rows`` is at most ``max_rows``. The result is as ``take_upper_bits`` makes it.
        """
        request = Header(
            Operation.SEED_EFFECT, key.direction, DTYPE_CODES[self.wire_dtype], key.group, rows=rows,
            members=key.member_bits, request_class=request_class, answer_bits=key.answer_bits,
        )  # fmt: skip

        def send(channel: Channel) -> ResponseFuture:
            return channel.submit(lambda protocol: protocol.product(request, self.shapes[key.group]), seed)

        connection = self._parts.connection_for(key.group)
        answer = _payload(connection.answer(connection.channel, send))
        self.stats.add(
            effect_requests=1,
            effect_rows=rows,
            bytes_sent=len(seed),
            bytes_received=answer.numel() * answer.itemsize,
        )
        return answer

    def scales(self, group: int) -> torch.Tensor:
        """Ring numerics: fetches the float32 scales of a group's outputs [O], all members in order."""
        length = sum(self.shapes[group].outputs)
        connection, dtype = self._parts.connection_for(group), DTYPE_CODES[torch.float32]
        pieces = self._fetch(connection, "scales", str(group), length, FETCH_BYTES // 4, dtype, 1)
        return torch.cat([piece.view(-1) for piece in pieces])

    def parameter(self, info: ParameterInfo) -> Iterator[torch.Tensor]:
        """Yields [n, width] pieces of a tenant-side parameter, in the order of its rows (``info.rows``).

        Raises:
            WireError: ``parameter``, after the last piece: the parameter is not what the manifest announced.
        """
        digest = parameter_hash(info.dtype, info.shape)
        dtype = DTYPE_NAMES[info.dtype]
        length, width = info.rows
        step = max(1, FETCH_BYTES // (width * dtype.itemsize))
        for piece in self._fetch(
            self.connection, "parameter", info.name, length, step, DTYPE_CODES[dtype], width
        ):
            digest.update(tensor_bytes(piece))
            yield piece
        if digest.hexdigest() != info.sha256:
            raise WireError("parameter", f"{info.name} is not the parameter that the executor announced")

    def file(self, info: FileInfo) -> bytes:
        """Fetches a configuration or tokenizer file, and checks its SHA-256 against the manifest's.

        Raises:
            WireError: ``file``, if the bytes are not those that the manifest announced.
        """
        data = b"".join(
            bytes(tensor_bytes(piece))
            for piece in self._fetch(self.connection, "file", info.name, info.size, FETCH_BYTES, BYTES, None)
        )
        if hashlib.sha256(data).hexdigest() != info.sha256:
            raise WireError("file", f"{info.name} is not the file that the executor announced")
        return data

    def _fetch(
        self,
        connection: ReconnectingConnection,
        kind: str,
        name: str,
        length: int,
        step: int,
        dtype: int,
        width: int | None,
    ) -> Iterator[torch.Tensor]:
        """Yields pieces in order, a few of them in flight. ``width`` None: one row of so many bytes."""

        def submit(start: int, stop: int, channel: Channel) -> ResponseFuture:
            body = encode(Fetch(kind, name, start, stop))
            rows, columns = (1, stop - start) if width is None else (stop - start, width)
            answer = Header(Operation.REPLY, dtype=dtype, rows=rows, columns=columns)
            return channel.submit(lambda protocol: protocol.control(Operation.FETCH, len(body), answer), body)

        ahead: deque[Callable[[], Incoming]] = deque()
        for start in range(0, length, step):
            ahead.append(
                connection.send(connection.channel, partial(submit, start, min(start + step, length)))
            )
            if len(ahead) == 4:
                yield _payload(ahead.popleft()())
        while ahead:
            yield _payload(ahead.popleft()())

    def close(self) -> None:
        """End all connections; none is opened again."""
        self._parts.close()


def check_shapes(tensors: Sequence[torch.Tensor], widths: Sequence[int]) -> None:
    """Refuse tensors that are not [T, width] for each width with one T, at least 1.

    Raises:
        ValueError: the tensors have other shapes.
    """
    rows = tensors[0].shape[0] if tensors else 0
    if not rows or [tensor.shape for tensor in tensors] != [(rows, width) for width in widths]:
        raise ValueError(
            f"rows of widths {list(widths)} are wanted, as many of each and at least one, not tensors of "
            f"shapes {[tuple(tensor.shape) for tensor in tensors]}"
        )


def _payload(answer: Incoming) -> torch.Tensor:
    if answer.payload is None:
        raise WireError("unexpected", "an answer without payload", fatal=True)
    return answer.payload
