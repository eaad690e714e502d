"""Several executors of one party: sessions move from one to the other, and nobody notices."""

from __future__ import annotations

import datetime
import logging
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import only_closing_ends_waits
from conftest import RING, Executor
from parity import add_lora, gradients, token_ids
from raw_peers import SECONDS, eventually
from ring_sessions import ExecutorFactory, Sent, assert_no_block_repeats, captured_requests, one_time

import tenant_sdk
from provider.config import ServeConfig
from provider.executor.base import BaseExecutor
from provider.serve.certificates import write_certificates
from provider.serve.connection import ConnectionLimits
from provider.serve.provider import Provider
from provider.serve.server import Server, server_context
from provider.serve.tokens import TokenFile
from provider.session.tenant import Service
from shared.errors import (
    ConfigurationError,
    ConnectError,
    ConnectionLost,
    ConnectionRefused,
    ModelMismatch,
)
from shared.wire.header import Direction, Operation
from tenant_sdk.command_line.doctor import diagnose
from tenant_sdk.command_line.options import SessionRules, Target
from tenant_sdk.connection.replicas import addresses
from tenant_sdk.session.profiles import Secret

pytest_plugins = ("ring_fixtures",)

QKV = (0, Direction.FORWARD, 0b111)
Start = Callable[..., Server]


@pytest.fixture
def start(tls_dir: Path, token_file: tuple[Path, str], checkpoint: Callable[[str], Path]) -> Iterator[Start]:
    """A replica with the authority and the tokens of all other executors: ``start(host=..., ...)``."""
    with ExitStack() as ends:

        def made(architecture: str = "llama", tls: Path = tls_dir, **options: Any) -> Server:
            service = Service.of(BaseExecutor(checkpoint(architecture), numerics=RING))
            tokens = TokenFile(token_file[0])
            server = Server(
                service, **({"context": server_context(tls), "tokens": tokens, "port": 0} | options)
            )
            ends.callback(service.close)
            ends.callback(server.drain, 1.0)
            return server

        yield made


@pytest.fixture
def reach(tls_dir: Path, token_file: tuple[Path, str]) -> Callable[..., tenant_sdk.Session]:
    """A session with these replicas; ``plain`` unless the test says otherwise."""

    def connect(*servers: Server | str, urls: str | list[str] = "", **options: Any) -> tenant_sdk.Session:
        urls = urls or [each if isinstance(each, str) else each.url for each in servers]
        usual = {"token": token_file[1], "ca": tls_dir / "ca.pem", "privacy": "plain", "patience": 60.0}
        return tenant_sdk.connect(urls, **(usual | options))

    return connect


def rows_of(seed: int = 0) -> list[torch.Tensor]:
    return [torch.randn((3, 64), generator=torch.Generator().manual_seed(seed))]


