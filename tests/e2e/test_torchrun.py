"""Workers on several machines: `torchrun` with two local nodes, and a machine that vanishes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from commands import BASE_MODEL, ROOT
from conftest import RING, Executor
from raw_peers import eventually
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

import tenant_sdk
from provider.workers import distributed
from provider.workers.distributed import WaitForRank, join
from provider.workers.rank import LOST
from shared.command_line import version
from shared.errors import ConfigurationError
from shared.launching import free_port

SECONDS = 60.0
MASKED = {"privacy": "one-time", "mask_sources": [f"local:{BASE_MODEL}"], "patience": SECONDS}
LOCAL = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
# What a rank that only multiplies is told: it opens none of it.
SERVE = ["-m", "provider.cli", "serve", str(BASE_MODEL), "--tls-dir", "none", "--token-file", "none"]


def tree(pid: int) -> list[int]:
    """A process and its descendants, these first."""
    children = [
        int(child)
        for each in Path(f"/proc/{pid}/task").glob("*/children")
        for child in each.read_text().split()
    ]
    return [one for child in children for one in tree(child)] + [pid]


@contextmanager
def other_rank(command: list[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, *command], env={**os.environ, **environment}, stdin=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        for pid in tree(process.pid) if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.wait()


def ready(executor: Executor) -> str:
    """What the probe says with 503; empty: it is ready."""
    try:
        with urllib.request.urlopen(f"{executor.admin_url}/readyz", timeout=SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return error.read().decode()


def logits(session: tenant_sdk.Session, at: int) -> torch.Tensor:
    with torch.no_grad():
        return session.load_model(progress=False)(torch.arange(40).view(1, -1) + at).logits


@pytest.fixture(scope="module")
def expected(serve: Callable[..., Executor]) -> list[torch.Tensor]:
    with serve(BASE_MODEL, numerics=RING).connect(**MASKED) as session:
        return [logits(session, at) for at in range(2)]


def test_torchrun_with_two_nodes(
    serve_process: Callable[..., Executor], expected: list[torch.Tensor]
) -> None:
    """A worker that is killed joins again, without torchrun's starting everything anew."""
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--node-rank"]
    with other_rank([*torchrun, "1", *SERVE], **LOCAL) as node:
        executor = serve_process(
            BASE_MODEL,
            "--numerics",
            RING,
            "--threads",
            "1",
            launcher=[sys.executable, *torchrun, "0"],
            environment=LOCAL,
        )
        with executor.connect(**MASKED) as session:
            assert torch.equal(logits(session, 0), expected[0])
            worker, supervise, _torchrun = tree(node.pid)[-3:]
            os.kill(worker, signal.SIGKILL)
            assert torch.equal(logits(session, 1), expected[1])
            assert session.stats.verified_rows
        eventually(lambda: not ready(executor))
        assert supervise in tree(node.pid)
        assert worker not in tree(node.pid)
        assert executor.process is not None
        serving = tree(executor.process.pid)[-2]
        os.kill(serving, signal.SIGTERM)
        assert executor.process.wait(SECONDS) == 0  # drained
        assert node.wait(SECONDS) == 0  # for the executor said that there is nothing more to do


def test_a_machine_that_vanishes(
    serve_process: Callable[..., Executor], expected: list[torch.Tensor]
) -> None:
    """Without a word: noticed in seconds; another one in its place is made use of."""
    world = {**LOCAL, "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with other_rank(SERVE, RANK="1", **world) as machine:
        executor = serve_process(
            BASE_MODEL, "--numerics", RING, "--threads", "1", environment={"RANK": "0", **world}
        )
        with executor.connect(**MASKED) as session:
            assert torch.equal(logits(session, 0), expected[0])
            for pid in tree(machine.pid):
                os.kill(pid, signal.SIGSTOP)
            eventually(lambda: "worker 1 is being started again" in ready(executor))
            assert f"rank 1 on {socket.gethostname()} is silent" in ready(executor)
            with other_rank(SERVE, RANK="1", **world):
                assert torch.equal(logits(session, 1), expected[1])
                assert not ready(executor)


@pytest.mark.parametrize(
    ("environment", "options", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "two"}, [], "WORLD_SIZE is 'two', which is no number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, [], "RANK=2 is not below WORLD_SIZE=2"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"},
            ["--workers", "2"],
            "--workers 2 does not go with torchrun",
        ),
    ],
)
def test_what_cannot_be_is_told(environment: dict[str, str], options: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, *SERVE, *options],
        env={**os.environ, **LOCAL, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 78
    assert said in " ".join(done.stderr.split())


def test_a_worker_ends_with_what_looks_after_it() -> None:
    """Or it would multiply for nobody who could end it; here it waits for an executor."""
    world = {**LOCAL, "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    worker = subprocess.Popen(
        [sys.executable, "-m", "provider.workers.rank"],
        env={**os.environ, **world},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with worker:
        _, said = worker.communicate(timeout=SECONDS)  # which closes standard input
        assert (worker.returncode, said) == (1, b"")  # and not that of one that shall join again


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_rank_of_another_version_is_refused_by_both_ends(store: TCPStore, tmp_path: Path) -> None:
    """Before they are linked, and with both versions."""
    installed = tmp_path / "symbiosis_executor-9.9.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: symbiosis-executor\nVersion: 9.9\n")
    world = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(store.port)}
    world |= {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TORCHELASTIC_RUN_ID": "run"}
    said = f"rank 1 is of version 9.9, and the executor of version {version()}"
    rank = WaitForRank(PrefixStore("symbiosis/run/0", store), 1)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "provider.workers.rank"],
        env={**os.environ, **LOCAL, **world},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        with pytest.raises(ConfigurationError, match=re.escape(said)):
            rank(threading.Event())
        assert worker.stderr is not None
        assert said in worker.stderr.read()
        assert worker.wait(SECONDS) == LOST  # so that it joins once it is the same version


def test_a_rank_that_comes_again_in_another_version(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that it said the last time is taken for this time's."""
    rank, theirs = WaitForRank(store, 1), TCPStore("127.0.0.1", store.port)  # each end waits at its own
    with monkeypatch.context() as older:
        older.setattr(distributed, "version", lambda: "0.9")
        for end in (lambda: join(theirs, 1), lambda: rank(threading.Event())):
            with pytest.raises(ConfigurationError, match=r"rank 1 is of version 0\.9, and the executor"):
                end()
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(join, theirs, 1)
        executor = rank(threading.Event()).link
        worker.result(SECONDS).send(1, b"here")
        assert executor.receive(SECONDS) == (1, b"here")
        for link in (worker.result(), executor):
            link.close()
