"""An executor whose layers are shared among processes: the same bits, and what happens when one dies."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RING

from provider.engine.engine import Engine
from provider.engine.scheduler import Opportunistic
from provider.executor.base import BaseExecutor
from provider.workers.link import LocalLink
from provider.workers.memory import Segments
from provider.workers.pool import WorkerPool
from shared.errors import WireError
from shared.wire.header import DTYPE_CODES, DTYPE_NAMES, Direction, Header, Operation
from shared.wire.protocol import GroupShape

SECONDS = 60.0


DIVIDED = [("llama", RING, 3, 1), ("gpt2", RING, 4, 2), ("llama", "float32", ["cpu", "cpu"], 2)]


def engine_of(pool: WorkerPool) -> Engine:
    return Engine(pool.lanes, Opportunistic(pool.latency), pool.latency, lane_of=pool.lane_of.__getitem__)


@pytest.fixture(scope="module", params=DIVIDED, ids=str)
def both(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]
) -> Iterator[tuple[BaseExecutor, Engine, WorkerPool]]:
    architecture, numerics, workers, stripes = request.param
    folder = checkpoint(architecture)
    pool = WorkerPool(folder, workers, stripes, numerics=numerics, threads=1)
    engine = engine_of(pool)
    try:
        yield BaseExecutor(folder, numerics=numerics), engine, pool
    finally:
        engine.close()


def requests(executor: BaseExecutor, rows: int) -> Iterator[tuple[Header, torch.Tensor]]:
    """Of every group, in both directions, by all members and by the first alone."""
    generator = torch.Generator().manual_seed(0)
    manifest = executor.manifest
    dtype = DTYPE_NAMES[manifest.wire_dtypes[0]]
    for group, info in enumerate(manifest.groups):
        shape = GroupShape.of(info, manifest.numerics)
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            for members in {1, (1 << len(info.members)) - 1}:
                columns = shape.plan(direction, members).request_columns
                payload: Any = torch.randn((rows, columns), generator=generator)
                if dtype == torch.int32:
                    payload = torch.randint(
                        -(2**31), 2**31, (rows, columns), generator=generator, dtype=torch.int32
                    )
                yield (
                    Header(
                        Operation.PRODUCT, direction, DTYPE_CODES[dtype], group, 1, rows, columns, members
                    ),
                    payload,
                )


def test_the_manifest_is_that_of_one_process(both: tuple[BaseExecutor, Engine, WorkerPool]) -> None:
    executor, _, pool = both
    assert pool.manifest == executor.manifest


@pytest.mark.parametrize("rows", [1, 7, 130])
def test_answers_are_those_of_one_process_to_the_bit(
    both: tuple[BaseExecutor, Engine, WorkerPool], rows: int
) -> None:
    executor, engine, _ = both
    asked = list(requests(executor, rows))
    futures = [engine.submit_threadsafe("a", 1, header, payload) for header, payload in asked]
    for (header, payload), future in zip(asked, futures, strict=True):
        blocks = executor.blocks(header, payload)
        expected = executor.compute(header.group, header.direction, header.members, blocks)
        answer = torch.cat([block.reshape(-1) for block in future.result(SECONDS).blocks])
        wanted = torch.cat([block.reshape(-1) for block in expected])
        if wanted.dtype == torch.int32:
            assert torch.equal(answer, wanted)
        else:  # sums of floats, in an order that threads may change
            assert torch.allclose(answer, wanted, atol=1e-5)


def answered(engine: Engine, header: Header, payload: torch.Tensor) -> tuple[torch.Tensor, int]:
    """An answer, and how often it had to be asked for again."""
    for lost in range(10):
        try:
            return engine.submit_threadsafe("a", 1, header, payload).result(SECONDS).blocks[0], lost
        except WireError as error:
            if error.code != "unavailable":
                raise
    raise AssertionError("it is never there")


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_lost_is_started_again(
    checkpoint: Callable[[str], Path], kill: signal.Signals
) -> None:
    """Whoever asked it asks again; what the other worker holds is answered meanwhile."""
    executor = BaseExecutor(checkpoint("llama"), numerics=RING)
    pool = WorkerPool(checkpoint("llama"), 2, numerics=RING, threads=1)
    engine = engine_of(pool)
    try:
        lost, other = (lane.workers[0] for lane in pool.lanes)
        pids = lost.pid, other.pid
        os.kill(lost.pid, kill)
        for header, payload in requests(executor, 3):
            answer, repeated = answered(engine, header, payload)
            assert repeated <= (pool.lane_of[header.group] == 0)
            blocks = executor.blocks(header, payload)
            assert torch.equal(
                answer, executor.compute(header.group, header.direction, header.members, blocks)[0]
            )
        assert (lost.restarts, other.restarts) == (1, 0)
        assert lost.pid != pids[0]
        assert other.pid == pids[1]
        assert not pool.not_ready()
    finally:
        engine.close()


def test_a_link_with_a_high_descriptor() -> None:
    """As in an executor with a thousand connections."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most <= 1100:
        pytest.skip("this machine allows too few open files")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = LocalLink(socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD, 1100)))
        with pytest.raises(TimeoutError):
            link.receive(0.01)
        LocalLink(theirs).send(7, b"content")
        assert link.receive(SECONDS) == (7, b"content")
        link.close()


def test_memory_is_used_again_when_nobody_reads_it() -> None:
    segments = Segments()
    first, view = segments.take(5 << 20)
    answer = view.tensor(64, torch.int32, (2, 3))
    del view
    second, _ = segments.take(1000)
    assert second.number != first.number  # the answer is still to be read
    answer.fill_(7)
    del answer
    third, _ = segments.take(2 << 20)
    assert third.number == first.number
