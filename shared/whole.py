"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path, mode: int = 0o600) -> Iterator[Path]:
    """A temporary sibling to write into, which takes the name ``path`` if the block ends without an error.

    Others read ``path`` as it was, or all of the new file. Only this user can read the sibling, which stays,
    hidden, if the process is killed.

    Args:
        path: in a folder that exists; a link there is replaced, and not followed.
        mode: of the file.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.partial-", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """The same with a folder; ``path`` must not exist, or be an empty folder."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    try:
        yield temporary
        temporary.rename(path)  # replaces an empty folder, refuses one that is not
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
