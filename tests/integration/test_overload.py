"""Tenants that ask for more than their share, over real TLS, and what others notice of it."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import RING, Executor, make_model
from lanes import ShufflingLane
from raw_peers import SECONDS, eventually, metric, open_raw, product

from provider.engine.engine import Engine
from provider.engine.latency import LatencyModel
from provider.engine.profiling import shapes_of
from provider.engine.scheduler import LatencyObjective, Opportunistic
from provider.executor.base import BaseExecutor
from provider.executor.products import GroupExecutor
from provider.observe.metrics import Metrics
from provider.serve.server import Server, server_context
from provider.serve.tokens import TokenFile
from provider.session.quota import Quota, Quotas
from provider.session.tenant import Service
from shared.errors import ConnectionLost, RequestRefused, SymbiosisError
from shared.ring.mask_stream import MaskStream
from shared.wire.header import Direction, Operation, RequestClass
from shared.wire.incoming import Incoming
from tenant_sdk import Session
from tenant_sdk.connection.channel import Channel
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.remote import LazyResult

WIDTH = 64
ROW = bytes(4 * WIDTH)


class Paced(Quotas):
    """On a clock of its own, by which so many requests a second come, however busy the machine is."""

    asked, pace = 0, 40

    def admit(self, tenant: str, rows: int, held: int, received: int, now: float) -> None:
        self.asked += 1
        super().admit(tenant, rows, held, received, self.asked / self.pace)


class Shop:
    """A ring executor with quotas, and tenants with tokens of their own; ``options`` of its engine."""

    def __init__(
        self,
        folder: Path,
        tls_dir: Path,
        work: Path,
        *limits: Quota,
        objective: LatencyObjective | None = None,
        quotas: type[Quotas] = Quotas,
        **options: Any,
    ) -> None:
        self.tokens = TokenFile(work / "tokens.json")
        self.tokens.add("nobody")
        self.base = BaseExecutor(folder, numerics=RING)
        metrics = Metrics()
        self.policy = Opportunistic(LatencyModel(shapes_of(self.base.manifest.groups)), objective)
        self.engine = Engine.of(self.base, lambda _: self.policy, on_batch=metrics.batch, **options)
        self.quotas = quotas(*limits)
        self.server = Server(
            Service(self.base, self.engine, metrics, self.quotas),
            context=server_context(tls_dir),
            tokens=self.tokens,
            port=0,
        )
        self.ca = tls_dir / "ca.pem"
        self._known: dict[str, Executor] = {}

    def executor(self, tenant: str) -> Executor:
        """What a tenant knows of it."""
        if tenant not in self._known:
            self._known[tenant] = Executor(
                self.server.url, self.tokens.add(tenant), self.ca, server=self.server
            )
        return self._known[tenant]

    def at_rest(self) -> None:
        """Nothing is left of anybody's requests."""
        eventually(lambda: self.quotas.in_flight() == (0, 0))
        eventually(lambda: not self.engine.waiting)
        assert not self.policy._queues
        assert not self.policy.counters._waiting


@pytest.fixture
def shop(checkpoint: Callable[[str], Path], tls_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Shop]]:
    """Open one with quotas: ``shop(Quota(...), Quota(...), lane=...)``."""
    made: list[Shop] = []

    def open_shop(*limits: Quota, **options: Any) -> Shop:
        made.append(Shop(checkpoint("llama"), tls_dir, tmp_path, *limits, **options))
        return made[-1]

    yield open_shop
    for each in made:
        each.server.drain(SECONDS)


def ask(
    session: Session,
    rows: torch.Tensor,
    group: int = 0,
    request_class: RequestClass = RequestClass.UNDECLARED,
) -> torch.Tensor:
    """A forward product of a group's first member."""
    executor = session.executor
    return executor.submit(
        Operation.PRODUCT, ProductKey(group, Direction.FORWARD, 1), [rows], request_class
    ).result()[0]


def integers(seed: int, rows: int = 1) -> torch.Tensor:
    return MaskStream(seed.to_bytes(32, "little")).draw(rows, WIDTH)


def reference(base: BaseExecutor, rows: torch.Tensor, group: int = 0) -> torch.Tensor:
    return base.compute(group, Direction.FORWARD, 1, [rows])[0]


