"""Who a gateway lets in, how many at once, and what it says when the provider fails; without vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import io
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shared.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectError,
    ConnectionLost,
    NonFiniteError,
    ProtocolVersionError,
    RequestTimeout,
    SymbiosisError,
    TlsError,
    VerificationError,
)
from tenant_sdk.command_line.gateway import _notify
from tenant_sdk.gateway import http_frontend
from tenant_sdk.gateway.admission import (
    Authenticator,
    Refusal,
    SequenceLimit,
    StepFailure,
    UnauthenticatedConnections,
    failure_refusal,
)
from tenant_sdk.gateway.client_fairness import TimeBudget
from tenant_sdk.gateway.folder import HeldModel
from tenant_sdk.gateway.http_frontend import FrontendDependencies, HttpFrontend
from tenant_sdk.gateway.options import GatewayOptions
from tenant_sdk.gateway.parsing import RequestParser
from tenant_sdk.gateway.requests import ParsedRequest, parse_request
from tenant_sdk.gateway.reservations import Reservations
from tenant_sdk.gateway.status import GatewayStatus, client_of, request_name
from tenant_sdk.gateway.status_page import PAGE
from tenant_sdk.session.options import SessionConfig

KEY = "a-key-of-enough-letters"


def host(name: str) -> list[tuple[bytes, bytes]]:
    return [(b"Host", name.encode())]


@pytest.mark.parametrize("name", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]"])
def test_without_keys_this_machine_comes_in(name: str) -> None:
    assert Authenticator().admit(host(name)) == ""


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "localhost.evil"]
)
def test_without_keys_other_names_do_not(name: str) -> None:
    """A page whose name points at this machine is read with that name."""
    refusal = Authenticator().admit(host(name))
    assert isinstance(refusal, Refusal)
    assert refusal.status == 403


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", None),
        ("http://127.0.0.1", None),
        ("https://evil.example", 403),
        ("http://localhost.evil.example:80", 403),
        ("null", 403),
    ],
)
def test_pages_of_elsewhere_send_nothing(origin: str, status: int | None) -> None:
    """A page can send what its reader's machine would not let it read."""
    found = Authenticator().admit([*host("localhost:8000"), (b"Origin", origin.encode())])
    assert (found.status if isinstance(found, Refusal) else None) == status


@pytest.mark.parametrize(
    ("given", "client"),
    [
        (f"Bearer {KEY}", "0"),
        (f"bearer {KEY}", "0"),
        ("Bearer another-key-of-enough", "1"),
        (f"Bearer {KEY}x", 401),
        (f"Basic {KEY}", 401),
        (KEY, 401),
        ("", 401),
        ("Bearer \xe9", 401),
    ],
)
def test_keys(given: str, client: str | int) -> None:
    authenticator = Authenticator((KEY, "another-key-of-enough"))
    found = authenticator.admit([(b"authorization", given.encode("latin-1")), *host("anywhere.example")])
    assert (found.status if isinstance(found, Refusal) else found) == client
    assert KEY not in repr(authenticator)


def test_sequences_have_a_limit() -> None:
    sequence_limit = SequenceLimit(2)
    assert [sequence_limit.enter("", 1), sequence_limit.enter("", 1)] == [None, None]
    refusal = sequence_limit.enter("", 1)
    assert refusal is not None
    assert (refusal.status, refusal.retry_after, sequence_limit.refused) == (429, 1, 1)
    sequence_limit.leave("", 1, 9.0)
    assert sequence_limit.enter("", 1) is None
    refusal = sequence_limit.enter("", 1)
    assert refusal is not None
    assert refusal.retry_after == 5  # two of them, of nine seconds each


