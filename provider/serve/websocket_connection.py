"""A tenant's connection by TLS websocket: frames in, frames out, in the executor's loop."""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from provider.engine.loop import READ, WRITE, Loop
from provider.serve.admission import Identity
from provider.serve.connection import (
    CLOSING,
    DRAINING,
    ENDED,
    HALF_CLOSED,
    LINGERING,
    OPEN,
    Connection,
)
from provider.serve.handshake import LINGER_SECONDS
from provider.serve.tls_socket import BoundedTlsSocket
from provider.serve.write_queue import WriteQueue
from provider.session.tenant import Send, TenantSession
from shared.errors import WireError
from shared.wire.frames import Control, MessageReader, Opcode, encode_control, encode_message
from shared.wire.header import Header
from shared.wire.incoming import Incoming

STALL_SECONDS = 60.0  # in which a message, or an answer, does not move on
STALL_RATE = 16 << 10  # bytes a second, below which it does not
DISCARDS = 16  # of what arrives at the end, before the loop serves another
TIME_SLICE_SECONDS = 2e-3  # of a round of the loop, for what all connections of a tenant send and are sent
STEPS = 128  # of parsing, before the time is looked at
CHECKS = 4  # within the seconds of a stall
IDLE_FRAMES = 1000  # from one check to the next
END_SECONDS = 10.0  # for a tenant to take what is left if it has left, is shut out, or broke the protocol

OpenSession = Callable[[str, "Send", str], "TenantSession"]


