"""Folders that are whole or absent, and disk errors that say what to do."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from shared.errors import ConfigurationError, StorageError
from tenant_sdk.storage import (
    TrainingCheckpoints,
    check_new_folder,
    disk_errors,
    free_megabytes,
    whole_folder,
)


def fail(error: BaseException, path: Path) -> StorageError:
    with pytest.raises(StorageError) as caught, disk_errors(path, "the adapter", "Then go on."):
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            "No space left on device; free some space there (",
        ),
        (
            OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
            "Disk quota exceeded; free some space of your quota",
        ),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), "Read-only file system; make the folder writable"),
        # As safetensors and torch 2.13 put it, seen on a full disk.
        (
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            "No space left on device; free some space there",
        ),
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
            "writing a file failed; free some space there",
        ),
    ],
)
def test_what_a_disk_can_do_wrong(error: BaseException, reason: str, tmp_path: Path) -> None:
    message = str(fail(error, tmp_path))
    assert message.startswith(f"cannot write the adapter to {tmp_path}: {reason}")
    assert message.endswith(". Then go on.")


@pytest.mark.parametrize(
    "error", [OSError(errno.ECONNRESET, "reset"), RuntimeError("shape"), SafetensorError("bad header")]
)
def test_other_errors_are_let_through(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, disk_errors(tmp_path, "the adapter", ""):
        raise error
    assert caught.value is error


def test_a_folder_is_whole_or_absent(tmp_path: Path) -> None:
    target = tmp_path / "adapter"

    def interrupted() -> None:
        with whole_folder(target) as folder:
            (folder / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
    with whole_folder(target) as folder:
        (folder / "all").touch()
        assert not target.exists()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == [
        "adapter",
        "adapter/all",
    ]


def test_a_new_folder(tmp_path: Path) -> None:
    assert check_new_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    (tmp_path / "a" / "b").mkdir()
    check_new_folder(tmp_path / "a" / "b")  # empty: nothing is lost
    (tmp_path / "a" / "b" / "c").touch()
    for taken in (tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"):
        with pytest.raises(ConfigurationError, match="exists already"):
            check_new_folder(taken)


def test_free_space_of_a_folder_to_be() -> None:
    assert free_megabytes(Path("/not/yet")) == pytest.approx(free_megabytes(Path("/")), rel=0.1)


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