def test_sequences_of_a_request_count() -> None:
    sequence_limit = SequenceLimit(4)
    assert [sequence_limit.enter("", 3), sequence_limit.enter("", 1)] == [None, None]
    refusal = sequence_limit.enter("", 1)
    assert refusal is not None
    assert refusal.status == 429
    sequence_limit.leave("", 1, 6.0)
    sequence_limit.leave("", 3, 6.0)
    assert (sequence_limit.in_flight, sequence_limit.requests) == (0, 0)
    assert sequence_limit.enter("", 4) is None
    refusal = sequence_limit.enter("", 1)
    assert refusal is not None
    assert refusal.retry_after == 6  # four sequences of one request
    refusal = sequence_limit.enter("", 5)  # never, however long it waits
    assert refusal is not None
    assert (refusal.status, refusal.retry_after) == (400, 0)


def test_no_key_takes_all_places() -> None:
    sequence_limit = SequenceLimit(16, clients=2)
    assert [sequence_limit.enter("0", 1) for _ in range(12)] == [None] * 12
    refusal = sequence_limit.enter("0", 1)
    assert refusal is not None
    assert "12 with one key" in refusal.message
    assert [sequence_limit.enter("1", 1) for _ in range(4)] == [None] * 4
    assert sequence_limit.enter("1", 1) is not None
    sequence_limit.leave("0", 1, 1.0)
    assert sequence_limit.enter("1", 1) is None  # beyond its own part, those that leave make room for all


def test_what_one_client_uses_is_not_taken_from_others() -> None:
    time_budget = TimeBudget(burst=0.2, refill=0.01)
    assert time_budget.spend("0", 0.15)
    assert not time_budget.spend("0", 0.15)
    assert time_budget.spend("1", 0.15)
    for _ in range(11):
        time_budget.step()
    assert time_budget.spend("0", 0.005)
    assert not time_budget.spend("0", 0.01)
    for _ in range(1000):
        time_budget.step()
    assert [time_budget.spend("0", 0.15) for _ in range(2)] == [True, False]  # no more than that is saved up


@pytest.mark.parametrize("client", ["0", "17", ""])
def test_a_sequence_says_whose_it_is(client: str) -> None:
    name = request_name(client, "0123456789abcdef" * 2)
    for sequence in (f"cmpl-{name}-0-1a2b3c4d", f"3_cmpl-{name}-1", f"chatcmpl-{name}"):
        assert client_of(sequence) == (client or "all")
    assert client_of("cmpl-of-nobody-0") == ""


def test_shares_of_many_clients() -> None:
    shares = Reservations(3, clients=5)  # fewer than one for each: nothing can be kept free
    assert [shares.reserve("0", 1) for _ in range(4)] == [True, True, True, False]
    shares.release("0", 3)
    assert shares.reserve("1", 3)
    shares = Reservations(5, clients=4)
    assert [shares.reserve("0", 1) for _ in range(3)] == [True, True, False]
    assert all(shares.reserve(client, 1) for client in "123")


@pytest.mark.parametrize("clients", [1, 64, 65, 500])
def test_one_place_stays_free_for_each_client(clients: int) -> None:
    """However many there are: one that takes all it can has the others wait for nothing."""
    places = Reservations.per_client_minimum(64, clients)
    while places.reserve("0", 1):
        pass
    assert all(places.reserve(str(other), 1) for other in range(1, clients))


