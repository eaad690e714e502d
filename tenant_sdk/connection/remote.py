"""A connected executor as the rest of the SDK sees it: products of groups, parameters, files."""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from shared.errors import (
    ConfigurationError,
    ConnectionLost,
    RequestRefused,
    SymbiosisError,
    WireError,
)
from shared.stored import parameter_hash
from shared.wire.header import (
    BYTES,
    DTYPE_CODES,
    DTYPE_NAMES,
    RINGS,
    Direction,
    Header,
    Operation,
    RequestClass,
)
from shared.wire.messages import Fetch, FileInfo, ParameterInfo, encode
from shared.wire.protocol import GroupShape, Plan, TenantProtocol
from shared.wire.websocket import Incoming, tensor_bytes
from tenant_sdk.connection.backoff import pause
from tenant_sdk.connection.channel import Channel, Pending, again
from tenant_sdk.connection.replicas.parts import PartConnections
from tenant_sdk.connection.replicas.reconnecting import (
    TELL_SECONDS,
    FindReplicas,
    Lost,
    ReconnectingConnection,
    went_away,
)
from tenant_sdk.connection.stats import Stats

log = logging.getLogger(__name__)

FETCH_BYTES = 4 << 20
MOST_ENDED = 5  # parts of an executor with one request on them: it may be what they die of
PIECE_ROWS = 16  # of a request that is cut, a multiple of this

# Why an executor puts a request off, in the words of its log entry.
_REASONS = {
    "overloaded": "is overloaded, or this tenant over its quota",
    "unavailable": "lost a part of itself with this request on it",
    "restarting": "is starting a part of itself again",
}

Ask = Callable[[Channel], Pending]  # sends one request


class PendingProduct:
    """A product under way.

    Like a future, but without a thread in the background: whoever asks for the result receives, and sends
    what is left to send, for all who wait on the same connection; then it takes the mask off its own answer.
    For one thread at a time.
    """

    __slots__ = ("_error", "_finish", "_result")

    def __init__(self, finish: Callable[[], list[torch.Tensor]]) -> None:
        """Make one of what waits and gives the result; it is called once."""
        self._finish: Callable[[], list[torch.Tensor]] | None = finish
        self._result: list[torch.Tensor] | None = None
        self._error: SymbiosisError | None = None

    def result(self) -> list[torch.Tensor]:
        """Wait for the product; again, and it is the same tensors, or the same failure.

        Raises:
            SymbiosisError: the connection, the executor, a mask source, or a wrong answer.
        """
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                self._result = finish()
            except SymbiosisError as error:
                self._error = again(error)
                raise
        if self._error is not None:
            raise again(self._error)
        if self._result is None:
            raise ConnectionLost("somebody waited for this product and was interrupted")
        return self._result


