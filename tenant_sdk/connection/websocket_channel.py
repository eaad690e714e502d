"""A channel over a TLS websocket."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from ipaddress import ip_address

import torch

from shared.errors import SymbiosisError, WireError, peer_text
from shared.forks import register_for_fork
from shared.wire.frames import Control, MessageReader, Opcode, encode_control, encode_message
from shared.wire.header import Header
from shared.wire.incoming import Incoming
from tenant_sdk.connection import key_exchange
from tenant_sdk.connection.channel import Channel, Entropy, ResponseFuture
from tenant_sdk.connection.clock import CLOCK, Clock
from tenant_sdk.connection.quick_poll import QuickPoll
from tenant_sdk.connection.tls_socket import end_reads

log = logging.getLogger(__name__)

# What an answer may hold at most; each answer's true size is checked against its request as well.
MAX_ANSWER_BYTES = 1 << 30
KEEPALIVE_SECONDS = 20.0
MAX_OUTBOX = 4096  # messages; far more than threads ever wait
PIECE_BYTES = 1 << 20
SPIN_SECONDS = 5e-4  # a small product on this machine, or in this room, takes less
READS_AT_ONCE = 1024  # before looking at the clock again


def is_over_network(sock: socket.socket) -> bool:
    """Returns whether bytes go over a network. On one machine travelling takes no time; pieces are work."""
    try:
        return not ip_address(sock.getpeername()[0].partition("%")[0]).is_loopback
    except OSError:  # it has gone already, which the first request will notice
        return True


class WebsocketChannel(Channel):
    """See Channel.

    Args:
        sock: after TLS and websocket handshake.
        peer: the URL, for messages.
        timeout: see Channel.
        entropy: fresh random bytes for websocket masks (RFC 6455 §5.3).
        clock: for the timeout.
    """

    piece_bytes = PIECE_BYTES
    _reading_since: float | None = None  # when a read began that goes on
    _cut = False  # such a read was ended

    def __init__(
        self, sock: ssl.SSLSocket, peer: str, *, timeout: float, entropy: Entropy, clock: Clock = CLOCK
    ) -> None:
        super().__init__(peer, timeout)
        if not is_over_network(sock):
            self.piece_bytes = 0
        self._sock = sock
        self.key_exchange = key_exchange.agreed(sock)
        self._entropy, self._clock = entropy, clock
        self._reader = MessageReader(self._protocol.accept, masked=False, max_message_bytes=MAX_ANSWER_BYTES)
        # The leader's own: the message being written.
        self._writing: Iterator[bytes | memoryview] | None = None
        self._piece = memoryview(b"")
        sock.settimeout(0)
        self._poll = QuickPoll(SPIN_SECONDS)
        self._events = 0  # what the socket is registered for
        self._stop = threading.Event()
        register_for_fork(self)
        threading.Thread(target=self._keep_alive, name="symbiosis-keepalive", daemon=True).start()

    def _message(self, header: Header, tensors: list[torch.Tensor] | bytes) -> Iterator[bytes | memoryview]:
        return encode_message(header, tensors, self._entropy(4))

    def _ping_message(self) -> Iterator[bytes | memoryview]:
        return iter([encode_control(Opcode.PING, b"", self._entropy(4))])

    def _wake_leader(self) -> None:
        self._poll.wake()

    def _send_close(self) -> None:
        if self._writing is None:  # else in the middle of a message
            self._sock.settimeout(1.0)
            code = (1000).to_bytes(2, "big")
            self._sock.sendall(encode_control(Opcode.CLOSE, code, self._entropy(4)))

    def _shut(self) -> None:
        """Close the sockets. Only the leader may: a TLS socket that is closed under another
        thread's send would send in the clear, through the plain socket that is left of it."""
        self._writing, self._piece = None, memoryview(b"")
        self._sock.close()
        self._poll.close()

    def _break(self, error: SymbiosisError) -> None:
        self._stop.set()
        super()._break(error)

    def forked(self) -> None:
        """See Channel. The socket under TLS closes itself."""
        super().forked()
        self._writing, self._piece = None, memoryview(b"")
        self._poll.close()

    def _lead(self, pending: ResponseFuture) -> None:
        last_progress = self._clock.now()
        awake_until = last_progress + SPIN_SECONDS if pending.latency_sensitive else 0.0
        while not pending.done:
            blocked = self._send()
            now = self._clock.now()
            left = last_progress + self.timeout - now
            if left <= 0:
                raise self._no_progress()
            # What TLS has decrypted already does not wake poll().
            if not self._sock.pending() and self._sleep(blocked, left, now < awake_until):
                last_progress = self._clock.now()
            before, self._reading_since = self._reader.progress, self._clock.now()
            self._read()
            self._reading_since = None
            # Pings do not count: an executor that sends only those is one that does not answer.
            if self._reader.progress != before:
                last_progress = self._clock.now()

    def _sleep(self, blocked: bool, seconds: float, awake: bool) -> bool:
        """Wait until the socket can be read or, if writing is blocked, written; True for the latter."""
        events = select.POLLIN | (select.POLLOUT if blocked else 0)
        if events != self._events:
            self._poll.register(self._sock, events)
            self._events = events
        ready = self._poll.poll(seconds, awake=awake)
        if not ready:
            raise self._no_progress()
        return any(what & select.POLLOUT for _, what in ready)

    def _send(self) -> bool:
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
            except OSError:
                if not self._cut:
                    raise
                count = 0
            if count == 0 and self._cut:
                raise self._no_progress()
            if count == 0:
                raise self._ended_by_peer()
            events = self._reader.received(count)
            for event in events:
                if isinstance(event, Incoming):
                    self._handle(event)
                else:
                    self._control(event)
            if events:
                return

    def _control(self, frame: Control) -> None:
        if frame.opcode == Opcode.PING:
            pong = encode_control(Opcode.PONG, frame.data, self._entropy(4))
            with self._lock:
                if len(self._outbox) >= MAX_OUTBOX:
                    raise WireError("frame", "more pings than the executor reads answers", fatal=True)
                self._outbox.append(iter([pong]))
        elif frame.opcode == Opcode.PONG:
            with self._lock:
                waiting = self._pongs.popleft() if self._pongs else None
            if waiting is not None:
                waiting.finish(None, None)
        else:
            code = int.from_bytes(frame.data[:2], "big")
            reason = peer_text(frame.data[2:].decode(errors="replace"), 125)
            why = {1001: "it is shutting down", 1013: reason or "it has no room"}
            raise self._closed_by_peer(why.get(code, f"code {code}"))

    def _keep_alive(self) -> None:
        """Keep middleboxes from forgetting an idle connection, and notice early that it died.

        This thread never reads, since it ends reads of others that do not end.
        """
        pause = min(KEEPALIVE_SECONDS, self.timeout / 2)
        looks, every = 0, max(1, round(KEEPALIVE_SECONDS / pause))
        while not self._stop.wait(pause):
            looks += 1
            with self._lock:
                busy = self._leading
            since = self._reading_since
            if since is not None and self._clock.now() - since > self.timeout:
                self._cut = True
                end_reads(self._sock)
            elif not busy and looks % every == 0:
                try:
                    threading.Thread(target=self._ping_idle, name="symbiosis-ping", daemon=True).start()
                except RuntimeError as error:  # there are too many threads
                    log.info("keep-alive: %s", error)

    def _ping_idle(self) -> None:
        try:
            self.ping()
        except SymbiosisError as error:
            log.info("keep-alive: %s", error)