def test_the_stranger_that_waited_longest_makes_room() -> None:
    unauthenticated = UnauthenticatedConnections(2)
    assert [unauthenticated.arrive(each) for each in ("a", "b")] == [None, None]
    unauthenticated.leave("a")
    assert [unauthenticated.arrive(each) for each in ("c", "d", "e")] == [None, "b", "c"]
    unauthenticated.leave("b")  # it is closed, and has left before


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"prompt": "one"}, 1),
        ({"prompt": ["one", "two"]}, 2),
        ({"prompt": ["one", "two"], "n": 3}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]], "n": None}, 2),
        ({"messages": [{"role": "user"}], "n": 4}, 4),
    ],
)
def test_sequences_of_a_request(body: Any, count: int) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    wanted = parse_request(path, json.dumps(body).encode(), 64)
    assert isinstance(wanted, ParsedRequest)
    assert wanted.sequences == count


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b'{"prompt": "", "n": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "", "n": "32"}',  # that vLLM would take for 32
        b'{"prompt": "", "n": 32.5}',
        b'{"prompt": "", "n": 32, "user": NaN}',  # that Python would read
        '{"prompt": "", "n": 32}'.encode("utf-16"),
        b'\xef\xbb\xbf{"prompt": "", "n": 32}',
    ],
)
def test_what_could_be_read_otherwise_is_refused(body: bytes) -> None:
    refusal = parse_request("/v1/completions", body, 64)
    assert isinstance(refusal, Refusal)
    assert refusal.status == 400


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConnectionLost("gone"), 503),
        (RequestTimeout("late"), 503),
        (VerificationError("wrong"), 502),
        (NonFiniteError("nan"), 500),
        (ConnectError("no route"), 503),
        (TlsError("begins again", retry_after=1.0), 503),
        (TlsError("expired"), 500),
        (AuthenticationError("no such token"), 500),
        (ProtocolVersionError("too old"), 500),
    ],
)
def test_failures(error: SymbiosisError, status: int) -> None:
    refusal = failure_refusal(StepFailure.of(error), str(error), 7)
    assert refusal.status == status
    assert str(error) in refusal.message
    assert refusal.retry_after == (7 if status == 503 else 0)


Sent = list[dict[str, Any]]


def run(
    front: Callable[..., Awaitable[None]],
    path: str = "/v1/completions",
    name: str = "localhost",
    *,
    body: bytes = b'{"prompt": ""}',
    method: str = "POST",
) -> Sent:
    """What a client of one request is sent."""
    sent: Sent = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def receive() -> Any:
        return part(body, False)

    scope = {"type": "http", "path": path, "method": method, "headers": host(name)}
    asyncio.run(front(scope, receive, send))
    return sent


def front(application: Any, folder: Path, most: int = 1, **options: Any) -> HttpFrontend:
    known = {name: options.pop(name) for name in FrontendDependencies._fields if name in options}
    served = FrontendDependencies(**{"parser": RequestParser(), "context": lambda: 64} | known)
    options = {
        "clock": lambda: 1.0,
        "authenticator": Authenticator(),
        "sequence_limit": SequenceLimit(most),
    } | options
    return HttpFrontend(application, folder=folder, retry_after=3, served=served, **options)


def answering(status: int, *bodies: bytes) -> Any:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        for body in bodies:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return application


def unavailable(at: float, *, failing: bool = False) -> GatewayStatus:
    return GatewayStatus(
        failure=StepFailure.UNAVAILABLE, error="wss://provider went away", failing=failing, failed_at=at
    )


def test_while_the_provider_is_known_to_be_away_nobody_waits(tmp_path: Path) -> None:
    there = front(answering(200, b"yes"), tmp_path)
    unavailable(at=0.5, failing=True).write(tmp_path)
    start, body = run(there)
    assert (start["status"], b"went away" in body["body"]) == (503, True)
    assert run(there, "/v1/models", method="GET")[0]["status"] == 200
    unavailable(at=0.5).write(tmp_path)  # a probe found it
    assert run(there)[0]["status"] == 200


@pytest.mark.parametrize("failure", [StepFailure.INTERNAL, StepFailure.WRONG_ANSWER])
def test_what_is_not_away_is_tried_again(tmp_path: Path, failure: StepFailure) -> None:
    """A session that got a wrong answer refuses at once by itself; another model may be gone again."""
    GatewayStatus(failure=failure, error="NaN", failing=True).write(tmp_path)
    assert run(front(answering(200, b"yes"), tmp_path))[0]["status"] == 200


def test_an_adapter_that_was_refused_says_why(tmp_path: Path) -> None:
    refused = {"mine": "it has rank 64"}
    there = front(answering(200), tmp_path, unserved=lambda name: refused.get(name, ""))
    start, body = run(there, body=b'{"model": "mine", "prompt": ""}')
    assert (start["status"], b"it has rank 64" in body["body"]) == (404, True)
    assert run(there, body=b'{"model": "other", "prompt": ""}')[0]["status"] == 200


