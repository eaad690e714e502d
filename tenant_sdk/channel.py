"""One connection to an executor: many requests in flight, from any thread, without a thread of its own.

Whoever waits for an answer and finds the socket free becomes the *leader*: it writes what is to be
written and reads what arrives, for itself and for the others, until its own answer is complete;
then it hands the socket to another waiter. So a lone thread, which is the usual case, sends and
receives without a single hand-over between threads.
"""

from __future__ import annotations

import copy
import logging
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from shared.errors import ConnectionLost, RequestRefused, RequestTimeout, SymbiosisError, WireError, peer_text
from shared.header import Header, Operation
from shared.messages import ErrorInfo, decode
from shared.protocol import TenantProtocol
from shared.websocket import Control, Incoming, MessageReader, Opcode, encode_control, encode_message

log = logging.getLogger(__name__)

Entropy = Callable[[int], bytes]
# What an answer may hold at most; each answer's true size is checked against its request as well.
MAX_ANSWER_BYTES = 1 << 30
KEEPALIVE_SECONDS = 20.0
MAX_OUTBOX = 4096  # messages; far more than threads ever wait
READS_AT_ONCE = 1024  # before looking at the clock again


class Pending:
    """A request under way; ``Channel.wait`` turns it into its answer."""

    __slots__ = ("answer", "done", "error", "event", "leads", "waited")

    def __init__(self) -> None:
        self.event: threading.Event | None = None  # made only if another thread leads
        self.answer: Incoming | None = None
        self.error: SymbiosisError | None = None
        self.done = False
        self.waited = False  # a thread is inside wait() for it
        self.leads = False

    def finish(self, answer: Incoming | None, error: SymbiosisError | None) -> None:
        """Set the outcome and wake whoever waits for it."""
        self.answer, self.error, self.done = answer, error, True
        if self.event is not None:
            self.event.set()


_NO_ANSWER = Incoming(Header(0), None)  # of a ping