@contextlib.contextmanager
def others_go_on(shop: Shop) -> Iterator[Session]:
    """A polite tenant asks all the while, and every answer must be right."""
    stop, failed = threading.Event(), list[BaseException]()
    with shop.executor("polite").connect() as session:
        rows = integers(7, 3)
        expected = reference(shop.base, rows)

        def go_on() -> None:
            try:
                while not stop.is_set():
                    assert torch.equal(ask(session, rows, request_class=RequestClass.DECODE), expected)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            yield session
            eventually(lambda: bool(failed) or session.stats.requests > 20)
        finally:
            stop.set()
            thread.join(SECONDS)
        assert not failed
        assert not thread.is_alive()


def test_ten_thousand_requests_and_no_answer_is_read(shop: Callable[..., Shop]) -> None:
    """The executor stops reading from such a tenant, and holds one of its requests."""
    here = shop(Quota(bytes_in_flight=1 << 20))
    rude = here.executor("rude")
    message = product(200, WIDTH, dtype=6, request_id=1)
    with others_go_on(here), open_raw(rude) as peer:
        peer.hello()
        data = peer.frame(message + ROW * 200)
        peer.sock.settimeout(1.0)
        sent = 0
        with contextlib.suppress(TimeoutError, OSError):
            for _ in range(10_000):
                peer.send(data)
                sent += 1
        assert sent < 10_000
        assert here.quotas.in_flight()[1] <= 2 << 20
    here.at_rest()


