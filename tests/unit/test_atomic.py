"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from shared.atomic import write_new


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_replaces_none(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a file system that has no hard links, such as that of a memory stick."""

    def refused(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(os, "link", refused)
    path = tmp_path / "file"
    write_new(path, b"first")
    with pytest.raises(FileExistsError):
        write_new(path, b"second")
    assert path.read_bytes() == b"first"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.stat().st_mode & 0o777 == 0o600