def product(session: tenant_sdk.Session, seed: int = 0) -> list[torch.Tensor]:
    return session.products.submit(*QKV, rows_of(seed)).result()


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of connections."""
    return [
        record.message
        for record in caplog.records
        if record.name.startswith("tenant_sdk.connection") and record.levelno >= logging.WARNING
    ]


def in_use(session: tenant_sdk.Session) -> str:
    (url,) = session.stats.replicas.values()
    return url


# -- moving -----------------------------------------------------------------------------------------


def test_one_is_drained_under_load_and_no_tenant_notices(
    start: Start, reach: Callable[..., tenant_sdk.Session], caplog: pytest.LogCaptureFixture
) -> None:
    """Many requests of several tenants at a time, and every answer is right to the bit."""
    both = [start(), start()]
    done, stop = Counter[int](), threading.Event()
    with ExitStack() as opened, caplog.at_level(logging.WARNING):
        sessions = [opened.enter_context(reach(*both)) for _ in range(6)]
        expected = [product(sessions[0], seed) for seed in range(4)]

        def work(number: int) -> None:
            while not stop.is_set():
                answers = [sessions[number].products.submit(*QKV, rows_of(seed)) for seed in range(4)]
                for answer, right in zip(answers, expected, strict=True):
                    assert all(map(torch.equal, answer.result(), right))
                done[number] += 1

        with ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(work, number) for number in range(6)]
            try:
                eventually(lambda: all(done[number] > 5 for number in range(6)))
                used = [in_use(session) for session in sessions]
                leaving = max(both, key=lambda each: used.count(each.url))
                victims = [number for number in range(6) if used[number] == leaving.url]
                assert leaving.drain(SECONDS)
                before = Counter(done)
                eventually(lambda: all(done[number] > before[number] + 5 for number in range(6)))
            finally:
                stop.set()
            for future in futures:
                future.result(SECONDS)
        moves = [session.stats.moves for session in sessions]
    assert moves == [int(number in victims) for number in range(6)]
    assert victims
    assert not _told(caplog)


def test_an_idle_session_is_let_go_at_once_and_moves(
    start: Start, reach: Callable[..., tenant_sdk.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = only_closing_ends_waits(monkeypatch)
    both = {each.url: each for each in (start(), start())}
    with reach(*both) as session:
        expected = product(session)
        first = in_use(session)
        assert both[first].drain(SECONDS)  # else it would be there until then
        assert all(map(torch.equal, product(session), expected))
        assert not waited
        assert in_use(session) == (both.keys() - {first}).pop()
        assert session.stats.moves == 1


def test_both_leave_and_one_is_back(start: Start, reach: Callable[..., tenant_sdk.Session]) -> None:
    one, other = start(), start()
    with reach(one, other) as session, ThreadPoolExecutor(1) as pool:
        expected = product(session)
        for each in (one, other):
            each.drain(1.0)
        waiting = pool.submit(product, session)
        eventually(lambda: session.executor.connection.policy.reminder.logged_at is not None)
        start(port=other.port)
        assert all(map(torch.equal, waiting.result(SECONDS), expected))


def test_of_masks_only_copies_travel(
    start: Start, executors: ExecutorFactory, tls_dir: Path, token_file: tuple[Path, str]
) -> None:
    """Whoever breaks off, on both sides: what a replica is sent is what the other one was sent, or is new."""
    provider, source, _ = executors("llama")
    with one_time(provider, source) as session:
        expected = gradients(add_lora(session.load_model(progress=False)), token_ids())
    own, masks = [start(), start()], [start(), start()]
    party = {each.url: name for name, group in (("own", own), ("masks", masks)) for each in group}
    options = {"token": token_file[1], "ca": tls_dir / "ca.pem", "mask_budget_mib": 0.0, "patience": 60.0}
    options |= {"allow_same": ["all"], "mask_sources": [[each.url for each in masks]]}
    with captured_requests() as sent, tenant_sdk.connect([each.url for each in own], **options) as session:
        model = add_lora(session.load_model(progress=False))
        breaker = _Breaker(session, every=7)
        with breaker:
            got = gradients(model, token_ids())
        stats = session.stats
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert breaker.broken > 5
    assert stats.moves >= breaker.broken // 2
    repeated = _only_copies(sent, party)
    assert repeated
    assert {url for url, _ in repeated} == party.keys()


class _Breaker:
    """Has a session's connections break in the middle of requests, now and then."""

    def __init__(self, session: tenant_sdk.Session, every: int) -> None:
        self.every, self.asked, self.broken = every, 0, 0
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        from tenant_sdk.connection.websocket_channel import WebsocketChannel

        wait = WebsocketChannel.wait

        def cut(channel: Any, pending: Any) -> Any:
            self.asked += 1
            if self.asked % self.every == 0 and pending.done is False:
                self.broken += 1
                channel.flush()  # it is in flight
                channel._break(ConnectionLost("broken for the test"))
            return wait(channel, pending)

        self._patch.setattr(WebsocketChannel, "wait", cut)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def _only_copies(sent: list[Sent], party: dict[str, str]) -> list[tuple[str, bytes]]:
    """Masked rows and seeds that were sent again, with where to; no 16 bytes of them are in anything else."""
    masked = [m for m in sent if m.operation in (Operation.PRODUCT, Operation.SEED_EFFECT)]
    bodies = {(party[message.url], message.body) for message in masked}
    assert_no_block_repeats(body for _, body in bodies)
    counts = Counter((party[message.url], message.body) for message in masked)
    return [(m.url, m.body) for m in masked if counts[party[m.url], m.body] > 1]


