"""The multiplying part by itself: some groups, no manifest, no files, no tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from provider.catalog.discovery import discover
from provider.engine.lanes import ProcessLane, Request, RowRange
from provider.executor.base import BaseExecutor
from provider.executor.loading import NUMERICS, LoadedGroup
from provider.executor.products import GroupExecutor
from provider.executor.stripes import OutputStripe
from shared.checkpoint import Checkpoint
from shared.devices import pin
from shared.errors import ConfigurationError
from shared.ring.mask_stream import MaskStream
from shared.transport.colocated import SharedMemory
from shared.wire.header import DTYPE_CODES, RINGS, Direction, Header, Operation
from shared.wire.messages import GroupInfo, Member

SHARE = (1, 4, 6)
CPU = torch.device("cpu")


def share_of(
    folder: Path, numerics: str, device: torch.device = CPU, stripe: OutputStripe | None = None
) -> GroupExecutor:
    """An executor of some groups of a checkpoint."""
    checkpoint = Checkpoint(folder)
    groups = discover(checkpoint).groups
    load = NUMERICS[numerics].load
    loaded = {i: load(checkpoint, groups[i], device).cut(stripe) for i in SHARE}
    return GroupExecutor(loaded, numerics, device, stripe)


@pytest.fixture(params=list(NUMERICS))
def numerics(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def request_of(numerics: str, group: int, width: int) -> tuple[Header, torch.Tensor]:
    """Five rows of a float request; on the ring the seed of as many."""
    if numerics in RINGS:
        header = Header(Operation.SEED_EFFECT, Direction.FORWARD, DTYPE_CODES[torch.int32], group)
        return header._replace(rows=5, columns=width, members=1), torch.arange(32, dtype=torch.uint8)
    header = Header(Operation.PRODUCT, Direction.FORWARD, DTYPE_CODES[torch.float32], group)
    rows = torch.randn(5, width, generator=torch.Generator().manual_seed(group))
    return header._replace(rows=5, columns=width, members=1), rows


def test_a_share_of_the_groups_gives_the_answers_of_the_whole(
    checkpoint: Callable[[str], Path], numerics: str
) -> None:
    """Through a lane, from payloads as they arrive."""
    whole = BaseExecutor(checkpoint("llama"), numerics=numerics)
    lanes = [ProcessLane(executor) for executor in (whole, share_of(checkpoint("llama"), numerics))]
    for group in SHARE:
        request = request_of(numerics, group, whole.manifest.groups[group].inputs)
        answers = [lane.multiply([RowRange(Request(*request), 0, 5)]).answers[0] for lane in lanes]
        assert isinstance(answers[1], list), answers[1]
        torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)
    for lane in lanes:
        lane.close()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stripes_together_give_the_answers_of_the_whole(
    checkpoint: Callable[[str], Path], numerics: str, count: int
) -> None:
    """On the ring to the bit: forward each writes its columns, backward what they give adds up."""
    folder, generator = checkpoint("llama"), torch.Generator().manual_seed(count)
    whole = share_of(folder, numerics)
    stripes = [share_of(folder, numerics, stripe=OutputStripe(index, count)) for index in range(count)]
    groups = discover(Checkpoint(folder)).groups
    tolerance = {"float32": 1e-5, "bfloat16": 0.05}.get(numerics, 0.0)  # sums in another order
    for group, direction, rows in product(SHARE, (Direction.FORWARD, Direction.BACKWARD), (1, 3, 17)):
        for members in {1, (1 << len(groups[group].members)) - 1}:
            tensors = whole.zeros(group, direction, members, rows)
            for tensor in tensors:
                tensor.copy_(torch.randint(-(2**31), 2**31, tensor.shape, generator=generator) >> 28)
            wanted = whole.compute(group, direction, members, tensors)
            answers = [torch.zeros_like(tensor) for tensor in wanted]
            for stripe in stripes:
                own = [torch.zeros_like(tensor) for tensor in wanted]
                stripe.begin(group, direction, members, tensors, own)
                for tensor, more in zip(answers, own, strict=True):
                    tensor += more
            torch.testing.assert_close(answers, wanted, rtol=tolerance, atol=tolerance)


def test_a_group_that_is_elsewhere_has_no_product(checkpoint: Callable[[str], Path], numerics: str) -> None:
    share = share_of(checkpoint("llama"), numerics)
    with pytest.raises(KeyError):
        share.zeros(0, Direction.FORWARD, 1, 1)
    with pytest.raises(KeyError):
        share.compute(0, Direction.FORWARD, 1, [torch.zeros(1, 64)])


def test_the_next_group_that_is_here_is_read_ahead(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine names the one that comes next, perhaps on another lane; past the last comes the first."""
    share, told = share_of(checkpoint("llama"), "float32"), list[Any]()
    weights = {group: share._weights[group] for group in SHARE}
    for weight in weights.values():
        monkeypatch.setattr(weight, "read_ahead", lambda stop, weight=weight: told.append(weight))
    for group in range(9):
        share.read_ahead(group, lambda: False)
    assert told == [weights[i] for i in (1, 1, 4, 4, 4, 6, 6, 1, 1)]