class RemoteExecutor:
    """Products over one connection, opened again when it breaks, perhaps to another replica.

    Executors that serve a part of the layers each are one of these together, with a connection to each.

    A request that is lost because the executor went away is sent again when it is back, or to another replica
    of the same party: the same bytes, so the same rows under the same masks, or the same seed. So is what an
    executor refuses because it is overloaded. Nothing else is repeated.

    Args:
        find: the executor's replicas, and what opens a connection to each, now and again later.
        wire_dtype: float32 or bfloat16: what activations are sent as. On the ring it is int32.
        stats: the session's, to count in; a session with two executors has one.
        patience: seconds to wait for an executor that went away. 0: not at all: a request that was under way
            fails, and the next one tries once to connect again.
        party, digest: see ``PartConnections``.

    Raises:
        ConfigurationError: the executor does not take this dtype.
        WireError: its manifest is not valid.
    """

    def __init__(
        self,
        find: FindReplicas,
        wire_dtype: torch.dtype = torch.float32,
        stats: Stats | None = None,
        patience: float = 0.0,
        party: str = "",
        digest: str = "",
    ) -> None:
        self.stats = stats or Stats()
        self._told = -TELL_SECONDS
        self._chance = random.SystemRandom().random
        self._parts = PartConnections(find, self.stats, patience, party, digest)
        self.connection, self.manifest = self._parts.all[0], self._parts.manifest
        self.ring = self.manifest.numerics in RINGS
        if self.ring and wire_dtype == torch.float32:
            wire_dtype = torch.int32
        if wire_dtype not in [DTYPE_NAMES[name] for name in self.manifest.wire_dtypes]:
            self._parts.close()
            raise ConfigurationError(
                f"the executor computes in {self.manifest.numerics!r} and takes "
                f"{', '.join(self.manifest.wire_dtypes)} on the wire, not {wire_dtype}; give another "
                "wire_dtype=NAME, or install a version of the SDK that knows these numerics"
            )
        self.wire_dtype = wire_dtype
        self.shapes = [GroupShape.of(info, self.manifest.numerics) for info in self.manifest.groups]

    @property
    def url(self) -> str:
        """Of the executor; of several the one that serves the first group."""
        return self.connection.url

    @property
    def channel(self) -> Channel:
        """The open channel, of several the first; see ``ReconnectingConnection.channel``."""
        return self.connection.channel

    def channel_of(self, group: int) -> Channel:
        """The channel to the executor that serves a group; see ``ReconnectingConnection.channel``."""
        return self._parts.of(group).channel

    def submit(
        self,
        operation: Operation,
        group: int,
        direction: Direction,
        members: int,
        blocks: list[torch.Tensor],
        request_class: RequestClass = RequestClass.UNDECLARED,
        channel: Channel | None = None,
    ) -> PendingProduct:
        """Ask the executor for a product; nothing is masked here.

        What the connection takes is sent at once. Large products are cut into pieces, so that the executor
        multiplies one while others travel.

        Args:
            operation: PRODUCT, or EFFECT for the product of a mask.
            group: id in the manifest.
            direction: forward or backward.
            members: bit mask of members.
            blocks: on the CPU: [T, D] forward; backward one [T, O_m] for each member. They must not
                change until the result is here.
            request_class: how urgent it is.
            channel: one that ``channel`` was, for pieces that shall travel together.

        Returns:
            Whose result are writable tensors in the blocks' dtype that nobody else holds: one [T, O_m] for
            each member forward, one [T, D] backward.

        Raises:
            ValueError: blocks of other shapes, or without rows.
        """
        started = time.perf_counter()
        plan = self.shapes[group].plan(direction, members)
        check_shapes(blocks, plan.request_widths)
        rows, dtype, channel = blocks[0].shape[0], blocks[0].dtype, channel or self.channel_of(group)
        cut = self.pieces(group, direction, members, rows)
        if len(cut) == 1:
            answers = [self._submit(channel, operation, group, direction, members, blocks, request_class)]
            channel.push()
        else:
            answers = []
            for piece in cut:
                part = [block[piece] for block in blocks]
                answers.append(
                    self._submit(channel, operation, group, direction, members, part, request_class)
                )
                channel.push()
        spent = time.perf_counter() - started

        def finish() -> list[torch.Tensor]:
            started = time.perf_counter()
            if len(cut) == 1:
                results = answers.pop()().blocks(plan.answer_widths)
                if dtype != self.wire_dtype:
                    results = [result.to(dtype) for result in results]
            else:
                results = [torch.empty((rows, width), dtype=dtype) for width in plan.answer_widths]
                for piece in cut:
                    for result, part in zip(
                        results, answers.pop(0)().blocks(plan.answer_widths), strict=True
                    ):
                        result[piece] = part
            self._count(operation, len(cut), rows, plan, spent + time.perf_counter() - started)
            return results

        return PendingProduct(finish)

    def _count(self, operation: Operation, requests: int, rows: int, plan: Plan, seconds: float) -> None:
        stats, itemsize = self.stats, self.wire_dtype.itemsize
        with stats.lock:
            stats.seconds_waiting += seconds
            if operation == Operation.EFFECT:
                stats.effect_requests += requests
                stats.effect_rows += rows
            else:
                stats.requests += requests
                stats.rows += rows
            stats.bytes_sent += rows * plan.request_columns * itemsize
            stats.bytes_received += rows * plan.answer_columns * itemsize

    def pieces(self, group: int, direction: Direction, members: int, rows: int) -> list[slice]:
        """What a request of so many rows is cut into, in order and about equally large.

        No larger than the executor takes; and small enough for upload, product and download of one request
        to go on at once, if there is something in between that takes time.
        """
        plan = self.shapes[group].plan(direction, members)
        row_bytes = max(plan.request_columns, plan.answer_columns) * self.wire_dtype.itemsize
        most = self.max_rows(group, direction, members)
        if piece_bytes := self._parts.of(group).latest.piece_bytes:
            most = min(most, max(PIECE_ROWS, piece_bytes // row_bytes))
        if rows <= most:
            return [slice(0, rows)]
        each = -(-rows // -(-rows // most))
        each = min(most, -(-each // PIECE_ROWS) * PIECE_ROWS)  # products are made in tiles of rows
        return [slice(at, min(at + each, rows)) for at in range(0, rows, each)]

    def max_rows(self, group: int, direction: Direction, members: int) -> int:
        """How many rows one request of this kind may have, from the executor's limits."""
        plan = self.shapes[group].plan(direction, members)
        row_bytes = max(plan.request_columns, plan.answer_columns) * self.wire_dtype.itemsize
        limits = self.manifest.limits
        return max(1, min(limits.max_rows, limits.max_message_bytes // row_bytes))

    def seed_effect(
        self,
        group: int,
        direction: Direction,
        members: int,
        rows: int,
        seed: bytes,
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> torch.Tensor:
        """The product of the mask that a seed expands to (``shared.ring.mask_stream``): int32 [rows, 2 N].

        ``rows`` is at most ``max_rows``.
        """
        shape = self.shapes[group]

        def header(protocol: TenantProtocol) -> Header:
            return protocol.product(
                Operation.SEED_EFFECT, group, shape, direction, members, rows, self.wire_dtype, request_class
            )

        connection = self._parts.of(group)
        channel = connection.channel
        answer = _payload(self._answer(connection, channel, lambda channel: channel.submit(header, seed)))
        self.stats.add(
            effect_requests=1,
            effect_rows=rows,
            bytes_sent=len(seed),
            bytes_received=answer.numel() * answer.itemsize,
        )
        return answer

    def scales(self, group: int) -> torch.Tensor:
        """Ring numerics: float32 scales of a group's outputs [O], all members one behind the other."""
        length = sum(self.shapes[group].outputs)
        connection, dtype = self._parts.of(group), DTYPE_CODES[torch.float32]
        pieces = self._fetch(connection, "scales", str(group), length, FETCH_BYTES // 4, dtype, 1)
        return torch.cat([piece.view(-1) for piece in pieces])

    def _submit(
        self,
        channel: Channel,
        operation: Operation,
        group: int,
        direction: Direction,
        members: int,
        blocks: list[torch.Tensor],
        request_class: RequestClass,
    ) -> Callable[[], Incoming]:
        """Send a request; the call that waits for its answer."""
        wire = [block.to(self.wire_dtype).contiguous() for block in blocks]
        shape, rows = self.shapes[group], wire[0].shape[0]

        def header(protocol: TenantProtocol) -> Header:
            return protocol.product(
                operation, group, shape, direction, members, rows, self.wire_dtype, request_class
            )

        return self._ask(self._parts.of(group), channel, lambda channel: channel.submit(header, wire))

    def _ask(self, connection: ReconnectingConnection, channel: Channel, ask: Ask) -> Callable[[], Incoming]:
        """Send a request; the call that waits for its answer."""
        first: Pending | None = None
        try:
            first = ask(channel)
        except SymbiosisError as error:
            if not (connection.patience and went_away(error)):
                raise
        return lambda: self._answer(connection, channel, ask, first)

    def _answer(
        self, connection: ReconnectingConnection, channel: Channel, ask: Ask, first: Pending | None = None
    ) -> Incoming:
        """An answer; asked for again when the executor says that it is overloaded, or went away.

        Raises:
            RequestRefused: for anything else, or overloaded for longer than the timeout.
            ConnectionLost: the part of it that was asked was away for longer than is waited for.
            SymbiosisError: see ``ReconnectingConnection.after``.
        """
        pending, began, attempt, lost, ended = first, time.monotonic(), 0, Lost(), 0
        asked = began  # for the first time
        while True:
            try:
                answer = channel.wait(pending or ask(channel))
                connection.answered(channel)
                return answer
            except RequestRefused as error:
                if error.code not in _REASONS or error.retry_after is None:
                    raise
                ended += error.code == "unavailable"
                if ended > MOST_ENDED:
                    raise
                seconds = pause(attempt, error.retry_after, self._chance())
                away, now = error.code == "restarting", time.monotonic()
                if now + seconds >= (asked + connection.patience if away else began + channel.timeout):
                    if not away:
                        raise
                    raise ConnectionLost(
                        f"{connection.url} {_REASONS[error.code]}, and was not done after "
                        f"{now - asked:.0f} s; to wait longer, give patience=SECONDS"
                    ) from error
                self._put_off(connection, seconds, error.code)
                attempt += 1
            except SymbiosisError as error:
                if not connection.waits_after(error):
                    raise  # from here: a frame that held the error would keep rows in a cycle with it
                channel = connection.after(error, lost)
                began, attempt = time.monotonic(), 0
            pending = None

    def _put_off(self, connection: ReconnectingConnection, seconds: float, code: str) -> None:
        """Wait, and say so now and then."""
        now = time.monotonic()
        if now - self._told > TELL_SECONDS:
            self._told = now
            log.warning("%s %s; waiting and going on", connection.url, _REASONS[code])
        connection.sleep(seconds)
        self.stats.add(refusals=1, seconds_throttled=seconds)

    def parameter(self, info: ParameterInfo) -> Iterator[torch.Tensor]:
        """A tenant-side parameter, [n, width] pieces in order of its rows (``info.rows``), in their dtype.

        Raises:
            WireError: ``parameter``, after the last piece: they are not what the manifest announced.
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
        """A configuration or tokenizer file, checked against the manifest's SHA-256.

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
        """Pieces in order, a few of them in flight. ``width`` None: one row of so many bytes."""

        def submit(start: int, stop: int, channel: Channel) -> Pending:
            body = encode(Fetch(kind, name, start, stop))
            rows, columns = (1, stop - start) if width is None else (stop - start, width)
            answer = Header(Operation.REPLY, dtype=dtype, rows=rows, columns=columns)
            return channel.submit(lambda protocol: protocol.control(Operation.FETCH, len(body), answer), body)

        ahead: deque[Callable[[], Incoming]] = deque()
        for start in range(0, length, step):
            ahead.append(
                self._ask(connection, connection.channel, partial(submit, start, min(start + step, length)))
            )
            if len(ahead) == 4:
                yield _payload(ahead.popleft()())
        while ahead:
            yield _payload(ahead.popleft()())

    def close(self) -> None:
        """End all connections; none is opened again."""
        self._parts.close()


def check_shapes(blocks: Sequence[torch.Tensor], widths: Sequence[int]) -> None:
    """Refuse blocks that are not [T, width] for each width with one T, at least 1.

    Raises:
        ValueError: they are not.
    """
    rows = blocks[0].shape[0] if blocks else 0
    if not rows or [block.shape for block in blocks] != [(rows, width) for width in widths]:
        raise ValueError(
            f"rows of widths {list(widths)} are wanted, as many of each and at least one, not blocks of "
            f"shapes {[tuple(block.shape) for block in blocks]}"
        )


def _payload(answer: Incoming) -> torch.Tensor:
    if answer.payload is None:
        raise WireError("unexpected", "an answer without payload", fatal=True)
    return answer.payload
