"""An executor as an operator meets it: signals that other threads take, clients that say nothing."""

from __future__ import annotations

import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Executor

from provider.observe.admin import CONNECTIONS, AdminServer
from provider.observe.metrics import Metrics

HEALTHY = SimpleNamespace(alive=lambda: True, not_ready=lambda: "")


def test_a_signal_that_another_thread_takes_still_drains(
    serve_process: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    executor = serve_process(checkpoint("llama"))
    assert executor.process is not None
    # While all threads stand still none is waiting for the signal; which one takes it is chance.
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
        executor.process.send_signal(number)
    assert executor.process.wait(30) == 0


def test_a_silent_client_holds_up_neither_scrapes_nor_the_end() -> None:
    admin = AdminServer(Metrics(), 0, HEALTHY)
    with socket.create_connection(("127.0.0.1", admin.port)):
        url = f"http://127.0.0.1:{admin.port}/healthz"
        assert urllib.request.urlopen(url, timeout=10).read() == b"ok\n"
        closing = threading.Thread(target=admin.close)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()


def test_clients_that_say_nothing_take_no_more_than_some_threads() -> None:
    admin = AdminServer(Metrics(), 0, HEALTHY)
    before, silent = threading.active_count(), []
    try:
        for _ in range(4 * CONNECTIONS):
            silent.append(socket.create_connection(("127.0.0.1", admin.port), timeout=10))
        assert silent[-1].recv(1) == b""  # closed: all before it have been taken or closed, too
        assert threading.active_count() - before <= CONNECTIONS
        for each in silent:
            each.close()
        url = f"http://127.0.0.1:{admin.port}/healthz"
        deadline = time.monotonic() + 30
        while True:
            try:
                assert urllib.request.urlopen(url, timeout=10).read() == b"ok\n"
                break
            except OSError:  # the threads have not seen yet that their clients are gone
                assert time.monotonic() < deadline
    finally:
        admin.close()


def test_a_thread_that_cannot_be_had_costs_one_connection(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = serve(checkpoint("llama"))
    start, refused = threading.Thread.start, []

    def refuse_once(thread: threading.Thread) -> None:
        if not refused and "Acceptor._let_in" in repr(getattr(thread, "_target", "")):
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    with socket.create_connection(("127.0.0.1", executor.server.port), timeout=10) as raw:  # type: ignore[union-attr]
        assert raw.recv(1) == b""  # closed, not left waiting
    assert refused
    executor.connect().close()
