"""Products of many requests at once: every answer is the one that its request alone would get."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from provider.engine.batching import MULTIPLIERS, Batcher, profile, shapes_of
from provider.engine.latency import LatencyModel
from provider.engine.scheduler import Batch, Objective, Opportunistic, Policy, Work, make_policy
from provider.executor.base import BaseExecutor
from shared.ring.mask_stream import MaskStream
from shared.wire.header import DTYPE_CODES, PRODUCTS, Direction, Header, Operation
from shared.wire.protocol import ExecutorProtocol

TENANTS = 12


@pytest.fixture(scope="module", params=["float32", "bfloat16", "ring"])
def base(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> BaseExecutor:
    return BaseExecutor(checkpoint("llama"), numerics=request.param)


@pytest.fixture(scope="module")
def ring(checkpoint: Callable[[str], Path]) -> BaseExecutor:
    return BaseExecutor(checkpoint("llama"), numerics="ring")


def policy(base: BaseExecutor, name: str = "opportunistic") -> Policy:
    """With windows of one step of rows, so that every larger request is divided."""
    return make_policy(name, LatencyModel(shapes_of(base)), Objective(decode_seconds=1e-6))


def request(base: BaseExecutor, draw: random.Random) -> tuple[Header, torch.Tensor]:
    """Any product that the executor takes, and its payload."""
    group = draw.randrange(len(base.manifest.groups))
    info = base.manifest.groups[group]
    members = draw.randrange(1, 1 << len(info.members))
    direction = draw.choice([Direction.FORWARD, Direction.BACKWARD])
    operation = draw.choice([o for o in sorted(PRODUCTS) if o != 8 or base.manifest.numerics == "ring"])
    rows = draw.choice([1, 1, 1, 2, 17, 100])
    widths = base._shapes[group].plan(direction, members).request_widths
    ring = base.manifest.numerics == "ring"
    dtype = torch.int32 if ring else draw.choice([torch.float32, torch.bfloat16])
    header = Header(operation, direction, DTYPE_CODES[dtype], group, 1, rows, sum(widths), members)
    if operation == Operation.SEED_EFFECT:
        return header, torch.frombuffer(bytearray(draw.randbytes(32)), dtype=torch.uint8)
    if ring:
        return header, MaskStream(draw.randbytes(32)).draw(rows, sum(widths))
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    return header, torch.randn((rows, sum(widths)), generator=generator).to(dtype)


def alone(base: BaseExecutor, header: Header, payload: torch.Tensor) -> torch.Tensor:
    """The answer's payload, computed by itself."""
    blocks = base.product(header.group, header.direction, header.members, base.blocks(header, payload))
    return torch.cat([block.reshape(-1) for block in blocks])


@pytest.mark.parametrize("name", ["opportunistic", "none", "lockstep"])
def test_everybody_gets_their_own_answer(base: BaseExecutor, name: str) -> None:
    """Exactly on the ring; elsewhere up to the order of additions, which depends on the rows of a product."""
    batcher = Batcher(base, policy(base, name))
    protocol = ExecutorProtocol(base.manifest)
    together = threading.Barrier(TENANTS)

    def tenant(number: int) -> None:
        draw = random.Random(number)
        together.wait(60)
        for _ in range(20):
            header, payload = request(base, draw)
            before = payload.clone()
            done = batcher.run(f"tenant {number % 5}", header, base.blocks(header, payload))
            got = torch.cat([block.reshape(-1) for block in done.blocks])
            expected = alone(base, header, before)
            assert torch.equal(payload, before)
            assert got.dtype == expected.dtype
            if base.manifest.numerics == "ring":
                assert torch.equal(got, expected)
            else:
                rough = torch.bfloat16 in (got.dtype, base._weights[0]._weight.dtype)  # type: ignore[attr-defined]
                torch.testing.assert_close(
                    got, expected, rtol=0.02 if rough else 1e-5, atol=0.02 if rough else 1e-5
                )
            # Blocks that lie one behind the other, as the answer's header says.
            answer = protocol.answer(header)
            assert got.numel() == answer.rows * answer.columns
            assert 0 <= done.queue_seconds <= done.reply_seconds

    with ThreadPoolExecutor(TENANTS) as threads:
        for each in [threads.submit(tenant, number) for number in range(TENANTS)]:
            each.result(120)
    assert not batcher._requests
    assert not batcher._busy


