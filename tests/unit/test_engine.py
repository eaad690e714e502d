"""Products of many requests at once: every answer is the one that its request alone would get."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import submitted
from raw_peers import eventually

from provider.engine.engine import LANE_WAIT_SECONDS, Completion, Engine
from provider.engine.lanes import BatchResult, ProcessLane, RowRange
from provider.engine.latency import LatencyModel
from provider.engine.profiling import profiled, shapes_of
from provider.engine.scheduler import Batch, LatencyObjective, Opportunistic, Policy, make_policy
from provider.executor.base import BaseExecutor
from shared.errors import WireError
from shared.ring.mask_stream import MaskStream
from shared.wire.header import DTYPE_CODES, PRODUCTS, RINGS, Direction, Header, Operation
from shared.wire.protocol import ExecutorProtocol

TENANTS = 12


@pytest.fixture(scope="module", params=["float32", "bfloat16", "ring", "ring-fine"])
def base(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> BaseExecutor:
    return BaseExecutor(checkpoint("llama"), numerics=request.param)


@pytest.fixture(scope="module")
def ring(checkpoint: Callable[[str], Path]) -> BaseExecutor:
    return BaseExecutor(checkpoint("llama"), numerics="ring")


def policy(base: BaseExecutor, name: str = "opportunistic") -> Policy:
    """With products of one tile of rows, so that every larger request is divided."""
    return make_policy(
        name, LatencyModel(shapes_of(base.manifest.groups)), LatencyObjective(decode_seconds=1e-6)
    )


def request(base: BaseExecutor, draw: random.Random) -> tuple[Header, torch.Tensor]:
    """Any product that the executor takes, and its payload."""
    group = draw.randrange(len(base.manifest.groups))
    info = base.manifest.groups[group]
    members = draw.randrange(1, 1 << len(info.members))
    direction = draw.choice([Direction.FORWARD, Direction.BACKWARD])
    operation = draw.choice([o for o in sorted(PRODUCTS) if o != 8 or base.manifest.numerics in RINGS])
    rows = draw.choice([1, 1, 1, 2, 17, 100])
    widths = base._shapes[group].widths(direction, members).request_widths
    ring = base.manifest.numerics in RINGS
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
    tensors = base.compute(header.group, header.direction, header.members, base.tensors(header, payload))
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    """Make one, which ends with the test: ``engines(executor, policy, lane=...)``."""
    made: list[Engine] = []

    def make(*arguments: Any, **options: Any) -> Engine:
        made.append(Engine.of(*arguments, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


Engines = Callable[..., Engine]


def joined(done: Completion) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in done.tensors])


@pytest.mark.parametrize("inline", [0.0, 1e-3])
@pytest.mark.parametrize("name", ["opportunistic", "none", "lockstep"])
def test_everybody_gets_their_own_answer(
    base: BaseExecutor, name: str, inline: float, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly on the ring; elsewhere up to the order of additions, which depends on the rows of a product."""
    monkeypatch.setattr("provider.engine.engine.INLINE_SECONDS", inline)
    engine = engines(base, lambda _: policy(base, name))
    protocol = ExecutorProtocol(base.manifest)

    def tenant(number: int) -> None:
        draw = random.Random(number)
        for _ in range(5):
            asked = [request(base, draw) for _ in range(4)]  # together, and answered in any order
            before = [payload.clone() for _, payload in asked]
            futures = [submitted(engine, f"tenant {number % 5}", number, *each) for each in asked]
            for (header, payload), original, future in zip(asked, before, futures, strict=True):
                done = future.result(800)
                got, expected = joined(done), alone(base, header, original)
                assert torch.equal(payload, original)
                assert got.dtype == expected.dtype
                if base.manifest.numerics in RINGS:
                    assert torch.equal(got, expected)
                else:
                    rough = torch.bfloat16 in (got.dtype, base._weights[0]._weight.dtype)  # type: ignore[attr-defined]
                    torch.testing.assert_close(
                        got, expected, rtol=0.02 if rough else 1e-5, atol=0.02 if rough else 1e-5
                    )
                # Tensors that lie one behind the other, as the answer's header says.
                answer = protocol.answer(header)
                assert got.numel() == answer.rows * answer.columns
                assert 0 <= done.queue_seconds <= done.reply_seconds

    with ThreadPoolExecutor(TENANTS) as threads:
        for each in [threads.submit(tenant, number) for number in range(TENANTS)]:
            each.result(800)
    assert engine.waiting == 0