def test_a_session_that_has_grown_old_moves_silently(
    start: Start, reach: Callable[..., tenant_sdk.Session], caplog: pytest.LogCaptureFixture
) -> None:
    both = [start(limits=ConnectionLimits(seconds=0.3)), start(limits=ConnectionLimits(seconds=0.3))]
    with caplog.at_level(logging.INFO), reach(*both) as session:
        expected = product(session)
        seen = set()

        def moved() -> bool:
            assert all(map(torch.equal, product(session), expected))
            seen.add(in_use(session))
            return session.stats.moves >= 4

        eventually(moved)
    assert seen == {each.url for each in both}
    assert any("moved from" in record.message for record in caplog.records)
    assert not _told(caplog)


def test_sessions_that_ended_leave_no_timers(start: Start, reach: Callable[..., tenant_sdk.Session]) -> None:
    """One timer looks at the ages of all; timers of handshakes and ends are gone within seconds."""
    one = start(limits=ConnectionLimits(seconds=3600.0))
    loop = one.service.engine.loop
    for _ in range(20):
        reach(one).close()
    later = [at for at, *_ in loop._timers if at > loop.now + 60.0]
    assert len(later) == 1


def test_a_lone_executor_may_send_old_sessions_away_too(
    start: Start, reach: Callable[..., tenant_sdk.Session], caplog: pytest.LogCaptureFixture
) -> None:
    one = start(limits=ConnectionLimits(seconds=0.2))
    with caplog.at_level(logging.WARNING), reach(one) as session:
        expected = product(session)

        def connected_again() -> bool:
            assert all(map(torch.equal, product(session), expected))
            return session.stats.reconnections >= 3

        eventually(connected_again)
        assert session.stats.moves == 0
    assert not _told(caplog)


def test_sessions_of_this_machine_grow_old_too(
    checkpoint: Callable[[str], Path], tls_dir: Path, token_file: tuple[Path, str]
) -> None:
    """As ``serve`` is told; they come again to the same directory."""
    here = Path(tempfile.mkdtemp(prefix="symbiosis-"))  # a short path, for sockets
    options: dict[str, Any] = {"tls_dir": tls_dir, "token_file": token_file[0], "port": 0}
    options |= {"local_dir": here, "max_connection_seconds": 0.3, "drain_seconds": 1.0}
    config = ServeConfig(model_dir=checkpoint("llama"), **options)
    with Provider(config) as provider:
        for url in (provider.local_url, provider.url):
            ca = tls_dir / "ca.pem" if url == provider.url else None
            with tenant_sdk.connect(url, token=token_file[1], ca=ca, privacy="plain") as session:
                expected = product(session)
                while session.stats.reconnections < 2:
                    assert all(map(torch.equal, product(session), expected))


# -- who is a replica -------------------------------------------------------------------------------


def test_another_model_is_refused_and_named(
    start: Start, reach: Callable[..., tenant_sdk.Session], caplog: pytest.LogCaptureFixture
) -> None:
    same, other = start(), start("qwen2")
    with reach(same) as session:
        digest = session.manifest.digest
    with caplog.at_level(logging.WARNING, "tenant_sdk"):
        for _ in range(64):  # which one is tried first is chance, and does not matter with a digest
            with reach(other, same, digest=digest) as session:
                expected = product(session)
            if any("is not used" in record.message for record in caplog.records):
                break
    (told,) = {record.message for record in caplog.records if "is not used" in record.message}
    assert told.startswith(f"{other.url} is not used: {other.url} serves weights with digest ")
    with pytest.raises(ModelMismatch, match=r"none of 2 replicas can be used: .*digest"):
        reach(other, same, digest="0" * 64)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tenant_sdk"), reach(same) as session:
        session.executor.connection._find = _found(reach, same, other)
        session.executor.connection.channel._break(ConnectionLost("broken for the test"))
        assert all(
            map(torch.equal, product(session), expected)
        )  # the other one was tried: nothing is known of it
        (told,) = [record.message for record in caplog.records if "is not used" in record.message]
        assert told.startswith(
            f"{other.url} is not used: {other.url} serves something else than {same.url} ("
        )
        assert "weights, digest" in told
        same.drain(1.0)
        session.executor.connection.policy.retry_seconds = 2.0
        with pytest.raises(ConnectionLost, match=f"{other.url}: serves something else than {same.url}"):
            product(session)


