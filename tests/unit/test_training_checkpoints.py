"""The checkpoints of a training run."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigurationError
from tenant_sdk.tuning.checkpoints import TrainingCheckpoints


def begin(checkpoints: TrainingCheckpoints, *, resume: bool) -> Path | None:
    """Of a training that ends at once."""
    with checkpoints.resumable():
        return checkpoints.begin(resume=resume)


def test_checkpoints_of_an_interrupted_training(tmp_path: Path) -> None:
    output, settings = tmp_path / "adapter", {"rank": 8}
    with pytest.raises(ConfigurationError, match="nothing to resume"):
        begin(TrainingCheckpoints(output, settings), resume=True)
    checkpoints = TrainingCheckpoints(output, settings)
    assert begin(checkpoints, resume=False) is None
    assert begin(checkpoints, resume=True) is None
    assert begin(checkpoints, resume=False) is None  # there is nothing in it to lose
    (checkpoints.folder / "checkpoint-3").mkdir()
    (checkpoints.folder / "checkpoint-3" / "trainer_state.json").write_text('{"global_step": 3}')
    with pytest.raises(ConfigurationError, match="interrupted training; go on with resume=True"):
        begin(checkpoints, resume=False)
    with pytest.raises(ConfigurationError, match="rank was 8, now 4"):
        begin(TrainingCheckpoints(output, {"rank": 4}), resume=True)
    for step, state in (
        (9, '{"global_step": 9}'),
        (10, '{"global_step": 10}'),
        (13, "{}"),
        (11, '{"global_st'),
        (12, None),
    ):
        folder = checkpoints.folder / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    found = begin(checkpoints, resume=True)
    assert found is not None
    assert found.name == "checkpoint-10"  # 11 and 12 were cut off, 13 is of no step
    assert json.loads((checkpoints.folder / "settings.json").read_text()) == settings
    checkpoints.remove()
    assert list(tmp_path.iterdir()) == []


def test_settings_are_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed while it writes them."""
    checkpoints = TrainingCheckpoints(tmp_path / "adapter", {"steps": 4})

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for name in ("rename", "replace"):  # what has been written so far is under another name
        monkeypatch.setattr(os, name, killed)
    with pytest.raises(KeyboardInterrupt):
        begin(checkpoints, resume=False)
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match="there is nothing to resume"):
        begin(checkpoints, resume=True)
    assert begin(checkpoints, resume=False) is None


@pytest.mark.parametrize("resume", [False, True])
def test_two_trainings_do_not_share_a_folder(tmp_path: Path, resume: bool) -> None:
    """The second one would go on from the first one's checkpoints."""
    first, second = (TrainingCheckpoints(tmp_path / "adapter", {"rate": rate}) for rate in (1, 2))
    with first.resumable():
        first.begin(resume=False)
        with pytest.raises(ConfigurationError, match=r"another training is in progress with .*/adapter\."):
            begin(second, resume=resume)
        with pytest.raises(ConfigurationError, match="choose another output"):
            second.check(resume=resume)
    assert begin(second, resume=False) is None


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    checkpoints = TrainingCheckpoints(tmp_path / "adapter", {})
    assert begin(checkpoints, resume=False) is None
    checkpoints.check(resume=False)


def test_a_folder_with_digits_of_another_script_is_no_checkpoint(tmp_path: Path) -> None:
    """Python's ``isdigit`` takes them, and ``int`` does not."""
    other = tmp_path / "run.checkpoints" / "checkpoint-²"
    other.mkdir(mode=0o700, parents=True)
    (other / "trainer_state.json").write_text('{"global_step": 2}')
    (tmp_path / "run.checkpoints").chmod(0o700)
    assert begin(TrainingCheckpoints(tmp_path / "run", {}), resume=False) is None
