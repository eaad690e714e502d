"""What a gateway's front does with slow, hostile and unlucky clients; without vLLM."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tenant_sdk.gateway import client_locks, http_frontend
from tenant_sdk.gateway.admission import Authenticator, Refusal, SequenceLimit
from tenant_sdk.gateway.client_locks import ClientGone
from tenant_sdk.gateway.constraint_checks import REMEMBERED as KEPT
from tenant_sdk.gateway.constraint_checks import ConstraintChecker
from tenant_sdk.gateway.constraints import Constraint
from tenant_sdk.gateway.helper_process import HelperProcess
from tenant_sdk.gateway.http_frontend import (
    FLUSHED,
    MAX_MANAGEMENT,
    TOKENIZED_BYTES,
    FrontendDependencies,
    HttpFrontend,
    _is_server_error,
)
from tenant_sdk.gateway.log_redaction import LINES_PER_CALL_SITE, redact_library_logs
from tenant_sdk.gateway.parsing import RequestParser
from tenant_sdk.gateway.requests import parse_request
from tenant_sdk.gateway.status import REMEMBERED, SequenceErrors

KEYS = ("a-key-of-enough-letters", "another-key-of-enough")
TEXT = "/v1/completions"
BODY = b'{"prompt": "x"}'
CONSTRAINED = b'{"prompt": "x", "structured_outputs": {"regex": "a"}}'


def awaited(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that runs in an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        async def whole() -> None:
            await test(*arguments, **options)

        asyncio.run(whole())

    return run


class Client:
    """One request: what it sends comes when the test says so."""

    def __init__(self, there: HttpFrontend, path: str = TEXT, key: int = 0, **more: Any) -> None:
        self.sent, self._coming = list[dict[str, Any]](), asyncio.Queue[dict[str, Any]]()
        headers = [(b"authorization", f"Bearer {KEYS[key]}".encode()), (b"x-request-id", b"mine")]
        headers += [(b"x-vllm-priority", b"18446744073709551616"), (b"accept", b"*/*")]
        method = "POST" if path in http_frontend.GENERATION_PATHS | http_frontend.TOKENIZING_PATHS else "GET"
        scope = {"type": "http", "method": method, "path": path, "headers": headers} | more
        self.task = asyncio.ensure_future(there(scope, self._coming.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(dict(message))

    async def says(self, body: bytes, more: bool = False) -> Client:
        self._coming.put_nowait({"type": "http.request", "body": body, "more_body": more})
        await settled()
        return self

    async def leaves(self) -> None:
        self._coming.put_nowait({"type": "http.disconnect"})
        await settled()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])


async def settled() -> None:
    """Every task goes on until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