class Counted(BaseExecutor):
    """Knows how many rows each product had; one product may be held back."""

    def watch(self) -> None:
        self.rows: list[int] = []
        self.go, self.entered = threading.Event(), threading.Event()
        self.most = 1 << 30

    def product(
        self, group: int, direction: int, members: int, blocks: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        self.rows.append(len(blocks[0]))
        self.entered.set()
        assert self.go.wait(60)
        if len(blocks[0]) > self.most:
            raise MemoryError("no room for this product")
        return super().product(group, direction, members, blocks)


@pytest.fixture
def counted(checkpoint: Callable[[str], Path]) -> Counted:
    made = Counted(checkpoint("llama"), numerics="ring")
    made.watch()
    return made


def rows_of_group_0(base: BaseExecutor, rows: int, seed: int = 0) -> tuple[Header, torch.Tensor]:
    width = base.manifest.groups[0].inputs
    header = Header(Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.int32], 0, 1, rows, width, 1)
    return header, MaskStream(bytes([seed]) * 32).draw(rows, width)


def test_what_arrives_during_a_product_shares_the_next(counted: Counted) -> None:
    batcher = Batcher(counted, Opportunistic(LatencyModel(shapes_of(counted))))
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(
            batcher.run, "first", rows_of_group_0(counted, 1)[0], [rows_of_group_0(counted, 1)[1]]
        )
        assert counted.entered.wait(60)
        asked = [rows_of_group_0(counted, 1 + i, i) for i in range(6)]
        later = [
            threads.submit(batcher.run, f"tenant {i}", header, [payload])
            for i, (header, payload) in enumerate(asked)
        ]
        while len(batcher._requests) < 7:
            assert not any(each.done() for each in later)
        counted.go.set()
        first.result(60)
        answers = [torch.cat(each.result(60).blocks) for each in later]
    assert counted.rows == [1, 1 + 2 + 3 + 4 + 5 + 6]
    for (header, payload), answer in zip(asked, answers, strict=True):
        assert torch.equal(answer.view(-1), alone(counted, header, payload))


def test_a_product_without_memory_fails_whoever_asked_for_too_much(counted: Counted) -> None:
    """Not those who shared it."""
    counted.most = 10
    batcher = Batcher(counted, Opportunistic(LatencyModel(shapes_of(counted))))
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(
            batcher.run, "first", rows_of_group_0(counted, 1)[0], [rows_of_group_0(counted, 1)[1]]
        )
        assert counted.entered.wait(60)
        asked = [rows_of_group_0(counted, rows, rows) for rows in (3, 16, 4)]
        later = [threads.submit(batcher.run, f"tenant {h.rows}", h, [payload]) for h, payload in asked]
        while len(batcher._requests) < 4:
            assert not any(each.done() for each in later)
        counted.go.set()
        first.result(60)
        with pytest.raises(MemoryError):
            later[1].result(60)
        for (header, payload), each in ((asked[0], later[0]), (asked[2], later[2])):
            assert torch.equal(torch.cat(each.result(60).blocks).view(-1), alone(counted, header, payload))
    assert counted.rows[:2] == [1, 23]
    assert not batcher._requests
    header, payload = rows_of_group_0(counted, 5)
    assert torch.equal(
        torch.cat(batcher.run("next", header, [payload]).blocks).view(-1), alone(counted, header, payload)
    )