class WebsocketConnection(Connection):
    """See Connection.

    It reads and writes in time slices alone (``Loop.run_in_time_slice``), so that a tenant's connections
    share the tenant's time. It asks for a slice when the loop says that the socket is ready, and when the
    slice before was too short. If a limit made it stop reading, it asks when it may read again
    (``_resume_soon``): the socket does not tell of what has been read already.

    The loop tells it when the socket can be read (``_reading``):

    - OPEN, DRAINING: unless a limit is reached.
    - HALF_CLOSED: never.
    - CLOSING, LINGERING: always, to throw away what comes until the tenant ends.

    and when it can be written (``_writing``), in any stage, if the socket did not take everything.

    Args:
        sock: encrypted and authenticated; this closes it.
        identity: the tenant and its token.
        peer: where it comes from.
        open_session: makes its session of the tenant, what sends an answer, and ``peer``.
        max_message_bytes: of a payload.
        max_in_flight: requests in flight at most; no more are read until one is answered.
    """

    def __init__(
        self,
        sock: BoundedTlsSocket,
        identity: Identity,
        peer: str,
        open_session: OpenSession,
        max_message_bytes: int,
        max_in_flight: int,
    ) -> None:
        super().__init__(*identity, peer)
        self._sock, self._max_in_flight = sock, max_in_flight
        try:
            self._session = open_session(self.tenant, self._send, peer)
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
        self._events: deque[Incoming | Control] = deque()  # complete, and not yet handled
        self._outgoing = WriteQueue(sock)
        self._reading, self._writing = True, False  # what the loop waits for
        self._resumes = False  # ``_resume`` is to be called
        self._stalls = _StallWatch(), _StallWatch()  # in, out
        self._seen_idle = 0

    def start(self, loop: Loop, ended: Callable[[], None]) -> None:
        """See Connection."""
        super().start(loop, ended)
        self._sock.setblocking(False)
        loop.register(self._descriptor, self._ready)
        loop.call_later_weak(STALL_SECONDS / CHECKS, self._check_progress)
        self._ready(READ)  # what came with the handshake is in TLS already

    def drain(self) -> None:
        """See Connection."""
        if self._stage == OPEN:
            self._advance(DRAINING)
        self._resume()

    # -- in ---------------------------------------------------------------------------------------

    def _ready(self, what: int) -> None:
        self._guarded(self._handle_ready, what)

    def _handle_ready(self, what: int) -> None:
        if what & WRITE:
            self._ask_to_write()
        if not what & ~WRITE:
            return
        if self._stage < CLOSING:
            if self._reading or what & (select.EPOLLERR | select.EPOLLHUP):
                self._ask_to_read()
        elif self._stage < ENDED:
            self._discard_until_end()

    def _ask_to_read(self) -> None:
        self._loop.run_in_time_slice(self.tenant, TIME_SLICE_SECONDS, self._read_in_slice)

    def _read_in_slice(self, until: float) -> None:
        """Handle what has arrived, but no longer than is fair to other tenants and other connections."""
        if self._stage >= CLOSING:
            return
        self._guarded(self._read, until)
        if self._sock.unsent and not self._writing:  # what TLS itself has to say
            self._set_interest(writing=True)

    def _read(self, until: float) -> None:
        more = True
        while self._handle_events(until):
            if not more:
                if self._sock.unread:
                    self._ask_to_read()
                return
            count = 0
            if not self._reader.unparsed:
                try:
                    count = self._sock.recv_into(self._reader.get_buffer())
                except ssl.SSLWantReadError:
                    self._all_read()
                    return
                if count == 0:
                    self._close(1000, "", kept=0)
                    return
            self._events += self._reader.received(count)
            # What TLS has decrypted already is not told of. To drain, all that has arrived is read.
            more = bool(self._sock.pending() or self._reader.mid_message or self._stage == DRAINING)

    def _handle_events(self, until: float) -> bool:
        """Handle what is complete, one after the other. Returns whether to go on reading."""
        while self._events:
            if self._over_limit:
                self._set_interest(reading=False)
                return False
            self._handle(self._events.popleft())
            if self._stage >= CLOSING:
                return False
            if time.monotonic() > until:
                break
        if time.monotonic() > until:  # fragments complete nothing, and take time as well
            self._ask_to_read()
            return False
        return True

    def _handle(self, event: Incoming | Control) -> None:
        if isinstance(event, Incoming):
            self._session.answer(event)
        elif event.opcode == Opcode.PING:
            self._queue(iter((encode_control(Opcode.PONG, event.data),)))
        elif event.opcode == Opcode.CLOSE:
            self._close(1000, "", kept=0)

    @property
    def _over_limit(self) -> bool:
        """Whether as much is in flight, or waits for the tenant to read it, as may be."""
        return self._session.in_flight >= self._max_in_flight or len(self._outgoing) > self._max_in_flight

    def _resume_soon(self) -> None:
        """Go on if reading has stopped, in this round of the loop or the next; once."""
        if not (self._reading or self._resumes or self._stage >= CLOSING or self._over_limit):
            self._resumes = True
            self._loop.call_soon_threadsafe(self._resume)

    def _resume(self) -> None:
        self._resumes = False
        if self._stage < HALF_CLOSED:
            self._set_interest(reading=True)
            self._ready(READ)
        elif self._stage == HALF_CLOSED:
            self._all_read()

    def _all_read(self) -> None:
        """Everything that has arrived is read: if this is draining, close when all of it is answered.

        A tenant that always has a request in flight would never be told; it will repeat what it sends now.
        """
        if self._stage == OPEN or self._reader.mid_message:
            return
        if self._session.in_flight:
            self._advance(HALF_CLOSED)
            self._set_interest(reading=False)
        else:
            self._close(1001, "")

    # -- out --------------------------------------------------------------------------------------

    def _send(self, header: Header, tensors: list[torch.Tensor] | bytes, on_sent: Callable[[], None]) -> None:
        if self._stage >= CLOSING:
            on_sent()
            return
        self._queue(encode_message(header, tensors), on_sent)
        self._resume_soon()

    def _queue(
        self, pieces: Iterator[bytes | memoryview], on_sent: Callable[[], None] = lambda: None
    ) -> None:
        self._outgoing.append(pieces, on_sent)
        if len(self._outgoing) == 1 and not self._writing:  # else it has asked already
            self._ask_to_write()

    def _ask_to_write(self) -> None:
        """Write now, or in one of the next rounds: a large answer is encrypted in the tenant's own time."""
        self._loop.run_in_time_slice(self.tenant, TIME_SLICE_SECONDS, self._write_in_slice)

    def _write_in_slice(self, until: float) -> None:
        self._guarded(self._write, until)

    def _write(self, until: float) -> None:
        try:
            if not self._outgoing.write(until):
                self._ask_to_write()
                return
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            self._set_interest(writing=True)
            return
        if self._writing:
            self._set_interest(writing=False)
        self._resume_soon()
        if self._stage == CLOSING:
            self._send_close_notify()

    # -- the end ----------------------------------------------------------------------------------

    def _refused(self, error: WireError) -> None:
        self._close(1009 if error.code == "too_large" else 1002, error.code, kept=1)

    def _close(self, code: int, reason: str, kept: int | None = None) -> None:
        """Handle nothing more, and say CLOSE behind the answers that wait.

        Args:
            kept: keep so many of the last answers, and one that has begun; forget the others, and end soon. A
                slow reader would else keep its connection and its bytes in flight for as long as it likes.
                None: keep all.
        """
        if self._stage >= CLOSING:
            return
        self._advance(CLOSING)
        self._events.clear()
        if kept is not None:
            self._outgoing.drop(kept)
            self._loop.call_later_weak(END_SECONDS, self._end)
        self._set_interest(reading=True)  # for the tenant's end
        self._queue(iter((_close_frame(code, reason),)))

    def _send_close_notify(self) -> None:
        """Send TLS's own end, so that the tenant sees an end and not a cut; then wait for the tenant's."""
        self._advance(LINGERING)
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
        """Throw away what arrives: closing a socket with unread bytes would destroy what was sent."""
        try:
            for _ in range(DISCARDS):
                if not self._sock.discard():
                    self._end()
                    return
        except BlockingIOError:
            pass

    def _release(self) -> None:
        self._loop.unregister(self._descriptor)
        self._outgoing.clear()
        self._events.clear()
        self._reader.drop()
        self._session.close()
        self._sock.close()

    # -- waiting ----------------------------------------------------------------------------------

    def _set_interest(self, *, reading: bool | None = None, writing: bool | None = None) -> None:
        self._reading = self._reading if reading is None else reading
        self._writing = self._writing if writing is None else writing
        if self._stage < ENDED:
            what = (READ if self._reading else 0) | (WRITE if self._writing else 0)
            self._loop.modify(self._descriptor, what)

    def _check_progress(self) -> None:
        if self._stage == ENDED:
            return
        idle, self._seen_idle = self._reader.idle_frames - self._seen_idle, self._reader.idle_frames
        if idle > IDLE_FRAMES:
            self._guarded(self._refuse_idle_frames)
        arrives, leaves = self._stalls
        # Control frames and empty fragments are no progress.
        stalled = arrives.check(self._reader.progress, waits=self._reading and self._reader.mid_message)
        stalled |= leaves.check(self._outgoing.written, waits=bool(self._outgoing or self._sock.unsent))
        if stalled:
            self._broke(TimeoutError())
        else:
            self._loop.call_later_weak(STALL_SECONDS / CHECKS, self._check_progress)

    def _refuse_idle_frames(self) -> None:
        raise WireError("frame", f"more than {IDLE_FRAMES} frames without data in a short time", fatal=True)


class _StallWatch:
    """Finds that bytes do not move on in one direction, in several checks."""

    def __init__(self) -> None:
        self._seen = 0  # bytes
        self._slow_checks = 0  # in a row

    def check(self, moved: int, *, waits: bool) -> bool:
        """Returns whether too few bytes have moved for too long.

        Args:
            moved: bytes that have moved so far.
            waits: whether more bytes are to move.
        """
        slow = waits and moved - self._seen < STALL_RATE * STALL_SECONDS / CHECKS
        self._seen = moved
        self._slow_checks = self._slow_checks + 1 if slow else 0
        return self._slow_checks >= CHECKS


def _close_frame(code: int, reason: str) -> bytes:
    return encode_control(Opcode.CLOSE, code.to_bytes(2, "big") + reason.encode())
