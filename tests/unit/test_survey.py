"""What devices here are found to reach, and what is said of those that are not."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import BASE_MODEL
from typer.testing import CliRunner

from provider.cli import _introduce, app
from provider.engine.profiling import shapes_of
from provider.planning import tables
from provider.planning.layout import WIDEST, described, plan_layout, read_groups
from provider.workers import survey as surveys
from provider.workers.pool import Sharding, WorkerPool, place_groups
from provider.workers.survey import GUESSED_ACCELERATOR, devices_of, latency_of, survey, survey_in_subprocess
from provider.workers.world import World
from shared.errors import CheckpointError, ConfigurationError
from shared.wire.header import Direction
from shared.wire.messages import GroupInfo, Member
from shared.wire.protocol import GroupShape

SHAPES = [GroupShape(64, (32, 32)), GroupShape(32, (64,)), GroupShape(64, (32, 32))]


@pytest.mark.parametrize("numerics", ["ring", "ring-fine", "float32", "bfloat16"])
def test_products_of_synthetic_weights_are_measured(numerics: str) -> None:
    here, elsewhere = survey(["cpu", "cpu", "cuda:99"], numerics, SHAPES)
    assert (elsewhere.name, elsewhere.lines) == ("cuda:99", None)
    assert here.lines is not None
    assert len(here.lines) == len(SHAPES)
    assert here.lines[0] == here.lines[2]
    assert all(0 < term < 1 for both in here.lines for line in both for term in line)


@pytest.mark.parametrize(
    ("devices", "threads"),
    [(["cpu"] * 4, 4), (["cuda:0", "cuda:1"], 8), (["cuda:0", "cpu"], 16), (["cuda:0"] * 32, 1)],
)
def test_workers_divide_the_processors(
    devices: list[str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those on the CPU among themselves: those on GPUs hardly need any while they multiply."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    sharding = Sharding(devices)
    assert {sharding.threads_of(start) for start in sharding.starts(None)} == {threads}
    assert Sharding(devices, threads=3).threads_of(sharding.starts(None)[0]) == 3


def test_large_shapes_are_measured_by_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveys, "MEASURED_ELEMENTS", 1 << 10)
    asked: list[int] = []
    make = surveys._synthetic
    monkeypatch.setattr(
        surveys,
        "_synthetic",
        lambda info, *more: asked.append(sum(m.outputs for m in info.members)) or make(info, *more),
    )
    survey(["cpu"], "ring", [GroupShape(64, (48, 16))])
    assert asked == [16]
    survey(["cpu"], "ring", [GroupShape(64, (4096, 2, 2))])  # narrow members do not keep a wide one whole
    assert asked == [16, 17]


def test_a_layer_wider_than_any_is_refused_before_it_is_measured() -> None:
    """A product of 128 rows has a gigabyte of numbers then; the widths may be a stranger's words."""
    for inputs, outputs in ((WIDEST + 1, 2), (2, WIDEST + 1)):
        group = GroupInfo(inputs, (Member("layer", outputs, ""),))
        with pytest.raises(ConfigurationError, match="a width above"):
            plan_layout([group], ["cpu"], numerics="ring")


def test_another_process_finds_the_same_devices() -> None:
    (found,) = survey_in_subprocess(["cpu"], "ring", SHAPES[:1])
    assert (found.name, found.memory) == ("cpu", None)
    assert found.lines
    with pytest.raises(ConfigurationError, match="devices='cpu' cannot be measured"):
        survey_in_subprocess(["cpu"], "of another kind", SHAPES[:1])