class Working:
    """An application whose answers come when the test says so."""

    def __init__(self, status: int = 200) -> None:
        self.go, self.scopes, self.status = asyncio.Event(), list[Any](), status
        self.at_once = self.most_at_once = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        await self.go.wait()
        self.at_once -= 1
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def front(
    application: Any,
    folder: Path,
    most: int = 4,
    context: int = 64,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> HttpFrontend:
    authenticator = Authenticator(KEYS)
    return HttpFrontend(
        application,
        authenticator=authenticator,
        sequence_limit=SequenceLimit(most, authenticator.clients),
        folder=folder,
        retry_after=3,
        clock=clock,
        served=FrontendDependencies(lambda: context, **{"parser": RequestParser()} | options),
    )


@awaited
async def test_slow_bodies_take_no_slots(tmp_path: Path) -> None:
    application = Working()
    application.go.set()
    there = front(application, tmp_path)
    slow = [await Client(there).says(b'{"prompt": "', more=True) for _ in range(40)]
    assert there._sequence_limit.in_flight == 0
    for key in (0, 1):
        assert (await Client(there, key=key).says(BODY)).status == 200
    for each in slow:
        await each.leaves()
        assert each.task.done()
        assert each.sent == []
    assert there._arriving.total == 0


@awaited
async def test_a_gateway_that_ends_says_so(tmp_path: Path) -> None:
    """vLLM's engine ends first: requests before and after get what a later one gets at another gateway."""
    ending, application = threading.Event(), Working(status=500)
    there = front(application, tmp_path, ending=ending.is_set)
    before = await Client(there).says(BODY)
    ending.set()
    application.go.set()
    await before.task
    assert (before.status, (b"retry-after", b"10") in before.sent[0]["headers"]) == (503, True)
    after = await Client(there, key=1).says(BODY)
    assert (after.status, len(application.scopes)) == (503, 1)


@pytest.mark.parametrize(("path", "body"), [(TEXT, BODY), ("/tokenize", BODY), ("/v1/models", b"")])
@pytest.mark.parametrize(("ends", "status"), [(True, 503), (False, 500)])
def test_an_error_of_vllm_is_not_told(
    tmp_path: Path, path: str, body: bytes, ends: bool, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Threads that are shut down, say: its words are not for clients, and may hold a client's text."""
    ending, go, text = threading.Event(), asyncio.Event(), "a client's secret"

    async def fails(*_: Any) -> None:
        await go.wait()
        raise RuntimeError(text)

    async def test() -> None:
        client = await Client(front(fails, tmp_path, ending=ending.is_set), path).says(body)
        if ends:
            ending.set()
        go.set()
        await client.task
        assert client.status == status
        assert b"secret" not in client.sent[1]["body"]

    asyncio.run(test())
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


@awaited
async def test_bodies_that_arrive_are_bounded_and_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    application = Working()
    application.go.set()
    monkeypatch.setattr(http_frontend, "BODIES_BYTES", 4000)
    there = front(application, tmp_path)
    hostile = [await Client(there).says(b" " * 1000, more=True) for _ in range(4)]
    assert [each.status for each in hostile if each.sent] == [429]
    assert (await Client(there, key=1).says(BODY)).status == 200
    for each in hostile:
        await each.leaves()
    assert there._arriving.total == 0


@pytest.mark.parametrize("path", [TEXT, "/metrics"])
@awaited
async def test_an_answer_has_its_place_until_it_has_left(tmp_path: Path, path: str) -> None:
    application, left = Working(), asyncio.Event()
    application.go.set()
    there = front(application, tmp_path)
    client = await Client(there, path, extensions={FLUSHED: left.wait}).says(BODY)
    assert client.status == 200
    assert there._sequence_limit.in_flight + there._management.total == 1
    left.set()
    await client.task
    assert there._sequence_limit.in_flight + there._management.total == 0


@awaited
async def test_one_key_does_not_take_all_slots(tmp_path: Path) -> None:
    application = Working()
    there = front(application, tmp_path, most=4)
    hostile = [await Client(there).says(BODY) for _ in range(5)]
    assert [each.status for each in hostile if each.sent] == [429, 429]
    other = await Client(there, key=1).says(BODY)
    application.go.set()
    await settled()
    assert other.status == 200


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@awaited
async def test_a_client_tokenizes_one_text_at_a_time(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client's, which may wait for its turn elsewhere, is not behind them."""
    monkeypatch.setattr(client_locks, "MIN_PAUSE", 0.0)
    application = Working()
    there = front(application, tmp_path, most=8, clock=lambda: 0.0)
    body = BODY if path == "/tokenize" else b'{"tokens": [1]}'
    for key in (0, 0, 0, 1):
        await Client(there, path, key).says(body)
    assert there._sequence_limit.in_flight == 4
    application.go.set()
    await settled()
    assert len(application.scopes) == 4
    assert application.most_at_once == 2
    assert there._sequence_limit.in_flight == 0


@awaited
async def test_an_answer_that_is_not_read_lets_others_tokenize(tmp_path: Path) -> None:
    application = Working()
    application.go.set()
    there = front(application, tmp_path)
    stuck = asyncio.Event()

    async def send(message: Any) -> None:
        stuck.set()
        await asyncio.Event().wait()

    coming = [{"type": "http.request", "body": BODY, "more_body": False}]

    async def receive() -> Any:
        return coming.pop() if coming else await asyncio.Event().wait()

    headers = [(b"authorization", f"Bearer {KEYS[0]}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": headers}
    unread = asyncio.ensure_future(there(scope, receive, send))
    await stuck.wait()
    other = await Client(there, "/tokenize", 1).says(BODY)
    await settled()
    assert other.status == 200
    unread.cancel()


@awaited
async def test_a_body_that_is_tokenized_is_small(tmp_path: Path) -> None:
    """Also with a long context: its tokens are listed in the event loop."""
    for context, size in ((64, 6 << 10), (1 << 17, TOKENIZED_BYTES + 1)):
        there = front(Working(), tmp_path, context=context)
        big = await Client(there, "/tokenize").says(b" " * size)
        assert big.status == 413
        assert (b"connection", b"close") in big.sent[0]["headers"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses/resp_1",
        "/ping",
        "/invocations",
        "/pooling",
        "/v1/completions/render",
        "/tokenizer_info",
    ],
)
@awaited
async def test_paths_that_are_not_named_are_closed(tmp_path: Path, path: str) -> None:
    application = Working()
    client = Client(front(application, tmp_path), path)
    await settled()
    assert (client.status, application.scopes) == (404, [])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in ("/v1/completions", "/tokenize", "/v1/responses", "/v1/adapters/")),
        *(("PUT", path) for path in ("/v1/models", "/v1/adapters", "/metrics", "/v1/models/a")),
        ("HEAD", "/v1/models"),
    ],
)
@awaited
async def test_other_methods_are_refused_in_the_form_of_other_errors(
    tmp_path: Path, method: str, path: str
) -> None:
    application = Working()
    client = Client(front(application, tmp_path), path, method=method)
    await settled()
    assert (client.status, application.scopes) == (405, [])
    assert json.loads(client.sent[1]["body"])["error"]["code"] == 405


