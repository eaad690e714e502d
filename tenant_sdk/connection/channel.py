"""One connection to an executor: many requests in flight, from any thread, without a thread of its own.

This is the leader/followers pattern (Schmidt and others, 2000). A thread that waits for an answer and finds
the transport free becomes the *leader*: it writes and reads for itself and for the others until its own
answer is complete. Then another waiting thread is its *successor*. So a lone thread, which is the usual case,
sends and receives without a single hand-over between threads.

What carries the messages is a subclass's: ``websocket_channel``, ``colocated``, ``inprocess``.
"""

from __future__ import annotations

import abc
import copy
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shared.errors import (
    ConnectionLost,
    RequestRefused,
    RequestTimeout,
    SymbiosisError,
    WireError,
    peer_seconds,
    peer_text,
)
from shared.forks import ForkGuard
from shared.wire.header import Header, Operation, RequestClass
from shared.wire.incoming import Incoming
from shared.wire.messages import ErrorInfo, decode
from shared.wire.protocol import TenantProtocol
from tenant_sdk.connection.clock import CLOSED_RETRY_SECONDS

Entropy = Callable[[int], bytes]


class ResponseFuture:
    """The future of a request's answer; ``Channel.wait`` returns the answer."""

    __slots__ = ("answer", "done", "error", "event", "latency_sensitive", "leads", "waited")

    def __init__(self) -> None:
        self.latency_sensitive = False  # a person waits for its result
        self.event: threading.Event | None = None  # made only if another thread leads
        self.answer: Incoming | None = None
        self.error: SymbiosisError | None = None
        self.done = False
        self.waited = False  # a thread is inside wait() for it
        self.leads = False  # the thread that waits for it is the leader

    def finish(self, answer: Incoming | None, error: SymbiosisError | None) -> None:
        """Set the outcome and wake the thread that waits for it."""
        self.answer, self.error, self.done = answer, error, True
        if self.event is not None:
            self.event.set()


_NO_ANSWER = Incoming(Header(0), None)  # of a ping


