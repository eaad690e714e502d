"""In front of vLLM's server: keys, a queue with an end, and what clients are told when the provider fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from tenant_sdk.gateway.doorkeeper import Door, Failure, Queue, Refusal, asked, told
from tenant_sdk.gateway.status import Status

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

GENERATES = frozenset({"/v1/completions", "/v1/chat/completions"})
BODY_BYTES = 8 << 20
BODY_SECONDS = 30.0
OPEN = frozenset({"/", "/healthz"})  # nothing that tells who uses what
_ERROR = b'data: {"error"'  # an event of a stream


class Front:
    """ASGI middleware.

    Args:
        application: vLLM's.
        door, queue: who comes in, and how many.
        folder: where the worker writes its ``Status``.
        retry_after: seconds in which a provider that is away may be back.
        unserved: why a model of this name is not served, if it is known; or empty.
        clock: seconds, as ``Status.failed_at``.
    """

    def __init__(
        self,
        application: Application,
        *,
        door: Door,
        queue: Queue,
        folder: Path,
        retry_after: int,
        unserved: Callable[[str], str] = lambda _: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._application, self._door, self._queue = application, door, queue
        self._folder, self._retry_after, self._clock = folder, retry_after, clock
        self._unserved = unserved

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            return await self._application(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        path = scope["path"]
        if not path.isprintable():  # or a line's end after it would be another path here than there
            return await _refuse(send, Refusal(404, "not_found_error", "there is no such path"))
        if path in OPEN:
            return await self._application(scope, receive, send)
        if refusal := self._door.refusal(scope["headers"]):
            return await _refuse(send, refusal)
        if path not in GENERATES:
            body = await _body(receive)
            if isinstance(body, bytes):
                return await self._application(scope, _again(body, receive), send)
            return await _refuse(send, body)
        if refusal := self._away() or self._queue.enter():  # before its body takes memory
            return await _refuse(send, refusal)
        entered, count = self._clock(), 1
        try:
            admitted = await self._admitted(receive)
            if admitted is None or isinstance(admitted, Refusal):
                return await _refuse(send, admitted)
            body, count = admitted
            await self._application(scope, _again(body, receive), self._explained(send, entered))
        finally:
            self._queue.leave(count, self._clock() - entered)

    async def _admitted(self, receive: Receive) -> tuple[bytes, int] | Refusal | None:
        """A request's body, and its sequences, which are in the queue now; or why not; None: nobody asks."""
        body = await _body(receive)
        if not isinstance(body, bytes):
            return body
        wanted = asked(body)
        if isinstance(wanted, Refusal):
            return wanted
        if isinstance(wanted.model, str) and (why := self._unserved(wanted.model)):
            return Refusal(404, "not_found_error", f"{wanted.model} is not served: {why}")
        return self._queue.widen(wanted.sequences) or (body, wanted.sequences)

    def _away(self) -> Refusal | None:
        """What would be told after the patience, if executors are known to be away."""
        status = Status.read(self._folder)
        if not status.failing or status.failure != Failure.AWAY:
            return None
        return told(status.failure, status.error, self._retry_after)

    def _explained(self, send: Send, since: float) -> Send:
        """``send``, for which a failure of a step is what ``told`` makes of it."""
        failed = False

        async def explain(message: Message) -> None:
            nonlocal failed
            if message["type"] == "http.response.start" and message["status"] == 500:
                failed = True
                return await _refuse(send, self._told(since))
            if failed:  # the body of what was replaced
                return None
            if message.get("body", b"").startswith(_ERROR):
                message = {**message, "body": b"data: " + self._told(since).encoded() + b"\n\n"}
            return await send(message)

        return explain

    def _told(self, since: float) -> Refusal:
        status = Status.read(self._folder)
        if status.failed_at < since:  # whatever it was, no step failed
            return told("", "", 0)
        return told(status.failure, status.error, self._retry_after)


async def _body(receive: Receive) -> bytes | Refusal | None:
    """A request's, whole, or why not; None: its client hung up."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > BODY_BYTES:
                    return Refusal(413, "invalid_request_error", f"a request has {BODY_BYTES} bytes at most")
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        return Refusal(408, "invalid_request_error", f"the request did not come within {BODY_SECONDS:g} s")


def _again(body: bytes, receive: Receive) -> Receive:
    """``receive`` as if nobody had asked for the body yet."""
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def once_more() -> Message:
        nonlocal first
        message, first = first, None
        return message or await receive()

    return once_more


async def _refuse(send: Send, refusal: Refusal | None) -> None:
    if refusal is None:  # there is nobody to tell
        return
    headers = [(b"content-type", b"application/json")]
    if refusal.retry_after:
        headers.append((b"retry-after", str(refusal.retry_after).encode()))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": refusal.encoded()})