class Slow:
    """A checker that takes until the test says so."""

    def __init__(self, why: str = "") -> None:
        self.go, self.why, self.cancelled, self.asked = asyncio.Event(), why, 0, list[Constraint]()

    async def refusal(self, client: str, given: Constraint) -> str:
        self.asked.append(given)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.why


@awaited
async def test_a_client_that_leaves_cancels_its_trial(tmp_path: Path) -> None:
    checker, application = Slow(), Working()
    there = front(application, tmp_path, constraint_checker=lambda: checker)
    client = await Client(there).says(CONSTRAINED)
    assert checker.asked == [("regex", "a")]
    await client.leaves()
    assert (checker.cancelled, client.sent, application.scopes) == (1, [], [])
    assert there._sequence_limit.in_flight == 0


@awaited
async def test_a_constraint_that_is_refused_reaches_nothing(tmp_path: Path) -> None:
    checker, application = Slow("too large"), Working()
    checker.go.set()
    client = await Client(front(application, tmp_path, constraint_checker=lambda: checker)).says(CONSTRAINED)
    assert (client.status, application.scopes) == (400, [])
    assert b"the regex is refused: too large" in client.sent[1]["body"]


@awaited
async def test_constraints_can_be_switched_off(tmp_path: Path) -> None:
    client = await Client(front(Working(), tmp_path)).says(CONSTRAINED)
    assert client.status == 400
    assert b"without structured outputs" in client.sent[1]["body"]


@awaited
async def test_what_ended_one_sequence_is_told_to_its_client_alone(tmp_path: Path) -> None:
    application = Working(status=500)
    there = front(application, tmp_path)
    one, other = await Client(there).says(BODY), await Client(there, key=1).says(BODY)
    name = dict(application.scopes[0]["headers"])[b"x-request-id"].decode()
    assert name != "mine"  # or a client could guess another's
    SequenceErrors().add(tmp_path, {f"cmpl-{name}-0-abc": "its adapter made NaN"})
    application.go.set()
    await settled()
    assert (one.status, other.status) == (422, 500)
    assert b"its adapter made NaN" in one.sent[1]["body"]


def test_few_ends_are_remembered(tmp_path: Path) -> None:
    SequenceErrors().add(tmp_path, {f"request-{at}-": "why" for at in range(REMEMBERED + 5)})
    assert SequenceErrors.reason(tmp_path, "request-4-") == ""
    assert SequenceErrors.reason(tmp_path, "request-5-") == "why"