class Channel(abc.ABC):
    """An open session's connection.

    Args:
        peer: the URL, for messages.
        timeout: seconds without any progress after which requests fail and the channel closes; and for which
            requests are sent again that an overloaded executor refuses.
    """

    key_exchange = ""  # the group that TLS agreed on; empty without TLS
    piece_bytes = 0  # larger requests and answers are cut, because travelling takes time; 0: it takes none

    def __init__(self, peer: str, timeout: float) -> None:
        self.peer = peer
        self.timeout = timeout
        self._protocol = TenantProtocol()
        self._lock = threading.Lock()  # guards all below
        self._fork_guard = ForkGuard()
        self._leading = False
        self._pending: dict[int, ResponseFuture] = {}
        self._pongs: deque[ResponseFuture] = deque()
        self._outbox: deque[Any] = deque()  # what ``_message`` and ``_ping_message`` made
        self._broken: SymbiosisError | None = None

    def submit(
        self, header_of: Callable[[TenantProtocol], Header], tensors: list[torch.Tensor] | bytes
    ) -> ResponseFuture:
        """Queue a request; ``wait`` sends it, for this or another request.

        ``tensors`` must not change until the answer is here.

        Raises:
            ConnectionLost: this is a forked child.
            SymbiosisError: what broke the channel earlier.
        """
        self._fork_guard.check()
        pending = ResponseFuture()
        with self._lock:
            if self._broken is not None:
                raise copy_error(self._broken)
            header = header_of(self._protocol)
            try:
                self._outbox.append(self._message(header, tensors))
            except BaseException:
                self._protocol.answered(header.request_id)
                raise
            pending.latency_sensitive = header.request_class in (RequestClass.DECODE, RequestClass.PREFILL)
            self._pending[header.request_id] = pending
            if self._leading:  # it may be asleep until something arrives
                self._wake_leader()
        return pending

    def flush(self) -> None:
        """Send what the transport takes at once, unless another thread leads; wait for nothing.

        What breaks the channel here is raised to those who wait.
        """
        self._fork_guard.check()
        flusher = ResponseFuture()  # nobody waits for it
        try:
            with self._lock:
                if self._leading or self._broken is not None:
                    return
                self._leading = flusher.leads = True
            self._guarded(self._send)
        finally:
            self._pass_leadership(flusher)

    def wait(self, pending: ResponseFuture) -> Incoming:
        """Block until the answer is here.

        Raises:
            RequestRefused: the executor answered with an error; the channel is still good.
            ConnectionLost, RequestTimeout, WireError: the channel is broken from now on.
        """
        self._fork_guard.check()
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
                self._guarded(partial(self._lead, pending))
        finally:
            # Also when interrupted while another leads: leadership left to a thread that is gone
            # would leave all others waiting for ever.
            self._pass_leadership(pending)
        error, pending.error = pending.error, None
        if error is None:
            return pending.answer or _NO_ANSWER
        try:
            raise error
        finally:
            del error  # whose traceback holds this frame: no cycle that keeps rows in memory

    @property
    def broken(self) -> bool:
        """Whether every further request would fail."""
        return self._broken is not None

    def ping(self) -> None:
        """Send a ping, and wait for its answer."""
        self._fork_guard.check()
        pending = ResponseFuture()
        with self._lock:
            if self._broken is not None:
                raise copy_error(self._broken)
            self._pongs.append(pending)
            self._outbox.append(self._ping_message())
            if self._leading:
                self._wake_leader()
        self.wait(pending)

    def close(self) -> None:
        """End the session; later requests, and those in flight, raise ConnectionLost."""
        if self._fork_guard.in_child:
            return  # it is the parent's, who goes on with it
        with self._lock:
            ours = not self._leading  # else the leader shuts the transport: nobody else may touch it
            self._leading = True  # and from now on nobody starts to lead
            well = ours and self._broken is None
        try:
            if well:
                self._send_close()
        except (OSError, ValueError):
            pass  # it is gone already
        finally:
            self._break(ConnectionLost("the session is closed"))
            if ours:
                self._shut()

    def forked(self) -> None:
        """See ``shared.forks``; a transport closes its descriptors too, and the other side hears nothing."""
        self._outbox, self._pending, self._pongs = deque(), {}, deque()

    # -- what a transport does -------------------------------------------------------------------

    @abc.abstractmethod
    def _message(self, header: Header, tensors: list[torch.Tensor] | bytes) -> Any:
        """Returns a request as the outbox keeps it. Under the lock."""

    @abc.abstractmethod
    def _ping_message(self) -> Any:
        """Returns a ping as the outbox keeps it; the answer finishes the first pong. Under the lock."""

    @abc.abstractmethod
    def _wake_leader(self) -> None:
        """Wake the leader: the outbox has a message, or the channel broke. Any thread may call this."""

    @abc.abstractmethod
    def _send(self) -> object:
        """Write what fits into the buffer. Only the leader calls this."""

    @abc.abstractmethod
    def _lead(self, pending: ResponseFuture) -> None:
        """Write and read until a request is done; whatever this raises breaks the channel."""

    @abc.abstractmethod
    def _send_close(self) -> None:
        """Tell the executor that the session ends. Only the leader calls this."""

    @abc.abstractmethod
    def _shut(self) -> None:
        """Close the transport. Only the leader, or the last one, calls this."""

    # -- leading ---------------------------------------------------------------------------------

    def _guarded(self, lead: Callable[[], object]) -> None:
        """Lead; whatever is raised breaks the channel."""
        try:
            lead()
        except SymbiosisError as error:
            self._break(error)
        except OSError as error:  # ssl.SSLError is one
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

    def _pass_leadership(self, pending: ResponseFuture) -> None:
        """Leave ``wait``: the leader names a successor, or shuts a broken channel that needs none."""
        with self._lock:
            pending.waited = False
            if not pending.leads:
                return
            pending.leads = False
            successor = None
            if self._pending or self._pongs:
                successor = next((p for p in (*self._pending.values(), *self._pongs) if p.waited), None)
            self._leading = successor is not None
            if successor is not None and successor.event is not None:
                successor.leads = True
                successor.event.set()
            elif self._broken is not None:
                self._shut()

    def _handle(self, answer: Incoming) -> None:
        """Finish the future of a complete answer."""
        if answer.error is not None:
            raise answer.error
        error: SymbiosisError | None = None
        if answer.header.operation == Operation.ERROR:
            info = decode(control_payload(answer), ErrorInfo)
            code, message = peer_text(info.code, 40), peer_text(info.message)
            if answer.header.request_id == 0:
                raise WireError(code, message, fatal=True)
            error = RequestRefused(code, message, retry_after=peer_seconds(info.retry_after))
        with self._lock:
            self._protocol.answered(answer.header.request_id)
            pending = self._pending.pop(answer.header.request_id, None)
        if pending is None:
            # Its header was accepted because the first answer arrived in the same read.
            raise WireError("unexpected", "the executor answered a request twice", fatal=True)
        pending.finish(answer, error)

    def _no_progress(self) -> RequestTimeout:
        return RequestTimeout(
            f"{self.peer} made no progress for {self.timeout:.0f} s; it may be overloaded or "
            "gone. `symbiosis-tenant doctor` tests the connection"
        )

    def _ended_by_peer(self) -> ConnectionLost:
        return ConnectionLost(
            f"{self.peer} ended the connection; open a new session and resume from your last checkpoint"
        )

    def _closed_by_peer(self, why: str) -> ConnectionLost:
        return ConnectionLost(f"{self.peer} closed the connection: {why}", retry_after=CLOSED_RETRY_SECONDS)

    def _break(self, error: SymbiosisError) -> None:
        """Fail everything in flight and everything to come."""
        with self._lock:
            if self._broken is None:
                self._broken = copy_error(error)  # without the frames of the thread that met it
            waiting = [*self._pending.values(), *self._pongs]
            self._pending.clear()
            self._pongs.clear()
            self._outbox.clear()
        for pending in waiting:
            pending.finish(None, copy_error(self._broken))
        self._wake_leader()


def copy_error(error: SymbiosisError) -> SymbiosisError:
    """Returns a copy to raise: an object that is raised many times keeps every caller's frames alive."""
    return copy.copy(error).with_traceback(None)


def control_payload(message: Incoming) -> bytes:
    """Returns the bytes of a control answer."""
    return message.payload.numpy().tobytes() if message.payload is not None else b""
