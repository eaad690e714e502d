"""Workers that Ray places: killed ones come back, on the machines that there are."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from commands import BASE_MODEL
from conftest import RING, Executor
from raw_peers import eventually
from test_torchrun import LOCAL, MASKED, SECONDS, logits, other_rank, ready, tree

from shared.launching import free_port

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"
)
RAY = ["--numerics", RING, "--launcher", "ray", "--workers"]


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def workers(pid: int) -> set[int]:
    """Processes of workers that are descendants of this one."""
    command = b"\0-m\0provider.workers.rank\0"
    return {
        pid for pid in tree(pid) if alive(pid) and Path(f"/proc/{pid}/cmdline").read_bytes().endswith(command)
    }


@needs_ray
def test_workers_and_actors_that_are_killed(
    serve: Callable[..., Executor], serve_process: Callable[..., Executor]
) -> None:
    """Both come back, and a tenant gets the bits of one process."""
    with serve(BASE_MODEL, numerics=RING).connect(**MASKED) as session:
        expected = [logits(session, at) for at in range(3)]
    executor = serve_process(BASE_MODEL, *RAY, "2")
    assert executor.process is not None
    serving = executor.process.pid
    first, second = workers(serving)
    actor, other = parent(first), parent(second)
    assert actor != other
    with executor.connect(**MASKED) as session:
        assert torch.equal(logits(session, 0), expected[0])
        os.kill(first, signal.SIGKILL)
        assert torch.equal(logits(session, 1), expected[1])
        eventually(lambda: not ready(executor))
        (again,) = workers(serving) - {first, second}
        assert parent(again) == actor
        os.kill(other, signal.SIGKILL)
        eventually(lambda: not alive(second))  # or two would say that they are the same
        assert torch.equal(logits(session, 2), expected[2])
        assert session.stats.verified_rows
        eventually(lambda: not ready(executor))
        (back,) = workers(serving) - {again}
        assert parent(back) not in (actor, other)
    started = tree(serving)
    executor.process.send_signal(signal.SIGTERM)
    assert executor.process.wait(SECONDS) == 0  # drained
    eventually(lambda: not any(map(alive, started)))


def start(*options: str) -> list[str]:
    """A machine of a cluster, for a command line; with room for one worker."""
    own = ["--block", "--num-cpus", "1", "--object-store-memory", str(100 << 20), "--disable-usage-stats"]
    return ["-m", "ray.scripts.scripts", "start", *options, *own]


@needs_ray
def test_a_machine_of_the_cluster_vanishes(
    serve: Callable[..., Executor], serve_process: Callable[..., Executor]
) -> None:
    """Its worker goes to another one; and workers end with their executor, however that ends."""
    with serve(BASE_MODEL, numerics=RING).connect(**MASKED) as session:
        expected = [logits(session, at) for at in range(2)]
    address = f"127.0.0.1:{(port := free_port())}"
    cluster = {**LOCAL, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with ExitStack() as opened:
        head = start("--head", "--port", port, "--include-dashboard", "false")
        opened.enter_context(other_rank(head, **cluster))
        eventually(lambda: listens(int(port)))
        with other_rank(start("--address", address), **cluster) as machine:
            executor = serve_process(BASE_MODEL, *RAY, "2", environment={**cluster, "RAY_ADDRESS": address})
            session = opened.enter_context(executor.connect(**MASKED))
            assert torch.equal(logits(session, 0), expected[0])
            assert len(workers(machine.pid)) == 1
        with other_rank(start("--address", address), **cluster) as machine:
            assert torch.equal(logits(session, 1), expected[1])
            eventually(lambda: not ready(executor))
            (worker,) = workers(machine.pid)
            assert executor.process is not None
            executor.process.kill()
            eventually(lambda: not alive(worker))
