"""The folder in which targets that read files have their input."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path


@cache
def folder() -> Path:
    """One of this process, which is removed at its end."""
    memory = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(prefix="fuzzing-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def written(name: str, data: bytes) -> Path:
    """A file with this content, in place of an earlier one."""
    path = folder() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path