@awaited
async def test_a_client_that_does_not_read_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its application is told that it hung up, and ends what it computes."""
    monkeypatch.setattr(http_frontend, "SEND_SECONDS", 0.01)
    heard: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        heard.append(await receive())

    there = front(application, tmp_path)

    async def stuck(message: Any) -> None:
        await asyncio.Event().wait()

    coming = [{"type": "http.request", "body": BODY, "more_body": False}]

    async def receive() -> Any:
        return coming.pop() if coming else await asyncio.Event().wait()

    scope = {
        "type": "http",
        "method": "POST",
        "path": TEXT,
        "headers": [(b"authorization", f"Bearer {KEYS[0]}".encode())],
    }
    await there(scope, receive, stuck)
    assert heard == [{"type": "http.disconnect"}]
    assert there._sequence_limit.in_flight == 0


@awaited
async def test_large_bodies_are_read_one_at_a_time(tmp_path: Path) -> None:
    """A small one does not wait for them."""
    application = Working()
    application.go.set()
    there = front(application, tmp_path)
    async with there._served.parser._lock.hold("0"):  # type: ignore[attr-defined]
        large = await Client(there).says(BODY + b" " * http_frontend.SMALL_BODY_BYTES)
        assert large.sent == []
        assert (await Client(there, key=1).says(BODY)).status == 200
    await large.task
    assert large.status == 200
    await there._served.parser.close()  # type: ignore[attr-defined]


@awaited
async def test_large_bodies_are_read_beside_the_server() -> None:
    parser = RequestParser()
    found = await parser("0", TEXT, CONSTRAINED, 64)
    assert found == parse_request(TEXT, CONSTRAINED, 64)
    many = b'{"prompt": [' + b"[1]," * 31 + b"[1]]}" + b" " * http_frontend.SMALL_BODY_BYTES
    assert (await parser("0", TEXT, many, 64)).sequences == 32  # type: ignore[union-attr]
    assert await parser("0", TEXT, b"[" * 10**6, 64) == parse_request(TEXT, b"[" * 10**6, 64)
    bodies = {"0": BODY, "1": CONSTRAINED}
    read = await asyncio.gather(*(parser(client, TEXT, body, 64) for client, body in bodies.items()))
    assert read == [parse_request(TEXT, body, 64) for body in bodies.values()]
    await parser.close()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_helper_that_dies_is_replaced(loop: str) -> None:
    """Each loop says in its own way that a pipe is closed. The gateway's is uvloop."""

    async def whole() -> None:
        parser = RequestParser()
        await parser.start()
        assert parser._process is not None
        parser._process.kill()
        await parser._process.wait()
        assert await parser("0", TEXT, BODY, 64) == parse_request(TEXT, BODY, 64)
        parser._process.send_signal(signal.SIGSTOP)
        asked = asyncio.ensure_future(parser("0", TEXT, BODY, 64))
        await settled()
        parser._process.kill()
        refused = await asked
        assert isinstance(refused, Refusal)
        assert refused.status == 503
        assert await parser("0", TEXT, BODY, 64) == parse_request(TEXT, BODY, 64)
        await parser.close()

    (asyncio if loop == "asyncio" else pytest.importorskip(loop)).run(whole())


@awaited
async def test_few_constraints_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each client, whatever others ask for."""
    tried = list[str]()

    async def ask(_: HelperProcess, client: str, message: bytes) -> bytes:
        tried.append(json.loads(message)[1])
        return b""

    monkeypatch.setattr(HelperProcess, "ask", ask)
    checker = ConstraintChecker(Path("none"), 1, 0)
    many = [Constraint("regex", str(at)) for at in range(KEPT + 1)]
    for each in [*many[:-1], many[0], many[0], many[-1], many[1], many[0]]:
        assert not await checker.refusal("a", each)
    assert tried == [*(each.text for each in many), many[1].text]
    tried.clear()
    for each in [*many, *many]:
        assert not await checker.refusal("b", each)
    assert len(tried) == 2 * len(many)
    assert not await checker.refusal("a", many[0])
    assert len(tried) == 2 * len(many)


@pytest.fixture
def quiet() -> Iterator[list[float]]:
    """What the clock says."""
    before, now = logging.getLogRecordFactory(), [0.0]
    redact_library_logs(lambda: now[0])
    yield now
    logging.setLogRecordFactory(before)


def test_libraries_words_are_left_out(quiet: list[float], caplog: pytest.LogCaptureFixture) -> None:
    text = "a secret " + "text"
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("vllm.something").exception("failed at %s", text)
    logging.getLogger("tenant_sdk.gateway.worker").warning("a step failed: %s", "gone")
    assert text not in caplog.text
    assert "ValueError" in caplog.text
    assert "a step failed: gone" in caplog.text


def test_a_call_site_of_a_library_logs_once_in_a_while_that_it_fails(
    quiet: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """A client can have it fail at each request, or each token, with a traceback of kilobytes."""
    for seconds in (0.0, 59.0, 61.0):
        quiet[0] = seconds
        for _ in range(100):
            logging.getLogger("vllm.something").error("fails")
        logging.getLogger("vllm.something").error("fails elsewhere")
        logging.getLogger("tenant_sdk.gateway").error("fails")
    lines = Counter(record.name for record in caplog.records)
    assert lines == {"vllm.something": 4, "tenant_sdk.gateway": 3}
    assert caplog.text.count("(199 more since the last line)") == 1
    assert caplog.text.count("(1 more since the last line)") == 1


def test_a_call_site_of_ours_logs_some_times_in_a_minute_what_happened(
    quiet: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Each line may tell something else, but a client can have any number of its requests fail."""
    for seconds in (0.0, 59.0, 61.0):
        quiet[0] = seconds
        for number in range(100):
            logging.getLogger("tenant_sdk.gateway").warning("failure %d", number)
    assert len(caplog.records) == 2 * LINES_PER_CALL_SITE
    assert "failure 1\n" in caplog.text
    assert caplog.text.count("failure 0 (180 more since the last line)") == 1