def test_a_divided_request_that_fails_leaves_nothing_behind(counted: Counted) -> None:
    """Its first window was computed, its second not: the rest is never asked for."""
    counted.go.set()
    batcher = Batcher(counted, policy(counted))
    chat, large = rows_of_group_0(counted, 1), rows_of_group_0(counted, 100)
    batcher.run("chat", chat[0], [chat[1]])  # somebody decodes: windows are small

    def once(*_: object) -> list[torch.Tensor]:
        raise MemoryError

    honest = counted.product

    def second_fails(
        group: int, direction: int, members: int, blocks: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        counted.product = once  # type: ignore[assignment, method-assign]
        return honest(group, direction, members, blocks)

    counted.product = second_fails  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        batcher.run("large", large[0], [large[1]])
    counted.product = honest  # type: ignore[method-assign]
    assert not batcher._requests
    assert len(torch.cat(batcher.run("large", large[0], [large[1]]).blocks)) == 100


def test_a_scheduler_that_fails_keeps_nobody_waiting(ring: BaseExecutor) -> None:
    class Broken(Opportunistic):
        fails = True

        def next(self, now: float) -> list[object] | float | None:  # type: ignore[override]
            if self.fails:
                raise ZeroDivisionError
            return super().next(now)  # type: ignore[return-value]

        def add(self, work: Work, now: float) -> None:
            super().add(work, now)

    broken = Broken(LatencyModel(shapes_of(ring)))
    batcher = Batcher(ring, broken)
    header, payload = rows_of_group_0(ring, 2)
    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(batcher.run, f"tenant {i}", header, [payload]) for i in range(4)]:
            with pytest.raises(RuntimeError, match="the scheduler failed"):
                each.result(60)
    broken.fails = False
    assert len(batcher.run("next", header, [payload]).blocks) == 1


def test_who_was_multiplied_gets_the_answer_though_the_scheduler_fails(ring: BaseExecutor) -> None:
    class Broken(Opportunistic):
        def finished(self, batch: Batch, seconds: float, now: float) -> None:
            raise ZeroDivisionError

    batcher = Batcher(ring, Broken(LatencyModel(shapes_of(ring))))
    header, payload = rows_of_group_0(ring, 2)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(batcher.run, f"tenant {i}", header, [payload]) for i in range(4)]
        errors = [each.exception(60) for each in asked]
    assert None in errors
    assert all(error is None or "the scheduler failed" in str(error) for error in errors)


def test_no_thread_to_be_had(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds others waiting and cannot start the engine does its work."""
    batcher = Batcher(counted, policy(counted))
    header, payload = rows_of_group_0(counted, 2)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "products":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(batcher.run, "tenant 0", header, [payload])]
        assert counted.entered.wait(60)
        asked += [threads.submit(batcher.run, f"tenant {i}", header, [payload]) for i in range(1, 4)]
        while batcher.waiting < 4:
            time.sleep(0.001)
        counted.go.set()
        for each in asked:
            assert len(each.result(60).blocks) == 1
    assert not batcher._busy


def test_answers_hold_no_memory_of_others(counted: Counted) -> None:
    """A tenant that does not read its answer keeps that one alone in memory."""
    batcher = Batcher(counted, Opportunistic(LatencyModel(shapes_of(counted))))
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(
            batcher.run, "first", rows_of_group_0(counted, 1)[0], [rows_of_group_0(counted, 1)[1]]
        )
        assert counted.entered.wait(60)
        asked = [rows_of_group_0(counted, rows) for rows in (1, 200)]
        later = [threads.submit(batcher.run, f"tenant {h.rows}", h, [payload]) for h, payload in asked]
        while len(batcher._requests) < 3:
            assert not any(each.done() for each in later)
        counted.go.set()
        first.result(60)
        small = later[0].result(60).blocks
    assert [block.untyped_storage().nbytes() for block in small] == [block.nbytes for block in small]


def test_few_threads_multiply(counted: Counted) -> None:
    """OpenMP keeps a team for each, and a process may have only so many threads."""
    counted.go.set()
    batcher, header = Batcher(counted), rows_of_group_0(counted, 1)[0]
    who: set[int] = set()
    honest = counted.product

    def watched(*asked: Any) -> list[torch.Tensor]:
        who.add(threading.get_ident())
        return honest(*asked)

    counted.product = watched  # type: ignore[method-assign]
    stay = threading.Barrier(3 * MULTIPLIERS)

    def tenant(number: int) -> None:
        for _ in range(20):
            batcher.run(f"tenant {number}", header, [rows_of_group_0(counted, 1)[1]])
        stay.wait(60)  # all at once, so that no thread's number serves twice

    with ThreadPoolExecutor(3 * MULTIPLIERS) as threads:
        for each in [threads.submit(tenant, number) for number in range(3 * MULTIPLIERS)]:
            each.result(60)
    assert 1 <= len(who) <= MULTIPLIERS + 1


def test_a_profile_forecasts_products(ring: BaseExecutor) -> None:
    made = profile(ring, rounds=1)
    for group in range(len(ring.manifest.groups)):
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            line = made.line(group, direction)
            assert line.fixed > 0
            assert line.per_row > 0