def test_what_is_not_here_is_guessed_or_as_was_said() -> None:
    groups = read_groups(BASE_MODEL)
    names = ["cuda:0", "cuda:0", "tpu:1", "cpu"]
    first, second, said, last = devices_of(names, groups, 2, assumed={"tpu": (1e9, 2.0, 4.0)})
    assert first == second
    assert (first.bytes_per_second, first.measured) == (GUESSED_ACCELERATOR[0] / 2, False)
    assert (said.memory, said.bytes_per_second, said.multiplications_per_second) == (1e9, 2.0, 4.0)
    assert 0 < last.memory < math.inf
    model = latency_of(said, 2, SHAPES, None)
    assert model.seconds(1, Direction.BACKWARD, 1, 3) == 2 * 2048 / 2.0 + 3 * 2048 / 4.0


def test_shapes_of_a_configuration_alone_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((BASE_MODEL / "config.json").read_bytes())
    alone = read_groups(tmp_path / "config.json")
    from provider.catalog.discovery import discover
    from shared.checkpoint import Checkpoint

    found = discover(Checkpoint(BASE_MODEL)).groups
    assert shapes_of(alone) == shapes_of(found)
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_groups(tmp_path / "nothing")


def test_what_moves_for_a_row() -> None:
    groups = read_groups(BASE_MODEL)[:1]  # 256 to three times 256
    assumed = {"far": (1e12, 1e12, 1e13)}
    one = plan_layout(groups, ["far"], numerics="ring", assumed=assumed)
    assert one.moved(0) == (4 * (256 + 768) / 2, 4 * (256 + 768) / 2, 0)
    two = plan_layout(groups, ["far", "far"], numerics="ring-fine", stripes=2, assumed=assumed)
    assert two.moved(0) == (4 * (256 + 384) / 2, 2 * 4 * (256 + 384) / 2, 2 * 4 * 256 / 2)
    assert two.doubts == ("the speed of far is as was said",)
    assert [each["measured"] for each in described(two)["workers"]] == [False, False]


def test_what_all_workers_reach() -> None:
    """In whole layers, however many share one; of those the slowest counts."""
    groups = read_groups(BASE_MODEL)
    assumed = {"fast": (1e12, 1e12, 1e13), "slow": (1e12, 5e11, 5e12)}
    alone = plan_layout(groups, ["fast"], numerics="ring", assumed=assumed)
    pair = plan_layout(groups, ["fast:0", "fast:1"], numerics="ring", stripes=2, assumed=assumed)
    mixed = plan_layout(groups, ["fast:0", "slow:0"], numerics="ring", stripes=2, assumed=assumed)
    whole = alone.layers_per_second(1)
    assert alone.products_per_second(0, 1) == whole
    assert pair.products_per_second(0, 1) == pytest.approx(2 * whole)
    assert pair.layers_per_second(1) == pytest.approx(2 * whole)
    assert mixed.layers_per_second(1) == pytest.approx(whole)
    assert plan_layout(groups, ["fast:0", "fast:1"], numerics="ring", assumed=assumed).layers_per_second(
        1
    ) == pytest.approx(2 * whole, rel=0.2)  # groups are not all of one size


def test_times_as_people_read_them() -> None:
    said = [tables.duration(seconds) for seconds in (0.0101, 1.9, 2, 543.161, 9000)]
    assert said == ["10 ms", "1,900 ms", "2.0 s", "9.1 min", "2.5 h"]


def test_workers_without_anything_to_do_are_refused() -> None:
    groups = read_groups(BASE_MODEL)
    with pytest.raises(ConfigurationError, match="30 workers are too many for 24 groups of layers"):
        plan_layout(groups, ["cpu"] * 30, numerics="ring")
    with pytest.raises(ConfigurationError, match=r"start at most 48, or .* \(stripes=N\)"):
        plan_layout(groups, ["cpu"] * 50, numerics="ring", stripes=2)
    with pytest.raises(ConfigurationError, match="4 workers are too many for 3 groups"):
        WorkerPool(BASE_MODEL, Sharding(["cpu"] * 4), numerics="ring", part=(1, 12))


