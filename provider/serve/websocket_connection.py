"""A tenant's connection by TLS websocket: frames in, frames out, in the executor's loop."""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from provider.engine.loop import READ, WRITE, Loop
from provider.serve.connection import Connection
from provider.serve.handshake import LINGER_SECONDS, NO_ROOM, Admitted, TooManyConnections, linger
from provider.serve.tls_socket import BoundedTlsSocket
from provider.session.tenant import Send, TenantSession
from shared.errors import WireError
from shared.wire.header import Header
from shared.wire.websocket import (
    Control,
    Incoming,
    MessageReader,
    Opcode,
    encode_control,
    encode_message,
)

STALL_SECONDS = 60.0  # in which a message, or an answer, does not move on
STALL_RATE = 16 << 10  # bytes a second, below which it does not
DISCARDS = 16  # of what arrives at the end, before it is another's turn
TURN_SECONDS = 2e-3  # of a round of the loop, for what all connections of a tenant send and are sent
STEPS = 128  # of parsing, before the time is looked at
LOOKS = 4  # within the seconds of a stall
IDLE_FRAMES = 1000  # from one look to the next
END_SECONDS = 10.0  # for a tenant to take what is left if it has left, is shut out, or broke the protocol

OpenSession = Callable[[str, "Send", str], "TenantSession"]


class _Out(NamedTuple):
    """What is to be written, and who is told when it has been."""

    pieces: Iterator[bytes | memoryview]
    taken: Callable[[], None]


