"""An executor as an operator meets it: signals that other threads take, clients that say nothing."""

from __future__ import annotations

import contextlib
import datetime
import os
import pty
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Executor
from raw_peers import eventually

from provider.observe import admin as admin_port
from provider.observe.admin import CONNECTIONS, HEADER_BYTES, REQUEST_LINE_BYTES, AdminServer
from provider.observe.metrics import Metrics
from provider.serve.certificates import write_certificates

HEALTHY = SimpleNamespace(alive=lambda: True, not_ready=lambda: "")


def test_a_signal_that_another_thread_takes_still_drains(
    serve_process: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    executor = serve_process(checkpoint("llama"))
    assert executor.process is not None
    # While all threads stand still none is waiting for the signal; which one takes it is chance.
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
        executor.process.send_signal(number)
    assert executor.process.wait(800) == 0


def test_a_renewed_certificate_needs_no_restart(
    serve_process: Callable[..., Executor], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """SIGHUP: sessions go on, further ones see the new certificate, and a broken one changes nothing."""
    folder = tmp_path / "own"
    write_certificates(folder, now=datetime.datetime.now(datetime.UTC), days=10)
    served = serve_process(checkpoint("llama"), "--tls-dir", str(folder))
    assert served.process is not None
    assert served.log is not None
    log, executor = served.log, replace(served, ca=folder / "ca.pem")

    def said() -> str:
        return " ".join(log.read_text().split())  # lines are folded

    assert said().index("reading") < said().index("loading torch") < said().index("loading weights")
    assert said().count("certificate for localhost, 127.0.0.1, ::1, until") == 1
    assert "send SIGHUP" in said()  # it ends within days
    with executor.connect():
        write_certificates(folder, now=datetime.datetime.now(datetime.UTC), days=20)
        served.process.send_signal(signal.SIGHUP)
        eventually(lambda: said().count("certificate for localhost, 127.0.0.1, ::1, until") == 2)
        executor.connect().close()
        (folder / "server.key").write_text("x")
        served.process.send_signal(signal.SIGHUP)
        eventually(lambda: "the certificate in use stays" in said())
        executor.connect().close()
    served.process.terminate()
    assert served.process.wait(800) == 0


def test_a_terminal_that_is_closed_drains(
    tls_dir: Path, token_file: tuple[Path, str], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "provider.cli", "serve", str(checkpoint("llama")), "--port", "0"]
    command += ["--tls-dir", str(tls_dir), "--token-file", str(token_file[0]), "--numerics", "float32"]
    log = tmp_path / "log"
    pid, terminal = pty.fork()
    if pid == 0:  # with a terminal of its own as standard input
        with log.open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.execv(sys.executable, command)
    try:
        eventually(lambda: log.exists() and "serving" in log.read_text(), 60)
        os.close(terminal)
        status = -1

        def ended() -> bool:
            nonlocal status
            done, status = os.waitpid(pid, os.WNOHANG)
            return done == pid

        eventually(ended)
        assert os.waitstatus_to_exitcode(status) == 0
        assert "draining" in log.read_text()
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise


def test_a_silent_client_holds_up_neither_scrapes_nor_the_end() -> None:
    admin = AdminServer(Metrics(), 0, HEALTHY)
    with socket.create_connection(("127.0.0.1", admin.port)):
        url = f"http://127.0.0.1:{admin.port}/healthz"
        assert urllib.request.urlopen(url, timeout=800).read() == b"ok\n"
        closing = threading.Thread(target=admin.close)
        closing.start()
        closing.join(800)
        assert not closing.is_alive()


def test_clients_that_say_nothing_take_no_more_than_some_threads() -> None:
    admin = AdminServer(Metrics(), 0, HEALTHY)
    before, silent = threading.active_count(), []
    try:
        for _ in range(4 * CONNECTIONS):
            silent.append(socket.create_connection(("127.0.0.1", admin.port), timeout=800))
        # The oldest make room, and a probe is served although nobody of the others has gone.
        assert urllib.request.urlopen(f"http://127.0.0.1:{admin.port}/healthz", timeout=800).read() == b"ok\n"
        for each in silent[: 3 * CONNECTIONS]:
            assert each.recv(1) == b""
        eventually(lambda: threading.active_count() - before <= CONNECTIONS)
    finally:
        admin.close()
        for each in silent:
            each.close()


def test_a_client_that_sends_a_byte_now_and_then_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_port, "REQUEST_SECONDS", 0.0)
    admin = AdminServer(Metrics(), 0, HEALTHY)
    try:
        with socket.create_connection(("127.0.0.1", admin.port), timeout=800) as slow:
            slow.sendall(b"GET /")
            assert slow.recv(1) == b""
    finally:
        admin.close()


@pytest.mark.parametrize(
    ("path", "header"),
    [
        (b"", b"a" * HEADER_BYTES),
        (b"", b"x: a:\ra:\ra:"),
        (b"?" + b"%41" * (REQUEST_LINE_BYTES // 3), b"Accept: */*"),
    ],
)
def test_a_head_that_takes_long_to_parse_is_cut(path: bytes, header: bytes) -> None:
    """The standard parser takes minutes for some megabytes, and ends lines where HTTP does not."""
    admin = AdminServer(Metrics(), 0, HEALTHY)
    try:
        for query, more in ((b"?" + b"a" * 900, b"Accept: */*"), (path, header)):
            with socket.create_connection(("127.0.0.1", admin.port), timeout=800) as client:
                client.sendall(b"GET /healthz" + query + b" HTTP/1.0\r\n" + more + b"\r\n\r\n")
                answered = False
                with contextlib.suppress(ConnectionResetError):  # what it did not read
                    answered = bool(client.recv(1))
                assert answered == (query != path)
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
    with socket.create_connection(("127.0.0.1", executor.server.port), timeout=800) as raw:  # type: ignore[union-attr]
        assert raw.recv(1) == b""  # closed, not left waiting
    assert refused
    executor.connect().close()