class CountedLane(ProcessLane):
    """Knows how many rows each product had; products may be held back, or be too large."""

    inline = False

    def __init__(self, executor: BaseExecutor) -> None:
        super().__init__(executor)
        self.rows: list[int] = []
        self.go, self.entered = threading.Event(), threading.Event()
        self.most = 1 << 30
        honest = executor.compute

        def compute(
            group: int, direction: int, members: int, tensors: list[torch.Tensor], *more: Any
        ) -> list[torch.Tensor]:
            self.rows.append(len(tensors[0]))
            if len(tensors[0]) > self.most:
                raise MemoryError("no room for this product")
            return honest(group, direction, members, tensors, *more)

        executor.compute = compute  # type: ignore[method-assign]

    def multiply(self, batch: Sequence[RowRange]) -> BatchResult:
        self.entered.set()
        assert self.go.wait(800)
        return super().multiply(batch)


@pytest.fixture
def counted(checkpoint: Callable[[str], Path], engines: Engines) -> tuple[Engine, CountedLane, BaseExecutor]:
    base = BaseExecutor(checkpoint("llama"), numerics="ring")
    lane = CountedLane(base)
    return engines(base, lane=lambda _: lane), lane, BaseExecutor(checkpoint("llama"), numerics="ring")


Counted = tuple[Engine, CountedLane, BaseExecutor]


def rows_of_group_0(base: BaseExecutor, rows: int, seed: int = 0) -> tuple[Header, torch.Tensor]:
    width = base.manifest.groups[0].inputs
    header = Header(Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.int32], 0, 1, rows, width, 1)
    return header, MaskStream(bytes([seed]) * 32).draw(rows, width)


def test_what_arrives_during_a_product_shares_the_next(counted: Counted) -> None:
    engine, lane, base = counted
    first = submitted(engine, "first", 0, *rows_of_group_0(base, 1))
    assert lane.entered.wait(800)
    asked = [rows_of_group_0(base, 1 + i, i) for i in range(6)]
    later = [submitted(engine, f"tenant {i}", i, *each) for i, each in enumerate(asked)]
    eventually(lambda: engine.waiting >= 7)
    lane.go.set()
    first.result(800)
    answers = [joined(each.result(800)) for each in later]
    assert lane.rows == [1, 1 + 2 + 3 + 4 + 5 + 6]
    for (header, payload), answer in zip(asked, answers, strict=True):
        assert torch.equal(answer, alone(base, header, payload))


def test_a_session_has_many_requests_in_flight_and_an_early_answer(counted: Counted) -> None:
    """A row behind a large request of the same session does not wait for all of it."""
    engine, lane, base = counted
    order: list[str] = []
    first = submitted(engine, "a", 1, *rows_of_group_0(base, 1))
    assert lane.entered.wait(800)
    large, small = rows_of_group_0(base, 4000), rows_of_group_0(base, 1, 7)
    futures = {
        "large": submitted(engine, "a", 1, *large),
        "small": submitted(engine, "a", 1, *small),
    }
    for name, future in futures.items():
        future.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
    eventually(lambda: engine.waiting >= 3)
    lane.go.set()
    first.result(800)
    for future in futures.values():
        future.result(800)
    assert order == ["small", "large"]


