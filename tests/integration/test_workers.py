"""An executor whose layers are shared among processes: the same bits, and what happens when one dies."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import RING
from lanes import submitted
from raw_peers import eventually
from safetensors.torch import load_file, save_file

from provider.engine.engine import Engine
from provider.engine.lanes import BatchResult, Request, RowRange
from provider.executor.base import BaseExecutor
from provider.workers import process, worker
from provider.workers.link import REFUSED, Assignment, FailureMessage, LocalLink
from provider.workers.memory import SegmentPool
from provider.workers.pool import Sharding, WorkerPool
from provider.workers.process import Process
from shared.errors import WireError
from shared.ring.upper_bits import take_upper_bits
from shared.wire.header import (
    ANSWER_BITS,
    DTYPE_CODES,
    DTYPE_NAMES,
    RINGS,
    SEED_BYTES,
    Direction,
    Header,
    Operation,
)
from shared.wire.protocol import GroupShape

SECONDS = 800.0


DIVIDED = [("llama", RING, 3, 1), ("gpt2", RING, 4, 2), ("llama", "float32", 2, 2)]


def engine_of(pool: WorkerPool) -> Engine:
    return pool.engine()


@pytest.fixture(scope="module", params=DIVIDED, ids=str)
def both(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]
) -> Iterator[tuple[BaseExecutor, Engine, WorkerPool]]:
    architecture, numerics, workers, stripes = request.param
    folder = checkpoint(architecture)
    pool = WorkerPool(folder, Sharding(["cpu"] * workers, stripes, threads=1), numerics=numerics)
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
                columns = shape.widths(direction, members).request_columns
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


def compare(executor: BaseExecutor, engine: Engine, rows: int, tolerance: float) -> None:
    """Everything is asked for at once, and answered as one process answers it; 0.0: to the bit."""
    asked = list(requests(executor, rows))
    futures = [submitted(engine, "a", 1, header, payload) for header, payload in asked]
    for (header, payload), future in zip(asked, futures, strict=True):
        tensors = executor.tensors(header, payload)
        expected = executor.compute(header.group, header.direction, header.members, tensors)
        answer = torch.cat([tensor.reshape(-1) for tensor in future.result(SECONDS).tensors])
        wanted = torch.cat([tensor.reshape(-1) for tensor in expected])
        torch.testing.assert_close(answer, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [1, 7, 130])
def test_answers_are_those_of_one_process_to_the_bit(
    both: tuple[BaseExecutor, Engine, WorkerPool], rows: int
) -> None:
    """But for sums of floats, in an order that threads may change."""
    executor, engine, _ = both
    compare(executor, engine, rows, 1e-5 if executor.manifest.numerics == "float32" else 0.0)


def test_batches_of_answers_of_all_widths(both: tuple[BaseExecutor, Engine, WorkerPool]) -> None:
    """Of one group at once, so that they share products; also of this process, by its own engine."""
    executor, engine, _ = both
    if executor.manifest.numerics not in RINGS:
        pytest.skip("floats are answered whole")
    alone = Engine.of(executor)
    try:
        for header, payload in requests(executor, 5):
            tensors = executor.tensors(header, payload)
            (whole,) = executor.compute(header.group, header.direction, header.members, tensors)
            for each in (engine, alone):
                asked = [header._replace(answer_bits=bits) for bits in 2 * ANSWER_BITS]
                futures = [submitted(each, "a", 1, one, payload) for one in asked]
                for one, future in zip(asked, futures, strict=True):
                    answer = torch.cat([tensor.reshape(-1) for tensor in future.result(SECONDS).tensors])
                    assert torch.equal(answer, take_upper_bits(whole, one.answer_bits).view(-1))
    finally:
        alone.close()


def answered(engine: Engine, header: Header, payload: torch.Tensor) -> tuple[torch.Tensor, int]:
    """An answer, and how often it was lost."""
    lost = 0
    for _ in range(60):  # for a second each, if the worker is unavailable
        try:
            return submitted(engine, "a", 1, header, payload).result(SECONDS).tensors[0], lost
        except WireError as error:
            if error.code not in ("unavailable", "restarting"):
                raise
            lost += error.code == "unavailable"
    raise AssertionError("it is never there")


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_lost_is_started_again(
    checkpoint: Callable[[str], Path], kill: signal.Signals
) -> None:
    """Whoever asked it asks again; what the other worker holds is answered meanwhile."""
    executor = BaseExecutor(checkpoint("llama"), numerics=RING)
    pool = WorkerPool(checkpoint("llama"), Sharding(["cpu"] * 2, threads=1), numerics=RING)
    engine = engine_of(pool)
    try:
        lost, other = (lane.workers[0] for lane in pool.lanes)
        pids = lost.pid, other.pid
        os.kill(lost.pid, kill)
        for header, payload in requests(executor, 3):
            answer, repeated = answered(engine, header, payload)
            assert repeated <= (pool.lane_of[header.group] == 0)
            tensors = executor.tensors(header, payload)
            assert torch.equal(
                answer, executor.compute(header.group, header.direction, header.members, tensors)[0]
            )
        assert (lost.restarts, other.restarts) == (1, 0)
        assert lost.pid != pids[0]
        assert other.pid == pids[1]
        assert not pool.not_ready()
    finally:
        engine.close()


def batch_of(
    pool: WorkerPool, group: int, rows: int, operation: Operation = Operation.PRODUCT
) -> list[RowRange]:
    info, seeded = pool.manifest.groups[group], operation == Operation.SEED_EFFECT
    payload = torch.ones((1, SEED_BYTES) if seeded else (rows, info.inputs), dtype=torch.int32)
    payload = payload.to(torch.uint8) if seeded else payload
    members = (1 << len(info.members)) - 1
    header = Header(
        operation, Direction.FORWARD, DTYPE_CODES[torch.int32], group, 1, rows, info.inputs, members
    )
    return [RowRange(Request(header, payload), 0, rows)]


def multiplied(engine: Engine, pool: WorkerPool, batch: list[RowRange]) -> BatchResult:
    """By the first lane, whatever the scheduler would make of it."""
    found: Future[BatchResult] = Future()

    def start() -> None:
        pool.lanes[0].start(batch).add_done_callback(lambda future: found.set_result(future.result()))

    engine.loop.call_soon_threadsafe(start)
    return found.result(SECONDS)


def address_space(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


def test_a_product_for_which_there_is_no_memory_fails_alone(checkpoint: Callable[[str], Path]) -> None:
    """In the product itself, and where the memory of its rows cannot be mapped; the worker stays."""
    pool = WorkerPool(checkpoint("llama"), Sharding(["cpu"] * 1, threads=1), numerics=RING)
    engine, (worker,) = engine_of(pool), pool.lanes[0].workers
    pid, no_limit = worker.pid, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    group = max(range(len(pool.manifest.groups)), key=lambda g: len(pool.manifest.groups[g].members))
    few, more = (batch_of(pool, group, rows) for rows in (3, 600_000))
    many = batch_of(pool, group, 200_000, Operation.SEED_EFFECT)  # whose rows are drawn by the worker

    def answer(batch: list[RowRange]) -> torch.Tensor | Exception:
        (found,) = multiplied(engine, pool, batch).answers
        return found if isinstance(found, Exception) else found[0]

    def is_right(batch: list[RowRange]) -> bool:
        header, payload = batch[0].request.header, batch[0].request.payload
        found, (expected,) = (
            answer(batch),
            executor.compute(
                header.group, header.direction, header.members, executor.tensors(header, payload)
            ),
        )
        return isinstance(found, torch.Tensor) and torch.equal(found, expected)

    executor = BaseExecutor(checkpoint("llama"), numerics=RING)
    try:
        assert is_right(many)  # its memory is mapped from now on
        resource.prlimit(pid, resource.RLIMIT_AS, (address_space(pid) + (16 << 20), resource.RLIM_INFINITY))
        failed = answer(many)
        assert "in a worker: " in str(failed)
        assert "allocate" in str(failed)
        assert is_right(few)
        failed = answer(more)
        assert "memory" in str(failed)
        assert is_right(few)
        resource.prlimit(pid, resource.RLIMIT_AS, no_limit)
        assert is_right(more)
        assert (worker.pid, worker.restarts) == (pid, 0)
    finally:
        engine.close()


def test_a_worker_without_memory_to_start_is_tried_again_with_pauses(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = WorkerPool(checkpoint("llama"), Sharding(["cpu"] * 2, threads=1), numerics=RING)
    engine = engine_of(pool)
    lost, other = (lane.workers[0] for lane in pool.lanes)
    pauses, tries = list[float](), list[int]()

    def starved(stop: threading.Event) -> Process:
        made = Process(stop)
        tries.append(made.pid)
        if len(tries) < 3:
            resource.prlimit(made.pid, resource.RLIMIT_AS, (64 << 20, 64 << 20))
        return made

    def waited(seconds: float) -> bool:
        pauses.append(seconds)
        return lost._closing.is_set()

    monkeypatch.setattr(lost, "_start", starved)
    monkeypatch.setattr(lost._closing, "wait", waited)
    said = set()
    try:
        os.kill(lost.pid, signal.SIGKILL)
        served = [(h, p) for h, p in requests(BaseExecutor(checkpoint("llama"), numerics=RING), 2)]
        deadline = time.monotonic() + SECONDS
        while lost.restarts == 0 or pool.not_ready():
            assert time.monotonic() < deadline
            said.add(pool.not_ready())
            header, payload = next((h, p) for h, p in served if pool.lane_of[h.group] == 1)
            submitted(engine, "a", 1, header, payload).result(SECONDS)
        assert any("ended while it loaded its share" in why and "memory" in why for why in said)
        assert pauses == list(process.BACKOFF_SECONDS[:3])
        assert (lost.restarts, other.restarts) == (3, 0)
        header, payload = next((h, p) for h, p in served if pool.lane_of[h.group] == 0)
        answered(engine, header, payload)
    finally:
        engine.close()


def test_other_floats_in_the_same_folder_are_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """By a worker that is started again; bounds and scales, which show it on the ring, floats have none."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    pool = WorkerPool(folder, Sharding(["cpu"] * 1, threads=1), numerics="float32")
    engine, (lost,) = engine_of(pool), pool.lanes[0].workers
    header, payload = next(requests(BaseExecutor(folder, numerics="float32"), 3))
    weights, kept = folder / "model.safetensors", tmp_path / "kept"
    try:
        expected, _ = answered(engine, header, payload)
        weights.rename(kept)
        others = {name: tensor + 1 for name, tensor in load_file(kept).items()}
        save_file(others, weights, {"format": "pt"})
        os.kill(lost.pid, signal.SIGKILL)
        eventually(lambda: "finds other weights than before" in pool.not_ready())
        kept.rename(weights)
        answer, _ = answered(engine, header, payload)
        assert torch.allclose(answer, expected, atol=1e-5)
    finally:
        engine.close()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9\nat"
        ),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=str,
)
def test_a_share_for_which_there_is_no_memory_is_refused_in_a_sentence(
    error: Exception, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise error

    monkeypatch.setattr(worker, "load", load)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assignment = Assignment(str(checkpoint("llama")), RING, "cpu", 1, {})
        worker.Worker(LocalLink(theirs))._assign(assignment)
        kind, content = LocalLink(ours).receive()
    assert kind == REFUSED
    told = msgspec.msgpack.decode(content, type=FailureMessage).message
    assert told.startswith("not enough memory to load ")
    assert "\n" not in told


def test_an_executor_without_memory_for_a_batch_fails_that_alone(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = WorkerPool(checkpoint("llama"), Sharding(["cpu"] * 1, threads=1), numerics=RING)
    engine = engine_of(pool)

    def full(*_: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    try:
        with monkeypatch.context() as patch:
            patch.setattr("provider.workers.memory.SharedMemory", full)
            (answer,) = multiplied(engine, pool, batch_of(pool, 0, 3)).answers
        assert isinstance(answer, OSError)
        (answer,) = multiplied(engine, pool, batch_of(pool, 0, 3)).answers
        assert not isinstance(answer, Exception)
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
    segments = SegmentPool()
    first, view = segments.allocate(5 << 20)
    answer = view.tensor(64, torch.int32, (2, 3))
    del view
    second, _ = segments.allocate(1000)
    assert second.number != first.number  # the answer is still to be read
    answer.fill_(7)
    del answer
    third, _ = segments.allocate(2 << 20)
    assert third.number == first.number
