"""A tenant's session at a front door, relayed to the executor over the co-located transport.

The front door checks a request's header, receives its payload into memory that it shares with the executor,
and sends the answer to the tenant from there. Everything else is the executor's, which knows the session as
one of this tenant's: who it is, quotas, fairness, products, transcripts.
"""

from __future__ import annotations

import logging
import math
import os
import select
from collections.abc import Callable

import torch
import zmq

from provider.serve.connection import Bearer, TurnedAway
from provider.session.answering import Send, Session
from shared.errors import SymbiosisError, WireError
from shared.transport.colocated import END, MEMORY, MEMORY_BYTE, PLACES, aligned
from shared.transport.colocated_session import RETRY_SECONDS, Link, open_link
from shared.wire.header import DTYPE_NAMES, HEADER_BYTES, PRODUCTS, Header, Operation, parse_header
from shared.wire.messages import Fetch, Hello, Manifest, decode, encode
from shared.wire.websocket import new_payload, tensor_bytes

log = logging.getLogger(__name__)

OPEN_SECONDS = 10.0


class Relay:
    """Opens relayed sessions.

    Args:
        url: of the executor's co-located directory.
        manifest: the executor's.
        refused: told the code of each request that is refused here, and which the executor does not see.
    """

    def __init__(self, url: str, manifest: Manifest, refused: Callable[[str], None]) -> None:
        self._url, self.manifest, self.refused = url, manifest, refused
        self._row_bytes = {
            p.name: math.prod(p.shape[1:]) * DTYPE_NAMES[p.dtype].itemsize for p in manifest.parameters
        }

    def open(self, bearer: Bearer, send: Send, waiting: Callable[[], bool]) -> RelayedSession:
        """A tenant's session; see ``provider.serve.connection.OpenSession``.

        Raises:
            TurnedAway: the executor lets in no more, or has gone.
        """
        try:
            link = open_link(self._url, bearer.token, OPEN_SECONDS)
            try:
                return RelayedSession(self, link, bearer.tenant, send)
            except BaseException:
                link.close()
                raise
        except (SymbiosisError, OSError, EOFError, zmq.ZMQError) as error:
            log.info("no session with the executor for tenant %s: %s", bearer.tenant, error)
            # That a token was taken back meanwhile the next handshake will tell.
            raise TurnedAway("too many connections") from error

    def fetched_bytes(self, request: Fetch) -> int:
        """The most that an answer can have; the executor refuses what cannot be."""
        row = self._row_bytes.get(request.name, 0) if request.kind == "parameter" else torch.float32.itemsize
        size = (request.stop - request.start) * row
        return min(max(0, size), self.manifest.limits.max_message_bytes)


class RelayedSession(Session):
    """See Session.

    One request is under way at a time: it lies at the beginning of the memory, its answer behind it.
    """

    def __init__(self, relay: Relay, link: Link, tenant: str, send: Send) -> None:
        super().__init__(tenant, relay.manifest, send)
        self._relay, self._link = relay, link
        self._placed: Header | None = None  # whose payload is in the memory and not answered
        self._poll = select.poll()
        self._poll.register(link.answers, select.POLLIN)
        self._poll.register(int(link.sock.get(zmq.FD)), select.POLLIN)
        self._look = True  # there may be a message that the descriptor does not tell of
        # Its own, so that a tenant may say nothing, or something wrong, for as long as over TLS alone.
        hello = encode(Hello(f"front door {os.getpid()}"))
        self._exchange(Header(Operation.HELLO, request_id=1, rows=1, columns=len(hello)), 0, 0, hello)

    def accept(self, header: Header) -> None:
        """See Session; ``overloaded`` if the executor has no memory for it."""
        self._protocol.accept(header)
        if _in_memory(header):
            self._have(_in_memory(header) + self._protocol.answer(header).payload_bytes)

    def allocate(self, header: Header) -> torch.Tensor:
        """In the memory, unless an earlier request, which has arrived at the same time, is still there."""
        if not _in_memory(header) or self._placed is not None:
            return new_payload(header)
        self._placed = header
        return self._link.memory.tensor(0, header.payload_dtype, header.payload_shape)

    def close(self) -> None:
        """See Session."""
        try:
            self._say(END)
        except OSError:
            pass  # the executor has gone
        self._link.close()

    def _done(self, header: Header) -> None:
        if self._placed is header:
            self._placed = None

    def _count_refusal(self, code: str) -> None:
        self._relay.refused(code)

    def _serve(self, header: Header, payload: torch.Tensor) -> None:
        """Have the executor answer, and pass that on."""
        data = tensor_bytes(payload)
        if header.operation in PRODUCTS:
            answer_bytes = self._protocol.answer(header).payload_bytes
        else:
            answer_bytes = self._relay.fetched_bytes(decode(data, Fetch))
        # Of the next request a part may have arrived, and lie at the beginning already.
        at = _in_memory(self._placed) if self._placed and self._placed is not header else 0
        answer_at = at + _in_memory(header)
        self._have(answer_at + answer_bytes)
        if _in_memory(header) and self._placed is not header:
            self._link.memory.write(at, [payload])
        answer, body = self._exchange(header, at, answer_at, None if _in_memory(header) else data)
        if answer.operation == Operation.REPLY:
            tensor = self._link.memory.tensor(answer_at, answer.payload_dtype, answer.payload_shape)
            self._send(answer, [tensor])
        else:
            self._send(answer, body)

    def _exchange(
        self, header: Header, at: int, answer_at: int, body: bytes | memoryview | None
    ) -> tuple[Header, bytes]:
        """One request and its answer; ``body`` is what does not lie in the memory."""
        front = header.pack() + PLACES.pack(at, answer_at)
        if body is None:
            os.write(self._link.requests, front)
        else:
            self._say(front + body)
        data = self._next()
        answer = parse_header(data)
        if answer.request_id != header.request_id:
            raise WireError("internal", "the executor ended the session", fatal=True)
        return answer, data[HEADER_BYTES:]

    def _have(self, size: int) -> None:
        """Have at least so many bytes of memory.

        Raises:
            WireError: ``overloaded``: there are no more.
        """
        memory = self._link.memory
        if size <= memory.size:
            return
        self._say(MEMORY.pack(MEMORY_BYTE, min(max(size, 2 * memory.size), self._link.opened.max_size)))
        self._link.grow(MEMORY.unpack(self._next())[1])
        if self._link.memory.size < size:
            raise WireError(
                "overloaded",
                "the executor has no more shared memory at the moment",
                retry_after=RETRY_SECONDS,
            )

    def _say(self, data: bytes) -> None:
        self._look = True
        try:
            self._link.sock.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise BrokenPipeError(str(error)) from error

    def _next(self) -> bytes:
        """The executor's next message. It comes, or the pipe ends, which it does when the executor dies."""
        while True:
            if self._look:
                try:
                    data = self._link.sock.recv(zmq.NOBLOCK)
                except zmq.Again:
                    self._look = False
                    continue
            else:
                ready = [descriptor for descriptor, _ in self._poll.poll()]
                if self._link.answers not in ready:
                    self._look = True
                    continue
                data = os.read(self._link.answers, HEADER_BYTES)
            if not data:
                raise EOFError("the executor ended the session")
            return data


def _in_memory(header: Header) -> int:
    """Bytes of a request's payload in the memory, rounded up to its answer; 0: it travels in the message."""
    rows = header.operation in (Operation.PRODUCT, Operation.EFFECT)
    return aligned(header.payload_bytes) if rows else 0