def test_a_batch_that_does_not_start_leaves_its_lane_free(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, lane, base = counted
    asked = rows_of_group_0(base, 2)
    lane.go.set()

    def fails(_: Sequence[RowRange]) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(lane, "start", fails)
        with pytest.raises(RuntimeError, match="a lane failed: ZeroDivisionError"):
            submitted(engine, "one", 0, *asked).result(800)
    assert len(joined(submitted(engine, "another", 1, *asked).result(800)))


def test_a_product_without_memory_fails_whoever_asked_for_too_much(counted: Counted) -> None:
    """Not those who shared it."""
    engine, lane, base = counted
    lane.most = 10
    first = submitted(engine, "first", 0, *rows_of_group_0(base, 1))
    assert lane.entered.wait(800)
    asked = [rows_of_group_0(base, rows, rows) for rows in (3, 16, 4)]
    later = [submitted(engine, f"tenant {header.rows}", 0, header, payload) for header, payload in asked]
    eventually(lambda: engine.waiting >= 4)
    lane.go.set()
    first.result(800)
    with pytest.raises(MemoryError):
        later[1].result(800)
    for at in (0, 2):
        assert torch.equal(joined(later[at].result(800)), alone(base, *asked[at]))
    assert lane.rows[:2] == [1, 23]
    assert engine.waiting == 0
    header, payload = rows_of_group_0(base, 5)
    assert torch.equal(
        joined(submitted(engine, "next", 0, header, payload).result(800)), alone(base, header, payload)
    )


def test_rows_that_are_no_numbers_fail_alone(checkpoint: Callable[[str], Path], engines: Engines) -> None:
    base = BaseExecutor(checkpoint("llama"), numerics="float32")
    lane = CountedLane(base)
    engine = engines(base, lane=lambda _: lane)
    width = base.manifest.groups[0].inputs
    header = Header(Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.float32], 0, 1, 2, width, 1)
    good, bad = torch.ones(2, width), torch.full((2, width), torch.nan)
    asked = [
        submitted(engine, f"tenant {i}", 0, header, rows) for i, rows in enumerate((good, good, bad, good))
    ]
    eventually(lambda: engine.waiting >= 4)
    lane.go.set()
    with pytest.raises(WireError, match="NaN"):
        asked[2].result(800)
    for at in (0, 1, 3):
        torch.testing.assert_close(joined(asked[at].result(800)), alone(base, header, good))


def test_a_divided_request_that_fails_leaves_nothing_behind(
    checkpoint: Callable[[str], Path], engines: Engines
) -> None:
    """Its first rows were computed, the next were not: the rest is never asked for."""
    base = BaseExecutor(checkpoint("llama"), numerics="ring")
    engine = engines(base, lambda _: policy(base))
    chat, large = rows_of_group_0(base, 1), rows_of_group_0(base, 100)
    submitted(engine, "chat", 0, *chat).result(800)  # somebody decodes: products are short
    honest = base.compute

    def once(*_: object) -> list[torch.Tensor]:
        raise MemoryError

    def second_fails(
        group: int, direction: int, members: int, tensors: list[torch.Tensor], *more: Any
    ) -> list[torch.Tensor]:
        base.compute = once  # type: ignore[assignment, method-assign]
        return honest(group, direction, members, tensors, *more)

    base.compute = second_fails  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        submitted(engine, "large", 0, *large).result(800)
    base.compute = honest  # type: ignore[method-assign]
    assert engine.waiting == 0
    assert len(joined(submitted(engine, "large", 0, *large).result(800)))


def test_a_scheduler_that_fails_keeps_nobody_waiting(ring: BaseExecutor, engines: Engines) -> None:
    class Broken(Opportunistic):
        fails = True

        def next(self, now: float, lane: int = 0) -> Batch | float | None:
            if self.fails:
                raise ZeroDivisionError
            return super().next(now, lane)

    broken = Broken(LatencyModel(shapes_of(ring.manifest.groups)))
    engine = engines(ring, lambda _: broken)
    asked = rows_of_group_0(ring, 2)
    for each in [submitted(engine, f"tenant {i}", i, *asked) for i in range(4)]:
        with pytest.raises(RuntimeError, match="the scheduler failed"):
            each.result(800)
    broken.fails = False
    assert len(submitted(engine, "next", 0, *asked).result(800).tensors) == 1


