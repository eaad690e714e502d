"""Where groups go: by memory and speed, never where there is no room, and why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provider.workers.planner import Device, Placement, place
from shared.errors import ConfigurationError
from shared.wire.protocol import GroupShape

INF = float("inf")


def device(name: str = "cuda:0", memory: float = INF, speed: float = 1.0) -> Device:
    return Device(name, memory, speed * 1e10, speed * 1e11)


def placed(shapes: list[GroupShape], *devices: Device, weight_bytes: int = 2, stripes: int = 1) -> Placement:
    return place(shapes, devices, weight_bytes=weight_bytes, stripes=stripes)


def test_equal_devices_have_equal_parts_the_largest_first() -> None:
    shapes = [GroupShape(4, (4,)), GroupShape(4, (8,)), GroupShape(4, (4,)), GroupShape(4, (16,))]
    assert placed(shapes, device("a"), device("b")).lane_of == [1, 1, 1, 0]


def test_a_device_twice_as_fast_has_twice_the_products() -> None:
    shapes = [GroupShape(1024, (512, 512))] * 60
    lanes = placed(shapes, device("a", speed=2), device("b"), device("c")).lane_of
    assert [lanes.count(lane) for lane in range(3)] == [30, 15, 15]


def test_a_pass_asks_one_worker_after_the_other() -> None:
    """Tenants that all begin at once would else go from worker to worker together."""
    layer = [
        GroupShape(64, (64, 64, 64)),
        GroupShape(64, (64,)),
        GroupShape(64, (172, 172)),
        GroupShape(172, (64,)),
    ]
    shapes = [*layer * 8, GroupShape(64, (1600,))]
    found = placed(shapes, device("a"), device("b"))
    whole = [sum(shapes[group].size for group in found.groups(worker)) for worker in range(2)]
    assert max(whole) / sum(whole) < 0.52  # with the head, which one of them has
    done = [0.0, 0.0]
    for group, lane in enumerate(found.lane_of[:-1]):
        done[lane] += shapes[group].size / (whole[lane] - (1600 * 64 if lane == found.lane_of[-1] else 0))
        assert abs(done[0] - done[1]) < 0.2, group  # a layer all with one of them would be 1/4


def test_memory_goes_before_speed_and_the_reason_says_so() -> None:
    shapes = [GroupShape(100, (100,))] * 10
    found = placed(shapes, device("a", memory=2 * 30_000, speed=9), device("b"))
    assert [found.lane_of.count(lane) for lane in range(2)] == [3, 7]
    reasons = [decision.reason for decision in found.decisions]
    assert set(reasons) == {
        "no other would be done sooner with it",
        "worker 0 would be done sooner with it, but has no room",
    }
    assert placed(shapes, device()).decisions[0].reason == "there is no other place"


def test_what_fits_only_packed_tightly_is_packed() -> None:
    """By speed each would have a 3 and a 2, and the last 2 nobody."""
    shapes = [GroupShape(1, (size,)) for size in (3, 3, 2, 2, 2)]
    found = placed(shapes, device("a", 12), device("b", 12), weight_bytes=2)
    assert found.lane_of == [0, 0, 1, 1, 1]
    assert "it leaves the least room there" in found.decisions[0].reason


def test_devices_of_one_name_share_its_memory() -> None:
    shapes = [GroupShape(10, (10,))] * 4
    assert placed(shapes, device("cpu", 800), device("cpu", 800)).lane_of == [0, 1, 0, 1]
    with pytest.raises(ConfigurationError, match=r"cpu has 0\.00 GiB for weights; 3 of 4 find room"):
        placed(shapes, device("cpu", 799), device("cpu", 799))


@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(4, 50)), min_size=1, max_size=24),
    devices=st.lists(st.tuples(st.integers(0, 40_000), st.floats(0.1, 10)), min_size=1, max_size=3),
    stripes=st.integers(1, 3),
)
def test_never_over_a_devices_memory(
    sizes: list[tuple[int, int]], devices: list[tuple[int, float]], stripes: int
) -> None:
    shapes = [GroupShape(inputs, (outputs, outputs)) for inputs, outputs in sizes]
    named = [
        device(str(i), memory, speed) for i, (memory, speed) in enumerate(devices) for _ in range(stripes)
    ]
    try:
        found = placed(shapes, *named, stripes=stripes)
    except ConfigurationError:
        assert 2 * sum(shape.size for shape in shapes) > min(memory for memory, _ in devices)
        return
    assert found == placed(shapes, *named, stripes=stripes)
    whole = [sum(found.memory(stripes * at + i) for i in range(stripes)) for at in range(len(devices))]
    assert all(size <= memory for size, (memory, _) in zip(whole, devices, strict=True))
    assert sum(whole) == 2 * sum(shape.size for shape in shapes)
    assert sorted(group for lane in range(len(devices)) for group in found.groups(stripes * lane)) == list(
        range(len(shapes))
    )


def test_stripes_are_as_wide_as_the_last_and_as_slow_as_the_slowest() -> None:
    shapes = [GroupShape(8, (100,))] * 6
    found = placed(shapes, device("a"), device("b"), device("c", speed=0.1), device("d"), stripes=2)
    assert [found.lane_of.count(lane) for lane in range(2)] == [5, 1]
    assert found.shape(0, 0).outputs == (32,)
    assert found.shape(0, 1).outputs == (68,)
    assert found.memory(1) == 5 * 2 * 8 * 68


@pytest.mark.parametrize(
    ("devices", "stripes", "weight_bytes", "said"),
    [
        (
            [("cuda:0", 100)],
            1,
            4,
            "numerics='ring' or numerics='bfloat16', which take 2 bytes a weight, would fit",
        ),
        ([("cuda:0", 60), ("cuda:1", 60)], 1, 2, "stripes=2 would fit"),
        ([("cuda:0", 40)], 1, 2, "it takes at least 3 devices of 0.00 GiB"),
        ([("cuda:0", 60)] * 2, 1, 2, "it takes at least 2 devices of 0.00 GiB"),
        ([("cpu", 40)], 1, 2, "find room. choose a smaller model, or free memory"),
    ],
)
def test_what_would_fit_is_said(
    devices: list[tuple[str, float]], stripes: int, weight_bytes: int, said: str
) -> None:
    shapes = [GroupShape(1, (50,))]
    with pytest.raises(ConfigurationError) as caught:
        placed(shapes, *(device(*each) for each in devices), stripes=stripes, weight_bytes=weight_bytes)
    assert said in str(caught.value)
    assert "0 of 1 find room" in str(caught.value)


def test_parts_that_would_fit_are_said() -> None:
    shapes = [GroupShape(1, (50,))] * 4
    with pytest.raises(ConfigurationError, match=r"3 hosts or more could serve a part each \(part=k/3\)"):
        placed(shapes, device("cpu", 150))
