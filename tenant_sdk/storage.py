"""Folders on disk that are either whole or absent, and disk errors with a remedy."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from shared.errors import ConfigurationError, Message, StorageError
from shared.ownership import check_tree

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's
_BLOCK_BYTES = 1 << 20
# What a disk does to a program that did nothing wrong; other errors of the system are let through.
_DISK_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,  # a file where a folder is wanted
    errno.ENOENT,  # a file system that lets nobody make a folder
}


def _disk_error(error: BaseException) -> tuple[str, int] | None:
    """Reason and errno, if this is a disk's fault: torch and safetensors have errors of their own for it."""
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return error.strerror or str(error), error.errno
    if isinstance(error, SafetensorError) and (found := re.search(r"([^:]*) \(os error (\d+)\)", str(error))):
        return found[1].strip(), int(found[2])
    if isinstance(error, RuntimeError) and "inline_container" in str(error):
        return "writing a file failed", errno.ENOSPC
    return None


@contextmanager
def disk_errors(path: Path, what: str, then: str) -> Iterator[None]:
    """Turn what a disk can do wrong while ``what`` is written to ``path`` into a StorageError.

    Args:
        then: what to do once the disk is right again, as a sentence.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = _disk_error(error)
        if reason is None:
            raise
        remedy = {
            errno.ENOSPC: f"free some space there ({free_megabytes(path):.0f} MB are free)",
            errno.EDQUOT: "free some space of your quota there",
            errno.EFBIG: "raise the limit on the size of files (`ulimit -f`)",
        }.get(reason[1], "make the folder writable, or choose another")
        raise StorageError(
            "cannot write {} to {}: {}; {}. {}", what, str(path), reason[0], remedy, then
        ) from error


def free_megabytes(path: Path) -> float:
    """Free space, in 10^6 bytes, where ``path`` is or would be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free / 1e6


def check_new_folder(path: Path) -> Path:
    """The absolute path of a folder that will be made: absent or empty, below a folder that exists.

    Raises:
        ConfigurationError: it holds something, which would be overwritten.
    """
    path = path.absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigurationError("{} exists already; choose another {output}, or remove it first", str(path))
    with disk_errors(path.parent, "the output", "Then run again."):
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


def check_adapter_folder(path: Path) -> None:
    """Refuse what is no folder of an adapter, before anything is imported that could read it.

    Raises:
        ConfigurationError: there is no such folder, or it lacks a file.
    """
    if not path.is_dir():
        raise ConfigurationError(f"there is no such folder: {path}; give the one that finetune wrote")
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (path / name).is_file():
            raise ConfigurationError(f"{path} holds no adapter: there is no {name} in it")


def copy_file(source: Path, copy: Path, most: int, within: Path | None = None) -> str:
    """Copy a file, which may be exchanged for another, or for a link, at any time.

    Args:
        most: bytes of it.
        within: the folder that it must lie below; None: it may lie anywhere.

    Returns:
        The digest of its content.

    Raises:
        ConfigurationError: it is larger, no file, elsewhere, or cannot be read.
        OSError: the copy cannot be written.
    """
    digest = hashlib.sha256()
    with copy.open("wb") as written:
        for block in read_blocks(source, most, within):
            written.write(block)
            digest.update(block)
    return digest.hexdigest()


def read_blocks(source: Path, most: int, within: Path | None = None) -> Iterator[bytes]:
    """The content of a file that may be anybody's; arguments and errors: see ``copy_file``."""
    try:
        opened = os.open(source, os.O_RDONLY | os.O_NONBLOCK)  # which does not wait for the writer of a pipe
    except OSError as error:
        raise ConfigurationError(f"cannot read {source}: {error.strerror}") from error
    with open(opened, "rb") as file:
        if within is not None:
            check_below(
                within, source, Path(os.readlink(f"/proc/self/fd/{opened}"))
            )  # the gateway is on Linux
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise ConfigurationError(f"{source} is no file")
        left = most + 1 if os.fstat(opened).st_size <= most else 0
        while left and (block := file.read(min(left, _BLOCK_BYTES))):
            left -= len(block)
            if left:
                yield block
    if not left:
        raise ConfigurationError(f"{source} has more than {most} bytes, the most that an adapter's has")