def test_who_was_multiplied_gets_the_answer_though_the_scheduler_fails(
    ring: BaseExecutor, engines: Engines
) -> None:
    class Broken(Opportunistic):
        def finished(self, batch: Batch, seconds: float, now: float) -> None:
            raise ZeroDivisionError

    engine = engines(ring, lambda _: Broken(LatencyModel(shapes_of(ring.manifest.groups))))
    asked = [submitted(engine, f"tenant {i}", i, *rows_of_group_0(ring, 2)) for i in range(4)]
    errors = [each.exception(60) for each in asked]
    assert None in errors
    assert all(error is None or "the scheduler failed" in str(error) for error in errors)


def test_who_leaves_is_not_multiplied(counted: Counted) -> None:
    """What a lane has comes back to it all the same, and is nobody's answer."""
    engine, lane, base = counted
    with_lane = submitted(engine, "a", 1, *rows_of_group_0(base, 1))
    assert lane.entered.wait(800)
    waits = submitted(engine, "a", 1, *rows_of_group_0(base, 5))
    others = submitted(engine, "b", 2, *rows_of_group_0(base, 3))
    eventually(lambda: engine.waiting >= 3)
    engine.loop.call_soon_threadsafe(lambda: engine.session_ended("a", 1))
    with pytest.raises(ConnectionResetError):
        waits.result(800)
    assert not with_lane.done()  # its rows are in use
    lane.go.set()
    with pytest.raises(ConnectionResetError):
        with_lane.result(800)
    others.result(800)
    assert lane.rows == [1, 3]
    assert engine.waiting == 0
    assert isinstance(engine.policy, Opportunistic)
    assert ("a", 1) not in engine.policy.tokens._progress


def test_answers_hold_no_memory_of_others(counted: Counted) -> None:
    """A tenant that does not read its answer keeps that one alone in memory."""
    engine, lane, base = counted
    first = submitted(engine, "first", 0, *rows_of_group_0(base, 1))
    assert lane.entered.wait(800)
    later = [submitted(engine, f"tenant {rows}", 0, *rows_of_group_0(base, rows)) for rows in (1, 200)]
    eventually(lambda: engine.waiting >= 3)
    lane.go.set()
    first.result(800)
    small = later[0].result(800).tensors
    assert [tensor.untyped_storage().nbytes() for tensor in small] == [tensor.nbytes for tensor in small]


def test_two_lanes_have_batches_in_flight_together(ring: BaseExecutor) -> None:
    """Each group on its lane; one that is held does not hold the other."""
    lanes = [CountedLane(ring), ProcessLane(ring)]
    latency = LatencyModel(shapes_of(ring.manifest.groups))
    engine = Engine(lanes, Opportunistic(latency), latency, lane_of=lambda group: group % 2)
    held = submitted(engine, "a", 0, *rows_of_group_0(ring, 1))
    assert lanes[0].entered.wait(800)  # type: ignore[attr-defined]
    width = ring.manifest.groups[1].inputs
    header = Header(Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.int32], 1, 1, 3, width, 1)
    rows = MaskStream(bytes(32)).draw(3, width)
    assert torch.equal(joined(submitted(engine, "a", 0, header, rows).result(800)), alone(ring, header, rows))
    assert not held.done()
    lanes[0].go.set()  # type: ignore[attr-defined]
    held.result(800)
    engine.close()


class DeepLane(ProcessLane):
    """Has two batches in flight, and multiplies one after the other when it is told to."""

    depth, inline = 2, False

    def __init__(self, executor: BaseExecutor) -> None:
        super().__init__(executor)
        self.in_flight = list[tuple[Sequence[RowRange], Future[BatchResult]]]()
        self.full = threading.Event()

    def start(self, batch: Sequence[RowRange]) -> Future[BatchResult]:
        self.in_flight.append((batch, Future()))
        if len(self.in_flight) == self.depth:
            self.full.set()
        return self.in_flight[-1][1]


def test_a_batch_that_waits_for_another_took_only_its_own_time(base: BaseExecutor) -> None:
    """Or the latency model would learn that products take twice as long."""
    now, lane, seconds = [0.0], DeepLane(base), list[float]()
    latency = LatencyModel(shapes_of(base.manifest.groups))
    policy = make_policy("none", latency, LatencyObjective())
    policy.finished = lambda batch, took, now: seconds.append(took)  # type: ignore[method-assign]
    engine = Engine([lane], policy, latency, clock=lambda: now[0])
    futures = [submitted(engine, name, name, *rows_of_group_0(base, 3)) for name in "ab"]
    assert lane.full.wait(800)
    for at, (batch, future), asked in zip((1.0, 1.5), lane.in_flight, futures, strict=True):
        now[0] = at
        future.set_result(lane.multiply(batch))
        asked.result(800)
    engine.close()
    assert seconds == [1.0, 0.5]