def test_what_failed_before_is_not_told(tmp_path: Path) -> None:
    unavailable(at=0.5).write(tmp_path)
    start, body = run(front(answering(500, b"{}"), tmp_path))
    assert start["status"] == 500
    assert b"went away" not in body["body"]


def test_a_step_that_failed_is_told_as_it_is(tmp_path: Path) -> None:
    unavailable(at=2.0).write(tmp_path)
    start, body = run(front(answering(500, b'{"error": "Internal server error"}'), tmp_path))
    assert start["status"] == 503
    assert (b"retry-after", b"3") in start["headers"]
    assert json.loads(body["body"])["error"]["message"] == "wss://provider went away"


def test_so_is_one_in_a_stream(tmp_path: Path) -> None:
    unavailable(at=2.0).write(tmp_path)
    events = [b'data: {"choices": []}\n\n', b'data: {"error": {"message": "x"}}\n\n', b"data: [DONE]\n\n"]
    start, *bodies = run(front(answering(200, *events), tmp_path))
    assert start["status"] == 200
    assert bodies[0]["body"] == events[0]
    assert b"provider went away" in bodies[1]["body"]
    assert bodies[2]["body"] == events[2]


def test_other_answers_pass(tmp_path: Path) -> None:
    sent = run(front(answering(400, b"what"), tmp_path))
    assert [sent[0]["status"], sent[1]["body"]] == [400, b"what"]


def test_who_fails_is_counted_no_more(tmp_path: Path) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("no")

    there = front(application, tmp_path)
    for _ in range(3):
        assert run(there)[0]["status"] == 500


def test_a_full_gateway_is_429_but_not_for_other_paths(tmp_path: Path) -> None:
    sequence_limit = SequenceLimit(1)
    sequence_limit.enter("", 1)
    there = front(answering(200, b"yes"), tmp_path, sequence_limit=sequence_limit)
    assert [run(there)[0]["status"], run(there, "/tokenize")[0]["status"]] == [429, 429]
    assert run(there, "/v1/models", method="GET")[0]["status"] == 200


def received(*messages: Any, folder: Path) -> tuple[Sent, list[Any]]:
    """What a client that sends this is sent, and what came through."""
    sent, came, waiting = Sent(), [], list(messages)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        came.extend([await receive(), await receive()])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def receive() -> Any:
        if not waiting:
            await asyncio.sleep(60.0)
        return waiting.pop(0)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": host("localhost")}
    asyncio.run(front(application, folder, most=4)(scope, receive, send))
    return sent, came


def part(body: bytes, more: bool) -> Any:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_comes_through_whole(tmp_path: Path) -> None:
    gone = {"type": "http.disconnect"}
    sent, came = received(part(b'{"prompt":"","n"', True), part(b":2}", False), gone, folder=tmp_path)
    assert sent[0]["status"] == 200
    assert came == [part(b'{"n":2,"prompt":""}', False), gone]


def test_who_hangs_up_while_sending_reaches_nothing(tmp_path: Path) -> None:
    assert received(part(b"{", True), {"type": "http.disconnect"}, folder=tmp_path) == ([], [])


def test_a_body_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_frontend, "BODY_BYTES", 8)
    sent, came = received(part(b"12345", True), part(b"6789", True), folder=tmp_path)
    assert (sent[0]["status"], came) == (413, [])


def test_a_slow_body_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_frontend, "BODY_SECONDS", 0.01)
    sent, came = received(part(b"12345", True), folder=tmp_path)
    assert (sent[0]["status"], came) == (408, [])


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/healthz", 200, b'{"status":"ok"}'),
        ("GET", "/", 200, PAGE.encode()),
        ("POST", "/", 405, b""),
        ("DELETE", "/healthz", 405, b""),
    ],
)
def test_strangers_are_answered_without_vllm(
    method: str, path: str, status: int, body: bytes, tmp_path: Path
) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("reached")

    sent = run(
        front(application, tmp_path, authenticator=Authenticator([KEY])),
        path,
        name="elsewhere.example",
        method=method,
    )
    assert sent[0]["status"] == status
    assert sent[1]["body"].startswith(body)