def check_below(within: Path, called: Path, lies: Path) -> None:
    """Refuse what lies elsewhere, to which links may lead.

    Raises:
        ConfigurationError: it is not below the folder.
    """
    if not lies.is_relative_to(within.resolve()):
        raise ConfigurationError(
            f"adapters are taken from below {within} alone, and {called} leads out of it: put a copy there"
        )


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary sibling to write into, which takes the name ``path`` if the block ends without an error.

    So whoever finds ``path`` finds all of it. Without an end (a crash) a hidden sibling is left.
    """
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    try:
        yield temporary
        temporary.rename(path)  # replaces an empty folder, refuses one that is not
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


class TrainingCheckpoints:
    """The folder beside an output where a training leaves what it needs to go on after a crash.

    Args:
        output: of the training; the folder is its sibling ``NAME.checkpoints``.
        settings: what must be the same when a training is resumed.
        parts: pattern of the names of other files that are kept for a resumed training.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any], *, parts: str = "") -> None:
        self.folder = output.with_name(output.name + ".checkpoints")
        self._settings_file = self.folder / "settings.json"
        self._settings, self._parts = dict(settings), parts
        self._resumed = False

    def check(self, *, resume: bool) -> None:
        """Whether a training can begin, or go on, so far as that shows without its settings.

        Raises:
            ConfigurationError: an interrupted training would be overwritten, or there is none to resume; or
                the folder is not this user's alone.
        """
        check_tree(self.folder)
        if not resume and (self._whole() or (self._parts and any(self.folder.glob(self._parts)))):
            raise ConfigurationError(
                "{} holds an interrupted training; go on with {resume}, or remove it first",
                str(self.folder),
                resume=True,
            )
        if resume and not self._settings_file.is_file():
            raise ConfigurationError(
                "there is nothing to resume: no {}; leave out {resume}", str(self._settings_file)
            )

    def kept(self, name: str) -> Any:
        """A setting of the interrupted training; None: there is none."""
        return (_read_json(self._settings_file) or {}).get(name)

    def keep(self, name: str, value: Any) -> None:
        """Note a figure that a resumed training need not measure again."""
        kept = {**(_read_json(self._settings_file) or {}), name: value}
        with disk_errors(self.folder, "a figure", "Then run again."):
            self._write(kept)

    def _write(self, settings: Mapping[str, Any]) -> None:
        """As a whole or not at all: this process may be killed meanwhile."""
        partial = self._settings_file.with_suffix(".partial")
        partial.write_text(json.dumps(settings, indent=1))
        partial.replace(self._settings_file)

    def begin(self, *, resume: bool) -> Path | None:
        """Make the folder, or look into the one of an interrupted training.

        Returns:
            The checkpoint to resume from; None to start at the beginning.

        Raises:
            ConfigurationError: an interrupted training would be overwritten, or there is none to
                resume, or it had other settings.
        """
        self.check(resume=resume)
        self._resumed = resume
        if not resume:
            with disk_errors(self.folder, "checkpoints", "Then run again."):
                self.folder.mkdir(mode=0o700, exist_ok=True)
                check_tree(self.folder)  # somebody else may have made it just now
                self._write(self._settings)
            return None
        before = _read_json(self._settings_file)
        if before is None:
            raise ConfigurationError(
                "{} cannot be read; remove {} and leave out {resume}",
                *(str(self._settings_file), str(self.folder)),
            )
        other = [name for name, value in self._settings.items() if before.get(name) != value]
        if other:
            changes = (f"{name} was {before.get(name)}, now {self._settings[name]}" for name in other)
            raise ConfigurationError(
                "{resume} needs the options of the interrupted training; these differ: {}",
                ", ".join(changes),
                resume=True,
            )
        return self._newest()

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """Note with whatever ends the training inside how far it came, where that is, and how to go on.

        Not with an error that a file or an option is to blame for: it would end the same command again.
        """
        try:
            yield
        except ConfigurationError:
            raise
        except BaseException as error:
            if newest := self._newest():
                how = Message("run the same training again")
                if not self._resumed:
                    how = Message("run the same training with {resume}", resume=True)
                what = "step {} is kept in {}; to go on from it, {}"
                error.add_note(Message(what, _step(newest), str(self.folder), how))
            raise

    def _newest(self) -> Path | None:
        return max(self._whole(), key=_step, default=None)

    def _whole(self) -> list[Path]:
        """The checkpoints that are complete: the Trainer writes its state last."""
        found = [path for path in self.folder.glob("checkpoint-*") if re.fullmatch("[0-9]+", path.name[11:])]
        states = [(path, _read_json(path / "trainer_state.json") or {}) for path in found]
        return [path for path, state in states if state.get("global_step") == _step(path)]

    def remove(self) -> None:
        """The training is complete: its checkpoints are of no more use."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