class AwayLane(ProcessLane):
    """Takes nothing until it is told to."""

    inline, unavailable = False, True

    @property
    def depth(self) -> int:  # type: ignore[override]
        return 0 if self.unavailable else 1


def test_who_waits_for_an_unavailable_lane_is_told(base: BaseExecutor) -> None:
    """In a second, so that it can say so; who came later waits for a second of its own."""
    now, lane = [0.0], AwayLane(base)
    latency = LatencyModel(shapes_of(base.manifest.groups))
    engine = Engine([lane], Opportunistic(latency), latency, clock=lambda: now[0])
    early = submitted(engine, "a", 0, *rows_of_group_0(base, 3))
    wait_for(engine)
    now[0] = 0.5
    header, payload = rows_of_group_0(base, 2)
    late = submitted(engine, "b", 1, header, payload)
    wait_for(engine)
    assert not early.done()
    now[0] = 1.2
    wait_for(engine)
    with pytest.raises(WireError, match="group 0 is being started again; ask again") as refused:
        early.result(800)
    assert (refused.value.code, refused.value.retry_after) == ("restarting", LANE_WAIT_SECONDS)
    assert not late.done()
    lane.unavailable = False
    wait_for(engine)
    assert torch.equal(joined(late.result(800)), alone(base, header, payload))
    engine.close()


def test_a_session_that_ends_while_it_is_told_concerns_nobody_else(ring: BaseExecutor) -> None:
    """Its connection breaks under the first answer, and so its other requests are forgotten."""
    now, lane, told = [0.0], AwayLane(ring), list[Completion | Exception]()
    latency = LatencyModel(shapes_of(ring.manifest.groups))
    engine = Engine([lane], Opportunistic(latency), latency, clock=lambda: now[0])
    header, payload = rows_of_group_0(ring, 2)

    def breaks(done: Completion | Exception) -> None:
        told.append(done)
        engine.session_ended("a", 0)

    for _ in range(2):
        engine.loop.call_soon_threadsafe(lambda: engine.submit("a", 0, header, payload, breaks))
    wait_for(engine)
    now[0] = 0.5
    other = submitted(engine, "b", 1, header, payload)
    wait_for(engine)
    now[0] = 1.2
    wait_for(engine)
    lane.unavailable = False
    wait_for(engine)
    assert torch.equal(joined(other.result(60)), alone(ring, header, payload))
    assert [type(done) for done in told] == [WireError, WireError]
    assert engine.waiting == 0
    engine.close()


def wait_for(engine: Engine) -> None:
    """Until its loop has done what it had to do, and has decided anew."""
    for _ in range(2):
        there = threading.Event()
        engine.loop.call_soon_threadsafe(there.set)
        assert there.wait(800)


def test_a_profile_forecasts_products(ring: BaseExecutor) -> None:
    made = profiled(ring, ring.manifest, rounds=1)
    for group in range(len(ring.manifest.groups)):
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            line = made.line(group, direction)
            assert line.fixed > 0
            assert line.per_row > 0


def test_every_product_is_counted_before_the_end(base: BaseExecutor, engines: Engines) -> None:
    """Counting is done when nobody waits; what was left when the engine ended was never counted."""
    counted, ended = list[int](), threading.Event()
    engine = engines(base, on_batch=lambda rows, seconds, processor: counted.append(rows))
    header, payload = request(base, random.Random(3))

    def answered(done: Completion | Exception) -> None:
        engine.close()
        ended.set()

    engine.loop.call_soon_threadsafe(lambda: engine.submit("tenant", 0, header, payload, answered))
    assert ended.wait(800)
    engine.close()  # waits for the thread
    assert counted == [header.rows]
