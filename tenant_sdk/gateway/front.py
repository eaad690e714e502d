"""In front of vLLM's server: keys, a queue with an end, and what clients are told when the provider fails."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from tenant_sdk.gateway.doorkeeper import Door, Queue, Refusal, told
from tenant_sdk.gateway.status import Status

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

GENERATES = frozenset({"/v1/completions", "/v1/chat/completions"})
OPEN = frozenset({"/", "/healthz"})  # nothing that tells who uses what
_ERROR = b'data: {"error"'  # an event of a stream


class Front:
    """ASGI middleware.

    Args:
        application: vLLM's.
        door, queue: who comes in, and how many.
        folder: where the worker writes its ``Status``.
        retry_after: seconds in which a provider that is away may be back.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._application, self._door, self._queue = application, door, queue
        self._folder, self._retry_after, self._clock = folder, retry_after, clock

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            return await self._application(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        path = scope["path"]
        if not path.isprintable():  # or a line's end after it would be another path here than there
            return await _refuse(send, Refusal(404, "not_found_error", "there is no such path"))
        if path not in OPEN and (refusal := self._door.refusal(scope["headers"])):
            return await _refuse(send, refusal)
        if path not in GENERATES:
            return await self._application(scope, receive, send)
        if refusal := self._queue.enter():
            return await _refuse(send, refusal)
        entered = self._clock()
        try:
            await self._application(scope, receive, self._explained(send, entered))
        finally:
            self._queue.leave(self._clock() - entered)

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


async def _refuse(send: Send, refusal: Refusal) -> None:
    headers = [(b"content-type", b"application/json")]
    if refusal.retry_after:
        headers.append((b"retry-after", str(refusal.retry_after).encode()))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": refusal.encoded()})