class Channel:
    """An open session's connection.

    Args:
        sock: after TLS and websocket handshake.
        peer: the URL, for messages.
        timeout: seconds without any progress after which requests fail and the channel closes.
        entropy: fresh random bytes for websocket masks (RFC 6455 §5.3).
    """

    def __init__(self, sock: ssl.SSLSocket, peer: str, *, timeout: float, entropy: Entropy) -> None:
        self._sock = sock
        self.peer = peer
        self.timeout = timeout
        self._entropy = entropy
        self._protocol = TenantProtocol()
        self._reader = MessageReader(self._protocol.accept, masked=False, max_message_bytes=MAX_ANSWER_BYTES)
        self._lock = threading.Lock()  # guards all below
        self._process = os.getpid()
        self._leading = False
        self._pending: dict[int, Pending] = {}
        self._pongs: deque[Pending] = deque()
        self._outbox: deque[Iterator[bytes | memoryview]] = deque()
        self._broken: SymbiosisError | None = None
        # The leader's own: the message being written.
        self._writing: Iterator[bytes | memoryview] | None = None
        self._piece = memoryview(b"")
        sock.settimeout(0)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)
        self._events = 0  # what the socket is registered for
        self._stop = threading.Event()
        threading.Thread(target=self._keep_alive, name="symbiosis-keepalive", daemon=True).start()

    def submit(
        self, header_of: Callable[[TenantProtocol], Header], blocks: list[torch.Tensor] | bytes
    ) -> Pending:
        """Queue a request; ``wait`` sends it, for this or another request.

        ``blocks`` must not change until the answer is here.

        Raises:
            SymbiosisError: what broke the channel earlier.
        """
        self._check_process()
        pending = Pending()
        with self._lock:
            if self._broken is not None:
                raise again(self._broken)
            header = header_of(self._protocol)
            self._pending[header.request_id] = pending
            self._outbox.append(encode_message(header, blocks, self._entropy(4)))
            self._wake_leader()
        return pending

    def wait(self, pending: Pending) -> Incoming:
        """Block until the answer is here.

        Raises:
            RequestRefused: the executor answered with an error; the channel is still good.
            ConnectionLost, RequestTimeout, WireError: the channel is broken from now on.
        """
        try:
            with self._lock:
                pending.waited = True
                if self._leading:
                    pending.event = threading.Event()
                elif not pending.done:
                    self._leading = pending.leads = True
            while not pending.done:
                if not pending.leads and pending.event is not None:
                    pending.event.wait()  # done, or chosen to lead
                    continue
                try:
                    self._lead(pending)
                except SymbiosisError as error:
                    self._break(error)
                except (OSError, ssl.SSLError) as error:
                    self._break(
                        ConnectionLost(
                            f"the connection to {self.peer} broke ({type(error).__name__}); "
                            "open a new session and resume from your last checkpoint"
                        )
                    )
                except BaseException:
                    # Interrupted with part of a message sent: the stream cannot be continued.
                    self._break(ConnectionLost("a request was interrupted; open a new session to go on"))
                    raise
        finally:
            # Also when interrupted while another leads: leadership left to a thread that is gone
            # would leave all others waiting for ever.
            self._hand_over(pending)
        if pending.error is not None:
            raise pending.error
        return pending.answer or _NO_ANSWER

    @property
    def broken(self) -> bool:
        """Whether every further request would fail."""
        return self._broken is not None

    def ping(self) -> None:
        """Round trip of a websocket ping."""
        self._check_process()
        pending = Pending()
        with self._lock:
            if self._broken is not None:
                raise again(self._broken)
            self._pongs.append(pending)
            self._outbox.append(iter([encode_control(Opcode.PING, b"", self._entropy(4))]))
            self._wake_leader()
        self.wait(pending)

    def close(self) -> None:
        """End the session; later requests, and those under way, raise ConnectionLost."""
        if os.getpid() != self._process:
            return  # it is the parent's, who goes on with it
        with self._lock:
            ours = not self._leading  # else the leader shuts the socket: nobody else may touch it
            self._leading = True  # and from now on nobody starts to lead
            between_messages = ours and self._broken is None and self._writing is None
        try:
            if between_messages:
                self._sock.settimeout(1.0)
                code = (1000).to_bytes(2, "big")
                self._sock.sendall(encode_control(Opcode.CLOSE, code, self._entropy(4)))
        except (OSError, ValueError):
            pass  # it is gone already
        finally:
            self._break(ConnectionLost("the session is closed"))
            if ours:
                self._shut()

    def _check_process(self) -> None:
        """A forked child has the parent's TLS keys and counters: what it sent would reuse its key stream."""
        if os.getpid() != self._process:
            raise ConnectionLost("a session stays in the process that opened it; open one in this process")

    # -- leading ---------------------------------------------------------------------------------

    def _wake_leader(self) -> None:
        if self._leading:  # it may be asleep until bytes arrive
            try:
                self._wake_write.send(b"x")
            except BlockingIOError:
                pass  # it has been woken a thousand times already

    def _hand_over(self, pending: Pending) -> None:
        """Leave ``wait``: the leader names an heir, or shuts a broken channel that needs none."""
        with self._lock:
            pending.waited = False
            if not pending.leads:
                return
            pending.leads = False
            waiting = (*self._pending.values(), *self._pongs)
            heir = next((p for p in waiting if p.waited), None)
            self._leading = heir is not None
            if heir is not None and heir.event is not None:
                heir.leads = True
                heir.event.set()
            elif self._broken is not None:
                self._shut()

    def _lead(self, pending: Pending) -> None:
        last_progress = time.monotonic()
        while not pending.done:
            blocked = self._write()
            left = last_progress + self.timeout - time.monotonic()
            if left <= 0:
                raise self._no_progress()
            # What TLS has decrypted already does not wake poll().
            if not self._sock.pending() and self._sleep(blocked, left):
                last_progress = time.monotonic()
            before = self._reader.progress
            self._read()
            # Pings do not count: an executor that sends only those is one that does not answer.
            if self._reader.progress != before:
                last_progress = time.monotonic()

    def _sleep(self, blocked: bool, seconds: float) -> bool:
        """Until there is something to read or, if writing is blocked, to write; True for the latter."""
        events = select.POLLIN | (select.POLLOUT if blocked else 0)
        if events != self._events:
            self._poll.register(self._sock, events)
            self._events = events
        ready = self._poll.poll(seconds * 1000)
        if not ready:
            raise self._no_progress()
        for descriptor, _ in ready:
            if descriptor == self._wake_read.fileno() and not self._wake_read.recv(4096):
                raise ConnectionLost("the session was closed while a request was under way")
        return any(what & select.POLLOUT for _, what in ready)

    def _no_progress(self) -> RequestTimeout:
        return RequestTimeout(
            f"{self.peer} made no progress for {self.timeout:.0f} s; it may be overloaded or "
            "gone. `symbiosis-tenant doctor` tests the connection"
        )

    def _write(self) -> bool:
        """Write what there is; True if the socket took only part of it."""
        while True:
            while not self._piece:
                if self._writing is None:
                    with self._lock:
                        if not self._outbox:
                            return False
                        self._writing = self._outbox.popleft()
                piece = next(self._writing, None)
                if piece is None:
                    self._writing = None
                else:
                    self._piece = memoryview(piece)
            try:
                sent = self._sock.send(self._piece)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return True
            self._piece = self._piece[sent:]

    def _read(self) -> None:
        """Read what there is, until something is complete, but not for ever."""
        for _ in range(READS_AT_ONCE):
            try:
                count = self._sock.recv_into(self._reader.get_buffer())
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if count == 0:
                raise ConnectionLost(
                    f"{self.peer} ended the connection; open a new session and resume from your last "
                    "checkpoint"
                )
            events = self._reader.received(count)
            for event in events:
                self._handle(event)
            if events:
                return

    def _handle(self, event: Incoming | Control) -> None:
        if isinstance(event, Control):
            if event.opcode == Opcode.PING:
                pong = encode_control(Opcode.PONG, event.data, self._entropy(4))
                with self._lock:
                    if len(self._outbox) >= MAX_OUTBOX:
                        raise WireError("frame", "more pings than the executor reads answers", fatal=True)
                    self._outbox.append(iter([pong]))
            elif event.opcode == Opcode.PONG:
                with self._lock:
                    waiting = self._pongs.popleft() if self._pongs else None
                if waiting is not None:
                    waiting.finish(None, None)
            else:
                code = int.from_bytes(event.data[:2], "big")
                why = {1001: "it is shutting down", 1013: "this tenant has too many connections"}.get(
                    code, f"code {code}"
                )
                raise ConnectionLost(f"{self.peer} closed the connection: {why}", retry_after=5.0)
            return
        if event.error is not None:
            raise event.error
        error: SymbiosisError | None = None
        if event.header.operation == Operation.ERROR:
            info = decode(control_payload(event), ErrorInfo)
            info_code, message = peer_text(info.code, 40), peer_text(info.message)
            if event.header.request_id == 0:
                raise WireError(info_code, message, fatal=True)
            error = RequestRefused(info_code, message, retry_after=info.retry_after)
        with self._lock:
            self._protocol.answered(event.header.request_id)
            pending = self._pending.pop(event.header.request_id, None)
        if pending is None:
            # Its header was accepted because the first answer arrived in the same read.
            raise WireError("unexpected", "the executor answered a request twice", fatal=True)
        pending.finish(event, error)

    def _break(self, error: SymbiosisError) -> None:
        """Fail everything under way and everything to come."""
        self._stop.set()
        with self._lock:
            if self._broken is None:
                self._broken = error
            waiting = [*self._pending.values(), *self._pongs]
            self._pending.clear()
            self._pongs.clear()
            self._outbox.clear()
        for pending in waiting:
            pending.finish(None, again(self._broken))
        self._wake_write.close()  # wakes a leader that is asleep in poll()

    def _shut(self) -> None:
        """Close the sockets. Only whoever leads may: a TLS socket that is closed under another
        thread's send would send in the clear, through the plain socket that is left of it."""
        self._writing, self._piece = None, memoryview(b"")
        self._sock.close()
        self._wake_read.close()

    def _keep_alive(self) -> None:
        """Keep middleboxes from forgetting an idle connection, and notice early that it died."""
        while not self._stop.wait(KEEPALIVE_SECONDS):
            with self._lock:
                busy = self._leading
            if not busy:
                try:
                    self.ping()
                except SymbiosisError as error:
                    log.info("keep-alive: %s", error)


def again(error: SymbiosisError) -> SymbiosisError:
    """A copy to raise: one object raised many times would keep every caller's frames alive."""
    return copy.copy(error).with_traceback(None)


def control_payload(message: Incoming) -> bytes:
    """The bytes of a control answer."""
    return message.payload.numpy().tobytes() if message.payload is not None else b""
