"""What is counted for each tenant, as CSV and in a file that outlives the executor."""

from __future__ import annotations

import csv
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from raw_peers import eventually

from provider.engine.engine import Completion
from provider.observe import usage as usage_module
from provider.observe.metrics import Metrics, Usage
from provider.observe.usage import UsageFile, usage_csv
from shared.errors import ConfigurationError
from shared.wire.header import Direction, Header, Operation, RequestClass

HOUR = timedelta(hours=1)


class Clock:
    """Says what it is set to."""

    now = datetime(2020, 1, 31, 22, 30, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


def work(metrics: Metrics, tenant: str, rows: int, request_class: RequestClass = RequestClass.DECODE) -> None:
    """One answered request of 64 columns, whose answer has 32."""
    request = Header(Operation.PRODUCT, Direction.FORWARD, 1, 0, 1, rows, 64, 1)
    answer = request._replace(operation=Operation.REPLY, columns=32)
    metrics.answered(tenant, request, answer, Completion([], request_class, 0.0, 0.0, 0.25))


def download(metrics: Metrics, tenant: str) -> None:
    answer = Header(Operation.REPLY, rows=1, columns=1000)
    metrics.downloaded(tenant, Header(Operation.FETCH, rows=1, columns=20), answer)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@contextmanager
def recording(path: Path, metrics: Metrics, clock: Clock) -> Iterator[UsageFile]:
    """With an interval that does not end by itself."""
    file = UsageFile(path, metrics.usage, 1e9, clock, metrics.usage_failures.inc)
    yield file
    file.close()


def lines(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


HEADING = ["from", "until", "tenant", "request_class", "requests", "rows", "received_bytes", "sent_bytes"]
HEADING.append("product_seconds")


def test_usage_is_by_tenant_and_request_class(metrics: Metrics) -> None:
    work(metrics, "alice", 3)
    work(metrics, "alice", 4)
    work(metrics, "alice", 100, RequestClass.FINETUNING)
    work(metrics, "bob", 1)
    download(metrics, "bob")
    assert metrics.usage() == {
        ("alice", "decode"): Usage(2, 7, 7 * 256, 7 * 128, 0.5),
        ("alice", "finetuning"): Usage(1, 100, 25600, 12800, 0.25),
        ("bob", "decode"): Usage(1, 1, 256, 128, 0.25),
        ("bob", "download"): Usage(1, 0, 20, 1000, 0.0),
    }
    labels = {"tenant": "alice", "request_class": "decode"}
    for name, value in zip(Usage._fields, (2, 7, 7 * 256, 7 * 128, 0.5), strict=True):
        assert metrics.registry.get_sample_value(f"symbiosis_tenant_{name}_total", labels) == value
    assert metrics.total("symbiosis_sent_bytes_total") == 7 * 128 + 12800 + 128 + 1000


def test_the_table(metrics: Metrics) -> None:
    since = Clock.now
    assert usage_csv(since, since + HOUR, metrics.usage()) == ",".join(HEADING) + "\n"
    work(metrics, "alice", 3)
    text = usage_csv(since, since + HOUR, metrics.usage())
    assert text.splitlines()[1:] == [
        "2020-01-31T22:30:00Z,2020-01-31T23:30:00Z,alice,decode,1,3,768,384,0.250000"
    ]


def test_a_file_has_what_was_used_in_each_interval(tmp_path: Path, metrics: Metrics, clock: Clock) -> None:
    path = tmp_path / "usage.csv"
    work(metrics, "before", 1)
    with recording(path, metrics, clock) as file:
        assert path.stat().st_mode & 0o777 == 0o600
        work(metrics, "alice", 3)
        work(metrics, "bob", 1)
        clock.now += HOUR
        file.write()
        work(metrics, "alice", 5)
        clock.now += HOUR
        file.write()
        clock.now += HOUR
        file.write()  # nobody asked for anything
        work(metrics, "bob", 2)
        clock.now += HOUR
    heading, *found = lines(path)
    assert heading == HEADING
    assert [(line[0][8:13], line[1][8:13], line[2], line[5]) for line in found] == [
        ("31T22", "31T23", "alice", "3"),
        ("31T22", "31T23", "bob", "1"),
        ("31T23", "01T00", "alice", "5"),
        ("01T01", "01T02", "bob", "2"),
    ]


def test_a_file_goes_on_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    """Also after one that cut a line; and another executor may write to it meanwhile."""
    path = tmp_path / "usage.csv"
    for rows in (1, 2):
        first, second = Metrics(), Metrics()
        with recording(path, first, clock), recording(path, second, clock):
            work(first, "alice", rows)
            work(second, "alice", 10 * rows)
        with path.open("a") as file:
            file.write("2020-01-31T22:30:00Z,2020-01")
    with recording(path, Metrics(), clock):
        pass
    heading, *found = lines(path)
    assert heading == HEADING
    assert sorted(int(line[5]) for line in found) == [1, 2, 10, 20]


def test_a_file_a_month(tmp_path: Path, metrics: Metrics, clock: Clock) -> None:
    """An interval is in the file of its beginning."""
    with recording(tmp_path / "usage-%Y-%m.csv", metrics, clock) as file:
        for _ in range(3):
            work(metrics, "alice", 1)
            clock.now += HOUR
            file.write()
    assert {path.name: len(lines(path)) - 1 for path in tmp_path.iterdir()} == {
        "usage-2020-01.csv": 2,
        "usage-2020-02.csv": 1,
    }


@pytest.mark.parametrize("wrote", [0, 50])
def test_a_full_disk_loses_nothing(
    tmp_path: Path,
    metrics: Metrics,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wrote: int,
) -> None:
    path = tmp_path / "usage.csv"
    write, left = os.pwrite, [wrote]

    def full(file: int, data: bytes, at: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= (count := write(file, data[: left[0]], at))
        return count

    caplog.set_level("INFO")
    with recording(path, metrics, clock) as file:
        work(metrics, "alice", 3)
        before = path.read_text()
        with monkeypatch.context() as patch:
            patch.setattr(usage_module.os, "pwrite", full)
            file.write()
            file.write()
        assert "No space left on device" in caplog.text
        assert path.read_text() == before
        assert metrics.value("symbiosis_usage_write_failures_total") == 2
        work(metrics, "alice", 4)
        clock.now += HOUR
        assert "again" not in caplog.text
        file.write()
        file.write()
        assert caplog.text.count("usage.csv again") == 1
    assert [line[5] for line in lines(path)[1:]] == ["7"]


def test_a_lock_of_others_loses_nothing(
    tmp_path: Path,
    metrics: Metrics,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those who may read the file can hold its lock for ever."""
    monkeypatch.setattr("provider.file_lock.SECONDS", 0.0)
    path = tmp_path / "usage.csv"
    with recording(path, metrics, clock) as file:
        work(metrics, "alice", 3)
        with path.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            file.write()
        assert "another process holds its lock" in caplog.text
        file.write()
    assert [line[5] for line in lines(path)[1:]] == ["3"]


def test_a_file_that_cannot_be_written_is_told_at_the_start(
    tmp_path: Path, metrics: Metrics, clock: Clock
) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot write usage to .*none/usage\.csv: No such file"):
        UsageFile(tmp_path / "none" / "usage.csv", metrics.usage, 1, clock)


@pytest.mark.parametrize("name", ["usage-%Q.csv", "usage-%H.csv", "100%.csv", "%%Y.csv"])
def test_a_name_has_years_months_and_days_only(
    tmp_path: Path, metrics: Metrics, clock: Clock, name: str
) -> None:
    with pytest.raises(ConfigurationError, match=r"may have %Y, %m and %d"):
        UsageFile(tmp_path / name, metrics.usage, 1, clock)
    assert list(tmp_path.iterdir()) == []


def test_intervals_end_by_themselves(tmp_path: Path, metrics: Metrics) -> None:
    path = tmp_path / "usage.csv"
    file = UsageFile(path, metrics.usage, 0.05)
    try:
        work(metrics, "alice", 3)
        eventually(lambda: len(lines(path)) == 2)
    finally:
        file.close()
