"""In front of vLLM's server: keys, a limit of sequences, and errors for clients when the provider fails."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

from tenant_sdk.gateway.admission import (
    Authenticator,
    Refusal,
    SequenceLimit,
    failure_refusal,
    shutting_down,
)
from tenant_sdk.gateway.client_locks import ClientGone, PacedLock, connection_closed, current_client
from tenant_sdk.gateway.constraints import Constraint
from tenant_sdk.gateway.log_redaction import redacted
from tenant_sdk.gateway.request_limits import text_bytes
from tenant_sdk.gateway.requests import RESPONSES, ParsedRequest, parse_request
from tenant_sdk.gateway.reservations import Reservations
from tenant_sdk.gateway.status import GatewayStatus, SequenceErrors, request_name
from tenant_sdk.gateway.status_page import HEADERS, PAGE

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", RESPONSES})
TOKENIZING_PATHS = frozenset({"/tokenize", "/detokenize"})
# Each is answered at once from what is in memory; all paths that are not named here are closed.
MANAGEMENT_PATHS = frozenset(
    {"/v1/models", "/v1/adapters", "/status.json", "/health", "/version", "/metrics"}
)
_NO_CALLS = (
    "tools: this model's chat template writes no tool calls in a form that is read here, so the model "
    "cannot choose to call one. Give tool_choice: required, none, or a function. The gateway's operator can "
    "also name a parser of calls, with the option tool-parser"
)
ADAPTER, MODEL = "/v1/adapters/", "/v1/models/"  # and a name
# OpenAI's paths that clients ask for, and why they are not here.
_ELSEWHERE = {
    "/v1/embeddings": ": this gateway serves a model that writes text, and vLLM makes embeddings with others",
    f"{RESPONSES}/": ": this gateway keeps no answers",
}
UNAUTHENTICATED = "unauthenticated"  # all together are as one client, and no client has this name
# Seconds between two requests without a key. If probes waited longer, newer connections would take their
# slots, even if these were few.
UNAUTHENTICATED_PAUSE = 0.001
PUBLIC_PATHS = frozenset({"/", "/healthz"})  # nothing that tells who uses what
BODY_BYTES = 8 << 20  # however long sequences may be
SMALL_BODY_BYTES = 64 << 10
# To ``/tokenize``: vLLM lists the tokens, in the worst case one a byte, in the event loop.
TOKENIZED_BYTES = 512 << 10
BODIES_BYTES = 64 << 20  # of all that arrive at once
BODY_SECONDS = 30.0
SEND_SECONDS = 60.0  # until a client that does not read its answer is given up
# Of a scope's extensions.
FLUSHED = "symbiosis.flushed"  # waits until what was sent has left
CLOSED = "symbiosis.closed"  # a future that is done if the connection is closed
OWNER = "symbiosis.owner"  # the client whose key the connection has shown, if any
MAX_MANAGEMENT = 64  # requests at once for adapters and metrics; or two a key
# vLLM reads others too: priorities, ranks, formats.
_HEADERS = frozenset({b"accept", b"content-length", b"content-type", b"host"})
_ERROR = b'data: {"error"'  # an event of a stream


class ChecksConstraints(Protocol):
    """See ``tenant_sdk.gateway.constraint_checks.ConstraintChecker``."""

    async def refusal(self, client: str, constraint: Constraint) -> str:
        """Why a constraint is refused; or empty."""


class FrontendDependencies(NamedTuple):
    """What ``HttpFrontend`` knows of what is served.

    Attributes:
        context: the most tokens of a sequence.
        parser: ``requests.parse_request`` of a client's large body.
        constraint_checker: of constraints on answers; None: there are none here.
        unserved: why a model of this name is not served, if it is known; or empty.
        calls: calls of tools are looked for in answers.
        ending: whether the gateway is shutting down.
    """

    context: Callable[[], int]
    parser: Callable[[str, str, bytes, int], Awaitable[ParsedRequest | Refusal]]
    constraint_checker: Callable[[], ChecksConstraints | None] = lambda: None
    unserved: Callable[[str], str] = lambda _: ""
    calls: bool = False
    ending: Callable[[], bool] = lambda: False


class HttpFrontend:
    """ASGI middleware.

    Args:
        application: vLLM's.
        authenticator, sequence_limit: who comes in, and how many.
        folder: where the worker writes its ``GatewayStatus``.
        retry_after: seconds in which an unavailable provider may be back.
        served: what it knows of what is served.
        clock: seconds, as ``GatewayStatus.failed_at``.
    """

    def __init__(
        self,
        application: Application,
        *,
        authenticator: Authenticator,
        sequence_limit: SequenceLimit,
        folder: Path,
        retry_after: int,
        served: FrontendDependencies,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._application, self._authenticator = application, authenticator
        self._sequence_limit = sequence_limit
        self._folder, self._retry_after, self._clock = folder, retry_after, clock
        self._served = served
        self._arriving = Reservations(BODIES_BYTES, authenticator.clients)
        lock = partial(PacedLock, clock, sequence_limit.others_in_flight)
        self._tokenizing_lock, self._small_body_lock, self._preparation_lock = lock(), lock(), lock()
        self._arrival_lock, self._listing_lock = lock(), lock()
        self._unauthenticated_lock = lock(UNAUTHENTICATED_PAUSE)
        self._management = Reservations.per_client_minimum(MAX_MANAGEMENT, authenticator.clients)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            return await self._application(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        connection_closed.set(scope.get("extensions", {}).get(CLOSED))
        try:
            await self._serve(scope, *_giving_up_slow_clients(receive, send))
        except ClientGone:
            pass

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, whoever sends it.

        Raises:
            ClientGone: there is nobody to answer.
        """
        path = scope["path"]
        client = self._authenticator.admit(scope["headers"])
        # Before anything is answered: refusals, too, take time of the event loop.
        owner = client if isinstance(client, str) else scope.get("extensions", {}).get(OWNER)
        if owner is None:
            await self._unauthenticated_lock.wait(UNAUTHENTICATED)
        else:
            await self._arrival_lock.wait(owner)
        if path in PUBLIC_PATHS and (self._authenticator.keys or isinstance(client, str)):
            return await self._serve_public(scope["method"], path, send)
        if self._served.ending():
            return await _refuse(send, shutting_down())
        if isinstance(client, Refusal):
            return await _refuse(send, client)
        current_client.set(client)
        scope = {**scope, "headers": [each for each in scope["headers"] if each[0].lower() in _HEADERS]}
        # A line's end, say, would make it another path here than there.
        named = path.isprintable() and path.startswith((ADAPTER, MODEL))
        if path not in GENERATION_PATHS | TOKENIZING_PATHS | MANAGEMENT_PATHS and not named:
            reasons = (why for begins, why in _ELSEWHERE.items() if path.startswith(begins))
            why = f"there is no such path{next(reasons, '')}"
            return await _refuse(send, Refusal(404, "not_found_error", why))
        if scope["method"] not in (methods := _methods_of(path)):
            why = f"{path} takes {' and '.join(methods)}, not {scope['method']}"
            return await _refuse(send, Refusal(405, "invalid_request_error", why))
        async with self._body(client, path, receive) as body:
            if not isinstance(body, bytes):
                return await _refuse(send, body)
            if path not in GENERATION_PATHS | TOKENIZING_PATHS:
                return await self._serve_management(client, scope, _replaying_body(body, receive), send)
            wanted = self._executors_unavailable() or await self._parse(client, path, body)
        if isinstance(wanted, Refusal):
            return await _refuse(send, wanted)
        if why := self._served.unserved(wanted.model):
            return await _refuse(
                send, Refusal(404, "not_found_error", f"{wanted.model} is not served: {why}")
            )
        if wanted.may_call and not self._served.calls:
            return await _refuse(send, Refusal(400, "invalid_request_error", _NO_CALLS))
        if refusal := self._sequence_limit.enter(client, wanted.sequences):
            return await _refuse(send, refusal)
        entered, period = self._clock(), self._sequence_limit.period
        try:
            await self._serve_admitted(client, wanted, scope, receive, send)
            await _wait_until_flushed(scope)
        finally:
            self._sequence_limit.leave(client, wanted.sequences, self._clock() - entered, period)

    async def _serve_public(self, method: str, path: str, send: Send) -> None:
        """Answer anybody without a key, maybe many: in vLLM's application each takes a millisecond."""
        if method not in ("GET", "HEAD"):
            return await _refuse(send, Refusal(405, "invalid_request_error", f"{path} is only read"))
        if path == "/":
            return await _respond(send, PAGE.encode(), b"text/html; charset=utf-8", HEADERS)
        status = GatewayStatus.read(self._folder)
        if status.failing:
            return await _refuse(send, self._failure_of(status))
        return await _respond(send, b'{"status":"ok"}', b"application/json")

    async def _serve_management(self, client: str, scope: Message, receive: Receive, send: Send) -> None:
        """Have a request for adapters or metrics answered."""
        if not self._management.reserve(client, 1):
            why = "too many requests for adapters or figures are in flight with your key; try again"
            return await _refuse(send, Refusal(429, "overloaded", why, 1))
        try:
            if scope["method"] == "GET":
                await self._serve_one_per_client(self._listing_lock, client, scope, receive, send)
            else:  # a change of adapters waits for others
                await self._run(scope, receive, send)
            await _wait_until_flushed(scope)
        finally:
            self._management.release(client, 1)

    async def _serve_admitted(
        self, client: str, wanted: ParsedRequest, scope: Message, receive: Receive, send: Send
    ) -> None:
        """Have a request answered whose sequences are admitted."""
        body = wanted.body
        if scope["path"] in TOKENIZING_PATHS:
            await self._serve_one_per_client(
                self._tokenizing_lock, client, _with_body(scope, body), _replaying_body(body, receive), send
            )
            return
        constraint = wanted.constraint
        if constraint and (why := await _unless_gone(self._why_refused(client, constraint), receive)):
            await _refuse(send, Refusal(400, "invalid_request_error", why))
            return
        # What ended one of its sequences is found by a name that nobody else can give.
        name, entered = request_name(client, secrets.token_hex(16)), self._clock()
        if scope["path"] == RESPONSES:  # vLLM takes the name of the others from a header
            body = body[:-1] + f',"request_id":"resp_{name}"}}'.encode()
        async with self._preparation_lock.hold(client):
            await self._run(
                _with_body(scope, body, name.encode()),
                _replaying_body(body, receive),
                self._send_explaining_failures(send, name, entered),
                lambda: self._step_refusal(name, entered),
            )

    async def _run(
        self, scope: Message, receive: Receive, send: Send, refusal: Callable[[], Refusal] | None = None
    ) -> None:
        """Have vLLM's application answer; the server around this would log the words of what it raises.

        Args:
            refusal: of the client then.
        """
        begun = False

        async def forward(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._application(scope, receive, forward)
        except ClientGone:
            raise
        except Exception as error:
            if begun and scope["path"] != RESPONSES:
                raise
            log.warning("a request failed: %s", redacted(error))
            why = refusal() if refusal is not None else self._unexplained()
            if not begun:
                return await _refuse(send, why)
            # vLLM has no event for the failure of such a stream.
            await send({"type": "http.response.body", "body": error_event(RESPONSES, why)})

    def _unexplained(self) -> Refusal:
        return shutting_down() if self._served.ending() else failure_refusal("", "", 0)

    async def _serve_one_per_client(
        self, lock: PacedLock, client: str, scope: Message, receive: Receive, send: Send
    ) -> None:
        """Have one request at a time answered of a client's."""
        answer = list[Message]()

        async def collect(message: Message) -> None:  # others do not wait until this client reads
            answer.append(message)

        # Among the client's own requests alone. For texts, all clients also share vLLM's threads fairly.
        async with lock.hold(client):
            await self._run(scope, receive, collect)
        for message in answer:
            await send(message)

    async def _why_refused(self, client: str, constraint: Constraint) -> str:
        """Why a constraint is refused, or an empty text."""
        checker = self._served.constraint_checker()
        if checker is None:
            return "this gateway was started without structured outputs"
        why = await checker.refusal(client, constraint)
        return why and f"the {constraint.kind} is refused: {why}"

    async def _parse(self, client: str, path: str, body: bytes) -> ParsedRequest | Refusal:
        """What a request is for; a large one is read elsewhere, one at a time."""
        if len(body) <= SMALL_BODY_BYTES:
            async with self._small_body_lock.hold(client):
                return parse_request(path, body, self._served.context())
        return await self._served.parser(client, path, body, self._served.context())

    @asynccontextmanager
    async def _body(self, client: str, path: str, receive: Receive) -> AsyncIterator[bytes | Refusal | None]:
        """A request's, whole, or why not; None: its client hung up. In this block it counts as arriving."""
        max_bytes, longest = SMALL_BODY_BYTES, text_bytes(self._served.context())
        if path in GENERATION_PATHS:
            max_bytes = min(BODY_BYTES, max_bytes + longest * self._sequence_limit.limit)
        elif path in TOKENIZING_PATHS:
            max_bytes = min(BODY_BYTES if path == "/detokenize" else TOKENIZED_BYTES, longest)
        body = bytearray()
        try:
            yield await self._receive_body(client, max_bytes, body, receive)
        finally:
            if body:
                self._arriving.release(client, len(body))

    async def _receive_body(
        self, client: str, max_bytes: int, body: bytearray, receive: Receive
    ) -> bytes | Refusal | None:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    if len(body) + len(part) > max_bytes:
                        return Refusal(
                            413, "invalid_request_error", f"a request here has {max_bytes} bytes at most"
                        )
                    if not self._arriving.reserve(client, len(part)):
                        why = "too many requests are arriving; try again"
                        return Refusal(429, "overloaded", why, self._sequence_limit.retry_after)
                    body += part
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            why = f"the request did not come within {BODY_SECONDS:g} s"
            return Refusal(408, "invalid_request_error", why)

    def _executors_unavailable(self) -> Refusal | None:
        """The refusal after all retries, at once if executors are known to be unavailable."""
        status = GatewayStatus.read(self._folder)
        return self._failure_of(status) if status.unavailable else None

    def _failure_of(self, status: GatewayStatus) -> Refusal:
        return failure_refusal(status.failure, status.error, self._retry_after)

    def _send_explaining_failures(self, send: Send, name: str, since: float) -> Send:
        """``send``, for which a failure of a step is what ``failure_refusal`` makes of it."""
        failed = False

        async def explain(message: Message) -> None:
            nonlocal failed
            if message["type"] == "http.response.start" and message["status"] == 500:
                failed = True
                return await _refuse(send, self._step_refusal(name, since))
            if failed:  # the body of what was replaced
                return None
            if _is_server_error(message.get("body", b"")):
                message = {
                    **message,
                    "body": b"data: " + self._step_refusal(name, since).encoded() + b"\n\n",
                }
            return await send(message)

        return explain

    def _step_refusal(self, name: str, since: float) -> Refusal:
        if why := SequenceErrors.reason(self._folder, name):
            return Refusal(422, "invalid_request_error", why)
        status = GatewayStatus.read(self._folder)
        if self._served.ending() or status.failed_at < since:  # whatever it was, no step failed
            return self._unexplained()
        return self._failure_of(status)


def _methods_of(path: str) -> tuple[str, ...]:
    if path in GENERATION_PATHS | TOKENIZING_PATHS:
        return ("POST",)
    if path == "/v1/adapters":
        return ("GET", "POST")
    return ("DELETE",) if path.startswith(ADAPTER) else ("GET",)


def _is_server_error(event: bytes) -> bool:
    """Whether a part of a stream reports that the gateway failed, and not that its client is wrong."""
    if not event.startswith(_ERROR):
        return False
    try:
        event_fields = msgspec.json.decode(event.partition(b"\n")[0].removeprefix(b"data: "))
        return int(event_fields["error"]["code"]) >= 500
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return True


def error_event(path: str, refusal: Refusal) -> bytes:
    """The last of a stream.

    Args:
        path: of the request. OpenAI's client looks for ``error`` in a response's stream, others for the type.
    """
    if path != RESPONSES:
        return b"data: " + refusal.encoded() + b"\n\n"
    error = refusal.body()["error"]
    event = error | {"type": "error", "code": str(refusal.status), "sequence_number": 0, "error": error}
    return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


async def _unless_gone(answer: Awaitable[str], receive: Receive) -> str:
    """An answer that takes a while.

    Raises:
        ClientGone: the client hung up first.
    """
    working, gone = asyncio.ensure_future(answer), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _wait_until_flushed(scope: Message) -> None:
    """Until the client has taken its answer, or is given up: its slot is taken until then."""
    if (flush := scope.get("extensions", {}).get(FLUSHED)) is not None:
        await flush()


def _giving_up_slow_clients(receive: Receive, send: Send) -> tuple[Receive, Send]:
    """Both, for which a client that does not read has hung up: its sequences are computed for nobody."""
    gone = asyncio.Event()

    async def forward(message: Message) -> None:
        if gone.is_set():
            return
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)
        except TimeoutError:
            gone.set()

    async def receive_or_give_up() -> Message:
        heard, given_up = asyncio.ensure_future(receive()), asyncio.ensure_future(gone.wait())
        try:
            await asyncio.wait({heard, given_up}, return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if gone.is_set() else await heard
        finally:
            heard.cancel()
            given_up.cancel()

    return receive_or_give_up, forward


def _with_body(scope: Message, body: bytes, name: bytes = b"") -> Message:
    """A request whose body was written again, under a name of ours."""
    replaced = (b"content-length", b"content-type")
    headers = [header for header in scope["headers"] if header[0].lower() not in replaced]
    headers += [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
    if name:
        headers.append((b"x-request-id", name))
    return {**scope, "headers": headers}


def _replaying_body(body: bytes, receive: Receive) -> Receive:
    """``receive`` as if nobody had asked for the body yet."""
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def once_more() -> Message:
        nonlocal first
        message, first = first, None
        return message or await receive()

    return once_more


async def _respond(
    send: Send, body: bytes, kind: bytes, more: Mapping[str, str] = MappingProxyType({})
) -> None:
    headers = [(name.lower().encode(), value.encode()) for name, value in more.items()]
    headers += [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _refuse(send: Send, refusal: Refusal | None) -> None:
    if refusal is None:  # there is nobody to answer
        return
    headers = [(b"content-type", b"application/json")]
    if refusal.retry_after:
        headers.append((b"retry-after", str(refusal.retry_after).encode()))
    if refusal.status in (408, 413):
        headers.append((b"connection", b"close"))  # what else it sends is not read
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": refusal.encoded()})