def _found(reach: Callable[..., tenant_sdk.Session], *servers: Server) -> Any:
    """What another session finds, in the place of what this one does."""
    with reach(*servers) as another:
        return another.executor.connection._find


def test_none_can_be_used_and_each_says_why(
    start: Start, reach: Callable[..., tenant_sdk.Session], tls_dir: Path
) -> None:
    server = start()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = f"wss://127.0.0.1:{taken.getsockname()[1]}"
    nameless = "wss://a..b:1"
    with pytest.raises(ConnectError) as e:
        reach(closed, nameless, server, token="wrong", patience=0.0)
    for why in (
        "none of 3 replicas can be used",
        f"{closed}: cannot connect to 127.0.0.1",
        f"{nameless}: cannot resolve the host name 'a..b'",
        f"{server.url}: refused the token",
    ):
        assert why in e.value.message
    with pytest.raises(ConnectionRefused, match="cannot connect"):
        reach(closed, patience=0.0)  # of one, its own error


def test_a_name_with_two_addresses(
    start: Start, reach: Callable[..., tenant_sdk.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS checks the name: 127.0.0.2 is not in the certificate."""
    one = start(host="127.0.0.1")
    other = start(host="127.0.0.2", port=one.port)
    url, real, there = f"wss://localhost:{one.port}", socket.getaddrinfo, ["127.0.0.1", "127.0.0.2"]

    def looked_up(host: Any, port: Any, *more: Any, **options: Any) -> Any:
        if host != "localhost":
            return real(host, port, *more, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in there]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    names = {f"{url} (127.0.0.1)": one, f"{url} (127.0.0.2)": other}
    with reach(url) as session:
        expected = product(session)
        first = in_use(session)
        names[first].drain(1.0)
        assert all(map(torch.equal, product(session), expected))
        assert in_use(session) == (names.keys() - {first}).pop()
        assert session.stats.replicas.keys() == {url}
        # One that is new in DNS is found.
        third = start(host="127.0.0.3", port=one.port)
        there[:] = ["127.0.0.3", "127.0.0.4"]
        monkeypatch.setattr(addresses, "RESOLVE_SECONDS", 0.0)
        for each in (one, other):
            each.drain(1.0)
        assert all(map(torch.equal, product(session), expected))
        assert in_use(session) == f"{url} (127.0.0.3)"
        third.drain(1.0)
    with pytest.raises(ConnectError, match=r"TLS|certificate") as e:
        reach(f"wss://127.0.0.2:{start(host='127.0.0.2').port}")
    assert "it is for another host" in e.value.message


def test_which_addresses_are_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked_up(*found: str) -> list[str]:
        kinds = {".": socket.AF_INET, ":": socket.AF_INET6}
        entries = [(kinds[":" if ":" in each else "."], 1, 6, "", (each, 1)) for each in found]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
        return addresses.addresses_of("wss://name:1")

    assert looked_up("10.0.0.1") == []
    assert looked_up("::1", "127.0.0.1") == []  # one machine, by either way
    assert looked_up("10.0.0.1", "10.0.0.2", "10.0.0.1") == ["10.0.0.1", "10.0.0.2"]
    assert looked_up("fd00::1", "10.0.0.1", "10.0.0.2") == ["fd00::1", "10.0.0.1", "10.0.0.2"]
    monkeypatch.undo()
    assert addresses.addresses_of("wss://127.0.0.1:1") == addresses.addresses_of("wss://[::1]:1") == []


# -- one operator -----------------------------------------------------------------------------------


def test_a_mask_source_that_is_a_replica_of_the_provider_is_noticed(
    start: Start, tls_dir: Path, token_file: tuple[Path, str], tmp_path: Path
) -> None:
    """Though the session is with another replica, which shows nothing of the kind."""
    folders = [tmp_path / name for name in ("second", "source")]
    for folder in folders:
        write_certificates(folder, now=datetime.datetime.now(datetime.UTC))
    first, second, source = start(), start(tls=folders[0]), start(tls=folders[1])
    bundle = tmp_path / "all.pem"
    bundle.write_bytes(b"".join((each / "ca.pem").read_bytes() for each in (tls_dir, *folders)))
    options = {"token": token_file[1], "ca": bundle, "mask_source_ca": bundle, "timeout": 5.0}
    here = {"host", "address", "machine", "authority", "token"}

    def connect(*sources: Any, **more: Any) -> tenant_sdk.Session:
        given = options | {"allow_same": here, "mask_sources": list(sources)} | more
        return tenant_sdk.connect([first.url, second.url], **given)

    for _ in range(4):  # whichever replica is used
        with connect(source.url) as session:
            assert product(session)
        for masks in (second, start(tls=folders[0])):  # the very replica, and one with its certificate
            with pytest.raises(ConfigurationError, match=r"have the same .*certificate key"):
                connect(masks.url)
            with pytest.raises(ConfigurationError, match=r"have the same .*certificate key"):
                connect([source.url, masks.url])


# -- what is given, and what is told ----------------------------------------------------------------


def test_urls_with_commas_in_between(start: Start, reach: Callable[..., tenant_sdk.Session]) -> None:
    """As command lines have them; each party's."""
    both, masks = [start(), start()], [start(), start()]
    joined = [", ".join(each.url for each in group) for group in (both, masks)]
    given = {"privacy": "one-time", "mask_sources": [joined[1]], "allow_same": ["all"]}
    with reach(*both) as session:
        expected = product(session)
    with reach(urls=joined[0], **given) as session:
        assert all(map(torch.equal, product(session), expected))
        assert session.stats.replicas.keys() == {both[0].url, masks[0].url}


def test_doctor_lists_replicas(
    start: Start, tls_dir: Path, token_file: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENANT_TOKEN", token_file[1])
    one, two, other = start(), start(), start("qwen2")
    two.drain(1.0)
    given: dict[str, Any] = {"ca": tls_dir / "ca.pem", "token": Secret("the token", "TENANT_TOKEN")}
    urls = (two.url, one.url, other.url)
    ((title, results), (_, together)) = _diagnosed(Target(urls[0], replicas=urls, **given))
    assert title == " or ".join(urls)
    found = [result for result in results if result.step == "replica"]
    assert [result.ok for result in found] == [None, True, False]
    assert f"{two.url} cannot be used: cannot connect" in found[0].detail
    assert f"{one.url} can be used (" in found[1].detail
    assert f"{other.url} serves something else than {one.url}" in found[2].detail
    assert [result.step for result in results][-1] == "download"  # all about the one that works
    assert together[0].step == "numerics"
    given["token"] = None
    ((_, results),) = _diagnosed(Target(urls[0], replicas=urls[:2], **given))
    assert [result.ok for result in results if result.step == "replica"] == [None, True]
    one.drain(1.0)
    ((_, results),) = _diagnosed(Target(urls[0], replicas=urls[:2], **given))
    assert (results[-1].step, results[-1].ok) == ("tcp", False)


def _diagnosed(target: Target) -> list[tuple[str, list[Any]]]:
    found = diagnose([target], SessionRules())
    next(found)  # of libraries
    return [(title, list(results)) for title, results in found]


def test_executors_of_other_tests_are_as_they_were(llama: Executor) -> None:
    """One URL is no party of replicas: its error and its names are its own."""
    with llama.connect() as session:
        assert session.stats.replicas == {llama.url: llama.url}
        assert session.executor.url == llama.url
