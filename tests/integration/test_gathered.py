"""Workers that hold shards and gather them, as FSDP does: what they answer and hold, and when one dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from lanes import submitted
from raw_peers import eventually
from test_workers import SECONDS, answered, compare, engine_of, requests
from transformers import LlamaConfig, LlamaForCausalLM

from provider.engine.engine import Engine
from provider.executor.base import BaseExecutor
from provider.workers.gathered import GatheredLane, GatheredLatency
from provider.workers.link import Assignment
from provider.workers.pool import Sharding, WorkerPool
from shared.errors import SymbiosisError, WireError
from shared.latency import LinearLatency
from shared.wire.header import Direction
from shared.wire.messages import GroupInfo, Member
from shared.wire.protocol import GroupShape

GROUP = GroupInfo(64, (Member("layers.0.mlp.gate_proj", 96, "model.layers.0.mlp.gate_proj.weight"),))


class Sharded(NamedTuple):
    """Workers, and one process with the same weights."""

    executor: BaseExecutor
    engine: Engine
    pool: WorkerPool
    tolerance: float


def sharded(folder: Path, numerics: str, workers: int, tolerance: float) -> Iterator[Sharded]:
    pool = WorkerPool(folder, Sharding(["cpu"] * workers, threads=1, fsdp=True), numerics=numerics)
    engine = engine_of(pool)
    try:
        yield Sharded(BaseExecutor(folder, numerics=numerics), engine, pool, tolerance)
    finally:
        engine.close()


# Sums of up to 256 products of numbers of about one: another order of the terms changes the last bits, of
# which float32 has 24 and bfloat16 8.


@pytest.fixture(scope="module")
def llama(checkpoint: Callable[[str], Path]) -> Iterator[Sharded]:
    """Groups of several layers."""
    yield from sharded(checkpoint("llama"), "float32", 2, 1e-5)


@pytest.fixture(scope="module")
def gpt2(checkpoint: Callable[[str], Path]) -> Iterator[Sharded]:
    """Weights stored the other way round, whose outputs three do not divide."""
    yield from sharded(checkpoint("gpt2"), "bfloat16", 3, 2e-2)


@pytest.fixture(params=["llama", "gpt2"])
def both(request: pytest.FixtureRequest) -> Sharded:
    found: Sharded = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_products_are_those_of_one_process(both: Sharded, rows: int) -> None:
    """Also with fewer rows than workers, of which some then only gather."""
    compare(both.executor, both.engine, rows, both.tolerance)


def test_rows_of_several_tenants_in_one_batch(both: Sharded) -> None:
    """Each gets its own, whichever worker had them; who sends NaN fails alone, and nobody waits for ever."""
    executor, engine, _, tolerance = both
    header, payload = next(requests(executor, 5))
    wrong = payload.clone()
    wrong[2, 0] = torch.nan
    sent = [payload + 1, wrong, payload[:2], payload * 2, payload[:1]]
    futures = [
        submitted(engine, str(tenant), tenant, header._replace(rows=len(rows)), rows)
        for tenant, rows in enumerate(sent)
    ]
    with pytest.raises(WireError, match="NaN"):
        futures[1].result(SECONDS)
    for rows, future in zip(sent, futures, strict=True):
        if rows is not wrong:
            expected = executor.compute(header.group, header.direction, header.members, [rows])
            for tensor, wanted in zip(future.result(SECONDS).tensors, expected, strict=True):
                torch.testing.assert_close(tensor, wanted, atol=2 * tolerance, rtol=tolerance)
    with pytest.raises(WireError, match="NaN"):  # a batch in which there is nothing to multiply
        submitted(engine, "a", 1, header, wrong).result(SECONDS)
    compare(executor, engine, 3, tolerance)


def test_windows_are_worth_a_gather() -> None:
    """A product that gathers for longer than a window is long has rows all the same."""
    latency = GatheredLatency([GroupShape(4, (4,))])
    latency.set(0, Direction.FORWARD, LinearLatency(fixed=0.5, per_row=0.001))
    assert latency.rows(0, Direction.FORWARD, 1, 0.25) == 500
    assert latency.rows(0, Direction.FORWARD, 1, 2.5) == 2000


def answers_again(both: Sharded) -> int:
    """Everything is asked for, and right; how often an answer was lost."""
    executor, engine, pool, tolerance = both
    repeated = 0
    for header, payload in requests(executor, 3):
        answer, lost = answered(engine, header, payload)
        repeated += lost
        tensors = executor.tensors(header, payload)
        expected = executor.compute(header.group, header.direction, header.members, tensors)[0]
        torch.testing.assert_close(answer, expected, atol=tolerance, rtol=tolerance)
    assert not pool.not_ready()
    return repeated


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_when_one_is_lost_all_start_again(llama: Sharded, kill: signal.Signals) -> None:
    """A group of processes that gather cannot be mended. Who asked is told to ask again."""
    workers = llama.pool.lanes[0].workers
    pids = {worker.pid for worker in workers}
    os.kill(workers[1].pid, kill)
    assert answers_again(llama) <= 1
    assert not pids & {worker.pid for worker in workers}


def test_one_that_is_lost_while_it_loads(llama: Sharded) -> None:
    """Who waits for it starts again too, and meets it elsewhere."""
    workers = llama.pool.lanes[0].workers
    pids, restarts = [worker.pid for worker in workers], [worker.restarts for worker in workers]
    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: not any(worker.pid in pids for worker in workers))
    os.kill(workers[1].pid, signal.SIGKILL)
    assert answers_again(llama) <= 1
    assert [worker.restarts for worker in workers] == [before + 2 for before in restarts]


def test_a_worker_that_cannot_load_ends_all(checkpoint: Callable[[str], Path]) -> None:
    """With its sentence, and before those who wait for it give up."""
    with pytest.raises(SymbiosisError, match="xpu"):
        WorkerPool(checkpoint("llama"), Sharding(["xpu"] * 2, threads=1, fsdp=True), numerics="float32")
    lane = GatheredLane(
        "0", Assignment(str(checkpoint("llama")), "float32", "cpu", 1, {0: GROUP}), 2, lambda _: 1.0
    )
    try:
        os.kill(lane.workers[1].pid, signal.SIGKILL)
        with pytest.raises(SymbiosisError, match=r"worker 0\.1 ended"):
            lane.ready()
    finally:
        lane.close()


def anonymous_mib(pid: int) -> float:
    """Memory that is this process's own: no pages of files, which libraries are."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:")) / 1024


def test_each_worker_holds_its_shard_alone(llama: Sharded, tmp_path: Path) -> None:
    """Against workers of a model of nearly no weights."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=128,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    without = max(anonymous_mib(worker.pid) for worker in llama.pool.lanes[0].workers)
    pool = WorkerPool(tmp_path, Sharding(["cpu"] * 2, threads=1, fsdp=True), numerics="float32")
    try:
        held = [anonymous_mib(worker.pid) for worker in pool.lanes[0].workers]
    finally:
        pool.close()
    whole = 4 * sum(shape.size for shape in pool.latency.shapes) / 2**20
    assert whole > 200  # of which what is kept after a product, of one layer, is little
    assert max(held) - without < 0.75 * whole