class WebsocketConnection(Connection):
    """See Connection.

    Args:
        sock: encrypted and authenticated; this closes it.
        admitted: who it is.
        peer: where it comes from.
        open_session: makes its session of the tenant, what sends an answer, and ``peer``.
        max_message_bytes: of a payload.
        max_in_flight: requests under way at most; no more are read until one is answered.

    Raises:
        TooManyConnections, OSError: ``open_session`` did, or something is short; the tenant has been told.
    """

    def __init__(
        self,
        sock: BoundedTlsSocket,
        admitted: Admitted,
        peer: str,
        open_session: OpenSession,
        max_message_bytes: int,
        max_in_flight: int,
    ) -> None:
        super().__init__(*admitted, peer)
        self._sock, self._max_in_flight = sock, max_in_flight
        try:
            self._session = open_session(self.tenant, self._send, peer)
        except (TooManyConnections, OSError) as error:
            with sock:
                sock.settimeout(1.0)
                why = str(error) if isinstance(error, TooManyConnections) else NO_ROOM
                try:
                    sock.sendall(_closing(1013, why))  # try again later
                    sock.unwrap()
                except (OSError, ValueError):
                    pass  # the peer may be gone
                linger(sock)
            raise
        except BaseException:
            sock.close()
            raise
        self._reader = MessageReader(
            self._session.accept,
            masked=True,
            max_message_bytes=max_message_bytes,
            allocate=self._session.allocate,
            steps=STEPS,
        )
        self._descriptor = sock.fileno()
        self._write_queue: deque[_Out] = deque()
        self._piece = memoryview(b"")  # of the first of them
        self._begun = False  # the first of them has been written in part
        self._events: deque[Incoming | Control] = deque()  # complete, and not yet handled
        self._reading, self._writing = True, False  # what the loop waits for
        self._resumes = False  # it is to be called
        self._read_closed = False  # all that had arrived when the end began has been read
        self._said_goodbye = False
        self._written = 0
        self._seen, self._stuck = (0, 0), [0, 0]  # bytes read and written, and for how many looks few more
        self._seen_idle = 0

    def start(self, loop: Loop, ended: Callable[[], None]) -> None:
        """See Connection."""
        super().start(loop, ended)
        self._sock.setblocking(False)
        loop.register(self._descriptor, self._ready)
        loop.call_later_weak(STALL_SECONDS / LOOKS, self._check_progress)
        self._ready(READ)  # what came with the handshake is in TLS already

    def drain(self) -> None:
        """See Connection."""
        self._draining = True
        self._resume_reading()

    # -- in ---------------------------------------------------------------------------------------

    def _ready(self, what: int) -> None:
        self._guarded(partial(self._move, what))

    def _move(self, what: int) -> None:
        if what & WRITE:
            self._ask_to_write()
        if what & ~WRITE:
            if self._ending:
                self._discard_until_end()
            elif self._reading or what & (select.EPOLLERR | select.EPOLLHUP):
                self._read()

    def _read(self) -> None:
        """Handle what has arrived, but no longer than is fair to other tenants and other connections."""
        self._loop.take_turn(self.tenant, TURN_SECONDS, self._turn)

    def _turn(self, until: float) -> None:
        if self._ending or self._ended:
            return
        self._guarded(partial(self._read_until, until))
        if self._sock.unsent and not self._writing:  # what TLS itself has to say
            self._set_interest(writing=True)

    def _read_until(self, until: float) -> None:
        more = True
        while self._handle(until):
            if not more:
                if self._sock.unread:
                    self._read()
                return
            count = 0
            if not self._reader.unparsed:
                try:
                    count = self._sock.recv_into(self._reader.get_buffer())
                except ssl.SSLWantReadError:
                    self._finish()
                    return
                if count == 0:
                    self._leave()
                    return
            self._events += self._reader.received(count)
            # What TLS has decrypted already is not told of. To drain, all that has arrived is read.
            more = bool(self._sock.pending() or self._reader.mid_message or self._draining)

    def _handle(self, until: float) -> bool:
        """What is complete, one after the other; whether to go on reading."""
        while self._events:
            if self._over_limit:
                self._set_interest(reading=False)
                return False
            event = self._events.popleft()
            if isinstance(event, Incoming):
                self._session.answer(event)
            elif event.opcode == Opcode.PING:
                self._queue(iter((encode_control(Opcode.PONG, event.data),)))
            elif event.opcode == Opcode.CLOSE:
                self._leave()
            if self._ended or self._ending:
                return False
            if time.monotonic() > until:
                break
        if time.monotonic() > until:  # fragments complete nothing, and take time as well
            self._read()
            return False
        return True

    @property
    def _over_limit(self) -> bool:
        """Whether as much is under way, or waits for the tenant to read it, as may be."""
        return self._session.in_flight >= self._max_in_flight or len(self._write_queue) > self._max_in_flight

    def _read_again(self) -> None:
        """If that was put off, and need not be any more."""
        if not (self._reading or self._ending or self._read_closed or self._over_limit):
            self._reading = True  # so that it is asked for once
            self._resume_soon()

    def _resume_soon(self) -> None:
        """In this round of the loop or the next; once, although the socket also tells of itself each time."""
        if not self._resumes:
            self._resumes = True
            self._loop.call_soon_threadsafe(self._resume_reading)

    def _resume_reading(self) -> None:
        self._resumes = False
        if self._read_closed:
            self._finish()
        elif not self._ended and not self._ending:
            self._set_interest(reading=True)
            self._ready(READ)

    # -- out --------------------------------------------------------------------------------------

    def _send(self, header: Header, blocks: list[torch.Tensor] | bytes, on_taken: Callable[[], None]) -> None:
        if self._ending:
            on_taken()
            return
        self._queue(encode_message(header, blocks), on_taken)
        self._read_again()
        if self._draining:
            self._resume_soon()

    def _queue(
        self, pieces: Iterator[bytes | memoryview], on_taken: Callable[[], None] = lambda: None
    ) -> None:
        if self._ended:
            on_taken()
            return
        self._write_queue.append(_Out(pieces, on_taken))
        if len(self._write_queue) == 1 and not self._writing:
            self._ask_to_write()

    def _ask_to_write(self) -> None:
        """Now, or in one of the next rounds: a large answer is encrypted in the tenant's own time."""
        self._loop.take_turn(self.tenant, TURN_SECONDS, self._write_turn)

    def _write_turn(self, until: float) -> None:
        self._guarded(partial(self._write, until))

    def _write(self, until: float) -> None:
        try:
            while self._write_queue:
                if time.monotonic() > until:
                    self._ask_to_write()
                    return
                if not len(self._piece):
                    following = next(self._write_queue[0].pieces, None)
                    self._begun = following is not None
                    if following is None:
                        self._write_queue.popleft().taken()
                        continue
                    self._piece = memoryview(following)
                count = self._sock.send(self._piece)
                self._piece = self._piece[count:]
                self._written += count
            self._written += self._sock.flush()
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            self._set_interest(writing=True)
            return
        if self._writing:
            self._set_interest(writing=False)
        self._read_again()
        if self._ending and not self._said_goodbye:
            self._say_goodbye()

    # -- the end ----------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Close, if this is to end and everything that has arrived is answered.

        Who always has a request under way would never be told; what it sends from now on it will repeat.
        """
        if not self._draining or self._ended or self._ending or self._reader.mid_message:
            return
        if self._session.in_flight:
            self._read_closed = True
            self._set_interest(reading=False)
        else:
            self._close(1001, "")

    def _leave(self) -> None:
        """The tenant has left, and wants no more answers."""
        self._drop_answers(0)
        self._close(1000, "")

    def _refused(self, error: WireError) -> None:
        self._drop_answers(1)  # all but the error
        self._close(1009 if error.code == "too_large" else 1002, error.code)

    def _drop_answers(self, kept: int) -> None:
        """Forget answers but the last ones and one that has begun, and end soon: who reads slowly stays else.

        Its connection and its bytes in flight would be taken from others for as long as it likes.
        """
        if self._ending or self._ended:
            return
        dropped = range(int(self._begun), len(self._write_queue) - kept)
        answers = list(self._write_queue)
        self._write_queue = deque(each for at, each in enumerate(answers) if at not in dropped)
        for at in dropped:
            answers[at].taken()
        self._loop.call_later_weak(END_SECONDS, self._end)

    def _close(self, code: int, reason: str) -> None:
        if self._ending or self._ended:
            return
        self._ending = True
        self._events.clear()
        self._set_interest(reading=True)  # for the tenant's end
        self._queue(iter((_closing(code, reason),)))

    def _say_goodbye(self) -> None:
        """TLS's own end, so that the tenant sees an end and not a cut; then wait for its."""
        self._said_goodbye = True
        self._loop.call_later(LINGER_SECONDS, self._end)
        try:
            self._sock.unwrap()
        except (OSError, ValueError):
            pass  # said, and not yet heard; or the peer is gone
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._end()

    def _discard_until_end(self) -> None:
        """Closing a socket with unread bytes would destroy what was sent."""
        try:
            for _ in range(DISCARDS):
                if not self._sock.discard():
                    self._end()
                    return
        except BlockingIOError:
            pass

    def _release(self) -> None:
        self._loop.unregister(self._descriptor)
        self._write_queue.clear()
        self._events.clear()
        self._piece = memoryview(b"")
        self._reader.drop()
        self._session.close()
        self._sock.close()

    # -- waiting ----------------------------------------------------------------------------------

    def _set_interest(self, *, reading: bool | None = None, writing: bool | None = None) -> None:
        self._reading = self._reading if reading is None else reading
        self._writing = self._writing if writing is None else writing
        if not self._ended:
            what = (READ if self._reading or self._ending else 0) | (WRITE if self._writing else 0)
            self._loop.modify(self._descriptor, what)

    def _check_progress(self) -> None:
        if self._ended:
            return
        idle, self._seen_idle = self._reader.idle_frames - self._seen_idle, self._reader.idle_frames
        if idle > IDLE_FRAMES:
            self._guarded(self._refuse_idle_frames)
        moved = (self._reader.progress, self._written)  # control frames and empty fragments are none
        waits = (self._reading and self._reader.mid_message, bool(self._write_queue or self._sock.unsent))
        for way in range(2):
            few = moved[way] - self._seen[way] < STALL_RATE * STALL_SECONDS / LOOKS
            self._stuck[way] = self._stuck[way] + 1 if waits[way] and few else 0
        self._seen = moved
        if max(self._stuck) >= LOOKS:
            self._broke(TimeoutError())
        else:
            self._loop.call_later_weak(STALL_SECONDS / LOOKS, self._check_progress)

    def _refuse_idle_frames(self) -> None:
        raise WireError("frame", f"more than {IDLE_FRAMES} frames without data in a short time", fatal=True)


def _closing(code: int, reason: str) -> bytes:
    return encode_control(Opcode.CLOSE, code.to_bytes(2, "big") + reason.encode())