def test_what_does_not_fit_is_refused_or_said(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = read_groups(BASE_MODEL)
    monkeypatch.setattr(surveys, "available_memory", lambda: (600e6, "this test"))
    with pytest.raises(ConfigurationError, match="the weights do not fit: 24 groups take"):
        place_groups(groups, ["cpu"] * 3, 1, "ring")
    assert len(set(place_groups(groups, ["cpu"] * 2, 1, "ring").lane_of)) == 2
    with pytest.raises(ConfigurationError, match="devices='cuda:99' names cuda:99, which is not here"):
        place_groups(groups, ["cuda:99"], 1, "ring")
    tight = plan_layout(
        groups, ["far"], numerics="ring", assumed={"far": (1e6, 1e12, 1e13)}, allow_misfit=True
    )
    assert tight.misfit.startswith("the weights do not fit")
    assert tables.source(tight) == tables.EXTRAPOLATED


def test_ranks_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two find room on it; three do, each on a machine of its own."""
    groups, free = read_groups(BASE_MODEL), itertools.count(600_000_000)  # others give memory back meanwhile
    monkeypatch.setattr(surveys, "available_memory", lambda: (next(free), "this test"))
    four = place_groups(groups, ["cpu"] * 4, 1, "ring", per_host=2)
    assert [device.name for device in four.devices] == ["machine 0"] * 2 + ["machine 1"] * 2
    assert [four.lane_of.count(lane) for lane in range(4)] == [6] * 4
    assert set(place_groups(groups, ["cpu"] * 3, 1, "ring", per_host=1).lane_of) == {0, 1, 2}
    with pytest.raises(ConfigurationError, match=r"machine 0 has .* for weights; 0 of 24 find room"):
        place_groups(groups, ["cpu"] * 3, 1, "ring", per_host=3)
    two = place_groups(groups, ["cuda"] * 2, 1, "ring", per_host=2)
    assert [device.name for device in two.devices] == ["rank 0", "rank 1"]


def test_the_pool_says_how_many_ranks_a_machine_has(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surveys, "available_memory", lambda: (600e6, "this test"))
    world = World(0, 3, 0, 3, "127.0.0.1", 0, hosts_store=True)
    with pytest.raises(ConfigurationError, match="machine 0 has"):
        WorkerPool(checkpoint("llama"), Sharding(["cpu"] * 3, world=world), numerics="ring")


@pytest.mark.parametrize("command", [["serve", "--plan"], ["plan"]], ids=str)
def test_what_does_not_fit_is_said_once_and_first(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one exit status, whichever command is asked."""
    monkeypatch.setattr(surveys, "available_memory", lambda: (272e6, "this test"))
    told = CliRunner().invoke(app, [*command, str(BASE_MODEL)])
    assert told.exit_code == 78
    assert told.stdout.startswith("the weights do not fit: ")
    assert told.stdout.count("do not fit") == 1
    assert "extrapolated, not measured" in " ".join(told.stdout.split())
    told = CliRunner().invoke(app, [*command, str(BASE_MODEL), "--json"])
    assert told.exit_code == 78
    assert json.loads(told.stdout)["misfit"].startswith("the weights do not fit")


def test_what_is_served_is_said_with_its_part_and_its_workers(caplog: pytest.LogCaptureFixture) -> None:
    told = SimpleNamespace(
        config=SimpleNamespace(numerics="ring", part="2/8"),
        manifest=SimpleNamespace(
            model="m", architecture="A", groups=[None] * 24, part=(3, 5), digest="0123456789abcdef0"
        ),
        workers=lambda: [SimpleNamespace(name="0", pid=4321, device="cpu", groups=2)],
        recording=None,
        tenants=1,
        url="wss://a:1",
        local_url="",
        admin_url="http://b:2",
    )
    with caplog.at_level("INFO"):
        _introduce(told)  # type: ignore[arg-type]
    assert "worker 0: PID 4321, on cpu, 2 groups" in caplog.text
    assert "part 2/8: groups 3 to 4 of 24, 1 worker," in caplog.text
