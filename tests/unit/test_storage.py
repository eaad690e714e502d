"""Folders that are whole or absent, and disk errors that say what to do."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from safetensors import SafetensorError

from shared.atomic import atomic_file, atomic_folder, write_atomically
from shared.errors import ConfigurationError, StorageError
from tenant_sdk.storage import (
    check_new_folder,
    disk_errors,
    free_megabytes,
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
        with atomic_folder(target) as folder:
            (folder / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
    with atomic_folder(target) as folder:
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


def test_a_file_of_a_library_is_whole_or_as_it_was(tmp_path: Path) -> None:
    """A link is replaced, and what it leads to stays."""
    other, path = tmp_path / "other", tmp_path / "file"
    other.write_text("other")
    path.symlink_to(other)

    def interrupted() -> None:
        with atomic_file(path) as file:
            file.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "other"
    with atomic_file(path) as file:
        file.write_text("whole")
    assert (path.read_text(), path.is_symlink(), other.read_text()) == ("whole", False, "other")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(tmp_path.iterdir()) == [path, other]


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_written_file_is_whole_or_as_it_was(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask is. Users of the folder put links everywhere, and nothing goes through these."""
    other, path = tmp_path / "other", tmp_path / "folder" / "file"
    other.write_text("other")
    path.parent.mkdir()
    fchmod = os.fchmod

    def swapped(descriptor: int, mode: int) -> None:
        (sibling,) = path.parent.glob(".*")
        assert stat.S_IMODE(sibling.stat().st_mode) == 0o600
        sibling.unlink()
        sibling.symlink_to(other)
        fchmod(descriptor, mode)

    write_atomically(path, b"whole", mode)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("whole", mode)
    before = other.stat()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fchmod", swapped)
        write_atomically(path, b"more", mode | 0o006, (os.getuid(), os.getgid()))
    assert other.read_text() == "other"
    assert other.stat() == before
    path.unlink()
    path.symlink_to(other)
    write_atomically(path, b"again", mode)
    assert (path.read_text(), path.is_symlink(), other.read_text()) == ("again", False, "other")
    with pytest.raises(TypeError):
        write_atomically(path, "no bytes", mode)  # type: ignore[arg-type]
    assert path.read_text() == "again"
    assert list(path.parent.iterdir()) == [path]
