"""A channel to an executor on the same machine: ZeroMQ and shared memory (Symbiosis §3.5).

``shared/PROTOCOL.md``, "Co-located transport", is normative. The session's memory is the executor's;
which request and which answer lies where in it is the tenant's affair.
"""

from __future__ import annotations

import bisect
import os
import select
from collections import deque
from typing import NamedTuple

import torch
import zmq

from shared.errors import ConnectionLost, RequestRefused, WireError
from shared.forks import register_for_fork
from shared.transport.colocated import END, MAX_IN_FLIGHT, MEMORY, MEMORY_BYTE, OFFSETS, aligned
from shared.wire.header import HEADER_BYTES, Header, Operation, parse_header
from shared.wire.incoming import Incoming
from tenant_sdk.connection.channel import Channel, ResponseFuture
from tenant_sdk.connection.clock import CLOCK, Clock
from tenant_sdk.connection.colocated_session import COLOCATED_RETRY_SECONDS, SharedMemoryLink, open_link
from tenant_sdk.connection.quick_poll import QuickPoll

SPIN_SECONDS = 2.5e-4  # a small product takes less


class Areas:
    """Allocates areas of the memory, first fit.

    A lone thread gets the same bytes for every request, which are then in the cache.
    """

    def __init__(self) -> None:
        self._used: list[tuple[int, int]] = []

    def allocate(self, size: int, within: int) -> int | None:
        """Returns the offset of a new area, or None if none is free. ``within`` is the memory's size."""
        at = 0
        for start, stop in self._used:
            if start - at >= size:
                break
            at = stop
        if at + size > within:
            return None
        bisect.insort(self._used, (at, at + size))
        return at

    def free(self, at: int, size: int) -> None:
        """Free an area."""
        if size:
            self._used.remove((at, at + size))


class _Request(NamedTuple):
    """A request that waits to be written."""

    header: Header
    tensors: list[torch.Tensor] | bytes
    answer_bytes: int  # size of an answer that goes to memory


