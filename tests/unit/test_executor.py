"""The multiplying part by itself: some groups, no manifest, no files, no tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from provider.catalog.discovery import discover
from provider.engine.lanes import ProcessLane, Request, Rows
from provider.executor.base import BaseExecutor
from provider.executor.loading import NUMERICS
from provider.executor.products import GroupExecutor
from shared.checkpoint import Checkpoint
from shared.errors import ConfigurationError
from shared.ring.mask_stream import MaskStream
from shared.wire.header import DTYPE_CODES, Direction, Header, Operation

SHARE = (1, 4, 6)
CPU = torch.device("cpu")


def share_of(folder: Path, numerics: str, device: torch.device = CPU) -> GroupExecutor:
    """An executor of some groups of a checkpoint."""
    checkpoint = Checkpoint(folder)
    groups = discover(checkpoint).groups
    load = NUMERICS[numerics].load
    return GroupExecutor({i: load(checkpoint, groups[i], device) for i in SHARE}, numerics, device)


@pytest.fixture(params=list(NUMERICS))
def numerics(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def request_of(numerics: str, group: int, width: int) -> tuple[Header, torch.Tensor]:
    """Five rows of a float request; on the ring the seed of as many."""
    if numerics == "ring":
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
        answers = [lane.multiply([Rows(Request(*request), 0, 5)]).answers[0] for lane in lanes]
        assert isinstance(answers[1], list), answers[1]
        torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)
    for lane in lanes:
        lane.close()


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
    (rows,) = share.blocks(header, seed)
    assert torch.equal(rows, MaskStream(bytes(range(32))).draw(5, 64))


def test_unknown_numerics_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="float32"):
        GroupExecutor({}, "float8", CPU)
