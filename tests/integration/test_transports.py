"""What does not depend on what carries the messages: TLS websocket, shared memory, a call."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from channels import error_of
from conftest import RING, TENANT, relative_error
from forking import in_child, refused
from lanes import HeldLane, service_on
from parity import fixed_result, load_local, token_ids
from raw_peers import SECONDS, eventually
from transports import TRANSPORTS, Start, TransportServers

import provider.inprocess
import tenant_sdk
from provider.executor.base import BaseExecutor
from provider.session.tenant import Service, TenantSession
from shared.checkpoint import Checkpoint
from shared.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectError,
    ConnectionLost,
    ConnectionRefused,
    RequestRefused,
)
from shared.wire.header import (
    DTYPE_CODES,
    Direction,
    Header,
    Operation,
    RequestClass,
    parse_header,
)
from shared.wire.messages import Limits
from shared.wire.protocol import GroupShape, TenantProtocol
from tenant_sdk.connection.channel import Channel
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.replicas import retrying

pytest_plugins = ("transport_fixtures", "wire_fixtures")

MIB = 1 << 20


@pytest.fixture(scope="module")
def llama_everywhere(everywhere: Start, checkpoint: Callable[[str], Path]) -> TransportServers:
    return everywhere(checkpoint("llama"))


@pytest.fixture(scope="module")
def ring_everywhere(everywhere: Start, checkpoint: Callable[[str], Path]) -> TransportServers:
    return everywhere(checkpoint("llama"), numerics=RING)


def product(session: tenant_sdk.Session, *tensors: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Of group 0, whose members are q, k and v: 64 to 64, 32 and 32."""
    given = {"direction": Direction.FORWARD, "members": 1} | options
    key = ProductKey(0, given["direction"], given["members"])
    return session.executor.submit(Operation.PRODUCT, key, list(tensors)).result()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits(llama_everywhere: TransportServers, dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((40, 64), generator=generator)
    gradients = [torch.randn((40, width), generator=generator) for width in (64, 32)]
    found = []
    for transport in TRANSPORTS:
        with llama_everywhere.connect(transport, wire_dtype=dtype) as session:
            forward = product(session, x, members=7)
            backward = product(session, *gradients, direction=Direction.BACKWARD, members=3)
            files = [session.executor.file(info) for info in session.executor.manifest.files]
            info = session.executor.manifest.parameters[0]
            parameter = torch.cat(list(session.executor.parameter(info)))
            found.append(([*forward, *backward, parameter], files))
    for tensors, files in found[1:]:
        assert files == found[0][1]
        for one, other in zip(tensors, found[0][0], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("answers", "tolerance"), [("exact", 3e-4), ("half", 3e-3)])
def test_one_time_masks(
    answers: str,
    tolerance: float,
    transport: str,
    ring_everywhere: TransportServers,
    checkpoint: Callable[[str], Path],
) -> None:
    options: dict[str, Any] = {"mask_sources": [f"local:{checkpoint('llama')}"], "answers": answers}
    with ring_everywhere.connect(transport, privacy="one-time", repeat_rate=0.0, **options) as session:
        got = fixed_result(session.load_model(progress=False), token_ids())
        assert session.stats.verified_rows == session.stats.rows > 0
    expected = fixed_result(load_local(checkpoint("llama")), token_ids())
    assert float((got - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("source", TRANSPORTS)
def test_a_mask_source_on_the_same_machine_is_refused(
    transport: str, source: str, ring_everywhere: TransportServers
) -> None:
    options: dict[str, Any] = {"privacy": "one-time", "mask_sources": [ring_everywhere.where(source)]}
    if source == "tls":
        options["mask_source_ca"] = ring_everywhere.ca
    with pytest.raises(ConfigurationError, match=r"machine.*allow_same=\['all'\]"):
        ring_everywhere.connect(transport, **options, allow_same={"token", "authority"})
    with ring_everywhere.connect(transport, **options, allow_same=["all"]) as session:
        layer = session.load_model(progress=False).model.layers[0].mlp.down_proj
        with torch.no_grad():
            layer(torch.ones(1, 96))
        assert session.stats.effect_rows > 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_threads(
    transport: str,
    llama_everywhere: TransportServers,
    checkpoint: Callable[[str], Path],
    threads: ThreadPoolExecutor,
) -> None:
    """Of all sizes at once, so that memory grows under those that are in flight; no answer changes later."""
    weight = Checkpoint(checkpoint("llama")).read("model.layers.0.self_attn.q_proj.weight")
    with llama_everywhere.connect(transport) as session:

        def work(seed: int) -> None:
            random, generator = Random(seed), torch.Generator().manual_seed(seed)
            kept = []
            for _ in range(10):
                x = torch.randn((random.choice([1, 2, 7, 3000]), 64), generator=generator)
                kept.append((x, product(session, x)[0]))
            for x, y in kept:
                torch.testing.assert_close(y, x @ weight.T, atol=1e-4, rtol=1e-4)
                y.zero_()  # it is ours

        for future in [threads.submit(work, seed) for seed in range(12)]:
            assert error_of(future) is None
        assert session.stats.requests == 120


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_requests_over_the_limits(
    transport: str, everywhere: Start, checkpoint: Callable[[str], Path]
) -> None:
    """Are split, or refused if they were not; and the session goes on."""
    small = everywhere(checkpoint("llama"), limits=Limits(max_message_bytes=1 << 16, max_rows=100))
    weight = Checkpoint(checkpoint("llama")).read("model.layers.0.self_attn.q_proj.weight")
    with small.connect(transport) as session:
        x = torch.randn(1050, 64)
        torch.testing.assert_close(product(session, x)[0], x @ weight.T, atol=1e-5, rtol=1e-4)
        assert session.stats.requests == 11
        channel = session.executor.connection.channel

        def header(rows: int) -> Callable[[TenantProtocol], Header]:
            shape = GroupShape(64, (64, 32, 32))
            request = Header(
                Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.float32], 0, rows=rows, members=1
            )
            return lambda protocol: protocol.product(request, shape)

        for rows in (101, 256) if transport == "tls" else (101, 300, 100_000):
            with pytest.raises(RequestRefused) as caught:
                channel.wait(channel.submit(header(rows), [torch.zeros(rows, 64)]))
            assert caught.value.code == "too_large"
        assert torch.equal(product(session, x[:1])[0], product(session, x[:1])[0])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_errors_have_their_type_and_leave_the_session_open(
    transport: str, llama_everywhere: TransportServers
) -> None:
    with llama_everywhere.connect(transport) as session:
        for wrong, code in (
            ({"group": 99}, "group"),
            ({"members": 0}, "members"),
            ({"rows": 0}, "zero_rows"),
            ({"dtype": 6}, "dtype"),
        ):
            channel = session.executor.connection.channel

            def header(protocol: TenantProtocol, wrong: dict[str, int] = wrong) -> Header:
                request = Header(
                    Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.float32], 0, rows=1, members=1
                )
                return protocol.product(request, GroupShape(64, (64, 32, 32)))._replace(**wrong)

            rows = torch.zeros((wrong.get("rows", 1), 64))
            with pytest.raises(RequestRefused) as caught:
                channel.wait(channel.submit(header, [rows]))
            assert caught.value.code == code
        with pytest.raises(RequestRefused, match="non_finite"):
            product(session, torch.full((1, 64), torch.nan))
        session.executor.connection.channel.ping()
        assert not session.executor.connection.channel.broken


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_wrong_token(transport: str, llama_everywhere: TransportServers) -> None:
    with pytest.raises(AuthenticationError, match="refused the token: missing or unknown bearer token; ask"):
        llama_everywhere.connect(transport, token="not-a-token")
    with llama_everywhere.connect(transport) as session:
        product(session, torch.zeros(1, 64))
    metrics = llama_everywhere.service.metrics
    assert metrics.by_label("symbiosis_tenant_rows_total", "tenant")[TENANT] > 0
    eventually(lambda: llama_everywhere.metric("symbiosis_connections") == 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_token_file_that_cannot_be_read(
    transport: str,
    llama_everywhere: TransportServers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """That is no fault of the tenant's, which is told so in the same words everywhere."""
    tokens = llama_everywhere.server.tokens
    monkeypatch.setattr(tokens, "path", tmp_path / "missing")
    monkeypatch.setattr(tokens, "_last", None)  # as if it had never been read
    said = "opened no session: the executor cannot check tokens; report it to the provider$"
    with pytest.raises(ConnectError, match=said):
        llama_everywhere.connect(transport)
    if transport != "inprocess":  # whose caller has the error itself
        eventually(lambda: f"internal (cannot check tokens: {tmp_path}" in caplog.text)
    assert "Traceback" not in caplog.text


def test_a_tenant_with_too_many_sessions(everywhere: Start, checkpoint: Callable[[str], Path]) -> None:
    """The limit is one for all transports, and so are the words and the time to wait."""
    few = everywhere(checkpoint("llama"), tenant_connections=1)
    for at, transport in enumerate(("tls", "colocated"), 1):
        with few.connect(transport) as session:
            for other in ("tls", "colocated"):
                with pytest.raises(
                    ConnectError, match="opened no session: this tenant has too many"
                ) as caught:
                    few.connect(other)
                assert caught.value.retry_after
            product(session, torch.zeros(1, 64))
        eventually(lambda: few.metric("symbiosis_connections") == 0)
        assert few.metric("symbiosis_handshakes_failed_total", reason="tenant_full") == 2 * at


def held(everywhere: Start, folder: Path) -> tuple[TransportServers, HeldLane]:
    """An executor whose products wait to be told, and its lane."""
    lanes: list[HeldLane] = []

    def slow(executor: BaseExecutor) -> Service:
        service, lane = service_on(executor, HeldLane)
        lanes.append(lane)
        return service

    return everywhere(folder, service=slow), lanes[0]


KEY = ProductKey(0, Direction.FORWARD, 1)


def ask_for_ever(session: tenant_sdk.Session, channel: Channel) -> None:
    while True:
        session.executor.submit_piece(
            channel, Operation.PRODUCT, KEY, [torch.ones(1, 64)], RequestClass.UNDECLARED
        ).result()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_draining_answers_what_has_arrived(
    transport: str, everywhere: Start, checkpoint: Callable[[str], Path], threads: ThreadPoolExecutor
) -> None:
    one, lane = held(everywhere, checkpoint("llama"))
    with one.connect(transport) as session:
        channel = session.executor.connection.channel  # the session itself would open a new one
        in_flight = threads.submit(product, session, torch.ones(1, 64))
        assert lane.busy.wait(SECONDS)
        drained = threads.submit(one.end)
        eventually(lambda: one.server.draining)
        lane.go.set()
        assert error_of(in_flight) is None
        with pytest.raises(ConnectionLost, match=r"shutting down|broke"):
            ask_for_ever(session, channel)
        assert drained.result(timeout=SECONDS)


def test_an_engine_that_was_closed_answers_nobody_of_this_process(
    checkpoint: Callable[[str], Path], threads: ThreadPoolExecutor
) -> None:
    service, lane = service_on(BaseExecutor(checkpoint("llama"), numerics="float32"), HeldLane)
    executor = provider.inprocess.InprocessExecutor(service)
    with (
        tenant_sdk.connect(executor, privacy="plain") as waits,
        tenant_sdk.connect(executor, privacy="plain") as late,
    ):
        in_flight = threads.submit(product, waits, torch.ones(1, 64))
        assert lane.busy.wait(SECONDS)
        service.close()
        for future in (in_flight, threads.submit(product, late, torch.ones(1, 64))):
            with pytest.raises(ConnectionLost, match="broke"):
                future.result(timeout=SECONDS)
        lane.go.set()


def test_a_session_of_this_process_is_refused_in_the_loops_thread(
    llama_everywhere: TransportServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers come from there, too, and what it keeps of them has no lock."""
    refused, answers, refuse = list[str](), list[bytes](), TenantSession.refuse

    def noted(self: TenantSession, *args: Any) -> None:
        refused.append(threading.current_thread().name)
        refuse(self, *args)

    monkeypatch.setattr(TenantSession, "refuse", noted)
    session = llama_everywhere.inprocess.open(llama_everywhere.token, lambda head, _: answers.append(head))
    with pytest.raises(BrokenPipeError, match="unexpected"):  # the first message must be HELLO
        session.request(Header(Operation.FETCH, rows=1).pack(), torch.empty((1, 0), dtype=torch.uint8))
    session.close()
    assert refused == ["executor"]
    assert [parse_header(head).operation for head in answers] == [Operation.ERROR]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_forked_process_sends_nothing(transport: str, llama_everywhere: TransportServers) -> None:
    with llama_everywhere.connect(transport) as session:
        channel = session.executor.connection.channel

        def child() -> None:
            refused(lambda: product(session, torch.ones(1, 64)), channel.ping)
            channel.close()
            session.close()

        in_child(child)
        channel.ping()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closing_while_others_wait(
    transport: str, everywhere: Start, checkpoint: Callable[[str], Path], threads: ThreadPoolExecutor
) -> None:
    one, lane = held(everywhere, checkpoint("llama"))
    session = one.connect(transport)
    futures = [threads.submit(product, session, torch.ones(1, 64)) for _ in range(4)]
    assert lane.busy.wait(SECONDS)
    eventually(lambda: sum(p.waited for p in session.executor.connection.channel._pending.values()) == 4)
    session.close()
    lane.go.set()  # where the executor is a call, that one is carried through
    for future in futures:
        assert isinstance(error_of(future), ConnectionLost)
    eventually(lambda: one.metric("symbiosis_connections") == 0)


def test_options_of_tls_without_tls(llama_everywhere: TransportServers, tmp_path: Path) -> None:
    ca = llama_everywhere.ca
    for transport in ("colocated", "inprocess"):
        with pytest.raises(ConfigurationError, match="ca=FILE is for TLS"):
            llama_everywhere.connect(transport, ca=ca)
        with pytest.raises(ConfigurationError, match="client_certificate=FILE is for TLS"):
            llama_everywhere.connect(transport, client_certificate=(ca, ca))
        with pytest.raises(ConfigurationError, match="mask_source_ca=FILE is for TLS"):
            llama_everywhere.connect(
                "tls",
                privacy="noise-bank",
                mask_sources=[llama_everywhere.where(transport)],
                mask_source_ca=ca,
            )


def test_the_executor_in_a_notebook(checkpoint: Callable[[str], Path]) -> None:
    """The snippet of ``provider/inprocess.py``: no certificates, no tokens."""
    assert 'connect(endpoint, privacy="plain")' in (provider.inprocess.__doc__ or "")
    with provider.serve_in_process(checkpoint("llama")) as endpoint:
        session = tenant_sdk.connect(endpoint, privacy="plain")
        got = fixed_result(session.load_model(progress=False), token_ids())
    expected = fixed_result(load_local(checkpoint("llama")), token_ids())
    assert relative_error(got, expected) < 3e-4  # integers: docs/explanation/numerics.md
    with pytest.raises(ConnectionLost):
        product(session, torch.ones(1, 64))
    session.close()


@pytest.mark.parametrize("how", ["closed, then its session", "forgotten"])
def test_an_executor_in_a_notebook_ends(checkpoint: Callable[[str], Path], how: str) -> None:
    """Or each run of a cell would leave a model in memory."""
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # what other tests left
    endpoint = provider.serve_in_process(checkpoint("llama"))
    loop, weights = endpoint.service.engine.loop, weakref.ref(endpoint.service.executor)
    session = tenant_sdk.connect(endpoint, privacy="plain")
    if how != "forgotten":
        endpoint.close()
        assert not loop.closed  # the session may still have an answer to come
    session.close()
    assert loop.closed == (how != "forgotten")
    del endpoint, session, loop

    def gone() -> bool:
        gc.collect()
        return weights() is None

    eventually(gone)


def test_the_first_connection_is_not_waited_for_and_says_what_does() -> None:
    """However patient the session is: the URL may be mistyped."""
    with pytest.raises(ConnectionRefused, match=r"`symbiosis-tenant doctor --wait SECONDS` waits for it"):
        tenant_sdk.connect("wss://127.0.0.1:1", token="x", privacy="plain", patience=1e6)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_overloaded_executor_is_asked_again(
    llama_everywhere: TransportServers, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the session's timeout, also where no product has one."""
    monkeypatch.setattr(retrying, "retry_delay", lambda *_: 0.0)
    x, wait = torch.ones(2, 64), Channel.wait
    refusals = iter([RequestRefused("overloaded", "wait", retry_after=0.0)])

    def refused_once(self: Any, pending: Any) -> Any:
        answer = wait(self, pending)
        for error in refusals:
            raise error
        return answer

    with llama_everywhere.connect(transport) as session:
        expected = product(session, x)
        monkeypatch.setattr(Channel, "wait", refused_once)
        assert torch.equal(product(session, x)[0], expected[0])
        assert session.stats.refusals == 1
