"""The checkpoints of a training run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from tenant_sdk.tuning.checkpoints import TrainingCheckpoints


def test_checkpoints_of_an_interrupted_training(tmp_path: Path) -> None:
    output, settings = tmp_path / "adapter", {"rank": 8}
    with pytest.raises(ConfigurationError, match="nothing to resume"):
        TrainingCheckpoints(output, settings).begin(resume=True)
    checkpoints = TrainingCheckpoints(output, settings)
    assert checkpoints.begin(resume=False) is None
    assert checkpoints.begin(resume=True) is None
    assert checkpoints.begin(resume=False) is None  # there is nothing in it to lose
    (checkpoints.folder / "checkpoint-3").mkdir()
    (checkpoints.folder / "checkpoint-3" / "trainer_state.json").write_text('{"global_step": 3}')
    with pytest.raises(ConfigurationError, match="interrupted training; go on with resume=True"):
        checkpoints.begin(resume=False)
    with pytest.raises(ConfigurationError, match="rank was 8, now 4"):
        TrainingCheckpoints(output, {"rank": 4}).begin(resume=True)
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
    found = checkpoints.begin(resume=True)
    assert found is not None
    assert found.name == "checkpoint-10"  # 11 and 12 were cut off, 13 is of no step
    assert json.loads((checkpoints.folder / "settings.json").read_text()) == settings
    checkpoints.remove()
    assert list(tmp_path.iterdir()) == []


def test_settings_are_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed while it writes them."""
    checkpoints, write = TrainingCheckpoints(tmp_path / "adapter", {"steps": 4}), Path.write_text

    def killed(path: Path, text: str) -> None:
        write(path, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.begin(resume=False)
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match="there is nothing to resume"):
        checkpoints.begin(resume=True)
    assert checkpoints.begin(resume=False) is None


def test_a_folder_with_digits_of_another_script_is_no_checkpoint(tmp_path: Path) -> None:
    """Python's ``isdigit`` takes them, and ``int`` does not."""
    other = tmp_path / "run.checkpoints" / "checkpoint-²"
    other.mkdir(mode=0o700, parents=True)
    (other / "trainer_state.json").write_text('{"global_step": 2}')
    (tmp_path / "run.checkpoints").chmod(0o700)
    assert TrainingCheckpoints(tmp_path / "run", {}).begin(resume=False) is None
