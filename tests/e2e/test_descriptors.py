"""An executor that runs out of file descriptors says so: to its provider, and to whom it turns away."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Executor
from raw_peers import CLOSE, Peer, Refused, counted, eventually, open_raw

import tenant_sdk
from provider.serve import descriptors
from provider.serve.tokens import TokenFile
from provider.session.tenant import Service
from shared.errors import ConfigurationError, SymbiosisError


def used(executor: Executor) -> set[int]:
    """The executor's descriptors."""
    assert executor.process is not None
    return {int(name) for name in os.listdir(f"/proc/{executor.process.pid}/fd")}


@contextlib.contextmanager
def left(executor: Executor, count: int, idle: int) -> Iterator[None]:
    """While the block lasts, the executor can open so many more than it has without sessions."""
    assert executor.process is not None
    pid = executor.process.pid
    eventually(lambda: len(used(executor)) <= idle)
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(used(executor)) + 1 + count, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def come(executor: Executor, token: str | None = None) -> Peer | str:
    """A session, or how it was refused."""
    try:
        peer = open_raw(executor, token=token)
    except Refused as error:
        info = json.loads(error.body)
        if error.status == 503:
            assert info["retry_after"] > 0
        return f"{error.status} {info['code']}"
    peer.control(1, {"client": "raw"})
    assert peer.receive_frame()[0] != CLOSE
    return peer


def test_who_comes_when_there_are_none_left_is_told_to_come_back(
    serve_process: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    executor = serve_process(checkpoint("llama"))
    assert executor.log is not None
    seen, idle = set(), len(used(executor))
    for count in range(8):
        with contextlib.ExitStack() as stack:
            with left(executor, count, idle):
                found = [come(executor) for _ in range(30)]  # some in holes between others
                strangers = [come(executor, "wrong") for _ in range(2)]
            sessions = [stack.enter_context(each) for each in found if isinstance(each, Peer)]
            refused = [each for each in found if isinstance(each, str)]
            seen.update(refused)
            assert set(refused) == {"503 overloaded"}
            assert set(strangers) <= {"401 unauthorized", "503 overloaded"}
            for peer in sessions:  # goes on
                peer.send(peer.frame(b"there?", 9))
                assert peer.receive_frame() == (10, b"there?")
        peer = come(executor)  # there are enough again
        assert isinstance(peer, Peer)
        peer.close()
    assert "503 overloaded" in seen
    log = " ".join(executor.log.read_text().split())  # lines are folded
    assert "out of file descriptors; raise the limit of open files (ulimit -n" in log
    assert "allow fewer connections" in log
    assert "Traceback" not in log
    assert "not a token file" not in log


def test_a_session_that_cannot_be_opened_is_refused_with_a_reason(
    llama: Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None is opened for it: the thread of a handshake must not close one, which belongs to the loop's."""
    opened: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(descriptors.ReserveDescriptor, "acquire", lambda _: False)
        patch.setattr(Service, "open", lambda *these: opened.append(these))
        with counted(llama, "symbiosis_handshakes_failed_total", reason="overloaded"):
            assert come(llama) == "503 overloaded"
    assert not opened
    assert "out of file descriptors" in caplog.text
    assert "Traceback" not in caplog.text
    peer = come(llama)
    assert isinstance(peer, Peer)
    peer.close()


def test_tenants_of_this_machine_are_told_as_well(
    serve_process: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    directory = tempfile.mkdtemp()  # a path of sockets is short
    executor = serve_process(checkpoint("llama"), "--local-dir", directory)
    assert executor.log is not None

    def connect() -> tenant_sdk.Session:
        return tenant_sdk.connect(f"ipc://{directory}", token=executor.token, privacy="plain")

    connect().close()  # it leaves some that ZeroMQ keeps
    url = executor.admin_url + "/metrics"
    eventually(lambda: b"symbiosis_connections 0.0" in urllib.request.urlopen(url).read())
    idle = len(used(executor))
    for count in range(2, 7):
        with (
            left(executor, count, idle),
            pytest.raises(SymbiosisError, match=r"no room|no shared memory") as caught,
        ):
            connect()
        assert caught.value.retry_after
    assert "Traceback" not in executor.log.read_text()
    shutil.rmtree(directory)


def test_too_few_are_told_at_the_start(
    serve_process: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/sh\nulimit -n 150\nexec "{sys.executable}" "$@"\n')
    limited.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(limited))
    for options, enough in (((), False), (("--max-connections", "28"), True)):
        executor = serve_process(checkpoint("llama"), *options)
        assert executor.log is not None
        assert ("150 file descriptors are allowed" in executor.log.read_text()) != enough


@pytest.mark.parametrize(
    ("limits", "wanted", "given", "told"),
    [
        ((1024, 4096), 500, 500, False),
        ((1024, 4096), 2000, 2000, False),
        ((1024, 4096), 5000, 4096, True),
        ((1024, resource.RLIM_INFINITY), 5000, 5000, False),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 5000, 5000, False),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limits: tuple[int, int],
    wanted: int,
    given: int,
    told: bool,
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: raised.append(new))
    with caplog.at_level(logging.WARNING):
        assert descriptors.raise_open_files_limit(wanted) == given
    assert raised == ([(given, limits[1])] if given > limits[0] >= 0 else [])
    assert bool(caplog.records) == told


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_token_file_that_cannot_be_read_is_not_called_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    token = tokens.add("alice")

    def fail(_: Path) -> bytes:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        for use in (tokens.check_readable, lambda: tokens.tenant_of(token)):
            with pytest.raises(ConfigurationError, match=f"cannot read .*{os.strerror(number)}") as caught:
                use()
            assert descriptors.none_left(caught.value) == (number == errno.EMFILE)
    assert tokens.tenant_of(token) == "alice"


@pytest.mark.parametrize("broken", ["", "missing"])
def test_a_token_file_that_cannot_be_used_is_nobodys_wrong_token(
    llama: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    assert llama.server is not None
    path = tmp_path / "tokens.json"
    if not broken:
        path.write_text(broken)
    monkeypatch.setattr(llama.server.tokens, "path", path)
    monkeypatch.setattr(llama.server.tokens, "_last", None)  # as if it had never been read
    with pytest.raises(Refused) as caught:
        open_raw(llama)
    assert caught.value.status == 503
    info = json.loads(caught.value.body)
    assert info["code"] == "internal"
    assert str(tmp_path) not in info["message"]


ONE_AT_A_TIME = """
import os
from provider.serve.descriptors import ReserveDescriptor

count = lambda: len(os.listdir("/proc/self/fd"))
before = count()
reserve = ReserveDescriptor()
assert reserve.acquire() and count() == before + 1
assert reserve.release() and count() == before
assert not reserve.release() and count() == before
"""


def test_the_reserve() -> None:
    """In a process of its own: other tests' threads open and close descriptors at any time."""
    done = subprocess.run([sys.executable, "-c", ONE_AT_A_TIME], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
