"""Locks and threads that clients of a gateway share fairly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from test_gateway_front import BODY, TEXT, Client, Working, awaited, front, settled

from tenant_sdk.gateway import client_locks, http_frontend
from tenant_sdk.gateway.client_locks import (
    ClientGone,
    FairLock,
    FairThreadPool,
    PacedLock,
    connection_closed,
    current_client,
    given_to_engine,
)
from tenant_sdk.gateway.http_frontend import CLOSED, OWNER
from tenant_sdk.gateway.metrics import CachedAnswer
from tenant_sdk.gateway.requests import parse_request


@awaited
async def test_one_request_of_each_client_is_prepared_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the engine has it; then after as long as that took."""
    monkeypatch.setattr(client_locks, "MIN_PAUSE", 0.0)
    now, clients, order = 0.0, 2, list[str]()
    lock = PacedLock(lambda: now, lambda client: clients > 1)
    engine_has, ends = dict[str, asyncio.Event](), asyncio.Event()

    async def request(client: str, name: str) -> None:
        async with lock.hold(client):
            order.append(name)
            engine_has[name] = asyncio.Event()
            await engine_has[name].wait()
            given_to_engine.get()()
            await ends.wait()

    tasks = [asyncio.ensure_future(request(name[0], name)) for name in ("a1", "a2", "b1", "a3")]
    await settled()
    assert order == ["a1", "b1"]
    engine_has["a1"].set()
    await settled()
    assert order == ["a1", "b1", "a2"]
    tasks[1].cancel()  # its client left
    await settled()
    assert order == ["a1", "b1", "a2", "a3"]
    now = 10.0
    engine_has["a3"].set()
    tasks.append(asyncio.ensure_future(request("a", "a4")))
    await settled()
    assert order[4:] == []
    await asyncio.wait_for(_until(lambda: order[4:] == ["a4"]), 800)
    now, clients = 20.0, 1
    tasks.append(asyncio.ensure_future(request("a", "a5")))
    engine_has["a4"].set()
    await settled()
    assert order[4:] == ["a4", "a5"]  # nobody else is there
    for event in engine_has.values():
        event.set()
    ends.set()
    await asyncio.gather(*tasks, return_exceptions=True)


async def disturbed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[http_frontend.HttpFrontend, Client, Working]:
    """A gateway with long pauses, and a request of another client that is in flight."""
    for pause in (
        "client_locks.MIN_PAUSE",
        "client_locks.MAX_PAUSE",
        "http_frontend.UNAUTHENTICATED_PAUSE",
    ):
        monkeypatch.setattr(f"tenant_sdk.gateway.{pause}", 600.0)
    application = Working()
    there = front(application, folder)
    return there, await Client(there, key=1).says(BODY), application


@awaited
async def test_every_request_is_paced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without a key together, and each client, whatever it asks for: refusals take time, too."""
    there, working, application = await disturbed(tmp_path, monkeypatch)
    # On a connection of a client, who may have many, its lock counts.
    owned = await Client(there, "/v1/models", headers=[], extensions={OWNER: "1"}).says(b"")
    assert owned.status == 401
    assert (await Client(there, "/v1/models", headers=[]).says(b"")).status == 401
    for path in ("/v1/models", "/healthz"):
        assert (await Client(there, path, headers=[]).says(b"")).sent == []
    assert (await Client(there, "/nothing").says(b"")).status == 404
    for path in ("/nothing", "/v1/models/one", "/metrics", TEXT):
        assert (await Client(there, path).says(b"x")).sent == []
    assert (await Client(there, "/nothing", key=1).says(b"")).status == 404
    application.go.set()
    await working.task


@awaited
async def test_closed_connections_wait_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have given their slots to other connections, whose requests would wait too, without bound."""
    there, working, application = await disturbed(tmp_path, monkeypatch)
    assert (await Client(there, "/v1/models", headers=[]).says(b"")).status == 401
    assert (await Client(there, "/nothing").says(b"")).status == 404
    strange: dict[str, Any] = {"headers": []}
    for path, options in (("/healthz", strange), ("/v1/models", strange), ("/nothing", {}), ("/metrics", {})):
        closed = asyncio.get_running_loop().create_future()
        waiting = await Client(there, path, **options, extensions={CLOSED: closed}).says(b"")
        assert not waiting.task.done()
        closed.set_result(None)
        await waiting.task
        assert waiting.sent == []
    ended = await Client(there, extensions={CLOSED: asyncio.get_running_loop().create_future()}).says(BODY)
    ended.task.cancel()  # for another reason
    with pytest.raises(asyncio.CancelledError):
        await ended.task
    application.go.set()
    await working.task


