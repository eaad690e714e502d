"""What is kept where, from figures: the fastest way that fits."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigurationError
from tenant_sdk.sequences.planning import GIB, WINDOWS, MemoryPlan, Shapes, StorageTier, plan_step

# A Llama of 12 layers, d = 768, and one of 32 layers, d = 4096, in float32.
SMALL = Shapes(
    layers=12, saved=45_000, answers=31_744, hidden=3_072, attended=6_144, logits=128_000, chunk=256 << 20
)
LARGE = Shapes(
    layers=32, saved=400_000, answers=172_000, hidden=16_384, attended=32_768, logits=128_000, chunk=256 << 20
)
MUCH = 1 << 50
HAS = 0.5  # GiB that the process has


def plan(
    length: int, memory_gib: float, shapes: Shapes = SMALL, batch: int = 1, disk: int = MUCH
) -> MemoryPlan:
    return plan_step(shapes, length, batch, int(memory_gib * GIB), disk, budget=memory_gib + HAS)


def test_nothing_is_done_where_all_fits() -> None:
    assert plan(512, 8) == MemoryPlan(memory=plan(512, 8).memory)
    assert "nothing special is needed" in plan(512, 8).sentence(512)


def test_one_thing_after_another() -> None:
    """As sequences get longer, in the same memory."""
    found = [plan(length, 4) for length in (1024, 3072, 4250, 5120, 65536)]
    ways = [(p.chunked_loss, p.checkpointed, p.window, p.answers, p.states) for p in found]
    assert ways[0] == (False, False, None, StorageTier.MEMORY, StorageTier.MEMORY)
    assert ways[1] == (True, False, None, StorageTier.MEMORY, StorageTier.MEMORY)
    assert ways[2] == (True, True, None, StorageTier.MEMORY, StorageTier.MEMORY)
    assert ways[3] == (True, False, 4096, StorageTier.DISK, StorageTier.MEMORY)
    assert ways[4] == (True, False, 512, StorageTier.DISK, StorageTier.DISK)
    assert all(each.memory <= 4 * GIB for each in found)


def test_a_large_model() -> None:
    found = plan(32768, 16, LARGE)
    assert found.window is not None
    assert found.answers == StorageTier.DISK
    assert found.disk > 32768 * 32 * LARGE.answers - 1


def test_where_the_disk_is_too_small_answers_are_asked_for_again() -> None:
    usual = plan(65536, 4)
    found = plan(65536, 4, disk=usual.disk - 1)
    assert (found.answers, found.states) == (StorageTier.NOWHERE, StorageTier.DISK)
    assert "they are asked for again" in found.sentence(65536)


def test_where_nothing_fits_it_says_what_would() -> None:
    refused = (
        r"take (.+) GiB of memory at least, on top of the 0\.50 GiB .* give memory_gib=(.+) or more, shorter"
    )
    for memory, disk in ((1.0, MUCH), (-0.2, MUCH), (1.0, 0)):
        with pytest.raises(ConfigurationError, match=refused) as error:
            plan(1 << 20, memory, disk=disk)
        found = re.search(refused, str(error.value))
        assert found is not None
        assert float(found[2]) == pytest.approx(float(found[1]) + HAS, abs=0.02)
        assert plan(1 << 20, float(found[2]) - HAS, disk=disk).memory > memory * GIB
    with pytest.raises(ConfigurationError, match=refused):
        plan_step(SMALL, 65536, 1, 0, 0, window=1024, budget=HAS)


def test_it_says_what_disk_would_do() -> None:
    enough = plan(65536, 3).disk
    with pytest.raises(ConfigurationError, match=r"; or \d+\.\d GiB of disk, where 0\.0 may be used$"):
        plan(65536, 3, disk=0)
    assert enough > 10 * GIB


def test_where_nothing_fits_the_least_may_be_taken() -> None:
    found = plan_step(SMALL, 65536, 1, 0, MUCH)
    assert found.memory > 0
    assert (found.window, found.states) == (min(WINDOWS), StorageTier.DISK)


def test_packed_rows_are_not_cut() -> None:
    assert plan_step(SMALL, 4250, 1, 4 * GIB, MUCH, packed=True).checkpointed
    with pytest.raises(ConfigurationError, match=r"at least.*each sequence in a row of its own could"):
        plan_step(SMALL, 1 << 20, 1, 4 * GIB, MUCH, packed=True, budget=4)
    with pytest.raises(ConfigurationError, match="packed rows cannot be cut"):
        plan_step(SMALL, 4096, 1, 4 * GIB, MUCH, packed=True, window=1024)


def test_a_window_that_somebody_wants() -> None:
    found = plan_step(SMALL, 4096, 2, 100 * GIB, MUCH, window=300)
    assert found.window == 300


def test_eager_attention_makes_windows_smaller() -> None:
    eager = Shapes(**{**vars(SMALL), "pair": 3 * 4 * 12})
    ours, theirs = (plan(32768, 6, shapes).window for shapes in (SMALL, eager))
    assert ours is not None
    assert theirs is not None
    assert theirs < ours


def test_in_words() -> None:
    words = plan(32768, 4).sentence(32768, 2)
    assert words.startswith("2 x 32,768 tokens: windows of ")
    assert "the executor's answers are kept on disk" in words
    assert "GiB of memory and" in words


@given(st.integers(2, 1 << 20), st.integers(1, 16), st.floats(0.1, 512), st.sampled_from([SMALL, LARGE]))
def test_plans_fit(length: int, batch: int, memory: float, shapes: Shapes) -> None:
    try:
        found = plan(length, memory, shapes, batch)
    except ConfigurationError:
        return
    assert found.memory <= memory * GIB
    assert found.window is None or 1 <= found.window <= WINDOWS[0]
    assert found.chunked_loss or not (found.checkpointed or found.window)