def test_a_frame_that_stops_in_the_middle(shop: Callable[..., Shop]) -> None:
    """What was admitted for it is given back when the tenant is gone."""
    here = shop(Quota(), Quota(bytes_in_flight=1 << 20))
    with others_go_on(here):
        with open_raw(here.executor("slow")) as peer:
            peer.hello()
            whole = peer.frame(product(500, WIDTH, dtype=6) + ROW * 500)
            peer.send(whole[: len(whole) // 2])
            eventually(lambda: here.quotas.in_flight()[0] >= 500)
        eventually(lambda: here.quotas.in_flight()[0] < 500)
    here.at_rest()


def test_one_row_at_a_time_as_fast_as_it_can(shop: Callable[..., Shop]) -> None:
    """Many connections of one tenant get no more than a tenant with one, when both always wait."""
    here = shop(Quota(), Quota())
    flood = here.executor("flood")
    stop = threading.Event()

    def pour(session: Session) -> None:
        while not stop.is_set():
            ask(session, integers(1))

    with contextlib.ExitStack() as stack, others_go_on(here):
        sessions = [stack.enter_context(flood.connect()) for _ in range(8)]
        threads = [threading.Thread(target=pour, args=(session,)) for session in sessions]
        for thread in threads:
            thread.start()
        eventually(lambda: sum(session.stats.requests for session in sessions) > 400)
        stop.set()
        for thread in threads:
            thread.join(SECONDS)
    here.at_rest()


def test_fine_tuning_that_calls_itself_decoding(shop: Callable[..., Shop]) -> None:
    """Its class follows from its rows; the answer is right all the same."""
    here = shop()
    with others_go_on(here), open_raw(here.executor("liar")) as peer:
        peer.hello()
        rows = integers(3, 900)
        peer.message(product(900, WIDTH, dtype=6, request_class=1), rows.numpy().tobytes())
        _, body = peer.receive()
        assert torch.equal(
            torch.frombuffer(bytearray(body), dtype=torch.int32).view(900, -1), reference(here.base, rows)
        )
    name = "symbiosis_reply_seconds_count"
    eventually(lambda: metric(here.executor("x"), name, request_class="prefill") == 1)
    here.at_rest()


def test_over_the_quota_the_tenant_waits_and_goes_on(
    shop: Callable[..., Shop], caplog: pytest.LogCaptureFixture
) -> None:
    """And says so: in the log, and in its statistics."""
    here = shop(Quota(requests_per_second=20), quotas=Paced)
    with here.executor("busy").connect() as session, caplog.at_level(logging.WARNING, "tenant_sdk"):
        for seed in range(90):
            assert torch.equal(ask(session, integers(seed)), reference(here.base, integers(seed)))
        stats = session.stats
    assert stats.refusals > 0
    assert stats.seconds_throttled > 0
    assert stats.requests == 90
    assert caplog.text.count("is overloaded, or this tenant over its quota") == 1
    assert metric(here.executor("x"), "symbiosis_refused_total", code="overloaded") == stats.refusals
    here.at_rest()


class SlowlyPaced(Paced):
    """For downloads, which are few requests."""

    pace = 2


def test_a_download_that_is_put_off_goes_on(shop: Callable[..., Shop]) -> None:
    here = shop(Quota(requests_per_second=1), quotas=SlowlyPaced)
    with here.executor("busy").connect() as session:
        model = session.load_model(progress=False)
        assert session.stats.refusals > 0
    expected = make_model("llama").state_dict()["model.embed_tokens.weight"]
    assert torch.equal(model.state_dict()["model.embed_tokens.weight"], expected)


def test_an_executor_that_stays_overloaded_is_an_error_in_time(
    serve_process: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    executor = serve_process(checkpoint("llama"), "--numerics", RING, "--tenant-requests", "0.001")
    with executor.connect() as session:
        ask(session, integers(1))
        with pytest.raises(RequestRefused) as caught:  # at once: it would have to wait for an hour
            ask(session, integers(1))
        assert caught.value.code == "overloaded"
        assert caught.value.retry_after is not None
        assert caught.value.retry_after > 1
        assert session.stats.refusals == 0


def test_other_refusals_are_not_repeated(shop: Callable[..., Shop]) -> None:
    here = shop()
    with here.executor("plain").connect() as session:
        with pytest.raises(RequestRefused, match="too_large"):
            session.executor.seed_effect(ProductKey(0, Direction.FORWARD, 1), 1 << 20, bytes(32))
        assert session.stats.refusals == 0


class Asked(NamedTuple):
    """A request in flight, and its answer."""

    pending: LazyResult
    expected: torch.Tensor


class Windows:
    """Up to three windows of requests of one session in flight at once, from three threads.

    Args:
        draw: decides what is asked, and in which order results are taken.
        session: asks.
    """

    def __init__(self, base: BaseExecutor, draw: random.Random, session: Session) -> None:
        self._base, self._draw, self._session = base, draw, session
        self._limit = 3 * session.manifest.limits.max_in_flight
        self.right = self.lost = 0

    def ask(self, threads: ThreadPoolExecutor, leave: Callable[[Session], None] | None = None) -> None:
        """Ask and take; some results come, then the tenant leaves, and every other one comes or is lost."""
        kinds = [self._kind() for _ in range(self._draw.randrange(1, self._limit + 1))]
        asked = list(threads.map(self._submit, kinds))
        self._draw.shuffle(asked)
        if leave is not None:
            self._session.executor.connection.channel.flush()
            for _ in range(min(len(asked), self._draw.randrange(4))):
                self._take(asked.pop())
        taken = [threads.submit(self._take, each) for each in asked]
        if leave is not None:
            leave(self._session)
        for each in taken:
            try:
                each.result(SECONDS)
                self.right += 1
            except ConnectionLost:
                if leave is None:
                    raise
                self.lost += 1

    def _kind(self) -> tuple[int, Direction, int, torch.Tensor, RequestClass]:
        draw = self._draw
        group = draw.randrange(len(self._session.manifest.groups))
        members = draw.randrange(1, 1 << len(self._session.manifest.groups[group].members))
        direction = draw.choice([Direction.FORWARD, Direction.BACKWARD])
        columns = self._session.executor.shapes[group].widths(direction, members).request_columns
        rows = MaskStream(draw.randbytes(32)).draw(draw.choice([1, 1, 2, 40, 100]), columns)
        return group, direction, members, rows, draw.choice(list(RequestClass))

    def _submit(self, kind: tuple[int, Direction, int, torch.Tensor, RequestClass]) -> Asked:
        group, direction, members, rows, request_class = kind
        pending = self._session.executor.submit(
            Operation.PRODUCT, ProductKey(group, direction, members), [rows], request_class
        )
        return Asked(pending, self._base.compute(group, direction, members, [rows])[0])

    def _take(self, asked: Asked) -> None:
        (answer,) = asked.pending.result()
        assert torch.equal(answer, asked.expected)


def break_off(session: Session) -> None:
    """The connection is gone without a word, also under TLS, and the session has noticed."""
    channel: Any = session.executor.connection.channel
    socket.socket.shutdown(channel._sock, socket.SHUT_RDWR)
    with pytest.raises(ConnectionLost):
        channel.ping()


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> dict[Channel, list[int]]:
    """The ids of requests on each connection of a tenant, as their answers come."""
    ids: dict[Channel, list[int]] = {}
    handle = Channel._handle

    def noted(self: Channel, answer: Incoming) -> None:
        if answer.header.operation == Operation.REPLY:
            ids.setdefault(self, []).append(answer.header.request_id)
        handle(self, answer)

    monkeypatch.setattr(Channel, "_handle", noted)
    return ids


@pytest.mark.parametrize(("seed", "early"), [(0, False), (1, False), (2, False), (3, True)])
def test_tenants_that_connect_ask_cancel_die_and_come_back(
    shop: Callable[..., Shop], arrivals: dict[Channel, list[int]], seed: int, early: bool
) -> None:
    """In random order, with many requests in flight, until the executor drains, perhaps under load.

    Every reply is the reference product of its request, in whatever order they are multiplied.
    """
    lanes: list[ShufflingLane] = []

    def lane(executor: GroupExecutor) -> ShufflingLane:
        lanes.append(ShufflingLane(executor, seed))
        return lanes[-1]

    here = shop(
        Quota(bytes_in_flight=1 << 20, requests_per_second=500),
        Quota(bytes_in_flight=2 << 20),
        # So little that larger requests are multiplied in parts.
        objective=LatencyObjective(decode_seconds=1e-4),
        lane=lane,
    )
    executors = [here.executor(f"tenant-{number % 4}") for number in range(6)]
    all_windows: list[Windows] = []

    def tenant(number: int) -> None:
        draw = random.Random(seed * 100 + number)
        executor = executors[number]
        for _ in range(draw.randrange(3, 6)):
            how = draw.choice(["ask", "break off", "cancel", "die in a frame", "die before the answers"])
            if how in ("ask", "break off", "cancel"):
                with ThreadPoolExecutor(3) as threads, executor.connect() as session:
                    windows = Windows(here.base, draw, session)
                    all_windows.append(windows)
                    windows.ask(threads)
                    if how == "break off":
                        windows.ask(threads, break_off)
                        windows.ask(threads)  # over a new connection
                    elif how == "cancel":
                        windows.ask(threads, Session.close)
            else:
                with open_raw(executor) as peer:
                    peer.hello()
                    for identity in range(1, draw.randrange(2, 48)):
                        peer.message(product(1, WIDTH, dtype=6, request_id=identity), ROW)
                    frame = peer.frame(product(300, WIDTH, dtype=6, request_id=99) + ROW * 300)
                    peer.send(
                        frame if how == "die before the answers" else frame[: draw.randrange(1, len(frame))]
                    )

    def until_it_leaves(number: int) -> bool:
        try:
            tenant(number)
        except (SymbiosisError, OSError, EOFError):
            if not here.server.draining:
                raise
            return False
        return True

    with ThreadPoolExecutor(6) as threads:
        running = [threads.submit(until_it_leaves, number) for number in range(6)]
        if early:
            eventually(lambda: sum(w.right for w in all_windows) > 20 or all(t.done() for t in running))
            assert here.server.drain(SECONDS)
        assert all(each.result(SECONDS) for each in running) != early
    assert sum(windows.right for windows in all_windows) > 20
    assert early or sum(windows.lost for windows in all_windows) > 0
    assert any(ids != sorted(ids) for ids in arrivals.values())
    assert lanes[0].most > 1
    assert lanes[0].parts > 0
    eventually(lambda: metric(executors[0], "symbiosis_connections") == 0)
    here.at_rest()
    assert here.server.drain(SECONDS)
    with pytest.raises(SymbiosisError):
        executors[0].connect()


def test_draining_under_load_loses_no_answer_that_was_begun(shop: Callable[..., Shop]) -> None:
    """Whoever has an answer has the right one; the rest is told that the executor leaves."""
    here = shop()
    rows = integers(2, 20)
    expected = reference(here.base, rows)
    answered: list[bool] = []
    executors = [here.executor(f"tenant-{number}") for number in range(4)]

    def tenant(executor: Executor) -> None:
        with executor.connect() as session:
            while True:
                try:
                    answered.append(torch.equal(ask(session, rows), expected))
                except SymbiosisError:
                    return

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(tenant, executor) for executor in executors]
        eventually(lambda: len(answered) > 50)
        assert here.server.drain(SECONDS)
        for each in running:
            each.result(SECONDS)
    assert all(answered)
    here.at_rest()


def test_the_request_class_travels(shop: Callable[..., Shop]) -> None:
    """What the SDK declares is what the executor counts."""
    here = shop()
    executor = here.executor("one")
    with executor.connect() as session:
        ask(session, integers(1))
        ask(session, integers(1), request_class=RequestClass.FINETUNING)
        ask(session, integers(1, 100))
    for name in ("decode", "prefill", "finetuning"):
        eventually(lambda: metric(executor, "symbiosis_reply_seconds_count", request_class=name) == 1)  # noqa: B023
