"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # what file systems without hard links say


def write_atomically(
    path: Path, data: bytes, mode: int = 0o600, owner: tuple[int, int] | None = None
) -> None:
    """Write a file that others read as it was, or as it is now, never in between.

    The folder may belong to another user, who could put a link in the place of any file there. So everything
    goes through the open file, and nothing through its name.

    Args:
        path: in a folder that exists; a link there is replaced, and not followed.
        data: all of the file.
        mode: of the file. Until the file is complete, only this user can read it.
        owner: user and group of the file, if they are not this process's.

    Raises:
        OSError: it cannot be written, or given away; ``path`` is as it was.
    """
    with _sibling(path) as (descriptor, _), open(descriptor, "wb", closefd=False) as file:
        if owner is not None:
            os.fchown(descriptor, *owner)
        file.write(data)
        file.flush()
        os.fchmod(descriptor, mode)


def write_new(path: Path, data: bytes) -> None:
    """Write a file that is not there yet; others read it complete, or not at all. Only this user can read it.

    Raises:
        FileExistsError: there is a file, which is as it was.
        OSError: it cannot be written.
    """
    with _sibling(path, new=True) as (descriptor, _), open(descriptor, "wb", closefd=False) as file:
        file.write(data)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary sibling for a library to write, which takes the name ``path`` at the block's end.

    After an error, ``path`` is as it was. Only for folders of this user, because the library opens the
    sibling by its name. Only this user can read the file. If the process is killed, the sibling stays,
    hidden.

    Args:
        path: in a folder that exists; a link there is replaced, and not followed.
    """
    with _sibling(path) as (_, temporary):
        yield temporary


@contextmanager
def _sibling(path: Path, *, new: bool = False) -> Iterator[tuple[int, Path]]:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.partial-", dir=path.parent)
    temporary = Path(name)
    try:
        yield descriptor, temporary
        if new:
            _link_new(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)


def _link_new(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # nobody else's from here on
        os.replace(temporary, path)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """The same with a folder; ``path`` must not exist, or be an empty folder."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    try:
        yield temporary
        temporary.rename(path)  # replaces an empty folder, refuses one that is not
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
