"""Folders on disk that are either whole or absent, and disk errors with a remedy."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from shared.errors import ConfigurationError, OptionText, StorageError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's
TENSORS_HEADER_BYTES = 64 << 10  # of a file of few tensors, beside its numbers
_BLOCK_BYTES = 1 << 20
# What reading a file of tensors raises, whoever wrote it: KeyError for types that torch lacks, ValueError,
# TypeError and RuntimeError for shapes that are too large, although no number is in them.
UNREADABLE_TENSORS = (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError)
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


def files_version(folder: Path, names: Iterable[str]) -> object:
    """What changes when one of these files does, without reading them; one that is missing counts, too."""
    versions = []
    for name in names:
        try:
            state = (folder / name).stat()
            versions.append((state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino))
        except OSError:
            versions.append((0, 0, 0, 0))
    return versions


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
    if (path / "draft.json").is_file():
        raise ConfigurationError(
            OptionText("{} holds a draft and no adapter: give it with {draft}", str(path))
        )
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (path / name).is_file():
            raise ConfigurationError(f"{path} holds no adapter: there is no {name} in it")


def copy_file(source: Path, copy: Path, max_bytes: int, within: Path | None = None) -> str:
    """Copy a file, which may be exchanged for another, or for a link, at any time.

    Args:
        max_bytes: bytes of it.
        within: the folder that it must lie below; None: it may lie anywhere.

    Returns:
        The digest of its content.

    Raises:
        ConfigurationError: it is larger, no file, elsewhere, or cannot be read.
        OSError: the copy cannot be written.
    """
    digest = hashlib.sha256()
    with copy.open("wb") as written:
        for block in read_blocks(source, max_bytes, within):
            written.write(block)
            digest.update(block)
    return digest.hexdigest()


def read_blocks(source: Path, max_bytes: int, within: Path | None = None) -> Iterator[bytes]:
    """The content of a file that may be anybody's; arguments and errors: see ``copy_file``."""
    try:
        opened = os.open(source, os.O_RDONLY | os.O_NONBLOCK)  # which does not wait for the writer of a pipe
    except OSError as error:
        raise ConfigurationError(f"cannot read {source}: {error.strerror}") from error
    with open(opened, "rb") as file:
        if within is not None:
            # The gateway is on Linux.
            check_below(within, source, Path(os.readlink(f"/proc/self/fd/{opened}")))
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise ConfigurationError(f"{source} is no file")
        left = max_bytes + 1 if os.fstat(opened).st_size <= max_bytes else 0
        while left and (block := file.read(min(left, _BLOCK_BYTES))):
            left -= len(block)
            if left:
                yield block
    if not left:
        raise ConfigurationError(f"{source} has more than {max_bytes} bytes, the most that an adapter's has")


def check_below(within: Path, called: Path, lies: Path) -> None:
    """Refuse what lies elsewhere, to which links may lead.

    Raises:
        ConfigurationError: it is not below the folder.
    """
    if not lies.is_relative_to(within.resolve()):
        raise ConfigurationError(
            f"adapters are taken from below {within} alone, and {called} leads out of it: put a copy there"
        )