def test_lines_of_one_client_hide_none_of_another(
    quiet: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    for client in ("0", "1"):
        token = client_locks.current_client.set(client)
        for _ in range(100):
            logging.getLogger("tenant_sdk.gateway").warning("a request of %s failed", client)
        client_locks.current_client.reset(token)
    assert caplog.text.count("a request of 1 failed") == LINES_PER_CALL_SITE


@awaited
async def test_a_client_that_hangs_up_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Or its requests fill the disk with tracebacks."""

    async def gone(*_: Any) -> None:
        raise ClientGone

    client = await Client(front(gone, tmp_path), "/v1/models").says(b"")
    assert client.task.done()
    assert client.sent == []
    assert not caplog.records


@pytest.mark.parametrize(
    ("event", "gateways"),
    [
        (b'data: {"choices": []}\n\n', False),
        (b'data: {"error": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n', False),
        (b'data: {"error": {"message": "ended", "code": 500}}\n\n', True),
        (b'data: {"error": "of another form"}\n\n', True),
    ],
)
def test_errors_of_clients_in_a_stream_stay_as_they_are(event: bytes, gateways: bool) -> None:
    assert _is_server_error(event) is gateways


@awaited
async def test_a_response_that_fails_says_so(tmp_path: Path) -> None:
    """vLLM has no words for it in a stream."""
    begins = True

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        name = json.loads((await receive())["body"])["request_id"]
        assert name.encode() == b"resp_" + dict(scope["headers"])[b"x-request-id"]
        if begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError

    client = await Client(front(fails, tmp_path), "/v1/responses").says(b'{"input": "x"}')
    event, data = client.sent[-1]["body"].decode().strip().split("\n")
    told = json.loads(data.removeprefix("data: "))
    assert (event, told["type"], told["error"]["type"]) == ("event: error", "error", "server_error")
    begins = False
    client = await Client(front(fails, tmp_path), "/v1/responses").says(b'{"input": "x"}')
    assert client.status == 500


@awaited
async def test_metrics_and_adapters_have_slots_too(tmp_path: Path) -> None:
    there = front(Working(), tmp_path)
    waiting = [await Client(there, "/v1/adapters").says(b"") for _ in range(MAX_MANAGEMENT)]
    refused = [each.status for each in waiting if each.sent]
    assert refused == [429] * (MAX_MANAGEMENT // 4)
    other = await Client(there, "/metrics", key=1).says(b"")
    assert not other.sent  # it is answered
    for each in (*waiting, other):
        each.task.cancel()


@awaited
async def test_headers_that_are_for_vllm_stay_outside(tmp_path: Path) -> None:
    working = Working()
    client = await Client(front(working, tmp_path)).says(BODY)
    ((*_, last),) = [scope["headers"] for scope in working.scopes]
    names = [name for name, _ in working.scopes[0]["headers"]]
    assert names == [b"accept", b"content-length", b"content-type", b"x-request-id"]
    assert last[1] != b"mine"
    client.task.cancel()