def test_a_seed_stands_for_its_rows(checkpoint: Callable[[str], Path]) -> None:
    share = share_of(checkpoint("llama"), "ring")
    header, seed = request_of("ring", 1, 64)
    (rows,) = share.tensors(header, seed)
    assert torch.equal(rows, MaskStream(bytes(range(32))).draw(5, 64))


def test_unknown_numerics_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="float32"):
        GroupExecutor({}, "float8", CPU)


class Fixed:
    """A weight of some device: notes what reaches it, and answers from where the test wants."""

    def __init__(self, answer: torch.Tensor) -> None:
        self.answer, self.met = answer, list[torch.Tensor]()

    def apply(
        self,
        direction: int,
        members: int,
        tensors: list[torch.Tensor],
        into: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        self.met += tensors
        return [self.answer]

    def read_ahead(self, stop: Callable[[], bool]) -> None:
        raise AssertionError("there is nothing to read ahead on another device")


def on(device: str, weight: Fixed) -> GroupExecutor:
    loaded = LoadedGroup(weight, GroupInfo(3, (Member("q", 2, "q"),)))
    return GroupExecutor({0: loaded}, "float32", torch.device(device))


def test_rows_go_to_the_weights_device_and_answers_come_back() -> None:
    """``meta`` stands for it: rows are seen to go there; what comes back is a copy on the CPU."""
    weight = Fixed(torch.arange(8.0).view(4, 2))
    executor = on("meta", weight)
    (out,) = executor.compute(0, Direction.FORWARD, 1, [torch.ones(4, 3)])
    assert [tensor.device.type for tensor in weight.met] == ["meta"]
    assert torch.equal(out, weight.answer)
    assert out.data_ptr() != weight.answer.data_ptr()
    executor.read_ahead(0, lambda: False)


def test_rows_on_the_cpu_are_not_copied() -> None:
    weight, rows = Fixed(torch.zeros(4, 2)), torch.ones(4, 3)
    (out,) = on("cpu", weight).compute(0, Direction.FORWARD, 1, [rows])
    assert weight.met[0] is rows
    assert out is weight.answer


class Runtime:
    """Of CUDA, as far as memory is made known to it."""

    def __init__(self) -> None:
        self.known = set[int]()

    def cudaHostRegister(self, at: int, size: int, flags: int) -> int:
        self.known.add(at)
        return 0

    def cudaHostUnregister(self, at: int) -> None:
        self.known.remove(at)


def test_memory_stays_pinned_until_its_last_tensor_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer: what is there next at this address is somebody else's."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    memory = SharedMemory.private(256)
    pin(memory.whole, torch.device("cuda:0"))
    rows = memory.tensor(64, torch.int32, (2, 3))
    assert runtime.known == {memory.whole.ctypes.data}
    del memory
    assert len(runtime.known) == 1
    del rows
    assert runtime.known == set()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_answers_into_pinned_memory(checkpoint: Callable[[str], Path], numerics: str) -> None:
    """On the ring the same bits; floats as far as the order of additions goes, and bfloat16 rounds."""
    here = share_of(checkpoint("llama"), numerics)
    there = share_of(checkpoint("llama"), numerics, torch.device("cuda"))
    for group in SHARE:
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            for rows in (1, 17):
                tensors = here.zeros(group, direction, 1, rows)
                for tensor in tensors:
                    tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) % 7 - 3)
                wanted = here.compute(group, direction, 1, tensors)
                got = there.compute(group, direction, 1, tensors)
                assert all(tensor.is_pinned() for tensor in got)
                tolerance = {"float32": 1e-5, "bfloat16": 0.05}.get(numerics, 0.0)
                torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("stripe", [None, OutputStripe(1, 2)])
def test_a_gpu_is_only_told_to(checkpoint: Callable[[str], Path], stripe: OutputStripe | None) -> None:
    """Several products are begun before the first is waited for."""
    here = share_of(checkpoint("llama"), "ring")
    there = share_of(checkpoint("llama"), "ring", torch.device("cuda"), stripe)
    begun = []
    for group in SHARE:
        (tensor,) = here.zeros(group, Direction.FORWARD, 1, 17)
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) % 7 - 3)
        (wanted,) = here.compute(group, Direction.FORWARD, 1, [tensor])
        answer = torch.zeros_like(wanted)
        memory = SharedMemory.private(answer.nbytes)
        pin(memory.whole, torch.device("cuda"))
        answer = memory.tensor(0, answer.dtype, (answer.shape[0], answer.shape[1])).zero_()
        assert answer.is_pinned()
        begun.append((there.begin(group, Direction.FORWARD, 1, [tensor], [answer]), wanted, answer))
    for wait, wanted, answer in begun:
        assert wait is not None
        wait()
        columns = slice(None) if stripe is None else stripe.of(wanted.shape[1])
        assert torch.equal(answer[:, columns], wanted[:, columns])
