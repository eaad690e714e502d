"""Small files that are read whole."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from shared.encoded import read_within
from shared.errors import ConfigurationError


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ConfigurationError, match="is no file"):
            read_within(pipe, 10)
        with pytest.raises(IsADirectoryError):
            read_within(tmp_path, 10)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_pipe_that_a_user_names_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"content",))
    writer.start()
    assert read_within(pipe, 10, pipes=True) == b"content"
    writer.join()
    (tmp_path / "large").write_bytes(bytes(11))
    with pytest.raises(ConfigurationError, match="larger than 10 bytes"):
        read_within(tmp_path / "large", 10)
