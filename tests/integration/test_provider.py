"""A provider as its configuration puts it together: from its start to its end."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import RING, Executor
from raw_peers import eventually

from provider.config import ServeConfig
from provider.serve.provider import Provider
from shared.errors import ConfigurationError, ConnectError

Make = Callable[..., Provider]


@pytest.fixture
def make(checkpoint: Callable[[str], Path], tls_dir: Path, token_file: tuple[Path, str]) -> Make:
    def provider(**options: Any) -> Provider:
        given = {"model_dir": checkpoint("llama"), "tls_dir": tls_dir, "token_file": token_file[0], "port": 0}
        return Provider(ServeConfig(**(given | options)))  # type: ignore[arg-type]

    return provider


@pytest.fixture
def local_dir() -> Iterator[Path]:
    """Not in pytest's own, whose paths are too long for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "here"


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.is_alive()}


def test_it_serves_as_configured(make: Make, llama: Executor, tmp_path: Path, local_dir: Path) -> None:
    (tmp_path / "ready").write_text("of before")
    provider = make(numerics=RING, local_dir=local_dir, ready_file=tmp_path / "ready")
    with provider:
        assert provider.manifest.numerics == RING
        assert provider.tenants == 1
        for url, ca in ((provider.url, llama.ca), (provider.local_url, None)):
            with Executor(url, llama.token, llama.ca).connect(ca=ca) as session:
                assert session.manifest == provider.manifest
        assert not (tmp_path / "ready").exists()
        provider.announce()
        told = json.loads((tmp_path / "ready").read_text())
        assert (told["url"], told["local_url"]) == (provider.url, provider.local_url)
        assert told["admin_url"] == provider.admin_url
        assert ask(provider, "/healthz") == (200, "ok\n")
        provider.drain(1.0)
        assert not (tmp_path / "ready").exists()
    with pytest.raises(ConnectError):
        Executor(provider.url, llama.token, llama.ca).connect()


def test_it_drains_and_closes_once(make: Make, llama: Executor) -> None:
    provider = make()
    provider.start()
    with Executor(provider.url, llama.token, llama.ca).connect():
        assert provider.drain(5.0)
    provider.close()
    provider.close()  # nothing more


@pytest.mark.parametrize("taken", ["port", "admin_port"])
def test_what_cannot_start_leaves_nothing_open(
    make: Make, taken: str, tmp_path: Path, local_dir: Path
) -> None:
    before = threads()
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        provider = make(**{"port": 0, taken: port}, transcript=tmp_path, local_dir=local_dir)
        with pytest.raises(ConfigurationError, match=f"cannot listen.*{port}"):
            provider.start()
    eventually(lambda: not [t for t in threads() - before if t.name not in ("accept", "status")])
    assert not list(tmp_path.iterdir())  # nor anything begun


@pytest.mark.parametrize("taken", ["port", "admin_port"])
def test_a_port_in_use_is_told_before_the_checkpoint_is_read(make: Make, tmp_path: Path, taken: str) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        provider = make(**{"port": 0, taken: other.getsockname()[1], "model_dir": tmp_path / "none"})
        with pytest.raises(ConfigurationError, match="cannot listen"):
            provider.start()


def test_until_all_is_loaded_it_is_alive_and_not_ready(
    make: Make, monkeypatch: pytest.MonkeyPatch, llama: Executor
) -> None:
    """And nobody can connect: a balancer tries another executor at once."""
    provider, told = make(), []
    load = provider._load

    def look(opened: object) -> object:
        told.extend([ask(provider, "/healthz"), ask(provider, "/readyz"), ask(provider, "/status.json")[0]])
        return load(opened)

    monkeypatch.setattr(provider, "_load", look)
    with provider:
        assert told == [(200, "ok\n"), (503, "loading\n"), 200]
        assert ask(provider, "/readyz") == (200, "ready\n")
        Executor(provider.url, llama.token, llama.ca).connect().close()
        with monkeypatch.context() as patch:
            patch.setattr("provider.serve.provider.LIVENESS_SECONDS", 0.05)
            stuck = threading.Event()
            provider.server.service.engine.loop.call_soon_threadsafe(stuck.wait)  # type: ignore[arg-type]
            assert ask(provider, "/healthz") == (503, "stuck\n")
            stuck.set()
        assert ask(provider, "/healthz") == (200, "ok\n")
        provider.drain(1.0)
        assert ask(provider, "/readyz") == (503, "draining\n")
        assert ask(provider, "/healthz") == (200, "ok\n")


def ask(provider: Provider, path: str) -> tuple[int, str]:
    page = http.client.HTTPConnection(provider.admin_url.removeprefix("http://"), timeout=800)
    with contextlib.closing(page):
        page.request("GET", path)
        answer = page.getresponse()
        return answer.status, answer.read().decode()


def test_a_missing_certificate_is_told_before_the_checkpoint_is_read(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="symbiosis-provider certs"):
        make(model_dir=tmp_path / "none", tls_dir=tmp_path).start()