class ColocatedChannel(Channel):
    """See Channel.

    Args:
        link: the open session; closed at the end.
        peer: the URL, for messages.
        timeout: see Channel.
        clock: for the timeout.
    """

    def __init__(self, link: SharedMemoryLink, peer: str, timeout: float, clock: Clock = CLOCK) -> None:
        super().__init__(peer, timeout)
        self._clock = clock
        # All of these are the leader's.
        self._link, self._sock, self._requests, self._answers = link, link.sock, link.requests, link.answers
        self._max_size = link.opened.max_size
        self._areas = Areas()
        self._places: dict[int, tuple[int, int, int]] = {}  # by request: area, its size, the answer's place
        self._memory_requests: deque[bool] = deque()  # those in flight: True: to grow; False: a ping
        # Not ZeroMQ's own: that looks at the socket each time, which answers of products do not need.
        self._poll, self._sock_fd = QuickPoll(SPIN_SECONDS), int(link.sock.get(zmq.FD))
        for each in (self._sock_fd, self._answers):
            self._poll.register(each, select.POLLIN)
        self._check_for_message = True  # there may be a message that the descriptor does not tell of
        register_for_fork(self)

    def _message(self, header: Header, tensors: list[torch.Tensor] | bytes) -> _Request:
        expected = self._protocol.expected(header.request_id)
        in_memory = expected.operation == Operation.REPLY
        return _Request(header, tensors, expected.payload_bytes if in_memory else 0)

    def _ping_message(self) -> None:
        return None

    def _wake_leader(self) -> None:
        self._poll.wake()

    def _send_close(self) -> None:
        self._write_out(END)

    def _shut(self) -> None:
        self._link.close()
        self._poll.close()

    def forked(self) -> None:
        """See Channel."""
        super().forked()
        self._link.abandon()
        self._poll.close()

    def _lead(self, pending: ResponseFuture) -> None:
        deadline = self._clock.now() + self.timeout
        self._send()
        while not pending.done:
            if self._check_for_message:
                self._check_for_message = False
                self._read()
                self._send()
                continue
            ready = self._readable(deadline)
            if not ready:
                raise self._no_progress()
            if self._sock_fd in ready:  # first: it may say why the pipe has ended
                self._read()
            if self._answers in ready:
                self._read_pipe()
            if self._sock_fd in ready or self._answers in ready:
                deadline = self._clock.now() + self.timeout
            self._send()

    def _readable(self, deadline: float) -> set[int]:
        """Returns the descriptors that can be read from, none at the deadline."""
        return {fd for fd, _ in self._poll.poll(deadline - self._clock.now())}

    # -- writing ---------------------------------------------------------------------------------

    def _send(self) -> None:
        """Write what fits into the buffer."""
        try:
            self._write_what_fits()
        except BrokenPipeError:
            self._read()  # it may have said why
            raise

    def _write_what_fits(self) -> None:
        while self._outbox:
            with self._lock:
                if not self._outbox:  # the channel broke
                    return
                request: _Request | None = self._outbox[0]
            if request is None:
                self._request_memory(0)
            elif not self._send_request(request):
                return
            with self._lock:
                if self._outbox:
                    self._outbox.popleft()

    def _send_request(self, request: _Request) -> bool:
        """Send one request; False if it has to wait for memory."""
        header, tensors, answer_bytes = request
        in_line = isinstance(tensors, bytes)
        request_bytes = 0 if in_line else aligned(header.payload_bytes)
        size = request_bytes + aligned(answer_bytes)
        if size > self._max_size:
            self._give_up(
                header, "too_large", f"{size} bytes with the answer; a session has {self._max_size} at most"
            )
            return True
        if len(self._places) >= MAX_IN_FLIGHT:
            return False
        at = self._areas.allocate(size, self._link.memory.size)
        if at is None:
            if not any(self._memory_requests) and self._link.memory.size < self._max_size:
                self._request_memory(
                    min(self._max_size, max(2 * self._link.memory.size, self._link.memory.size + size))
                )
            return False
        if isinstance(tensors, bytes):
            body = tensors
        else:
            body = b""
            self._link.memory.write(at, tensors)
        self._places[header.request_id] = at, size, at + request_bytes
        preamble = header.pack() + OFFSETS.pack(at, at + request_bytes)
        if in_line:
            self._write_out(preamble + body)
        else:
            os.write(self._requests, preamble)
        return True

    def _request_memory(self, size: int) -> None:
        """Ask for memory; size 0 is a ping."""
        self._memory_requests.append(size > 0)
        self._write_out(MEMORY.pack(MEMORY_BYTE, size))

    def _give_up(self, header: Header, code: str, message: str, retry_after: float | None = None) -> None:
        """Refuse a request that was not sent."""
        with self._lock:
            self._protocol.answered(header.request_id)
            pending = self._pending.pop(header.request_id, None)
        if pending is not None:
            pending.finish(None, RequestRefused(code, message, retry_after=retry_after))

    def _write_out(self, data: bytes) -> None:
        self._check_for_message = True
        try:
            self._sock.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise BrokenPipeError(str(error)) from error

    # -- reading ---------------------------------------------------------------------------------

    def _read_pipe(self) -> None:
        while True:
            try:
                data = os.read(self._answers, HEADER_BYTES)
            except BlockingIOError:
                return
            if not data:
                raise self._ended_by_peer()
            self._handle(self._answer(data))
            if not self._places:
                return

    def _read(self) -> None:
        while True:
            try:
                data = self._sock.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if data == END:
                try:
                    self._read_pipe()  # what was answered before
                except ConnectionLost:
                    pass  # that it has ended is no news
                raise self._closed_by_peer("it is shutting down")
            if data[0] == MEMORY_BYTE:
                self._has_memory(data)
            else:
                self._handle(self._answer(data))

    def _answer(self, data: bytes) -> Incoming:
        if len(data) < HEADER_BYTES:
            raise WireError("header", "an answer shorter than its header", fatal=True)
        header = parse_header(data)
        self._protocol.accept(header)
        at, size, answer_at = self._places.pop(header.request_id, (0, 0, 0))
        in_memory = header.operation == Operation.REPLY
        if (0 if in_memory else header.payload_bytes) != len(data) - HEADER_BYTES:
            raise WireError("payload_length", "an answer has not the bytes that its header says", fatal=True)
        if in_memory:
            # The one copy: what the caller gets nobody writes to any more.
            payload = self._link.memory.tensor(answer_at, header.payload_dtype, header.payload_shape).clone()
        else:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)[HEADER_BYTES:]
        self._areas.free(at, size)
        return Incoming(header, payload)

    def _has_memory(self, data: bytes) -> None:
        if len(data) != MEMORY.size or not self._memory_requests:
            raise WireError("unexpected", "the executor offers memory that was not asked for", fatal=True)
        size = MEMORY.unpack(data)[1]
        if not self._memory_requests.popleft():
            with self._lock:
                pong = self._pongs.popleft() if self._pongs else None
            if pong is not None:
                pong.finish(None, None)
        elif not self._link.grow(size) and not self._places:  # nothing that could end and free some
            with self._lock:
                request: _Request | None = self._outbox.popleft() if self._outbox else None
            if request is not None:
                why = "the executor has no more shared memory at the moment"
                self._give_up(request.header, "overloaded", why, COLOCATED_RETRY_SECONDS)


def open_colocated(url: str, token: str, timeout: float, clock: Clock = CLOCK) -> ColocatedChannel:
    """Open a session with an executor on this machine; see ``open_link``."""
    return ColocatedChannel(open_link(url, token, timeout), url, timeout, clock)
