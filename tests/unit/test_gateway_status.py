"""What a gateway's worker tells the server in front of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tenant_sdk.gateway.admission import StepFailure
from tenant_sdk.gateway.record_file import MAX_BYTES, read_record, write_record
from tenant_sdk.gateway.status import MAX_TEXT, GatewayStatus, SequenceErrors, StepHealth

UNAVAILABLE, WRONG_ANSWER = StepFailure.UNAVAILABLE, StepFailure.WRONG_ANSWER


def test_the_last_record_is_read(tmp_path: Path) -> None:
    path = tmp_path / "record"
    assert read_record(path) is None
    for number in range(5):
        write_record(path, record := f"record {number}".encode() * (5 - number))
        assert read_record(path) == record
    write_record(path, record := bytes(MAX_BYTES))
    assert read_record(path) == record


@pytest.mark.parametrize("written", [0, 1, 16, 20, 1000])
def test_a_record_that_is_being_written_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    path, pwrite = tmp_path / "record", os.pwrite
    for record in (b"older" * 300, b"last" * 300):
        write_record(path, record)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:written], at))
        write_record(path, b"new" * 400)
    assert read_record(path) == b"last" * 300
    write_record(path, b"newer")
    assert read_record(path) == b"newer"


def test_a_disk_that_is_full_later_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    health = StepHealth()
    health.write(tmp_path, {"rows": 1})
    SequenceErrors().add(tmp_path, {"a.1": "too long"})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    health.step_failed(UNAVAILABLE, "it is unavailable", 5.0)
    health.write(tmp_path, {"rows": 2})
    status = GatewayStatus.read(tmp_path)
    assert (status.failing, status.failure, status.error, status.rows) == (
        True,
        UNAVAILABLE,
        "it is unavailable",
        2,
    )
    assert SequenceErrors().add(tmp_path, {"b.2": "too slow"}) == ""
    assert SequenceErrors.reason(tmp_path, "b.2") == "too slow"


def test_long_texts_fit(tmp_path: Path) -> None:
    health = StepHealth()
    health.step_failed(UNAVAILABLE, "\0" * 100_000, 5.0)
    health.write(tmp_path, {})
    assert len(GatewayStatus.read(tmp_path).error) == MAX_TEXT
    errors = SequenceErrors()
    errors.add(tmp_path, {f"{number}.x": "é" * 10_000 for number in range(9)})
    assert SequenceErrors.reason(tmp_path, "8.x") == "é" * 10_000
    assert SequenceErrors.reason(tmp_path, "0.x") == ""


def test_a_test_ends_the_failure_that_it_began_after() -> None:
    health = StepHealth()
    assert health.probeable is None
    health.step_failed(UNAVAILABLE, "away", 1.0)
    assert health.probeable == 1.0
    health.step_failed(UNAVAILABLE, "away again", 2.0)  # while the test runs
    assert not health.probed(1.0)
    assert health.status.failing
    assert health.probed(2.0)
    assert not health.status.failing


def test_a_wrong_answer_is_not_taken_back() -> None:
    health = StepHealth()
    health.step_failed(UNAVAILABLE, "away", 1.0)
    health.step_failed(WRONG_ANSWER, "a wrong answer", 2.0)  # while the test runs
    assert not health.probed(1.0, UNAVAILABLE, "still away")
    assert not health.probed(1.0)
    assert health.probeable is None
    assert (health.status.failure, health.status.error) == (WRONG_ANSWER, "a wrong answer")


def test_a_test_may_find_another_fault() -> None:
    health = StepHealth()
    health.step_failed(UNAVAILABLE, "away", 1.0)
    assert health.probed(1.0, WRONG_ANSWER, "it serves another model")
    assert health.probeable is None
    assert health.step_done()
    assert not health.step_done()
    assert not health.probed(1.0, UNAVAILABLE, "late")
    assert not health.status.failing
