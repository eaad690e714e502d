"""Replicas as processes, which are killed and drained under load, and command lines that know several."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from commands import finish, start
from conftest import RING, Executor
from raw_peers import eventually
from ring_sessions import ExecutorFactory, one_time

import tenant_sdk
from shared.wire.header import Direction

pytest_plugins = ("ring_fixtures",)

TENANTS, SECONDS = 4, 120.0
QKV = (0, Direction.FORWARD, 0b111)


def answers(session: tenant_sdk.Session) -> list[list[torch.Tensor]]:
    """Of several requests that are in flight together."""
    draw = torch.Generator().manual_seed(0)
    pending = [session.products.submit(*QKV, [torch.randn((40, 64), generator=draw)]) for _ in range(4)]
    return [each.result() for each in pending]


def test_one_is_killed_and_the_next_one_drained_and_no_tenant_notices(
    serve_process: Callable[..., Executor],
    executors: ExecutorFactory,
    checkpoint: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Masks are fetched ahead from replicas, too; every answer is checked, and right to the bit."""
    folder = checkpoint("llama")
    own = [serve_process(folder, "--numerics", RING) for _ in range(3)]
    by_url = {each.url: each for each in own}
    with one_time(*executors("llama")[:2]) as session:
        expected = answers(session)
    urls, source = list(by_url), executors("llama")[1]
    done, stop = Counter[int](), threading.Event()

    def most_used(sessions: list[tenant_sdk.Session]) -> str:
        return Counter(session.stats.replicas[urls[0]] for session in sessions).most_common(1)[0][0]

    with ExitStack() as opened, ThreadPoolExecutor(TENANTS) as pool:
        sessions = []
        for _ in range(TENANTS):
            options = {"token": own[0].token, "ca": own[0].ca, "mask_sources": [source.url], "timeout": 20.0}
            made = tenant_sdk.connect(urls, **options, allow_same=["all"])  # type: ignore[arg-type]
            sessions.append(opened.enter_context(made))

        def work(number: int) -> None:
            while not stop.is_set():
                for got, right in zip(answers(sessions[number]), expected, strict=True):
                    assert all(map(torch.equal, got, right))
                done[number] += 1

        def all_work_on() -> None:
            before = Counter(done)
            eventually(lambda: all(done[number] > before[number] + 2 for number in range(TENANTS)))

        futures = [pool.submit(work, number) for number in range(TENANTS)]
        try:
            all_work_on()
            for how in (signal.SIGKILL, signal.SIGTERM):
                process = by_url[most_used(sessions)].process
                assert process is not None
                process.send_signal(how)
                all_work_on()
                assert process.wait(SECONDS) == (-signal.SIGKILL if how == signal.SIGKILL else 0)
            all_work_on()
        finally:
            stop.set()
        for future in futures:
            future.result(SECONDS)
        (left,) = [each.url for each in own if each.process is not None and each.process.poll() is None]
        assert {session.stats.replicas[urls[0]] for session in sessions} == {left}
        assert sum(session.stats.moves for session in sessions) >= 2
    assert "is unavailable" not in caplog.text
    assert "replicas are unavailable" not in caplog.text


def test_command_lines_take_several(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """With commas in between, and in a profile as a list; doctor says which can be used."""
    one, other = (serve(checkpoint("llama"), numerics=RING) for _ in range(2))
    gone = "wss://127.0.0.1:1"
    profile = tmp_path / "several.toml"
    profile.write_text(f'provider = ["{gone}", "{one.url}"]\nca = "{one.ca}"\ntoken_env = "TENANT_TOKEN"\n')
    given = ("--provider", f"{one.url},{other.url}", "--ca", one.ca, "--token-env", "TENANT_TOKEN")
    first = start("tenant_sdk.command_line.main", "doctor", *given, token=one.token)
    second = start("tenant_sdk.command_line.main", "doctor", "--profile", profile, token=one.token)
    status, out, err = finish(first)
    assert status == 0, out + err
    for each in (one, other):
        assert f"✓ replica      {each.url} can be used (" in out
    assert "✓ download" in out
    status, out, err = finish(second)
    assert status == 0, out + err
    assert f"! replica      {gone} cannot be used: cannot connect to 127.0.0.1:1" in out
    assert f"✓ replica      {one.url} can be used (" in out