def test_who_is_not_let_in_reaches_nothing(tmp_path: Path) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("reached")

    for path in (
        "/v1/completions",
        "/v1/models",
        "/metrics",
        "/status.json",
        "/v1/adapters",
        "/healthz",
        "/",
    ):
        assert run(front(application, tmp_path), path, "evil.example")[0]["status"] == 403


@pytest.mark.parametrize("path", ["/v1/completions\n", "/v1/completions\r", "\x00"])
def test_paths_that_read_otherwise_elsewhere(tmp_path: Path, path: str) -> None:
    assert run(front(answering(200, b"reached"), tmp_path, most=0), path)[0]["status"] == 404


def test_websockets_are_closed(tmp_path: Path) -> None:
    sent: Sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(front(answering(200), tmp_path)({"type": "websocket", "path": "/v1/realtime"}, None, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_no_status_yet(tmp_path: Path) -> None:
    assert GatewayStatus.read(tmp_path) == GatewayStatus()


def test_lines_that_nobody_can_read_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    _notify("a line")
    assert stream.getvalue() == "a line\n"
    monkeypatch.setattr(stream, "write", full)
    _notify("a line on a full disk")
    stream.close()
    _notify("a line for nobody")


@pytest.mark.parametrize(
    ("positions", "rope_stable_length", "asked", "context"),
    [
        (4096, None, None, 4096),
        (4096, None, 100, 100),
        (None, None, None, None),
        (None, None, 9000, 9000),
        (131072, 4096, None, 4096),  # LongRoPE: short texts as `generate` has them
        (131072, 4096, 9000, 9000),
        (2048, 2048, None, 2048),  # dynamic: vLLM's table ends there
    ],
)
def test_the_context(
    positions: int | None, rope_stable_length: int | None, asked: int | None, context: int | None
) -> None:
    assert HeldModel(None, positions, rope_stable_length).context(asked) == context


def test_a_context_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigurationError, match="this model takes 2048 tokens at most"):
        HeldModel(None, 2048, 2048).context(2049)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0"}, "give api_key"),
        ({"host": "::"}, "give api_key"),
        ({"api_key": "short"}, "at least 16"),
        ({"api_key": f"{KEY} {KEY[::-1]}", "max_sequences": 1}, "max_sequences=1 is less"),
        (
            {"api_key": f"{KEY} {KEY[::-1]}", "adapters": Path("/"), "max_adapters": 1},
            "max_adapters=1 is less",
        ),
        ({"max_rank": 7}, "8, 16"),
        ({"adapters": Path("/nowhere")}, "no such folder"),
        ({"speculate": "magic"}, "prompt-lookup"),
        ({"kv_memory_gib": 0.0}, "more than 0"),
        ({"max_rank": 8}, "give adapters"),
        ({"draft_tokens": 2}, "give that too"),
        ({"dtype": "int8"}, "float32, bfloat16"),
        ({"chat_template": Path("/nowhere.jinja")}, "no such file"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GatewayOptions(**options)


def test_a_gateway_decides_some_options_of_its_sessions() -> None:
    config = SessionConfig(provider="wss://here", token="t", privacy="plain", keep_gib=1.0)
    expected = dataclasses.replace(config, experts="local", fill_masks=True)
    assert GatewayOptions().session_config(config) == expected


@pytest.mark.parametrize(
    ("options", "session", "message"),
    [
        ({}, {"experts": "routed"}, "experts='routed'"),
        ({"speculate": "prompt-lookup"}, {}, "speculate pads.*privacy='plain'"),
    ],
)
def test_sessions_that_a_gateway_cannot_have(
    options: dict[str, Any], session: dict[str, Any], message: str
) -> None:
    config = SessionConfig(provider="wss://here", token="t", privacy="plain", **session)
    with pytest.raises(ConfigurationError, match=message):
        GatewayOptions(**options).session_config(config)


def test_keys_are_not_shown() -> None:
    assert KEY not in repr(GatewayOptions(api_key=KEY, host="0.0.0.0"))