@awaited
async def test_small_bodies_of_a_client_are_read_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes milliseconds of the event loop, also if it is refused then."""
    read, now = list[bytes](), [0.0]

    def slowly(path: str, body: bytes, context: int) -> Any:
        read.append(body)
        now[0] += 0.01
        return parse_request(path, body, context)

    monkeypatch.setattr(http_frontend, "parse_request", slowly)
    application = Working()
    there = front(application, tmp_path, clock=lambda: now[0])
    other = await Client(there, key=1).says(BODY)  # in flight until the application goes on
    read.clear()
    async with there._small_body_lock.hold("0"):
        first, second = [Client(there) for _ in range(2)]
        for each in (first, second):
            await each.says(b"{}")
        assert read == []
        assert (await Client(there, key=1).says(b"[]")).status == 400
        assert read == [b"[]"]
    await asyncio.gather(first.task, second.task)
    assert read == [b"[]", b"{}", b"{}"]
    application.go.set()
    await other.task


async def _until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0.01)


@awaited
async def test_clients_hold_the_lock_alternately() -> None:
    lock, order, held = FairLock(), list[str](), asyncio.Event()

    async def wait(client: str) -> None:
        async with lock.hold(client):
            order.append(client)
            await held.wait()

    waiting = [asyncio.ensure_future(wait(client)) for client in "aaaab"]
    await settled()
    held.set()
    await asyncio.gather(*waiting)
    assert order[:3] in (["a", "b", "a"], ["a", "a", "b"])


@awaited
async def test_a_client_that_hangs_up_waits_no_longer() -> None:
    """Whether another client holds the lock, or itself."""
    lock, held, begun = FairLock(), asyncio.Event(), list[str]()

    async def wait(client: str, closed: asyncio.Future[None]) -> None:
        connection_closed.set(closed)
        async with lock.hold(client):
            begun.append(client)
            await held.wait()

    closed = {client: asyncio.get_running_loop().create_future() for client in "abcd"}
    waiting = {client: asyncio.create_task(wait(client[0], closed[client])) for client in "ab"}
    waiting["c"] = asyncio.create_task(wait("b", closed["c"]))
    waiting["d"] = asyncio.create_task(wait("b", closed["d"]))
    await settled()
    for client in "bc":
        closed[client].set_result(None)
        with pytest.raises(ClientGone):
            await waiting[client]
    held.set()
    await asyncio.gather(waiting["a"], waiting["d"])
    assert begun == ["a", "b"]


@awaited
async def test_figures_are_made_once_for_all_who_ask() -> None:
    made, now = list[int](), [5.0]

    def make() -> bytes:
        made.append(1)
        return b"%d" % len(made)

    figures = CachedAnswer(make, 1.0, lambda: now[0])
    assert await asyncio.gather(*(figures() for _ in range(50))) == [b"1"] * 50
    now[0] = 5.99
    assert await figures() == b"1"
    now[0] = 6.0
    assert await figures() == b"2"


def test_threads_are_shared_fairly() -> None:
    """One client's long work leaves a thread to the others, however much of it waits."""
    threads, done, go = FairThreadPool(2), list[str](), threading.Event()

    def of(client: str, work: Callable[[], Any]) -> Future[Any]:
        token = current_client.set(client)
        try:
            return threads.submit(work)
        finally:
            current_client.reset(token)

    long = [of("hostile", lambda: go.wait(800)) for _ in range(9)]
    long[5].cancel()
    plain = [of("plain", lambda: done.append("plain")) for _ in range(3)]
    last = of("hostile", lambda: done.append("hostile"))
    for each in plain:
        each.result(800)
    assert done == ["plain"] * 3
    go.set()
    last.result(800)
    assert done[-1] == "hostile"
    assert isinstance(of("plain", lambda: 1 // 0).exception(60), ZeroDivisionError)
    go.clear()
    begun, waits = (of("plain", lambda: go.wait(800)) for _ in range(2))
    threads.shutdown(wait=False)
    go.set()
    assert begun.result(800)
    assert waits.cancelled()
